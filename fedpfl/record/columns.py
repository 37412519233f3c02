"""The columns of rounds.csv: name, words for people, unit, and kind of number.

The name of a statistic over all clients says on whose samples (SPLITS), whether after fine-tuning,
and which statistic it is: `unseen_ft_accuracy_worst10`.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass

from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, REGRESSION, TASKS, Task

SPLITS = {"test": "", "validation": "val_", "unseen": "unseen_"}
"""The samples that models are evaluated on, each with the prefix of its columns.

The test and the validation samples of clients that take part, and the test samples of newcomers.
"""
TUNED_PREFIX = "ft_"
"""Stands before the statistic after fine-tuning."""
COMMON_SCOPE = "common"
"""Scope of columns that judge models on the test samples of all that take part."""
SYSTEM_SCOPE = "system"
"""Scope of columns of rounds in simulated time."""
PRIVACY_SCOPE = "privacy"
CLIENT_PRIVACY = "privacy of clients"
"""What a run asks for that clips clients' updates."""
"""Scope of columns of private runs."""
ATTACK_OPTION = "attack"
"""What a run with an attack on data asks for: columns of its success."""
SHIFT_SCOPE = "shift"
"""Scope of columns of runs whose clients' samples shift on the way."""
ALMOST_NOBODY_SHARE = 0.1
"""Share of the clients, or of the planned participations, up to which almost nobody trained."""
PERSONAL_PREFIX = "personal/"
"""Stands before a tensor's name where its personalised entries are counted."""


@dataclass(frozen=True)
class Metric:
    """Describe one number of a round.

    Attributes:
        name: its column.
        scope: of SPLITS, COMMON_SCOPE or SHIFT_SCOPE where it is known after evaluations only; `cohort`,
            `traffic`, `time`, `system` or `privacy` where every round has it.
        heading: the shortest word, for a table's column.
        phrase: without unit and split, as `mean over clients`.
        label: a full description with the unit, for an axis.
        unit: %, s, bits or nothing.
        kind: how tables write it (`report.table.format_number`).
        best: `max` or `min`, nothing where neither end is better.
        fine_tuned: whether it is measured after fine-tuning.
        option: the measure, `common`, `system`, `privacy`, `attack` or `shift`, that a run must
            ask for to have it.
        tasks: the tasks that have it.
    """

    name: str
    scope: str
    heading: str
    phrase: str
    label: str
    unit: str = ""
    kind: str = "short"
    best: str = ""
    fine_tuned: bool = False
    option: str = ""
    tasks: tuple[str, ...] = tuple(TASKS)

    @property
    def is_evaluated(self) -> bool:
        """Return whether it is known only in rounds after which all clients were evaluated."""
        return self.scope in (*SPLITS, COMMON_SCOPE, SHIFT_SCOPE)


@dataclass(frozen=True)
class _Statistic:
    """Describe a statistic over the clients of a split, `{}` in the label."""

    name: str
    heading: str
    phrase: str
    label: str
    best: str
    tasks: tuple[str, ...] = (CLASSIFICATION.name,)
    unit: str = "%"


