"""Compare every client's accuracy with that under FedAvg+FT and Local-Only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from fedpfl.ground.decile import worst_decile_size
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import result_config
from fedpfl.ground.records import Record
from fedpfl.record.columns import KIND_COLUMNS
from fedpfl.report.grouping import Group, differing_values, groups, require_classes
from fedpfl.report.power import describe_interval, half_width_over_clients
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table, seed_statistics
from fedpfl.report.tables import ROW_COLUMNS, describe_seeds, row_cells, titled_notes
from fedpfl.report.text import format_range

BASELINES = {"fedavg": "FedAvg+FT", "local_only": "Local-Only"}
"""Titles of what a client could have without a personalised method, by the method's name."""
COLUMNS = {
    **ROW_COLUMNS,
    "accuracy": Column("mean", "percent", "clients"),
    "accuracy_worst10": Column("worst 10%", "percent", "clients", 2),
    "accuracy_std": Column("std", "percent", "clients", 1),
}
for _name, _title in BASELINES.items():
    COLUMNS |= {
        f"gain_{_name}": Column("gain", "percent", f"vs {_title}", 3),
        f"harmed_{_name}": Column("harmed %", "percent", f"vs {_title}"),
        f"loss_{_name}": Column("their loss", "percent", f"vs {_title}"),
        f"change_{_name}": Column("worst 10%", "percent", f"vs {_title}", 3),
    }
COLUMNS |= {
    "round": Column("round", "whole", spare=4),
    "seeds": Column("seeds", "whole"),
    "status": Column("status", spare=5),
}
KIND_TABLE = {
    **ROW_COLUMNS,
    "kind": Column("kind of network"),
    "clients": Column("clients", "whole"),
    "accuracy": Column("mean", "percent", "accuracy"),
    "gap": Column("below best kind", "percent", "accuracy"),
    "parameters": Column("parameters", "short"),
    "flops": Column("FLOPs", "short", "last evaluated round"),
    "bits_down": Column("bits down", "short", "last evaluated round"),
    "bits_up": Column("bits up", "short", "last evaluated round"),
}
CAPTION = (
    "Clients that take part and have test samples, at the last evaluation, by their personal "
    "models as they stand, FedAvg's after fine-tuning (FedAvg+FT); {}. vs: against the same client "
    "of the same split and seed; gain: mean change over clients, in points; harmed %: clients that "
    "are worse there; their loss: its mean over them, in points; worst 10% vs: mean change of the tenth that gains least, in points; std: "
    "population standard deviation over clients."
)


@dataclass(frozen=True, eq=False)
class BaselineComparison:
    """One configuration and its baselines.

    Attributes:
        group: the configuration.
        accuracies: accuracy by client, for each reported run.
        pairs: by name of BASELINES, for each of these runs that has the baseline, a row per client
            with the columns `baseline` and `accuracy`.
    """

    group: Group
    accuracies: dict[Run, pd.Series]
    pairs: dict[str, dict[Run, pd.DataFrame]]


def worst_decile(values: pd.Series) -> pd.Series:
    """Return the least tenth, at least one value, as `accuracy_worst10` counts it."""
    # A stable sort: of equal values the first ones count.
    return values.sort_values(kind="stable").iloc[: worst_decile_size(len(values))]


def label_and_column(group: Group, column: str = "accuracy") -> tuple[str, str]:
    """Return the label and the column that a configuration is judged by.

    FedAvg is judged after fine-tuning, as FedAvg+FT.
    """
    # A client under FedAvg would at least fine-tune the global model.
    if group.method_name != "fedavg" or column.startswith("ft_"):
        return group.method, column
    return group.method.replace("FedAvg", BASELINES["fedavg"], 1), f"ft_{column}"


def have_same_split(a: Run, b: Run) -> bool:
    """True if both gave the same samples to the same clients, as far as recorded.

    Raises:
        FedpflError: a clients.csv cannot be read.
    """
    # Counts by label may agree by chance; fingerprints of the dealt data do not.
    fingerprints = {run.summary.get("data") for run in (a, b)} - {None}
    if (a.dataset, a.partition) != (b.dataset, b.partition) or len(fingerprints) > 1:
        return False
    counts = r"^(client|train|validation|test|label_.*)$"
    samples = [run.clients.filter(regex=counts).sort_index(axis=1) for run in (a, b)]
    return samples[0].equals(samples[1])


