"""One round: State to State."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.backends.backend import Backend, reproducible_arithmetic
from fedpfl.engine.calls import (
    Counts,
    Participation,
    TrainCall,
    group_by_kind,
    join_answers,
    keep_common,
    select_clients,
    with_before_turn,
)
from fedpfl.engine.hostile import defend_uploads, forge_uploads
from fedpfl.engine.keys import Draws, generator, track_global_draws
from fedpfl.engine.protect import ProtectedUploads, protect_uploads
from fedpfl.engine.state import State
from fedpfl.engine.stopping import Stopping, update_stopping
from fedpfl.engine.training.forms import describe_form_change, persistent_entries
from fedpfl.engine.training.local import Local
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, MethodError
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Method, Turn
from fedpfl.privacy import Account, SampleProtection, Secret
from fedpfl.robust import Adversary, Defence


class RoundTraffic(NamedTuple):
    """Count what travelled, summed over clients."""

    values_down: int = 0
    values_up: int = 0
    bits_down: int = 0
    bits_up: int = 0

    def plus(self, more: RoundTraffic) -> RoundTraffic:
        """Return the sum of both."""
        return RoundTraffic(*map(sum, zip(self, more, strict=True)))


@dataclass(frozen=True)
class TurnLoad:
    """Hold the FLOPs and traffic of each client of a turn.

    Attributes:
        flops: FLOPs of each client's training, `[clients, 1]`.
        traffic: By field of RoundTraffic, `[clients]`.
    """

    clients: list[int]
    flops: Tensor
    traffic: dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """Report a round: the cohort before and after local training, losses, traffic, metrics.

    Attributes:
        cohort: Who took part, ascending; rows `[cohort]` are in this order.
        before: Evaluation before local training.
        after: Evaluation after local training.
        loss: Mean training loss, `[cohort]`.
        trained: Whether a client has ever made a step, `[cohort]`.
        finite: Whether a client's losses and everything it brought back are finite, `[cohort]`.
        state_is_finite: Whether all of the state is finite that the round has changed.
        traffic: Of the whole round.
        metrics: The method's own metrics, means over the cohort.
        turn_loads: What clients computed and moved in each turn, where that was asked for.
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


@dataclass(frozen=True)
class RoundSetup:
    """Hold all inputs of a round but the state and the cohort.

    Attributes:
        local: How clients train in this round.
        stopping: Early stopping of clients.
        account: Account of a private run: the server then sees noise on the uniform mean of clipped
            uploads, and no more.
        secret: What that noise is drawn from.
        adversary: Forges the uploads of its clients.
        defence: What takes the place of the mean of uploads.
        protection: Of single samples, where clients add noise of their own.
    """

    backend: Backend
    method: Method
    federation: Federation
    local: Local
    seed: int
    stopping: Stopping | None = None
    account: Account | None = None
    secret: Secret | None = None
    adversary: Adversary | None = None
    defence: Defence | None = None
    protection: SampleProtection | None = None


@dataclass(frozen=True)
class _TrainedTurn:
    """Hold a trained turn until the server has learnt from it.

    Attributes:
        clients: The clients that answered.
        participation: Of what has one form for networks of all kinds.
        weights: The share of each client in an average, `[clients]`.
    """

    turn: Turn
    clients: list[int]
    participation: Participation
    weights: Tensor


@dataclass(frozen=True)
class _TurnResult:
    """Keep the results of a turn for the outcome.

    Attributes:
        rows: Stacked results of the clients, by field of Outcome; None of a survey.
        changed_trees: Client states and statistics that the turn has written.
    """

    load: TurnLoad
    rows: Entries | None = None
    changed_trees: tuple[Tree, ...] = ()


