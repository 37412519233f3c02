"""The HTML report: values computed by hand, text that stays text, nothing loaded, charts in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedpfl.ground.errors import FedpflError
from fedpfl.report.__main__ import main
from fedpfl.report.html import embedded, experiments, write
from fedpfl.report.page.data import DOTS, POINTS, worst
from tests.report.test_report import config, write_run

OBP = {"name": "fedobp", "q": 0.99993, "norm": "global", "score": "obp"}
EVIL = """</script><script>document.documentElement.dataset.owned = 1</script><b id="x">&'"""
VOID = {"meta", "br", "input"}


class Page(HTMLParser):
    """Elements of a page, and the text of its parts, as a browser reads it."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: dict[str, list[list[str]]] = {}
        self.text = ""
        self._open: list[str] = []
        self._section = ""
        self.feed(self.source)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        if tag == "tr":
            self.cells.setdefault(self._section, []).append([])
        if tag in ("td", "th"):
            self.cells[self._section][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if "script" not in self._open and "style" not in self._open:
            self.text += text
        if {"td", "th"} & set(self._open):
            self.cells[self._section][-1][-1] += text

    def row(self, section: str, first: str) -> list[str]:
        rows = [row for row in self.cells[section] if row and row[0] == first]
        assert len(rows) == 1, self.cells[section]
        return rows[0]

    @property
    def data(self) -> Any:
        match = re.search(r'<script type="application/json" id="data">(.*?)</script>', self.source, re.S)
        assert match
        return json.loads(match[1])

    def group(self, method: str) -> dict[str, Any]:
        place = self.data["methods"].index(method)
        (found,) = [group for group in self.data["groups"] if group["method"] == place]
        return found


def write_clients(run: Path, accuracy: list[float], train: list[int] | None = None, ft: float = 0.0) -> None:
    """Clients 0, 1, ...; client k holds k + 1 samples of class 0, and 10 of class 1 if k is even."""
    count = len(accuracy)
    frame = pd.DataFrame({"client": range(count), "train": train or [30] * count, "test": 10})
    frame["label_0"] = frame["client"] + 1
    frame["label_1"] = np.where(frame["client"] % 2 == 0, 10, 0)
    frame["accuracy"] = accuracy
    frame["ft_accuracy"] = frame["accuracy"] + ft
    frame.to_csv(run / "clients.csv", index=False)


def write_long(
    folder: Path, rounds: int, method: dict[str, Any], seed: int, layers: int = 0, clients: int = 100, classes: int = 10
) -> None:
    """A run of full size: noisy curves, and a mask over `layers` tensors."""
    draw = np.random.default_rng([seed, len(str(method))])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config(method=method, seed=seed, rounds=rounds)))
    summary = {"status": "finished", "cohort": 10, "parameters": 582_026, "hours": 1.25}
    (folder / "summary.json").write_text(json.dumps(summary))
    number = np.arange(1, rounds + 1)
    level = 90 - 60 * np.exp(-number / 30)
    frame = pd.DataFrame({"round": number, "seconds": draw.random(rounds) + 1})
    for name in ("cohort_before", "cohort_after", "train_loss"):
        frame[name] = level + draw.normal(size=rounds)
    for name in ("accuracy", "accuracy_pooled", "accuracy_worst10", "ft_accuracy", "ft_accuracy_pooled", "loss"):
        frame[name] = np.where(number % 5 == 0, level + draw.normal(size=rounds), np.nan)
    for name in ("values_down", "values_up", "bits_down", "bits_up"):
        frame[name] = draw.integers(10**8, 10**9, rounds)
    mask = pd.DataFrame(
        draw.random((rounds, layers)) * 1000, columns=[f"personal/layer{k}.weight" for k in range(layers)]
    )
    pd.concat([frame, mask], axis=1).to_csv(folder / "rounds.csv", index=False)
    labels = pd.DataFrame(draw.integers(0, 200, (clients, classes)), columns=[f"label_{k}" for k in range(classes)])
    table = pd.DataFrame({"client": range(clients), "train": labels.sum(axis=1), "test": 10})
    table["accuracy"] = draw.random(clients) * 100
    pd.concat([table, labels], axis=1).to_csv(folder / "clients.csv", index=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Experiment `a`: two seeds of FedOBP with a mask, one of FedAvg, and one of FedPer that runs."""
    base = tmp_path / "outputs"
    for seed, accuracy in ((0, {2: 96.0, 4: 94.0}), (1, {2: 91.0, 4: 96.0})):
        run = write_run(base / "a" / "fedobp" / "k1" / f"seed{seed}", accuracy, method=OBP, seed=seed)
        frame = pd.read_csv(run / "rounds.csv")
        frame["personal/conv1.weight"] = [0, 10, 20, 30 + 10 * seed]
        frame["personal/fc.bias"] = [0.0, 1.5, 0.0, 1.0]
        frame.to_csv(run / "rounds.csv", index=False)
        write_clients(run, [50.0 + 5 * k + seed for k in range(10)], train=[10 * (k + 1) for k in range(10)], ft=2.0)
    write_run(base / "a" / "fedavg" / "k2" / "seed0", {2: 80.0, 4: 87.0})
    write_run(base / "a" / "fedper" / "k3" / "seed0", {2: 99.0}, "running", reached=3, method={"name": "fedper"})
    return base


