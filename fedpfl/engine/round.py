"""One round: State to State."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.data.federation import Federation
from fedpfl.engine.backend import Backend, Participation, Tally
from fedpfl.engine.keys import Draws, generator
from fedpfl.engine.program import each
from fedpfl.engine.sgd import Local
from fedpfl.engine.state import State, begin
from fedpfl.errors import FedpflError
from fedpfl.methods import Method
from fedpfl.tree import Tree

__all__ = ["Outcome", "State", "begin", "pick", "play"]


@dataclass(frozen=True)
class Outcome:
    """What a round tells: the cohort judged before and after local training, training losses, traffic, extras.

    finite: whether a client's losses and everything it brought back are finite, `[cohort]`.
    sound: whether all of the state is finite that the round has changed.
    values_down, values_up, bits_down, bits_up: sums over the cohort. loss: `[cohort]`. measures: means over it.
    """

    before: Tally
    after: Tally
    loss: Tensor
    finite: Tensor
    sound: bool
    values_down: int
    values_up: int
    bits_down: int
    bits_up: int
    measures: dict[str, float]


def pick(method: Method, state: State, planned: list[int], seed: int) -> list[int]:
    """The next round's cohort: `planned`, or where clients are no longer eligible, as many of those who are.

    With fewer left it is all of them; with none it is empty, and the run is over.
    """
    if method.eligible is None:
        return planned
    question = method.eligible
    flags = each(lambda mine: question(state.server, mine), state.clients)
    if bool(flags.all()):
        return planned
    left = flags.nonzero().flatten().cpu()
    order = torch.randperm(len(left), generator=generator(seed, "cohort", state.round + 1))
    return sorted(left[order[: len(planned)]].tolist())


def play(
    backend: Backend, method: Method, federation: Federation, state: State, cohort: list[int], local: Local, seed: int
) -> tuple[State, Outcome]:
    """Play the next round with `cohort`. The given state is used up: its clients' rows are overwritten in place."""
    cohort = sorted(cohort)
    sent = Sent(0, 0, 0, 0)
    if method.gathers(state.round):
        state, sent = _gather(backend, method, federation, state, local, seed)
    draws = Draws(seed, "train", state.round + 1)
    turns = [cohort]
    if method.sequential:
        order = torch.randperm(len(cohort), generator=generator(seed, "turns", state.round + 1))
        turns = [[cohort[place]] for place in order.tolist()]
    told = []
    for turn in turns:
        state, part, more = _turn(backend, method, federation, state, turn, local, draws)
        sent = Sent(*map(sum, zip(sent, more, strict=True)))
        own = {"before": part.before, "after": part.after, "loss": part.loss, "measures": part.measures}
        told.append(own | {"finite": _finite(part)})
    places = torch.tensor([client for turn in turns for client in turn]).argsort()
    whole = tree.map(lambda *leaves: torch.cat(leaves)[places.to(leaves[0].device)], *told)
    measures = {name: float(value.double().mean()) for name, value in whole.pop("measures").items()}
    rows = torch.tensor(cohort)
    sound = _all_finite([state.server, state.server_buffers, state.mine(rows, federation.x.device)])
    return replace(state, round=state.round + 1), Outcome(**whole, sound=sound, **sent._asdict(), measures=measures)


def _turn(
    backend: Backend,
    method: Method,
    federation: Federation,
    state: State,
    clients: list[int],
    local: Local,
    draws: Draws,
) -> tuple[State, Participation, Sent]:
    """Have clients train side by side, and merge what they bring back."""
    part = backend.participate(method, federation, state, clients, local, draws)
    rows = torch.tensor(clients, device=federation.x.device)
    samples = federation.train_sizes[clients].double()
    weight = (samples / samples.sum()).float().to(federation.x.device)
    server = method.merge(state.server, part.uploads, weight)
    mine = method.settle(server, part.uploads, part.mine) if method.settle else part.mine
    _keep_form(method, "server", server, state.server)
    _keep_form(method, "client", tree.take(mine, 0), tree.take(state.clients, 0))
    tree.put_(state.clients, rows, mine)
    for role, buffers in state.client_buffers.items():
        tree.put_(buffers, rows, part.buffers[role])
    sent = _sent(part, state, len(clients))
    shared = {
        role: _merge_buffers(old, part.buffers[role], part.touched.get(role), weight)
        for role, old in state.server_buffers.items()
    }
    return replace(state, server=server, server_buffers=shared), part, sent


class Sent(NamedTuple):
    """What travelled, summed over clients."""

    values_down: int
    values_up: int
    bits_down: int
    bits_up: int


def _sent(part: Participation, state: State, clients: int) -> Sent:
    extra = 0  # averaged statistics travel both ways
    for role, buffers in state.server_buffers.items():
        moved = part.touched.get(role) or tree.map(lambda leaf: torch.ones(clients, *leaf.shape), buffers)
        pairs = zip(tree.leaves(buffers), tree.leaves(moved), strict=True)
        extra += sum(int(flags.sum()) for leaf, flags in pairs if leaf.is_floating_point())
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
    _keep_form(method, "server", server, state.server)
    _keep_form(method, "client", mine, state.clients)
    tree.put_(state.clients, slice(None), mine)
    return replace(state, server=server), _sent(part, state, len(everyone))


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

    A model that is not finite shows in the loss by which it was judged.
    """
    finite = part.loss.isfinite() & part.before.loss.isfinite() & part.after.loss.isfinite()
    for leaf in tree.leaves({"uploads": part.uploads, "mine": part.mine, "buffers": part.buffers}):
        if leaf.is_floating_point():
            finite &= leaf.flatten(1).sum(1).isfinite() if leaf.dim() > 1 else leaf.isfinite()
    return finite


def _all_finite(trees: list[Tree]) -> bool:
    leaves = [leaf for whole in trees for leaf in tree.leaves(whole) if leaf.is_floating_point()]
    return all(bool(leaf.sum().isfinite()) for leaf in leaves)


def _merge_buffers(old: Tree, stacked: Tree, touched: Tree | None, weight: Tensor) -> Tree:
    """Floating statistics are averaged over those who moved them, counters take the largest."""

    def merged(before: Tensor, leaf: Tensor, flags: Tensor) -> Tensor:
        return tree.masked_mean(before, leaf, flags, weight) if leaf.is_floating_point() else leaf.amax(0)

    everywhere = tree.full_like(stacked, True)
    return tree.map(merged, old, stacked, touched or everywhere)
