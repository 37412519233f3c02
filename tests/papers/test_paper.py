"""The paper's tables and figures from synthetic runs, against values computed by hand."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure as MatplotlibFigure

from fedpfl.config.plan import resolve_config
from fedpfl.ground.errors import FedpflError
from fedpfl.papers import published
from fedpfl.papers.fedobp.figures import layer_shares
from fedpfl.papers.fedobp.tables import COMPARED_METHODS
from fedpfl.papers.filling import fill_table
from fedpfl.papers.layout import Layout, Selection
from fedpfl.papers.registry import FIGURES, TABLES
from fedpfl.report import groups, runs
from fedpfl.report.__main__ import main
from fedpfl.report.load import read_started_run
from fedpfl.report.names import DATASET_TITLES
from fedpfl.report.render import render
from fedpfl.report.text import letters_and_digits
from tests.conftest import keep_quick, read_cases
from tests.papers.test_experiments import composed, swept
from tests.report.test_report import write_run

PLANS = {name: table for name, table in TABLES.items() if isinstance(table, Layout)}
FEDOBP = [name for name in PLANS if name.startswith("fedobp/")]
OBP = {"name": "fedobp", "q": 0.99993, "score": "obp", "norm": "global", "scope": "all"}
OBP["classifier_only"] = False
FMNIST = {"name": "published", "alpha": 0.1}
PURIN = {"name": "fedpurin", "score": "gradient", "hessian": False, "include_norm": False}


def add(root: Path, name: str, accuracy: float, method: Any, **changes: Any) -> Path:
    changes = {"partition": FMNIST, "rounds": 4, **changes}
    return write_run(root / name, {2: accuracy + 5, 4: accuracy}, method=method, **changes)


def fill(table: str, root: Path, *more: Any, **options: Any) -> Any:
    return fill_table(table, groups(runs(root)), *more, **options)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Fashion-MNIST at Dir(0.1): FedOBP with two seeds, FedAvg and FedPer with one; published
    96.89, 87.29, 96.24.
    """
    add(tmp_path, "a", 96.0, OBP, seed=1)
    add(tmp_path, "b", 97.0, OBP, seed=2)
    add(tmp_path, "c", 86.0, "fedavg", seed=1)
    add(tmp_path, "d", 96.5, "fedper", seed=1)
    return tmp_path


def cell(
    root: Path, row: str, table="fedobp/table4", dataset="fmnist", alpha=0.1, **options: Any
) -> SimpleNamespace:
    """Return a cell's own mean, seeds, and what else is known of it."""
    shown = fill(table, root, **options)
    places = [(place.dataset, place.alphas[0]) for place in PLANS[table].columns]
    place = 1 + places.index((dataset, alpha))
    (own,) = (cells[place] for cells in shown.rows if cells[0].value == row)
    record = shown.frame[(shown.frame["row"] == row)].iloc[place - 1]
    mean = None if math.isnan(own.value) else own.value
    return SimpleNamespace(**record, mark=own.mark, flag=own.flag, mean=mean)


# Tables


def test_own_beside_published(root: Path) -> None:
    obp = cell(root, "FedOBP")
    assert (obp.own, obp.own_seed_std, obp.seeds) == (96.5, pytest.approx(math.sqrt(0.5)), "1 2")
    assert (obp.published, obp.difference) == (96.89, pytest.approx(96.5 - 96.89))
    assert cell(root, "FedAvg").published == 87.29
    assert cell(root, "FedAvg+FT").own == 88.0  # two more than before fine-tuning
    assert math.isnan(cell(root, "FedAvg+FT").published)
    assert cell(root, "FedAvg", alpha=0.5).seeds == ""
    assert cell(root, "FedAvg", dataset="mnist").mean is None


def test_ablations_and_other_quantiles_are_no_row_of_the_main_table(root: Path) -> None:
    ablations = {"norm": "layer", "score": "fisher", "classifier_only": True, "scope": "tensor"}
    for key, value in ablations.items():
        add(root, key, 99.0, OBP | {key: value}, seed=1)
    add(root, "q", 99.5, OBP | {"q": 0.9}, seed=1)
    assert cell(root, "FedOBP").mean == 96.5
    assert any(
        "Several configurations fit FedOBP" in note for note in fill("fedobp/table4", root).notes
    )


