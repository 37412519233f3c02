"""`python -m fedpfl.train`: a line for every fault, whole run directories, sweeps, signals."""

import contextlib
import csv
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, FedAvg
from fedpfl.record import rundir
from fedpfl.record.columns import round_columns
from fedpfl.report import __main__ as report
from tests.command import (
    FILES,
    TINY,
    TINY_TASK,
    call_main,
    format_override,
    read_checkpoint,
    read_summary,
    read_table,
    run_command,
    snapshot,
    start_process,
    wait_for,
)
from tests.conftest import keep_quick, read_cases

# Bad input

BAD = r"""
# unknown keys
foo=1 => foo is not a key
local.foo=1 => local.foo is not a key here; known keys: epochs, steps, batch_size, optimizer, lr, decay,
# unknown choices
method=xyz => method must be one of apfl, apple, centralized, cfl,
# what was probably meant
alpha=0.5 => alpha is not a key here; did you mean partition.alpha?
# wrong types
rounds=abc => rounds must be a whole number, got 'abc'
# out of range
rounds=0 => rounds must be 1 or more, got 0
eval.every=5 eval.finetune_epochs=1 eval.finetune_every=7 => eval.finetune_every must be a positive multiple of eval.every (5), got 7
# what the network does not have
method=fedper method.layers=5 => method.layers must be at most 4, the network's layers, got 5
model=mlp model.hidden=[100000000000] => can't allocate memory
# adapters
adapter=lora adapter.rank=0 => adapter.rank must be 1 or more, got 0
adapter=lora => model=cnn4: adapter.layers: the network has no q; it has conv, linear
# files
dataset=npz => dataset.path has no value; set it with dataset.path=
# folders
hydra.run.dir=a/b/{300 x} => File name too long
hydra.run.dir=file/run => file/run
# what a terminal would obey
data_dir="{escape}[2J{escape}[31mred" => data_dir must be a text without control characters, got '\x1b[2J\x1b[31mred'
# syntax
rounds=(1 => rounds=(1
# interpolations
seed=${nope} => seed: Interpolation key 'nope' not found
# sweeps
-m seed=1,2 method=fedselect method.personalise=99 => method.personalise: the network has layers 0 to 3, got 99
# sweeps in lockstep
-m hydra/launcher=lockstep hydra.job.chdir=true => hydra.job.chdir must be false with hydra/launcher=lockstep
# sweeps over experiments
-m experiment=demo,smoke rounds=0 => experiment=demo: an experiment with a sweep of its own; run one at a time
"""
MARKED = {
    "{escape}": "\x1b",
    "{300 x}": 300 * "x",
}


def bad_cases() -> list[Any]:
    """Return the lines of BAD, of which `make test` tries the first of each kind."""
    kinds = [read_cases(kind.partition("\n")[2]) for kind in BAD.split("\n# ")[1:]]
    return [case for kind in kinds for case in keep_quick(kind)]