def silent(line: str) -> None:
    raise AssertionError(f"unexpected warning: {line}")


def page_of(root: Path) -> Page:
    (path,) = write([root], root / "report", warn=silent)
    return Page(path)


def test_the_command_writes_one_page(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["html", str(root)]) == 0
    assert [path.name for path in (root / "report").iterdir()] == ["a.html"]
    assert capsys.readouterr().err == f"wrote {root / 'report' / 'a.html'}\n"
    before = (root / "report" / "a.html").read_bytes()
    assert main(["html", str(root), "--out", str(root / "elsewhere")]) == 0
    # Only the links know where the page lies, and it lies as deep.
    assert (root / "elsewhere" / "a.html").read_bytes() == before


def test_overview_names_every_run(root: Path) -> None:
    run = root / "a" / "fedavg" / "k2" / "seed0"
    environment = {"fedpfl": "0.1.0", "torch": "2.11", "python": "3.12", "gpu": None, "cpu": "EPYC", "cores": 2}
    summary = {"status": "failed", "cohort": 10, "hours": 1.5, "error": "out of\nmemory"}
    summary["environment"] = environment | {"commit": "0123456789abcdef", "dirty": True}
    (run / "summary.json").write_text(json.dumps(summary))
    page = page_of(root)
    heads = ["method", "seed", "status", "rounds", "accuracy", "hours", "device", "versions", "commit", "directory"]
    assert page.cells["runs"][0] == heads
    assert page.row("runs", "FedAvg") == [
        *("FedAvg", "0", "failed out of memory", "4/4", "87.00", "1.5", "EPYC, 2 cores"),
        *("fedpfl 0.1.0, PyTorch 2.11, Python 3.12", "0123456789 with changes", "fedavg/k2/seed0"),
    ]
    assert page.row("runs", "FedPer")[:5] == ["FedPer", "0", "running", "3/4", "99.00 (round 2)"]
    assert len(page.cells["runs"]) == 1 + 4
    # What is alike in all runs is said once, above.
    assert "data setFMNIST" in page.text
    assert re.search(r"runs4finished2running1failed1configurations3seeds2hours of runs1.5sent in all", page.text)
    assert "modelcnn4" in page.text


def test_links_lead_to_the_run_directories(root: Path) -> None:
    strange = root / "a" / "fedavg" / "k:2 #%&\"'<b>" / "seed5"
    shutil.copytree(root / "a" / "fedavg" / "k2" / "seed0", strange)
    (strange / "config.yaml").write_text(yaml.safe_dump(config(seed=5)))
    page = page_of(root)
    links = [attrs["href"] or "" for tag, attrs in page.elements if tag == "a"]
    targets = {(root / "report" / unquote(link)).resolve() for link in links if not link.startswith("#")}
    assert targets == {path.parent.resolve() for path in root.rglob("rounds.csv")}
    ids = {attrs.get("id") for _, attrs in page.elements}
    assert {link[1:] for link in links if link.startswith("#")} <= ids


