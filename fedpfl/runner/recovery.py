"""How far a run is from its last shift, and whether it has recovered."""

from __future__ import annotations

from fedpfl.config.run import Run
from fedpfl.ground.records import Record, Values
from fedpfl.runner.evaluate import Evaluation

RECOVERED_SHARE = 0.95
"""Share of the score before a shift from which on a run counts as recovered."""


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
