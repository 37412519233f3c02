"""All clients evaluated: by their personal models, and after fine-tuning where that is due."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.engine.calls import Counts, EvalCall
from fedpfl.engine.evaluate import (
    cross_client_accuracy,
    mean_of_defined,
    non_finite_clients,
    pooled_accuracy,
    rates_per_client,
    scores_per_client,
    summarize_scores,
    summarize_success,
)
from fedpfl.engine.measures import INTERVAL
from fedpfl.ground import tree
from fedpfl.ground.records import Record, Values
from fedpfl.methods import Method
from fedpfl.runner.faults import Diverged

MAX_MATRIX_CLIENTS = 100
"""Clients of a federation whose accuracy matrix is kept, at most."""
RECOVERED_SHARE = 0.95
"""Share of the score before a shift from which on a run counts as recovered."""


class Evaluation(NamedTuple):
    """Hold an evaluation of all clients.

    Attributes:
        row: columns of rounds.csv.
        clients: accuracies by column and the client's number in the partition.
        notes: lines for the user.
        matrix: of everybody's model on everybody's samples, see `Round`; [] where it is not asked
            for, or too large.
    """

    row: dict[str, float | None]
    clients: dict[str, dict[int, float]]
    notes: list[str]
    matrix: list[list[float]]


def evaluate_clients(
    run: Run, backend: engine.Backend, state: engine.State, is_sent_nothing: bool, is_last: bool
) -> Evaluation:
    """Evaluate every client. Raises Diverged where a personal model is not finite.

    Args:
        run: the built run.
        backend: what computes the clients.
        state: what server and clients hold after the round.
        is_sent_nothing: whether the server sends nothing, so that a newcomer's model is the one
            that all began with.
        is_last: whether this is the run's last round, which always fine-tunes.
    """
    tunings: list[engine.FineTuning | None] = [None]
    if run.eval.finetune_epochs and (state.round % run.eval.finetune_every == 0 or is_last):
        draws = run.make_draws("finetune", state.round)
        tunings.append(run.eval.plan_tuning(run.local, draws))

    # ---- Clients that take part, before and after fine-tuning
    evaluation = Evaluation({}, {}, [], [])
    for tuning in tunings:
        call = _make_call(run, run.federation, state, tuning, is_last)
        _evaluate_federation(evaluation, run, backend, call)
    if run.eval.common and not is_sent_nothing:
        evaluation.row["server_accuracy"] = _evaluate_server_model(run, backend, state)

    # ---- Newcomers
    if run.newcomers:
        if is_sent_nothing and state.round <= run.eval.every:
            evaluation.notes.append(
                "nothing is sent to clients: newcomers are judged after fine-tuning alone"
            )
        newcomer_state = make_newcomer_state(run, state)
        for tuning in tunings[1:] if is_sent_nothing else tunings:
            call = _make_call(run, run.newcomers, newcomer_state, tuning, is_last)
            _evaluate_federation(evaluation, run, backend, call)
    return evaluation


def _evaluate_federation(
    evaluation: Evaluation, run: Run, backend: engine.Backend, call: EvalCall
) -> None:
    """Add the evaluation of one federation's honest clients.

    Args:
        evaluation: result so far, which is extended.
        run: the built run.
        backend: what computes the clients.
        call: about those who take part, or about newcomers.
    """
    # ---- Step 1: evaluate on the clients' own samples, and on everybody's where that is asked for.
    is_member = call.federation is run.federation
    counts_by_split = backend.evaluate_splits(call)
    counts = {"" if is_member else "unseen_": counts_by_split["test"]}
    if is_member and "validation" in counts_by_split:
        counts["val_"] = counts_by_split["validation"]
    diverged = _list_diverged(call, counts.values())
    if diverged and not call.tuning:
        raise Diverged(
            f"training diverged: the model of client {diverged[0]} is not finite; lower local.lr"
        )

    # ---- Step 2: each client's scores, and means; one over some of the clients would flatter.
    missing = _count_missing(evaluation, call, counts_by_split["test"], is_member)
    suffix = "ft_" if call.tuning else ""
    for prefix, split_counts in counts.items():
        scores = scores_per_client(split_counts, run.task)
        _add_client_scores(evaluation, call, f"{prefix}{suffix}", scores)
        if not diverged and not missing:
            means = summarize_scores(split_counts, run.task)
            evaluation.row.update(_prefix_names(means, f"{prefix}{suffix}"))

    # ---- Step 3: the success of an attack, and each client's model on everybody's samples.
    if run.adversary and run.adversary.triggered and not diverged:
        triggered = run.adversary.triggered[0 if is_member else 1]
        triggered_call = replace(call, federation=triggered, measures=(), common_federation=None)
        prefix = f"{'' if is_member else 'unseen_'}{suffix}"
        _add_success(evaluation, backend, triggered_call, prefix)
    if "common" in counts_by_split:
        _add_matrix(evaluation, call.federation, counts_by_split["common"])
    if diverged:
        evaluation.notes.append(
            f"round {call.state.round}: fine-tuning diverged at {len({*diverged})} of"
            f" {call.federation.clients} clients, client {diverged[0]} the first; its columns stay"
            " empty"
        )


def _count_missing(evaluation: Evaluation, call: EvalCall, counts: Counts, is_member: bool) -> int:
    """Count clients that did not answer, and say so."""
    evaluated = int((counts.total > 0).sum())
    missing = int((call.federation.test_sizes[call.clients] > 0).sum()) - evaluated
    if is_member and not call.tuning:
        evaluation.row["evaluated"] = evaluated
    if missing:
        evaluation.notes.append(
            f"round {call.state.round}: {missing} of {evaluated + missing} clients did not answer"
            f" the {'evaluation after fine-tuning' if call.tuning else 'evaluation'}; its columns"
            " stay empty"
        )
    return missing


def _list_diverged(call: EvalCall, counts: Iterable[Counts]) -> list[str]:
    """Return labels of the clients with models that are not finite."""
    positions = [position for part in counts for position in non_finite_clients(part)]
    return [call.federation.client_label(call.clients[position]) for position in positions]


def _make_call(
    run: Run,
    federation: Federation,
    state: engine.State,
    tuning: engine.FineTuning | None,
    is_last: bool,
) -> EvalCall:
    """Return the call that evaluates all honest clients of a federation."""
    # An interval by the bootstrap takes time; one of hits follows from their number.
    intervals = (INTERVAL,) if is_last and run.task.measures else ()
    clients = list(range(federation.clients))
    common: Federation | None = None
    if federation is run.federation:
        if run.adversary:
            clients = list(run.adversary.honest)
        if run.eval.common and not tuning:
            common = federation.merge_clients(MAX_MATRIX_CLIENTS)
    return EvalCall(
        method=run.method,
        federation=federation,
        state=state,
        clients=clients,
        tuning=tuning,
        before_evaluation=make_adaptation(run, state),
        measures=(*run.settings.metrics, *run.task.measures, *intervals),
        common_federation=common,
        horizon=run.horizon,
    )


def _add_success(
    evaluation: Evaluation, backend: engine.Backend, call: EvalCall, prefix: str
) -> None:
    """Add the success of an attack: at each client, and means.

    The call is about the samples of the attack.
    """
    counts = backend.evaluate(call)
    _add_client_scores(evaluation, call, prefix, {"asr": rates_per_client(counts).tolist()})
    evaluation.row.update(_prefix_names(summarize_success(counts), prefix))


def _prefix_names(values: Mapping[str, float | None], prefix: str) -> dict[str, float | None]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _add_client_scores(
    evaluation: Evaluation, call: EvalCall, prefix: str, scores: dict[str, list[float]]
) -> None:
    """Add each client's scores, newcomers' in the columns of those that take part."""
    for name, values in scores.items():
        column = f"{prefix.removeprefix('unseen_')}{name}"
        column_values = evaluation.clients.setdefault(column, {})
        for client, value in zip(call.clients, values, strict=True):
            column_values[call.federation.partition_number(client)] = value


def _add_matrix(evaluation: Evaluation, federation: Federation, counts: Counts) -> None:
    """Add the accuracies of each client's model on everybody's samples."""
    matrix, accuracies = cross_client_accuracy(counts)
    evaluation.row["common_accuracy"] = mean_of_defined(accuracies)
    evaluation.clients["common_accuracy"] = {
        federation.partition_number(client): float(accuracy)
        for client, accuracy in enumerate(accuracies)
    }
    if federation.clients <= MAX_MATRIX_CLIENTS:
        evaluation.matrix.extend(matrix.tolist())


def collect_server_parameters(run: Run, state: engine.State) -> dict[str, Tensor]:
    """Return the network's parameters that the server holds, by name; {} if clients keep all."""
    initial = run.net.params
    values: dict[str, Tensor] = {}
    # Methods hold the model as their state or as one part of it.
    for part in (state.server, *state.server.values()):
        for name, leaf in part.items() if isinstance(part, dict) else ():
            is_tensor = name in initial and isinstance(leaf, Tensor)
            if is_tensor and leaf.shape == initial[name].shape:
                values.setdefault(name, leaf)
    return {name: values[name] for name in initial if name in values}


