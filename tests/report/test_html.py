"""The HTML report: values by hand, text that stays text, nothing loaded, a real browser."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
import yaml

from fedpfl.record.columns import METRICS
from fedpfl.report.__main__ import main
from fedpfl.report.html import find_experiments, plotly_file_name, write_pages
from fedpfl.report.page import drawing
from fedpfl.report.page.data import POINTS
from fedpfl.report.page.drawing import DOTS
from tests.report.test_report import add_columns, config, silent, write_run

OBP = {"name": "fedobp", "q": 0.99993, "norm": "global", "score": "obp"}
EVIL = """</script><script>document.documentElement.dataset.owned = 1</script><b id="x">&'"""
ACCURACY, BEFORE = METRICS["accuracy"].label, METRICS["cohort_before"].label


class Page(HTMLParser):
    """Elements of a page, and the text of its parts, as a browser reads it."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: dict[str, list[list[str]]] = {}
        self.text = self._section = ""
        self._open: list[str] = []
        self.feed(self.source)
        assert not self._open, f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br", "input"):
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
        if not {"script", "style"} & {*self._open}:
            self.text += text
        if {"td", "th"} & {*self._open}:
            self.cells[self._section][-1][-1] += text

    def row(self, section: str, first: str) -> list[str]:
        (row,) = (row for row in self.cells[section] if row and row[0] == first)
        return row

    @property
    def data(self) -> Any:
        match = re.search(
            r'<script type="application/json" id="data">(.*?)</script>', self.source, re.S
        )
        assert match
        return json.loads(match[1])

    def figure(self, chart: str, *options: str) -> dict[str, Any]:
        """The first figure of a chart that stands for these options, its arrays in their places."""
        data = self.data
        figure = next(
            one for one in data["charts"][chart] if {*options} <= {*one["choice"].values()}
        )
        for trace in figure["data"]:
            for key in {"x", "y", "z", "customdata"} & trace.keys():
                if isinstance(trace[key], int):
                    trace[key] = data["arrays"][trace[key]]
        return figure

    def traces(self, chart: str, method: str, *options: str) -> list[dict[str, Any]]:
        traces = self.figure(chart, *options)["data"]
        return [one for one in traces if one.get("name", "").startswith(method)]


def write_clients(
    run: Path,
    accuracy: list[float],
    train: list[int] | None = None,
    ft: float = 0.0,
    unseen: set[int] | None = None,
) -> Path:
    """Clients 0, 1, ...; client k holds k + 1 samples of class 0, and 10 of class 1 if k is even."""
    number = np.arange(len(accuracy))
    held = {"client": number, "train": train or 30, "test": 10, "label_0": number + 1}
    held |= {"label_1": np.where(number % 2 == 0, 10, 0)}
    held |= {"accuracy": accuracy, "ft_accuracy": np.add(accuracy, ft)}
    if unseen is not None:
        held["unseen"] = np.isin(number, [*unseen]).astype(int)
    pd.DataFrame(held).to_csv(run / "clients.csv", index=False)
    return run


def write_long(folder: Path, rounds: int, seed: int = 0, **changes: Any) -> Path:
    """A run of many rounds, with a mask over three tensors."""
    accuracy = {number: 90 + seed - 300 / number for number in range(5, rounds + 1, 5)}
    run = write_run(folder, accuracy, reached=rounds, rounds=rounds, seed=seed, **changes)
    counts = {f"personal/layer{k}.weight": k + np.arange(rounds) ** 2 for k in range(3)}
    return add_columns(run, **counts)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Experiment `a`: two seeds of FedOBP with a mask, one of FedAvg, and one of FedPer that runs."""
    return write_experiment(tmp_path / "outputs")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of that experiment."""
    return page_of(write_experiment(tmp_path_factory.mktemp("page")))


def write_experiment(base: Path) -> Path:
    for seed, accuracy in ((0, {2: 96.0, 4: 94.0}), (1, {2: 91.0, 4: 96.0})):
        run = write_run(base / f"a/fedobp/k1/seed{seed}", accuracy, method=OBP, seed=seed)
        mask = {"personal/conv1.weight": [0, 10, 20, 30 + 10 * seed]}
        mask["personal/fc.bias"] = [0.0, 1.5, 0.0, 1.0]
        add_columns(run, **mask)
        accuracies = [50.0 + 5 * k + seed for k in range(10)]
        write_clients(run, accuracies, train=[10 * (k + 1) for k in range(10)], ft=2.0)
    write_run(base / "a/fedavg/k2/seed0", {2: 80.0, 4: 87.0})
    write_run(base / "a/fedper/k3/seed0", {2: 99.0}, "running", reached=3, method="fedper")
    return base


def page_of(root: Path) -> Page:
    (path,) = write_pages([root], root / "report", warn=silent)
    return Page(path)


def test_the_command_writes_one_page_beside_the_script(tmp_path, capsys):
    root = tmp_path / "outputs"
    write_run(root / "a/fedavg/k/seed0")
    assert main(["html", str(root)]) == 0
    assert {path.name for path in (root / "report").iterdir()} == {"a.html", plotly_file_name()}
    assert capsys.readouterr().err == f"wrote {root / 'report' / 'a.html'}\n"
    assert ("script", {"src": plotly_file_name()}) in Page(root / "report" / "a.html").elements
    assert "plotly.js" in (root / "report" / plotly_file_name()).read_text(encoding="utf-8")[:99]
    assert main(["html", str(root), "--out", str(root / "elsewhere")]) == 0
    # Only the links know where the page lies, and it lies as deep.
    assert (root / "elsewhere" / "a.html").read_bytes() == (root / "report" / "a.html").read_bytes()


def test_overview_names_every_run(root: Path) -> None:
    run = root / "a/fedavg/k2/seed0"
    summary = {"status": "failed", "cohort": 10, "hours": 1.5, "error": "out of\nmemory"}
    summary["environment"] = {"torch": "2.11", "gpu": None, "cores": 2, "dirty": False}
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "config.yaml").write_text(yaml.safe_dump(config(local={"lr": 0.5})))
    page = page_of(root)
    heads = "method seed status rounds accuracy hours local.lr torch cores directory"
    assert page.cells["runs"][0] == heads.split()
    cells = "FedAvg (lr=0.5)|0|failed out of memory|4/4|87.00|1.5|0.5|2.11|2|fedavg/k2/seed0"
    cells = cells.split("|")
    assert page.row("runs", cells[0]) == cells
    assert page.row("runs", "FedPer")[:5] == ["FedPer", "0", "running", "3/4", "99.00 (round 2)"]
    assert len(page.cells["runs"]) == 1 + 4
    # What is alike in all runs is said once, above; 4 runs, 3 finished, ...
    assert "model.namecnn4" in page.text
    assert "local.lr0." not in page.text
    tiles = "runs4finished2running1failed1configurations3seeds2hours of runs1.5sent in all"
    # 4 or 3 rounds of 320000 bits up and 192000 down, at first 320000 down
    assert tiles + "1.024 MB" in page.text


def test_links_lead_to_the_run_directories(root: Path) -> None:
    strange = root / "a" / "fedavg" / "k:2 #%&\"'<b>" / "seed5"
    write_run(strange, seed=5)
    page = page_of(root)
    links = [attrs["href"] or "" for tag, attrs in page.elements if tag == "a"]
    outer, inner = ([x for x in links if (x[:1] == "#") == is_inner] for is_inner in (False, True))
    targets = {(root / "report" / unquote(link)).resolve() for link in outer}
    assert targets == {path.parent.resolve() for path in root.rglob("rounds.csv")}
    assert {link[1:] for link in inner} <= {attrs.get("id") for _, attrs in page.elements}


def test_curves_are_means_over_seeds_with_a_band(page: Page) -> None:
    band, line = page.traces("curves", "FedOBP", ACCURACY, "round")
    # Of 96, 91 and 94, 96
    assert (line["x"], line["y"], line["name"]) == ([2, 4], [93.5, 95], "FedOBP  95.00")
    assert line["customdata"] == [3.536, 1.414]
    assert (band["x"], band["fill"]) == ([2, 4, 4, 2], "toself")
    edge = [93.5 + 3.536, 95 + 1.414, 95 - 1.414, 93.5 - 3.536]
    assert band["y"] == pytest.approx(edge, abs=0.006)
    (line,) = page.traces("curves", "FedAvg", ACCURACY, "round")
    assert (line["y"], "customdata" in line) == ([80, 87], False)
    assert page.traces("curves", "FedOBP", BEFORE)[1]["y"] == [51, 52, 53, 54]
    # The best is named first and has the first colour; one that has not finished says so.
    traces = page.figure("curves", ACCURACY)["data"]
    names = [one["name"] for one in traces if "showlegend" not in one]
    assert names == ["FedPer  99.00, running 3/4", "FedOBP  95.00", "FedAvg  87.00"]
    colours = [page.traces("curves", name)[-1]["meta"] for name in ("FedPer", "FedOBP", "FedAvg")]
    assert colours == [0, 1, 2]
    assert page.row("curves", "FedOBP")[-2:] == ["93.50", "95.00"]
    for figure in page.data["charts"]["curves"]:  # all of a curve is in the picture
        assert not {"range", "autorange"} & {*figure["layout"]["xaxis"], *figure["layout"]["yaxis"]}


def test_cost_adds_up(page: Page) -> None:
    over = ("GB down, all clients", "GB down and up, all clients", "hours of training")
    down, both, hours = (page.traces("curves", "FedAvg", BEFORE, what)[0]["x"] for what in over)
    assert down == [4e-05, 6.4e-05, 8.8e-05, 0.000112]  # 320000 and three times 192000 bits, in GB
    assert both == [8e-05, 0.000144, 0.000208, 0.000272]
    assert hours == [pytest.approx(seconds / 3600, rel=1e-5) for seconds in (1, 10, 12, 14)]
    assert page.traces("curves", "FedAvg", ACCURACY, over[0])[0]["x"] == [6.4e-05, 0.000112]
    (point,) = page.traces("cost", "FedAvg", over[0])
    assert (point["x"], point["y"]) == ([0.000112], [87])
    # accuracy, values and bits per client and round down and up, median seconds, GB in all and
    # hours
    cells = ["FedAvg", "87.00", "700", "1k", "22.4k", "32k", "2", "0.000112", "0.000272", "0.00389"]
    assert page.row("cost", "FedAvg") == cells


def test_clients_of_all_seeds_together(root: Path) -> None:
    write_clients(root / "a/fedavg/k2/seed0", [float("nan"), 80.0, 60.0])
    page = page_of(root)
    box, crosses, means = page.traces("clients", "FedOBP", "before fine-tuning")
    # Seed 0: 50, 55, ..., 95; seed 1: one more each; the worst of ten is one client: 50 and 51.
    marks = [box[name][0] for name in ("lowerfence", "q1", "median", "q3", "upperfence")]
    assert (marks, means["x"]) == ([50, 60.75, 73, 85.25, 96], [73, 50.5])
    assert (crosses["x"], crosses["text"]) == ([50, 51], ["client 0, seed 0", "client 0, seed 1"])
    assert (len(box["x"][0]), box["text"][0][-1]) == (20, "client 9, seed 1")
    assert page.traces("clients", "FedOBP", "fine-tuned")[0]["lowerfence"] == [52]
    row = "FedOBP|before fine-tuning|20|50.00|60.75|73.00|85.25|96.00|73.00|50.50"
    assert row.split("|") in page.cells["clients"]
    (sizes,) = page.traces("sizes", "FedOBP")
    assert (10, 50, "client 0, seed 0") in zip(sizes["x"], sizes["y"], sizes["text"], strict=True)
    assert sizes["meta"] is None, "the legend of the curves must not hide it"
    # Five parts of four clients: of both seeds two by two.
    medians = page.figure("sizes")["data"][page.figure("sizes")["data"].index(sizes) + 1]
    assert (medians["x"], medians["y"]) == ([15, 35, 55, 75, 95], [53, 63, 73, 83, 93])
    # A client without an accuracy does not count, which the page says.
    box, _, means = page.traces("clients", "FedAvg")
    assert (box["x"], means["x"]) == ([[60, 80]], [70, 60])
    left_out = "1 clients with test samples have no accuracy; they are not among the clients shown"
    assert f"k2/seed0: {left_out}" in page.text


def test_partitions_are_shown_once(page: Page) -> None:
    # Both seeds of FedOBP hold the same ten clients here, FedAvg and FedPer the one of `write_run`.
    (heat,) = page.figure("partition", "seed 0 (2 runs)", "by number")["data"]
    assert heat["customdata"] == [[40]]
    figure = page.figure("partition", "seed 0, 1 (2 runs)", "by number")
    (heat,) = figure["data"]
    assert [row[:3] for row in heat["customdata"]] == [[1, 2, 3], [10, 0, 10]]
    assert [row[:3] for row in heat["z"]] == [[0, 0.301, 0.477], [1, None, 1]]
    assert (heat["x"], heat["y"]) == ([*"0123456789"], ["0", "1"])
    # 1 + ... + 10 and five times 10 samples; 11, 2, 13, 4, 15, 6, 17, 8, 19, 10 each; 15 of 20
    # cells are filled.
    words = "10 clients hold 105 samples: least 2, median 10.5, most 19; 1.5 of 2 classes per client on average"
    assert figure["note"] == words
    for order, clients in {"by size": "8642097531", "by largest class": "9753102468"}.items():
        axis = page.figure("partition", "seed 0, 1 (2 runs)", order)["layout"]["xaxis"]
        assert axis["categoryarray"] == [*clients]


def test_many_partitions_and_clients_are_thinned(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(drawing, "MAX_PARTITIONS", 3)
    monkeypatch.setattr(drawing, "MAX_PARTITION_CELLS", 200)
    for seed, clients in enumerate((300, 1, 2, 3)):
        run = write_run(tmp_path / "x" / "fedavg" / "k" / f"seed{seed}", seed=seed)
        write_clients(run, [50.0] * clients)
    write_run(tmp_path / "x/fedavg/k2/seed0", partition=("iid", None))
    page = page_of(tmp_path)
    figures = page.data["charts"]["partition"]
    shown = {(*figure["choice"].values(),)[:2] for figure in figures}
    assert (len(shown), ("FMNIST, IID", "seed 0 (1 run)") in shown) == (3, True)
    assert "partitions left out of this page: 2" in page.text
    (heat,) = page.figure("partition", "seed 0 (1 run)")["data"]
    assert (len(heat["x"]), heat["x"][0], heat["x"][-1]) == (100, "0", "299")
    assert figures[0]["note"].endswith("100 clients are drawn, evenly spaced")
    assert len(page.traces("clients", "FedAvg")[0]["x"][0]) == DOTS


def test_everybodys_models_on_everybodys_samples(root: Path) -> None:
    """Of the first seed; the same clients across and down, and what is not known is empty."""
    folder = root / "a" / "fedobp" / "k1"
    (folder / "seed0" / "common.csv").write_text("client,on_1,on_4\n1,90.0,10.0\n4,20.0,\n")
    (folder / "seed1" / "common.csv").write_text("client,on_1\n1,50.0\n")
    page = page_of(folder)
    (figure,) = page.data["charts"]["common"]
    (heat,) = page.figure("common", "FedOBP")["data"]
    assert (heat["x"], heat["y"], heat["z"]) == (["1", "4"], ["1", "4"], [[90, 10], [20, None]])
    title = figure["layout"]["yaxis"]["title"]["text"]
    assert (figure["note"], title) == ("seed 0", "model of client")
    (folder / "seed0" / "common.csv").write_text("client,on_1,on_5\n1,90.0,10.0\n4,20.0,\n")
    page = page_of(folder)
    assert "common.csv is not of the same clients across and down" in page.text
    assert page.data["charts"]["common"] == []


def test_masks(page: Page) -> None:
    line, heat = page.figure("masks", "FedOBP")["data"]
    assert (line["x"], line["y"]) == ([1, 2, 3, 4], [0, 11.5, 20, 36])
    assert line["meta"] is None
    assert heat["y"] == ["conv1.weight", "fc.bias"]
    assert heat["customdata"] == [[0, 10, 20, 35], [0, 1.5, 0, 1]]
    assert heat["z"] == [[None, 87, 100, 97.2], [None, 13, 0, 2.78]]
    assert page.figure("masks")["note"].endswith("of 1,000 parameters")
    assert {figure["choice"]["method"] for figure in page.data["charts"]["masks"]} == {"FedOBP"}


def test_long_curves_are_thinned(tmp_path: Path) -> None:
    folder = write_long(tmp_path / "x/fedobp/k/seed0", 1050, method=OBP)
    page = page_of(tmp_path)
    frame = pd.read_csv(folder / "rounds.csv")
    (line,) = page.traces("curves", "FedOBP", ACCURACY)
    assert (len(line["x"]), line["x"][0], line["x"][-1]) == (POINTS, 5, 1050)
    assert line["y"][-1] == pytest.approx(frame["accuracy"].iloc[-1], abs=0.006)
    (line,) = page.traces("curves", "FedOBP", f"{BEFORE}, means of 6 rounds")
    assert (len(line["x"]), line["x"][0], line["x"][-1]) == (175, 3.5, 1047.5)
    assert line["y"][0] == pytest.approx(frame["cohort_before"].iloc[:6].mean(), abs=0.006)
    heat = page.figure("masks")["data"][1]
    assert len(heat["x"]) <= 100
    mean = frame["personal/layer1.weight"].iloc[:11].mean()
    assert heat["customdata"][1][0] == pytest.approx(mean, rel=1e-3)


def test_nothing_from_files_becomes_markup(tmp_path: Path) -> None:
    base = tmp_path / "outputs"
    changes = {"method": EVIL, "dataset": f"data{EVIL}", "model": EVIL, "partition": f"part{EVIL}"}
    run = write_run(base / "x<b>&'\"" / "m" / "k" / "seed0", **changes)
    evil = {"status": "failed", "error": EVIL, "environment": {"torch": EVIL, EVIL: 1}}
    (run / "summary.json").write_text(json.dumps(evil))
    add_columns(run, **{f"personal/{EVIL}": 1.0})
    broken = base / "x<b>&'\"" / "m" / "k<i>" / "seed0"
    broken.mkdir(parents=True)
    (broken / "config.yaml").write_text("a: b\n")
    write_run(base / "other" / "m" / "k" / "seed0")
    written = write_pages([base], base / "report", warn=lambda _: None)
    assert sorted(path.name[:1] for path in written) == ["i", "o", "x"]
    for path in written:
        page = Page(path)
        names = [tag for tag, _ in page.elements]
        assert names.count("script") == (1 if path.name == "index.html" else 3)
        assert not {"b", "i", "img"} & {*names}
        assert not any(attrs.get("id") == "x" for _, attrs in page.elements)
        assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)
        if path.name.startswith("x"):
            assert page.row("accuracy", EVIL)[1] == "70.00"
            # plotly reads tags in names; what it is given has none.
            (line,) = page.traces("curves", "", ACCURACY)
            assert line["name"].startswith("&lt;/script&gt;&lt;script&gt;")
            assert page.figure("masks")["data"][1]["y"][0].startswith("&lt;/script&gt;")
            drawn = json.dumps([figure["data"] for figure in page.data["charts"]["clients"]])
            assert not {*"<>"} & {*drawn}
            assert "k<i>" in page.text


def test_broken_directories_are_named_and_skipped(root, capsys):
    (root / "a/fedavg/k2/seed0" / "summary.json").write_text("{")
    (root / "a/fedobp/k1/seed1" / "clients.csv").write_text("number\n1\n")
    (root / "a/fedper/k3/seed0" / "clients.csv").unlink()
    assert main(["html", str(root)]) == 0
    assert "skipped" in capsys.readouterr().err
    page = Page(root / "report" / "a.html")
    broken = "broken: summary.json cannot be read: JSONDecodeError"
    assert f"{root / 'a/fedavg/k2/seed0'}: {broken}" in page.text
    lacking = f"{root / 'a/fedobp/k1/seed1'}: clients.csv lacks the column client"
    assert f"without clients: {lacking}" in page.text
    assert f"without clients: {root / 'a/fedper/k3/seed0'}: no clients.csv" in page.text
    assert len(page.traces("clients", "FedOBP")[0]["x"][0]) == 10
    assert not page.traces("curves", "FedAvg")


def test_a_run_without_evaluation_or_traffic(tmp_path: Path) -> None:
    run = tmp_path / "x/fedavg/k/seed0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config()))
    (run / "summary.json").write_text("{}")
    (run / "rounds.csv").write_text("round,accuracy\n1,\n")
    page = page_of(tmp_path)
    assert page.data["charts"]["curves"] == []
    assert page.row("cost", "FedAvg") == ["FedAvg"]  # empty columns are left out
    assert "No evaluation to judge yet: FedAvg on FMNIST" in page.text
    sections = {attrs["id"] for tag, attrs in page.elements if tag == "section"}
    assert sections == {"runs", "accuracy", "cost"}


def test_several_experiments_and_an_index(root: Path) -> None:
    # The same configuration as in `a`: both keep theirs
    write_run(root / "b/fedavg/k2/seed0", {4: 87.0})
    write_run(root / "index/fedavg/k2/seed0", {}, "running", reached=1, dataset="digits")
    (root / "c/fedavg/k/seed0").mkdir(parents=True)
    (root / "c/fedavg/k/seed0" / "config.yaml").write_text("x: [")
    lines: list[str] = []
    written = write_pages([root], root / "report", warn=lines.append)
    assert [path.name for path in written] == ["a.html", "b.html", "index-2.html", "index.html"]
    assert len(lines) == 1
    pages = [*map(Page, written)]
    script, loading = plotly_file_name(), "link img iframe object embed video audio base form"
    words = "http:// https:// fetch( import( @import url( innerHTML eval("
    scripts = r"script-src 'self' file: 'sha256-[\w+/=]+'; style-src 'unsafe-inline'"
    for page in pages:  # nothing is loaded but the script beside it
        for tag, attrs in page.elements:
            assert tag not in loading.split()
            assert attrs.get("src", script) == script
            assert re.match(r"\.|#", attrs.get("href") or "#")
        assert not [word for word in words.split() if word in page.source]
        (policy,) = [attrs["content"] or "" for _, attrs in page.elements if "http-equiv" in attrs]
        assert re.match(f"default-src 'none'; {scripts}", policy)
    page = pages[-1]
    heads = ["experiment", "runs", "finished", "running", "configurations", "seeds", "sent in all"]
    assert page.cells["experiments"][0] == [*heads, "best mean accuracy by data set and partition"]
    cells = ["a", "4", "3", "1", "3", "2", "1.024 MB", "FMNIST, Dir(0.1): FedOBP 95.00"]
    assert page.row("experiments", "a") == cells
    assert page.row("experiments", "b")[-1] == "FMNIST, Dir(0.1): FedAvg 87.00"
    assert page.row("experiments", "index-2")[-1] == ""
    links = {attrs["href"] for tag, attrs in page.elements if tag == "a"}
    assert links == {"./a.html", "./b.html", "./index-2.html"}
    assert str(root / "c") in page.text


def test_where_experiments_begin(root: Path, tmp_path: Path) -> None:
    for below in ("", "a", "a/fedobp", "a/fedobp/k1/seed1"):
        (one,) = find_experiments([root / below], silent)
        assert (one.name, len(one.runs)) == ("a", len(list((root / below).rglob("rounds.csv"))))
    for seed, name in enumerate(("one", "two", "deep/three", "deep/four")):
        write_run(tmp_path / "flat" / name, seed=seed)
    assert {one.name for one in find_experiments([tmp_path / "flat"], silent)} == {"flat", "deep"}
    shutil.copytree(root / "a", tmp_path / "other" / "A")
    found = find_experiments([root, root / "a", tmp_path / "other"], silent)
    assert [(one.name, len(one.runs)) for one in found] == [("a", 4), ("A-2", 4)]


# ---- in a browser

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PLAY = """<script>
const told = document.documentElement.dataset, every = (kind) => [...document.querySelectorAll(kind)];
const wait = (time) => new Promise((done) => setTimeout(done, time));
const change = (menu, option) => { menu.selectedIndex = option; menu.dispatchEvent(new Event("change")); };
function play() {
  for (const place of every(".controls select").map((menu) => `#${menu.closest(".chart").id} [name="${menu.name}"]`)) {
    for (let option = document.querySelector(place).options.length - 1; option >= 0; option--) {
      change(document.querySelector(place), option);
      told.figures = Number(told.figures || 0) + 1;
    }
  }
}
const shown = () => `${every("#curves .scatterlayer .trace .lines path").length} ${every("#clients g.boxes").length}`;
const colours = () => [document.body, document.querySelector("#curves .main-svg")].map(
  (one) => getComputedStyle(one).backgroundColor).join(" ");
