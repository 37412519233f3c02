"""One round: State to State."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.backends.backend import Backend, reproducible_arithmetic
from fedpfl.engine.calls import Counts, Participation, TrainCall, with_before_turn
from fedpfl.engine.keys import Draws, generator, track_global_draws
from fedpfl.engine.protect import ProtectedUploads, protect_uploads
from fedpfl.engine.state import State
from fedpfl.engine.stopping import Stopping, update_stopping
from fedpfl.engine.training.hook_checks import describe_form_change, with_hook_checks
from fedpfl.engine.training.hook_checks import persistent_entries as named
from fedpfl.engine.training.sgd import Local
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, MethodError
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method, Turn
from fedpfl.privacy import Account, Secret


class RoundTraffic(NamedTuple):
    """Count what travelled, summed over clients."""

    values_down: int = 0
    values_up: int = 0
    bits_down: int = 0
    bits_up: int = 0

    def __add__(self, other: tuple[int, ...]) -> RoundTraffic:  # type: ignore[override]
        """Add up what was sent at two times."""
        return RoundTraffic(*map(sum, zip(self, other, strict=True)))


class TurnLoad(NamedTuple):
    """Hold what each client of a turn has computed, `[clients, 1]`, and moved, `[clients]` by
    fields of Sent.
    """

    clients: list[int]
    operations: Tensor
    moved: dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Tell what happened in a round: the cohort evaluated before and after local training, losses,
    traffic, metrics.

    cohort: who took part.
    trained: whether a client has ever made a step, `[cohort]`.
    finite: whether a client's losses and everything it brought back are finite, `[cohort]`.
    sound: whether all of the state is finite that the round has changed.
    loss: `[cohort]`. metrics: means over the cohort. sent: of the whole round. loads: of its turns,
    if asked for.
    """

    cohort: list[int]
    before: Counts
    after: Counts
    loss: Tensor
    trained: Tensor
    finite: Tensor
    state_is_finite: bool
    traffic: RoundTraffic
    metrics: dict[str, float | None]
    turn_loads: list[TurnLoad] = field(default_factory=list)


def play_round(
    backend: Backend,
    method: Method,
    federation: Federation,
    state: State,
    cohort: list[int],
    local: Local,
    seed: int,
    stopping: Stopping | None = None,
    paces: Mapping[int, Local] | None = None,
    account: Account | None = None,
    secret: Secret | None = None,
) -> tuple[State, Outcome]:
    """Play the next round with `cohort`. The given state is used up: its clients' rows are
    overwritten in place.

    paces: by what clients train in place of `local`, if by something else; given, be it empty,
    operations are counted.
    account: of privacy; the server then sees noise on the uniform mean of clipped uploads, and no
    more. secret: from which that noise is drawn.
    """
    number, cohort = state.round + 1, sorted(cohort)
    if account and not cohort:
        return _play_without_cohort(
            backend=backend,
            method=method,
            federation=federation,
            state=state,
            local=local,
            seed=seed,
            account=account,
            secret=secret,
        )
    stopping = stopping if state.stopping else None
    sent, parts, order, kept, spent = [], [], list[int](), [], []
    looked_at, random = (
        with_hook_checks(method, None, state.rows.initial["client"]),
        generator(seed, "aggregate", number),
    )
    hooks = method if state.round else looked_at
    with track_global_draws(method, seed, "turns", number, "process"):
        turns = looked_at.turns(
            state.round, cohort, federation.clients, generator(seed, "turns", number)
        )
    if account and not _is_one_release(turns, cohort):
        raise FedpflError(
            f"privacy=client keeps account of one turn of a round's cohort, and turns of {type(method).__name__} are "
            "others"
        )
    for turn in turns:
        stops = stopping is not None and not turn.survey
        draws = Draws(seed, "gather" if turn.survey else "train", number)
        call = TrainCall(
            method,
            federation,
            state,
            turn.clients,
            local,
            draws,
            stops,
            turn if turn.survey else None,
        )
        part = backend.participate(call) if paces is None else _paced(backend, call, paces)
        clients = (
            part.client_ids.tolist() if len(part.client_ids) < len(turn.clients) else turn.clients
        )  # who has answered
        sent.append(count_traffic(part, state, len(clients), stops))
        spent.append((clients, part.flops))

        samples = federation.train_sizes[clients].double()
        weight = tree.send((samples / samples.sum()).float(), federation.x.device)
        if account:
            part, state, weight = _private(account, method, state, part, secret)
        with (
            track_global_draws(method, seed, "aggregate", number, "process"),
            reproducible_arithmetic(federation.x.device, backend.engine.precision),
        ):
            if turn.survey:
                server, own = turn.survey(state.server, state.client(clients), part.uploads)
            else:
                facts = {
                    **state.facts(clients),
                    "trained": part.trained,
                    "statistics": part.buffers,
                }
                own, net = {**part.client_states, **facts}, backend.net.bind(state.server_buffers)
                server, own = hooks.aggregate(state.server, own, net, part.uploads, weight, random)
        own = named(own, state.rows.initial["client"])
        _keep_form(
            method, "turns (Turn.survey)" if turn.survey else "aggregate", server, own, state
        )
        state.rows.put_(clients, {"client": own})
        state = replace(state, server=server)
        if turn.survey:
            continue

        state = _noted(state, part, clients, weight)
        kept += [own, tree.select(part.buffers, state.rows.initial["buffers"])]
        if stopping:
            state = replace(
                state, stopping=update_stopping(stopping, state, federation, clients, part)
            )
        parts.append({**part._asdict(), "finite": _finite(part)})
        order += clients

    sound = _all_finite([state.server, state.server_buffers, *kept])
    loads = [TurnLoad(*own, moved) for own, moved in zip(spent, sent, strict=True)]
    return replace(state, round=number), _outcome(order, parts, sound, loads, paces is not None)