_STATISTICS = (
    _Statistic("accuracy", "mean", "mean over clients", "mean {} accuracy over clients", "max"),
    _Statistic("accuracy_pooled", "pooled", "pooled", "pooled {} accuracy", "max"),
    _Statistic(
        name="accuracy_std",
        heading="std",
        phrase="std over clients",
        label="standard deviation of {} accuracy over clients",
        best="",
    ),
    _Statistic(
        name="accuracy_worst10",
        heading="worst 10%",
        phrase="worst 10%",
        label="{} accuracy of the worst decile of clients",
        best="max",
    ),
    _Statistic("loss", "loss", "loss", "{} loss", "min", tasks=tuple(TASKS), unit=""),
)
STATISTICS = tuple(statistic.name for statistic in _STATISTICS)
"""Statistics over the clients of a split."""
_MEASURES = (
    _Statistic(
        name="f1",
        heading="F1",
        phrase="F1, mean over clients",
        label="mean {} F1 over clients",
        best="max",
        tasks=(CLASSIFICATION.name, MULTILABEL.name),
    ),
    _Statistic(
        name="balanced",
        heading="balanced",
        phrase="balanced accuracy, mean over clients",
        label="mean balanced {} accuracy over clients",
        best="max",
    ),
    _Statistic(
        name="auroc",
        heading="AUROC",
        phrase="AUROC, mean over clients",
        label="mean {} AUROC over clients",
        best="max",
        tasks=(CLASSIFICATION.name, MULTILABEL.name),
    ),
    _Statistic(
        name="ece",
        heading="ECE",
        phrase="calibration error, mean over clients",
        label="mean {} calibration error over clients",
        best="min",
    ),
)
_ATTACK_STATISTICS = (
    _Statistic("asr", "ASR", "attack success, mean over clients", "mean attack success", "min"),
    _Statistic("asr_pooled", "pooled", "attack success, pooled", "pooled attack success", "min"),
    _Statistic(
        name="asr_worst10",
        heading="worst 10%",
        phrase="attack success, worst 10%",
        label="attack success at the worst decile of clients",
        best="min",
    ),
)
MEASURES = tuple(measure.name for measure in _MEASURES)
"""Further statistics, of runs whose `metrics` name them, or whose task has them."""
_MULTILABEL_STATISTICS = (
    _Statistic(
        name="auroc_std",
        heading="std",
        phrase="std of AUROC over clients",
        label="standard deviation of {} AUROC over clients",
        best="",
        tasks=(MULTILABEL.name,),
    ),
    _Statistic(
        name="auroc_worst10",
        heading="worst 10%",
        phrase="worst 10%",
        label="{} AUROC of the worst decile of clients",
        best="max",
        tasks=(MULTILABEL.name,),
    ),
)
_REGRESSION_STATISTICS = tuple(
    _Statistic(name, heading, phrase, label, best, (REGRESSION.name,), unit="")
    for name, heading, phrase, label, best in (
        ("rmse", "RMSE", "RMSE, mean over clients", "mean {} RMSE over clients", "min"),
        ("rmse_pooled", "pooled", "pooled RMSE", "pooled {} RMSE", "min"),
        (
            "rmse_std",
            "std",
            "std of RMSE over clients",
            "standard deviation of {} RMSE over clients",
            "",
        ),
        (
            "rmse_worst10",
            "worst 10%",
            "worst 10%",
            "{} RMSE of the worst decile of clients",
            "min",
        ),
        ("r2", "R2", "R2, mean over clients", "mean {} R2 over clients", "max"),
        ("r2_pooled", "pooled R2", "pooled R2", "pooled {} R2", "max"),
    )
)


def column_name(statistic: str, split: str = "test", fine_tuned: bool = False) -> str:
    """Return the name of the column that holds a statistic of a split.

    Args:
        statistic: of STATISTICS or MEASURES, or of another task.
        split: of SPLITS.
        fine_tuned: whether after fine-tuning.
    """
    return f"{SPLITS[split]}{TUNED_PREFIX if fine_tuned else ''}{statistic}"


def _statistic_kind(statistic: _Statistic) -> str:
    """Return how tables write a statistic: losses are no scores."""
    if statistic.name == "loss":
        return "short"
    return "percent" if statistic.unit else "score"


def _statistic_option(statistic: _Statistic) -> str:
    """Return what a run must ask for to have a statistic, "" for nothing."""
    if statistic in _ATTACK_STATISTICS:
        return ATTACK_OPTION
    return statistic.name if statistic.name in MEASURES else ""


def validation_column(task: Task = CLASSIFICATION) -> str:
    """Return the column by which a round is chosen without a look at test data."""
    return column_name(task.score, "validation")


def task_of_columns(columns: Container[str]) -> Task:
    """Return the task of a run with these columns."""
    # Not by the score alone: AUROC may be a further metric of classification.
    if f"{REGRESSION.score}_worst10" in columns:
        return REGRESSION
    return MULTILABEL if f"{MULTILABEL.score}_worst10" in columns else CLASSIFICATION


