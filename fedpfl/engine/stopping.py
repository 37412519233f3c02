"""Early stopping of single clients, with any method (Niu, Dong and Qin, AAAI 2025, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.calls import Participation
from fedpfl.engine.keys import generator
from fedpfl.engine.state import State
from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import Between


@dataclass(frozen=True)
class Stopping(Checked):
    """Let a client stop whose loss L = lam L_train + (1 - lam) L_test has risen since its last
    participation.

    Its last upload still counts. L_train is the mean over the samples of all epochs while training;
    L_test that of the trained model on held-out samples, in evaluation mode: the test split, as in
    the paper, unless the run holds samples out (`validation`). A client without such samples has
    L_train alone. The run ends when nobody is left. Each participation sends one bit more.
    """

    early: bool = False
    lam: Annotated[float, Between(0, 1)] = 0.7


def update_stopping(
    stopping: Stopping,
    state: State,
    federation: Federation,
    clients: list[int],
    part: Participation,
) -> dict[str, Tensor]:
    """Return `State.stopping` after a turn of `clients`."""
    last, stopped = (state.stopping[name].clone() for name in ("last", "stopped"))
    loss = stopping.lam * part.sample_loss + (1 - stopping.lam) * part.validation_loss
    if stopping.lam:
        judged = torch.tensor(
            [len(federation.validation_or_test[client]) > 0 for client in clients],
            device=loss.device,
        )
        loss = torch.where(judged, loss, part.sample_loss)
    stopped[clients] = loss > last[clients]
    last[clients] = loss
    return {"last": last, "stopped": stopped}


def pick_cohort(state: State, planned: list[int], seed: int) -> list[int]:
    """Return the next round's cohort: `planned`, or once clients have stopped, as many of those who
    have not.

    With fewer left it is all of them; with none it is empty, and the run is over.
    """
    if not state.stopping or not bool(state.stopping["stopped"].any()):
        return planned
    left = (~state.stopping["stopped"]).nonzero().flatten().cpu()
    order = torch.randperm(len(left), generator=generator(seed, "cohort", state.round + 1))
    return sorted(left[order[: len(planned)]].tolist())