def _outcome(
    order: list[int],
    parts: list[dict[str, Tree]],
    sound: Tensor,
    loads: list[TurnLoad],
    counted: bool,
) -> Outcome:
    """Put together what turns brought back, of clients in this order; one copy to the host, as a
    GPU is waited for.
    """
    names = ("before", "after", "loss", "trained", "finite", "metrics")
    told = [{name: part[name] for name in names} for part in parts]
    whole = tree.map(lambda *leaves: torch.cat(leaves), *told)
    known = tree.fetch(
        {
            "whole": whole,
            "sound": sound,
            "sent": {place: own.moved for place, own in enumerate(loads)},
        }
    )
    whole = tree.take(known["whole"], torch.tensor(order).argsort())
    metrics: dict[str, float | None] = {}
    for name, value in whole.pop("metrics").items():
        metrics[name] = float(value.double().mean())
    sent = RoundTraffic(
        **{
            name: sum(int(own[name].sum()) for own in known["sent"].values())
            for name in RoundTraffic._fields
        }
    )
    loads = [
        load._replace(moved=known["sent"][place]) for place, load in enumerate(loads) if counted
    ]
    return Outcome(
        sorted(order),
        **whole,
        state_is_finite=bool(known["sound"]),
        traffic=sent,
        metrics=metrics,
        turn_loads=loads,
    )


def _private(
    account: Account, method: Method, state: State, part: Participation, secret: Secret | None
) -> tuple[Participation, State, Tensor]:
    """Put uploads whose mean the server may see in the place of those that came; return equal
    weights, too.
    """
    made = _protect_uploads(account, method, state, part.uploads, secret)
    part = part._replace(uploads=made.uploads, metrics={**part.metrics, **made.metrics})
    return part, replace(state, privacy=made.state), torch.full_like(part.loss, 1 / len(part.loss))


def _protect_uploads(
    account: Account, method: Method, state: State, uploads: Tree | None, secret: Secret | None
) -> ProtectedUploads:
    """Protect a round's uploads, None where nobody was drawn."""
    assert secret, "privacy needs a secret to draw from"
    initial = state.rows.initial
    statistics = {**state.server_buffers, **initial["buffers"]}
    known = state.server, initial["client"], statistics
    return protect_uploads(account, method, known, state.privacy, uploads, secret, state.round + 1)


def _is_one_release(turns: Sequence[Turn], cohort: list[int]) -> bool:
    """Tell whether the server learns of a round's cohort once, as privacy is accounted for."""
    return len(turns) == 1 and not turns[0].survey and sorted(turns[0].clients) == cohort


def _play_without_cohort(
    *,
    backend: Backend,
    method: Method,
    federation: Federation,
    state: State,
    local: Local,
    seed: int,
    account: Account,
    secret: Secret | None,
) -> tuple[State, Outcome]:
    """Play a round for which Poisson's rule drew nobody: the server adds the noise alone.

    To draw again would tell that somebody is there more often than the account says.
    """
    number = state.round + 1
    made = _protect_uploads(account, method, state, None, secret)
    # Only servers that average are let through with Poisson's rule, so that this is their
    # `aggregate`.
    server = tree.mean(made.uploads, torch.ones(1, device=federation.x.device))
    draws, turn = Draws(seed, "train", number), Turn([0], trains=False)
    dry = backend.participate(
        TrainCall(method, federation, state, [0], local, draws, False, turn, None, ())
    )
    metrics = {**dry.metrics, **made.metrics}
    state = replace(state, round=number, server=server, privacy=made.state)
    return state, replace(empty_outcome(metrics), state_is_finite=bool(_all_finite([server])))


