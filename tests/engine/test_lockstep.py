"""Lockstep sweeps: jobs in one process whose backend calls are answered together, each as if it ran
alone. test_contract.py asks the same of the calls of every registered method.
"""

import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from fedpfl.config import plugins
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.engine import Engine, make_backend, make_initial_state
from fedpfl.engine.backends import lockstep
from fedpfl.engine.backends.backend import Backend
from fedpfl.engine.backends.lockstep import LockstepBackend, LockstepStage
from fedpfl.engine.backends.programs import ProgramCache
from fedpfl.engine.calls import TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import memory
from fedpfl.methods import Ditto, FedAvg, FedOBP, FedPer, LocalOnly
from fedpfl.runner import session
from hydra_plugins.fedpfl_lockstep import LockstepLauncher
from tests.command import (
    TINY,
    TINY_TASK,
    compose_once,
    read_checkpoint,
    read_summary,
    read_table,
    run_command,
)
from tests.conftest import (
    BACKENDS,
    COHORTS,
    CPU,
    LOCAL,
    ROOT,
    assert_close,
    assert_same,
    make_federation,
)

SWEEP = ("-m", *TINY, "hydra/launcher=lockstep")


class Echo(Backend):
    """Answers every call with itself, and keeps what came together."""

    name = "echo"

    def __init__(self):
        self.batches = []

    def run(self, calls):
        self.batches.append(sorted(calls))
        return list(calls)


def make_job(backend, questions):
    def run():
        shared = LockstepBackend(lockstep.current_stage.get(), backend)
        return [shared.run([question])[0] for question in questions]

    return run


@pytest.mark.parametrize(
    ("jobs", "batches"),
    [(8, [[0, 10, 20], [1, 21], [2]]), (2, [[0, 10], [1, 20], [2, 21]])],
    ids=["all jobs", "two at once"],
)
def test_calls_come_together_and_answers_go_back_to_their_askers(jobs, batches):
    """Where only so many run at once the next joins when one ends."""
    echo, questions = Echo(), [[0, 1, 2], [10], [20, 21], []]
    assert LockstepStage(jobs).play([make_job(echo, own) for own in questions]) == questions
    assert echo.batches == batches


def test_an_interrupt_between_two_answers_ends_every_job(monkeypatch):
    stage, echo, answered, give = LockstepStage(4), Echo(), [], Future.set_result

    def interrupted(self, answers):
        if len(answered) == 1:
            raise KeyboardInterrupt
        answered.append(answers)
        give(self, answers)

    monkeypatch.setattr(lockstep.Future, "set_result", interrupted)
    raised = []

    def play():
        try:
            stage.play([make_job(echo, [k, k]) for k in range(3)])
        except KeyboardInterrupt as error:
            raised.append(error)

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    thread.join(timeout=100)
    assert not thread.is_alive()
    assert raised


def test_as_many_jobs_run_together_as_memory_holds_and_a_larger_one_alone(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda device: (80, 100))
    stage, echo, sizes = LockstepStage(8), Echo(), [30, 30, 10, 50, 0]
    ask, most_questions = stage.ask, iter(range(100))
    monkeypatch.setattr(stage, "ask", lambda *question: (next(most_questions), ask(*question))[1])

    def make_admitted(size):
        def run():
            with stage.admit(size, CPU):
                return make_job(echo, [size] * 3)()

        return run

    assert stage.play([make_admitted(size) for size in sizes]) == [[size] * 3 for size in sizes]
    totals = {sum(batch) for batch in echo.batches}
    assert totals <= {0, 10, 30, 40, 50}
    assert 40 in totals


@pytest.mark.parametrize(
    ("devices", "chdir", "joins"),
    [
        (("auto", "cuda:0"), False, True),
        (("auto", "cpu"), False, False),
        (("auto",), False, False),
        (("auto", "auto"), True, False),
    ],
)
def test_several_runs_on_a_gpu_join_by_themselves(devices, chdir, joins, monkeypatch, capfd):
    launcher = LockstepLauncher(jobs=8, on_cpu=False)
    launcher.setup(
        hydra_context=None,
        task_function=None,
        config=OmegaConf.create({"hydra": {"job": {"chdir": chdir}}}),
    )
    configs = [SimpleNamespace(device=device) for device in devices]
    assert not launcher._should_join(configs)  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launcher._should_join(configs) == joins
    told = capfd.readouterr().err
    assert ("hydra/launcher=basic" in told) == joins
    assert told.count("\n") == joins


@pytest.mark.parametrize(
    ("words", "other", "shares"),
    [
        (("model=mlp",), "seed=2", True),
        (("model=mlp", "adapter=head"), "seed=2", False),
        (("model=wide",), "seed=2", False),
        (("model=mlp", "adapter=lora", "adapter.layers=[linear]"), "method=fedex_lora", False),
        (("model=mlp",), "rounds=3", False),
    ],
    ids=["built in", "frozen weights", "own", "residue", "facts"],
)
def test_only_runs_with_the_same_network_share_a_backend(words, other, shares, monkeypatch):
    """Frozen weights follow the seed, and so may what a user's network draws beside weights."""
    monkeypatch.setattr(session, "try_plugins", lambda *about: None)
    files = plugins.load_plugins([ROOT / "docs/mine.py"])
    stage, backends = LockstepStage(1), []
    common = (*TINY_TASK, *words, f"plugins={files}", "method=fedavg", "seed=1")
    for own in ((), (other,), ()):
        run = build_run(check_config(compose_once(*common, *own)))
        progress = SimpleNamespace(recorded_engine={}, state=SimpleNamespace(round=0))
        backends.append(session._make_backend(run, stage, progress)._backend)
    plugins.load_plugins([])
    assert backends[0] is backends[2]
    assert (backends[0] is backends[1]) == shares


