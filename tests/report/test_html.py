"""The HTML report: values by hand, text that stays text, nothing loaded, a real browser."""

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedpfl.record.columns import METRICS
from fedpfl.report.__main__ import main
from fedpfl.report.html import plotly_file_name, write_pages
from tests.report.test_report import add_columns, write_run

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
        return json.loads(self.source.partition(' id="data">')[2].partition("</script>")[0])

    def figure(self, section: str, *options: str) -> dict[str, Any]:
        """The first chart of a section that stands for these options."""
        charts = self.data[section]
        return next(one for one in charts if {*options} <= {*one["choice"].values()})

    def traces(self, section: str, method: str, *options: str) -> list[dict[str, Any]]:
        traces = self.figure(section, *options)["data"]
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
    (path,) = write_pages([root], root / "report")
    return Page(path)


def test_the_command_writes_one_page_beside_the_script(tmp_path, capsys):
    root = tmp_path / "outputs"
    write_run(root / "a/fedavg/k/seed0")
    assert main(["html", str(root)]) == 0
    assert {path.name for path in (root / "report").iterdir()} == {"a.html", plotly_file_name()}
    assert capsys.readouterr().err == f"wrote {root / 'report' / 'a.html'}\n"
    assert ("script", {"src": plotly_file_name()}) in Page(root / "report" / "a.html").elements
    assert "plotly.js" in (root / "report" / plotly_file_name()).read_text(encoding="utf-8")[:99]


def test_curves_are_means_over_seeds_with_a_band(page: Page) -> None:
    band, line = page.traces("curves", "FedOBP", ACCURACY, "round")
    # Of 96, 91 and 94, 96
    assert (line["x"], line["y"], line["name"]) == ([2, 4], [93.5, 95], "FedOBP")
    assert line["customdata"] == [3.5355, 1.4142]
    assert (band["x"], band["fill"]) == ([2, 4, 4, 2], "toself")
    edge = [93.5 + 3.536, 95 + 1.414, 95 - 1.414, 93.5 - 3.536]
    assert band["y"] == pytest.approx(edge, abs=0.006)
    (line,) = page.traces("curves", "FedAvg", ACCURACY, "round")
    assert line["y"] == [80, 87]
    assert page.traces("curves", "FedOBP", BEFORE)[-1]["y"] == [51, 52, 53, 54]
    traces = page.figure("curves", ACCURACY)["data"]
    names = [one["name"] for one in traces if "showlegend" not in one]
    assert names == ["FedPer", "FedOBP", "FedAvg"]  # the best first


def test_cost_adds_up(page: Page) -> None:
    over = ("GB down and up, all clients", "hours of training")
    both, hours = (page.traces("curves", "FedAvg", BEFORE, axis)[0]["x"] for axis in over)
    # 640,000 and three times 512,000 bits, in GB
    assert both == [8e-05, 0.000144, 0.000208, 0.000272]
    assert hours == [pytest.approx(seconds / 3600, rel=1e-4) for seconds in (1, 10, 12, 14)]
    # accuracy, values and bits per client and round, median seconds, GB in all
    cells = ["FedAvg", "87.00", "700", "1k", "22.4k", "32k", "2", "0.000272"]
    assert page.row("cost", "FedAvg") == cells


def test_clients_of_all_seeds_together(root: Path) -> None:
    write_clients(root / "a/fedavg/k2/seed0", [float("nan"), 80.0, 60.0])
    page = page_of(root)
    (box,) = page.traces("clients", "FedOBP", "before fine-tuning")
    assert (box["x"][:3], len(box["x"])) == ([50, 51, 55], 20)
    assert (box["text"][0], box["text"][-1]) == ("client 0, seed 0", "client 9, seed 1")
    assert page.traces("clients", "FedOBP", "fine-tuned")[0]["x"][0] == 52
    assert page.traces("clients", "FedAvg")[0]["x"] == [60, 80]
    add_columns(root / "a/fedavg/k2/seed0", "clients", accuracy_low=43.444, accuracy_high=90.25)
    page = page_of(root)
    (box,) = page.traces("clients", "FedAvg", "before fine-tuning")
    assert box["text"][0] == "client 2, seed 0, 95 %: 43.44 to 90.25"
    assert "95 %" not in page.traces("clients", "FedAvg", "fine-tuned")[0]["text"][0]


def test_partitions(root: Path) -> None:
    (heat,) = page_of(root / "a" / "fedobp" / "k1").figure("partition")["data"]
    assert [row[:3] for row in heat["customdata"]] == [[1, 2, 3], [10, 0, 10]]
    assert [row[:3] for row in heat["z"]] == [[0, 0.30103, 0.47712], [1, None, 1]]
    assert (heat["x"], heat["y"]) == ([*"0123456789"], ["0", "1"])
    assert heat["colorbar"] == {"tickvals": [0, 1], "ticktext": ["1", "10"]}


def test_everybodys_models_on_everybodys_samples(root: Path) -> None:
    """Of the first seed; the same clients across and down, and an unknown value is empty."""
    folder = root / "a" / "fedobp" / "k1"
    (folder / "seed0" / "common.csv").write_text("client,on_1,on_4\n1,90.0,10.0\n4,20.0,\n")
    (folder / "seed1" / "common.csv").write_text("client,on_1\n1,50.0\n")
    page = page_of(folder)
    (heat,) = page.figure("common", "FedOBP")["data"]
    assert (heat["x"], heat["y"], heat["z"]) == (["1", "4"], ["1", "4"], [[90, 10], [20, None]])


