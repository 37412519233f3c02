"""Statistics and a picture (clients x classes) of a partition.

    python -m benchmarks partition dataset=fmnist partition.alpha=0.5 clients=50

Takes the overrides of `python -m fedpfl.train`; nothing is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from fedpfl.config.messages import describe_choice
from fedpfl.record.picture import draw_partition


def main(arguments: Sequence[str]) -> None:
    """Print sizes and classes per client, and draw the picture."""
    parser = harness.make_parser("partition", __doc__)
    parser.add_argument("--picture", type=Path, default=Path("outputs/partition.png"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    run = harness.build_run(options.overrides)
    federation = run.federation
    counts = federation.label_counts()
    partition = describe_choice(run.config["partition"])
    title = f"{federation.name}, {federation.clients} clients, {partition}"
    print(title)
    statistics = {
        "samples": counts.sum(1),
        "training samples": federation.train_sizes,
        "test samples": federation.test_sizes,
        "classes": (counts > 0).sum(1),
    }
    for label, values in statistics.items():
        median = float(values.double().median())
        smallest, largest = int(values.min()), int(values.max())
        print(f"{label:17} min {smallest:>6,}  median {median:>8,.0f}  max {largest:>6,}")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw_partition(counts.numpy(), options.picture, title)
    print(f"picture: {options.picture}")
