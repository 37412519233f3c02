"""FedSelect's tables (CVPR 2024)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from fedpfl.papers.plan import Line, Place, Plan, Rule, tuned, untrained
from fedpfl.report.names import METHODS


def _dealt(dataset: str, short: str, clients: int, classes: int, **setup: Any) -> Place:
    where = {"partition.name": "shuffled_shards"}
    setting = f"{clients} clients, {classes} classes each"
    setup |= {"clients": clients, "partition.classes_per_client": classes}
    return Place(dataset, setting, where, experiment=f"fedselect/{short}", setup=setup)


_PLACES = (
    _dealt("cifar10", "cifar10", 10, 2, **{"partition.samples_per_client": 100}),
    _dealt("cifar10_c", "cifar10c", 10, 2, **{"partition.samples_per_client": 100}),
    _dealt("mini_imagenet", "mini_imagenet", 20, 10),
    Place(
        "office_home",
        "4 clients = 4 domains",
        {"partition.name": "groups"},
        experiment="fedselect/office_home",
        setup={"clients": 4, "rounds": 30},
    ),
)
# As one experiment of all four data sets has them.
_TOGETHER = tuple(dataclasses.replace(place, words={"paper": place.experiment.replace("/", "_")}) for place in _PLACES)


# The limits that Table 1's numbers are of.
_BEST = {"cifar10_c": 0.5, "mini_imagenet": 0.5, "": 0.3}
_MOST = {"method.personalise": "most", "method.layer": (None,)}


def _limits(*alphas: float) -> tuple[Line, ...]:
    return tuple(
        Line(
            f"FedSelect (alpha={alpha:.2f})",
            "fedselect",
            "fedselect/alpha",
            where={"method.alpha": alpha},
            usual=_MOST,
        )
        for alpha in alphas
    )


_plan = partial(
    Plan,
    metric="personalized accuracy, final round (%)",
    rule=Rule("cohort_after", published=True),
    about="the paper judges the last round's models right after local training, here over all test samples of the "
    "clients, FedAvg's before it and FedAvg+FT's and FedBABU's after fine-tuning",
    setup={"rounds": 200, "participation": 1.0, "local.epochs": 3, "model.name": "resnet18"},
)
TABLES = {
    "table1": _plan(
        "FedSelect's Table 1",
        "FedSelect (CVPR 2024) Table 1",
        (
            Line("Local-Only", "local_only"),
            Line("FedAvg", "fedavg", measure=untrained),
            Line("FedAvg+FT", "fedavg", measure=tuned),
            *(Line(METHODS[name], name) for name in ("ditto", "fedpac", "fedrep", "fedper")),
            Line("FedBABU", "fedbabu", measure=tuned),
            Line("LG-FedAvg", "lg_fedavg"),
            Line("FedSelect", "fedselect", where={"method.alpha": _BEST}, usual=_MOST),
        ),
        _PLACES,
    ),
    "table2": _plan(
        "FedSelect's Table 2: the limit of the personal share",
        "FedSelect (CVPR 2024) Table 2",
        _limits(0.05, 0.3, 0.5, 0.8),
        _TOGETHER,
        swept=True,
    ),
    "table3": _plan(
        "FedSelect's Table 3: what becomes personal",
        "FedSelect (CVPR 2024) Table 3",
        (
            Line("Personalize Least", "fedselect", "fedselect/ablation", where={"method.personalise": "least"}),
            *(Line(f"Layer {name}", untold="which layers the paper means is not stated") for name in "ABCD"),
            Line("Random", "fedselect", "fedselect/ablation", where={"method.personalise": "random"}),
            *_limits(0.3, 0.5),
        ),
        _TOGETHER,
    ),
}
