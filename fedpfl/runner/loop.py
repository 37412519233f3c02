"""The rounds of a run: train a cohort, evaluate everyone, hand the round on.

This is all that a run does. session.py writes, shows and saves each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import compress, islice

import torch

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.engine.evaluate import pooled_accuracy, pooled_loss
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.record.columns import CLIENT_PRIVACY, KIND_COLUMNS, PRIVACY_SCOPE, round_columns
from fedpfl.runner.evaluate import Evaluation, evaluate_clients, measure_recovery
from fedpfl.runner.faults import Diverged
from fedpfl.runner.models import Models

IMPURE = (
    "method={method} draws global random numbers ({names}): they are seeded so that the run "
    "repeats, for which the loop backend takes one client at a time; draw in `sample` instead "
    "(docs/safety.md)"
)

MODEL_COLUMNS = (
    "cohort_before",
    "cohort_after",
    "cohort_loss_before",
    "cohort_loss_after",
    "train_loss",
)
"""Columns that stay empty until a client has made a step."""


@dataclass(eq=False)
class Round(Models):
    """A finished round. Its models can be asked for until the next round begins.

    Attributes:
        run: the built run.
        state: what server and clients hold after the round.
        row: the row of rounds.csv; None where nothing was measured.
        clients: scores by column and client; {} unless all were evaluated.
        matrix: accuracy of each client's model on each client's test samples, `[clients, clients]`,
            where `eval.common` asks for it.
        notes: lines for the user.
        is_last: whether it ends the run.
        is_over: whether the next round has begun, which overwrites the models.
    """

    run: Run = field(repr=False)
    state: engine.State = field(repr=False)
    row: Record
    clients: dict[str, dict[int, float]] = field(repr=False)
    matrix: list[list[float]] = field(repr=False)
    notes: list[str] = field(repr=False)
    is_last: bool = field(repr=False)
    is_over: bool = field(default=False, repr=False)

    @property
    def is_evaluated(self) -> bool:
        """Tell if all clients were evaluated after this round."""
        return bool(self.clients)

    @property
    def _run(self) -> Run:
        return self.run

    @property
    def _state(self) -> engine.State:
        if self.is_over:
            raise FedpflError(
                f"round {self.state.round} is over, and its models with it: "
                "ask before the next round"
            )
        return self.state


def train_rounds(
    run: Run,
    backend: engine.Backend,
    state: engine.State,
    on_evaluation: Callable[[int], None] = lambda round_number: None,
    evaluated_row: Values | None = None,
) -> Iterator[Round]:
    """Yield one Round per remaining round. Takes ownership of `state`.

    Args:
        run: the built run.
        backend: what computes the clients.
        state: what server and clients hold before the first of these rounds.
        on_evaluation: called with the number of a round before all clients are evaluated.
        evaluated_row: of the last evaluation before these rounds, None without any.

    Raises:
        Diverged: where numbers are not finite.
    """
    # All cohorts are drawn from the seed, so that a resumed run goes on with those that are left.
    drawn_cohorts = islice(run.draw_cohorts(), state.round, None)
    empty_columns = dict.fromkeys(_list_columns(run))
    has_steps = bool(find_trained_clients(state))
    has_warned_impure = False
    cohort = _pick_cohort(run, state, drawn_cohorts)
    while cohort is not None:
        # ---- Step 1: train the cohort on its samples of this round.
        run = run.in_round(state.round + 1)
        start_time = time.monotonic()
        state, outcome, clock_columns = _train_cohort(run, backend, state, cohort)
        row: Record = {"round": state.round, **empty_columns, **clock_columns}
        row |= _measure_training(run, state, outcome)
        has_steps |= bool(outcome.trained.any())
        if not has_steps:
            row |= dict.fromkeys(name for name in MODEL_COLUMNS if name in row)
        row["seconds"] = time.monotonic() - start_time
        # Before the evaluation, which is complete after the last round.
        cohort = _pick_cohort(run, state, drawn_cohorts)
        is_last = cohort is None

        # ---- Step 2: evaluate everyone, once any client has trained.
        evaluation = Evaluation({}, {}, [], [])
        if (state.round % run.eval.every == 0 or is_last) and has_steps:
            on_evaluation(state.round)
            evaluation = _evaluate_everyone(run, backend, state, outcome, is_last)
            evaluation.clients.update(_list_loads(run, outcome))
            row |= evaluation.row | measure_recovery(run, state.round, evaluation, evaluated_row)
            evaluated_row = dict(row)

        # ---- Step 3: hand the round on.
        impure_notes = [] if has_warned_impure else _describe_global_draws(run)
        has_warned_impure |= bool(impure_notes)
        notes = [*evaluation.notes, *impure_notes]
        played_round = Round(run, state, row, evaluation.clients, evaluation.matrix, notes, is_last)
        yield played_round
        played_round.is_over = not is_last


def _evaluate_everyone(
    run: Run,
    backend: engine.Backend,
    state: engine.State,
    outcome: engine.Outcome,
    is_last: bool,
) -> Evaluation:
    """Evaluate all clients after a round, and take the time."""
    start_time = time.monotonic()
    # Local-Only, for example: newcomers receive nothing, too.
    is_sent_nothing = bool(outcome.cohort) and not outcome.traffic.values_down
    evaluation = evaluate_clients(run, backend, state, is_sent_nothing, is_last)
    seconds = time.monotonic() - start_time
    return evaluation._replace(row={**evaluation.row, "eval_seconds": seconds})


def _list_loads(run: Run, outcome: engine.Outcome) -> dict[str, dict[int, float]]:
    """Return the costs of a round's clients by column and number, where kinds differ."""
    columns: dict[str, dict[int, float]] = {}
    for load in outcome.turn_loads if run.kinds else ():
        numbers = [run.federation.partition_number(client) for client in load.clients]
        values = {**load.traffic, "flops": load.flops[:, 0]}
        for name in tree.select(values, KIND_COLUMNS[2:]):
            column = columns.setdefault(name, {})
            for number, value in zip(numbers, values[name].tolist(), strict=True):
                column[number] = column.get(number, 0) + value
    return columns


