"""Filters of runs."""

from typing import Any

from fedpfl.report.filters import apply_filters
from tests.conftest import read_cases
from tests.data.promises import one_line

CONFIGS: list[dict[str, Any]] = [
    {"method": {"name": "fedavg"}, "local": {"lr": 0.1, "betas": [0.9, 0.999]}, "note": None},
    {"method": {"name": "fedobp", "q": 0.98}, "local": {"lr": 0.01, "optimizer": "adam"}},
    {"method": {"name": "lg_fedavg"}, "local": {"lr": 0.01}, "deep": True},
]
for values, clients in zip(CONFIGS, (5, 5, 10), strict=True):
    values["clients"] = clients
NAMED = [{"method": name} for name in ("FedAvg", "FedOBP", "LG-FedAvg")]


KEPT = """
method=fedobp => 1
method=FedOBP => 1
method=fedobp,fedavg => 01
clients=5 local.lr=0.01 => 1
local.lr=0.10 => 0
local.lr=1e-2 => 12
local.betas=[0.9,0.999] => 012
"""


def test_what_is_let_through() -> None:
    for filters, kept in [("", "012"), *read_cases(KEPT)]:
        found = apply_filters(CONFIGS, filters.split(), NAMED)
        assert "".join(str(place) for place, own in enumerate(found) if own) == kept, filters


REFUSED = """
local.lr.x=1 => local.lr.x: no run here has such a key; did you mean local.lr?
method=fedopb => method=fedopb: no such run here; there are: fedavg, fedobp, lg_fedavg; did you mean fedobp?
clients=10 method=fedobp => no run here is all of clients=10 method=fedobp
"""


def test_what_no_run_is() -> None:
    for filters, message in read_cases(REFUSED):
        words = filters.split()
        assert one_line(lambda words=words: apply_filters(CONFIGS, words, NAMED)) == message
    assert apply_filters([], ["method=fedavg"], []) == []
