"""The comparison with peers: processes are measured, in turns; the page has what was measured."""

import csv
import json
import pickle
import random
import re
import sys
from dataclasses import replace

import pytest
import torch

from fedpfl.data import partition
from fedpfl.data.datasets import Samples
from fedpfl.ground import vision
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import versus
from peers import measure

SAID = {  # the words of the programs, as they print them
    "flbench": (
        *(f"[21:34:05] ------- TRAINING EPOCH: {number} -------" for number in (1, 2, 3, 4)),
        '{ "10": { "all_clients": { "test": { "loss": "0.5", "accuracy": "81.25% -> 0.00%" } } } }',
    ),
    "pfllib": (
        *("Averaged Test Accuracy: 0.1000", "------ time cost ------ 9.5"),
        *("------ time cost ------ 2.0", "------ time cost ------ 3.0"),
        *("Averaged Test Accuracy: 0.8125", "------ time cost ------ 7.5"),
    ),
    "fedpfl": ("directory   outputs/own",),
    "Flower": ("round 9.0", "round 2.0", "round 3.0", "accuracy 81.25"),
}
# When their first round is done
FIRST = {"FL-bench": 3.5, "PFLlib": 3.5, "Flower": 1.0, "fedpfl": 10.0}


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


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(versus, "WORK", tmp_path / "work")
    return tmp_path / "work"


# ---- one process


# ---- the peers


def test_a_peers_words_are_read(task, work):
    """Not the first round, nor one in which PFLlib or FL-bench judges all; a line is said every 2.5
    s, from 1 s on.
    """
    head, told = "round,seconds,accuracy_pooled\n", task.folder / "fedpfl-FedAvg-fp32"
    told.mkdir()
    for peer, began in FIRST.items():
        (told / "rounds.csv").write_text(f"{head}1,9.0,\n2,2.0,\n3,3.0,81.25\n")
        row = next(row for row in versus.ROWS if row.name == peer)
        lines = [(2.5 * at + 1, line) for at, line in enumerate(SAID[row.directory_name or peer])]
        read_output = row.program(task, "FedAvg").read_output
        assert read_output(lines) == (2.5, 81.25, began)
        (told / "rounds.csv").write_text(f"{head}1,9.0,80\n")
        with pytest.raises(measure.Failed):
            read_output([])


def test_all_are_told_the_same_split_and_settings(task, work):
    """In FL-bench's pickle and PFLlib's arrays, whose labels are here the samples' numbers."""
    flbench = versus.flbench_program(task, "FedPer")
    pfllib = versus.pfllib_program(task, "FedPer")
    split = (flbench.cwd / "data" / "fmnist" / "partition.pkl").read_bytes()
    held = pickle.loads(split)["data_indices"]
    own = [{part: one[part].tolist() for part in ("train", "test", "val")} for one in held]
    assert own == [{**one, "val": []} for one in task.split()]
    for client, one in enumerate(task.split()):
        for part, rows in one.items():
            file = pfllib.cwd.parent / "dataset" / "FashionMNIST" / part / f"{client}.npz"
            given = versus.np.load(file, allow_pickle=True)["data"].tolist()
            assert given["y"].tolist() == rows
            black = versus.np.full((len(rows), 1, 28, 28), -0.286 / 0.3205)
            assert given["x"] == pytest.approx(black, abs=1e-6)
    told = {word for word in flbench.command if "=" in word}
    words = "method=fedper optimizer.lr=0.05 common.local_epoch=5 common.batch_size=32"
    words += " common.join_ratio=0.1 common.global_epoch=3 common.use_cuda=False"
    assert told >= {*words.split()}
    told = pfllib.command[pfllib.command.index("-data") :]
    words = "-data FashionMNIST -m CNN -algo FedPer -dev cpu -gr 3 -eg 3 -nc 2 -jr 0.1 -ls 5"
    words = f"{words} -lbs 32 -lr 0.05".split()
    given, wanted = (dict(zip(own[::2], own[1::2], strict=True)) for own in (told, words))
    assert given == wanted


def test_htfllib_has_one_network_for_all(task, work):
    """In the copy; whose families are others' says so."""
    main = task.directories["htfllib"] / "system/main.py"
    main.parent.mkdir()
    lines = (
        "from flcore.servers.serverlg import LG_FedAvg",
        "from flcore.servers.serverktl_x import F",
    )
    family = (
        "if args.model_family == \"HtFE-img-2\":\n    args.models = [\n 'a(b=3)', # c\n 'd()',\n]"
    )
    main.write_text("\n".join((*lines, family, "")))
    program = versus.htfllib_program(task, "LG-FedAvg")
    text = (program.cwd / "main.py").read_text()
    assert text.splitlines()[0] == lines[0]
    assert "serverktl" not in text
    assert text.count("in_features=1") == 1
    assert "d()" not in text
    assert "-m HtFE-img-2 -algo LG-FedAvg" in " ".join(program.command)
    main.write_text("mine = 1\n")
    with pytest.raises(measure.Failed, match="has no HtFE-img-2"):
        versus.htfllib_program(task, "LG-FedAvg")


def test_peers_start_by_a_function_that_there_is():
    """It is found in a file, as fedpfl is not installed there."""
    (name,) = re.findall(r'VISION\["(\w+)"\]', (versus.PEERS / "start.py").read_text())
    assert callable(getattr(vision, name))


def test_a_python_that_is_not_there_is_said():
    assert measure.find_interpreter(sys.executable) == sys.executable
    with pytest.raises(measure.Failed, match=r"it needs python3\.99"):
        measure.find_interpreter("python3.99")


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
