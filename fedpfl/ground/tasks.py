"""Tasks: the meaning of labels, the score of models, and its better end.

The form of the labels says the task inside the engine, so that no call is told of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Task:
    """Describe a task.

    Attributes:
        name: The value of the key `task`.
        labels: The form of its labels, for messages.
        score: The statistic that models are judged by, as in columns.
        score_word: The score in a sentence.
        unit: Of the score: %, or nothing where it is in units of the labels.
        is_higher_better: Which end of the score is the better one.
        measures: The counts of a client's predictions beside the loss.
        second_score: The column that tables show beside the score.
        output: A network's answer, where it is no logit for each class or label.
    """

    name: str
    labels: str
    score: str
    score_word: str
    unit: str
    is_higher_better: bool
    measures: tuple[str, ...] = ()
    second_score: str = "f1"
    output: str = ""

    def is_better(self, score: float | None, other: float | None) -> bool:
        """Return True if a score beats the second. None and nan lose to any number."""
        if score is None or score != score:
            return False
        if other is None or other != other:
            return True
        return score > other if self.is_higher_better else score < other

    def describe_score(self, score: float) -> str:
        """Write a score as terminals show it, named where it is no accuracy."""
        number = f"{score:.2f} {self.unit}" if self.unit else f"{score:.4g}"
        return number if self.score == "accuracy" else f"{self.score_word} {number}"


CLASSIFICATION = Task(
    name="classification",
    labels="integers [samples]",
    score="accuracy",
    score_word="accuracy",
    unit="%",
    is_higher_better=True,
)
MULTILABEL = Task(
    name="multilabel",
    labels="0 and 1 [samples, labels]",
    score="auroc",
    score_word="AUROC",
    unit="%",
    is_higher_better=True,
    measures=("auroc", "f1"),
)
REGRESSION = Task(
    name="regression",
    labels="floats [samples]",
    score="rmse",
    score_word="RMSE",
    unit="",
    is_higher_better=False,
    measures=("squared_error", "label_mean", "label_spread"),
    second_score="r2",
    output="a number",
)
SURVIVAL = Task(
    name="survival",
    labels="a time and an event (1, or 0 if censored) [samples, 2]",
    score="concordance",
    score_word="concordance",
    unit="%",
    is_higher_better=True,
    measures=("concordant", "comparable", "brier"),
    second_score="brier",
    output="a log hazard",
)
NEXT_TOKEN = Task(
    name="next_token",
    labels="token ids [samples, length], -1 where there is none",
    score="perplexity",
    score_word="perplexity",
    unit="",
    is_higher_better=False,
    second_score="top1",
    output="logits of the next token",
)
TASKS = {task.name: task for task in (CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL, NEXT_TOKEN)}
"""By the value of the key `task`."""


def find_task(y: Tensor) -> Task:
    """Return the task of labels: floats are regression, pairs of them survival.

    Bools are multilabel, integers classes, and rows of integers next tokens.
    """
    if y.dtype.is_floating_point:
        return SURVIVAL if y.dim() == 2 else REGRESSION
    if y.dim() == 1:
        return CLASSIFICATION
    return NEXT_TOKEN if y.dtype.is_signed else MULTILABEL


def configured_task(config: Values) -> Task:
    """Return the task of a resolved configuration, also of one from before there were several."""
    return TASKS.get(
        str(config.get("task", CLASSIFICATION.name)),
        CLASSIFICATION,
    )


def require_classification(task: Task, choice: str, reason: str) -> None:
    """Raise FedpflError for a choice that needs classes.

    Args:
        task: The task.
        choice: What needs them, such as `method=fedproto`.
        reason: Why, as a clause: `it averages features by class`.
    """
    if task is not CLASSIFICATION:
        raise FedpflError(f"{choice} is for task=classification, not {task.name}: {reason}")