def _split_metrics(split: str, fine_tuned: bool) -> list[Metric]:
    """Return the metrics of a split, before or after fine-tuning."""
    # ---- Step 1: which statistics there are. Attacks are tried on test samples alone.
    metrics = []
    attack_statistics = () if split == "validation" else _ATTACK_STATISTICS
    for statistic in (
        *_STATISTICS,
        *_MEASURES,
        *_MULTILABEL_STATISTICS,
        *_REGRESSION_STATISTICS,
        *attack_statistics,
    ):
        # ---- Step 2: each in words for this split.
        label = statistic.label.format("validation" if split == "validation" else "test")
        if split == "unseen":
            label = f"unseen clients: {label}"
        if fine_tuned:
            label += " after fine-tuning"
        if statistic.unit:
            label += f" ({statistic.unit})"
        metrics.append(
            Metric(
                name=column_name(statistic.name, split, fine_tuned),
                scope=split,
                heading=statistic.heading,
                phrase=statistic.phrase,
                label=label,
                unit=statistic.unit,
                kind=_statistic_kind(statistic),
                best=statistic.best,
                fine_tuned=fine_tuned,
                option=_statistic_option(statistic),
                tasks=statistic.tasks,
            )
        )
    return metrics


_COHORT_METRICS = (
    Metric(
        name="participants",
        scope="cohort",
        heading="clients",
        phrase="clients that took part",
        label="clients that took part",
        kind="whole",
    ),
    Metric(
        name="seconds",
        scope="time",
        heading="s/round",
        phrase="seconds per round",
        label="time of a round (s)",
        unit="s",
        kind="number",
    ),
    Metric(
        name="eval_seconds",
        scope="time",
        heading="s/evaluation",
        phrase="seconds per evaluation",
        label="time of an evaluation (s)",
        unit="s",
        kind="number",
    ),
    Metric(
        name="cohort_before",
        scope="cohort",
        heading="before",
        phrase="cohort before local training",
        label="pooled test accuracy, cohort before local training (%)",
        unit="%",
        kind="percent",
        best="max",
        tasks=(CLASSIFICATION.name,),
    ),
    Metric(
        name="cohort_after",
        scope="cohort",
        heading="after",
        phrase="cohort after local training",
        label="pooled test accuracy, cohort after local training (%)",
        unit="%",
        kind="percent",
        best="max",
        tasks=(CLASSIFICATION.name,),
    ),
    Metric(
        name="cohort_loss_before",
        scope="cohort",
        heading="before",
        phrase="cohort's loss before local training",
        label="pooled test loss, cohort before local training",
        best="min",
        tasks=(MULTILABEL.name, REGRESSION.name),
    ),
    Metric(
        name="cohort_loss_after",
        scope="cohort",
        heading="after",
        phrase="cohort's loss after local training",
        label="pooled test loss, cohort after local training",
        best="min",
        tasks=(MULTILABEL.name, REGRESSION.name),
    ),
    Metric(
        name="train_loss",
        scope="cohort",
        heading="training loss",
        phrase="training loss",
        label="training loss of the cohort",
        best="min",
    ),
)
_PRIVACY_METRICS = (
    Metric(
        name="epsilon",
        scope=PRIVACY_SCOPE,
        heading="epsilon",
        phrase="epsilon",
        label="privacy given away so far (epsilon)",
        option=PRIVACY_SCOPE,
    ),
    Metric(
        name="clipped_share",
        scope=PRIVACY_SCOPE,
        heading="clipped",
        phrase="share clipped",
        label="share of updates that were clipped",
        option=CLIENT_PRIVACY,
    ),
    Metric(
        name="update_norm",
        scope=PRIVACY_SCOPE,
        heading="|update|",
        phrase="length of updates",
        label="mean length of updates",
        option=CLIENT_PRIVACY,
    ),
)
_COMMON_METRICS = (
    Metric(
        name="common_accuracy",
        scope=COMMON_SCOPE,
        heading="mean",
        phrase="personal models on everybody's test samples",
        label="accuracy of personal models, mean over clients, on everybody's test samples (%)",
        unit="%",
        kind="percent",
        best="max",
        option=COMMON_SCOPE,
    ),
    Metric(
        name="server_accuracy",
        scope=COMMON_SCOPE,
        heading="server",
        phrase="the server's model on everybody's test samples",
        label="accuracy of the server's model on everybody's test samples (%)",
        unit="%",
        kind="percent",
        best="max",
        option=COMMON_SCOPE,
    ),
)
_SYSTEM_METRICS = (
    Metric(
        name="sim_seconds",
        scope=SYSTEM_SCOPE,
        heading="sim s/round",
        phrase="simulated seconds",
        label="simulated time of a round (s)",
        unit="s",
        kind="number",
        option=SYSTEM_SCOPE,
    ),
    Metric(
        name="dropped",
        scope=SYSTEM_SCOPE,
        heading="dropped",
        phrase="drawn clients left out",
        label="drawn clients that took no part",
        kind="whole",
        option=SYSTEM_SCOPE,
    ),
    Metric(
        name="late",
        scope=SYSTEM_SCOPE,
        heading="late",
        phrase="clients not done in time",
        label="clients not done in time, left out or cut short",
        kind="whole",
        option=SYSTEM_SCOPE,
    ),
)

