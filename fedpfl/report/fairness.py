"""Who is helped and who is harmed: every client's accuracy beside what FedAvg+FT and Local-Only
give it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.ground.decile import worst_decile_size
from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import result_config
from fedpfl.report.grouping import Group, canonical_text, groups
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table, seed_statistics
from fedpfl.report.tables import ROW_COLUMNS, describe_seeds, row_cells
from fedpfl.report.text import format_range, join_few

BASELINES = {"fedavg": "FedAvg+FT", "local_only": "Local-Only"}
"""What a client could have without a personalised method, by the method's name in the
configuration.
"""
_AGAINST = (
    (
        "harmed",
        "harmed %",
        0,
        "vs: against the same client of the same split and seed; harmed %: who is worse there",
    ),
    (
        "loss",
        "their loss",
        0,
        "their loss: its mean over them, in points, over the seeds that have any",
    ),
    (
        "change",
        "worst 10%",
        3,
        "worst 10% vs: mean change, in points, of the tenth that gains least",
    ),
)
COLUMNS = {
    **ROW_COLUMNS,
    "accuracy": Column("mean", "percent", "clients"),
    "accuracy_worst10": Column("worst 10%", "percent", "clients", 2),
    "accuracy_std": Column(
        "std", "percent", "clients", 1, "std: population standard deviation over clients"
    ),
    **{
        f"{key}_{name}": Column(heading, "percent", f"vs {told}", spare, meaning)
        for name, told in BASELINES.items()
        for key, heading, spare, meaning in _AGAINST
    },
    "round": Column("round", "whole", spare=4),
    "seeds": Column("seeds", "whole"),
    "status": Column("status", spare=5),
}
CAPTION = (
    "Clients that take part and have test samples, at the last evaluation, by their personal models as they stand, "
    "FedAvg's after fine-tuning (FedAvg+FT); {}."
)


class HarmStatistics(NamedTuple):
    """What changes do to clients.

    harmed: percent of clients that lose. loss: their mean loss in points, nan without any. change:
    mean over the tenth of clients, at least one, that gains least, in points.
    """

    harmed: float
    loss: float
    change: float


@dataclass(frozen=True, eq=False)
class BaselineComparison:
    """One configuration beside its baselines.

    own: accuracy by client, for each run that speaks. pairs: by name of BASELINES, for each of
    these runs that has the baseline, a row per client with the columns `baseline` and `own`.
    """

    group: Group
    own: dict[Run, pd.Series]
    pairs: dict[str, dict[Run, pd.DataFrame]]


def count_changes(changes: pd.Series) -> tuple[int, int, int]:
    """Return how many clients lose, keep and gain accuracy."""
    # Accuracies are ratios of counts: what differs, differs by far more than rounding.
    lose, gain = int((changes < -1e-9).sum()), int((changes > 1e-9).sum())
    return lose, int(changes.notna().sum()) - lose - gain, gain


def measure_harm(changes: pd.Series) -> HarmStatistics:
    """Return what the changes of clients' accuracy, own minus the baseline's, come to; nan without
    clients.
    """
    lose, count = count_changes(changes)[0], len(changes)
    changes = changes.sort_values()
    return HarmStatistics(
        100 * lose / count if count else math.nan,
        -float(changes.iloc[:lose].mean()),
        float(worst_decile(changes).mean()),
    )


def worst_decile(values: pd.Series) -> pd.Series:
    """Return the least tenth, at least one value; of equal ones the first. As `accuracy_worst10`
    counts.
    """
    return values.sort_values(kind="stable").iloc[: worst_decile_size(len(values))]


def label_and_column(group: Group, column: str = "accuracy") -> tuple[str, str]:
    """Return the label and the column that a configuration is judged by: FedAvg after fine-tuning,
    as FedAvg+FT.
    """
    if group.runs[0].method_name != "fedavg" or column.startswith("ft_"):
        return group.method, column
    return group.method.replace("FedAvg", BASELINES["fedavg"], 1), f"ft_{column}"


def samples_by_client(clients: pd.DataFrame) -> pd.DataFrame:
    """Return how many samples of each class and in each part the clients have."""
    kept = {"client", "train", "validation", "test"}
    return clients[sorted(name for name in clients if name in kept or name.startswith("label_"))]


def have_same_split(one: Run, other: Run) -> bool:
    """Return whether both dealt the same samples to the same clients, as far as they recorded it.

    Raises FedpflError where a clients.csv cannot be read.
    """
    prints = {run.summary.get("data") for run in (one, other)} - {None}
    alike = one.dataset == other.dataset and one.partition == other.partition and len(prints) < 2
    return alike and samples_by_client(one.clients).equals(samples_by_client(other.clients))


def compare_with_baselines(
    gathered: Sequence[Group],
) -> tuple[list[BaselineComparison], tuple[str, ...]]:
    """Put every configuration beside the baselines among them; returns also what a reader must
    know, a line each.
    """
    accuracies: dict[Run, pd.Series] = {}
    strange, apart = list[str](), defaultdict[tuple[str, str], list[str]](list)
    lacking, several = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for group in gathered:
        for run in group.reported_runs:
            try:
                accuracies[run] = _accuracies(run, label_and_column(group)[1])
            except FedpflError as error:
                strange.append(f"Not compared: {error}.")
    found = []
    for group in gathered:
        own = {run: accuracies[run] for run in group.reported_runs if run in accuracies}
        pairs: dict[str, dict[Run, pd.DataFrame]] = {}
        for name, told in BASELINES.items():
            if group.runs[0].method_name == name or not own:
                continue
            rivals = [one for one in gathered if one.runs[0].method_name == name]
            offers = [(one, _pairs(own, one, accuracies)) for one in rivals]
            offers = [(one, matched) for one, matched in offers if matched]
            keys = {id(one): _other_settings(group, one) for one, _ in offers}
            least = min((len(own_keys) for own_keys in keys.values()), default=0)
            offers = [offer for offer in offers if len(keys[id(offer[0])]) == least]
            if len(offers) > 1:
                several[told].append(group.title)
                continue
            matched = offers[0][1] if offers else {}
            if missing := [run.seed for run in own if run not in matched]:
                lacking[told].append(f"{group.title} (seed {', '.join(map(str, missing))})")
            if offers:
                pairs[name] = matched
                if other := keys[id(offers[0][0])]:
                    apart[told, ", ".join(other)].append(group.title)
        found.append(BaselineComparison(group, own, pairs))
    notes = [
        *(
            f"No {told} of the same data, split and seed: {join_few(where)}."
            for told, where in lacking.items()
        ),
        *(
            f"Several {told} fit, choose one by filters: {join_few(where)}."
            for told, where in several.items()
        ),
        *(
            f"{told} was run with another {keys} than {join_few(where)}."
            for (told, keys), where in apart.items()
        ),
    ]
    return found, (*notes, *strange)


def fairness_table(runs: Iterable[Run]) -> Table:
    """Make the table of who is harmed, with a row per data set, partition and configuration.

    Raises FedpflError where no run has a baseline.
    """
    found, notes = compare_with_baselines(groups(runs))
    if not any(fair.pairs for fair in found):
        raise FedpflError(
            "no run here has FedAvg (with eval.finetune_epochs) or Local-Only of the same data, split and seed beside "
            "it; run method=fedavg,local_only, and let filters through"
            + "".join(f". {line}" for line in notes[-1:])
        )
    return comparisons_table(found, notes)


def comparisons_table(found: Sequence[BaselineComparison], notes: tuple[str, ...]) -> Table:
    """Make the table of what `compared` returns."""
    records = [_record(fair) for fair in found if fair.own]
    seeds = {fair.group.title: [run.seed for run in fair.own] for fair in found if fair.own}
    caption = CAPTION.format(describe_seeds(seeds))
    return Table.of(records, COLUMNS, caption=caption, notes=notes, by=2)


def _accuracies(run: Run, column: str) -> pd.Series:
    """Accuracy by client, of those that may take part and have test samples. Raises FedpflError
    where one has none.
    """
    clients = run.participating_clients
    if "test" in clients:
        clients = clients[clients["test"] > 0]
    own = clients.set_index("client").reindex(columns=[column])[column]
    if "test" not in clients:
        own = own.dropna()
    if own.index.has_duplicates:
        raise FedpflError(f"{run.path}: clients.csv names a client twice")
    if own.isna().any() or own.empty:
        raise FedpflError(
            f"{run.path}: clients.csv has no {column} of {int(own.isna().sum()) or 'any'} clients"
        )
    return own


def _pairs(
    own: dict[Run, pd.Series], rival: Group, accuracies: dict[Run, pd.Series]
) -> dict[Run, pd.DataFrame]:
    """The clients' accuracies beside the baseline's, for every run that it has the split and seed
    of.
    """
    found: dict[Run, pd.DataFrame] = {}
    for run, values in own.items():
        for other in rival.reported_runs:
            if other in accuracies and other.seed == run.seed and have_same_split(run, other):
                both = pd.DataFrame({"baseline": accuracies[other], "own": values}).dropna()
                found |= {run: both} if len(both) else {}
    return found


def _other_settings(group: Group, baseline: Group) -> list[str]:
    """In which keys, but for the method's, both were not configured alike; and whether they came as
    far.
    """
    one, other = (
        dict(flatten_keys(result_config(own.runs[0].config))) for own in (group, baseline)
    )
    keys = [
        key
        for key in sorted(one.keys() | other.keys())
        if not key.startswith("method.")
        and canonical_text(one.get(key)) != canonical_text(other.get(key))
    ]
    alike = "rounds" in keys or _rounds(group.reported_runs) == _rounds(baseline.reported_runs)
    return keys if alike else [*keys, "last round"]


def _rounds(members: Iterable[Run]) -> set[int]:
    """The rounds of the last evaluations."""
    return {int(run.evaluations["round"].iloc[-1]) for run in members if len(run.evaluations)}


def _record(fair: BaselineComparison) -> dict[str, Any]:
    group, every = fair.group, [*fair.own.values()]
    record = row_cells(group)
    record |= seed_statistics("accuracy", [float(own.mean()) for own in every])
    record |= seed_statistics(
        "accuracy_worst10", [float(worst_decile(own).mean()) for own in every]
    )
    record |= seed_statistics("accuracy_std", [float(own.std(ddof=0)) for own in every])
    for name in BASELINES:
        matched = fair.pairs.get(name, {})
        harms = [measure_harm(both["own"] - both["baseline"]) for both in matched.values()]
        record |= seed_statistics(f"harmed_{name}", [one.harmed for one in harms])
        record |= seed_statistics(f"loss_{name}", [one.loss for one in harms if one.harmed])
        record |= seed_statistics(f"change_{name}", [one.change for one in harms])
        record[f"seed_list_{name}"] = " ".join(str(run.seed) for run in matched)
    return record | {
        "round": format_range(_rounds(fair.own)) or None,
        "seeds": len(fair.own),
        "seed_list": " ".join(str(run.seed) for run in fair.own),
        "status": group.status,
    }
