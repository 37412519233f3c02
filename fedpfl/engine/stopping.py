"""Early stopping of single clients, with any method (Niu, Dong and Qin, AAAI 2025, Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.calls import Participation
from fedpfl.engine.keys import generator
from fedpfl.engine.state import State
from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import Proportion


@dataclass(frozen=True)
class Stopping(Checked):
    """Stop a client if its loss has risen since its last participation.

    The loss is L = lam L_train + (1 - lam) L_test. L_train is the mean over the samples of all
    epochs while training. L_test is that of the trained model on the test split in evaluation mode,
    as in the paper, or on the validation split if the run has one. A client without such samples
    has L_train alone. Its last upload still counts, and each participation sends one bit more. The
    run ends with its last client.
    """

    early: bool = False
    lam: Proportion = 0.7


def update_stopping(
    stopping: Stopping,
    state: State,
    federation: Federation,
    clients: list[int],
    participation: Participation,
) -> dict[str, Tensor]:
    """Return `State.stopping` after the participation of some clients."""
    last = state.stopping["last"].clone()
    stopped = state.stopping["stopped"].clone()
    evaluation_loss = participation.validation_loss
    loss = stopping.lam * participation.sample_loss + (1 - stopping.lam) * evaluation_loss
    # With lam 0 a client without test samples has a loss of 0 and never stops.
    if stopping.lam:
        sample_counts = [len(federation.validation_or_test[client]) for client in clients]
        has_samples = torch.tensor([count > 0 for count in sample_counts], device=loss.device)
        loss = torch.where(has_samples, loss, participation.sample_loss)
    stopped[clients] = loss > last[clients]
    last[clients] = loss
    return {"last": last, "stopped": stopped}


def pick_cohort(state: State, planned: list[int], seed: int) -> list[int]:
    """Return the next cohort: `planned`, or once clients have stopped, as many that have not.

    With fewer left it is all of them; with none it is empty, and the run is over.
    """
    if not state.stopping or not bool(state.stopping["stopped"].any()):
        return planned
    active = (~state.stopping["stopped"]).nonzero().flatten().cpu()
    order = torch.randperm(
        len(active),
        generator=generator(seed, "cohort", state.round + 1),
    )
    return sorted(active[order[: len(planned)]].tolist())
