"""Statistics and a picture (clients x classes) of a partition.

    python scripts/partition.py dataset=fmnist partition.alpha=0.5 clients=50
    [picture=outputs/partition.png]

Takes the overrides of `python -m fedpfl.train`; nothing is trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config.messages import describe_choice, format_error
from fedpfl.config.plan import build_run, check_config, register_resolver
from fedpfl.ground.errors import FedpflError
from fedpfl.record.picture import draw_partition
from fedpfl.train import CONF


def main(arguments: list[str]) -> None:
    """Print sizes and classes per client, write the picture."""
    picture = Path("outputs/partition.png")
    overrides = []
    for argument in arguments:
        if argument.startswith("picture="):
            picture = Path(argument.removeprefix("picture="))
        else:
            overrides.append(argument)
    register_resolver()
    with initialize_config_dir(CONF, version_base="1.3"):
        run = build_run(check_config(compose("train", overrides)))
    counts = run.federation.label_counts()
    sizes, classes = counts.sum(1), (counts > 0).sum(1)
    name = f"{run.federation.name}, {run.federation.clients} clients, {describe_choice(run.config['partition'])}"
    print(name)
    for label, values in (
        ("samples", sizes),
        ("training samples", run.federation.train_sizes),
        ("test samples", run.federation.test_sizes),
        ("classes", classes),
    ):
        middle = float(values.double().median())
        print(
            f"{label:17} min {int(values.min()):>6,}  median {middle:>8,.0f}  max {int(values.max()):>6,}"
        )
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_partition(counts.numpy(), picture, name)
    print(f"picture: {picture}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (FedpflError, HydraException, OmegaConfBaseException) as error:
        sys.exit(f"fedpfl: {format_error(error)}")