def test_the_run_nearest_to_the_papers_settings_is_shown(root: Path) -> None:
    other = {"epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}
    add(root, "slow", 50.0, "fedavg", seed=1, local=other)
    add(root, "ours", 60.0, "fedavg", seed=1, partition=("dirichlet", 0.1))
    assert cell(root, "FedAvg").mean == 86.0


def test_unfinished_runs_are_marked(root: Path) -> None:
    add(root, "e", 90.0, "ditto", seed=1)  # no row of the table
    write_run(root / "f", {2: 91.0}, "running", 3, method="apfl", partition=FMNIST)
    assert cell(root, "APFL").unfinished == "running 3/4"
    text = render(fill("fedobp/table4", root))
    assert "91.00°" in text
    assert "° not all planned rounds: the last evaluation that there is (running 3/4)" in text
    assert "Ditto" not in text


def test_faulty_normalisation_has_a_table_of_its_own(root: Path) -> None:
    faulty = {"name": "organamnist", "mean": [118.7546], "std": [62.3489]}
    add(
        root,
        "sound",
        95.0,
        "fedper",
        dataset={"name": "organamnist", "mean": [0.46], "std": [0.24]},
    )
    add(root, "faulty", 67.0, "fedper", dataset=faulty)
    assert cell(root, "FedPer", dataset="organamnist").mean == 95.0
    shown = cell(root, "FedPer", "fedobp/table4_as_published", "organamnist")
    assert (shown.mean, shown.published) == (67.0, 67.44)


def test_table_2_counts_entries(root: Path) -> None:
    for name in "ab":
        rows = pd.read_csv(root / name / "rounds.csv")
        rows["personal/conv1.weight"], rows["personal/fc.bias"] = [0, 30, 20, 11], [0, 11, 21, 30]
        rows.to_csv(root / name / "rounds.csv", index=False)
    assert cell(root, "q", "fedobp/table2").own == 0.99993
    entries = cell(root, "personal entries", "fedobp/table2")
    assert (entries.own, entries.seeds, entries.published) == (41.0, "1 2", 41)
    assert "41 0" in render(fill("fedobp/table2", root))


def test_table_5_tells_normalisations_apart(root: Path) -> None:
    """Of the public files' score; with CLS it shows a moving average on the smaller data sets."""
    earlier = OBP | {"score": "obp_as_published", "q": 0.999705}
    add(root, "layer", 90.0, earlier | {"norm": "layer"}, seed=1)
    add(root, "ema", 91.0, earlier | {"ema": 0.5}, seed=1)
    add(root, "cls", 92.0, earlier | {"classifier_only": True, "q": 0.9908}, seed=1)
    add(root, "cifar", 93.0, earlier | {"classifier_only": True, "q": 0.983}, dataset="cifar10")
    rows = ("none", "layer", "global", "global, CLS")
    own = {row: cell(root, row, "fedobp/table5").mean for row in rows}
    assert own == {"none": None, "layer": 90.0, "global": None, "global, CLS": 91.0}
    assert cell(root, "layer", "fedobp/table5").published == 96.31
    assert cell(root, "global, CLS", "fedobp/table5").published == 96.81
    assert cell(root, "global, CLS", "fedobp/table5", "cifar10").mean == 93.0
    [note] = [note for note in fill("fedobp/table5", root).notes if "differs" in note]
    assert " q " not in note
    add(root, "q", 94.0, earlier | {"q": 0.9999}, seed=1)
    assert any(
        "q 0.9999 (published 0.999705)" in note for note in fill("fedobp/table5", root).notes
    )


def test_fedobp_is_shown_without_momentum_and_others_with(root: Path) -> None:
    """As the published numbers of each fit; the comparison at one momentum shows both."""
    plain = {"epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}
    for name, method in (("obp", OBP), ("avg", "fedavg")):
        add(root, name, 50.0, method, seed=1, local=plain)
    assert (cell(root, "FedOBP").mean, cell(root, "FedAvg").mean) == (50.0, 86.0)
    rows = [
        f"{name}, momentum {momentum}" for name in ("FedOBP", "FedAvg") for momentum in ("0", "0.7")
    ]
    assert [cell(root, row, "fedobp/one_momentum").mean for row in rows] == [50.0, 96.5, 50.0, 86.0]


def test_other_data_sets_take_the_columns_where_there_is_none_of_the_papers(tmp_path: Path) -> None:
    add(tmp_path, "a", 95.0, "fedavg", dataset="digits")
    grid = fill("fedobp/table3", tmp_path)
    assert [(one.group, one.heading) for one in grid.columns[1:]] == [
        ("Digits", f"Dir({a})") for a in (0.1, 0.5)
    ]
    assert grid.rows[1][1].value == 95.0
    assert all("dataset=digits" in command.split() for command in grid.commands)
    spu = {
        "method": {"name": "fedspu"},
        "model": {"name": "fedspu_emnist"},
        "stopping": {"early": False},
    }
    for alpha in (0.1, 0.5, 1.0):
        write_run(
            tmp_path / f"s{alpha}",
            {4: 90 + alpha},
            dataset="digits",
            partition={"alpha": alpha},
            **spu,
        )
    assert fill("fedspu/table1", tmp_path).frame["own"].tolist()[-1] == pytest.approx(90 + 1.6 / 3)


# What is missing


def filled(commands: tuple[str, ...]) -> set[tuple[str, str, float]]:
    """Method, data set and alpha of every job of the commands."""
    jobs = set[tuple[str, str, float]]()
    for command in commands:
        words = dict(word.split("=", 1) for word in command.split()[3:])
        params = {"partition.alpha": ["0.1"]}
        params |= swept(composed(f"experiment={words.pop('experiment')}"))
        params |= {key: values.split(",") for key, values in words.items()}
        names = [name.removesuffix("_as_published") for name in params["dataset"]]
        alphas = map(float, params["partition.alpha"])
        jobs.update(itertools.product(params["method"], names, alphas))
    return jobs


@pytest.mark.parametrize("plan", keep_quick(["fedobp/table4_as_published", "fedobp/table4"]))
def test_commands_fill_exactly_what_is_missing(plan: str, root: Path) -> None:
    grid = fill_table(plan, groups(runs(root)))
    lines, columns = PLANS[plan].rows, PLANS[plan].columns
    empty = {
        (line.method, column.dataset, column.alphas[0])
        for line, row in zip(lines, grid.rows, strict=True)
        for column, own in zip(columns, row[1:], strict=True)
        if math.isnan(own.value)
    }
    assert filled(grid.commands) == empty
    assert len(grid.commands) <= 4


@pytest.mark.parametrize("name", keep_quick(FEDOBP))
def test_plans_are_what_the_experiments_run(name: str) -> None:
    plan = PLANS[name]
    for i in range(len(plan.rows)):
        every = [plan.overrides_of(i, j, place.alphas[0]) for j, place in enumerate(plan.columns)]
        for experiment in {words["experiment"] for words in every}:
            params, words = (
                swept(composed(f"experiment={experiment}")),
                [w for w in every if w["experiment"] == experiment],
            )
            for key in words[0].keys() - {"experiment"}:
                own = list(dict.fromkeys(each[key] for each in words))
                known = params.get(key, ["0.1"])
                assert own == known if key in ("dataset", "partition.alpha") else own[0] in known
    assert {line.method for line in PLANS["fedobp/table3"].rows} == set(COMPARED_METHODS)


@pytest.mark.parametrize("name", keep_quick(["fedpurin/table2", "fedselect/table2"]))
def test_the_whole_of_a_table_is_its_experiments(name: str) -> None:
    """Nothing more, nothing less, but for seeds."""
    plan, wanted, found = PLANS[name], Counter[Any](), Counter[Any]()
    for i, (j, place) in itertools.product(range(len(plan.rows)), enumerate(plan.columns)):
        words = {**plan.overrides_of(i, j, None), "partition.alpha": place.alphas[0]}
        wanted[frozenset(words.items())] += 1
    commands = fill_table(name, []).commands
    assert all(len(command.split()) == 4 for command in commands)
    for experiment in (command.split()[3] for command in commands):
        own = swept(composed(experiment)) | {"experiment": [experiment.partition("=")[2]]}
        own["partition.alpha"] = [*map(float, own.get("partition.alpha", ()))] or [None]
        if "method.hessian" in own:
            own["method.hessian"] = [value.lower() for value in own["method.hessian"]]
        own.pop("seed", None)
        jobs = itertools.product(*own.values())
        found.update(frozenset(zip(own, job, strict=True)) for job in jobs)
    assert found == wanted
    assert set(found.values()) == {1}


@pytest.mark.parametrize(
    "name", keep_quick(["fedpurin/table2", *sorted(PLANS.keys() - {*FEDOBP, "fedpurin/table2"})])
)
def test_what_a_command_runs_fits_its_cell(name: str, tmp_path: Path) -> None:
    """Every line in one column, every column in one line."""
    plan = PLANS[name]
    lines = [i for i, line in enumerate(plan.rows) if not line.omission]
    places = [j for j, place in enumerate(plan.columns) if not place.omission]
    cells = {(i, places[n % len(places)]) for n, i in enumerate(lines) if places} | {
        (lines[-1], j) for j in places
    }
    for i, j in sorted(cells):
        alpha = plan.columns[j].alphas[-1]
        words = plan.overrides_of(i, j, alpha)
        path = tmp_path / f"{i}_{j}"
        path.mkdir()
        own = resolve_config(composed(*(f"{key}={value}" for key, value in words.items())))
        (path / "config.yaml").write_text(yaml.safe_dump(own))
        (path / "summary.json").write_text("{}")
        assert plan.fits(read_started_run(path), i, j, alpha), words


def read_rows(path: Path) -> list[tuple[str, ...]]:
    """Source, metric, method, data set and setting of a paper's numbers."""
    with open(path, encoding="utf-8") as file:
        return [tuple(row.values())[:5] for row in csv.DictReader(file)]


def test_every_published_number_has_one_cell() -> None:
    """The MedMNIST numbers of Table IV stand once more beside runs with the faulty normalisation."""
    shown: Counter[Any] = Counter()
    for name, plan in PLANS.items():
        if name == "fedobp/table4_as_published":
            continue
        printed = iter(fill_table(name, []).frame["published"])
        for i in range(len(plan.rows)):
            for j in range(len(plan.columns)):
                source, metric, method, dataset, setting = plan.published_key(i, j)
                title = DATASET_TITLES.get(dataset, dataset)
                key = (source, metric, letters_and_digits(method), title, setting)
                value = next(printed)
                if not math.isnan(value):
                    shown[key] += 1
                    assert value == published.published_numbers()[key].value
    paths = sorted(Path(published.__file__).parent.glob("*/published.csv"))
    rows = [row for path in paths for row in read_rows(path)]
    assert shown == Counter((row[0], row[1], letters_and_digits(row[2]), *row[3:]) for row in rows)
    assert len(rows) == 641


# The other papers, by the last evaluation of all clients' personal models and by each paper's own
# rule


def change(path: Path, name: str = "rounds.csv", **columns: list[float]) -> None:
    rows = pd.read_csv(path / name)
    rows.assign(**columns).to_csv(path / name, index=False)


def both(root: Path, table: str, row: str, dataset: str, setting: str) -> tuple[float, ...]:
    """Return the own value of a cell by our rule and by the paper's, and the published one."""
    found = []
    for rule in (Selection(), None):
        frame = fill_table(table, groups(runs(root)), rule).frame
        is_cell = (frame[["row", "dataset", "setting"]] == [row, dataset, setting]).all(axis=1)
        ((own, known),) = frame[is_cell][["own", "published"]].to_numpy()
        found.append(own)
    return found[0], found[1], known


def test_fedobp_by_the_best_of_its_checkpoints_pooled(tmp_path: Path) -> None:
    accuracy = {100: 90.0, 150: 99.0, 200: 80.0}
    write_run(tmp_path / "a", accuracy, reached=200, method="fedper", partition=FMNIST, rounds=200)
    assert both(tmp_path, "fedobp/table4", "FedPer", "FMNIST", "Dir(0.1)") == (80.0, 91.0, 96.24)


def test_fedselect_right_after_the_last_training(tmp_path: Path) -> None:
    dealt = {"name": "shuffled_shards", "classes_per_client": 2, "alpha": None}
    usual = {"name": "fedselect", "alpha": 0.3, "personalise": "most", "layer": None}
    for name, accuracy, method in (
        ("select", 80.0, usual),
        ("half", 81.0, usual | {"alpha": 0.5}),
        ("least", 82.0, usual | {"personalise": "least"}),
        ("layer", 83.0, usual | {"personalise": 5}),
        ("avg", 30.0, "fedavg"),
        ("babu", 40.0, "fedbabu"),
    ):
        add(tmp_path, name, accuracy, method, dataset="cifar10", partition=dealt, clients=10)
    setting = "CIFAR10", "10 clients, 2 classes each"
    assert both(tmp_path, "fedselect/table1", "FedSelect", *setting) == (80.0, 64.0, 82.25)
    assert both(tmp_path, "fedselect/table1", "FedAvg", *setting) == (30.0, 30.0, 27.70)
    assert both(tmp_path, "fedselect/table1", "FedAvg+FT", *setting) == (32.0, 32.0, 75.30)
    assert both(tmp_path, "fedselect/table1", "FedBABU", *setting) == (42.0, 42.0, 75.45)
    assert both(tmp_path, "fedselect/table2", "FedSelect (alpha=0.50)", *setting) == (
        81.0,
        64.0,
        82.20,
    )
    assert both(tmp_path, "fedselect/table3", "Personalize Least", *setting) == (82.0, 64.0, 79.87)
    assert both(tmp_path, "fedselect/table3", "Layer B", *setting) == (83.0, 64.0, 78.36)
    table = fill("fedselect/table3", tmp_path)
    assert any(
        note.startswith("Which layers the paper calls A to D is not stated") for note in table.notes
    )
    assert any("method.personalise=least,0,5,10,15,random" in command for command in table.commands)


GROWN = "what is described there, a pruned model that grows, is another method than its authors'."


def spu(root: Path, name: str, accuracy: float, alpha: float, early=False, **own: Any) -> Path:
    own, changes = {"name": "fedspu", **own}, {"dataset": "cifar10", "model": "fedspu_cifar10"}
    changes |= {"partition": ("dirichlet", alpha), "stopping": {"early": early}, "clients": 100}
    return add(root, name, accuracy, own, **changes)


def test_fedspu_over_three_alphas(tmp_path: Path) -> None:
    for accuracy, alpha in ((50.0, 0.1), (52.0, 0.5)):
        spu(tmp_path, f"a{alpha}", accuracy, alpha)
    mean = "CIFAR10", "mean of Dir(0.1), Dir(0.5), Dir(1)"
    half = fill("fedspu/table1", tmp_path)
    assert math.isnan(half.rows[-1][2].value)
    told = "python -m fedpfl.train experiment=fedspu/cifar10 method=prunefl,fjord,hermes,fedmp"
    assert f"{told} stopping.early=false partition.alpha=0.1,0.5" in half.commands
    assert f"{told},fedspu stopping.early=false partition.alpha=1" in half.commands
    spu(tmp_path, "a1", 57.0, 1.0)
    spu(tmp_path, "early", 10.0, 1.0, early=True)
    assert both(tmp_path, "fedspu/table1", "FedSPU", *mean) == (53.0, 53.0, 51.81)
    assert fill("fedspu/table3", tmp_path).frame["own"].notna().sum() == 1
    # Down 10,000 values and three times 6,000, up four times 10,000: 68,000.
    volume = both(tmp_path, "fedspu/table3", "FedSPU (volume)", "CIFAR10", "500 rounds")
    assert volume == (pytest.approx(68_000 * 4 / 1e9), pytest.approx(68_000 * 32 / 1e9), 18.04)
    hours = "Hours are those of simulated devices (docs/system.md), which are ours, not the paper's"
    assert fill_table("fedspu/table3", []).notes[0].startswith(hours)
    assert fill_table("fedspu/table1", []).notes == ("Without own values: FedSelect; " + GROWN,)


def test_fedspu_with_early_stopping(tmp_path: Path) -> None:
    for alpha in (0.1, 0.5, 1.0):
        path = spu(tmp_path, f"a{alpha}", 40.0 + 10 * alpha, alpha, early=True)
        change(path, participants=[10, 10, 7, 3])
    shown = both(
        tmp_path, "fedspu/table2", "FedSPU", "CIFAR10", "mean of Dir(0.1), Dir(0.5), Dir(1)"
    )
    assert shown == (pytest.approx(40 + 16 / 3), pytest.approx(40 + 16 / 3), 42.66)
    assert both(tmp_path, "fedspu/table4", "FedSPU+ES", "CIFAR10", "Dir(0.5)") == (3.0, 3.0, 216.0)
    spu(tmp_path, "whole", 40.0, 0.5)
    assert both(tmp_path, "fedspu/table4", "FedSPU", "CIFAR10", "Dir(0.5)") == (4.0, 4.0, 500.0)
    # In all rounds 68,000 values; before the third, where the published count ends, 36,000.
    volume = both(tmp_path, "fedspu/table3", "FedSPU+ES (volume)", "CIFAR10", "500 rounds")
    assert volume == (pytest.approx(68_000 * 4 / 1e9), pytest.approx(36_000 * 32 / 1e9), 6.37)


def test_hours_are_simulated_ones(tmp_path: Path) -> None:
    """After two rounds fewer are active than a round takes: the published count ends there. Without
    devices none.
    """
    for alpha in (0.1, 0.5, 1.0):
        path = spu(tmp_path, f"a{alpha}", 50.0, alpha, early=True)
        change(path, participants=[10, 10, 7, 3])
    assert math.isnan(
        both(tmp_path, "fedspu/table3", "FedSPU+ES (hours)", "CIFAR10", "500 rounds")[0]
    )
    for path in tmp_path.iterdir():
        change(path, sim_seconds=[3600.0, 1800.0, 900.0, 900.0])
    hours = both(tmp_path, "fedspu/table3", "FedSPU+ES (hours)", "CIFAR10", "500 rounds")
    assert hours == (pytest.approx(2.0), pytest.approx(1.5), 8.9)


def test_runs_that_no_paper_has_are_told_of_or_left_out(tmp_path: Path) -> None:
    def fill_with(name: str, **changes: Any) -> Any:
        write_run(tmp_path / name / "run", {4: 70.0}, partition="published", **changes)
        return fill_table("fedobp/table4", groups(runs(tmp_path / name)))

    assert "privacy" not in " ".join(fill_with("plain").notes)
    assert "privacy.name client (published none)" in " ".join(
        fill_with("private", privacy="client").notes
    )
    late = {"name": "simulated", "profile": "uniform", "deadline": 3.0}
    assert "system.deadline 3.0 (published none)" in " ".join(fill_with("late", system=late).notes)
    phones = {"name": "simulated", "profile": "phones"}
    assert not fill_with("phones", system=phones).frame["seeds"].any()


def test_fedpurin_by_the_best_round_before_averaging(tmp_path: Path) -> None:
    fixed = {"partition": {"name": "fixed_dirichlet", "alpha": 0.1}}
    method = {"name": "fedpurin", "score": "gradient", "hessian": False, "beta": 2}
    path = add(tmp_path, "purin", 90.0, method, **fixed)
    positions = [330_000, 202_000, 202_000, 202_000]
    change(path, cohort_after=[60.0, 75.0, 70.0, 65.0], bits_down=positions)
    add(tmp_path, "delta", 91.0, method | {"score": "delta", "hessian": True}, **fixed)
    add(tmp_path, "avg", 92.0, "fedavg", **fixed)
    fmnist = "FMNIST", "Dir(0.1)"
    assert both(tmp_path, "fedpurin/table1", "FedPURIN", *fmnist) == (90.0, 75.0, 96.55)
    assert both(tmp_path, "fedpurin/table1", "FedAvg", *fmnist) == (92.0, 64.0, 97.05)
    assert both(tmp_path, "fedpurin/table2", "FedPURIN (delta theta, Hessian)", *fmnist) == (
        91.0,
        64.0,
        96.48,
    )
    mebi = 8 * 2**20
    up = both(tmp_path, "fedpurin/table3", "FedPURIN, up, before beta", *fmnist)
    assert up == (pytest.approx(32_000 / mebi), pytest.approx(32_000 / mebi), 2.38)
    down = both(tmp_path, "fedpurin/table3", "FedPURIN, down, before beta", *fmnist)
    assert down == (pytest.approx(26_600 / mebi), pytest.approx(16_000 * 32 / 20 / mebi), 4.34)
    late = both(tmp_path, "fedpurin/table3", "FedPURIN, down, after beta", *fmnist)
    assert late == (pytest.approx(20_200 / mebi), pytest.approx(600 * 32 / mebi), 0.69)
    # FedAvg has no beta: all rounds, 28,000 values of 40 clients.
    whole = both(tmp_path, "fedpurin/table3", "FedAvg, down, after beta", *fmnist)
    assert whole == (pytest.approx(700 * 32 / mebi), pytest.approx(700 * 32 / mebi), 4.69)


def test_subflot_after_training_and_by_domain(tmp_path: Path) -> None:
    whole = {"name": "subflot", "otp": True, "sar": True, "ota": True}
    twenty: dict[str, Any] = {"clients": 20, "partition": {"name": "dirichlet", "alpha": 0.1}}
    add(tmp_path, "dir", 45.0, whole, dataset="cifar100", **twenty)
    add(tmp_path, "others", 99.0, whole, dataset="cifar100", partition=twenty["partition"])
    shards = {"name": "shards", "classes_per_client": 10, "alpha": None}
    add(tmp_path, "shards", 55.0, whole, dataset="cifar100", clients=20, partition=shards)
    add(tmp_path, "without", 80.0, whole | {"ota": False}, dataset="cifar10", **twenty)
    pacs = add(tmp_path, "pacs", 40.0, whole, dataset="pacs", clients=20, partition="groups")
    pd.DataFrame({"client": range(20), "accuracy": map(float, range(20))}).to_csv(
        pacs / "clients.csv", index=False
    )
    cifar = {"practical": (45.0, 64.0, 44.88), "pathological": (55.0, 64.0, 58.37)}
    for setting, values in cifar.items():
        assert both(tmp_path, "subflot/main", "SubFLOT", "CIFAR100", setting) == values
    skew = "CIFAR100", "label skew or real world"
    assert both(tmp_path, "subflot/label_skew", "SubFLOT", *skew) == (55.0, 64.0, 58.37)
    ablated = "SubFLOT w/o OTA", "CIFAR10", "Dir(0.1)"
    assert both(tmp_path, "subflot/ablation", *ablated) == (80.0, 64.0, 81.41)
    # Clients 0 to 4 hold art paintings, 5 to 9 cartoons, then photos and sketches.
    assert both(tmp_path, "subflot/pacs", "SubFLOT", "PACS", "Photo") == (12.0, 12.0, 48.23)
    assert both(tmp_path, "subflot/pacs", "SubFLOT", "PACS", "Art") == (2.0, 2.0, 28.73)
    assert both(tmp_path, "subflot/pacs", "SubFLOT", "PACS", "Avg") == (40.0, 40.0, 41.58)
    assert (
        "Without own values: 10 clients, 100 clients; the data set is not stated."
        in fill_table("subflot/scalability", []).notes
    )
    few = twenty | {"clients": 10}
    add(tmp_path, "few", 47.0, whole, dataset="cifar100", **few)
    shown = fill("subflot/scalability", tmp_path).frame
    assert shown[["dataset", "setting", "own"]].dropna().to_numpy().tolist() == [
        ["CIFAR100", "10 clients", 47.0],
        ["CIFAR100", "100 clients", 99.0],
    ]
    assert shown["published"].dropna().tolist() == [39.2, 32.61]  # of a data set that is not stated
    assert shown["difference"].isna().all()


def test_the_papers_own_rule_from_the_command_line(tmp_path, capsys):
    add(tmp_path, "avg", 92.0, "fedavg", partition=("fixed_dirichlet", 0.1))
    for words, own in (([], 92.0), (["--select", "as-published"], 64.0)):
        assert main(["paper", "fedpurin/table1", str(tmp_path), "--format", "csv", *words]) == 0
        assert set(pd.read_csv(io.StringIO(capsys.readouterr().out))["own"].dropna()) == {own}
    words = ["--select", "as-published", "--every", "50"]
    assert main(["paper", "fedpurin/table1", str(tmp_path), *words]) == 2
    assert "--select as-published has rounds and accuracy of its own" in capsys.readouterr().err
    # By FedOBP's
    assert main(["paper", "all_methods", str(tmp_path), *words[:2]]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the best evaluation after a multiple of 100 rounds" in told


# Paired tests


def test_paired_tests_mark_what_differs(tmp_path: Path) -> None:
    for seed, (obp, avg, per) in enumerate(
        [(90, 80, 90.5), (91, 82, 90.2), (92, 82.5, 92.4), (93, 82, 92.8)]
    ):
        for name, value in (("fedobp", obp), ("fedavg", avg), ("fedper", per)):
            method = OBP if name == "fedobp" else {"name": name}
            add(tmp_path, f"{name}{seed}", float(value), method, seed=seed)
    assert cell(tmp_path, "FedAvg", test="t").flag == "†"
    assert not cell(tmp_path, "FedPer", test="t").flag
    assert not cell(tmp_path, "FedAvg", test="wilcoxon").flag  # four pairs cannot
    grid = fill("fedobp/table4", tmp_path, test="wilcoxon")
    assert (
        "Wilcoxon signed-rank test over 4 seeds, p < 0.05 (never met with fewer than 6)"
        in grid.notes[-1]
    )
    assert "81.62(1.11)†" in render(fill("fedobp/table4", tmp_path, test="t"))


# Forms


# Figures


def sweep(root: Path) -> Path:
    for number, (score, q) in enumerate(
        [(s, q) for s in ("obp", "fisher") for q in (0.0, 0.9, 1.0)]
    ):
        add(root, f"s{number}", 80.0 + number, OBP | {"score": score, "q": q})
    for number, alpha in enumerate((0.3, 0.5)):
        add(root, f"a{number}", 85.0, "fedavg", partition=("published", alpha))
    earlier = OBP | {"score": "obp_as_published", "q": 0.999705}
    add(root, "layer", 90.0, earlier | {"norm": "layer"}, seed=42)
    add(root, "global", 91.0, earlier, seed=42)
    for q in (0.0, 0.9):
        add(root, f"ema{q}", 92.0, earlier | {"ema": 0.5, "q": q})
    for name in ("a", "layer"):
        rows = pd.read_csv(root / name / "rounds.csv")
        rows["personal/conv1.weight"], rows["personal/conv1.bias"] = (
            [0, 20, 15, 10],
            [0, 10, 15, 10],
        )
        rows["personal/fc.weight"] = [0, 10, 30, 60]
        rows.to_csv(root / name / "rounds.csv", index=False)
    return root


def masked(root: Path, name: str, seed: int = 1, **method: Any) -> None:
    """A run of three clients that recorded masks: a tensor in which all hold the same half, one
    with a single pair.
    """
    clients = {
        "dataset": {"name": "mini_imagenet"},
        "clients": 3,
        "partition": FMNIST | {"samples_per_client": 480},
    }
    path = add(root, f"{name}{seed}{method}", 70.0, {"name": name, **method}, seed=seed, **clients)
    change(path, personal_share=[0, 0.25, 0.4375, 0.4375])
    one = {"entries": 8, "held": [4, 0, 0, 4], "both": [[4, 4, 4]] * 3}
    other = {"entries": 10, "held": [9 - 2 * seed, 2 * seed, 1, 0]}
    other["both"] = [[2, 1, 0], [1, 2, 0], [0, 0, 2 * seed - 2]]
    told = {"clients": [0, 1, 2], "tensors": {"conv.weight": one, "fc.weight": other}}
    (path / "masks.json").write_text(json.dumps(told))


def drawn(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """What a figure's panels hold: by heading, values by label, where there are none by place."""
    found: dict[str, dict[str, Any]] = {}

    def panels(shown: Any, path: Path, draw: Any, *_: Any, **options: Any) -> list[Path]:
        for heading, members in shown.items():
            ax = MatplotlibFigure().subplots()
            draw(ax, members)
            bars = {bar.get_label(): bar.lines[0] for bar in ax.containers}
            lines = {one.get_label(): one for one in ax.lines if one not in bars.values()} | bars
            values = {label: list(line.get_ydata()) for label, line in lines.items()}
            found[heading] = {label: ys for label, ys in values.items() if ys}
        return []

    monkeypatch.setattr(f"{FIGURES[name].paint.__module__}.draw_panels", panels)
    FIGURES[name].draw(name, groups(runs(root)), root, Selection())
    return found


def test_overlap_of_masks_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By layer; the third client holds nothing with the first seed, two entries of its own with the
    second.

    Of the pairs one has 1 of 3 in common, two have nothing of 2 or of 4. By chance it would be 4 /
    10 of 3.6.
    """
    for seed in (1, 2):
        masked(tmp_path, "fedselect", seed, alpha=0.3)
    [lines] = drawn("fedselect/overlaps", tmp_path, monkeypatch).values()
    [label] = [label for label in lines if not label.startswith("_")]
    assert label.startswith("FedSelect")
    assert lines[label] == [1, pytest.approx(1 / 9)]
    thin = [ys for key, ys in lines.items() if key.startswith("_child") and len(ys) == 2][-1]
    even = 0.4 / 3.6
    assert thin == [pytest.approx(2 / 6), pytest.approx((even / 3 + even) / 2)]


def test_sizes_and_frequencies_of_masks_by_hand(tmp_path, monkeypatch):
    for seed in (1, 2):
        masked(tmp_path, "fedpurin", seed)
    masked(tmp_path, "fedselect", alpha=0.3)
    masked(tmp_path, "fedselect", alpha=0.8)
    [lines] = drawn("fedselect/sizes", tmp_path, monkeypatch).values()
    assert list(lines.values()) == [[0, 0.25, 0.4375, 0.4375]] * 2
    [lines] = drawn("fedpurin/masks", tmp_path, monkeypatch).values()
    assert lines == {"conv.weight": [50, 0, 0, 50], "fc.weight": [60, 30, 10, 0]}


def test_a_figure_of_masks_says_which_experiment_records_them(tmp_path: Path) -> None:
    add(tmp_path, "old", 70.0, {"name": "fedselect", "alpha": 0.3})
    with pytest.raises(
        FedpflError, match=r"no runs for fedselect/figure4; run .* experiment=fedselect/alpha`"
    ):
        FIGURES["fedselect/figure4"].draw(
            "fedselect/figure4", groups(runs(tmp_path)), tmp_path, Selection()
        )


def test_fedselects_figures_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after training; FedAvg before it and, as FedBABU, after fine-tuning."""
    for size, name in itertools.product((20, 100), ("fedavg", "fedbabu", "fedper")):
        dealt = {"name": "shuffled_shards", "samples_per_client": size, "alpha": None}
        add(
            tmp_path,
            f"{name}{size}",
            30.0 + size,
            {"name": name},
            dataset="cifar10",
            partition=dealt,
        )
    [lines] = drawn("fedselect/figure3", tmp_path, monkeypatch).values()
    tuned = {"FedAvg+FT": [52, 132], "FedBABU": [52, 132]}
    assert lines == {"FedAvg": [50, 130], **tuned, "FedPer": [64, 64]}
    [lines] = drawn("fedselect/figure2", tmp_path, monkeypatch).values()
    tuned = {"FedAvg+FT": [137, 132], "FedBABU": [137, 132]}
    assert lines == {"FedAvg": [135, 130], **tuned, "FedPer": [61, 62, 63, 64]}


def test_overlap_of_clients_in_the_last_layer_by_hand(tmp_path, monkeypatch):
    """FedSelect's Figure 4: the first two hold 2 entries each, 1 in common, the third none."""
    masked(tmp_path, "fedselect", alpha=0.3)
    shown: list[Any] = []
    monkeypatch.setattr(
        "matplotlib.axes.Axes.imshow",
        lambda ax, values, **style: shown.append(values.round(2).tolist()),
    )
    FIGURES["fedselect/figure4"].draw(
        "fedselect/figure4", groups(runs(tmp_path)), tmp_path, Selection()
    )
    assert shown == [[[1, 0.33, 0], [0.33, 1, 0], [0, 0, 0]]]


def test_fedpurins_figures_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = PURIN | {"tau": 0.5}
    for alpha, (number, changes) in itertools.product(
        (0.1, 0.5), enumerate(({}, {"include_norm": True}, {"tau": 0.2}, {"score": "delta"}))
    ):
        own = {"name": "fixed_dirichlet", "alpha": alpha}
        add(
            tmp_path, f"{alpha}{number}", 70.0 + number + 10 * alpha, usual | changes, partition=own
        )
    [lines] = drawn("fedpurin/figure3", tmp_path, monkeypatch).values()
    assert lines == {"without BatchNorm's weights": [71, 75], "with BatchNorm's weights": [72, 76]}
    [lines] = drawn("fedpurin/figure4", tmp_path, monkeypatch).values()
    assert [*lines.values()] == [[73, 71], [77, 75]]


@pytest.mark.parametrize("name", keep_quick(FIGURES))
def test_every_figure_is_drawn(name, root, tmp_path_factory):
    out = tmp_path_factory.mktemp("figures")
    masked(root, "fedselect", alpha=0.3)
    masked(root, "fedpurin")
    for number, size in enumerate((20, 40)):
        add(
            root,
            f"size{number}",
            70.0,
            "fedper",
            partition={"name": "s", "samples_per_client": size},
        )
    for number, changes in enumerate(({}, {"include_norm": True}, {"tau": 0.2})):
        add(root, f"purin{number}", 70.0, PURIN | {"tau": 0.5} | changes)
    add(root, "cifar", 70.0, "fedavg", dataset="cifar10")
    write_run(root / "log", {100: 80.0}, reached=100, method="fedavg", partition=FMNIST, seed=42)
    made = {"width": 1.0, "entries": 100, "values": 5, "operations": 4000}
    told = {"status": "finished", "devices": [made | {"width": 0.5, "entries": 40}, made]}
    (spu(root, "spu", 50.0, 0.1, widths=[0.5, 1.0]) / "summary.json").write_text(json.dumps(told))
    written = FIGURES[name].draw(name, groups(runs(sweep(root))), out, Selection())
    stem = name.replace("/", "_")
    assert [path.name for path in written] == [f"{stem}.png", f"{stem}.pdf"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert written[1].read_bytes().startswith(b"%PDF")


def test_figures_take_the_runs_they_are_about(root: Path) -> None:
    every = groups(runs(sweep(root)))

    def choose(name: str, key: Any, found: Any = every) -> set[Any]:
        return {key(group.runs[0]) for group in FIGURES[f"fedobp/{name}"].choose(found)}

    methods = [
        sorted(group.method for group in FIGURES[f"fedobp/{name}"].choose(every))
        for name in ("figure2", "figure3")
    ]
    assert methods == [["FedAvg", "FedOBP (q=0.99993)", "FedPer"], ["FedAvg"]]
    assert choose("figure4", lambda run: run.q) == {0.0, 0.9, 0.99993, 1.0}
    assert choose("q_sweep", lambda run: run.config["method"]["score"]) == {"obp"}
    assert choose("figure5", lambda run: run.config["method"]["norm"]) == {"global", "layer"}
    assert choose("figure4_as_published", lambda run: run.q) == {0.0, 0.9}
    assert choose("figure6", lambda run: run.q) == {0.99993}
    assert choose("alpha_sweep", lambda run: run.config["partition"]["alpha"]) == {0.1, 0.3, 0.5}
    earlier = OBP | {"score": "obp_as_published"}
    add(root, "cls", 91.0, earlier | {"classifier_only": True, "q": 0.9908}, seed=1)
    add(root, "own", 91.0, OBP | {"norm": "layer"}, seed=1)
    change(
        add(root, "long", 91.0, OBP | {"q": 0.99995}, seed=1, rounds=450),
        **{"personal/fc.weight": [0, 30, 30, 30]},
    )
    later = groups(runs(root))
    assert len(FIGURES["fedobp/figure5"].choose(later)) == 3
    assert choose("figure6", lambda run: run.q, later) == {0.99995}


def test_shares_of_layers_by_hand(root: Path) -> None:
    [run] = [run for run in runs(sweep(root)) if run.path.name == "a"]
    shares = layer_shares(run)
    assert list(shares) == ["conv1", "fc"]
    assert shares.index.tolist() == [2, 3, 4]  # in the first round nobody has any
    assert shares["conv1"].tolist() == [0.75, 0.5, 0.25]


# The command


def test_tables_of_runs_and_of_the_paper_at_once(root, capsys):
    shown = []
    for words in ("tables {}", "paper {} --only tables", "tables {} --paper"):
        command = [word.format(root) for word in words.split()]
        assert main([*command, "--select", "best-checkpoint", "--every", "2"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[2] == shown[0] + shown[1]


def test_mistakes_are_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, told in read_cases("""
        table9 => table9 is neither a folder nor a table or figure; there are fedobp/table2, fedobp/table3
        table3 => table3 is in several papers; name one of fedobp/table3, fedpurin/table3, fedselect/table3, fedspu
        q_sweep => no runs for fedobp/q_sweep; run `python -m fedpfl.train experiment=fedobp/q_sweep`
    """):
        assert main(["paper", name, str(root)]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"fedpfl: {told}")
        assert shown.count("\n") == 1
