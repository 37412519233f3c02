"""One round: State to State."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

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
    gathering = Sent(0, 0, 0, 0)
    if method.gathers(state.round):
        state, gathering = _gather(backend, method, federation, state, local, seed)
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
    sent = Sent(*(a + b for a, b in zip(_sent(part, state, len(cohort)), gathering, strict=True)))
    outcome = Outcome(
        before=part.before,
        after=part.after,
        loss=part.loss,
        finite=_finite(part),
        **sent._asdict(),
        measures={name: float(value.double().mean()) for name, value in part.measures.items()},
    )
    return replace(state, round=state.round + 1, server=server, server_buffers=shared), outcome


class Sent(NamedTuple):
    """What travelled, summed over clients."""

    values_down: int
    values_up: int
    bits_down: int
    bits_up: int


def _sent(part: Participation, state: State, clients: int) -> Sent:
    extra = sum(leaf.numel() for leaf in tree.leaves(state.server_buffers) if leaf.is_floating_point())
    extra *= clients  # averaged statistics travel both ways
    return Sent(
        int(part.down.values.sum()) + extra,
        int(part.up.values.sum()) + extra,
        int(part.down.bits.sum()) + 32 * extra,
        int(part.up.bits.sum()) + 32 * extra,
    )


def _gather(
    backend: Backend, method: Method, federation: Federation, state: State, local: Local, seed: int
) -> tuple[State, Sent]:
    """Have all clients train from the current state, for `Method.gather` alone."""
    assert method.gather is not None
    everyone = list(range(federation.clients))
    draws = Draws(seed, "gather", state.round + 1)
    part = backend.participate(method, federation, state, everyone, local, draws)
    server, mine = method.gather(state.server, part.uploads, state.clients)
    tree.put_(state.clients, slice(None), mine)
    return replace(state, server=server), _sent(part, state, len(everyone))


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