def play_round(
    setup: RoundSetup,
    state: State,
    cohort: list[int],
    local_by_client: Mapping[int, Local] | None = None,
) -> tuple[State, Outcome]:
    """Play the next round with a cohort. Takes ownership of `state`: its rows change in place.

    Args:
        setup: All inputs but the state and the cohort.
        state: The state after the last round.
        cohort: The clients that take part, in any order.
        local_by_client: How single clients train, in place of `setup.local`. If given, even
            empty, FLOPs are counted.
    """
    cohort = sorted(cohort)
    if setup.account and not cohort:
        return _play_round_without_cohort(setup, setup.account, state)
    if setup.method.pools_samples:
        setup = _pool_samples(setup, cohort)
        cohort = cohort[:1]

    # ---- Step 1: who trains with whom? Most methods answer with one turn of the whole cohort.
    turns = choose_turns(setup, state, cohort)
    # One for all turns, so that the second draws other numbers than the first.
    aggregate_generator = generator(setup.seed, "aggregate", state.round + 1)
    results: list[_TurnResult] = []
    for turn in turns:
        # ---- Step 2: the turn's clients train. A survey only gathers: it is no participation.
        trained = _train_turn(setup, state, turn, local_by_client)
        load = _measure_load(setup, state, trained)

        # ---- Step 3: attackers forge their uploads. In a private run the server sees only the
        # noised mean of clipped uploads, under a defence only the robust aggregate.
        trained = _face_attackers(setup, state, trained)
        if setup.account:
            trained, state = _protect_turn(setup, setup.account, state, trained)

        # ---- Step 4: the server learns from the uploads, and clients keep the state that
        # the method gives them.
        server, client_states = _aggregate_turn(setup, state, trained, aggregate_generator)
        state.rows.put_(trained.clients, {"client": client_states})
        state = replace(state, server=server)

        # ---- Step 5: statistics and early stopping follow those who took part.
        result = _TurnResult(load=load)
        if not turn.survey:
            state = _follow_participants(setup, state, trained)
            result = _make_turn_result(state, trained, load, client_states)
        results.append(result)

    # ---- Step 6: what happened, in the cohort's order.
    state = replace(state, round=state.round + 1)
    return state, _summarize_turns(results, state, keep_loads=local_by_client is not None)


def _pool_samples(setup: RoundSetup, cohort: list[int]) -> RoundSetup:
    """Let the cohort's first client take all steps, on all clients' samples."""
    local = setup.local
    sizes = setup.federation.train_sizes[cohort]
    batches = sizes // local.batch_size + (sizes % local.batch_size > 1)
    passes = local.epochs or 0
    steps = int((batches * passes).sum()) if passes else local.amount * int((batches > 0).sum())
    if not steps:
        return setup
    federation = setup.federation.pool_samples(cohort[0])
    return replace(setup, federation=federation, local=replace(local, epochs=None, steps=steps))


# ---- who trains


def choose_turns(setup: RoundSetup, state: State, cohort: list[int]) -> list[Turn]:
    """Return the method's turns.

    Raises:
        FedpflError: The run is private, and the server would learn of the cohort more than once.
    """
    method = setup.method
    round_number = state.round + 1
    with track_global_draws(method, (setup.seed, "turns", round_number, "process")):
        turns = method.turns(
            state.round,
            cohort,
            setup.federation.clients,
            generator(setup.seed, "turns", round_number),
        )
    if setup.account and not _is_one_release(turns, cohort):
        raise FedpflError(
            "privacy=client keeps account of one turn of a round's cohort, and turns of "
            f"{type(method).__name__} are others"
        )
    trained = [client for turn in turns if turn.trains for client in turn.clients]
    if setup.protection and sorted(trained) != cohort:
        raise FedpflError(
            "privacy=sample keeps account of one training of each client of a round's cohort, and"
            f" turns of {type(method).__name__} are others"
        )
    return turns


def _is_one_release(turns: Sequence[Turn], cohort: list[int]) -> bool:
    """Check whether the server learns of a cohort once, as privacy is accounted for."""
    return len(turns) == 1 and not turns[0].survey and sorted(turns[0].clients) == cohort


# ---- training