def compare_with_baselines(
    compared_groups: Sequence[Group],
) -> tuple[list[BaselineComparison], tuple[str, ...]]:
    """Compare every configuration with the baselines among them.

    Returns:
        The comparisons, and notes for the reader.
    """
    # ---- Step 1: every run's accuracy by client.
    accuracies: dict[Run, pd.Series] = {}
    unreadable_notes = []
    for group in compared_groups:
        _, column = label_and_column(group)
        for run in group.reported_runs:
            try:
                accuracies[run] = _client_accuracies(run, column)
            except FedpflError as error:
                unreadable_notes.append(f"Not compared: {error}.")

    # ---- Step 2: of each configuration the baselines of the same split and seed.
    note_pairs: list[tuple[str, str]] = []
    comparisons = []
    for group in compared_groups:
        own_accuracies = {run: accuracies[run] for run in group.reported_runs if run in accuracies}
        comparison = BaselineComparison(group, own_accuracies, {})
        for name in BASELINES:
            if group.method_name != name and own_accuracies:
                baselines = [one for one in compared_groups if one.method_name == name]
                note_pairs += _add_baseline(comparison, name, baselines, accuracies)
        comparisons.append(comparison)
    return comparisons, (*titled_notes(note_pairs), *unreadable_notes)


def _add_baseline(
    comparison: BaselineComparison,
    name: str,
    baselines: Sequence[Group],
    accuracies: dict[Run, pd.Series],
) -> Iterator[tuple[str, str]]:
    """Add the baseline of the nearest configuration to a comparison, and yield notes on it."""
    # ---- Step 1: the configurations with the same split and seed.
    group = comparison.group
    title = BASELINES[name]
    candidates = []
    for baseline in baselines:
        pairs = _pair_clients(comparison.accuracies, baseline, accuracies)
        own_config = result_config(group.runs[0].config)
        differences = differing_values(own_config, result_config(baseline.runs[0].config))
        keys = [key for key in differences if not key.startswith("method.")]
        if pairs:
            candidates.append((pairs, sorted(keys)))

    # ---- Step 2: the nearest.
    # A baseline of other settings, such as clients=30, is no fair rival where a closer one ran.
    candidates.sort(key=lambda candidate: len(candidate[1]))
    if len(candidates) > 1 and len(candidates[0][1]) == len(candidates[1][1]):
        yield f"Several {title} fit, choose one by filters", group.title
        return
    pairs, keys = candidates[0] if candidates else ({}, [])
    missing_seeds = [str(run.seed) for run in comparison.accuracies if run not in pairs]
    if missing_seeds:
        seeds = ", ".join(missing_seeds)
        yield f"No {title} of the same data, split and seed", f"{group.title} (seed {seeds})"
    if pairs:
        comparison.pairs[name] = pairs
    if keys:
        yield f"{title} was run with another {', '.join(keys)} than", group.title


def fairness_table(runs: Iterable[Run], interval: str = "") -> Table:
    """Make the table of harmed clients, with a row per data set, partition and configuration.

    Args:
        runs: the runs.
        interval: as in `accuracy_table`.

    Raises:
        FedpflError: no run has a baseline.
    """
    shown_groups = groups(runs)
    require_classes(shown_groups, "--fairness")
    comparisons, notes = compare_with_baselines(shown_groups)
    if not any(comparison.pairs for comparison in comparisons):
        reasons = "".join(f". {line}" for line in notes[-1:])
        raise FedpflError(
            "no run here has FedAvg (with eval.finetune_epochs) or Local-Only of the same data, "
            "split and seed beside it; run method=fedavg,local_only, and let filters through"
            f"{reasons}"
        )
    return comparisons_table(comparisons, notes, interval)


def comparisons_table(
    comparisons: Sequence[BaselineComparison], notes: tuple[str, ...], interval: str = ""
) -> Table:
    """Make the table of the result of `compare_with_baselines`, as `fairness_table`."""
    records = []
    seeds = {}
    for comparison in comparisons:
        if comparison.accuracies:
            records.append(_describe_comparison(comparison, interval))
            seeds[comparison.group.title] = [run.seed for run in comparison.accuracies]
    caption = describe_interval(CAPTION.format(describe_seeds(seeds)), interval)
    return Table.of(records, COLUMNS, caption=caption, notes=notes, by=2)