ARGUMENTS = ("method=fedobp,ditto", "seed=2", "eval.finetune_epochs=1", "eval.finetune_every=1")


def test_a_lockstep_sweep_equals_its_runs_alone_bit_for_bit(tmp_path, monkeypatch):
    """With a GPU they take lockstep by themselves; this one is said to be there, and is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    admit, admitted = LockstepStage.admit, []
    record = lambda self, *states: (admitted.append(states), admit(self, *states))[1]  # noqa: E731
    monkeypatch.setattr(LockstepStage, "admit", record)
    result = run_command("-m", *TINY, *ARGUMENTS, cwd=tmp_path)
    assert result.code == 0, result.err
    assert len(admitted) == 2
    assert all(size > 10_000 and device == CPU for size, device in admitted)
    words = ("-m", *TINY, "hydra/launcher=basic", "hydra.sweep.dir=alone", *ARGUMENTS)
    run_command(*words, cwd=tmp_path)
    runs = [path.parent for path in tmp_path.glob("alone/**/rounds.csv")]
    assert len(runs) == 2
    for run in runs:
        twin = tmp_path / "outputs" / run.relative_to(tmp_path / "alone")
        assert read_table(run / "rounds.csv") == read_table(twin / "rounds.csv")
        assert read_summary(twin)["status"] == read_summary(run)["status"] == "finished"
        assert_same(read_checkpoint(run), read_checkpoint(twin))
        assert "in lockstep" not in (run / "run.log").read_text()
    told = [line for line in result.err.splitlines() if not line.startswith("sweep: run ")]
    starts = ["fedpfl: 2 runs ", "sweep: 1/2 done", "sweep: 2/2 done"]
    assert [line[:15] for line in told] == starts
    log = (next(tmp_path.glob("outputs/digits/ditto/*/seed2")) / "run.log").read_text()
    assert "of a sweep method=ditto" in log
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


def make_calls(methods, federation, net):
    """Return a call of each run, of its own seed, for its first round."""
    calls = []
    for seed, method in enumerate(methods):
        state = make_initial_state(method, net, federation.clients, CPU, seed=seed)
        draws = Draws(seed, "train", 1)
        calls.append(TrainCall(method, federation, state, COHORTS[seed % 3], LOCAL, draws))
    return calls


def test_plain_methods_train_as_one_program_and_others_with_their_equals(
    federation, net, monkeypatch
):
    """But for another learning rate or data set; rounds of one schedule share a program."""
    methods = [FedAvg(), FedOBP(q=0.5), FedOBP(q=0.9), FedPer(), LocalOnly()]
    methods += [Ditto(lam=lam) for lam in (0.3, 0.3, 2.0)]
    calls = make_calls(methods, federation, net)
    calls[1] = replace(calls[1], local=replace(LOCAL, lr=0.01))
    calls[2] = replace(calls[2], federation=make_federation(seed=5))
    schedule = replace(LOCAL, decay=0.5)
    for k, number in ((3, 1), (4, 4)):
        calls[k] = replace(calls[k], local=schedule.for_round(number, 9))
    rows, run = [], ProgramCache.run
    monkeypatch.setattr(
        ProgramCache, "run", lambda self, job: rows.append(len(job.rows)) or run(self, job)
    )
    backend = make_backend(Engine("batched"), net, CPU)
    together = backend.run(calls)
    plain, other_rate, other_data, scheduled, two_equal_dittos, ditto = 5, 5, 5, 10, 10, 5
    # A program that fails would be answered run by run, in more programs.
    assert rows == [plain, other_rate, other_data, scheduled, two_equal_dittos, ditto]
    for answer, call in zip(together[3:6], calls[3:6], strict=True):
        assert_close(answer, backend.run([call])[0], atol=2e-5, rtol=1e-4)


@dataclass(frozen=True)
class Broken(FedAvg):
    """Fails at its first batch."""

    def loss(self, server, client, net, params, batch):
        raise ZeroDivisionError("broken")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_that_fails_takes_nobody_down(backend, federation, net):
    calls = make_calls([FedAvg(), Broken(), FedOBP(q=0.5)], federation, net)
    runner = make_backend(Engine(backend), net, CPU)
    answers = runner.run(calls)
    assert isinstance(answers[1], ZeroDivisionError)
    for k in (0, 2):
        assert_close(answers[k], runner.run([calls[k]])[0], atol=2e-5, rtol=1e-4)
    with pytest.raises(ZeroDivisionError, match="broken"):
        runner.run_one(calls[1])
