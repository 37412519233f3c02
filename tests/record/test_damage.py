"""A run directory that was changed from outside ends as if not, or is refused in one line."""

import importlib
import itertools
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import fedpfl
from fedpfl import data, export
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.record import environment, rundir
from fedpfl.report import load
from tests.command import (
    CLOCKED,
    TINY,
    format_override,
    play_run,
    read_checkpoint,
    read_summary,
    read_table,
    rewrite_summary,
    run_command,
    snapshot,
)
from tests.conftest import assert_same, keep_quick, read_cases

RUN = (*TINY, "rounds=3", "method=ditto", "eval.finetune_epochs=1")
FILES = ("state.pt", "rounds.csv", "config.yaml", "partition.npz", "clients.csv", "summary.json")


@pytest.fixture(autouse=True)
def not_for_ever() -> Iterator[None]:
    """A named pipe would be waited for."""
    signal.alarm(600)
    yield
    signal.alarm(0)


def interrupt(folder: Path, *overrides: str, after: int = 3) -> None:
    """Ctrl-C after a row, before its checkpoint."""
    row = rundir.RunDirectory.row

    def pressed(self: rundir.RunDirectory, values: dict[str, int]) -> None:
        row(self, values)
        if values["round"] == after:
            raise KeyboardInterrupt

    with mock.patch.object(rundir.RunDirectory, "row", pressed), pytest.raises(KeyboardInterrupt):
        play_run(folder, *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run, finished and interrupted; an empty folder will do, hidden names do not count."""
    place = tmp_path_factory.mktemp("runs")
    (place / "finished" / ".hydra").mkdir(parents=True)
    play_run(place / "finished", *RUN)
    interrupt(place / "interrupted", *RUN)
    return {name: place / name for name in ("finished", "interrupted")}


@pytest.fixture
def whole(runs: dict[str, Path]) -> Path:
    return runs["finished"]


def copied(folder: Path, place: Path) -> Path:
    return Path(shutil.copytree(folder, place / "run"))


def assert_ends_alike(folder: Path, whole: Path) -> None:
    """State, rows, clients and masks bit for bit; the summary without what a clock wrote."""
    assert_same(read_checkpoint(folder), read_checkpoint(whole))
    assert read_table(folder / "rounds.csv") == read_table(whole / "rounds.csv")
    assert (folder / "clients.csv").read_bytes() == (whole / "clients.csv").read_bytes()
    masks = [[path.read_bytes() for path in run.glob("masks.json")] for run in (folder, whole)]
    assert masks[0] == masks[1]
    found, wanted = read_summary(folder), read_summary(whole)
    assert found["status"] == wanted["status"] == "finished"
    for name, key in itertools.product(("best", "last"), wanted["last"].keys() - {*CLOCKED}):
        assert found[name][key] == wanted[name][key]


def assert_ends_as(folder: Path, whole: Path) -> None:
    """Also with the same configuration and clients."""
    assert_ends_alike(folder, whole)
    for name in ("config.yaml", "partition.npz"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def refusal(folder: Path, *overrides: str) -> str:
    """The one line that the command ends with, `` where it ends well."""
    told = ""
    try:
        play_run(folder, *overrides)
    except FedpflError as error:
        told = str(error)
    assert "\n" not in told
    return told


# Bits


@pytest.mark.parametrize("name", FILES)
def test_a_bit_that_flips_changes_nothing_or_is_told(name, runs, tmp_path):
    """Of an interrupted run; tests/record/test_readers.py has finished ones."""
    content = (runs["interrupted"] / name).read_bytes()
    chance = random.Random(name)
    for number, place in enumerate((0, len(content) - 1, chance.randrange(len(content)))):
        run = Path(shutil.copytree(runs["interrupted"], tmp_path / str(number)))
        flipped = bytearray(content)
        flipped[place] ^= 1 << chance.randrange(8)
        (run / name).write_bytes(flipped)
        if told := refusal(run, *RUN):
            assert name in ("state.pt", "summary.json")  # the rest is written anew
            assert name in told or "holds a different run" in told
        else:
            assert_ends_as(run, runs["finished"])


# Files


def test_a_run_of_an_earlier_release_is_refused_by_all_readers(whole: Path, tmp_path: Path) -> None:
    """Its identity is another one, and its files may be."""
    run, earlier = copied(whole, tmp_path), {"fedpfl": "0.1.0"}
    code = [entry | earlier for entry in read_summary(run)["code"]]
    rewrite_summary(run, code=code, environment=read_summary(run)["environment"] | earlier)
    before = snapshot(run)
    here = f"fedpfl {fedpfl.__version__} does not read it; use fedpfl 0.1.0"
    said = f"{run}: fedpfl 0.1.0 wrote this run, and {here}"
    assert refusal(run, *RUN).startswith(said)
    assert said in refusal(tmp_path / "more", *RUN, "rounds=4", format_override("extend", run))
    with pytest.raises(FedpflError, match=re.escape(said)):
        fedpfl.load(run)
    with pytest.raises(FedpflError, match=re.escape(said)):
        load.read_started_run(run)
    assert load.inspect_directory(run).status_text == "broken"
    assert snapshot(run) == before
    play_run(run, *RUN, "restart=true")
    assert_ends_as(run, whole)


IRREGULAR: dict[str, Callable[[Path, Path], Any]] = {
    "pipe": lambda path, victim: os.mkfifo(path),
    "folder": lambda path, victim: path.mkdir(),
    "link": lambda path, victim: path.symlink_to(victim),
}


@pytest.mark.parametrize(
    ("status", "kind"), keep_quick(itertools.product(("interrupted", "new", "finished"), IRREGULAR))
)
def test_what_is_no_regular_file_is_refused(kind, status, runs, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    others = "run.log run.lock partition.png .state.pt.tmp .summary.json.tmp"
    for number, name in enumerate((*FILES, *others.split())):
        run = tmp_path / str(number)
        shutil.copytree(runs[status], run) if status in runs else run.mkdir()
        (run / name).unlink(missing_ok=True)
        IRREGULAR[kind](run / name, victim)
        before = {path.name for path in run.iterdir()}
        line = f"{run / name} is not a regular file; remove it, or choose another directory"
        assert refusal(run, *RUN).startswith(line)
        assert {path.name for path in run.iterdir()} == before
        assert victim.read_text() == "mine\n"


# The lock


def test_without_its_lock_a_run_writes_nothing_more(tmp_path, monkeypatch):
    run, real, left = tmp_path / "run", rundir.RunDirectory.row, []

    def lost(self: rundir.RunDirectory, values: dict[str, Any]) -> None:
        real(self, values)
        if values["round"] == 2:
            (run / "run.lock").unlink()
            (run / "run.lock").write_text("1\n")
            left.append(snapshot(run))

    with monkeypatch.context() as patch:
        patch.setattr(rundir.RunDirectory, "row", lost)
        told = refusal(run, *RUN)
    assert told.startswith(
        f"{run}/run.lock was removed or replaced while the run went on, so another process may"
        " write"
    )
    now = snapshot(run)
    assert {name for name in now if now[name] != left[0].get(name)} == {"run.log"}


# Other people's folders


@pytest.mark.parametrize(
    ("holds", "where"),
    keep_quick([("config.yaml", "own"), ("state.pt", "."), ("notes.txt", "''"), ("data/", "own")]),
)
def test_a_folder_that_is_no_run_directory_is_left_alone(holds, where, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / holds).mkdir() if holds.endswith("/") else (own / holds).write_text('{"mine": 1}')
    result = run_command(*RUN, f"hydra.run.dir={where}", cwd=tmp_path if where == "own" else own)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1), result
    assert "hydra.run.dir=" in result.err
    assert [path.name for path in own.iterdir()] == [holds.rstrip("/")]
    assert holds.endswith("/") or (own / holds).read_text() == '{"mine": 1}'


# Data


def samples(path: Path) -> Path:
    x = np.random.default_rng(0).integers(0, 256, (400, 8, 8), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(400) % 4, groups=np.arange(400) % 4)
    return path


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, ...]:
    """The words of a run on the samples of `own.npz`."""
    path = samples(tmp_path / "own.npz")
    return (*RUN, "dataset=npz", format_override("dataset.path", path))


OTHER_LABELS = "arrays['y'][:2] = arrays['y'][[1, 0]]"
OTHER_DATA = (
    "arrays['x'][7, 3, 3] ^= 1",
    OTHER_LABELS,
    "arrays |= {name: array[:-4] for name, array in arrays.items()}",
    "arrays['test_from'] = 300",
)


def overwrite(path: Path, change: str) -> None:
    """Change the arrays of a file."""
    with np.load(path) as file:
        arrays = dict(file)
    exec(change, {"arrays": arrays})
    np.savez(path, **arrays)


@pytest.mark.parametrize("change", keep_quick(OTHER_DATA))
def test_an_interrupted_run_of_other_data_is_refused(change, own, tmp_path: Path) -> None:
    run = tmp_path / "run"
    interrupt(run, *own)
    before = snapshot(run)
    overwrite(tmp_path / "own.npz", change)
    told = refusal(run, *own)
    assert told.startswith(
        f"{run} was begun with other data (samples, labels, groups, scaling, who holds which, or"
        " initial weights); restart=true"
    )
    assert snapshot(run) == before


@pytest.mark.parametrize("change", keep_quick(OTHER_DATA[:2]))
def test_a_finished_run_of_other_data_runs_anew_and_says_so(change, own, tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "own.npz"
    play_run(run, *own)
    samples(path)  # written again, the same
    assert "already finished" in play_run(run, *own)
    overwrite(path, change)
    told = play_run(run, *own)
    assert told.count("data        changed since the run finished: run from the beginning\n") == 1
    assert "data changed since the run finished" in (run / "run.log").read_text()
    play_run(tmp_path / "fresh", *own)
    assert_ends_as(run, tmp_path / "fresh")
    assert "already finished" in play_run(run, *own)


def test_a_finished_run_has_no_older_state(runs, whole, tmp_path):
    """Its own, of round 2: models of that round are not those of the table."""
    run = copied(whole, tmp_path)
    shutil.copy(runs["interrupted"] / "state.pt", run)
    line = f"{run}/state.pt is not the one that the run ended with; restart=true"
    with pytest.raises(FedpflError, match=line):
        fedpfl.load(run).personal(0)
    assert line in refusal(run, *RUN)
    assert line in refusal(tmp_path / "longer", *RUN, "rounds=4", format_override("extend", run))
    assert line in refusal(tmp_path / "from", *RUN, format_override("model.weights", run))
    assert export.main([str(run), str(tmp_path / "models")]) == 2


def test_fingerprints_tell_values_shapes_and_kinds_apart() -> None:
    x = torch.arange(6, dtype=torch.uint8)
    reshaped = [x, x.view(2, 3), x.view(3, 2), x.to(torch.int8), x.flip(0), x[:5], x[:0]]
    grouped = [(), (x,), (x, x), (x[:3], x[3:]), (x[:2], x[2:]), {"x": x}, {"y": x}]
    plain = [None, 0, 0.0, "0", "", True, (1, 2), ((1,), 2), ("a", "b"), ("ab",), 1.5, 1.5001]
    values: list[Any] = reshaped + grouped + plain
    found = [data.fingerprint(value) for value in values]
    assert len(set(found)) == len(values)
    assert found == [data.fingerprint(value) for value in values]
    assert data.fingerprint(x.view(2, 3).T) == data.fingerprint(x.view(2, 3).T.contiguous())
    # Means are computed, and may round differently elsewhere
    assert data.fingerprint(0.1 + 0.2) == data.fingerprint(0.3)


# Code


@pytest.fixture
def own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Writes a method of the user's own, and loads it as a new process would."""

    def write(comment: str) -> None:
        (tmp_path / "own_method.py").write_text(
            "from dataclasses import dataclass\nfrom fedpfl.methods import Ditto\n\n\n"
            f"@dataclass(frozen=True)\nclass Own(Ditto):\n    '''{comment}'''\n"
        )
        environment._code.cache_clear()
        monkeypatch.delitem(sys.modules, "own_method", raising=False)
        monkeypatch.setitem(METHODS, "ditto", importlib.import_module("own_method").Own)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    yield write
    environment._code.cache_clear()


CHANGED = "code        of the method changed since the run began; restart=true runs it anew\n"


def test_a_run_of_other_code_goes_on_and_tells_all_of_it(own_method, whole, tmp_path):
    """A finished one stays as it is; anew it is of one code."""
    run = tmp_path / "run"
    own_method("as it was")
    interrupt(run, *RUN)
    (before,) = read_summary(run)["code"]
    own_method("edited")
    told = play_run(run, *RUN)
    assert CHANGED in told
    assert "resumed" in told
    assert_ends_as(run, whole)
    first, second = read_summary(run)["code"]
    assert first == before
    assert first["method"] != second["method"]
    assert first["fedpfl"] == second["fedpfl"] == environment.describe_environment()["fedpfl"]
    assert CHANGED in play_run(run, *RUN)  # it is of two codes for good

    assert "already finished" not in play_run(run, *RUN, "restart=true")
    assert len(read_summary(run)["code"]) == 1
    finished = snapshot(run)
    assert "changed" not in play_run(run, *RUN)
    assert snapshot(run) == finished
    own_method("edited again")
    told = play_run(run, *RUN)
    assert "already finished" in told
    assert told.endswith(CHANGED)
    after = snapshot(run)
    assert {name for name in after if after[name] != finished.get(name)} == {"run.log"}
    assert "code of the method changed since" in (run / "run.log").read_text()


TAKES_PART = """
fedobp methods/fedobp => True
fedobp methods/ditto => False
fedrolex methods/shared/neurons => True
"""
"""A method, a file => whether it is part of the method's code."""


def test_what_a_methods_code_is() -> None:
    real = environment._code
    for case, takes_part in read_cases(TAKES_PART):
        method, name = case.split()

        def read_edited(module: str, edited: str = f"fedpfl/{name}".replace("/", ".")) -> bytes:
            return real(module) + b"#" * (module == edited)

        before = environment.source_fingerprint(METHODS[method])
        with mock.patch.object(environment, "_code", read_edited):
            now = environment.source_fingerprint(METHODS[method])
        assert str(now != before) == takes_part, case


# From the beginning


@pytest.mark.parametrize("status", ["interrupted", "finished"])
def test_restart_removes_what_the_run_wrote_and_nothing_else(status, runs, tmp_path):
    """Every damage is mended."""
    run = copied(runs[status], tmp_path)
    (run / "notes.txt").write_text("mine")
    if status == "interrupted":
        for name in FILES[:-1]:
            (run / name).write_bytes(b"garbage")
        summary = (run / "summary.json").read_text()
        (run / "summary.json").write_text(summary.replace("running", "finished"))
    told = play_run(run, *RUN, "restart=true")
    assert "already finished" not in told
    assert "resumed" not in told
    assert_ends_as(run, runs["finished"])
    assert (run / "notes.txt").read_text() == "mine"
    assert "restart: false" in (run / "config.yaml").read_text()
    assert "resumed" not in (run / "run.log").read_text()
    assert (run / "run.log").read_text().count("directory") == 1
    assert "already finished" in play_run(run, *RUN)


@pytest.mark.parametrize("name", rundir._RUN_FILES)
def test_a_killed_restart_leaves_the_run_whole_or_is_told(name, whole, tmp_path):
    run, removed = copied(whole, tmp_path), rundir._RUN_FILES.index(name) + 1
    files.remove_files(run, rundir._RUN_FILES[:removed])
    told = refusal(run, *RUN)
    if told:
        assert "restart=true" in told
        play_run(run, *RUN, "restart=true")
    assert (run / "state.pt").exists() or name == "state.pt"
    assert (run / "rounds.csv").read_text().count("\n") == 4
