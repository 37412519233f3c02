"""Who has made a step so far: a run in which nobody or almost nobody trains says so."""

from __future__ import annotations

import torch

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.engine.backends import ranks
from fedpfl.ground.errors import pluralize
from fedpfl.record.columns import ALMOST_NOBODY_SHARE

PATIENCE = 3
"""Rounds before a run is said to train almost nobody; one empty round may be chance."""
MODEL_COLUMNS = (
    "cohort_before",
    "cohort_after",
    "cohort_loss_before",
    "cohort_loss_after",
    "train_loss",
)
"""Columns that would show a model of which no client has trained a part."""


def find_trained_clients(state: engine.State) -> set[int]:
    """Return the clients that have ever made a step, by their index in the federation."""
    rows = state.rows
    flags: list[bool] = []
    if rows.stored_clients:
        flags = rows.take("facts", rows.stored_clients)["trained"].tolist()
    local_clients = [
        client
        for client, has_trained in zip(rows.stored_clients, flags, strict=True)
        if has_trained
    ]
    if not rows.is_stored_here:
        return set(local_clients)
    # Each process knows its own clients alone where states are sharded.
    clients_of_processes = ranks.gather_to_main([torch.tensor(local_clients, dtype=torch.int64)])
    by_process = ranks.broadcast_value(dict(enumerate(clients_of_processes)))
    return {client for clients in by_process.values() for client in clients.tolist()}


def warn_if_few_train(run: Run, participants: int) -> str:
    """Return a line about a run that trains hardly any clients; "" for others.

    Args:
        run: what is to be played.
        participants: how many clients will be drawn at least once.
    """
    clients = run.federation.clients
    idle = run.federation.count_untrainable(run.local.batch_size)
    able = clients - idle
    clients_text = pluralize(clients, "client")
    if not able:
        method_name = run.config["method"]["name"]
        return (
            f"nobody can train: each of {clients_text} has fewer than 2 training samples, so "
            f"method={method_name} gets no {run.task.score_word}; use fewer clients, or a larger "
            "partition.min_samples"
        )
    if able <= ALMOST_NOBODY_SHARE * clients:
        return (
            f"almost nobody can train: {idle} of {clients_text} have fewer than 2 training "
            "samples; use fewer clients, or a larger partition.min_samples"
        )
    if participants <= ALMOST_NOBODY_SHARE * clients:
        rounds_text = pluralize(run.settings.rounds, "round")
        return (
            f"almost nobody will train: {participants} of {clients_text} are drawn in"
            f" {rounds_text}; raise rounds or participation"
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
        self._trained_clients = find_trained_clients(state)
        # Participations since this process began, by what became of them.
        self._planned_count = 0
        self._trained_count = 0
        self._late_count = 0
        self._lost_count = 0
        self._idle_count = 0
        self._rounds = 0
        clients = run.federation.clients
        able = clients - run.federation.count_untrainable(run.local.batch_size)
        # Then `warn_if_few_train` has warned before the run.
        self._has_warned = able <= ALMOST_NOBODY_SHARE * clients

    @property
    def has_steps(self) -> bool:
        """Return whether any client has made a step yet."""
        return bool(self._trained_clients)

    def count_round(
        self, outcome: engine.Outcome, cohort_size: int, clock_columns: dict[str, int]
    ) -> None:
        """Take in a round.

        Args:
            outcome: what happened in it.
            cohort_size: how many clients were drawn for it.
            clock_columns: columns of simulated time, {} without any.
        """
        flags = outcome.trained.tolist()
        trained = [
            client for client, has_trained in zip(outcome.cohort, flags, strict=True) if has_trained
        ]
        self._trained_clients.update(trained)
        self._rounds += 1
        planned = self._run.cohort
        if self._run.stopping.early:  # which shrinks the cohort
            planned = min(planned, cohort_size)
        self._planned_count += planned
        self._trained_count += len(trained)
        self._idle_count += len(outcome.cohort) - len(trained)
        self._late_count += clock_columns.get("late", 0)
        self._lost_count += clock_columns.get("dropped", 0)

    def make_warnings(self, is_last: bool) -> list[str]:
        """Return a line, once, where at most a tenth of planned participations made a step."""
        is_due = self._rounds >= PATIENCE or is_last
        is_low = self._trained_count <= ALMOST_NOBODY_SHARE * self._planned_count
        if self._has_warned or not is_due or not is_low:
            return []
        self._has_warned = True
        rounds_text = pluralize(self._rounds, "round")
        if self._trained_count:
            text = (
                f"almost nobody trains: {self._trained_count} of {self._planned_count} planned "
                f"participations made a step in {rounds_text}"
            )
        else:
            text = f"nobody trains: no client has made a step in {rounds_text}"
        if not self.has_steps:
            text += f", and there is no {self._run.task.score_word} before one has"
        return [": ".join(filter(None, (text, self._explain())))]

    def _explain(self) -> str:
        """Say what kept clients from a step, and which key to change."""
        system = self._run.system
        reasons: list[str] = []
        if self._late_count and system and system.deadline is not None:
            reasons.append(
                f"{self._late_count} came late, raise system.deadline={system.deadline:g}"
            )
        # Late clients are among those that are lost.
        if self._lost_count > self._late_count:
            reasons.append(
                f"{self._lost_count - self._late_count} were out of reach or lost "
                "(availability, system.dropout)"
            )
        if self._idle_count:
            reasons.append(
                f"{self._idle_count} took part without a step, for lack of samples or as nothing "
                "moves in the method's phases"
            )
        if self._run.is_poisson_sampled:
            reasons.append("privacy.sampling=poisson draws few; raise clients or participation")
        return "; ".join(reasons)
