"""The paper's tables and figures from synthetic runs, against values computed by hand."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from fedpfl.errors import FedpflError
from fedpfl.report import groups, published, runs
from fedpfl.report.__main__ import main
from fedpfl.report.paper_figures import FIGURES, layer_shares
from fedpfl.report.paper_tables import COMPARED, PLANS, Rule, fill
from fedpfl.report.table import render
from tests.test_experiments import composed, swept
from tests.test_report import write_run

OBP = {"name": "fedobp", "q": 0.99993, "score": "obp", "norm": "global", "scope": "all", "classifier_only": False}
FMNIST = {"name": "published", "alpha": 0.1}


def add(root: Path, name: str, accuracy: float, method: dict[str, Any], **changes: Any) -> Path:
    changes = {"partition": FMNIST, "rounds": 4, **changes}
    return write_run(root / name, {2: accuracy + 5, 4: accuracy}, method=method, **changes)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Fashion-MNIST at Dir(0.1): FedOBP with two seeds, FedAvg and FedPer with one; published 96.89, 87.29, 96.24."""
    add(tmp_path, "a", 96.0, OBP, seed=1)
    add(tmp_path, "b", 97.0, OBP, seed=2)
    add(tmp_path, "c", 86.0, {"name": "fedavg"}, seed=1)
    add(tmp_path, "d", 96.5, {"name": "fedper"}, seed=1)
    return tmp_path


def cell(root: Path, row: str, table: str = "table4", dataset: str = "fmnist", alpha: float = 0.1, **options: Any):
    """A cell's own values' mean, seeds, and what else is known of it."""
    shown = fill(table, groups(runs(root)), **options)
    place = 1 + PLANS[table].columns.index((dataset, alpha))
    (own,) = (cells[place] for cells in shown.rows if cells[0].value == row)
    record = shown.frame[(shown.frame["row"] == row)].iloc[place - 1]
    return SimpleNamespace(**record, mark=own.mark, flag=own.flag, mean=None if math.isnan(own.value) else own.value)


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


def test_best_and_second_by_what_is_shown(root: Path) -> None:
    marks = {name: cell(root, name).mark for name in ("FedOBP", "FedPer", "FedAvg", "FedAvg+FT")}
    assert marks == {
        "FedOBP": "best",
        "FedPer": "best",
        "FedAvg": "",
        "FedAvg+FT": "",
    }  # 96.50 both: there is no second


def test_which_accuracy_and_round(root: Path) -> None:
    assert cell(root, "FedAvg", rule=Rule("accuracy_pooled")).mean == 87.0
    assert cell(root, "FedAvg+FT", rule=Rule("accuracy_pooled")).mean == 89.0
    assert cell(root, "FedAvg", rule=Rule(select="best-checkpoint", every=2)).mean == 91.0
    assert cell(root, "FedAvg", rule=Rule(select="best-checkpoint", every=4)).mean == 86.0


def test_ablations_and_other_quantiles_are_no_row_of_the_main_table(root: Path) -> None:
    for name, changes in {
        "norm": {"norm": "layer"},
        "score": {"score": "fisher"},
        "cls": {"classifier_only": True},
        "tensor": {"scope": "tensor"},
    }.items():
        add(root, name, 99.0, OBP | changes, seed=1)
    add(root, "q", 99.5, OBP | {"q": 0.9}, seed=1)
    assert cell(root, "FedOBP").mean == 96.5
    assert any("Several configurations fit FedOBP" in note for note in fill("table4", groups(runs(root))).notes)