def _evaluate_server_model(run: Run, backend: engine.Backend, state: engine.State) -> float | None:
    """Return the server model's accuracy on all test samples, in percent.

    The model is evaluated as FedAvg's would be. None where the server has no whole model.
    """
    model = collect_server_parameters(run, state)
    buffers: tree.Tree = next(iter(state.server_buffers.values()), {})
    if model.keys() != run.net.params.keys() or buffers.keys() != run.net.buffers.keys():
        return None
    fedavg = Method()
    clients = list(range(run.federation.clients))
    initial_state = engine.make_initial_state(fedavg, run.net, len(clients), run.device)
    server_state = replace(
        initial_state, round=state.round, server=model, server_buffers={"main": buffers}
    )
    counts = backend.evaluate(EvalCall(fedavg, run.federation, server_state, clients))
    return None if non_finite_clients(counts) else pooled_accuracy(counts)


def make_newcomer_state(run: Run, state: engine.State) -> engine.State:
    """Return the server's state beside initial client states, as newcomers meet it."""
    assert run.newcomers
    initial_state = engine.make_initial_state(
        run.method,
        run.find_net(run.newcomers),
        run.newcomers.clients,
        run.device,
        seed=run.settings.seed,
    )
    # Of members newcomers may read the states, where a method mixes models.
    return replace(state, rows=initial_state.rows, members=state.rows)