def _train_turn(
    setup: RoundSetup,
    state: State,
    turn: Turn,
    local_by_client: Mapping[int, Local] | None,
) -> _TrainedTurn:
    """Train the clients of a turn on the backend."""
    federation = setup.federation

    # ---- Step 1: they train, all alike or each by its own settings.
    call = make_train_call(setup, state, turn)
    participation = _train_groups(setup.backend, call, local_by_client)
    clients = turn.clients
    if len(participation.client_ids) < len(clients):  # not every node has answered
        clients = participation.client_ids.tolist()

    # ---- Step 2: those who have answered, weighed by their samples.
    samples = federation.train_sizes[clients].double()
    # Divided in float64: shares of thousands of clients must add up to 1.
    weights = tree.send(
        (samples / samples.sum()).float(),
        federation.x.device,
    )
    return _TrainedTurn(turn=turn, clients=clients, participation=participation, weights=weights)


def make_train_call(setup: RoundSetup, state: State, turn: Turn) -> TrainCall:
    """Return the call that trains the clients of a turn."""
    purpose = "gather" if turn.survey else "train"
    return TrainCall(
        method=setup.method,
        federation=setup.federation,
        state=state,
        clients=turn.clients,
        local=setup.local,
        draws=Draws(setup.seed, purpose, state.round + 1, setup.protection),
        wants_stopping_loss=_wants_stopping_loss(setup, state, turn),
        survey=turn if turn.survey else None,
    )


def _wants_stopping_loss(setup: RoundSetup, state: State, turn: Turn) -> bool:
    """Check whether early stopping goes by this turn; a survey is no participation."""
    return setup.stopping is not None and bool(state.stopping) and not turn.survey


def _train_groups(
    backend: Backend, call: TrainCall, local_by_client: Mapping[int, Local] | None
) -> Participation:
    """Train clients by kind of network and by their own settings, and count FLOPs.

    What only clients of one kind have is stored here, unless the turn is a survey.
    """
    # ---- Step 1: clients that train alike.
    groups: dict[tuple[int, Local], list[int]] = {}
    for kind, positions in group_by_kind(call).items():
        for position in positions:
            local = (local_by_client or {}).get(call.clients[position], call.local)
            groups.setdefault((kind, local), []).append(position)
    # The server draws once for the whole turn, and not for each group of clients.
    with reproducible_arithmetic(call.state.rows.device, backend.engine.precision):
        call = with_before_turn(call)

    # ---- Step 2: they train, group by group.
    participations = []
    for (_, local), positions in groups.items():
        group_call = select_clients(call, positions) if len(groups) > 1 else call
        if local_by_client is not None:
            group_call = replace(group_call, local=local, flop_settings=(local,))
        participation = backend.run_one(group_call)
        if not call.survey:
            _store_private(call, participation)
        participations.append(keep_common(call.state, participation))

    # ---- Step 3: all of them in the order of the call.
    if len(participations) == 1:
        return participations[0]  # to look at its numbers of clients would wait for a GPU
    place_of_client = {client: place for place, client in enumerate(call.clients)}
    ids = torch.cat([participation.client_ids for participation in participations])
    return join_answers(call, participations, [place_of_client[client] for client in ids.tolist()])


def _store_private(call: TrainCall, participation: Participation) -> None:
    """Store what only clients of one kind have, which the server never sees.

    Raises:
        MethodError: It has another form than `init` gave it.
    """
    rows = call.state.rows
    if len(rows.initials) == 1:
        return
    clients = participation.client_ids.tolist()
    if not clients:
        return
    initial = rows.initial_of(clients[0])
    private: Entries = {}
    for part, values in (
        ("client", participation.client_states),
        ("buffers", participation.buffers),
    ):
        names = tree.drop(initial[part], rows.common[part])
        private[part] = persistent_entries(values, names)
        change = describe_form_change(tree.take(private[part], 0), names)
        if change:
            raise MethodError(_describe_change(call.method, "finish", "client", change))
    rows.put_(clients, private)


def _measure_load(setup: RoundSetup, state: State, trained: _TrainedTurn) -> TurnLoad:
    """Measure the operations and the traffic of a turn's clients."""
    wants_loss = _wants_stopping_loss(setup, state, trained.turn)
    traffic = count_traffic(trained.participation, state, wants_loss)
    if setup.method.pools_samples:
        # The model is where the samples are.
        traffic = tree.map(torch.zeros_like, traffic)
    return TurnLoad(trained.clients, trained.participation.flops, traffic)


