"""The columns of rounds.csv, each once: its name, words for people, unit, and what kind of number
it is.

The name of what all clients are judged by says on whose samples (SPLITS), whether after
fine-tuning, and which
statistic over clients: `unseen_ft_accuracy_worst10`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

SPLITS = {"test": "", "validation": "val_", "unseen": "unseen_"}
"""What models are judged on, each with what its columns begin with: the test and the held-out
samples of clients that take part, and the test samples of clients that never do.
"""
TUNED_PREFIX = "ft_"
"""What stands before the statistic after fine-tuning."""
VALIDATION_ACCURACY = "val_accuracy"
"""By what a round is chosen without a look at test data."""
COMMON_SCOPE = "common"
"""What the columns are about that judge models on the test samples of all that take part."""
SYSTEM_SCOPE = "system"
"""What is known of rounds in simulated time."""
PRIVACY_SCOPE = "privacy"
"""What is known of rounds that hide their clients."""
ALMOST_NOBODY_SHARE = 0.1
"""Share of the clients, or of the planned participations, up to which almost nobody trained."""
PERSONAL_PREFIX = "personal/"
"""What stands before a tensor's name where its personalised entries are counted."""


@dataclass(frozen=True)
class Metric:
    """Describe one number of a round.

    about: of SPLITS or COMMON where it is known after evaluations only; `cohort`, `traffic`,
    `time`, `system` or `privacy` where every round has it. heading: the shortest word, of a table's
    column. words: without unit and split, as `mean over clients`.
    label: all that there is to say, with the unit, of an axis. unit: %, s, bits or nothing. kind:
    how tables write it (`report.table.number`). best: `max` or `min`, nothing where neither end is
    better. tuned: after fine-tuning.
    asked: the measure, `common`, `system` or `privacy`, that only runs have which ask for it.
    """

    name: str
    about: str
    heading: str
    words: str
    label: str
    unit: str = ""
    kind: str = "short"
    best: str = ""
    tuned: bool = False
    asked: str = ""

    @property
    def evaluated(self) -> bool:
        """Return whether only the rounds have it after which all clients were evaluated."""
        return self.about in (*SPLITS, COMMON_SCOPE)


_STATISTICS = (
    ("accuracy", "mean", "mean over clients", "mean {} accuracy over clients", "max"),
    ("accuracy_pooled", "pooled", "pooled", "pooled {} accuracy", "max"),
    (
        "accuracy_std",
        "std",
        "std over clients",
        "standard deviation of {} accuracy over clients",
        "",
    ),
    (
        "accuracy_worst10",
        "worst 10%",
        "worst 10%",
        "{} accuracy of the worst decile of clients",
        "max",
    ),
    ("loss", "loss", "loss", "{} loss", "min"),
)
STATISTICS = tuple(name for name, *_ in _STATISTICS)
"""Over the clients of a split."""
_MEASURES = (
    ("f1", "F1", "F1, mean over clients", "mean {} F1 over clients", "max"),
    (
        "balanced",
        "balanced",
        "balanced accuracy, mean over clients",
        "mean balanced {} accuracy over clients",
        "max",
    ),
    ("auroc", "AUROC", "AUROC, mean over clients", "mean {} AUROC over clients", "max"),
    (
        "ece",
        "ECE",
        "calibration error, mean over clients",
        "mean {} calibration error over clients",
        "min",
    ),
)
MEASURES = tuple(name for name, *_ in _MEASURES)
"""Over the clients of a split, where the run's `metrics` name them."""


def column_name(statistic: str, about: str = "test", tuned: bool = False) -> str:
    """Return the name of the column that holds a statistic of a split."""
    return f"{SPLITS[about]}{TUNED_PREFIX if tuned else ''}{statistic}"


def _judged(about: str, tuned: bool) -> list[Metric]:
    metrics = []
    for name, heading, words, label, best in (*_STATISTICS, *_MEASURES):
        text = label.format("validation" if about == "validation" else "test")
        text = f"{'unseen clients: ' if about == 'unseen' else ''}{text}{' after fine-tuning' if tuned else ''}"
        unit, kind = ("", "short") if name == "loss" else ("%", "percent")
        text += f" ({unit})" if unit else ""
        asked = name if name in MEASURES else ""
        metrics.append(
            Metric(
                column_name(name, about, tuned),
                about,
                heading,
                words,
                text,
                unit,
                kind,
                best,
                tuned,
                asked,
            )
        )
    return metrics


