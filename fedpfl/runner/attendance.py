"""Count the clients that train, and warn if almost none does."""

from __future__ import annotations

from collections import Counter

import torch

from fedpfl import engine
from fedpfl.config.run import Run
from fedpfl.engine.backends import ranks
from fedpfl.ground.errors import pluralize
from fedpfl.record.columns import ALMOST_NOBODY_SHARE

PATIENCE = 3
"""Rounds before the warning; one empty round may be chance."""
MODEL_COLUMNS = (
    "cohort_before",
    "cohort_after",
    "cohort_loss_before",
    "cohort_loss_after",
    "train_loss",
)
"""Columns that stay empty until a client has made a step."""


def find_trained_clients(state: engine.State) -> set[int]:
    """Return the indices of clients that have made a step."""
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


class Attendance:
    """Count participations that made a step, and warn once if almost none did.

    Args:
        run: the built run.
        state: what server and clients hold before the first round that is counted.
    """

    def __init__(self, run: Run, state: engine.State):
        self._run = run
        self._trained_clients = find_trained_clients(state)
        self._rounds = 0
        self._counts: Counter[str] = Counter()
        self._has_warned = False

    @property
    def has_steps(self) -> bool:
        """Tell if any client has made a step."""
        return bool(self._trained_clients)

    def count_round(
        self, outcome: engine.Outcome, cohort_size: int, clock_columns: dict[str, int]
    ) -> None:
        """Count a round.

        Args:
            outcome: of the round.
            cohort_size: clients drawn for it.
            clock_columns: its columns of simulated time, {} without any.
        """
        trained = [
            client
            for client, has_trained in zip(outcome.cohort, outcome.trained.tolist(), strict=True)
            if has_trained
        ]
        self._trained_clients.update(trained)
        self._rounds += 1
        planned = self._run.cohort
        if self._run.stopping.early:  # which shrinks the cohort
            planned = min(planned, cohort_size)
        late = clock_columns.get("late", 0)
        self._counts.update(
            {
                "planned": planned,
                "trained": len(trained),
                "came late (system.deadline)": late,
                # Late clients are among those that are lost.
                "were lost (system.availability, system.dropout)": clock_columns.get("dropped", 0)
                - late,
                "had no step to make (partition.min_samples)": len(outcome.cohort) - len(trained),
            }
        )

    def make_warnings(self, is_last: bool) -> list[str]:
        """Return one line, once, if few planned participations made a step."""
        is_due = self._rounds >= PATIENCE or is_last
        counts = dict(self._counts)
        planned = counts.pop("planned", 0)
        trained = counts.pop("trained", 0)
        if self._has_warned or not is_due or trained > ALMOST_NOBODY_SHARE * planned:
            return []
        self._has_warned = True
        reasons = [f"{count} {reason}" for reason, count in counts.items() if count]
        text = (
            f"almost nobody trains: {trained} of {planned} planned participations made a step in "
            f"{pluralize(self._rounds, 'round')}"
        )
        return [": ".join(filter(None, (text, ", ".join(reasons))))]
