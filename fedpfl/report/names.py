"""Names for people of methods and data sets: the key `title` of their YAML files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

_CONF = Path(__file__).parents[1] / "conf"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Titles(Mapping[str, str]):
    """Map names of the configuration to titles, such as `lg_fedavg` to LG-FedAvg; files are read on first use.

    order: names in the order of tables. Those that it lacks stand before its last one, by the alphabet.
    """

    def __init__(self, group: str, order: str = ""):
        self._group, self._order = group, order.split()

    @cached_property
    def _titles(self) -> dict[str, str]:
        files = sorted((_CONF / self._group).glob("*.yaml"))
        values = {file.stem: yaml.load(file.read_text(encoding="utf-8"), _LOADER) for file in files}
        titles = {name: str(held["title"]) for name, held in values.items() if "title" in held}
        others = [name for name in titles if name not in self._order]
        return {name: titles[name] for name in (*self._order[:-1], *others, *self._order[-1:]) if name in titles}

    def __getitem__(self, name: str) -> str:
        return self._titles[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._titles)

    def __len__(self) -> int:
        return len(self._titles)


# The order of the paper's tables, the method under study last.
METHODS = Titles(
    "method",
    "local_only fedavg fedavgm fedadam fedyogi fedprox scaffold fedper apfl lg_fedavg fedrep fedbabu fedbn fedrod "
    "ditto pfedme per_fedavg fedpac pfedfda flute feddpa floco floco_plus fedala fedselect pspfl seqfededt "
    "random_dropout fjord heterofl fedrolex flexfl hermes fedmp prunefl fedspu pfedsd fedcac fedpurin subflot "
    "fedobp_adaptive fedobp",
)
DATASETS = Titles("dataset")