def count_traffic(
    participation: Participation, state: State, wants_stopping_loss: bool
) -> dict[str, Tensor]:
    """Count the values and bits of each client, `[clients]`, by field of RoundTraffic."""
    # Averaged statistics travel both ways; integer counters are not worth counting.
    # A plain number fits counts on the host and on a GPU alike.
    statistics: int | Tensor = 0
    for role, buffers in state.server_buffers.items():
        updated = participation.updated_buffers.get(role)
        for leaf, flags in zip(tree.leaves(buffers), tree.leaves(updated or buffers), strict=True):
            if not leaf.is_floating_point():
                continue
            if updated:
                statistics = statistics + tree.as_matrix(flags).sum(1)
            else:
                statistics += leaf.numel()
    down = participation.down
    up = participation.up
    # A client that may stop tells the server so in one bit.
    return {
        "values_down": down.values + statistics,
        "values_up": up.values + statistics,
        "bits_down": down.bits + 32 * statistics,
        "bits_up": up.bits + 32 * statistics + wants_stopping_loss,
    }


def _find_updated_statistics(participation: Participation, role: str) -> Tree:
    """Flag the statistics that each client updated, by default all."""
    updated = participation.updated_buffers.get(role)
    return updated or tree.full_like(participation.buffers[role], True)


# ---- attacks, defences and privacy


def _face_attackers(setup: RoundSetup, state: State, trained: _TrainedTurn) -> _TrainedTurn:
    """Forge attackers' uploads, and put the robust aggregate in the place of each."""
    uploads = trained.participation.uploads
    if setup.adversary and not trained.turn.survey:
        uploads = forge_uploads(
            adversary=setup.adversary,
            method=setup.method,
            state=state,
            clients=trained.clients,
            weights=trained.weights,
            uploads=uploads,
            seed=setup.seed,
        )
    if setup.defence:
        uploads = defend_uploads(
            defence=setup.defence,
            method=setup.method,
            state=setup.backend.complete_initial_row(state),
            clients=trained.clients,
            uploads=uploads,
            seed=setup.seed,
        )
    return replace(trained, participation=trained.participation._replace(uploads=uploads))


def _protect_turn(
    setup: RoundSetup, account: Account, state: State, trained: _TrainedTurn
) -> tuple[_TrainedTurn, State]:
    """Replace uploads by ones with a mean that the server may see; weigh clients equally."""
    participation = trained.participation
    protected = _protect_uploads(setup, account, state, participation.uploads)
    participation = participation._replace(
        uploads=protected.uploads, metrics={**participation.metrics, **protected.metrics}
    )
    weights = torch.full_like(participation.loss, 1 / len(participation.loss))
    trained = replace(trained, participation=participation, weights=weights)
    return trained, replace(state, privacy=protected.state)


def _protect_uploads(
    setup: RoundSetup, account: Account, state: State, uploads: Tree | None
) -> ProtectedUploads:
    """Protect a round's uploads, None if no client was drawn."""
    assert setup.secret, "privacy needs a secret to draw from"
    state = setup.backend.complete_initial_row(state)
    return protect_uploads(account, setup.method, state, uploads, setup.secret)


def _play_round_without_cohort(
    setup: RoundSetup, account: Account, state: State
) -> tuple[State, Outcome]:
    """Play a round without clients, by Poisson's rule: the server adds the noise alone.

    To draw again would tell that a client is there more often than the account says.
    """
    protected = _protect_uploads(setup, account, state, None)
    # Only servers that average are let through with Poisson's rule, so that this is their
    # `aggregate`.
    server = tree.mean(protected.uploads, torch.ones(1, device=setup.federation.x.device))
    # A client that takes no step tells which metrics the method has.
    dry_call = make_dry_call(setup, state, [0])
    metrics = {**setup.backend.try_participation(dry_call).metrics, **protected.metrics}
    state = replace(state, round=state.round + 1, server=server, privacy=protected.state)
    outcome = replace(empty_outcome(metrics), state_is_finite=bool(_are_finite([server])))
    return state, outcome


