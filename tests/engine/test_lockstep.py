"""Lockstep sweeps: jobs in one process whose backend calls are answered together, each as if it ran
alone.
"""

import signal
import threading
import time

import pytest

from fedpfl.engine.backends import lockstep
from fedpfl.engine.backends.backend import Backend
from fedpfl.engine.backends.lockstep import LockstepBackend, LockstepStage
from tests.command import (
    TINY,
    read_checkpoint,
    read_summary,
    read_table,
    run_command,
    start_process,
    wait_for,
)
from tests.conftest import assert_same

SWEEP = ("-m", *TINY, "hydra/launcher=lockstep")


class Echo(Backend):
    """Answers every call with itself, and keeps what came together."""

    name = "echo"

    def __init__(self):
        self.batches = []

    def run(self, calls):
        self.batches.append(sorted(calls))
        return list(calls)


def job(stage, backend, questions):
    def run():
        shared = LockstepBackend(lockstep.current_stage.get(), backend)
        return [shared.run([question])[0] for question in questions]

    return run


def test_calls_of_all_jobs_come_together_and_answers_go_back_to_their_askers():
    stage, echo = LockstepStage(8), Echo()
    questions = [[10 * k + i for i in range(n)] for k, n in enumerate((3, 1, 2, 0))]
    assert stage.play([job(stage, echo, own) for own in questions]) == questions
    assert echo.batches == [[0, 10, 20], [1, 21], [2]]


def test_only_so_many_jobs_at_once_and_the_next_joins_when_one_ends():
    stage, echo = LockstepStage(2), Echo()
    questions = [[0, 1], [10], [20, 21]]
    assert stage.play([job(stage, echo, own) for own in questions]) == questions
    assert echo.batches == [[0, 10], [1, 20], [21]]


def test_only_one_job_moves_at_a_time():
    stage, inside, most = LockstepStage(8), [], []

    def busy():
        inside.append(1)
        time.sleep(0.002)
        most.append(len(inside))
        inside.pop()

    stage.play([busy] * 5)
    assert max(most) == 1


def test_what_a_job_raises_is_its_result():
    stage, echo = LockstepStage(4), Echo()

    def fails():
        LockstepBackend(stage, echo).run([7])
        raise ValueError("no")

    good, bad = stage.play([job(stage, echo, [1, 2]), fails])
    assert good == [1, 2]
    assert isinstance(bad, ValueError)


@pytest.mark.parametrize("given", [0, 1, 2])
def test_an_interrupt_between_two_answers_ends_every_job(given, monkeypatch):
    stage, echo, answered, give = LockstepStage(4), Echo(), [], LockstepStage._finish_request

    def interrupted(self, request, answers):
        if len(answered) == given and not isinstance(answers, BaseException):
            raise KeyboardInterrupt
        answered.append(answers)
        give(self, request, answers)

    monkeypatch.setattr(LockstepStage, "_finish_request", interrupted)
    raised = []

    def play():
        try:
            stage.play([job(stage, echo, [k, k]) for k in range(3)])
        except KeyboardInterrupt as error:
            raised.append(error)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    thread.join(timeout=100)
    assert not thread.is_alive()
    assert raised


def test_what_jobs_share_is_made_once():
    stage, made = LockstepStage(1), []
    first, again, other = (
        stage.share(key, lambda: made.append(1) or object()) for key in ("a", "a", "b")
    )
    assert first is again is not other
    assert len(made) == 2


def same_runs(cwd, arguments, *, ended="finished"):
    """Every run of the sweep equals the one without the launcher, in rows, checkpoint and summary."""
    alone = run_command("-m", *TINY, "hydra.sweep.dir=alone", *arguments, cwd=cwd)
    runs = sorted(path.parent for path in (cwd / "alone").rglob("rounds.csv"))
    for run in runs:
        twin = cwd / "outputs" / run.relative_to(cwd / "alone")
        assert read_table(run / "rounds.csv") == read_table(twin / "rounds.csv")
        assert read_summary(twin)["status"] == read_summary(run)["status"] == ended
        assert_same(read_checkpoint(run), read_checkpoint(twin))
    return alone, runs


ARGUMENTS = ("method=fedobp,ditto", "seed=2", "eval.finetune_epochs=1", "eval.finetune_every=1")


def test_a_lockstep_sweep_equals_its_runs_alone_bit_for_bit(tmp_path):
    result = run_command(*SWEEP, *ARGUMENTS, cwd=tmp_path)
    assert result.code == 0, result.err
    assert len(same_runs(tmp_path, ARGUMENTS)[1]) == 2
    told = [line for line in result.err.splitlines() if not line.startswith("sweep: run ")]
    assert [line[:15] for line in told] == [f"sweep: {done}/2 done" for done in (1, 2)]
    folder = next(tmp_path.glob("outputs/digits/ditto/*/seed2"))
    value = f"all clients {read_summary(folder)['last']['accuracy']:.2f} % (fine-tuned "
    assert sum(f"  method=ditto: {value}" in line for line in told) == 1
    log = (folder / "run.log").read_text()
    assert "of a sweep method=ditto" in log
    assert "model mlp" in log
    assert "loop in lockstep on cpu" in log
    assert result.out.startswith("Digits, Dir(0.1)\n")


def test_a_job_that_cannot_start_and_one_that_diverges_take_nobody_down(tmp_path):
    result = run_command(*SWEEP, "method=fedavg", "seed=1", "local.lr=-1,0.01,1e30", cwd=tmp_path)
    assert result.code in (2, 3)
    told = [line for line in result.err.splitlines() if line.startswith("sweep:")]
    for failure in ("-1: failed: local.lr must be a positive", "1e+30: failed: training diverged"):
        assert sum(f"local.lr={failure}" in line for line in told) == 1
    statuses = sorted(
        read_summary(path.parent)["status"] for path in tmp_path.rglob("summary.json")
    )
    assert statuses == ["diverged", "finished"]


KILLED = """
import os, signal
from fedpfl import train
from fedpfl.record import rundir
real, saved = rundir.RunDirectory.checkpoint, []
def save(self, payload):
    real(self, payload)
    saved.append(payload["round"])
    if len(saved) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
rundir.RunDirectory.checkpoint = save
train.main()
"""
"""A sweep that is killed from within, when two runs have some of their rounds."""


@pytest.mark.full
def test_killed_and_started_again_each_job_resumes(tmp_path):
    own = ("rounds=4", "seed=1,2,3")
    arguments = (*SWEEP, *own, "hydra.launcher.jobs=2")
    assert wait_for(start_process(*arguments, cwd=tmp_path, script=KILLED)).code == -signal.SIGKILL
    result = run_command(*arguments, cwd=tmp_path)
    assert result.code == 0, result.err
    assert "resumed" in result.err
    same_runs(tmp_path, own)
    again = run_command(*arguments, cwd=tmp_path)
    assert again.err.count("already finished") == 3


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("hydra.launcher.jobs=0", "hydra.launcher.jobs must be 1 or more, got 0"),
        ("hydra.job.chdir=true", "hydra.job.chdir must be false with hydra/launcher=lockstep"),
    ],
)
def test_what_cannot_work_is_one_line(tmp_path, argument, message):
    result = run_command(*SWEEP, argument, cwd=tmp_path)
    assert result.code == 2
    assert len(result.complaints) == 1
    assert message in result.complaints[0]
    assert not (tmp_path / "outputs").exists()