_BEFORE, _AFTER = (f"cohort {when} local training" for when in ("before", "after"))
_FIRST = (
    Metric(
        "participants",
        "cohort",
        "clients",
        "clients that took part",
        "clients that took part",
        kind="whole",
    ),
    Metric("seconds", "time", "s/round", "seconds per round", "time of a round (s)", "s", "number"),
    Metric(
        "eval_seconds",
        "time",
        "s/evaluation",
        "seconds per evaluation",
        "time of an evaluation (s)",
        "s",
        "number",
    ),
    Metric(
        "cohort_before",
        "cohort",
        "before",
        _BEFORE,
        f"pooled test accuracy, {_BEFORE} (%)",
        "%",
        "percent",
        "max",
    ),
    Metric(
        "cohort_after",
        "cohort",
        "after",
        _AFTER,
        f"pooled test accuracy, {_AFTER} (%)",
        "%",
        "percent",
        "max",
    ),
    Metric(
        "train_loss",
        "cohort",
        "training loss",
        "training loss",
        "training loss of the cohort",
        best="min",
    ),
)
_PRIVACY = (
    Metric(
        "epsilon",
        PRIVACY_SCOPE,
        "epsilon",
        "epsilon",
        "privacy given away so far (epsilon)",
        asked=PRIVACY_SCOPE,
    ),
    Metric(
        "clipped_share",
        PRIVACY_SCOPE,
        "clipped",
        "share clipped",
        "share of updates that were clipped",
        asked=PRIVACY_SCOPE,
    ),
    Metric(
        "update_norm",
        PRIVACY_SCOPE,
        "|update|",
        "length of updates",
        "mean length of updates",
        asked=PRIVACY_SCOPE,
    ),
)
_ALL = "everybody's test samples"
_COMMON = tuple(
    Metric(
        f"{who}_accuracy",
        COMMON_SCOPE,
        heading,
        f"{words} on {_ALL}",
        f"accuracy of {label} on {_ALL} (%)",
        *ends,
    )
    for who, heading, words, label in (
        ("common", "mean", "personal models", "personal models, mean over clients,"),
        ("server", "server", "the server's model", "the server's model"),
    )
    for ends in [("%", "percent", "max", False, COMMON_SCOPE)]
)
_SYSTEM = tuple(
    Metric(name, SYSTEM_SCOPE, heading, words, label, unit, kind, asked=SYSTEM_SCOPE)
    for name, heading, words, label, unit, kind in (
        (
            "sim_seconds",
            "sim s/round",
            "simulated seconds",
            "simulated time of a round (s)",
            "s",
            "number",
        ),
        (
            "dropped",
            "dropped",
            "drawn clients left out",
            "drawn clients that took no part",
            "",
            "whole",
        ),
        (
            "late",
            "late",
            "clients not done in time",
            "clients not done in time, left out or cut short",
            "",
            "whole",
        ),
    )
)
_LAST = tuple(
    Metric(
        f"{what}_{way}",
        "traffic",
        way,
        f"{what} {way}",
        f"{what} {way}, all clients of the cohort",
        unit,
    )
    for what, unit in (("values", ""), ("bits", "bits"))
    for way in ("down", "up")
)
METRICS = {
    metric.name: metric
    for metric in (
        *_FIRST,
        *(one for about in SPLITS for tuned in (False, True) for one in _judged(about, tuned)),
        *_COMMON,
        *_LAST,
        *_PRIVACY,
        *_SYSTEM,
    )
}
"""By name, in the order of the file; those of single methods are not among them."""


def round_columns(
    validation: bool = False, unseen: bool = False, asked: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the columns of rounds.csv after `round`; a method's follow. Empty cells: nothing was
    measured.

    validation, unseen: whether there are held-out samples, and clients that never take part. asked:
    measures that are wanted, `common`, and `system` in simulated time.
    """
    absent = {"validation" if not validation else "", "unseen" if not unseen else ""}
    return tuple(
        name
        for name, metric in METRICS.items()
        if metric.about not in absent and metric.asked in ("", *asked)
    )


def column_names(about: str, tuned: bool | None = None) -> tuple[str, ...]:
    """Return the columns about a split, the cohort, traffic or time. tuned: only those after or
    before fine-tuning.
    """
    return tuple(
        name
        for name, metric in METRICS.items()
        if metric.about == about and tuned in (None, metric.tuned)
    )