def make_dry_call(
    setup: RoundSetup, state: State, clients: list[int], flop_settings: tuple[Local, ...] = ()
) -> TrainCall:
    """Make a call that takes clients through all but the training."""
    return TrainCall(
        method=setup.method,
        federation=setup.federation,
        state=state,
        clients=clients,
        local=setup.local,
        draws=Draws(setup.seed, "train", state.round + 1),
        survey=Turn(clients, trains=False),
        flop_settings=flop_settings,
    )


# ---- the server


def _aggregate_turn(
    setup: RoundSetup, state: State, trained: _TrainedTurn, aggregate_generator: Generator
) -> tuple[Tree, Entries]:
    """Return the server's new tree and the clients' states, stacked, with init's entries alone.

    Raises:
        MethodError: A tree has another form than `init` gave it.
    """
    device = setup.federation.x.device
    rows = state.rows
    initial_client = tree.select(rows.initial["client"], rows.common["client"])
    survey = trained.turn.survey

    # ---- Step 1: the server learns from the uploads.
    with (
        track_global_draws(setup.method, (setup.seed, "aggregate", state.round + 1, "process")),
        reproducible_arithmetic(device, setup.backend.engine.precision),
    ):
        if survey:
            clients = state.common(trained.clients)
            server, client_states = survey(state.server, clients, trained.participation.uploads)
        else:
            server, client_states = _call_aggregate(setup, state, trained, aggregate_generator)

    # ---- Step 2: what lasts must have init's form, or no checkpoint fits.
    client_states = persistent_entries(client_states, initial_client)
    changes = {
        "server": describe_form_change(server, state.server),
        "client": describe_form_change(tree.take(client_states, 0), initial_client),
    }
    hook_name = "turns (Turn.survey)" if survey else "finish or aggregate"
    for owner, change in changes.items():
        if change:
            raise MethodError(_describe_change(setup.method, hook_name, owner, change))
    return server, client_states


def _describe_change(method: Method, hook_name: str, owner: str, change: str) -> str:
    """Describe a state in another form than `init` gave it."""
    return (
        f"{type(method).__name__}.{hook_name} returned a {owner} state in another form than"
        f" init's, {change}; it must return one with the same names, shapes and dtypes"
    )


def _call_aggregate(
    setup: RoundSetup, state: State, trained: _TrainedTurn, aggregate_generator: Generator
) -> tuple[Tree, Entries]:
    """Return the answer of `Method.aggregate`, given the facts beside the states."""
    participation = trained.participation
    client_states = {
        **participation.client_states,
        **state.facts(trained.clients),
        "trained": participation.trained,
        "statistics": participation.buffers,
    }
    return setup.method.aggregate(
        state.server,
        client_states,
        setup.backend.net.bind(state.server_buffers),
        participation.uploads,
        trained.weights,
        aggregate_generator,
    )


def _follow_participants(setup: RoundSetup, state: State, trained: _TrainedTurn) -> State:
    """Return the state with the statistics and the early stopping of a turn's clients."""
    state = _store_statistics(state, trained)
    if not setup.stopping or not state.stopping:
        return state
    stopping = update_stopping(
        setup.stopping, state, setup.federation, trained.clients, trained.participation
    )
    return replace(state, stopping=stopping)


def _store_statistics(state: State, trained: _TrainedTurn) -> State:
    """Store local BatchNorm statistics; average shared ones over the clients that updated them."""
    participation = trained.participation
    has_participated = torch.ones_like(participation.trained)
    facts = {"participated": has_participated, "trained": participation.trained}
    local_statistics = tree.select(participation.buffers, state.rows.common["buffers"])
    state.rows.put_(trained.clients, {"buffers": local_statistics, "facts": facts})

    def merge(old: Tensor, stacked: Tensor, is_updated: Tensor) -> Tensor:
        if old.is_floating_point():
            return tree.masked_mean(old, stacked, is_updated, trained.weights)
        return stacked.amax(0)  # counters of batches

    shared_statistics = {}
    for role, old in state.server_buffers.items():
        updated = _find_updated_statistics(participation, role)
        shared_statistics[role] = tree.map(merge, old, participation.buffers[role], updated)
    return replace(state, server_buffers=shared_statistics)


# ---- the outcome of a round