def test_accuracy_table_marks_best_and_second_of_the_finished(root: Path) -> None:
    page = page_of(root)
    row = page.row("accuracy", "FedOBP")
    assert row[1:6] == ["95.00(1.41)", "96.00(1.41)", "75.00(1.41)", "97.00(1.41)", "98.00(1.41)"]
    assert "<b>95.00(1.41)</b>" in page.source
    assert "<u>87.00</u>" in page.source
    assert page.row("accuracy", "FedPer")[1] == "99.00"
    assert "<b>99.00</b>" not in page.source, "a run that is not finished does not compete"
    assert "Test accuracy in percent over all clients at the last evaluation" in page.text
    best = Page(write([root], root / "report", "best-checkpoint", 1, warn=silent)[0])
    assert best.row("accuracy", "FedOBP")[1] == "96.00(0.00)"
    assert "chosen on test data" in best.text


def test_curves_are_means_over_seeds(root: Path) -> None:
    page = page_of(root)
    curves = page.group("FedOBP")["curves"]
    assert curves["accuracy"] == [[2, 4], [93.5, 95], [3.54, 1.41], 1]  # of 96, 91 and 94, 96
    assert curves["ft_accuracy"][1] == [95.5, 97]
    assert curves["cohort_before"] == [[1, 2, 3, 4], [51, 52, 53, 54], [0, 0, 0, 0], 1]
    assert page.group("FedAvg")["curves"]["accuracy"] == [[2, 4], [80, 87], 0, 1]
    assert set(page.data["metrics"]) == {
        *("accuracy", "accuracy_pooled", "accuracy_worst10", "ft_accuracy", "ft_accuracy_pooled", "loss"),
        *("cohort_before", "cohort_after"),
    }
    assert page.data["settings"] == ["FMNIST, Dir(0.1)"]
    # The best has the first colour.
    assert page.data["methods"] == ["FedPer", "FedOBP", "FedAvg"]
    assert page.group("FedPer")["status"] == "running 3/4"


def test_cost_adds_up(root: Path) -> None:
    page = page_of(root)
    cost = page.group("FedAvg")["cost"]
    assert cost["round"] == [1, 2, 3, 4]
    assert cost["down"] == [4e-05, 6.4e-05, 8.8e-05, 0.000112]  # 320000 and three times 192000 bits, in GB
    assert cost["up"] == [4e-05, 8e-05, 0.00012, 0.00016]
    assert cost["hours"] == [pytest.approx(seconds / 3600, rel=1e-5) for seconds in (1, 10, 12, 14)]
    # accuracy, values and MB per client and round down and up, GB in all, rounds, median seconds, no hours
    assert page.row("cost", "FedAvg") == [
        *("FedAvg", "87.00", "700", "1,000", "0.0028", "0.004", "0.000112", "0.00016", "4", "2"),
    ]


def test_clients_of_all_seeds_together(root: Path) -> None:
    found = page_of(root).group("FedOBP")["clients"]
    assert found["count"] == 20
    # Seed 0: 50, 55, ..., 95; seed 1: one more each; the worst of ten is one client: 50 and 51.
    least, first, median, third, most, mean, low = found["box"]["accuracy"]
    assert (least, most, mean, low) == (50, 96, 73, 50.5)
    assert (first, median, third) == (60.75, 73, 85.25)
    assert found["box"]["ft_accuracy"][0] == 52
    assert [0, 0, 10, 50, 52, 3] in found["dots"]
    assert [1, 9, 100, 96, 98, 0] in found["dots"]
    assert len(found["dots"]) == 20


