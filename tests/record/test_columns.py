"""Every column of rounds.csv has its name, words and kind in one place."""

import pytest
import torch

from fedpfl.engine import measures
from fedpfl.engine.calls import Counts
from fedpfl.engine.evaluate import summarize_scores
from fedpfl.ground.tasks import TASKS
from fedpfl.record.columns import (
    METRICS,
    SPLITS,
    round_columns,
    task_of_columns,
)
from fedpfl.report.table import format_number

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


def test_every_label_is_one_metrics_and_says_what_it_is_about():
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.is_evaluated == (metric.scope in (*SPLITS, "common", "shift"))
        assert metric.fine_tuned == ("after fine-tuning" in metric.label) == ("ft_" in name)
        assert ("unseen" in metric.label) == name.startswith("unseen_")
        assert ("validation" in metric.label) == name.startswith("val_")
        assert metric.label.endswith("(%)") == (metric.unit == "%") == (metric.kind == "percent")
        is_error = any(
            word in name for word in ("loss", "ece", "rmse", "asr", "brier", "perplexity")
        )
        is_spread = name.endswith("_std")
        assert (metric.best == "min") == (is_error and not is_spread)
        is_share = metric.unit == "%" or "r2" in name
        assert (metric.best == "max") == (is_share and not is_spread and not is_error)
        is_known = format_number(metric.kind, 12.345678) != format_number("unknown", 12.345678)
        assert is_known or metric.kind == "number"


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