def empty_outcome(metrics: Iterable[str]) -> Outcome:
    """Return the outcome of a round without clients, with the method's metric names."""
    nothing = torch.zeros(0)
    nobody = Counts(correct=nothing, loss=nothing, total=nothing)
    return Outcome(
        cohort=[],
        before=nobody,
        after=nobody,
        loss=nothing,
        trained=nothing > 0,
        finite=nothing > 0,
        state_is_finite=True,
        traffic=RoundTraffic(),
        metrics=dict.fromkeys(metrics),
    )


def _make_turn_result(
    state: State, trained: _TrainedTurn, load: TurnLoad, client_states: Entries
) -> _TurnResult:
    """Keep a turn's results for the outcome, so that its uploads can be freed."""
    participation = trained.participation
    local_statistics = tree.select(participation.buffers, state.rows.common["buffers"])
    clients = trained.clients if len(state.rows.initials) > 1 else []
    private = [*map(state.rows.take_private, clients)]
    rows = {
        "before": participation.before,
        "after": participation.after,
        "loss": participation.loss,
        "trained": participation.trained,
        "finite": _finite_clients(participation, private),
        "metrics": participation.metrics,
    }
    changed_trees = (client_states, local_statistics, *private)
    return _TurnResult(load=load, rows=rows, changed_trees=changed_trees)


def _summarize_turns(results: list[_TurnResult], state: State, keep_loads: bool) -> Outcome:
    """Return the outcome of a round's turns, copied to the host in one transfer."""
    turns = [result for result in results if result.rows is not None]
    changed_trees = [changed for result in turns for changed in result.changed_trees]
    on_host = tree.fetch(
        {
            "rows": tree.concatenate_trees([result.rows for result in turns]),
            "state_is_finite": _are_finite([state.server, state.server_buffers, *changed_trees]),
            "traffic": dict(enumerate(result.load.traffic for result in results)),
        }
    )

    # ---- Rows: of turns one after another, put into the cohort's order.
    clients = [client for result in turns for client in result.load.clients]
    rows = tree.take(on_host["rows"], torch.tensor(clients).argsort())
    metrics: dict[str, float | None] = {}
    for name, values in rows.pop("metrics").items():
        metrics[name] = float(values.double().mean())

    # ---- Loads: surveys have theirs too.
    loads = []
    for number, result in enumerate(results):
        loads.append(replace(result.load, traffic=on_host["traffic"][number]))
    traffic = RoundTraffic()
    for load in loads:
        counts = {name: int(values.sum()) for name, values in load.traffic.items()}
        traffic = traffic.plus(RoundTraffic(**counts))
    return Outcome(
        cohort=sorted(clients),
        **rows,
        state_is_finite=bool(on_host["state_is_finite"]),
        traffic=traffic,
        metrics=metrics,
        turn_loads=loads if keep_loads else [],
    )


def _finite_clients(participation: Participation, private: Sequence[Entries]) -> Tensor:
    """Flag clients that brought back finite numbers alone, `[clients]`.

    private: what each client stored itself, where networks are of several kinds.

    A sum shows every infinity and nan in one pass. A model that is not finite shows in the loss by
    which it was evaluated.
    """
    losses = (participation.loss, participation.before.loss, participation.after.loss)
    finite = torch.stack([loss.isfinite() for loss in losses]).all(0)
    trees = [participation.uploads, participation.client_states, participation.buffers]
    for leaf in _list_floating(trees):
        finite &= tree.as_matrix(leaf).sum(1).isfinite()
    for position, entries in enumerate(private):
        finite[position] &= _are_finite([entries])
    return finite


def _are_finite(trees: list[Tree]) -> Tensor:
    """Check that all floating-point leaves are finite, as a bool on their device."""
    flags = [leaf.sum().isfinite() for leaf in _list_floating(trees)]
    return torch.stack(flags).all() if flags else torch.tensor(True)


def _list_floating(trees: list[Tree]) -> list[Tensor]:
    """List the floating-point leaves of trees."""
    leaves = tree.leaves(dict(enumerate(trees)))
    return [leaf for leaf in leaves if leaf.is_floating_point()]