@pytest.mark.parametrize(("overrides", "says"), bad_cases())
def test_bad_input_is_one_line_and_leaves_nothing(
    overrides: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    before = snapshot(tmp_path)
    for mark, text in MARKED.items():
        overrides = overrides.replace(mark, text)
    result = run_command(*TINY_TASK, *overrides.split(" "), cwd=tmp_path)
    assert result.code == 2, result
    # One line, or one a job, which a terminal shows as it is
    lines = result.err.splitlines()
    assert len(lines) == 1 or overrides.startswith("-m")
    assert all(line.startswith("fedpfl: ") and line.isprintable() for line in lines), lines
    assert says in result.err
    assert result.out == ""
    assert snapshot(tmp_path) == before


def test_an_error_is_one_line_that_a_terminal_shows_as_it_is() -> None:
    shown = r"a\nb\x1b[31m\x9b\u2028\udcff\U000e0041 Größe"
    assert str(FedpflError("a\nb\x1b[31m\x9b\u2028\udcff\U000e0041 Größe")) == shown
    assert str(FedpflError(shown)) == shown  # as one that comes from another process


# Good input


def test_a_run_lies_where_it_is_told_unless_another_lies_there_or_it_is_in_use(
    tmp_path: Path,
) -> None:
    """Its first lines say what runs; once it is finished its directory is left alone."""
    folder, run = tmp_path, tmp_path / "some/where"
    result = run_command(*TINY, format_override("hydra.run.dir", run), cwd=folder)
    assert result.code == 0
    files = (f"some/where/{name}" for name in (*FILES, "masks.json"))
    assert set(snapshot(folder)) == {"some", "some/where", *files}
    for text in ("1,797 samples 1x28x28", "24/24/24", "parameters", "MiB", str(run)):
        assert text in result.err
    words, before = (*TINY, "hydra.run.dir=some/where"), snapshot(folder)
    for other, differing in read_cases("""
        method=fedavg => method fedobp there, fedavg here
        local.clip=0.5 restart=true => local.clip 0.0 there, 0.5 here
    """):
        result = run_command(*words, *other.split(), cwd=folder)
        assert result.code == 2, (other, result)
        assert "; choose another with hydra.run.dir=" in result.err
        assert f"holds a different run ({differing}); " in result.err
        assert len(result.err.splitlines()) == 1
        assert snapshot(folder) == before
    with rundir.RunDirectory.open(run, "", read_summary(run)["identity"]):
        assert "is in use by process" in run_command(*words, cwd=folder).err
    times = [(run / name).stat().st_mtime_ns for name in FILES]
    again = run_command(*words, "device=cpu", "checkpoint.seconds=5", cwd=folder)
    assert again.code == 0
    assert again.out.startswith(f"already finished: {run}")
    assert snapshot(folder) == before
    assert [(run / name).stat().st_mtime_ns for name in FILES] == times


def test_a_run_writes_its_directory(tmp_path: Path) -> None:
    tuning = ("eval.finetune_epochs=1", "eval.finetune_every=2")
    result = run_command(*TINY_TASK, *tuning, "model=lenet5", "method=fedobp", cwd=tmp_path)
    assert result.code == 0, result
    (folder,) = (tmp_path / "outputs" / "digits").glob("*/*/seed42")
    assert {path.name for path in folder.iterdir()} - {"run.lock"} == {*FILES, "masks.json"}

    with (folder / "rounds.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[: 1 + len(round_columns())] == ["round", *round_columns()]
    assert [row["round"] for row in rows] == ["1", "2"]
    judged = "accuracy accuracy_pooled accuracy_std accuracy_worst10 cohort_before cohort_after"
    assert all(0 <= float(row[name]) <= 100 for row in rows for name in judged.split())
    assert [row["ft_accuracy"] == "" for row in rows] == [True, False]
    # Two clients; what is personal does not travel
    personal = [float(value) for name, value in rows[1].items() if name.startswith("personal/")]
    assert 2 * 44426 - int(rows[1]["values_down"]) == 2 * sum(personal) > 0

    clients = read_table(folder / "clients.csv")
    sizes = [(row["client"], row["train"], row["test"]) for row in clients]
    assert sizes == [(str(k), "18", "6") for k in range(4)]
    assert all(sum(int(row[f"label_{label}"]) for label in range(10)) == 24 for row in clients)
    for name in ("accuracy", "ft_accuracy"):
        mean = np.mean([float(row[name]) for row in clients])
        assert mean == pytest.approx(float(rows[1][name]))

    told = read_summary(folder)
    assert (told["status"], told["last"]["round"], told["parameters"]) == ("finished", 2, 44426)
    assert told["best"]["accuracy"] == max(float(row["accuracy"]) for row in rows)
    assert torch.load(folder / "state.pt", weights_only=True)["round"] == 2
    with np.load(folder / "partition.npz", allow_pickle=False) as arrays:
        assert len(arrays["train_indices"]) == 4 * 18
        assert arrays["label_counts"].sum() == 4 * 24


def test_a_run_is_over_when_every_client_has_stopped(tmp_path: Path) -> None:
    """Its last round is judged and saved, and the directory is a finished one."""
    overrides = (
        *(*TINY_TASK, "model=mlp", "method=fedspu", "stopping.early=true", "method.widths=[1.0]"),
        *("participation=1", "rounds=60", "local.lr=0.5", "eval.every=1000"),
        *("checkpoint.seconds=1000", "hydra.run.dir=run"),
    )
    assert run_command(*overrides, cwd=tmp_path).code == 0
    rows, told = read_table(tmp_path / "run/rounds.csv"), read_summary(tmp_path / "run")
    played = len(rows)
    assert 2 <= played < 60
    assert (told["status"], told["rounds"], told["rounds_played"]) == ("finished", 60, played)
    assert told["last"]["round"] == played
    (device,) = told["devices"]
    assert (device["width"], device["entries"]) == (1.0, told["parameters"])
    assert rows[-1]["accuracy"]
    assert read_checkpoint(tmp_path / "run")["stopping"]["stopped"].all()


DIVERGING = """
rounds=1 local.lr=1e38 => brought back numbers that are not finite
method=scaffold method.server_lr=3e38 local.lr=1 rounds=1 => the server's numbers are not finite after the round
rounds=4 local.lr=1e6 model.hidden=[200] => training diverged
"""


@pytest.mark.parametrize(("words", "message"), keep_quick(read_cases(DIVERGING), 2))
def test_a_diverging_run_stops_with_status_three_and_one_complaint(words, message, tmp_path):
    result = run_command(*TINY, *words.split(), "hydra.run.dir=here", cwd=tmp_path)
    assert result.code == 3, result
    (line,) = result.complaints
    assert message in line
    assert "local.lr" in line
    told = read_summary(tmp_path / "here")
    assert told["status"] == "diverged"
    assert "diverged" in told["error"]


# A method's own faults


class Faulty(FedAvg):
    def loss(self, *given: Any) -> torch.Tensor:
        raise KeyError("no such\nthing")


@pytest.mark.parametrize("backend", keep_quick(["batched", "loop"]))
def test_a_fault_in_a_method_is_one_line_and_the_log_has_the_traceback(
    backend, tmp_path, monkeypatch
):
    monkeypatch.setitem(METHODS, "fedavg", Faulty)
    words = (*TINY, "method=fedavg", f"engine={backend}", "hydra.run.dir=here")
    result = run_command(*words, cwd=tmp_path)
    assert result.code == 1, result
    (line,) = result.complaints
    assert result.err.endswith(f"{line}\n")
    log = tmp_path / "here" / "run.log"
    raised = r"KeyError: 'no such\nthing'"
    assert line.startswith(f"fedpfl: method=fedavg: Faulty.loss raised {raised} ({__file__}:")
    assert line.endswith(f"; its traceback is in {log}")
    assert "in loss\n    raise KeyError(" in log.read_text()
    assert read_summary(tmp_path / "here")["status"] == "failed"


# Sweeps


def seeds(folder: Path) -> dict[str, list[str]]:
    """The runs that a sweep finished: seeds by method."""
    done = [path.parent for path in folder.glob("outputs/*/*/*/seed*/state.pt")]
    assert all(read_summary(path)["status"] == "finished" for path in done)
    found: dict[str, list[str]] = {}
    for path in sorted(done):
        found.setdefault(path.parts[-3], []).append(path.name)
    return found


def test_a_sweep_over_methods_and_seeds_makes_a_directory_for_each(tmp_path: Path) -> None:
    words = ("--multirun", *TINY[1:], "rounds=1")
    result = run_command(*words, "method=fedavg,fedper", "seed=1,2", cwd=tmp_path)
    assert result.code == 0, result
    assert seeds(tmp_path) == {"fedavg": ["seed1", "seed2"], "fedper": ["seed1", "seed2"]}
    # The seeds of one configuration lie together
    assert len(list(tmp_path.glob("outputs/digits/*/*"))) == 2
    # A line each when it begins and ends
    begun, told = result.err.splitlines()[::2], result.err.splitlines()[1::2]
    clock = r"\d:\d\d:\d\d"
    last = rf"sweep: run 4 of 4, elapsed {clock}, ETA {clock}  method=fedper seed=2"
    assert re.fullmatch(last, begun[3])
    assert [line[:15] for line in told] == [f"sweep: {done}/4 done" for done in (1, 2, 3, 4)]
    ended = rf"sweep: .*  method=fedper seed=1: all clients [\d.]+ % in {clock}"
    assert re.fullmatch(ended, told[2])
    assert result.out.startswith("Digits, Dir(0.1)\n")
    assert result.out.endswith(reported(tmp_path, "outputs"))
    again = run_command(*words, "method=fedper", "seed=1,2", cwd=tmp_path)
    rate = read_summary(next(tmp_path.glob("outputs/digits/fedper/*/seed1")))["last"]["accuracy"]
    done = f"sweep: 1/2 done  seed=1: all clients {rate:.2f} %, already finished\n"
    assert done in again.err  # nothing tells how long a job takes
    assert "sweep: run" not in again.err  # none begins
    # Of this sweep's runs alone
    assert again.out.endswith(reported(tmp_path, "outputs/digits/fedper"))


def reported(folder: Path, root: str) -> str:
    """What the report's own command prints."""
    with contextlib.chdir(folder):
        return call_main(report.main, "tables", root).out


def test_a_failing_job_does_not_stop_the_others(tmp_path: Path) -> None:
    """An experiment with a sweep of its own needs no option for it."""
    words = ("experiment=demo", "method=fedprox,fedavg", "method.mu=0.1", "clients=4,5000")
    result = run_command(*TINY, *words, cwd=tmp_path)
    assert result.code == 2, result
    assert sorted(re.findall(r"sweep: (\d)/4 done", result.err)) == ["1", "2", "3", "4"]
    assert "method.mu is not a key here; known keys: statistics" in result.err
    assert "need 120000 samples, the data set has 1797" in result.err
    assert "Traceback" not in result.err
    assert seeds(tmp_path) == {"fedprox": ["seed42"]}
    assert len(list(tmp_path.rglob("seed*"))) == 1
    assert result.out.endswith(reported(tmp_path, "outputs"))
    told = result.err.splitlines()[-4:]
    again = "the same command skips what is finished and tries these again"
    assert told[0] == f"fedpfl: 3 of 4 jobs failed; {again}"
    (line,) = (
        line
        for line in told
        if "need 120000 samples" in line and line.endswith("(nothing was written)")
    )
    assert "clients=5000" in line


# Signals


IMPORTING = """
import builtins, os, runpy, sys
(name, number), sys.argv[1:] = sys.argv[1:], []
real = builtins.__import__
def importing(name, *rest, **more):
    if name == "torch":
        os.kill(os.getpid(), int(number))
    return real(name, *rest, **more)
builtins.__import__ = importing
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("name", "number", "code", "told"),
    [
        ("fedpfl.train", signal.SIGINT, 130, "interrupted"),
        pytest.param("fedpfl.tune", signal.SIGTERM, 143, "terminated", marks=pytest.mark.full),
    ],
)
def test_a_signal_while_modules_are_imported_is_one_line(name, number, code, told, tmp_path):
    result = wait_for(start_process(name, str(int(number)), cwd=tmp_path, script=IMPORTING))
    assert (result.code, result.err) == (code, f"fedpfl: {told} before anything was done\n")
