"""Tasks without classes, from the configuration to the tables."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch import nn

import fedpfl
from fedpfl.config.plan import check_config
from fedpfl.data.datasets import load_samples
from fedpfl.ground.tasks import MULTILABEL, REGRESSION, SURVIVAL, find_task
from fedpfl.methods import METHODS, Method
from fedpfl.models import Net
from fedpfl.models.adapter import lora, lora_with_residue
from fedpfl.record.columns import round_columns
from fedpfl.report import html
from fedpfl.report.load import runs
from fedpfl.report.ranking import rank_methods
from fedpfl.report.render import render
from fedpfl.report.tables import accuracy_table
from fedpfl.runner import trials
from fedpfl.runner.optuna_study import parse_distribution
from fedpfl.runner.search import Search, SearchSettings
from tests.command import compose_once, format_override, keep_last_words, play_run
from tests.conftest import (
    BACKENDS,
    Tiny,
    assert_close,
    every_method,
    hold_out_quarter,
    keep_quick,
    make_federation,
    read_cases,
    record_rounds,
)
from tests.data.promises import one_line

SITES = 6
OTHERS = [MULTILABEL, REGRESSION, SURVIVAL]
WORDS = (
    *("dataset=npz", "partition=groups", f"clients={SITES}", "participation=0.5", "model=mlp"),
    *("rounds=4", "eval.every=2", "local.epochs=1", "checkpoint.seconds=0", "method=fedper"),
)


def make_arrays(task, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SITES * 30, 5)).astype(np.float32)
    groups = np.repeat(np.arange(SITES), 30)
    y = x[:, 0] + 0.3 * groups + 0.1 * rng.normal(size=len(x))
    if task is MULTILABEL:
        y = np.stack([y > 0.5, x[:, 1] > 0, x[:, 2] > 1], 1).astype(np.int8)
    if task is SURVIVAL:
        y = np.stack([np.exp(-y).round(1) + 0.1, rng.random(len(x)) < 0.7], 1)
    return {"x": x, "y": y, "groups": groups}


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives")
    for task in OTHERS:
        np.savez(folder / f"{task.name}.npz", **make_arrays(task))
    return folder


def words_of(archives, task):
    path = archives / f"{task.name}.npz"
    return (*WORDS, f"task={task.name}", format_override("dataset.path", str(path)))


ABOUT_CLASSES = """
method=fedproto => method=fedproto is for task=classification, not regression: it
method=fedavg partition=dirichlet => it is about classes; choose another
method=fedavg eval.classes=own => eval.classes=own is for task=classification
"""


@pytest.mark.parametrize(("words", "reason"), read_cases(ABOUT_CLASSES))
def test_what_is_about_classes_is_refused_before_data_are_read(words, reason):
    words = keep_last_words("partition=iid", *words.split(), "task=regression")
    assert reason in one_line(lambda: check_config(compose_once(*words)))


@pytest.mark.parametrize(
    ("task", "y", "reason"),
    [
        ("classification", np.eye(4), "0 and 1 [samples, labels] are for task=multilabel"),
        ("multilabel", np.arange(4), "y must be 0 and 1 [samples, labels], got int64 [4]"),
        ("regression", np.eye(4), "y must be floats [samples], got float64 [4, 4]"),
        ("survival", np.array([[-1, 1]] * 4), "found [-1, 1]"),
        ("regression", np.array([0, 1, np.inf, 2]), "not finite"),
    ],
)
def test_labels_of_another_form_are_refused(tmp_path, task, y, reason):
    np.savez(tmp_path / "own.npz", x=np.zeros((4, 2), np.float32), y=y)
    path = tmp_path / "own.npz"
    assert reason in one_line(lambda: load_samples("npz", tmp_path, path=path, task=task))


def test_sites_are_tables_of_numbers_or_of_several_labels(tmp_path):
    rng = np.random.default_rng(0)
    for site in ("a", "b"):
        frame = pd.DataFrame(rng.normal(size=(9, 2)), columns=["x", "age"])
        table = frame.abs().assign(flu=frame["x"] > 0, cold=[0, 1, 0] * 3)
        table.to_csv(tmp_path / f"{site}.csv", index=False)
    read = {"path": tmp_path, "categories": ()}
    got = load_samples("sites", tmp_path, **read, label="age", task="regression")
    assert (find_task(got.y), got.x.shape, got.class_names) == (REGRESSION, (18, 3), ())
    got = load_samples("sites", tmp_path, **read, label=("flu", "cold"), task="multilabel")
    assert (got.y.shape, got.class_names) == ((18, 2), ("flu", "cold"))
    got = load_samples("sites", tmp_path, **read, label=("x", "flu"), task="survival")
    assert (find_task(got.y), got.classes, got.y[:, 1].unique().tolist()) == (SURVIVAL, 1, [0, 1])
    two = lambda task: load_samples("sites", tmp_path, **read, label=("flu", "age"), task=task)  # noqa: E731
    assert "names 2 columns" in one_line(lambda: two("classification"))
    assert "a.csv: y must be 0 and 1" in one_line(lambda: two("multilabel"))


def make_net(classes: int, method: Method) -> Net:
    torch.manual_seed(1)
    module = Tiny()
    module.classifier = nn.Linear(12, classes)
    if method.pairs:
        options = {"rank": 2, "alpha": 4.0, "layers": ("conv", "linear"), "pairs": method.pairs}
        adapt = lora_with_residue if method.has_residue else lora
        adapt(module, "classifier", 1, **options)
    return Net(module, sample=(1, 8, 8), rounds=2)


@every_method(quick=("fedavg", "fedper"))
def test_every_method_trains_on_labels_of_each_task_or_says_that_it_needs_classes(name, values):
    method = METHODS[name](**values)
    if method.needs_classes:
        return
    whole = hold_out_quarter(make_federation((40, 7, 33, 2, 65, 1), (12, 3, 9, 0, 14, 1)))
    rng = torch.Generator().manual_seed(1)
    several = torch.rand(len(whole.y), 3, generator=rng) < 0.2 + 0.15 * whole.y[:, None]
    number = whole.y / 2 + 0.3 * torch.randn(len(whole.y), generator=rng)
    times = torch.stack([number.abs().ceil(), (number > 0.2).float()], 1)
    scores_samples = name == "feddpa" or values.get("score") == "fisher"  # refused in survival
    tasks = ((several, 3), (number, 1), (times, 1))[: 2 if scores_samples else 3]
    for y, classes in tasks:
        federation = dataclasses.replace(whole, y=y, classes=classes)
        net, told = make_net(classes, method), {}
        for backend in BACKENDS:
            cohorts = [[0, 2, 3, 5], [0, 1, 4, 5]]
            states, outcomes = record_rounds(method, net, federation, cohorts, engine=backend)
            told[backend] = {"server": states[-1].server, "loss": outcomes[-1].after.loss}
            assert outcomes[-1].after.correct.sum() == 0
            assert outcomes[-1].finite.all()
        assert_close(told["loop"]["loss"], told["batched"]["loss"], atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize("task", keep_quick(OTHERS[::-1]))
def test_a_run_is_recorded_by_its_score_and_goes_on_as_if_never_stopped(archives, tmp_path, task):
    words = (*words_of(archives, task), "validation=0.2", "unseen=0.34")
    words += ("eval.finetune_epochs=1", "eval.finetune_every=2")
    text = play_run(tmp_path / "whole", *words)
    assert f"all clients {task.score_word} " in text.splitlines()[-1]
    assert "accuracy" not in text
    whole = fedpfl.load(tmp_path / "whole")
    rows = pd.read_csv(tmp_path / "whole" / "rounds.csv")
    wanted = round_columns(validation=True, unseen=True, task=task)
    assert [name for name in rows if name in wanted] == ["participants", *wanted[1:]]
    assert not rows.iloc[-1].isna().any()
    assert not [name for name in (*rows, *whole.clients) if "accuracy" in name]
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    best = min if task is REGRESSION else max
    assert summary["best"][task.score] == best(rows[task.score].dropna())
    assert f"{task.score_word} " in repr(whole)

    members = whole.clients[whole.clients["unseen"] == 0]
    assert rows[task.score].iloc[-1] == pytest.approx(members[task.score].mean())
    for prefix in ("", "ft_"):
        score = members[f"{prefix}{task.score}"]
        low, high = (members[f"{prefix}{task.score}_{end}"] for end in ("low", "high"))
        assert ((low <= score) & (score <= high) & (low < high)).all()
    labels = [name for name in members if name.startswith("label_")]
    assert len(labels) == (3 if task is MULTILABEL else 0)

    shorter = ["rounds=2" if word == "rounds=4" else word for word in words]
    fedpfl.run(*shorter, directory=tmp_path / "half", progress=False)
    half = format_override("extend", str(tmp_path / "half"))
    fedpfl.run(*words, half, directory=tmp_path / "longer", progress=False)
    longer = pd.read_csv(tmp_path / "longer" / "rounds.csv")
    times = ["seconds", "eval_seconds"]
    pd.testing.assert_frame_equal(longer.drop(columns=times), rows.drop(columns=times))


def test_a_search_for_errors_finds_the_least(tmp_path):
    header = "round,rmse,rmse_worst10,val_rmse,val_rmse_worst10\n"
    (tmp_path / "rounds.csv").write_text(f"{header}1,1,1,3.5,4\n2,1,1,2.5,4\n3,1,1,2.75,4\n")
    assert trials.read_trial_result(tmp_path, "val_rmse").value == 2.5
    pytest.importorskip("optuna")
    (word,) = OverridesParser.create().parse_overrides(["local.lr=interval(0.001,0.1)"])
    settings = SearchSettings(6, 2, 2, warmup=0, seed=0, task=REGRESSION, metric="val_rmse")
    space = {"local.lr": parse_distribution(word)}
    search = Search(tmp_path / "study.json", space, {}, settings)

    told, lines = [], list[str]()

    def play(jobs):
        rates = [float(words[0].partition("=")[2]) for _, words in jobs]
        told.extend(abs(rate - 0.03) for rate in rates)
        return [trials.TrialResult(abs(rate - 0.03), 1) for rate in rates]

    assert search.run(play, lines.append).value == min(told) < max(told)
    assert any("validation RMSE " in line for line in lines)


@pytest.fixture(scope="module")
def finished(archives, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    for task in OTHERS:
        for method in ("fedper", "local_only"):
            words = keep_last_words(*words_of(archives, task), f"method={method}", "rounds=2")
            fedpfl.run(*words, directory=folder / task.name / method, progress=False)
    return folder


@pytest.mark.parametrize("task", keep_quick(OTHERS[::-1]))
def test_tables_and_pages_are_of_the_tasks_score(finished, task, tmp_path):
    table = accuracy_table(runs(finished / task.name))
    text = render(table, "terminal", 400)
    assert f"Test {task.score_word}" in text
    assert "accuracy" not in text.lower()
    best = table.frame[task.score].agg("idxmin" if task is REGRESSION else "idxmax")
    heading = {MULTILABEL: "AUROC", REGRESSION: "RMSE", SURVIVAL: "concordance"}[task]
    position = [c.heading for c in table.columns].index(heading)
    assert table.rows[best][position].mark == "best"
    (page,) = html.write_pages([finished / task.name], tmp_path, table=accuracy_table)
    shown = page.read_text().partition("<script")[0] + page.read_text().rpartition("</script>")[2]
    title = task.score_word.capitalize() if task.unit else task.score_word
    assert f"<h2>{title}</h2>" in page.read_text()
    assert ("<h2>Survival</h2>" in page.read_text()) == (task is SURVIVAL)
    assert "<h2>Accuracy</h2>" not in shown


def test_the_least_error_has_the_first_rank():
    errors = pd.DataFrame({"a": [1.0, 2.0], "b": [2.0, 3.0], "c": [3.0, 4.0]}, index=["x", "y"])
    ranks = rank_methods(errors, is_lowest_best=True)
    assert ranks.ranks.loc["x"].to_dict() == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert ranks.pairs.iloc[0][["a", "b", "a_better"]].tolist() == ["a", "b", 2]
