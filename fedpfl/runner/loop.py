"""The rounds of a run: train a cohort, judge everyone, hand the round on.

This is all that a run does. Whoever takes a round writes, shows, saves and judges it: session.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from fedpfl import engine
from fedpfl.config.plan import Run
from fedpfl.engine.evaluate import pooled_accuracy
from fedpfl.ground.errors import FedpflError
from fedpfl.record.columns import round_columns
from fedpfl.runner.attendance import MODEL_COLUMNS, Attendance
from fedpfl.runner.evaluate import Evaluation, evaluate_clients
from fedpfl.runner.faults import Diverged
from fedpfl.runner.models import Models

IMPURE = (
    "method={method} draws global random numbers ({names}): they are seeded so that the run repeats, for which the "
    "loop backend takes one client at a time; draw in `sample` instead (docs/safety.md)"
)


@dataclass(eq=False)
class Round(Models):
    """A finished round, and the models after it, which can be asked for until the next one begins.

    row: of rounds.csv, None where nothing was measured. clients: percent correct by column and
    client, {} unless all
    were judged. matrix: how each client's model does on each one's test samples, `[clients,
    clients]`, where that was
    judged. notes: lines for the user. last: whether it ends the run.
    """

    run: Run = field(repr=False)
    state: engine.State = field(repr=False)
    row: dict[str, Any]
    clients: dict[str, dict[int, float]] = field(repr=False)
    matrix: list[list[float]] = field(repr=False)
    notes: list[str] = field(repr=False)
    last: bool = field(repr=False)
    over: bool = field(default=False, repr=False)

    @property
    def judged(self) -> bool:
        """Tell whether all clients were judged."""
        return bool(self.clients)

    @property
    def _run(self) -> Run:
        return self.run

    @property
    def _state(self) -> engine.State:
        if self.over:
            raise FedpflError(
                f"round {self.state.round} is over, and its models with it: ask before the next round"
            )
        return self.state


def train_rounds(
    run: Run,
    backend: engine.Backend,
    state: engine.State,
    evaluating: Callable[[int], None] = lambda round: None,
) -> Iterator[Round]:
    """Yield the rounds that follow on `state`, which is used up. Raises Diverged.

    evaluating: told before all clients are evaluated, after which round.
    """
    settings, federation = run.settings, run.federation
    planned = islice(run.draw_cohorts(), state.round, None)
    kinds = {"common": run.eval.common, "system": run.clock, "privacy": run.account}
    asked = [*settings.metrics, *(kind for kind, there in kinds.items() if there)]
    unmeasured = dict.fromkeys(round_columns(bool(federation.validation), bool(run.unseen), asked))
    cohort, told = _pick_next(run, state, planned), False
    attendance = Attendance(run, state)
    while cohort is not None:
        # ---- train
        began = time.monotonic()
        local = run.local.at(state.round + 1, settings.rounds)
        about = backend, run.method, federation, state, cohort, local, settings.seed, run.stopping
        if run.clock:
            state, outcome, timed = engine.play_timed_round(run.clock, run.cohort, *about)
        else:
            (state, outcome), timed = (
                engine.play_round(*about, account=run.account, secret=run.secret),
                {},
            )
        row: dict[str, Any] = {"round": state.round, **unmeasured, **timed}
        row |= _trained(outcome, [federation.number(client) for client in outcome.cohort])
        attendance.count(outcome, len(cohort), timed)
        if attendance.is_empty:
            row |= dict.fromkeys(MODEL_COLUMNS)
        if run.account:
            row["epsilon"] = run.account.epsilon(state.round)
        row["seconds"] = time.monotonic() - began
        cohort = _pick_next(run, state, planned)

        # ---- judge
        judged, last = Evaluation({}, {}, [], []), cohort is None
        # What nobody has trained is no result of the method's.
        if (state.round % run.eval.every == 0 or last) and not attendance.is_empty:
            evaluating(state.round)
            began = time.monotonic()
            judged = evaluate_clients(
                run, backend, state, bool(outcome.cohort) and not outcome.traffic.values_down, last
            )
            row |= {**judged.row, "eval_seconds": time.monotonic() - began}

        # ---- hand on
        judged.notes.extend(attendance.warning(last))
        if not told and (names := engine.find_global_draws(run.method)):
            judged.notes.append(
                IMPURE.format(method=run.config["method"]["name"], names=", ".join(names))
            )
            told = True
        played = Round(run, state, row, judged.clients, judged.matrix, judged.notes, last)
        yield played
        played.over = not last


def _pick_next(run: Run, state: engine.State, planned: Iterator[list[int]]) -> list[int] | None:
    """Return the next round's cohort, None where the run is over."""
    drawn = next(planned, None)
    if drawn is None:
        return None
    cohort = engine.pick_cohort(state, drawn, run.settings.seed)
    # Poisson's rule may draw nobody, and the run goes on; early stopping may leave nobody.
    return cohort if cohort or run.poisson else None


def _trained(outcome: engine.Outcome, cohort: list[int]) -> dict[str, Any]:
    """Return the columns that each round has. Raises Diverged where a client's numbers are not
    finite.
    """
    if not bool(outcome.finite.all()):
        client = cohort[int((~outcome.finite).nonzero()[0])]
        raise Diverged(
            f"training diverged: client {client} brought back numbers that are not finite; lower local.lr"
        )
    if not outcome.state_is_finite:
        raise Diverged(
            "training diverged: the server's numbers are not finite after the round; lower local.lr"
        )
    return {
        "participants": len(outcome.loss),
        "cohort_before": pooled_accuracy(outcome.before),
        "cohort_after": pooled_accuracy(outcome.after),
        "train_loss": float(outcome.loss.mean()) if cohort else None,
        **outcome.traffic._asdict(),
        **outcome.metrics,
    }
