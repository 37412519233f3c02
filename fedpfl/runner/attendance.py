"""Count the clients that train, and warn if almost none does."""

from __future__ import annotations

from itertools import compress

from fedpfl import engine
from fedpfl.config.run import Run
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
    if not rows.stored_clients:
        return set()
    flags = rows.take("facts", rows.stored_clients)["trained"].tolist()
    return {*compress(rows.stored_clients, flags)}


class Attendance:
    """Count participations that made a step, and warn once if almost none did.

    Args:
        run: the built run.
        state: what server and clients hold before the first round that is counted.
    """

    def __init__(self, run: Run, state: engine.State):
        self._run = run
        self._rounds = self._planned = self._trained = 0
        self._has_warned = False
        self.has_steps = bool(find_trained_clients(state))
        """Whether any client has made a step."""

    def count_round(self, outcome: engine.Outcome, cohort_size: int) -> None:
        """Count a round, for which `cohort_size` clients were drawn."""
        trained = int(outcome.trained.sum())
        self.has_steps |= trained > 0
        # Early stopping shrinks the cohort.
        is_shrunk = self._run.stopping.early
        self._planned += min(self._run.cohort, cohort_size) if is_shrunk else self._run.cohort
        self._trained += trained
        self._rounds += 1

    def make_warnings(self, is_last: bool) -> list[str]:
        """Return one line, once, if few planned participations made a step."""
        is_due = self._rounds >= PATIENCE or is_last
        is_rare = self._trained <= ALMOST_NOBODY_SHARE * self._planned
        if self._has_warned or not (is_due and is_rare):
            return []
        self._has_warned = True
        return [
            f"almost nobody trains: {self._trained} of {self._planned} planned participations made "
            f"a step in {pluralize(self._rounds, 'round')}; look at system.deadline, "
            "system.availability and system.dropout (columns late and dropped), and at "
            "partition.min_samples"
        ]