def test_the_run_nearest_to_the_papers_settings_is_shown(root: Path) -> None:
    other = {"epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0}
    add(root, "slow", 50.0, {"name": "fedavg"}, seed=1, local=other)
    add(root, "ours", 60.0, {"name": "fedavg"}, seed=1, partition={"name": "dirichlet", "alpha": 0.1})
    assert cell(root, "FedAvg").mean == 86.0


def test_unfinished_runs_are_marked(root: Path) -> None:
    add(root, "e", 90.0, {"name": "ditto"}, seed=1)  # no row of the table
    write_run(root / "f", {2: 91.0}, "running", 3, method={"name": "apfl"}, partition=FMNIST)
    assert cell(root, "APFL").unfinished == "running 3/4"
    text = render(fill("table4", groups(runs(root))))
    assert "91.00°" in text
    assert "° not all planned rounds: the last evaluation that there is (running 3/4)" in text
    assert "Ditto" not in text


def test_faulty_normalisation_has_a_table_of_its_own(root: Path) -> None:
    faulty = {"name": "organamnist", "mean": [118.7546], "std": [62.3489]}
    add(root, "sound", 95.0, {"name": "fedper"}, dataset={"name": "organamnist", "mean": [0.46], "std": [0.24]})
    add(root, "faulty", 67.0, {"name": "fedper"}, dataset=faulty)
    assert cell(root, "FedPer", dataset="organamnist").mean == 95.0
    shown = cell(root, "FedPer", "table4_as_published", "organamnist")
    assert (shown.mean, shown.published) == (67.0, 67.44)


def test_table_2_counts_entries(root: Path) -> None:
    for name in "ab":
        rows = pd.read_csv(root / name / "rounds.csv")
        rows["personal/conv1.weight"], rows["personal/fc.bias"] = [0, 30, 20, 11], [0, 11, 21, 30]
        rows.to_csv(root / name / "rounds.csv", index=False)
    assert cell(root, "q", "table2").own == 0.99993
    entries = cell(root, "personal entries", "table2")
    assert (entries.own, entries.seeds, entries.published) == (41.0, "1 2", 41)
    assert "41 0" in render(fill("table2", groups(runs(root))))


def test_table_5_tells_normalisations_apart(root: Path) -> None:
    add(root, "layer", 90.0, OBP | {"norm": "layer"}, seed=1)
    add(root, "cls", 91.0, OBP | {"classifier_only": True, "q": 0.9921}, seed=1)
    own = {row: cell(root, row, "table5").mean for row in ("none", "layer", "global", "global, CLS")}
    assert own == {"none": None, "layer": 90.0, "global": 96.5, "global, CLS": 91.0}
    assert cell(root, "layer", "table5").published == 96.31
    assert cell(root, "global, CLS", "table5").published == 96.81


def test_other_data_sets_take_the_columns_where_there_is_none_of_the_papers(tmp_path: Path) -> None:
    add(tmp_path, "a", 95.0, {"name": "fedavg"}, dataset={"name": "digits"})
    grid = fill("table3", groups(runs(tmp_path)))
    assert [(one.group, one.heading) for one in grid.columns[1:]] == [("Digits", f"Dir({a})") for a in (0.1, 0.5)]
    assert grid.rows[1][1].value == 95.0


# What is missing


def filled(commands: tuple[str, ...], plan: str) -> set[tuple[str, str, float]]:
    """Value, data set and alpha of every job of the commands."""
    jobs = set()
    for command in commands:
        words = dict(word.split("=", 1) for word in command.split()[3:])
        own = swept(composed(f"experiment={words.pop('experiment')}"))
        params = {"partition.alpha": ["0.1"], **own, **{key: values.split(",") for key, values in words.items()}}
        key = PLANS[plan].lines[0].sweep[0]
        for value in params[key]:
            for dataset in params["dataset"]:
                jobs |= {(value, dataset.removesuffix("_as_published"), float(a)) for a in params["partition.alpha"]}
    return jobs


@pytest.mark.parametrize("plan", ["table3", "table4", "table4_as_published"])
def test_commands_fill_exactly_what_is_missing(plan: str, root: Path) -> None:
    grid = fill(plan, groups(runs(root)))
    lines, columns = PLANS[plan].lines, PLANS[plan].columns
    empty = {
        (line.method, *column)
        for line, row in zip(lines, grid.rows, strict=True)
        for column, own in zip(columns, row[1:], strict=True)
        if math.isnan(own.value)
    }
    assert filled(grid.commands, plan) == empty
    assert len(grid.commands) <= 4


def test_an_empty_table_is_one_command() -> None:
    assert fill("table3", []).commands == ("python -m fedpfl.train experiment=table3",)
    assert fill("table5", []).commands == (
        "python -m fedpfl.train experiment=table5",
        "python -m fedpfl.train experiment=table5_cls",
    )


@pytest.mark.parametrize("name", PLANS)
def test_plans_are_what_the_experiments_run(name: str) -> None:
    plan = PLANS[name]
    every: dict[str, list[str]] = {}
    for experiment in dict.fromkeys(line.experiment for line in plan.lines):
        params = swept(composed(f"experiment={experiment}"))
        assert [d.removesuffix("_as_published") for d in params["dataset"]] == list(plan.datasets)
        assert [float(a) for a in params.get("partition.alpha", ["0.1"])] == list(plan.alphas)
        every |= params
    for line in plan.lines:
        assert line.sweep[1] in every[line.sweep[0]]
    assert {line.method for line in PLANS["table3"].lines} == set(COMPARED)


def test_every_published_number_of_tables_2_to_5_has_its_cell() -> None:
    found = 0
    for name in PLANS:
        if name != "table4_as_published":
            found += int(fill(name, []).frame["published"].notna().sum())
    assert found == 32 + 104 + 104 + 32
    assert len(published._numbers()) == found


# Paired tests


def test_paired_tests_mark_what_differs(tmp_path: Path) -> None:
    for seed, (obp, avg, per) in enumerate([(90, 80, 90.5), (91, 82, 90.2), (92, 82.5, 92.4), (93, 82, 92.8)]):
        for name, value in (("fedobp", obp), ("fedavg", avg), ("fedper", per)):
            method = OBP if name == "fedobp" else {"name": name}
            add(tmp_path, f"{name}{seed}", float(value), method, seed=seed)
    assert cell(tmp_path, "FedAvg", test="t").flag == "†"
    assert not cell(tmp_path, "FedPer", test="t").flag
    assert not cell(tmp_path, "FedAvg", test="wilcoxon").flag  # four pairs cannot
    grid = fill("table4", groups(runs(tmp_path)), test="wilcoxon")
    assert "Wilcoxon signed-rank test over 4 seeds, p < 0.05 (never met with fewer than 6)" in grid.notes[-1]
    assert "81.62(1.11)†" in render(fill("table4", groups(runs(tmp_path)), test="t"))


def test_without_common_seeds_there_is_no_test(root: Path) -> None:
    assert fill("table4", groups(runs(root)), test="t").notes[-1].startswith("No paired test against FedOBP")


# Forms


def test_what_the_forms_show(root: Path) -> None:
    add(root, "per", 96.0, {"name": "fedrep"}, seed=1)
    grid = fill("table4", groups(runs(root)))
    for width in (60, 100, 200):
        table = render(grid, "terminal", width).split("Missing cells")[0]
        assert max(map(len, table.splitlines())) <= width
    markdown, latex = render(grid, "markdown"), render(grid, "latex")
    assert "**96.50(0.71)**<br>96.89 -0.39" in markdown
    assert re.search(r"\| Local-Only \| -<br>[\d.]+ \|", markdown)  # published, and not run
    assert r"\textbf{96.50(0.71)}" in latex
    assert r"\multicolumn{2}{c}{FMNIST}" in latex
    assert r"\cmidrule(lr){4-5}" in latex
    body = [line for line in latex.splitlines() if line.startswith(("FedOBP", "FedAvg", "{\\scriptsize"))]
    assert {line.count("&") for line in body} == {8}
    for command in grid.commands:
        assert command in markdown
        assert f"% missing: {command}" in latex


def test_csv_is_unrounded_and_long(root: Path) -> None:
    frame = pd.read_csv(io.StringIO(render(fill("table4", groups(runs(root))), "csv")))
    assert len(frame) == 14 * 8
    row = frame[(frame["row"] == "FedOBP") & (frame["dataset"] == "FMNIST") & (frame["setting"] == "Dir(0.1)")].iloc[0]
    assert (row["own"], row["published"], row["rank"], row["seeds"]) == (96.5, 96.89, 1, "1 2")
    assert row["own_seed_std"] == math.sqrt(0.5)


# Figures


def sweep(root: Path) -> Path:
    for number, (score, q) in enumerate([(s, q) for s in ("obp", "fisher") for q in (0.0, 0.9, 1.0)]):
        add(root, f"s{number}", 80.0 + number, OBP | {"score": score, "q": q})
    for number, alpha in enumerate((0.3, 0.5)):
        add(root, f"a{number}", 85.0, {"name": "fedavg"}, partition={"name": "published", "alpha": alpha})
    add(root, "layer", 90.0, OBP | {"norm": "layer"}, seed=1)
    for name in ("a", "layer"):
        rows = pd.read_csv(root / name / "rounds.csv")
        rows["personal/conv1.weight"], rows["personal/conv1.bias"] = [0, 20, 15, 10], [0, 10, 15, 10]
        rows["personal/fc.weight"] = [0, 10, 30, 60]
        rows.to_csv(root / name / "rounds.csv", index=False)
    return root


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn(name: str, root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = tmp_path_factory.mktemp("figures")
    if name == "figure2":
        add(root, "cifar", 70.0, {"name": "fedavg"}, dataset={"name": "cifar10"})
    written = FIGURES[name].draw(groups(runs(sweep(root))), out / name, Rule())
    assert [path.name for path in written] == [f"{name}.png", f"{name}.pdf"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert written[1].read_bytes().startswith(b"%PDF")


def test_figures_take_the_runs_they_are_about(root: Path) -> None:
    every = groups(runs(sweep(root)))
    methods = {name: sorted(group.method for group in figure.of(every)) for name, figure in FIGURES.items()}
    assert methods["figure2"] == []
    assert methods["figure3"] == ["FedAvg"] * 3 + ["FedOBP (q=0.99993, norm=global)", "FedPer"]
    assert {group.runs[0].q for group in FIGURES["figure4"].of(every)} == {0.0, 0.9, 0.99993, 1.0}
    assert {group.runs[0].config["method"]["score"] for group in FIGURES["q_sweep"].of(every)} == {"obp"}
    assert {group.runs[0].config["method"]["norm"] for group in FIGURES["figure5"].of(every)} == {"global", "layer"}
    assert {group.runs[0].config["partition"]["alpha"] for group in FIGURES["alpha_sweep"].of(every)} == {0.1, 0.3, 0.5}


def test_shares_of_layers_by_hand(root: Path) -> None:
    [run] = [run for run in runs(sweep(root)) if run.path.name == "a"]
    shares = layer_shares(run)
    assert list(shares) == ["conv1", "fc"]
    assert shares.index.tolist() == [2, 3, 4]  # in the first round nobody has any
    assert shares["conv1"].tolist() == [0.75, 0.5, 0.25]


def test_a_figure_without_runs_says_how_to_make_them(root: Path) -> None:
    with pytest.raises(FedpflError, match=r"no runs for figure4; run `python -m fedpfl\.train experiment=figure4`"):
        FIGURES["figure4"].draw(groups(runs(root)), root / "figure4", Rule())


# The command


def test_without_names_all_there_are_runs_of(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", str(sweep(root)), "--out", str(root / "out")]) == 0
    written = {path.name for path in (root / "out").iterdir()}
    tables = ("table2", "table4", "table5", "all_methods")
    figures = ("figure3", "figure4", "figure5", "figure6", "figure7", "q_sweep", "alpha_sweep")
    expected = {f"{name}{suffix}" for name in tables for suffix in (".md", ".csv", ".tex")}
    assert written == expected | {f"{name}{suffix}" for name in figures for suffix in (".png", ".pdf")}


def test_names_and_folders_in_any_order(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "table4", str(root), "--dataset", "fmnist", "--format", "csv"]) == 0
    frame = pd.read_csv(io.StringIO(capsys.readouterr().out))
    assert set(frame["dataset"]) == {"FMNIST"}
    assert main(["paper", str(root), "all_methods"]) == 0
    shown = capsys.readouterr().out
    assert [name in shown for name in ("FedOBP", "FedPer", "worst 10%", "bits")] == [True] * 4


@pytest.mark.parametrize("options", [(), ("--select", "best-checkpoint", "--every", "2"), ("--format", "csv")])
def test_tables_of_runs_and_of_the_paper_at_once(root: Path, options, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["tables", str(root)], ["paper", str(root), "--only", "tables"], ["tables", str(root), "--paper"]):
        assert main([*words, *options]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[2] == shown[0] + shown[1]


def test_tables_and_figures_at_once(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(root), "--paper", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} >= {"accuracy.csv", "table4.csv", "all_methods.csv", "figure3.png"}
    assert main(["figures", str(root), "--paper", "--out", str(tmp_path / "f")]) == 0
    assert {path.suffix for path in (tmp_path / "f").iterdir()} == {".png", ".pdf"}


def test_mistakes_are_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "table9", str(root)]) == 2
    assert (
        "error: table9 is neither a folder nor a table or figure; there are table2, table3" in capsys.readouterr().err
    )
    assert main(["paper", "figure4", str(root)]) == 2
    assert capsys.readouterr().err == "error: no runs for figure4; run `python -m fedpfl.train experiment=figure4`\n"


def test_nothing_of_the_papers_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(tmp_path, "a", 95.0, {"name": "fedavg"}, dataset={"name": "digits"})
    assert main(["paper", str(tmp_path), "--only", "tables"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("nothing of the paper's can be filled from the runs below")
