"""Sweeps on machines that are taken away save all, on any launcher, and go on bit for bit."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.command import (
    Result,
    read_checkpoint,
    read_summary,
    run_command,
    start_process,
    wait_for,
)
from tests.record.test_damage import assert_ends_alike

pytestmark = [pytest.mark.slow, pytest.mark.full]

LONG = (
    *("rounds=3000", "clients=4", "participation=0.5", "partition.samples_per_client=24"),
    *("local.epochs=1", "eval.every=3000", "checkpoint.seconds=1e6", "model=mlp"),
)
SLOW = """
import time, torch
from fedpfl import Callback
real = torch.save
def slow(*given):
    time.sleep(3)  # longer than joblib needs to kill its workers
    real(*given)
torch.save = slow
CALLBACKS = [Callback]
"""
LINE = "fedpfl: {}; the same command goes on from the last checkpoint"
JOBLIB = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


def playing(process: subprocess.Popen[str], folder: Path, runs: int, rounds: int = 3) -> None:
    """Wait until so many runs have played so many rounds."""
    while sum(file.read_text().count("\n") > rounds for file in folder.rglob("rounds.csv")) < runs:
        assert process.poll() is None, wait_for(process).err
        time.sleep(0.02)


def ended(process: subprocess.Popen[str]) -> tuple[Result, float]:
    """How it ended, and the seconds that it took."""
    begun = time.monotonic()
    return wait_for(process), time.monotonic() - begun


def left(folder: Path) -> int:
    """Runs that have ended in order; all with a checkpoint but those just replacing states."""
    logs = [path.read_text() for path in folder.rglob("run.log")]
    places = [path.parent for path in folder.rglob("state.pt")]
    assert {read_summary(place)["status"] for place in places} == {"running"}
    assert all(int(read_checkpoint(place)["round"]) > 0 for place in places)
    return sum(log.endswith(" interrupted\n") for log in logs)


@pytest.mark.parametrize(
    ("words", "is_group_told", "number", "told", "runs"),
    [
        (("-m",), False, signal.SIGUSR2, "terminated", 1),
        (("-m", "hydra/launcher=lockstep"), True, signal.SIGUSR2, "terminated", 3),
        (JOBLIB, False, signal.SIGTERM, "terminated", 2),
        (JOBLIB, True, signal.SIGINT, "interrupted", 2),
    ],
)
def test_a_sweep_that_is_told_to_end_saves_all_its_runs(
    words, is_group_told, number, told, runs, tmp_path
):
    """Whether its process is told or, as by a terminal and Slurm, all of its group."""
    (tmp_path / "slow.py").write_text(SLOW)
    words = (*words, *LONG, "seed=1,2,3", "plugins=[slow.py]")
    process = start_process(*words, cwd=tmp_path, alone=True)
    playing(process, tmp_path, runs)
    (os.killpg if is_group_told else os.kill)(process.pid, number)
    result, seconds = ended(process)
    code = 130 if told == "interrupted" else 143
    assert (result.code, result.complaints) == (code, [LINE.format(told)]), result
    assert "Traceback" not in result.err
    assert seconds < 60
    assert left(tmp_path) == len(list(tmp_path.rglob("config.yaml"))) == runs


def test_a_search_that_is_told_to_end_saves_its_trial(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra tune")
    words = (*LONG, "method=fedprox", "trials=3", "seeds=2")
    process = start_process(*words, cwd=tmp_path, script="from fedpfl import tune; tune.main()")
    playing(process, tmp_path, 1)
    process.send_signal(signal.SIGUSR2)
    result, _ = ended(process)
    # After the search's title
    assert (result.code, result.complaints[1:]) == (143, [LINE.format("terminated")]), result
    assert left(tmp_path) == 1


def holder(run: Path) -> int:
    """The process that plays it."""
    return int((run / "run.lock").read_text())


def test_a_job_of_submitit_whose_time_is_up_is_queued_again_and_goes_on_bit_for_bit(tmp_path):
    """By submitit's local executor, which does with its jobs what Slurm does."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs the extra slurm")
    words = (*LONG, "rounds=100", "eval.every=100", "method=ditto", "seed=1")
    process = start_process("-m", "hydra/launcher=submitit_local", *words, cwd=tmp_path)
    playing(process, tmp_path, 1)
    (run,) = (path.parent for path in tmp_path.rglob("rounds.csv"))
    os.kill(holder(run), signal.SIGUSR2)
    result, _ = ended(process)
    assert result.code == 0, result
    (log,) = tmp_path.rglob("*_log.err")
    assert log.read_text().count(LINE.format("terminated")) == 1
    (done,) = re.findall(r"resumed +after round (\d+) of 100", log.read_text())
    assert 3 <= int(done) < 100
    assert run_command(*words, "hydra.run.dir=alone", cwd=tmp_path).code == 0
    assert_ends_alike(run, tmp_path / "alone")


def ray(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """A sweep on a cluster of this machine, with room for two jobs."""
    cluster = ("+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.remote.num_cpus=1")
    return start_process("-m", "hydra/launcher=ray", *cluster, *words, cwd=cwd)


def test_a_sweep_on_ray_outlives_its_own_end_and_that_of_a_worker(tmp_path, monkeypatch):
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs the extra ray")
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray leaves a token
    words = (*LONG, "rounds=100", "eval.every=100", "method=ditto")
    process = ray(*words, "seed=1,2,3", cwd=tmp_path)
    playing(process, tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    result, seconds = ended(process)
    assert (result.code, result.complaints) == (143, [LINE.format("terminated")]), result
    assert seconds < 90
    assert left(tmp_path) == 2
    process = ray(*words, "seed=1,2,3", "checkpoint.seconds=0", cwd=tmp_path)
    first = next(path.parent for path in tmp_path.rglob("state.pt"))
    while process.poll() is None and "resumed" not in (first / "run.log").read_text():
        time.sleep(0.02)
    os.kill(holder(first), signal.SIGKILL)
    result, _ = ended(process)
    assert result.code == 0, result
    assert (first / "run.log").read_text().count("resumed") == 2
    ends = [path.parent for path in tmp_path.rglob("state.pt")]
    assert len(ends) == 3
    for run in ends:
        seed = run.name.removeprefix("seed")
        place = f"hydra.run.dir=alone/{seed}"
        assert run_command(*words, f"seed={seed}", place, cwd=tmp_path).code == 0
        assert_ends_alike(run, tmp_path / "alone" / seed)
