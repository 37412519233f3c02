"""What clients' devices would take: time by a stated model (FedSPU's Table 3) and memory (its Figure 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pandas as pd

from fedpfl.report.run import Run

FREEZING = "fedspu"
"""The method whose clients compute the whole network and train a part of it; others compute their part alone."""
COUNTED = ("entries", "values", "operations")
BYTES = 4  # a float32


class Device(NamedTuple):
    """What every client computes by: operations a second, and bits a second each way. The defaults are ours."""

    speed: float = 1e9
    bandwidth: float = 1e7

    def __str__(self) -> str:
        return f"{self.speed:g} operations and {self.bandwidth:g} bits a second"


OURS = Device()


def known(run: Run) -> pd.DataFrame:
    """Return what the sub-model of each width comes to, as recorded, by width; the full network is the last row.

    Empty where it is not recorded, and of FjORD's original, whose clients train several widths.
    """
    widths = run.get("method.widths")
    if not isinstance(widths, list) or run.get("method.ordered"):
        return pd.DataFrame()
    try:
        found = pd.DataFrame(run.summary["devices"], dtype=float).set_index("width")[[*COUNTED]]
    except (LookupError, TypeError, ValueError):
        return pd.DataFrame()
    return found if widths and {1.0, *widths} <= {*found.index} else pd.DataFrame()


def hours(run: Run, device: Device = OURS, transfers: bool = True, until_few: bool = False) -> float:
    """Return the hours that a run's rounds would take on such devices; nan where the run does not tell.

    A round takes as long as its slowest client, on average over cohorts, which are drawn uniformly: of all clients that
    take part, also where some have stopped, since who has is not recorded. A client passes its training samples
    `local.epochs` times forward and backward; each gradient, with respect to inputs and to weights, takes as many
    operations as the forward pass. Not counted: losses on held-out samples, and the one epoch in which Hermes, FedMP
    and PruneFL rank.
    transfers: add the bits of its trained entries down and up. until_few: count the rounds before the first with fewer
    clients than a cohort.
    """
    made, widths, clients = known(run), run.get("method.widths"), run.get("clients")
    if made.empty or run.get("method.assign") != "blocks" or len(run.clients) != clients:
        return math.nan
    samples, seconds = run.participating["train"].tolist(), []
    for client, count in enumerate(samples):
        own = made.loc[widths[client * len(widths) // len(samples)]]
        whole = made.iloc[-1] if run.method_name == FREEZING else own
        passes = 2 * whole["operations"] + own["operations"]
        spent = run.get("local.epochs") * count * passes / device.speed
        seconds.append(spent + transfers * 2 * 8 * BYTES * own["entries"] / device.bandwidth)
    rounds = run.participants[before_few(run)] if until_few else run.participants
    slowest = cache(lambda drawn: expected_maximum(seconds, drawn))
    return math.fsum(slowest(int(drawn)) for drawn in rounds) / 3600


def before_few(run: Run) -> pd.Series:
    """Return which rounds come before the first with fewer clients than a cohort."""
    return (run.participants >= run.cohort).cummin()


def expected_maximum(values: Sequence[float], drawn: int) -> float:
    """Return the mean of the largest of `drawn` of the values, over all ways to draw them without repetition."""
    ways = math.comb(len(values), drawn)
    return math.fsum(value * (math.comb(rank, drawn - 1) / ways) for rank, value in enumerate(sorted(values)))


def memory(run: Run) -> pd.DataFrame:
    """Return the bytes that training takes by width: parameters, gradients and what layers make of a batch.

    Empty where the run does not tell. Layers count that have parameters, each number as 32 bits. FedSPU keeps all
    parameters, the gradients of active ones and at least what active neurons make. Gradients pass on to these through
    frozen neurons, so exact ones need most of what frozen neurons make too: at most all of it.
    """
    made = known(run)
    if made.empty:
        return made
    batch, whole = run.get("local.batch_size"), made.iloc[-1]
    part = made["entries"] + made["entries"]
    kept = whole["entries"] + made["entries"]
    found = {
        "full network (Hermes, FedMP, PruneFL while ranking)": 2 * whole["entries"] + batch * whole["values"],
        "FedSPU, at most": kept + batch * whole["values"],
        "FedSPU, at least": kept + batch * made["values"],
        "sub-model (FjORD, random dropout, others once ranked)": part + batch * made["values"],
    }
    return BYTES * pd.DataFrame(found, index=made.index)
