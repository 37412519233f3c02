"""The comparison with peers: processes are measured, in turns; the page has what was measured."""

import csv
import json
import random
import sys
from dataclasses import replace

import pytest
import torch

from fedpfl.data import partition
from fedpfl.data.datasets import Samples
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import versus
from peers import measure

# When their first round is done


@pytest.fixture
def task(tmp_path):
    """The workload of two clients, as if it were prepared."""
    place = {name: tmp_path / name for name in ("flbench", "pfllib", "htfllib")}
    made = versus.Task(tmp_path / "data", tmp_path / "task", 3, 5, "cpu", place, clients=2)
    made.folder.mkdir()
    split = [{"train": [0, 1], "test": [2]}, {"train": [3], "test": [4]}]
    (made.folder / "split.json").write_text(json.dumps(split))
    images = versus.np.zeros((5, 1, 28, 28), versus.np.uint8)
    versus.np.savez(made.folder / "images.npz", x=images, y=versus.np.arange(5))
    (made.data / "FashionMNIST" / "raw").mkdir(parents=True)
    for home in place.values():
        (home / "data").mkdir(parents=True)
        (home / "main.py").write_text("mine = 1\n")
    return made


# ---- the peers


def test_the_workload_is_written_once_for_all(task, monkeypatch):
    """The published split; the cohorts of Python's generator, as FL-bench draws them."""
    y = torch.arange(2000) % 10
    images = Samples("made", torch.zeros(2000, 1, 28, 28, dtype=torch.uint8), y, 10, (0.5,), (0.5,))
    monkeypatch.setattr(versus.datasets, "load_samples", lambda *about, **more: images)
    task = replace(task, clients=10, share=0.3, limit=0)
    task.prepare()
    parts = partition.published(y.numpy(), 10, 42, alpha=0.1)
    assert [one["train"] for one in task.split()] == [own.tolist() for own in parts.train]
    assert [one["test"] for one in task.split()] == [own.tolist() for own in parts.test]
    order = json.loads((task.folder / "order.json").read_text())
    drawn = random.Random(42)
    assert order["cohorts"] == [sorted(drawn.sample(range(10), 3)) for _ in range(3)]
    assert (order["lr"], order["epochs"], order["batch"], order["device"]) == (0.05, 5, 32, "cpu")


# ---- turns, and the page


def test_rows_take_turns_and_what_fails_is_a_row(task, tmp_path, monkeypatch, capsys):
    seconds = {"one": iter([3.0, 1.0, 8.0])}

    def run(asked, *_):
        if asked.command == ["two"]:
            raise measure.Failed("has | no wheel")
        measured = {"accuracy": 50.0, "first": 1.25, "peak_mib": 1000.0}
        return {"seconds": next(seconds["one"]), **measured}

    def peer(name):
        make = lambda task, method: measure.Program([name], ROOT, None, 7)  # noqa: E731
        return versus.Peer(name, make, ("FedAvg",))

    monkeypatch.setattr(versus, "ROWS", (peer("one"), peer("two"), peer("three")))
    monkeypatch.setattr(versus, "measure_program", run)
    monkeypatch.setattr(versus.Task, "prepare", lambda task: None)
    versus.measure_in_turns(task, ["one", "two"], 3, 60, tmp_path / "own.csv")
    rows = list(csv.DictReader((tmp_path / "own.csv").open()))
    assert [row["peer"] for row in rows] == ["one", "two"] * 3
    made = versus.make_table(tmp_path / "own.csv")
    row = "FedAvg | 3.00 (1.00 to 8.00) | 1,000 | 1.2 | 50.00 | 7 |"
    assert f"| one | {versus.__version__} | {row}" in made
    assert f"| two | {versus.__version__} | FedAvg | has / no wheel | | | | |" in made


def test_the_page_has_what_was_measured(tmp_path):
    page = versus.PAGE.read_text()
    assert versus.fill_page(page, versus.make_table(versus.RESULTS)) == page
    assert versus.fill_page(page, "other").count("other\n<!-- to here -->") == 1
    assert versus.make_table(tmp_path / "absent.csv") == "Nothing has been measured yet."
