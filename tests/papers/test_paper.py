"""The paper's tables and figures from synthetic runs, against values computed by hand."""

import functools
import io
import itertools
import json
import math
import re
import subprocess
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure as MatplotlibFigure

from fedpfl.config.resolution import resolve_config
from fedpfl.papers import published, queue
from fedpfl.papers.fedobp.figures import layer_shares
from fedpfl.papers.filling import fill_table
from fedpfl.papers.layout import LAST, Layout, Selection, list_parts
from fedpfl.papers.registry import FIGURES, TABLES
from fedpfl.report import groups, runs
from fedpfl.report.__main__ import main
from fedpfl.report.load import read_started_run
from fedpfl.report.render import render
from tests.conftest import keep_quick, read_cases
from tests.papers.test_experiments import composed
from tests.report.test_report import add_columns, write_run

PLANS = {name: table for name, table in TABLES.items() if isinstance(table, Layout)}
OBP = {"name": "fedobp", "q": 0.99993, "score": "obp", "norm": "global", "scope": "all"}
OBP["classifier_only"] = False
FMNIST = {"name": "published", "alpha": 0.1}
SLOW = {"epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}
PURIN = {"name": "fedpurin", "score": "gradient", "hessian": False, "include_norm": False}


def add(root: Path, name: str, accuracy: float, method: Any, **changes: Any) -> Path:
    changes = {"partition": FMNIST, "rounds": 4, **changes}
    return write_run(root / name, {2: accuracy + 5, 4: accuracy}, method=method, **changes)


def fill(table: str, root: Path, *more: Any, **options: Any) -> Any:
    return fill_table(table, groups(runs(root)), *more, **options)


def add_four(root: Path) -> Path:
    """FedOBP with two seeds, FedAvg and FedPer at both momenta; published 96.89, 87.29, 96.24."""
    for name, accuracy, method in (("a", 96.0, OBP), ("b", 97.0, OBP), ("slow", 85.0, "fedavg")):
        add(root, name, accuracy, method, seed=2 if name == "b" else 1, local=SLOW)
    add(root, "c", 89.0, "fedavg", seed=1)
    add(root, "d", 96.5, "fedper", seed=1)
    add(root, "plain", 96.5, "fedper", seed=1, local=SLOW)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return add_four(tmp_path)


def cells_of(root: Path, table: str = "fedobp/table4", **options: Any) -> Any:
    """Return a function that gives a cell's record; `mean` is None where it is empty."""
    shown = fill(table, root, **options)
    places = [(place.dataset, place.alphas[0]) for place in PLANS[table].columns]

    def cell(row: str, dataset: str = "fmnist", alpha: float = 0.1) -> SimpleNamespace:
        place = places.index((dataset, alpha))
        (own,) = (cells[1 + place] for cells in shown.rows if cells[0].value == row)
        record = shown.frame[(shown.frame["row"] == row)].iloc[place]
        return SimpleNamespace(**record, mean=None if math.isnan(own.value) else own.value)

    return cell


def test_own_beside_published(root: Path) -> None:
    """A baseline mixes both momenta; FedAvg+FT has two points more than before; of MedMNIST with its
    faulty normalisation there is a table of its own; a run that has not ended is marked, a method
    without a row is not shown.
    """
    cell = cells_of(root)
    obp, avg, tuned = map(cell, ("FedOBP", "FedAvg", "FedAvg+FT"))
    assert (obp.own, obp.own_seed_std, obp.seeds) == (96.5, pytest.approx(math.sqrt(0.5)), "1 2")
    assert (obp.published, obp.difference) == (96.89, pytest.approx(96.5 - 96.89))
    assert (avg.own, avg.own_seed_std) == (86, pytest.approx(math.sqrt(3)))
    assert (avg.published, avg.published_std, avg.seeds) == (87.29, 0.45, "1")
    fast, slow = (cell(f"FedAvg, momentum {one}") for one in ("0.7", "0"))
    assert (fast.own, fast.published, slow.own) == (89, 88.06, 85)
    assert slow.published == pytest.approx(87.29 - (88.06 - 87.29) / 3)
    assert (tuned.own, math.isnan(tuned.published)) == (88.0, True)
    assert (cell("FedAvg", alpha=0.5).seeds, cell("FedAvg", dataset="mnist").mean) == ("", None)
    assert cells_of(root, rule=Selection("ft_accuracy"))("FedAvg+FT").own == 88.0
    sound = {"name": "organamnist", "mean": [0.46], "std": [0.24]}
    add(root, "sound", 95.0, "fedper", dataset=sound)
    add(root, "faulty", 67.0, "fedper", dataset=sound | {"mean": [118.7546], "std": [62.3489]})
    add(root, "e", 90.0, "ditto", seed=1)
    write_run(root / "f", {2: 91.0}, "running", 3, method="apfl", partition=FMNIST)
    add_columns(root / "b", accuracy_pooled=[math.nan] * 4)
    cell = cells_of(root)
    assert cell("FedPer, momentum 0.7", "organamnist").mean == 95.0
    assert cell("APFL, momentum 0.7").unfinished == "running 3/4"
    shown = cells_of(root, "fedobp/table4_as_published")("FedPer", "organamnist")
    assert (shown.mean, shown.published) == (67.0, 67.44)
    text = render(fill("fedobp/table4", root))
    assert "91.00°" in text
    assert "° not all planned rounds: the last evaluation that there is (running 3/4)" in text
    assert "Ditto" not in text
    # A mean over one of two seeds would not be theirs.
    assert cells_of(root, rule=Selection("accuracy_pooled"))("FedOBP").mean is None


@pytest.mark.parametrize(
    ("method", "key", "wrong", "right"),
    keep_quick(
        [
            (OBP, "q", 0.9, 0.99993),
            ({"name": "fedavg"}, "partition.seed", 1, 42),
            ({"name": "fedper"}, "head_init", "initial", "server_average"),
            ({"name": "lg_fedavg"}, "variant", "paper", "as_published"),
        ],
        2,
    ),
)
def test_a_wrong_split_head_code_or_quantile_is_told(method, key, wrong, right, tmp_path):
    """Of two runs that fit a cell, the right one is shown, though it has fewer rounds."""
    for value, rounds in ((wrong, 8), (right, 4)):
        is_split = key == "partition.seed"
        own = method if is_split else method | {key: value}
        changes = {"seed": value if is_split else 42, "rounds": rounds, "local": SLOW}
        if (key, value) == ("q", right):
            changes["clients"] = 10  # q decides more than other differences together
        add(tmp_path, str(value), 80.0, own, **changes)
        notes = " ".join(fill("fedobp/table4", tmp_path).notes)
        assert (f"{key} {wrong} (published {right})" in notes) == (value == wrong)


def test_table_2_counts_entries(root: Path) -> None:
    counts = {"personal/conv1.weight": [0, 30, 20, 11], "personal/fc.bias": [0, 11, 21, 30]}
    for name in "ab":
        add_columns(root / name, **counts)
    cell = cells_of(root, "fedobp/table2")
    entries = cell("personal entries")
    assert cell("q").own == 0.99993
    assert (entries.own, entries.seeds, entries.published) == (41.0, "1 2", 41)


def test_table_5_tells_normalisations_apart(root: Path) -> None:
    """Of the public files' score; with CLS it shows a moving average on the smaller data sets."""
    earlier = OBP | {"score": "obp_as_published", "q": 0.999705}
    add(root, "layer", 90.0, earlier | {"norm": "layer"}, seed=1)
    add(root, "ema", 91.0, earlier | {"ema": 0.5}, seed=1)
    add(root, "cls", 92.0, earlier | {"classifier_only": True, "q": 0.9908}, seed=1)
    add(root, "cifar", 93.0, earlier | {"classifier_only": True, "q": 0.983}, dataset="cifar10")
    cell = cells_of(root, "fedobp/table5")
    shown = [cell(row) for row in ("none", "layer", "global", "global, CLS")]
    assert [one.mean for one in shown] == [None, 90.0, None, 91.0]
    assert [shown[1].published, shown[3].published] == [96.31, 96.81]
    assert cell("global, CLS", "cifar10").mean == 93.0
    [note] = [note for note in fill("fedobp/table5", root).notes if "differs" in note]
    assert " q " not in note


def test_other_data_sets_stand_before_the_papers(tmp_path: Path) -> None:
    """Where there is none of these; a note says so, and commands fill the paper's alone."""
    add(tmp_path, "a", 95.0, "fedavg", dataset="digits")
    grid = fill("fedobp/table3", tmp_path)
    own = grid.frame.set_index("row")["own"].dropna()
    heads = [(one.group, one.heading) for one in grid.columns[1:4]]
    assert heads == [("Digits", "Dir(0.1)"), ("Digits", "Dir(0.5)"), ("CIFAR10", "Dir(0.1)")]
    assert own.to_dict() == {"FedAvg, momentum 0.7": 95.0}
    assert grid.notes[0].startswith("In small: no paper has Digits")
    assert not any(note.startswith("Set-up that differs") for note in grid.notes)
    assert grid.commands
    assert not any("digits" in command for command in grid.commands)
    changes = {"method": "fedspu", "model": "fedspu_emnist", "stopping": {"early": False}}
    for alpha in (0.1, 0.5, 1.0):
        own: dict[str, Any] = {"dataset": "digits", "partition": {"alpha": alpha}, **changes}
        write_run(tmp_path / f"s{alpha}", {4: 90 + alpha}, **own)
    assert fill("fedspu/table1", tmp_path).frame["own"].max() == pytest.approx(90 + 1.6 / 3)


@pytest.mark.parametrize("plan", keep_quick(["fedobp/table4", "fedobp/table4_as_published"]))
def test_commands_fill_exactly_what_is_missing(plan: str, root: Path) -> None:
    grid = fill_table(plan, groups(runs(root)))
    jobs = []
    for command in grid.commands:
        words = (word.split("=") for word in command.split()[3:])
        values = {key: text.split(",") for key, text in words}
        names = [name.removesuffix("_as_published") for name in values["dataset"]]
        momenta = values["local.momentum"]
        jobs += itertools.product(values["method"], names, values["partition.alpha"], momenta)
    there = {("fedobp", "0.0"), *itertools.product(("fedavg", "fedper"), ("0.0", "0.7"))}
    wanted = {
        (row.method, column.dataset, f"{part.alpha:g}", part.overrides["local.momentum"])
        for row, column in itertools.product(PLANS[plan].rows, PLANS[plan].columns)
        for part in list_parts(row, column)
        if column.heading != ("FMNIST", "Dir(0.1)")
        or (part.row.method, part.overrides["local.momentum"]) not in there
    }
    assert len(jobs) == len(set(jobs))
    assert set(jobs) == wanted
    assert len(grid.commands) <= 8


@pytest.mark.parametrize("name", keep_quick(PLANS))
def test_what_a_command_runs_fits_its_cell(name: str, tmp_path: Path) -> None:
    """Every line in one column, every column in one line."""
    plan = PLANS[name]
    lines = [i for i, line in enumerate(plan.rows) if not line.omission]
    places = [j for j, place in enumerate(plan.columns) if not place.omission]
    cells = {(i, places[n % len(places)]) for n, i in enumerate(lines) if places}
    cells |= {(lines[-1], j) for j in places}
    for i, j in sorted(cells):
        part = list_parts(plan.rows[i], plan.columns[j])[-1]
        words = part.overrides
        path = tmp_path / f"{i}_{j}"
        path.mkdir()
        own = resolve_config(
            composed(*(f"{key}={value.split(',')[0]}" for key, value in words.items()))
        )
        (path / "config.yaml").write_text(yaml.safe_dump(own))
        (path / "summary.json").write_text("{}")
        assert part.is_filled_by(read_started_run(path)), words


def test_every_published_number_has_one_cell() -> None:
    """The MedMNIST numbers of Table IV stand once more beside runs with the faulty normalisation;
    others stand in running text, on figures or by themselves.
    """
    shown = [
        id(published.lookup(plan.published_key(row, column)))
        for name, plan in PLANS.items()
        for row, column in itertools.product(plan.rows, plan.columns)
        if name != "fedobp/table4_as_published" and not row.beside
    ]
    numbers = published.published_numbers("published.csv")
    of_tables = {
        id(number)
        for key, number in numbers.items()
        if not re.search(r" (Figure \d|text)$", key[0])
    }
    assert Counter(one for one in shown if one != id(None)) == Counter(of_tables)
    assert (len(of_tables), len(numbers)) == (641, 655)


# The other papers, by the last evaluation of all clients' personal models and by each paper's own
# rule


def assert_cells(root: Path, text: str) -> None:
    """Compare cells, a line each: table, row, and the value by our rule, by the paper's, and the
    published one. A line of a data set and a setting stands before its cells.
    """
    gathered = groups(runs(root))
    fill_once = functools.cache(lambda table, rule: fill_table(table, gathered, rule).frame)
    for line in read_cases(text, " | "):
        if len(line) == 2:
            column = line
            continue
        table, row, values = line
        found = []
        for rule in (Selection(), None):
            frame = fill_once(table, rule)
            is_cell = (frame[["row", "dataset", "setting"]] == [row, *column]).all(axis=1)
            ((own, known),) = frame[is_cell][["own", "published"]].to_numpy()
            found.append(own)
        wanted = [*map(float, values.split())]
        assert [*found, known] == pytest.approx(wanted, nan_ok=True), (table, row)


def test_fedselect_right_after_the_last_training(tmp_path: Path) -> None:
    dealt = {"name": "shuffled_shards", "classes_per_client": 2, "alpha": None}
    usual = {"name": "fedselect", "alpha": 0.3, "personalise": "most", "layer": None}
    methods: list[Any] = [usual, usual | {"alpha": 0.5}, usual | {"personalise": "least"}]
    methods += [usual | {"personalise": 5}, "fedavg", "fedbabu"]
    for method, accuracy in zip(methods, (80.0, 81.0, 82.0, 83.0, 30.0, 40.0), strict=True):
        changes = {"dataset": "cifar10", "partition": dealt, "clients": 10}
        add(tmp_path, str(accuracy), accuracy, method, **changes)
    assert_cells(
        tmp_path,
        """
        CIFAR10 | 10 clients, 2 classes each
        fedselect/table1 | FedSelect | 80 64 82.25
        fedselect/table1 | FedAvg | 30 31 27.70
        fedselect/table1 | FedAvg+FT | 32 33 75.30
        fedselect/table1 | FedBABU | 42 43 75.45
        fedselect/table2 | FedSelect (alpha=0.50) | 81 64 82.20
        fedselect/table3 | Personalize Least | 82 64 79.87
        fedselect/table3 | Layer B | 83 64 78.36
        """,
    )
    table = fill("fedselect/table3", tmp_path)
    assert "Which layers the paper calls A to D is not stated" in " ".join(table.notes)
    assert "method.personalise=least,0,5,10,15,random" in " ".join(table.commands)


def spu(root: Path, name: str, accuracy: float, alpha: float, early=False, **own: Any) -> Path:
    own, changes = {"name": "fedspu", **own}, {"dataset": "cifar10", "model": "fedspu_cifar10"}
    changes |= {"partition": ("dirichlet", alpha), "stopping": {"early": early}, "clients": 100}
    return add(root, name, accuracy, own, **changes)


def test_fedspu_over_three_alphas_and_with_early_stopping(tmp_path: Path) -> None:
    """The published count ends where fewer are active than a round takes."""
    for alpha in (0.1, 0.5, 1.0):
        path = spu(tmp_path, f"es{alpha}", 40.0 + 10 * alpha, alpha, early=True)
        add_columns(path, participants=[10, 10, 7, 10], sim_seconds=[3600.0, 1800.0, 900.0, 900.0])
    for accuracy, alpha in ((50.0, 0.1), (52.0, 0.5)):
        spu(tmp_path, f"a{alpha}", accuracy, alpha)
    half = fill("fedspu/table1", tmp_path)
    assert math.isnan(half.rows[-1][2].value)
    told = "python -m fedpfl.train experiment=fedspu/cifar10 method=prunefl,fjord,hermes,fedmp"
    assert f"{told} stopping.early=false partition.alpha=0.1,0.5" in half.commands
    assert f"{told},fedspu stopping.early=false partition.alpha=1" in half.commands
    spu(tmp_path, "a1", 57.0, 1.0)
    own = 40 + 16 / 3
    # Down 10,000 values and three times 6,000, up four times 10,000: 68,000 of 4 bytes or 32 bits,
    # before the third round 36,000.
    assert_cells(
        tmp_path,
        f"""
        CIFAR10 | mean of Dir(0.1), Dir(0.5), Dir(1)
        fedspu/table1 | FedSPU | 53 53 51.81
        fedspu/table2 | FedSPU | {own} {own} 42.66
        CIFAR10 | 500 rounds
        fedspu/table3 | FedSPU (volume) | 2.72e-4 2.176e-3 18.04
        fedspu/table3 | FedSPU (hours) | nan nan 25.05
        fedspu/table3 | FedSPU+ES (volume) | 2.72e-4 1.152e-3 6.37
        fedspu/table3 | FedSPU+ES (hours) | 2 1.5 8.9
        CIFAR10 | Dir(0.5)
        fedspu/table4 | FedSPU+ES | 3 3 216
        fedspu/table4 | FedSPU | 4 4 500
        """,
    )
    [note] = fill_table("fedspu/table1", []).notes
    assert note.startswith("Without own values: FedSelect; what is described there, a pruned model")


def test_fedpurin_by_the_best_round_before_averaging(tmp_path: Path) -> None:
    """FedAvg has no beta: its traffic is of all rounds, 28,000 values of 40 clients."""
    fixed = {"partition": {"name": "fixed_dirichlet", "alpha": 0.1}}
    method = {"name": "fedpurin", "score": "gradient", "hessian": False, "beta": 2}
    path = add(tmp_path, "purin", 90.0, method, **fixed)
    positions = [330_000, 202_000, 202_000, 202_000]
    add_columns(path, cohort_after=[60.0, 75.0, 70.0, 65.0], bits_down=positions)
    add(tmp_path, "delta", 91.0, method | {"score": "delta", "hessian": True}, **fixed)
    add(tmp_path, "avg", 92.0, "fedavg", **fixed)
    bits = [32_000, 26_600, 16_000 * 32 / 20, 20_200, 600 * 32, 700 * 32]
    up, down, published, late, later, whole = (count / (8 * 2**20) for count in bits)
    assert_cells(
        tmp_path,
        f"""
        FMNIST | Dir(0.1)
        fedpurin/table1 | FedPURIN | 90 75 96.55
        fedpurin/table1 | FedAvg | 92 64 97.05
        fedpurin/table2 | FedPURIN (delta theta, Hessian) | 91 64 96.48
        fedpurin/table3 | FedPURIN, up, before beta | {up} {up} 2.38
        fedpurin/table3 | FedPURIN, down, before beta | {down} {published} 4.34
        fedpurin/table3 | FedPURIN, down, after beta | {late} {later} 0.69
        fedpurin/table3 | FedAvg, down, after beta | {whole} {whole} 4.69
        """,
    )


def test_subflot_after_training_and_by_domain(tmp_path: Path) -> None:
    """Clients 0 to 4 hold art paintings, 5 to 9 cartoons, then photos and sketches."""
    whole = {"name": "subflot", "otp": True, "sar": True, "ota": True}
    dirichlet = {"name": "dirichlet", "alpha": 0.1}
    shards = {"name": "shards", "classes_per_client": 10, "alpha": None}
    for accuracy, dataset, clients, partition, changes in (
        (45.0, "cifar100", 20, dirichlet, {}),
        (99.0, "cifar100", 100, dirichlet, {}),
        (47.0, "cifar100", 10, dirichlet, {}),
        (55.0, "cifar100", 20, shards, {}),
        (80.0, "cifar10", 20, dirichlet, {"ota": False}),
        (40.0, "pacs", 20, "groups", {}),
    ):
        own = {"dataset": dataset, "clients": clients, "partition": partition}
        path = add(tmp_path, str(accuracy), accuracy, whole | changes, **own)
    held = {"client": range(20), "accuracy": map(float, range(20))}
    pd.DataFrame(held).to_csv(path / "clients.csv", index=False)
    assert_cells(
        tmp_path,
        """
        CIFAR100 | practical
        subflot/main | SubFLOT | 45 64 44.88
        CIFAR100 | pathological
        subflot/main | SubFLOT | 55 64 58.37
        CIFAR100 | label skew or real world
        subflot/label_skew | SubFLOT | 55 64 58.37
        CIFAR10 | Dir(0.1)
        subflot/ablation | SubFLOT w/o OTA | 80 64 81.41
        PACS | Photo
        subflot/pacs | SubFLOT | 12 12 48.23
        PACS | Avg
        subflot/pacs | SubFLOT | 40 40 41.58
        """,
    )
    absent = "Without own values: 10 clients, 100 clients; the data set is not stated."
    assert absent in fill_table("subflot/scalability", []).notes
    shown = fill("subflot/scalability", tmp_path).frame
    there = shown[shown["dataset"] == "CIFAR100"].set_index("setting")["own"].dropna()
    assert there.to_dict() == {"10 clients": 47.0, "100 clients": 99.0}
    assert shown["published"].dropna().tolist() == [39.2, 32.61]  # of a data set that is not stated
    assert shown["difference"].isna().all()


def test_the_papers_own_rule_is_the_default(tmp_path, capsys):
    add(tmp_path, "avg", 92.0, "fedavg", partition=("fixed_dirichlet", 0.1))
    words = ["paper", "fedpurin/table1", str(tmp_path), "--format", "csv"]
    for more, own in (["--select", "last"], 92.0), ([], 64.0):
        assert main([*words, *more]) == 0
        assert set(pd.read_csv(io.StringIO(capsys.readouterr().out))["own"].dropna()) == {own}
    add(tmp_path, "short", 90.0, "fedper", local=SLOW)
    assert main(["paper", "fedobp/table4", str(tmp_path)]) == 0
    assert "No evaluation that this rule judges yet (--select last)" in capsys.readouterr().out


def test_missing_cells_are_run_cheapest_first_until_the_time_is_over(
    root, monkeypatch, capsys
) -> None:
    """An hour a round on FashionMNIST, a second on MNIST; a run that is cut has SIGTERM."""
    mnist = add(root, "mnist", 98.0, "ditto", dataset="mnist")
    cut_run = {"method": "local_only", "dataset": "mnist", "partition": FMNIST}
    cut = write_run(root / "cut", {2: 90.0}, "running", 3, **cut_run)
    add_columns(cut, seconds=1.0)
    for path, seconds in ((root / "c", 3600.0), (mnist, 1.0)):
        told = {"status": "finished", "hours": 4 * seconds / 3600}
        (path / "summary.json").write_text(json.dumps(told))
    cell = cells_of(root)
    assert cell("FedAvg", dataset="mnist").cost_seconds == 2 * 400
    assert cell("FedAvg", alpha=0.5).cost_seconds == 2 * 400 * 3600
    jobs: list[Any] = []

    def start(words: list[str]) -> Any:
        jobs.append(words[3:])
        timeouts = [0] if len(jobs) == 1 else [subprocess.TimeoutExpired("", 1), 143]
        return Mock(wait=Mock(side_effect=timeouts), terminate=lambda: jobs.append("cut"))

    monkeypatch.setattr(queue.subprocess, "Popen", start)
    words = ["paper", "fedobp/table4", str(root), "--fill", "30m", "--with", "data_dir=DIR"]
    monkeypatch.setattr(queue.time, "monotonic", Mock(side_effect=[0, 1, 2, 1795]))
    assert main(words) == 0
    first, second, signal = jobs
    method = ["experiment=fedobp/table4", "method=local_only", "local.momentum=0.7"]
    assert first == [*method, "dataset=mnist", "partition.alpha=0.1", "data_dir=DIR"]
    assert ("dataset=mnist" in second, signal) == (True, "cut")

    # A GPU plays up to four runs in lockstep; a command has one data set.
    jobs.clear()
    monkeypatch.setattr(queue.shutil, "which", str)
    failed = Mock(wait=Mock(side_effect=[0, 1]))
    monkeypatch.setattr(queue.subprocess, "Popen", lambda words: jobs.append(words[3:]) or failed)
    monkeypatch.setattr(queue.time, "monotonic", Mock(side_effect=[0, 1, 2, 1795]))
    assert main(words) == 2
    assert "1 of these commands failed" in capsys.readouterr().err
    shared = ["local.momentum=0.7,0.0", "dataset=mnist", "partition.alpha=0.1,0.5", "data_dir=DIR"]
    assert jobs == [
        ["experiment=fedobp/table4", f"method={name}", *shared] for name in ("local_only", "fedavg")
    ]


# Figures


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of which FedOBP's and FedSPU's figures can be drawn, and which nobody changes."""
    root = add_four(tmp_path_factory.mktemp("everything"))
    scores = itertools.product(("obp", "fisher"), (0.0, 0.9, 1.0))
    for number, (score, q) in enumerate(scores):
        add(root, f"s{number}", 80.0 + number, OBP | {"score": score, "q": q})
    for number, alpha in enumerate((0.3, 0.5)):
        add(root, f"a{number}", 85.0, "fedavg", partition=("published", alpha))
    earlier = OBP | {"score": "obp_as_published", "q": 0.999705}
    add(root, "layer", 90.0, earlier | {"norm": "layer"}, seed=42)
    add(root, "global", 91.0, earlier, seed=42)
    for q in (0.0, 0.9):
        add(root, f"ema{q}", 92.0, earlier | {"ema": 0.5, "q": q}, dataset="cifar100")
    counts = {"conv1.weight": [0, 20, 15, 10], "conv1.bias": [0, 10, 15, 10]}
    counts["fc.weight"] = [0, 10, 30, 60]
    for name in ("a", "layer"):
        add_columns(root / name, **{f"personal/{key}": own for key, own in counts.items()})
    made = {"width": 1.0, "entries": 100, "values": 5, "operations": 4000}
    told = {"status": "finished", "devices": [made | {"width": 0.5, "entries": 40}, made]}
    (spu(root, "spu", 50.0, 0.1, widths=[0.5, 1.0]) / "summary.json").write_text(json.dumps(told))
    return root


def drawn(name: str, root: Path, monkeypatch: Any, notes: list[str] | None = None) -> Any:
    """What a figure's panels hold: by heading, values by label, where there are none by place."""
    found: dict[str, dict[str, Any]] = {}

    def panels(shown: Any, path: Path, draw: Any, *_: Any, **options: Any) -> list[Path]:
        for heading, members in shown.items():
            ax = MatplotlibFigure().subplots()
            draw(ax, members)
            means = {one.get_label(): one.lines[0] for one in ax.containers}
            lines = {one.get_label(): one for one in ax.lines if one not in means.values()} | means
            values = {label: list(line.get_ydata()) for label, line in lines.items()}
            pixels = [image.get_array().round(2).tolist() for image in ax.images]
            values["image"] = pixels[0] if pixels else []
            values.pop("_nolegend_", None)
            found[heading] = {label: ys for label, ys in values.items() if ys}
        if notes is not None:
            notes.extend([*_, *options.values()])
        return []

    paint = FIGURES[name].paint
    monkeypatch.setattr(f"{paint.__module__}.draw_panels", panels)
    FIGURES[name].draw(name, groups(runs(root)), root, LAST)
    return found


def test_masks_of_the_last_layer_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients hold 2 entries each, 1 in common; the third holds none. Another way to choose what
    becomes personal has no panel.
    """
    clients = {"dataset": {"name": "mini_imagenet"}, "clients": 3}
    clients["partition"] = FMNIST | {"samples_per_client": 480}
    other = {"name": "fedselect", "alpha": 0.5, "personalise": "random"}
    paths = [add(tmp_path, "random", 70.0, other, seed=1, **clients)]
    paths += [add(tmp_path, "a", 70.0, {"name": "fedselect", "alpha": 0.3}, seed=1, **clients)]
    first = {"entries": 8, "held": [4, 0, 0, 4], "both": [[4, 4, 4]] * 3}
    last = {"entries": 10, "held": [7, 2, 1, 0], "both": [[2, 1, 0], [1, 2, 0], [0, 0, 0]]}
    told = {"clients": [0, 1, 2], "tensors": {"conv.weight": first, "fc.weight": last}}
    for path in paths:
        (path / "masks.json").write_text(json.dumps(told))
    [shown] = drawn("fedselect/figure4", tmp_path, monkeypatch).values()
    assert shown["image"] == [[1, 0.33, 0], [0.33, 1, 0], [0, 0, 0]]


def test_fedselects_figures_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after training; FedAvg before it and, as FedBABU, after fine-tuning; all pooled."""
    for size, name in itertools.product((20, 100), ("fedavg", "fedbabu", "fedper")):
        dealt = {"name": "shuffled_shards", "samples_per_client": size, "alpha": None}
        changes = {"dataset": "cifar10", "partition": dealt}
        add(tmp_path, f"{name}{size}", 30.0 + size, name, **changes)
    [lines] = drawn("fedselect/figure3", tmp_path, monkeypatch).values()
    tuned = {"FedAvg+FT": [53, 133], "FedBABU": [53, 133]}
    assert lines == {"FedAvg": [51, 131], **tuned, "FedPer": [64, 64]}
    [lines] = drawn("fedselect/figure2", tmp_path, monkeypatch).values()
    tuned = {"FedAvg+FT": [138, 133], "FedBABU": [138, 133]}
    assert lines == {"FedAvg": [136, 131], **tuned, "FedPer": [61, 62, 63, 64]}


def test_fedpurins_figures_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figure 2 has the exact gradient, Figures 3 and 4 the approximated one, a panel per alpha."""
    default = PURIN | {"tau": 0.5, "score": "delta"}
    all_changes = ({}, {"include_norm": True}, {"tau": 0.2}, {"score": "gradient"})
    cases = itertools.product((0.1, 0.5), enumerate(all_changes), (0, 1, 2))
    for case, (alpha, (number, changes), seed) in enumerate(cases):
        partition = {"name": "fixed_dirichlet", "alpha": alpha}
        accuracy = 70.0 + number + 10 * alpha + seed**2
        add(tmp_path, str(case), accuracy, default | changes, partition=partition, seed=seed)
    add(tmp_path, "avg", 60.0, "fedavg", partition={"name": "fixed_dirichlet", "alpha": 0.1})
    mean = 5 / 3
    [means] = drawn("fedpurin/figure2", tmp_path, monkeypatch).values()
    assert means == {"FedAvg": [60], "FedPURIN (score=gradient)": [pytest.approx(74 + mean)]}
    left, right = drawn("fedpurin/figure3", tmp_path, monkeypatch).values()
    assert [*left] == ["without BatchNorm's weights", "with BatchNorm's weights"]
    assert [*left.values()] == [[pytest.approx(71 + mean)], [pytest.approx(72 + mean)]]
    assert [*right.values()] == [[pytest.approx(75 + mean)], [pytest.approx(76 + mean)]]
    left, right = drawn("fedpurin/figure4", tmp_path, monkeypatch).values()
    assert left == {"FedPURIN": pytest.approx([73 + mean, 71 + mean])}
    assert right == {"FedPURIN": pytest.approx([77 + mean, 75 + mean])}


def test_a_figure_says_what_it_left_out_and_what_has_not_ended(tmp_path, monkeypatch) -> None:
    """Of two runs that would be one point or bar the longer is drawn, and both are told of."""
    default = PURIN | {"tau": 0.5, "score": "delta"}
    partition = {"name": "fixed_dirichlet", "alpha": 0.1}
    for number, changes in enumerate(({}, {"include_norm": True}, {"tau": 0.2})):
        add(tmp_path, f"{number}", 70.0 + number, default | changes, partition=partition)
    notes: list[str] = []
    drawn("fedpurin/figure3", tmp_path, monkeypatch, notes=notes)
    assert notes == [""]
    add(tmp_path, "short", 90.0, default | {"beta": 8}, partition=partition, rounds=2)
    cut = default | {"tau": 0.3}
    write_run(tmp_path / "cut", {2: 60.0}, "running", 3, method=cut, partition=partition)
    [lines] = drawn("fedpurin/figure4", tmp_path, monkeypatch, notes=notes).values()
    assert lines["FedPURIN"] == [72, 60, 70]
    [bars] = drawn("fedpurin/figure3", tmp_path, monkeypatch, notes=notes).values()
    assert [*bars.values()] == [[70], [71]]
    several = "several configurations fit: the longest of each"
    assert notes[1:] == [f"{several}; not all planned rounds: running 3/4", several]


@pytest.mark.parametrize("name", keep_quick(n for n in FIGURES if n[:6] in ("fedobp", "fedspu")))
def test_every_figure_is_drawn(name, everything, tmp_path):
    written = FIGURES[name].draw(name, groups(runs(everything)), tmp_path, Selection())
    stem = name.replace("/", "_")
    assert [path.name for path in written] == [f"{stem}.png", f"{stem}.pdf"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert written[1].read_bytes().startswith(b"%PDF")


def test_shares_of_layers_by_hand(everything: Path) -> None:
    [run] = [run for run in runs(everything) if run.path.name == "a"]
    shares = layer_shares(run)
    assert list(shares) == ["conv1", "fc"]
    assert shares.index.tolist() == [2, 3, 4]  # in the first round nobody has any
    assert shares["conv1"].tolist() == [0.75, 0.5, 0.25]
