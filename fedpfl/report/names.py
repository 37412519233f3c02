"""Titles of methods and data sets: the key `title` of their YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fedpfl.ground.records import Record

_CONF = Path(__file__).parents[1] / "conf"
# The C loader reads a config some ten times faster; a thousand runs are a common sweep.
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> Record:
    """Read a file of the configuration."""
    return dict(yaml.load(path.read_text(encoding="utf-8"), YAML_LOADER) or {})


def read_titles(group: str, order: str = "") -> dict[str, str]:
    """Return titles by names of the configuration, such as LG-FedAvg of `lg_fedavg`.

    Args:
        group: the configuration group.
        order: names in the order of tables. Names that it lacks stand before its last one, by the
            alphabet.
    """
    titles = {}
    for file in sorted((_CONF / group).glob("*.yaml")):
        values = read_yaml(file)
        if "title" in values:
            titles[file.stem] = str(values["title"])
    ordered_names = order.split()
    unordered_names = [name for name in titles if name not in ordered_names]
    # A method that the order does not know stands before the last, the one under study.
    all_names = (*ordered_names[:-1], *unordered_names, *ordered_names[-1:])
    return {name: titles[name] for name in all_names if name in titles}


# The order of the paper's tables, the method under study last.
METHOD_TITLES = read_titles(
    "method",
    "local_only centralized fedavg fedavgm fedadam fedyogi fedprox scaffold moon feddyn fedgen fedper apfl "
    "lg_fedavg fedrep fedbabu fedbn fedrod feddbe ditto pfedme per_fedavg pfedhn knn_per ifca cfl "
    "fedamp fedfomo apple fedproto fedpac gpfl fedas pfedfda flute feddpa floco floco_plus fedala "
    "fedavg_by_kind fd fml fedkd fedgh fedtgp fedmrl "
    "fedcp fedselect pspfl seqfededt random_dropout fjord heterofl fedrolex flexfl hermes fedmp "
    "prunefl fedspu pfedsd fedphp fedcac fedpurin subflot ffa_lora fedsa_lora sdflora fedalt "
    "hetlora flexlora raflora flora fedex_lora "
    "fedobp_adaptive fedobp",
)
DATASET_TITLES = read_titles("dataset")
