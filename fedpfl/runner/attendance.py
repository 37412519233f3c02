"""Count the clients that train, and warn if almost none does."""

from __future__ import annotations

from collections import Counter
from itertools import compress

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


REASONS = {
    "late": "came late (system.deadline)",
    "lost": "were lost (system.availability, system.dropout)",
    "idle": "had no step to make (partition.min_samples)",
}
"""Why a planned participation makes no step."""


def find_trained_clients(state: engine.State) -> set[int]:
    """Return the indices of clients that have made a step."""
    rows = state.rows
    trained: list[int] = []
    if rows.stored_clients:
        flags = rows.take("facts", rows.stored_clients)["trained"].tolist()
        trained = [*compress(rows.stored_clients, flags)]
    if not rows.is_stored_here:
        return set(trained)
    # Each process knows its own clients alone where states are sharded.
    parts = ranks.gather_to_main([torch.tensor(trained, dtype=torch.int64)])
    by_process = ranks.broadcast_value(dict(enumerate(parts)))
    return set(torch.cat([*by_process.values()]).tolist())


class Attendance:
    """Count participations that made a step, and warn once if almost none did.

    Args:
        run: the built run.
        state: what server and clients hold before the first round that is counted.
    """

    def __init__(self, run: Run, state: engine.State):
        self._run = run
        self._rounds = 0
        self._counts: Counter[str] = Counter()
        self._has_warned = False
        self.has_steps = bool(find_trained_clients(state))
        """Whether any client has made a step."""

    def count_round(
        self, outcome: engine.Outcome, cohort_size: int, clock_columns: dict[str, int]
    ) -> None:
        """Count a round.

        Args:
            outcome: of the round.
            cohort_size: clients drawn for it.
            clock_columns: its columns of simulated time, {} without any.
        """
        trained_count = int(outcome.trained.sum())
        self.has_steps |= trained_count > 0
        planned = self._run.cohort
        if self._run.stopping.early:  # which shrinks the cohort
            planned = min(planned, cohort_size)
        # Late clients are among those that are dropped.
        late = clock_columns.get("late", 0)
        lost = clock_columns.get("dropped", 0) - late
        idle = len(outcome.cohort) - trained_count
        self._rounds += 1
        self._counts.update(planned=planned, trained=trained_count, late=late, lost=lost, idle=idle)

    def make_warnings(self, is_last: bool) -> list[str]:
        """Return one line, once, if few planned participations made a step."""
        counts = self._counts
        is_due = self._rounds >= PATIENCE or is_last
        is_rare = counts["trained"] <= ALMOST_NOBODY_SHARE * counts["planned"]
        if self._has_warned or not (is_due and is_rare):
            return []
        self._has_warned = True
        reasons = [f"{counts[key]} {reason}" for key, reason in REASONS.items() if counts[key]]
        text = (
            f"almost nobody trains: {counts['trained']} of {counts['planned']} planned "
            f"participations made a step in {pluralize(self._rounds, 'round')}"
        )
        return [": ".join(filter(None, (text, ", ".join(reasons))))]