def kinds_table(runs: Iterable[Run]) -> Table:
    """Make the table of kinds of networks, with a row per configuration and kind.

    It has no row for runs with one network for all clients.
    """
    records = []
    seeds = {}
    for group in groups(run for run in runs if run.config["model"]["name"] == "mixed"):
        frames = []
        for run in group.reported_runs:
            clients = run.participating_clients.reindex(columns=["seed", "accuracy", *KIND_COLUMNS])
            frames.append(clients.assign(seed=run.seed).dropna(subset=["kind", "accuracy"]))
        clients = pd.concat(frames, ignore_index=True)
        accuracies = clients.groupby(["seed", "kind"])["accuracy"].mean().unstack()
        for kind, own in clients.groupby("kind", sort=False):
            record = {**row_cells(group), "kind": kind, "clients": len(own) / len(accuracies)}
            record |= own[[*KIND_COLUMNS[1:]]].mean().to_dict()
            gaps = accuracies.max(axis=1) - accuracies[kind]
            record |= seed_statistics("accuracy", accuracies[kind].to_list())
            records.append(record | seed_statistics("gap", gaps.to_list()))
            seeds[group.title] = accuracies.index.to_list()
    caption = f"Clients of each kind of network, at the last evaluation; {describe_seeds(seeds)}."
    return Table.of(records, KIND_TABLE, title="Kinds of networks", caption=caption, by=2)


def _client_accuracies(run: Run, column: str) -> pd.Series:
    """Return the accuracy by client, of those that may take part and have test samples.

    Raises:
        FedpflError: a client has none.
    """
    clients = run.participating_clients
    has_test_counts = "test" in clients
    if has_test_counts:
        clients = clients[clients["test"] > 0]
    accuracies = clients.set_index("client").reindex(columns=[column])[column]
    if not has_test_counts:
        accuracies = accuracies.dropna()
    if accuracies.index.has_duplicates:
        raise FedpflError(f"{run.path}: clients.csv names a client twice")
    if accuracies.isna().any() or accuracies.empty:
        missing = int(accuracies.isna().sum()) or "any"
        raise FedpflError(f"{run.path}: clients.csv has no {column} of {missing} clients")
    return accuracies


def _pair_clients(
    own_accuracies: dict[Run, pd.Series], baseline: Group, accuracies: dict[Run, pd.Series]
) -> dict[Run, pd.DataFrame]:
    """Return clients' accuracies beside the baseline's, of runs with the same split and seed."""
    rivals = {run.seed: run for run in baseline.reported_runs if run in accuracies}
    pairs: dict[Run, pd.DataFrame] = {}
    for run, values in own_accuracies.items():
        rival = rivals.get(run.seed)
        if rival and have_same_split(run, rival):
            both = pd.DataFrame({"baseline": accuracies[rival], "accuracy": values}).dropna()
            if len(both):
                pairs[run] = both
    return pairs


def _describe_comparison(comparison: BaselineComparison, interval: str) -> Record:
    """Return a row's values by column."""
    # ---- Step 1: over clients within a seed, then over seeds.
    record = row_cells(comparison.group)
    accuracies = comparison.accuracies.values()
    clients = {"accuracy": [*accuracies], "accuracy_worst10": [*accuracies]}
    worst = [float(worst_decile(values).mean()) for values in accuracies]
    spreads = [float(values.std(ddof=0)) for values in accuracies]
    seeds = {"accuracy": [float(values.mean()) for values in accuracies]}
    seeds |= {"accuracy_worst10": worst, "accuracy_std": spreads}

    # ---- Step 2: against each baseline.
    for name in BASELINES:
        pairs = comparison.pairs.get(name, {})
        changes = [(both["accuracy"] - both["baseline"]).sort_values() for both in pairs.values()]
        # Accuracies are ratios of counts: a loss is far more than rounding.
        losses = [own[own < -1e-9] for own in changes]
        shares = [100 * len(lost) / len(own) for lost, own in zip(losses, changes, strict=True)]
        seeds[f"gain_{name}"] = [float(own.mean()) for own in changes]
        seeds[f"harmed_{name}"] = shares
        # A seed without a losing client has no loss to average.
        seeds[f"loss_{name}"] = [-float(lost.mean()) for lost in losses if len(lost)]
        seeds[f"change_{name}"] = [float(worst_decile(own).mean()) for own in changes]
        clients[f"gain_{name}"] = clients[f"change_{name}"] = [own.sort_index() for own in changes]
        record[f"seed_list_{name}"] = " ".join(str(run.seed) for run in pairs)
    for key, values in seeds.items():
        record |= seed_statistics(key, values, bool(interval))
        if interval in ("client", "both"):
            is_of_worst = key.startswith(("change", "accuracy_worst10"))
            own = [values.to_numpy(float) for values in clients.get(key, ())]
            record[f"{key}_seed_ci95"] = half_width_over_clients(own, is_of_worst, interval)

    # ---- Step 3: rounds and seeds.
    rounds = [run.last_evaluation["round"] for run in comparison.accuracies if run.is_evaluated]
    return record | {
        "round": format_range(list(map(int, rounds))) or None,
        "seeds": len(comparison.accuracies),
        "seed_list": " ".join(str(run.seed) for run in comparison.accuracies),
        "status": comparison.group.status,
    }
