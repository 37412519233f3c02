"""A search goes on only with values that its data and code gave and its runs say."""

import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fedpfl.runner import trials
from tests.command import keep_last_words, run_command
from tests.conftest import keep_quick

pytest.importorskip("optuna")

PLUGIN = """
from dataclasses import dataclass
from beside_it import FACTOR
from fedpfl.methods import FedAvg


@dataclass(frozen=True)
class Scaled(FedAvg):
    share: float = 0.5

    def loss(self, server, client, net, params, batch):
        return FACTOR * super().loss(server, client, net, params, batch)


METHODS = {"scaled": Scaled}
"""


def write_data(path: Path, signal: float) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 4, 400)
    x = (0.2 * rng.normal(size=(400, 1, 6))).astype(np.float32)
    x[np.arange(400), 0, y] += signal
    np.savez(path, x=x, y=y)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Lie in a folder with data and a plugin that imports another file."""
    write_data(tmp_path / "mine.npz", signal=3.0)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "beside_it.py").write_text("FACTOR = 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("beside_it", None)


@pytest.fixture(scope="module")
def searched_once(tmp_path_factory):
    """Return a folder that was searched in, and what the search said."""
    folder = tmp_path_factory.mktemp("searched")
    write_data(folder / "mine.npz", signal=3.0)
    code, lines = search(folder)
    assert code == 0, lines
    return folder, lines


@pytest.fixture
def searched(searched_once, folder):
    """Lie in a folder that was searched in; return what the search said."""
    shutil.copytree(searched_once[0], folder, dirs_exist_ok=True)
    return searched_once[1]


def words(*more: str) -> list[str]:
    usual = "dataset=npz dataset.path=mine.npz partition=iid model=mlp model.hidden=[8] clients=4"
    usual += " rounds=1 participation=1 local.epochs=1 local.batch_size=16 eval.every=1"
    return [*keep_last_words(*usual.split(), *more)]


def search(folder: Path, *more: str) -> tuple[int, list[str]]:
    """Search among two rates with the sweeper alone; returns the exit status and what it says."""
    options = "-m", "hydra/sweeper=optuna", "hydra.sweeper.trials=2", "hydra.sweep.dir=found"
    given = words("method=fedavg", "validation=0.2", "local.lr=choice(0.01,0.1)", *more)
    result = run_command(*options, *given, cwd=folder)
    return result.code, result.err.splitlines()


def values(lines: list[str]) -> list[str]:
    """What the search says of trials that it ran."""
    return [line.partition("  ")[2] for line in lines if re.match(r"fedpfl: trial \d+/", line)]


def chosen(lines: list[str]) -> str:
    return next(line for line in lines if line.startswith("fedpfl: best of"))


CHANGES = {
    "data": lambda folder: write_data(folder / "mine.npz", signal=2.0),
    "code": lambda folder: (folder / "beside_it.py").write_text("FACTOR = 3.0\n"),
}
"""What changes: samples, or a file that a plugin imports."""


@pytest.mark.parametrize("name", keep_quick(CHANGES))
def test_what_changes_while_a_search_goes_on_stops_it_and_the_next_begins_anew(name, folder):
    real = trials.require_origin
    plugin = ("plugins=[plugin.py]", "method=scaled") if name == "code" else ()

    def change(*given):
        real(*given)
        CHANGES[name](folder)

    with mock.patch.object(trials, "require_origin", change):
        code, lines = search(folder, *plugin)
    assert (code, len(values(lines))) == (2, 1), lines
    assert "was run with other data or code than the search began with" in lines[-1]
    before = {*folder.rglob("rounds.csv")}
    code, lines = search(folder, *plugin)
    assert (code, len(values(lines))) == (0, 2), lines
    assert len({*folder.rglob("rounds.csv")} - before) == 2, "no run of before is taken for one"


def test_a_finished_search_is_not_run_again_and_a_forgotten_one_takes_its_runs(folder, searched):
    """Without the file of trials the same command ends in the same trials, by the runs there are."""
    (file,) = (folder / "found").glob("*.json")
    runs_before = {path: path.stat().st_mtime for path in folder.rglob("rounds.csv")}
    again = search(folder)
    assert (again[0], values(again[1]), chosen(again[1])) == (0, [], chosen(searched))
    file.unlink()
    code, after = search(folder)
    assert code == 0, after
    assert (values(after), chosen(after)) == (values(searched), chosen(searched))
    assert {path: path.stat().st_mtime for path in folder.rglob("rounds.csv")} == runs_before


def test_a_metric_that_is_asked_for_has_a_search_of_its_own(folder, searched):
    """Validation accuracy is the default, which its name changes nothing of."""
    with mock.patch.object(trials, "name_study", wraps=trials.name_study) as name_study:
        code, same = search(folder, "hydra.sweeper.metric=val_accuracy")
    assert name_study.call_args.args[2] == ["local.lr=choice(0.01,0.1)"], "the name of before"
    assert (code, values(same), chosen(same)) == (0, [], chosen(searched))
    code, other = search(folder, "hydra.sweeper.metric=val_loss")
    assert (code, len(values(other))) == (0, 2)
    assert all(": val_loss 0." in value or ": val_loss 1." in value for value in values(other))