_SHIFT_METRICS = (
    Metric(
        name="since_shift",
        scope=SHIFT_SCOPE,
        heading="since shift",
        phrase="rounds since the last shift",
        label="rounds since the last shift",
        kind="whole",
        option=SHIFT_SCOPE,
    ),
    Metric(
        name="before_shift",
        scope=SHIFT_SCOPE,
        heading="before shift",
        phrase="mean over clients before the last shift",
        label="mean score over clients at the last evaluation before the last shift (%)",
        unit="%",
        kind="percent",
        best="max",
        option=SHIFT_SCOPE,
        tasks=(CLASSIFICATION.name, MULTILABEL.name),
    ),
    Metric(
        name="recovery",
        scope=SHIFT_SCOPE,
        heading="recovery",
        phrase="rounds until recovered from the last shift",
        label="rounds from the last shift until 95 % of the score before it",
        kind="whole",
        option=SHIFT_SCOPE,
        tasks=(CLASSIFICATION.name, MULTILABEL.name),
    ),
)


def _traffic_metric(quantity: str, direction: str, unit: str) -> Metric:
    return Metric(
        name=f"{quantity}_{direction}",
        scope="traffic",
        heading=direction,
        phrase=f"{quantity} {direction}",
        label=f"{quantity} {direction}, all clients of the cohort",
        unit=unit,
    )


_TRAFFIC_METRICS = (
    _traffic_metric("values", "down", ""),
    _traffic_metric("values", "up", ""),
    _traffic_metric("bits", "down", "bits"),
    _traffic_metric("bits", "up", "bits"),
)
_SPLIT_METRICS = [
    metric
    for split in SPLITS
    for fine_tuned in (False, True)
    for metric in _split_metrics(split, fine_tuned)
]
METRICS = {
    metric.name: metric
    for metric in (
        *_COHORT_METRICS,
        *_SPLIT_METRICS,
        *_COMMON_METRICS,
        *_TRAFFIC_METRICS,
        *_PRIVACY_METRICS,
        *_SYSTEM_METRICS,
        *_SHIFT_METRICS,
    )
}
"""By name, in the order of the file; those of single methods are not among them."""


def round_columns(
    validation: bool = False,
    unseen: bool = False,
    options: Collection[str] = (),
    task: Task = CLASSIFICATION,
) -> tuple[str, ...]:
    """Return the columns of rounds.csv after `round`; a method's own follow.

    An empty cell means that nothing was measured.

    Args:
        validation: whether there are validation samples.
        unseen: whether there are newcomers.
        options: measures that the run asks for, `common`, `attack` where success is measured,
            `system` in simulated time, `shift` where samples shift on the way.
        task: of the run.
    """
    # Columns without samples would be empty in every row.
    absent_scopes = set()
    if not validation:
        absent_scopes.add("validation")
    if not unseen:
        absent_scopes.add("unseen")
    return tuple(
        name
        for name, metric in METRICS.items()
        if metric.scope not in absent_scopes
        and metric.option in ("", *options, *task.measures)
        and task.name in metric.tasks
    )


def column_names(scope: str, fine_tuned: bool | None = None) -> tuple[str, ...]:
    """Return the columns of a scope.

    Args:
        scope: the scope.
        fine_tuned: only those after (True) or before (False) fine-tuning.
    """
    return tuple(
        name
        for name, metric in METRICS.items()
        if metric.scope == scope and fine_tuned in (None, metric.fine_tuned)
    )