def test_masks(page: Page) -> None:
    (heat,) = page.figure("masks", "FedOBP")["data"]
    assert (heat["x"], heat["y"]) == ([*"1234"], ["conv1.weight", "fc.bias"])
    assert heat["customdata"] == [[0, 10, 20, 35], [0, 1.5, 0, 1]]
    assert heat["z"] == [[None, 86.957, 100, 97.222], [None, 13.043, 0, 2.7778]]
    assert {chart["choice"]["method"] for chart in page.data["masks"]} == {"FedOBP"}


def test_nothing_from_files_becomes_markup(tmp_path: Path) -> None:
    base = tmp_path / "outputs"
    changes = {"method": EVIL, "dataset": f"data{EVIL}", "model": EVIL, "partition": f"part{EVIL}"}
    run = write_run(base / "x<b>&'\"" / "m" / "k" / "seed0", **changes)
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": EVIL}))
    add_columns(run, **{f"personal/{EVIL}": 1.0})
    write_run(base / "other" / "m" / "k" / "seed0")
    for path in write_pages([base], base / "report"):
        page = Page(path)
        names = [tag for tag, _ in page.elements]
        assert names.count("script") == (1 if path.name == "index.html" else 3)
        assert not {"b", "i", "img"} & {*names}
        assert not any(attrs.get("id") == "x" for _, attrs in page.elements)
        if path.name.startswith("x"):
            assert page.row("accuracy", EVIL)[1] == "70.00"
            # plotly reads tags in names.
            (line,) = page.traces("curves", "", ACCURACY)
            assert line["name"].startswith("&lt;/script&gt;&lt;script&gt;")
            assert page.figure("masks")["data"][0]["y"][0].startswith("&lt;/script&gt;")


def test_several_experiments_and_an_index(root: Path) -> None:
    # The same configuration as in `a`: both keep theirs
    write_run(root / "b/fedavg/k2/seed0", {4: 87.0})
    write_run(root / "index/fedavg/k2/seed0", {}, "running", reached=1, dataset="digits")
    written = write_pages([root], root / "report")
    assert [path.name for path in written] == ["a.html", "b.html", "index-2.html", "index.html"]
    script, loading = plotly_file_name(), "link img iframe object embed video audio base form"
    scripts = r"script-src 'self' file: 'sha256-[\w+/=]+'; style-src 'unsafe-inline'"
    pages = [*map(Page, written)]
    for page in pages:  # nothing is loaded but the script beside it
        for tag, attrs in page.elements:
            assert tag not in loading.split()
            assert attrs.get("src", script) == script
            assert re.match(r"\.|#", attrs.get("href") or "#")
        (policy,) = [attrs["content"] or "" for _, attrs in page.elements if "http-equiv" in attrs]
        assert re.match(f"default-src 'none'; {scripts}", policy)
    assert "No evaluation to judge yet: FedAvg on Digits" in pages[2].text
    page = pages[-1]
    assert page.cells["experiments"][0] == ["experiment", "runs", "configurations"]
    assert page.row("experiments", "a") == ["a", "4", "3"]
    links = {attrs["href"] for tag, attrs in page.elements if tag == "a"}
    assert links == {"./a.html", "./b.html", "./index-2.html"}


# ---- in a browser

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PLAY = """<script>
const told = document.documentElement.dataset, every = (kind) => [...document.querySelectorAll(kind)];
const change = (menu, option) => { menu.selectedIndex = option; menu.dispatchEvent(new Event("change")); };
for (const place of every(".controls select").map((menu) => `#${menu.closest(".chart").id} [name="${menu.name}"]`)) {
  for (let option = document.querySelector(place).options.length - 1; option >= 0; option--) {
    change(document.querySelector(place), option);
    told.figures = Number(told.figures || 0) + 1;
  }
}
const head = every("#accuracy thead button").find((one) => one.textContent === "mean");
head.click(); told.down = [...head.closest("table").tBodies[0].rows].map((row) => row.cells[1].textContent).join(" ");
change(document.querySelector("#curves select"), 1);
told.second = document.querySelector("#clients select").value;
</script></body>"""


def dom_of(page: Path, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """What the browser shows of a file: what scripts left on the root, and sections."""
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    flags += " --virtual-time-budget=4000 --dump-dom --window-size=390,900"
    place = f"--user-data-dir={folder}"  # which may have spaces
    command = [str(BROWSER), *flags.split(), place, page.resolve().as_uri()]
    env = os.environ | {"HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env)
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
    (page,) = write_pages([root], root / "report")
    # The policy would stop this test's script too.
    source, policy = page.read_text(encoding="utf-8"), r'<meta http-equiv="Content-Sec[^>]*>'
    page.write_text(re.sub(policy, "", source).replace("</body>", PLAY), encoding="utf-8")
    told, sections = dom_of(page, tmp_path / "browser")
    for name in ("partition", "masks"):
        assert "main-svg" in sections[name], name
    assert int(told.pop("figures")) > 15
    assert told == {
        "ready": "yes",
        "down": "99.00 95.00(1.41) 87.00",
        "second": "FMNIST, IID",  # a choice holds in all charts
    }
    assert "apfl&lt;/script&gt;&lt;script&gt;" in sections["curves"]
    assert ">layer2.weight<" in sections["masks"]
