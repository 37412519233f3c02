"""Draw docs/figures/privacy.png, what privacy costs thirty sites, from docs/results/.

python scripts/privacy_figure.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd

DOCS = Path(__file__).parents[1] / "docs"
EPSILONS = ("2", "8", "none")
BARS = {  # method and column, by what the axis says
    "FedAvg": ("fedavg", "accuracy"),
    "FedAvg+FT": ("fedavg", "ft_accuracy"),
    "FedPer": ("fedper", "accuracy"),
    "Ditto": ("ditto", "accuracy"),
}


def main() -> None:
    """Draw accuracy by epsilon, a panel for each kind of privacy."""
    rows = pd.read_csv(DOCS / "results" / "privacy_fmnist.csv", keep_default_na=False)
    figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
    for axis, kind in zip(axes, ("sample", "client"), strict=True):
        for number, epsilon in enumerate(EPSILONS):
            privacy = "none" if epsilon == "none" else kind
            chosen = rows[(rows["privacy"] == privacy) & rows["epsilon"].isin([epsilon, ""])]
            by_method = chosen.set_index("method")
            heights = [float(by_method.loc[name, column]) for name, column in BARS.values()]
            places = [place + 0.27 * (number - 1) for place in range(len(BARS))]
            label = "without privacy" if epsilon == "none" else f"epsilon {epsilon}"
            axis.bar(places, heights, width=0.25, label=label)
        axis.set_xticks(range(len(BARS)), list(BARS))
        axis.set_title(f"privacy={kind}")
        axis.set_ylim(0, 100)
    axes[0].set_ylabel("mean accuracy over clients (%)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(DOCS / "figures" / "privacy.png", dpi=120)


if __name__ == "__main__":
    main()