def empty_outcome(metrics: Iterable[str]) -> Outcome:
    """Return the outcome of a round in which nobody takes part. metrics: the method's own columns."""
    none = torch.zeros(0)
    nobody = Counts(none, none, none)
    return Outcome(
        cohort=[],
        before=nobody,
        after=nobody,
        loss=none,
        trained=none > 0,
        finite=none > 0,
        state_is_finite=True,
        traffic=RoundTraffic(),
        metrics=dict.fromkeys(metrics),
    )


def _paced(backend: Backend, call: TrainCall, paces: Mapping[int, Local]) -> Participation:
    """Answer a call in which clients train by values of their own, and count what they compute."""
    groups: dict[Local, list[int]] = {}
    for place, client in enumerate(call.clients):
        groups.setdefault(paces.get(client, call.local), []).append(place)
    call, parts = with_before_turn(call), []
    for local, places in groups.items():
        clients, rows = [call.clients[place] for place in places], torch.tensor(places)
        own = replace(
            call,
            clients=clients,
            local=local,
            flop_settings=(local,),
            overlay=call.overlay and tree.take(call.overlay, rows),
        )
        parts.append(backend.participate(own))
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([place for places in groups.values() for place in places])
    return tree.take(tree.map(lambda *leaves: torch.cat(leaves), *parts), order.argsort())


def count_traffic(
    part: Participation, state: State, clients: int, stopping: bool
) -> dict[str, Tensor]:
    """Count what each client of a turn gets and sends, `[clients]`, as fields of Sent."""
    extra: int | Tensor = 0  # averaged statistics travel both ways
    for role, buffers in state.server_buffers.items():
        floating = tree.map(Tensor.is_floating_point, buffers)
        if moved := part.updated_buffers.get(role):
            pairs = zip(tree.leaves(floating), tree.leaves(moved), strict=True)
            extra = extra + sum(flags.view(clients, -1).sum(1) for counts, flags in pairs if counts)
        else:
            extra = extra + sum(
                leaf.numel() for leaf in tree.leaves(buffers) if leaf.is_floating_point()
            )
    return {
        "values_down": part.down.values + extra,
        "values_up": part.up.values + extra,
        "bits_down": part.down.bits + 32 * extra,
        "bits_up": part.up.bits + 32 * extra + stopping,
    }


def _noted(state: State, part: Participation, clients: list[int], weight: Tensor) -> State:
    """Keep clients' own statistics and facts; of shared statistics average floating ones over those
    who moved them, and take the largest of counters.
    """
    statistics = tree.select(part.buffers, state.rows.initial["buffers"])
    facts = {"participated": torch.ones_like(part.trained), "trained": part.trained}
    state.rows.put_(clients, {"buffers": statistics, "facts": facts})

    def mean(before: Tensor, leaf: Tensor, flags: Tensor) -> Tensor:
        return (
            tree.masked_mean(before, leaf, flags, weight)
            if leaf.is_floating_point()
            else leaf.amax(0)
        )

    shared = {}
    for role, old in state.server_buffers.items():
        stacked = part.buffers[role]
        shared[role] = tree.map(
            mean, old, stacked, part.updated_buffers.get(role) or tree.full_like(stacked, True)
        )
    return replace(state, server_buffers=shared)


def _keep_form(
    method: Method, hook: str, server: Tree, clients: dict[str, Tree], state: State
) -> None:
    """Raise MethodError where a tree has lost or gained an entry, or one has another shape or dtype."""
    for whose, new, old in (
        ("server", server, state.server),
        ("client", tree.take(clients, 0), state.rows.initial["client"]),
    ):
        if told := describe_form_change(new, old):
            raise MethodError(
                f"{type(method).__name__}.{hook} returned a {whose} state in another form than init's, {told}; "
                "it must return one with the same names, shapes and dtypes"
            )


def _finite(part: Participation) -> Tensor:
    """Tell which clients have finite numbers alone; a sum shows every infinity and nan in one pass.

    A model that is not finite shows in the loss by which it was evaluated.
    """
    finite = part.loss.isfinite() & part.before.loss.isfinite() & part.after.loss.isfinite()
    for leaf in tree.leaves(
        {"uploads": part.uploads, "clients": part.client_states, "buffers": part.buffers}
    ):
        if leaf.is_floating_point():
            finite &= leaf.flatten(1).sum(1).isfinite() if leaf.dim() > 1 else leaf.isfinite()
    return finite


def _all_finite(trees: list[Tree]) -> Tensor:
    leaves = [leaf for whole in trees for leaf in tree.leaves(whole) if leaf.is_floating_point()]
    return torch.stack([leaf.sum().isfinite() for leaf in leaves] or [torch.tensor(True)]).all()
