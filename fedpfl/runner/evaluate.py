"""All clients judged: by their personal models, and after fine-tuning where that is due."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from fedpfl import engine
from fedpfl.config.plan import Run
from fedpfl.data import Federation
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.evaluate import (
    accuracy_per_client,
    cross_client_accuracy,
    mean_of_defined,
    non_finite_clients,
    pooled_accuracy,
    summarize_accuracy,
)
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.methods import Method
from fedpfl.runner.faults import Diverged


class Evaluation(NamedTuple):
    """Hold an evaluation: columns of the row, accuracies by column and the client's number, lines
    for the user.

    matrix: of everybody's model on everybody's samples, see `Round`; [] where it is not asked for,
    or too large.
    """

    row: dict[str, float | None]
    clients: dict[str, dict[int, float]]
    notes: list[str]
    matrix: list[list[float]]


MATRIX = 100
"""Clients of a federation whose matrix is kept, at most."""


def evaluate_clients(
    run: Run, backend: engine.Backend, state: engine.State, alone: bool, last: bool
) -> Evaluation:
    """Evaluate every client. Raises Diverged where a personal model is not finite.

    alone: whether the server sends nothing, so that a newcomer's model is the one that all began
    with. last: of the run's rounds, after which it fine-tunes whatever `eval.finetune_every`.
    """
    tunings: list[engine.FineTuning | None] = [None]
    if run.eval.finetune_epochs and (state.round % run.eval.finetune_every == 0 or last):
        draws = Draws(run.settings.seed, "finetune", state.round)
        local = replace(run.local, epochs=run.eval.finetune_epochs, steps=None)
        tunings.append(engine.FineTuning(local, draws, run.eval.finetune_part))
    judged = Evaluation({}, {}, [], [])
    for tuning in tunings:
        _judge(
            judged, run, backend, run.federation, state, tuning, {"test": "", "validation": "val_"}
        )
    if run.eval.common and not alone:
        judged.row["server_accuracy"] = _server(run, backend, state)
    if run.unseen:
        if alone and state.round <= run.eval.every:
            judged.notes.append(
                "nothing is sent to clients: newcomers are judged after fine-tuning alone"
            )
        for tuning in tunings[1 if alone else 0 :]:
            _judge(
                judged,
                run,
                backend,
                run.unseen,
                make_newcomer_state(run, state),
                tuning,
                {"test": "unseen_"},
            )
    return judged


def _judge(
    judged: Evaluation,
    run: Run,
    backend: engine.Backend,
    federation: Federation,
    state: engine.State,
    tuning: engine.FineTuning | None,
    prefixes: dict[str, str],
) -> None:
    """Add what one federation's clients come to. prefixes: of the columns, by split."""
    everyone, when = list(range(federation.clients)), "ft_" if tuning else ""
    ours = run.eval.common and federation is run.federation and not tuning
    common = federation.merged(MATRIX) if ours else None
    tallies = backend.evaluate_splits(
        EvalCall(
            method=run.method,
            federation=federation,
            state=state,
            clients=everyone,
            tuning=tuning,
            before_evaluation=make_adaptation(run, state),
            measures=run.settings.metrics,
            common_federation=common,
        )
    )
    counts = {
        f"{prefix}{when}": tallies[split] for split, prefix in prefixes.items() if split in tallies
    }
    lost = [
        federation.number(client)
        for tally in counts.values()
        for client in non_finite_clients(tally)
    ]
    if lost and not tuning:
        raise Diverged(
            f"training diverged: the model of client {lost[0]} is not finite; lower local.lr"
        )
    for prefix, tally in counts.items():
        for name, each in accuracy_per_client(tally).items():
            numbered = {federation.number(client): value for client, value in enumerate(each)}
            judged.clients.setdefault(f"{prefix.removeprefix('unseen_')}{name}", {}).update(
                numbered
            )
        if not lost:  # a mean over the others would flatter
            judged.row.update(
                {f"{prefix}{name}": value for name, value in summarize_accuracy(tally).items()}
            )
    if common:
        matrix, whole = cross_client_accuracy(tallies["common"])
        judged.row["common_accuracy"] = mean_of_defined(whole)
        judged.clients["common_accuracy"] = {
            federation.number(client): float(own) for client, own in enumerate(whole)
        }
        judged.matrix.extend(matrix.tolist() if federation.clients <= MATRIX else [])
    if lost:
        note = f"fine-tuning diverged at {len({*lost})} of {len(everyone)} clients, client {lost[0]} the first"
        judged.notes.append(f"round {state.round}: {note}; its columns stay empty")


def collect_server_parameters(run: Run, state: engine.State) -> dict[str, Tensor]:
    """Return what the server holds of the network's parameters, by name; {} where all stays with
    the clients.
    """
    values: dict[str, Tensor] = {}
    for part in (state.server, *state.server.values()):
        for name, leaf in part.items() if isinstance(part, dict) else ():
            if (
                isinstance(leaf, Tensor)
                and name in run.net.params
                and leaf.shape == run.net.params[name].shape
            ):
                values.setdefault(name, leaf)
    return tree.select(values, [name for name in run.net.params if name in values])


def _server(run: Run, backend: engine.Backend, state: engine.State) -> float | None:
    """Return what the server's model has right of all test samples, in percent; None where it has
    no whole one.

    It is judged as FedAvg's would be.
    """
    model, everyone = collect_server_parameters(run, state), list(range(run.federation.clients))
    buffers: tree.Tree = next(iter(state.server_buffers.values()), {})
    if model.keys() != run.net.params.keys() or buffers.keys() != run.net.buffers.keys():
        return None
    fresh = engine.make_initial_state(fedavg := Method(), run.net, len(everyone), run.device)
    held = replace(fresh, round=state.round, server=model, server_buffers={"main": buffers})
    counts = backend.evaluate(EvalCall(fedavg, run.federation, held, everyone))
    return None if non_finite_clients(counts) else pooled_accuracy(counts)


def make_newcomer_state(run: Run, state: engine.State) -> engine.State:
    """Return the state as clients meet it who have never taken part: the server's, and theirs from
    the beginning.
    """
    assert run.unseen
    fresh = engine.make_initial_state(
        run.method, run.net, run.unseen.clients, run.device, seed=run.settings.seed
    )
    return replace(state, rows=fresh.rows, members=state.rows)


def make_adaptation(run: Run, state: engine.State) -> engine.FineTuning:
    """Return how methods look at training data in `before_evaluation`."""
    return engine.FineTuning(run.local, Draws(run.settings.seed, "adapt", state.round))