async function press(times) {
  const toggle = every("#curves .legendtoggle")[0];
  for (let time = 0; time < times; time++) {
    for (const kind of ["mousedown", "mouseup"]) toggle.dispatchEvent(new MouseEvent(kind, { bubbles: true }));
  }
  await wait(800);
  return shown();
}
(async () => {
  play();
  told.all = shown();
  told.hidden = await press(1);
  told.again = await press(1);
  told.alone = await press(2);
  told.together = await press(2);
  const head = every("#accuracy thead button").find((one) => one.textContent === "mean");
  const column = () => [...head.closest("table").tBodies[0].rows].map((row) => row.cells[1].textContent).join(" ");
  head.click(); told.down = column();
  head.click(); told.up = column();
  told.sort = head.parentNode.getAttribute("aria-sort");
  document.getElementById("theme").click();
  told.dark = colours();
  window.dispatchEvent(new Event("beforeprint"));
  told.print = colours();
  window.dispatchEvent(new Event("afterprint"));
  told.after = colours();
  change(document.querySelector("#curves select"), 1);
  told.second = document.querySelector("#clients select").value;
})();
</script></body>"""


def dom_of(page: Path, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What the browser shows of a file: what scripts left on the root, and sections."""
    flags = " --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=4000 --dump-dom "
    flags += "--window-size=1200,900"
    place = f"--user-data-dir={folder}"  # which may have spaces
    command = [str(BROWSER), *flags.split(), place, page.resolve().as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env=os.environ | {"HOME": str(folder)}
    )
    assert done.returncode == 0, done.stderr
    dom = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)
    assert not re.search(r"NaN|undefined|Infinity", dom)
    told = dict(re.findall(r'data-(\w+)="([^"]*)"', dom[dom.index("<html") : dom.index("<head")]))
    return told, dict(re.findall(r'<section id="(\w+)"(.*?)</section>', dom, re.S))


