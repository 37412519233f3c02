"""Who has made a step so far: a run in which nobody or almost nobody trains says so."""

from __future__ import annotations

from fedpfl import engine
from fedpfl.config.plan import Run
from fedpfl.engine.backends import ranks
from fedpfl.ground.errors import pluralize
from fedpfl.record.columns import ALMOST_NOBODY_SHARE

PATIENCE = 3
"""Rounds before a run is said to train almost nobody; one empty round may be chance."""
MODEL_COLUMNS = ("cohort_before", "cohort_after", "train_loss")
"""Columns that would show a model of which no client has trained a part."""


def find_trained_clients(state: engine.State) -> set[int]:
    """Return the clients that have ever made a step, by their place in the federation."""
    rows = state.rows
    flags = rows.take("facts", rows.written)["trained"].tolist() if rows.written else []
    here = [client for client, has_trained in zip(rows.written, flags, strict=True) if has_trained]
    # Each process knows its own clients alone where states are sharded.
    everywhere = ranks.share(ranks.collect([here])) if rows.mine else [here]
    return {client for clients in everywhere for client in clients}


def warn_if_few_train(run: Run, reached: int) -> str:
    """Return a line about a run that can train at most a tenth of its clients; "" of others.

    Args:
        run: what is to be played.
        reached: how many clients will be drawn at least once.
    """
    clients, idle = run.federation.clients, run.federation.idle(run.local.batch_size)
    able, name = clients - idle, run.config["method"]["name"]
    if not able:
        return (
            f"nobody can train: each of {pluralize(clients, 'client')} has fewer than 2 training samples, so method={name} "
            "gets no accuracy; use fewer clients, or a larger partition.min_samples"
        )
    if able <= ALMOST_NOBODY_SHARE * clients:
        return (
            f"almost nobody can train: {idle} of {pluralize(clients, 'client')} have fewer than 2 training samples; use "
            "fewer clients, or a larger partition.min_samples"
        )
    if reached <= ALMOST_NOBODY_SHARE * clients:
        rounds = pluralize(run.settings.rounds, "round")
        return (
            f"almost nobody will train: {reached} of {pluralize(clients, 'client')} are drawn in {rounds}; raise rounds or "
            "participation"
        )
    return ""


class Attendance:
    """Count who makes steps, and say once where almost nobody does.

    Args:
        run: what is played.
        state: where it begins or goes on.
    """

    def __init__(self, run: Run, state: engine.State):
        self._run = run
        self._trained = find_trained_clients(state)
        self._planned = self._taken = self._late = self._lost = self._idle = self._rounds = 0
        able = run.federation.clients - run.federation.idle(run.local.batch_size)
        self._has_warned = able <= ALMOST_NOBODY_SHARE * run.federation.clients  # `foreseen` has

    @property
    def is_empty(self) -> bool:
        """Tell whether no client has made a step yet."""
        return not self._trained

    def count(self, outcome: engine.Outcome, drawn: int, columns: dict[str, int]) -> None:
        """Take in a round.

        Args:
            outcome: what happened in it.
            drawn: how many clients were drawn for it.
            columns: those of simulated time, {} without any.
        """
        run = self._run
        able = [
            client
            for client, trained in zip(outcome.cohort, outcome.trained.tolist(), strict=True)
            if trained
        ]
        self._trained.update(able)
        self._rounds += 1
        self._planned += min(run.cohort, drawn) if run.stopping.early else run.cohort
        self._taken += len(able)
        self._idle += len(outcome.cohort) - len(able)
        self._late += columns.get("late", 0)
        self._lost += columns.get("dropped", 0)

    def warning(self, is_last: bool) -> list[str]:
        """Return a line, once, after rounds in which at most a tenth of the planned participations
        made a step.
        """
        due = self._rounds >= PATIENCE or is_last
        if self._has_warned or not due or self._taken > ALMOST_NOBODY_SHARE * self._planned:
            return []
        self._has_warned = True
        rounds = pluralize(self._rounds, "round")
        if self._taken:
            steps = f"{self._taken} of {self._planned} planned participations made a step"
            told = f"almost nobody trains: {steps} in {rounds}"
        else:
            told = f"nobody trains: no client has made a step in {rounds}"
        if self.is_empty:
            told += ", and there is no accuracy before one has"
        return [": ".join(filter(None, (told, self._reason())))]

    def _reason(self) -> str:
        """Say what kept clients from a step, and which key to change."""
        system, parts = self._run.system, list[str]()
        if self._late and system and system.deadline is not None:
            parts.append(f"{self._late} came late, raise system.deadline={system.deadline:g}")
        if self._lost > self._late:
            parts.append(
                f"{self._lost - self._late} were out of reach or lost (availability, system.dropout)"
            )
        if self._idle:
            parts.append(
                f"{self._idle} took part without a step, for lack of samples or as nothing moves in the method's phases"
            )
        if self._run.poisson:
            parts.append("privacy.sampling=poisson draws few; raise clients or participation")
        return "; ".join(parts)