def _describe_global_draws(run: Run) -> list[str]:
    """Return a note where the method draws from the generators of the process."""
    names = ", ".join(engine.find_global_draws(run.method))
    if not names:
        return []
    return [IMPURE.format(method=run.config["method"]["name"], names=names)]


def _list_columns(run: Run) -> tuple[str, ...]:
    """Return the columns of rounds.csv that this run fills."""
    scopes = {
        "common": run.eval.common,
        "system": run.clock,
        PRIVACY_SCOPE: run.account,
        CLIENT_PRIVACY: run.client_account,
        "attack": run.adversary and run.adversary.triggered,
        "shift": run.shift.at,
    }
    names = [*run.settings.metrics, *(name for name, is_on in scopes.items() if is_on)]
    return round_columns(bool(run.federation.validation), bool(run.newcomers), names, run.task)


def _train_cohort(
    run: Run, backend: engine.Backend, state: engine.State, cohort: list[int]
) -> tuple[engine.State, engine.Outcome, Record]:
    """Play one round; return the new state, what happened, and the columns of simulated time."""
    federation = run.federation
    if run.adversary:
        # Attackers may train on poisoned samples from some round on.
        federation = run.adversary.choose_data(federation, state.round + 1)
    setup = engine.RoundSetup(
        backend=backend,
        method=run.method,
        federation=federation,
        local=run.local.for_round(state.round + 1, run.settings.rounds),
        seed=run.settings.seed,
        stopping=run.stopping,
        account=run.client_account,
        secret=run.secret,
        adversary=run.adversary,
        defence=run.defence,
        protection=run.sample_protection,
    )
    if run.clock:
        return engine.play_timed_round(run.clock, run.cohort, setup, state, cohort)
    # Costs by kind are counted where clients.csv follows; nodes count none.
    number = state.round + 1
    is_due = number % run.eval.every == 0 or number == run.settings.rounds
    counts_flops = run.kinds and is_due and backend.name != "nodes"
    state, outcome = engine.play_round(setup, state, cohort, {} if counts_flops else None)
    return state, outcome, {}


def _pick_cohort(
    run: Run, state: engine.State, drawn_cohorts: Iterator[list[int]]
) -> list[int] | None:
    """Return the next round's cohort, None where the run is over."""
    drawn_cohort = next(drawn_cohorts, None)
    if drawn_cohort is None:
        return None
    cohort = engine.pick_cohort(state, drawn_cohort, run.settings.seed)
    # An empty Poisson cohort is a round; early stopping that leaves no client ends the run.
    return cohort if cohort or run.is_poisson_sampled else None


def _find_remedy(run: Run) -> str:
    """Return advice for a run that diverged."""
    if run.adversary and run.adversary.attackers and not run.defence:
        return "the attack may be the reason; lower its strength or local.lr, or choose a defence"
    return "lower local.lr"


def _measure_training(run: Run, state: engine.State, outcome: engine.Outcome) -> Record:
    """Return the columns that each round has. Raises Diverged where numbers are not finite."""
    # ---- One client's numbers would spoil every client's from the next round on.
    if not bool(outcome.finite.all()):
        index = outcome.cohort[int((~outcome.finite).nonzero()[0])]
        client = run.federation.partition_number(index)
        raise Diverged(
            f"training diverged: client {client} brought back numbers that are not finite; "
            f"{_find_remedy(run)}"
        )
    if not outcome.state_is_finite:
        raise Diverged(
            "training diverged: the server's numbers are not finite after the round;"
            f" {_find_remedy(run)}"
        )
    rows: Record = {
        "before": outcome.before,
        "after": outcome.after,
        "loss": outcome.loss,
    }
    if run.adversary:
        is_honest = [client in run.adversary.honest for client in outcome.cohort]
        # The attack decides an attacker's scores.
        rows = tree.take(rows, torch.tensor(is_honest, dtype=torch.bool))
    prefix, measure = "cohort_loss", pooled_loss
    if run.task is CLASSIFICATION:
        prefix, measure = "cohort", pooled_accuracy
    train_loss = None
    if len(rows["loss"]) and not run.sample_protection:  # which leaves no loss of training samples
        train_loss = float(rows["loss"].mean())
    columns = {
        "participants": len(outcome.loss),
        f"{prefix}_before": measure(rows["before"]),
        f"{prefix}_after": measure(rows["after"]),
        "train_loss": train_loss,
        **outcome.traffic._asdict(),
        **outcome.metrics,
    }
    if run.account:
        columns["epsilon"] = run.account.epsilon(state.round)
    return columns


def find_trained_clients(state: engine.State) -> set[int]:
    """Return the indices of clients that have made a step."""
    rows = state.rows
    if not rows.stored_clients:
        return set()
    flags = rows.take("facts", rows.stored_clients)["trained"].tolist()
    return {*compress(rows.stored_clients, flags)}