@pytest.mark.full
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome")
def test_every_control_works(root: Path, tmp_path: Path) -> None:
    """Of a page with long curves and evil labels."""
    changes = {"method": {"name": f"apfl{EVIL}"}, "partition": ("iid", None)}
    for seed in (0, 1):
        run = write_long(root / "a" / "apfl" / "k9" / f"seed{seed}", 60, seed, **changes)
        write_clients(run, [50.0] * 100)
    (page,) = write_pages([root], root / "report", warn=silent)
    # The policy would stop this test's script too.
    source, policy = page.read_text(encoding="utf-8"), r'<meta http-equiv="Content-Sec[^>]*>'
    page.write_text(re.sub(policy, "", source).replace("</body>", PLAY), encoding="utf-8")
    told, sections = dom_of(page, tmp_path / "browser")
    for name in ("sizes", "partition", "masks", "cost"):
        assert "main-svg" in sections[name], name
    assert int(told.pop("figures")) > 30
    assert told == {
        "ready": "yes",
        "theme": "dark",
        "all": "4 3",
        "hidden": "3 2",  # a click on FedPer hides it in all charts
        "again": "4 3",
        "alone": "1 1",
        "together": "4 3",
        "down": "99.00 95.00(1.41) 87.00",
        "up": "87.00 95.00(1.41) 99.00",
        "sort": "ascending",
        "dark": "rgb(20, 23, 27) rgb(20, 23, 27)",
        "print": "rgb(255, 255, 255) rgb(255, 255, 255)",
        "after": "rgb(20, 23, 27) rgb(20, 23, 27)",
        "second": "FMNIST, IID",  # a choice holds in all charts
    }
    # IID has one method, whose label is text.
    assert "apfl&lt;/script&gt;&lt;script&gt;" in sections["curves"]
    assert sections["curves"].count('class="js-fill"') == 1
    assert ">layer2.weight<" in sections["masks"]
