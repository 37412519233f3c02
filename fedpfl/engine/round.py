"""One round: State to State."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.data.federation import Federation
from fedpfl.engine import stopping as early
from fedpfl.engine.backend import Backend, Counts, Participation
from fedpfl.engine.keys import Draws, generator
from fedpfl.engine.sgd import Local
from fedpfl.engine.state import State
from fedpfl.engine.stopping import Stopping
from fedpfl.errors import FedpflError
from fedpfl.methods import Method
from fedpfl.tree import Tree


class Sent(NamedTuple):
    """Count what travelled, summed over clients."""

    values_down: int = 0
    values_up: int = 0
    bits_down: int = 0
    bits_up: int = 0


@dataclass(frozen=True)
class Outcome:
    """Tell what happened in a round: the cohort evaluated before and after local training, losses, traffic, metrics.

    finite: whether a client's losses and everything it brought back are finite, `[cohort]`.
    sound: whether all of the state is finite that the round has changed.
    loss: `[cohort]`. metrics: means over the cohort. sent: of the whole round.
    """

    before: Counts
    after: Counts
    loss: Tensor
    finite: Tensor
    sound: bool
    sent: Sent
    metrics: dict[str, float]


def play(
    backend: Backend,
    method: Method,
    federation: Federation,
    state: State,
    cohort: list[int],
    local: Local,
    seed: int,
    stopping: Stopping | None = None,
) -> tuple[State, Outcome]:
    """Play the next round with `cohort`. The given state is used up: its clients' rows are overwritten in place."""
    number, cohort, device = state.round + 1, sorted(cohort), federation.x.device
    stopping = stopping if state.stopping else None
    sent, parts, order = Sent(), [], []
    for turn in method.turns(state.round, cohort, federation.clients, generator(seed, "turns", number)):
        clients, rows = turn.clients, torch.tensor(turn.clients, device=device)
        draws = Draws(seed, "gather" if turn.survey else "train", number)
        stops = stopping is not None and not turn.survey
        part = backend.participate(method, federation, state, clients, local, draws, stops)
        sent = Sent(*map(sum, zip(sent, _sent(part, state, len(clients), stops), strict=True)))

        if turn.survey:
            server, own = turn.survey(state.server, part.uploads, state.client(rows, device))
        else:
            samples = federation.train_sizes[clients].double()
            weight = (samples / samples.sum()).float().to(device)
            server, own = method.aggregate(state.server, part.uploads, part.clients, weight)
        _keep_form(method, "server", server, state.server)
        _keep_form(method, "client", tree.take(own, 0), tree.take(state.clients, 0))
        tree.put_(state.clients, rows, own)
        state = replace(state, server=server)
        if turn.survey:
            continue

        for role, buffers in state.client_buffers.items():
            tree.put_(buffers, rows, part.buffers[role])
        shared = {
            role: _mean_buffers(old, part.buffers[role], part.updated.get(role), weight)
            for role, old in state.server_buffers.items()
        }
        state = replace(state, server_buffers=shared)
        if stopping:
            state = replace(state, stopping=early.after(stopping, state, rows, part))
        parts.append({**part._asdict(), "finite": _finite(part)})
        order += clients

    places = torch.tensor(order).argsort()
    told = [{name: part[name] for name in ("before", "after", "loss", "finite", "metrics")} for part in parts]
    whole = tree.map(lambda *leaves: torch.cat(leaves)[places.to(leaves[0].device)], *told)
    metrics = {name: float(value.double().mean()) for name, value in whole.pop("metrics").items()}
    sound = _all_finite([state.server, state.server_buffers, state.client(torch.tensor(cohort), device)])
    return replace(state, round=number), Outcome(**whole, sound=sound, sent=sent, metrics=metrics)


def _sent(part: Participation, state: State, clients: int, stopping: bool) -> Sent:
    extra = 0  # averaged statistics travel both ways
    for role, buffers in state.server_buffers.items():
        moved = part.updated.get(role) or tree.map(lambda leaf: torch.ones(clients, *leaf.shape), buffers)
        pairs = zip(tree.leaves(buffers), tree.leaves(moved), strict=True)
        extra += sum(int(flags.sum()) for leaf, flags in pairs if leaf.is_floating_point())
    return Sent(
        int(part.down.values.sum()) + extra,
        int(part.up.values.sum()) + extra,
        int(part.down.bits.sum()) + 32 * extra,
        int(part.up.bits.sum()) + 32 * extra + clients * stopping,
    )


def _mean_buffers(old: Tree, stacked: Tree, updated: Tree | None, weight: Tensor) -> Tree:
    """Average floating statistics over those who moved them; of counters take the largest."""

    def mean(before: Tensor, leaf: Tensor, flags: Tensor) -> Tensor:
        return tree.masked_mean(before, leaf, flags, weight) if leaf.is_floating_point() else leaf.amax(0)

    return tree.map(mean, old, stacked, updated or tree.full_like(stacked, True))


def _keep_form(method: Method, whose: str, new: Tree, old: Tree) -> None:
    """Raise FedpflError where a tree has lost or gained an entry, or one has another shape or dtype."""
    now, then = ({name: (leaf.dtype, leaf.shape) for name, leaf in tree.items(own)} for own in (new, old))
    if now == then:
        return
    name = min(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    was, became = (f"{form[0]} {list(form[1])}" if form else "missing" for form in (then.get(name), now.get(name)))
    raise FedpflError(
        f"{type(method).__name__} gives back a {whose} state in another form than init's: {name or 'it'} was {was} "
        f"and is {became}; keep its names, shapes and dtypes"
    )


def _finite(part: Participation) -> Tensor:
    """Tell which clients have finite numbers alone; a sum shows every infinity and nan in one pass.

    A model that is not finite shows in the loss by which it was evaluated.
    """
    finite = part.loss.isfinite() & part.before.loss.isfinite() & part.after.loss.isfinite()
    for leaf in tree.leaves({"uploads": part.uploads, "clients": part.clients, "buffers": part.buffers}):
        if leaf.is_floating_point():
            finite &= leaf.flatten(1).sum(1).isfinite() if leaf.dim() > 1 else leaf.isfinite()
    return finite


def _all_finite(trees: list[Tree]) -> bool:
    leaves = [leaf for whole in trees for leaf in tree.leaves(whole) if leaf.is_floating_point()]
    return all(bool(leaf.sum().isfinite()) for leaf in leaves)