def test_clients_without_test_samples_do_not_count(root: Path) -> None:
    run = root / "a" / "fedavg" / "k2" / "seed0"
    write_clients(run, [float("nan"), 80.0, 60.0])
    found = page_of(root).group("FedAvg")["clients"]
    assert (found["count"], found["box"]["accuracy"]) == (2, [60, 65, 70, 75, 80, 70, 60])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60))
def test_worst_decile_has_a_tenth_and_nothing_worse_outside(values: list[float]) -> None:
    chosen = worst(np.array(values))
    assert chosen.sum() == max(1, len(values) // 10)
    assert max(np.array(values)[chosen]) <= min(np.array(values)[~chosen], default=100.0)


def test_partitions_are_told_once(root: Path) -> None:
    data = page_of(root).data
    # Both seeds of FedOBP hold the same ten clients here, FedAvg and FedPer the one of `write_run`.
    one, ten = sorted(data["partitions"], key=lambda entry: entry["all"])
    assert (one["counts"], one["classes"], one["runs"], one["seeds"]) == ([[40]], [0], 2, [0])
    assert (ten["runs"], ten["seeds"], ten["classes"]) == (2, [0, 1], [0, 1])
    assert ten["counts"][:3] == [[1, 10], [2, 0], [3, 10]]
    # 1 + ... + 10 and five times 10 samples; 11, 2, 13, 4, 15, 6, 17, 8, 19, 10 each; 15 of 20 cells are filled.
    assert (ten["samples"], ten["sizes"], ten["held"]) == (105, [2, 10.5, 19], 1.5)
    assert data["partitions_left_out"] == 0


def test_many_partitions_and_clients_are_thinned_and_told(tmp_path: Path) -> None:
    for seed in range(15):
        run = write_run(tmp_path / "x" / "fedavg" / "k" / f"seed{seed}", seed=seed)
        write_clients(run, [50.0] * (20_000 if seed == 0 else seed))
    page = page_of(tmp_path)
    assert len(page.data["partitions"]) == 12
    assert page.data["partitions_left_out"] == 3
    first = page.data["partitions"][0]
    assert (first["all"], len(first["clients"])) == (20_000, 10_000)
    assert (first["clients"][0], first["clients"][-1]) == (0, 19_999)
    assert len(page.group("FedAvg")["clients"]["dots"]) == DOTS


def test_masks(root: Path) -> None:
    page = page_of(root)
    mask = page.group("FedOBP")["mask"]
    assert mask["layers"] == ["conv1.weight", "fc.bias"]
    assert mask["entries"] == [[0, 10, 20, 35], [0, 1.5, 0, 1]]
    assert (mask["ends"], mask["size"], mask["parameters"]) == ([1, 2, 3, 4], 1, 1000)
    assert "mask" not in page.group("FedAvg")


def test_long_curves_are_thinned(tmp_path: Path) -> None:
    write_long(tmp_path / "x" / "fedavg" / "k" / "seed0", 1050, OBP, 0, layers=2)
    page = page_of(tmp_path)
    group = page.group("FedOBP")
    frame = pd.read_csv(tmp_path / "x" / "fedavg" / "k" / "seed0" / "rounds.csv")
    rounds, means, _, size = group["curves"]["accuracy"]
    assert len(rounds) == POINTS
    assert (rounds[0], rounds[-1], size) == (5, 1050, 1)
    assert means[-1] == round(frame["accuracy"].iloc[-1], 2)
    rounds, means, _, size = group["curves"]["cohort_before"]
    assert (size, len(rounds), rounds[0], rounds[-1]) == (6, 175, 3.5, 1047.5)  # 1050 rounds in bins of 6
    assert means[0] == pytest.approx(frame["cohort_before"].iloc[:6].mean(), abs=0.006)
    assert len(group["mask"]["ends"]) <= 100
    assert group["mask"]["entries"][1][0] == pytest.approx(frame["personal/layer1.weight"].iloc[:11].mean(), rel=1e-3)
    assert group["cost"]["down"][-1] == pytest.approx(frame["bits_down"].sum() / 8e9, rel=1e-5)


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x" / "fedavg" / "k" / "seed0", {2: 80.0, 4: 81.0}, "diverged")
    frame = pd.read_csv(run / "rounds.csv").assign(train_loss=[1.0, float("inf"), float("-inf"), float("nan")])
    frame.to_csv(run / "rounds.csv", index=False)
    (run / "summary.json").write_text('{"status": "diverged", "hours": NaN, "parameters": null, "environment": []}')
    page = page_of(tmp_path)
    assert page.group("FedAvg")["curves"]["train_loss"][1] == [1]
    assert "NaN" not in json.dumps(page.data)
    assert page.row("runs", "FedAvg")[2] == "diverged"


def test_nothing_from_files_becomes_markup(tmp_path: Path) -> None:
    base = tmp_path / "outputs"
    run = write_run(
        base / "x<b>&'\"" / "m" / "k" / "seed0",
        method={"name": EVIL},
        dataset={"name": f"data{EVIL}"},
        partition={"name": f"part{EVIL}"},
        model={"name": EVIL},
    )
    text = json.loads((run / "summary.json").read_text())
    environment = dict.fromkeys(("fedpfl", "torch", "cpu", "commit", "cores"), EVIL)
    (run / "summary.json").write_text(json.dumps(text | {"status": EVIL, "error": EVIL, "environment": environment}))
    frame = pd.read_csv(run / "rounds.csv").assign(**{f"personal/{EVIL}": 1.0})
    frame.to_csv(run / "rounds.csv", index=False)
    broken = base / "x<b>&'\"" / "m" / "k<i>" / "seed0"
    broken.mkdir(parents=True)
    (broken / "config.yaml").write_text("a: b\n")
    write_run(base / "other")
    for path in write([base], base / "report", warn=lambda _: None):
        page = Page(path)
        names = [tag for tag, _ in page.elements]
        assert names.count("script") == 2
        assert not {"b", "i", "img"} & set(names)
        assert not any(attrs.get("id") == "x" for _, attrs in page.elements)
        assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
        if path.name.startswith("x"):
            assert page.row("accuracy", EVIL)[1] == "70.00"
            assert page.data["methods"] == [EVIL]
            assert page.data["groups"][0]["mask"]["layers"] == [EVIL]
            assert "k<i>" in page.text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_embedded_json_cannot_end_its_element(text: str) -> None:
    shown = embedded({"label": [text, "</script><!--<script>"]})
    assert not set("<>&\u2028\u2029") & set(shown)
    assert json.loads(shown) == {"label": [text, "</script><!--<script>"]}


def test_pages_load_nothing(root: Path) -> None:
    write_run(root / "b" / "fedavg" / "k" / "seed3", seed=3)
    for path in write([root], root / "report", warn=silent):
        page = Page(path)
        for tag, attrs in page.elements:
            assert tag not in ("link", "img", "iframe", "object", "embed", "video", "audio", "base", "form")
            assert "src" not in attrs
            assert re.match(r"\.|#", attrs.get("href") or "#")
        assert set(re.findall(r"https?://[^\s\"'<)]*", page.source)) <= {"http://www.w3.org/2000/svg"}
        for word in ("fetch(", "XMLHttpRequest", "import(", "@import", "sendBeacon", "WebSocket", "innerHTML", "eval("):
            assert word not in page.source
        assert set(re.findall(r"url\(([^)]*)\)", page.source)) <= {"#${clip}"}
        (policy,) = [attrs["content"] or "" for _, attrs in page.elements if "http-equiv" in attrs]
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in page.source


def test_broken_directories_are_named_and_skipped(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "a" / "fedavg" / "k2" / "seed0" / "summary.json").write_text("{")
    (root / "a" / "fedobp" / "k1" / "seed1" / "clients.csv").write_text("number\n1\n")
    (root / "a" / "fedper" / "k3" / "seed0" / "clients.csv").unlink()
    assert main(["html", str(root)]) == 0
    assert "skipped" in capsys.readouterr().err
    page = Page(root / "report" / "a.html")
    assert f"{root / 'a/fedavg/k2/seed0'}: broken: summary.json cannot be read: JSONDecodeError" in page.text
    assert f"without clients: {root / 'a/fedobp/k1/seed1'}: clients.csv lacks the column client" in page.text
    assert f"without clients: {root / 'a/fedper/k3/seed0'}: no clients.csv" in page.text
    assert page.group("FedOBP")["clients"]["count"] == 10
    assert page.data["methods"] == ["FedPer", "FedOBP"]


def test_a_run_without_evaluation_or_traffic(tmp_path: Path) -> None:
    run = tmp_path / "x" / "fedavg" / "k" / "seed0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config()))
    (run / "summary.json").write_text("{}")
    (run / "rounds.csv").write_text("round,accuracy\n1,\n")
    page = page_of(tmp_path)
    assert page.data["metrics"] == {}
    assert page.row("cost", "FedAvg")[1:] == ["1"]  # its only round; empty columns are left out
    assert "no evaluation of all clients to judge" in page.text
    assert {attrs["id"] for tag, attrs in page.elements if tag == "section"} == {"runs", "accuracy", "cost"}


def test_several_experiments_and_an_index(root: Path) -> None:
    write_run(root / "b" / "fedavg" / "k2" / "seed0", {4: 87.0})  # the same configuration as in `a`: both keep theirs
    write_run(root / "index" / "fedavg" / "k2" / "seed0", {}, "running", reached=1, dataset={"name": "digits"})
    (root / "c" / "fedavg" / "k" / "seed0").mkdir(parents=True)
    (root / "c" / "fedavg" / "k" / "seed0" / "config.yaml").write_text("x: [")
    lines: list[str] = []
    written = write([root], root / "report", warn=lines.append)
    assert [path.name for path in written] == ["a.html", "b.html", "index-2.html", "index.html"]
    assert len(lines) == 1
    page = Page(written[-1])
    assert page.row("experiments", "a")[1:] == [
        "3",
        "4",
        "3 finished, 1 running",
        "FMNIST, Dir(0.1): FedOBP 95.00",
    ]
    assert page.row("experiments", "b")[4] == "FMNIST, Dir(0.1): FedAvg 87.00"
    assert page.row("experiments", "index-2")[4] == "Digits, Dir(0.1): not evaluated yet"
    links = {attrs["href"] for tag, attrs in page.elements if tag == "a"}
    assert links == {"./a.html", "./b.html", "./index-2.html"}
    assert str(root / "c") in page.text
    assert [path.name for path in sorted((root / "report").iterdir())] == [
        "a.html",
        "b.html",
        "index-2.html",
        "index.html",
    ]


@pytest.mark.parametrize(
    ("below", "names"),
    [
        ("", ["a"]),
        ("a", ["a"]),
        ("a/fedobp", ["fedobp"]),
        ("a/fedobp/k1", ["k1"]),
        ("a/fedobp/k1/seed1", ["a-fedobp-k1-seed1"]),
    ],
)
def test_a_root_may_be_an_experiment_or_lie_in_one(root: Path, below: str, names: list[str]) -> None:
    found = experiments([root / below], silent)
    assert [experiment.name for experiment in found] == names
    assert len(found[0].runs) == len(list((root / below).rglob("rounds.csv")))


def test_folders_without_the_usual_layout(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two", "deep/three", "deep/four")):
        write_run(tmp_path / name, seed=seed)
    assert {experiment.name for experiment in experiments([tmp_path], silent)} == {tmp_path.name, "deep"}
    assert [experiment.name for experiment in experiments([tmp_path / "deep"], silent)] == ["deep"]


def test_roots_that_overlap_or_share_a_name(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "a", tmp_path / "other" / "A")
    found = experiments([root, root / "a", tmp_path / "other"], silent)
    assert [(experiment.name, len(experiment.runs)) for experiment in found] == [("a", 4), ("A-2", 4)]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, message in ((tmp_path, "no runs found below"), (tmp_path / "absent", "no such directory")):
        assert main(["html", str(folder)]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith(f"error: {message}")
        assert shown.err.count("\n") == 1
    assert not (tmp_path / "report").exists()
    with pytest.raises(FedpflError, match="no runs found"):
        write([tmp_path], tmp_path / "report")


def test_the_module_needs_neither_torch_nor_matplotlib() -> None:
    code = "import sys, fedpfl.report.html; print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.full
def test_a_hundred_runs_are_small_and_fast(tmp_path: Path) -> None:
    for number in range(100):
        method = {"name": "fedobp", "q": number / 100, "norm": "global", "score": "obp"}
        write_long(tmp_path / "x" / "fedobp" / f"k{number}" / "seed0", 400, method, 0, layers=8)
    start = time.process_time()
    (path,) = write([tmp_path], tmp_path / "report", warn=silent)
    assert time.process_time() - start < 20  # about 4 s; the bound leaves room for a slow machine
    assert path.stat().st_size < 5e6


@pytest.mark.filterwarnings("error")
def test_a_hundred_classes_are_nothing_special(tmp_path: Path) -> None:
    write_long(tmp_path / "x" / "fedavg" / "k1" / "seed0", 10, {"name": "fedavg"}, 0, clients=5, classes=100)
    write([tmp_path], tmp_path / "report", warn=silent)


# ---- in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome")
PLAY = """<script>
const told = document.documentElement.dataset;
const every = (kind) => [...document.querySelectorAll(kind)];
const each = (kind, act) => every(kind).forEach((_, place) => {
  if (every(kind)[place]) act(every(kind)[place], place);
});
const point = () => every(".chart svg").forEach((one) => {
  const box = one.getBoundingClientRect(), places = [0.1, 0.5, 0.9];
  for (const x of places) for (const y of places) {
    const at = { clientX: box.left + x * box.width, clientY: box.top + y * box.height };
    one.dispatchEvent(new PointerEvent("pointermove", at));
    if (!document.getElementById("tip").hidden) told.tips = Number(told.tips || 0) + 1;
  }
  one.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  one.dispatchEvent(new PointerEvent("pointerleave", {}));
});
function play() {
  each("details", (one) => { one.open = true; });
  each(".chart select", (menu, place) => {
    for (let option = menu.options.length - 1; option >= 0; option--) {
      const now = every(".chart select")[place];
      now.selectedIndex = option;
      now.dispatchEvent(new Event("change"));
      point();
    }
  });
  each(".choice button", (one) => { one.click(); point(); });
  each(".chart input", (one) => { one.click(); point(); });
}
play();
every("#settings button")[1].click();
play();
const lines = () => every("#curves .series").length;
const before = lines();
every(".legend li button")[0].click();
told.series = `${before} ${lines()}`;
every(".legend .all button, .legend li button")[0].click();
const head = every("#accuracy thead button").find((one) => one.textContent === "mean");
const column = () => [...head.closest("table").tBodies[0].rows].map((row) => row.cells[1].textContent).join(" ");
head.click(); told.down = column();
head.click(); told.up = column();
told.sort = head.parentNode.getAttribute("aria-sort");
document.getElementById("theme").click();
told.paper = getComputedStyle(document.body).backgroundColor;
</script></body>"""


def run_browser(page: Path, folder: Path, *words: str) -> str:
    """What the browser prints, without any network; the page is opened as a file."""
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
        *(f"--user-data-dir={folder}", "--virtual-time-budget=4000", *words, page.resolve().as_uri()),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=180, env=os.environ | {"HOME": str(folder)})
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def section(dom: str, name: str) -> str:
    start = dom.index(f'<section id="{name}"')
    return dom[start : dom.index("</section>", start)]


@pytest.fixture
def shown(root: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A page with long curves and evil labels, and a fresh folder for the browser."""
    for seed in (0, 1):
        write_long(root / "a" / "apfl" / "k9" / f"seed{seed}", 60, {"name": f"apfl{EVIL}"}, seed, layers=3, clients=30)
    for path in (root / "a" / "apfl").rglob("config.yaml"):
        values = config(method={"name": f"apfl{EVIL}"}, seed=int(path.parent.name[-1]), rounds=60)
        path.write_text(yaml.safe_dump(values | {"partition": {"name": "iid", "alpha": None}}))
    (page,) = write([root], root / "report", warn=silent)
    return page, tmp_path / "browser"


@browser
def test_the_browser_draws_the_charts(shown: tuple[Path, Path]) -> None:
    page, folder = shown
    dom = run_browser(page, folder, "--dump-dom", "--window-size=1200,900")
    head = dom[dom.index("<html") : dom.index("<head")]
    assert 'data-ready="yes"' in head
    assert "data-error" not in head
    assert "data-owned" not in head
    # FMNIST, Dir(0.1) is shown first: three methods, two with a client table of one, one of ten clients.
    curves = section(dom, "curves")
    assert curves.count('class="series') == 3
    assert curves.count('class="band"') == 1  # only FedOBP has seeds
    assert curves.count('aria-pressed="true"') == 3
    assert ">95.00<" in curves
    clients = section(dom, "clients")
    assert clients.count('class="box"') == 2 * 3
    assert clients.count("<svg") == 1 + 3
    assert section(dom, "partition").count('class="heat"') > 1
    masks = section(dom, "masks")
    assert ">conv1.weight<" in masks
    assert ">fc.bias<" in masks
    assert section(dom, "cost").count('class="series') == 3
    assert not re.search(r"NaN|undefined|Infinity", re.sub(r"<script.*?</script>", "", dom, flags=re.S))


@browser
def test_every_control_works(shown: tuple[Path, Path]) -> None:
    page, folder = shown
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # it would stop this test's script too
    page.write_text(text.replace("</body>", PLAY), encoding="utf-8")
    dom = run_browser(page, folder, "--dump-dom", "--window-size=1200,900")
    head = dom[dom.index("<html") : dom.index("<head")]
    assert "data-error" not in head
    assert "data-owned" not in head
    assert int(re.search(r'data-tips="(\d+)"', head)[1]) > 100  # type: ignore[index]
    # The second setting was clicked: IID with one method, whose label is text.
    assert 'data-series="1 0"' in head
    assert 'data-down="99.00 95.00(1.41) 87.00"' in head
    assert 'data-up="87.00 95.00(1.41) 99.00"' in head
    assert 'data-sort="ascending"' in head
    assert 'data-paper="rgb(20, 23, 27)"' in head
    assert "apfl&lt;/script&gt;&lt;script&gt;" in section(dom, "curves")
    assert section(dom, "curves").count('class="band"') == 1
    assert ">layer2.weight<" in section(dom, "masks")
    assert not re.search(r"NaN|undefined|Infinity", re.sub(r"<script.*?</script>", "", dom, flags=re.S))


@browser
def test_the_policy_stops_other_scripts(shown: tuple[Path, Path]) -> None:
    page, folder = shown
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", "<script>document.documentElement.dataset.owned = 1</script></body>"))
    dom = run_browser(page, folder, "--dump-dom")
    assert 'data-ready="yes"' in dom[:300]
    assert "data-owned" not in dom[:300]


@browser
@pytest.mark.parametrize("width", [500, 1400])
def test_the_picture_is_not_blank(shown: tuple[Path, Path], width: int) -> None:
    page, folder = shown
    target = folder.parent / "page.png"
    run_browser(page, folder, f"--screenshot={target}", f"--window-size={width},5000")
    with Image.open(target) as image:
        assert image.size == (width, 5000)
        colours = image.convert("RGB").quantize(256).convert("RGB").getcolors() or []
        below = image.convert("L").crop((0, 1500, width, 3500)).getextrema()
    assert len(colours) > 60
    assert below[1] - below[0] > 150
