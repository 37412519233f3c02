"""One round: State to State."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.data.federation import Federation
from fedpfl.engine.backend import Backend, Participation, Tally
from fedpfl.engine.keys import Draws
from fedpfl.engine.sgd import Local
from fedpfl.engine.state import State, begin
from fedpfl.methods import Method
from fedpfl.tree import Tree

__all__ = ["Outcome", "State", "begin", "play"]


@dataclass(frozen=True)
class Outcome:
    """What a round tells: the cohort judged before and after local training, training losses, traffic, extras.

    finite: whether a client's losses and everything it brought back are finite, `[cohort]`.
    values_down, values_up, bits_down, bits_up: sums over the cohort. loss: `[cohort]`. measures: means over it.
    """

    before: Tally
    after: Tally
    loss: Tensor
    finite: Tensor
    values_down: int
    values_up: int
    bits_down: int
    bits_up: int
    measures: dict[str, float]


def play(
    backend: Backend, method: Method, federation: Federation, state: State, cohort: list[int], local: Local, seed: int
) -> tuple[State, Outcome]:
    """Play the next round with `cohort`. The given state is used up: its clients' rows are overwritten in place."""
    cohort = sorted(cohort)
    draws = Draws(seed, "train", state.round + 1)
    part = backend.participate(method, federation, state, cohort, local, draws)
    rows = torch.tensor(cohort, device=federation.x.device)
    samples = federation.train_sizes[cohort].double()
    weight = (samples / samples.sum()).float().to(federation.x.device)
    server = method.merge(state.server, part.uploads, weight)
    mine = method.settle(server, part.uploads, part.mine) if method.settle else part.mine
    tree.put_(state.clients, rows, mine)
    for role, buffers in state.client_buffers.items():
        tree.put_(buffers, rows, part.buffers[role])
    shared = {role: _merge_buffers(part.buffers[role], weight) for role in state.server_buffers}
    extra = sum(
        leaf.numel() for buffers in shared.values() for leaf in tree.leaves(buffers) if leaf.is_floating_point()
    )
    extra *= len(cohort)  # averaged statistics travel both ways
    outcome = Outcome(
        before=part.before,
        after=part.after,
        loss=part.loss,
        finite=_finite(part),
        values_down=int(part.down.values.sum()) + extra,
        values_up=int(part.up.values.sum()) + extra,
        bits_down=int(part.down.bits.sum()) + 32 * extra,
        bits_up=int(part.up.bits.sum()) + 32 * extra,
        measures={name: float(value.double().mean()) for name, value in part.measures.items()},
    )
    return replace(state, round=state.round + 1, server=server, server_buffers=shared), outcome


def _finite(part: Participation) -> Tensor:
    """Which clients brought back numbers only; a sum shows every infinity and nan in one pass."""
    finite = part.loss.isfinite()
    for leaf in tree.leaves({"uploads": part.uploads, "mine": part.mine}):
        if leaf.is_floating_point():
            finite &= leaf.flatten(1).sum(1).isfinite() if leaf.dim() > 1 else leaf.isfinite()
    return finite


def _merge_buffers(stacked: Tree, weight: Tensor) -> Tree:
    """Floating statistics are averaged, counters take the largest."""
    return tree.map(lambda leaf: tree.mean(leaf, weight) if leaf.is_floating_point() else leaf.amax(0), stacked)