def make_adaptation(run: Run, state: engine.State) -> engine.FineTuning:
    """Return the settings with which methods read training data in `before_evaluation`."""
    return engine.FineTuning(run.local, run.make_draws("adapt", state.round))


def measure_recovery(
    run: Run, round_number: int, evaluation: Evaluation, previous_row: Values | None
) -> Record:
    """Return the columns of an evaluation that follow the last shift; empty before the first.

    Args:
        run: the built run.
        round_number: of the round that was evaluated.
        evaluation: of all clients after it.
        previous_row: of the evaluation before it, None without any.
    """
    previous_row = previous_row or {}
    start = run.shift.find_start(round_number)
    if start is None:
        return {}
    columns = {"since_shift": round_number - start}
    score = run.task.score
    score_before = previous_row.get("before_shift")
    recovery = previous_row.get("recovery")
    if previous_row.get("round", 0) <= start:  # the first evaluation in this world
        score_before = previous_row.get(score)
        recovery = None
    # 95 % of an error is no recovery from it.
    if score_before is None or not run.task.is_higher_better:
        return columns
    value = evaluation.row.get(score)
    is_recovered = value is not None and value >= RECOVERED_SHARE * score_before
    if recovery is None and is_recovered:
        recovery = columns["since_shift"]
    return {**columns, "before_shift": score_before, "recovery": recovery}
