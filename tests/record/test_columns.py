"""Every column of rounds.csv has its name, words and kind in one place."""

import pytest
import torch

from fedpfl.engine import measures
from fedpfl.engine.calls import Counts
from fedpfl.engine.evaluate import summarize_scores
from fedpfl.ground.tasks import TASKS
from fedpfl.record.columns import (
    METRICS,
    round_columns,
    task_of_columns,
)

STATISTICS = ("accuracy", "accuracy_pooled", "accuracy_std", "accuracy_worst10", "loss")
SUMMED = ("precision", "recall", "sensitivity", "specificity", "kappa")
MEASURES = ("f1", "balanced", "auroc", "ece", *SUMMED, "auprc")


def test_the_statistics_are_those_that_the_engine_counts():
    counts = Counts(torch.tensor([1, 0]), torch.tensor([2, 3]), torch.tensor([0.5, 1.5]))
    assert tuple(summarize_scores(counts)) == STATISTICS
    assert {*measures.MEASURES, *measures.SUMMED_MEASURES} == {*MEASURES}
    told = dict.fromkeys(MEASURES, torch.ones(2)) | dict.fromkeys(SUMMED, torch.ones(2, 3, 4))
    pooled = {f"{name}_pooled" for name in SUMMED}
    measured = summarize_scores(counts._replace(measures=told))
    assert measured.keys() == {*STATISTICS, *MEASURES, *pooled}


@pytest.mark.parametrize("task", TASKS.values())
def test_each_task_has_columns_of_its_own_score_alone(task):
    columns = round_columns(True, True, task=task)
    assert task_of_columns(columns) is task
    others = [other.score for other in TASKS.values() if other is not task]
    assert not [name for name in columns if any(score in name for score in others)]
    tested = [name for name in columns if name.startswith(task.score)]
    assert {task.score, f"{task.score}_std", f"{task.score}_worst10"} <= {*tested}
    assert {f"{prefix}{name}" for name in tested for prefix in ("val_", "unseen_ft_")} <= {*columns}
    assert METRICS[task.score].best == ("max" if task.is_higher_better else "min")
    assert METRICS[task.score].unit == task.unit
