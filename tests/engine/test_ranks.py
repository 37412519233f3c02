"""One run on several processes: each goes on with what one process alone would have, and one of
them tells.

Processes are torchrun's where it has a part in what is asked; else they get its environment, which
is quicker.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fedpfl.engine import Engine, FineTuning, Stopping, make_backend
from fedpfl.engine.backends import ranks
from fedpfl.engine.backends import selection as select
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS
from fedpfl.runner.loop import find_trained_clients
from fedpfl.testing import toy
from tests.command import (
    TINY,
    TINY_TASK,
    Result,
    _environment,
    _heed_interrupts,
    keep_last_words,
    read_checkpoint,
    read_summary,
    rewrite_summary,
    run_command,
    snapshot,
    wait_for,
)
from tests.conftest import (
    CPU,
    LOCAL,
    SETTINGS,
    assert_same,
    flatten,
    keep_quick,
    make_federation,
    record_rounds,
    tiny,
)
from tests.record.test_damage import assert_ends_alike

TOOLS = """
import io, json, os, signal, sys
from pathlib import Path
import torch
from fedpfl import train
from fedpfl.ground import files
from fedpfl.methods import METHODS
from fedpfl.record import rundir
from tests.command import run_command
from tests.runner.test_resume import append_half as half, die, die_after as after
from tests.runner.test_resume import replace_call as wrap, save_half as torn
"""

TRAIN, TEST = (40, 7, 33, 2, 65, 1), (12, 3, 9, 0, 14, 1)
COHORTS = [[0, 2, 3, 5], [0, 1, 4, 5]]
SHORT = replace(LOCAL, epochs=1)
FEW = ("seqfededt", "fedamp")
"""Turns of a single client; models of others."""
RUN = (
    *(*TINY_TASK, "rounds=4", "partition.samples_per_client=60", "eval.every=2"),
    *("method=fedobp", "quantile.q=0.9", "eval.finetune_epochs=1", "eval.finetune_every=4"),
    *("hydra.run.dir=run", "model=lenet5"),
)


# Who takes which client


@pytest.mark.parametrize(
    ("name", "gpus", "chosen"),
    [
        *(("auto", 4, "cuda:3"), ("cuda", 4, "cuda:3"), ("auto", 0, "cpu"), ("cpu", 4, "cpu")),
        ("auto", 2, "device=auto: 4 processes on 2 GPUs; use --nproc_per_node=2"),
    ],
)
def test_each_process_of_a_machine_has_a_gpu_of_its_own(name, gpus, chosen, monkeypatch):
    for key, value in environment(7, 8, 0).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if chosen.startswith("device"):
        with pytest.raises(FedpflError, match=chosen):
            select.find_device(name)
    else:
        assert select.find_device(name) == torch.device(chosen)


def test_cores_are_divided_among_the_processes_of_a_machine_and_a_stray_rank_means_nothing(
    monkeypatch,
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (ranks.is_launched_by_torchrun(), ranks.available_cores()) == (False, 9)
    for key, value in environment(1, 2, 0).items():
        monkeypatch.setenv(key, value)
    assert (ranks.is_launched_by_torchrun(), ranks.available_cores()) == (True, 4)
    assert make_backend(Engine("loop"), tiny(), CPU)._pool._max_workers == 4


# What processes come to


PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def environment(rank: int, count: int, port: int) -> dict[str, str]:
    """As torchrun makes it."""
    numbers = {"RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
    numbers |= {f"LOCAL_{name}": numbers[name] for name in ("RANK", "WORLD_SIZE")}
    found = {name: str(number) for name, number in numbers.items()}
    return {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1", **found}


def written(script: str, cwd: Path) -> str:
    """Where the script is, beside the folder."""
    place = cwd.with_suffix(".py")
    place.write_text(script)
    return str(place)


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_rank(
    rank: int, count: int, port: int, script: str, *arguments: str, cwd: Path
) -> subprocess.Popen[str]:
    """Start the script as one of so many processes, which find each other."""
    own = {**_environment(), **environment(rank, count, port)}
    return subprocess.Popen(
        [sys.executable, written(script, cwd), *arguments], env=own, cwd=cwd, **PIPES
    )


def processes(count: int, script: str, *arguments: str, cwd: Path) -> list[Result]:
    """The script in so many processes."""
    port = find_port()
    started = [start_rank(rank, count, port, script, *arguments, cwd=cwd) for rank in range(count)]
    return [wait_for(process) for process in started]


def played(names: list[str], engine: str = "loop") -> dict[str, torch.Tensor]:
    """Every state, outcome and evaluation of two rounds of each method, with BatchNorm and early
    stopping.
    """
    found, federation, net = {}, make_federation(TRAIN, TEST), tiny(norm=True)
    for name in names:
        method = METHODS[name](**SETTINGS.get(name, [{}])[0])
        told = Engine(engine, workers=1)
        values = {"engine": told, "local": SHORT, "stopping": Stopping(early=True)}
        states, outcomes = record_rounds(method, net, federation, COHORTS, **values)
        last, adapt = states[-1], FineTuning(SHORT, Draws(0, "adapt", 2))
        about = (method, federation, last, list(range(6)))
        backend = toy.make_backend(told, net, CPU)
        tuned = backend.evaluate(
            EvalCall(*about, FineTuning(SHORT, Draws(0, "finetune", 2)), adapt)
        )
        counts = [backend.evaluate(EvalCall(*about, before_evaluation=adapt)), tuned]
        trained = torch.tensor(sorted(find_trained_clients(last)))
        found[name] = [states, [vars(outcome) for outcome in outcomes], counts, [trained]]
    return {path: torch.as_tensor(leaf) for path, leaf in flatten(found).items()}


def play_part(engine: str, names: list[str]) -> dict[str, torch.Tensor]:
    """Play as one of the processes."""

    def distribute(*about: Any) -> Any:
        return ranks.distribute_backend(make_backend(*about), CPU)

    ranks.join_process_group()
    with mock.patch.object(toy, "make_backend", distribute):
        found = played(names, engine)
    ranks.leave_process_group()
    return found


PLAY = """
import sys
import torch
from tests.engine.test_ranks import play_part
torch.save(play_part(sys.argv[2], sys.argv[3:]), sys.argv[1])
"""


@pytest.fixture(scope="module")
def together(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., list[dict[str, torch.Tensor]]]:
    """What each of so many processes has seen; this one is process 0."""

    @cache
    def see(count: int, engine: str, *names: str) -> list[dict[str, torch.Tensor]]:
        cwd = tmp_path_factory.mktemp("together")
        port, threads = find_port(), torch.get_num_threads()
        others = [
            start_rank(rank, count, port, PLAY, f"{rank}.pt", engine, *names, cwd=cwd)
            for rank in range(1, count)
        ]
        with mock.patch.dict(os.environ, environment(0, count, port)):
            found = [play_part(engine, list(names))]
        torch.set_num_threads(threads)
        for result in map(wait_for, others):
            assert (result.code, result.err) == (0, ""), result
        return found + [torch.load(cwd / f"{rank}.pt") for rank in range(1, count)]

    return see


@pytest.mark.parametrize(("count", "names"), keep_quick([(2, FEW), (2, METHODS), (3, METHODS)]))
def test_every_process_sees_what_one_alone_would_bit_for_bit(count, names, together):
    alone = played(list(names))
    assert len(alone) > 50 * len(names)
    for found in together(count, "loop", *names):
        assert_same(found, alone)


# The command


def torchrun(
    count: int,
    *arguments: str,
    cwd: Path,
    script: str | None = None,
) -> subprocess.Popen[str]:
    """`torchrun -m fedpfl.train`, or a script that ends in it."""
    what = [written(script, cwd)] if script else ["-m", "fedpfl.train"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={count}"]
    command += [*what, *keep_last_words(*arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=_environment(), preexec_fn=_heed_interrupts, **PIPES
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of one process."""
    place = tmp_path_factory.mktemp("alone")
    assert run_command(*RUN, cwd=place).code == 0
    return place / "run"


@pytest.mark.full
def test_a_run_on_several_processes_is_that_of_one_and_process_0_alone_writes_and_talks(
    tmp_path, alone
):
    """Also one that goes on from a checkpoint, and one that has ended."""
    result = wait_for(torchrun(2, *RUN, "hydra.output_subdir=.hydra", cwd=tmp_path))
    assert result.code == 0, result.err
    assert_ends_alike(tmp_path / "run", alone)
    for words in ("loop in 2 processes on cpu", "finished after round 4"):
        assert result.err.count(words) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    shutil.rmtree(tmp_path / "run" / ".hydra")
    assert {*snapshot(tmp_path / "run")} == {*snapshot(alone)}

    rewrite_summary(tmp_path / "run", status="running")
    for count, said in ((3, "resumed     after round 4 of 4"), (2, "already finished")):
        result = wait_for(torchrun(count, *RUN, "state.device=disk", cwd=tmp_path))
        assert (result.code, (result.out + result.err).count(said)) == (0, 1), result
        assert_ends_alike(tmp_path / "run", alone)


KILLS = [
    (0, "wrap(METHODS['fedobp'], 'finish', 3, after)", 2, None),
    (0, "wrap(torch, 'save', 2, torn)", 3, 1),
    (1, "wrap(train.session, 'build_run', 1, after)", 3, None),
    (1, "wrap(rundir.NullRunDirectory, 'checkpoint', 2, after)", 1, 2),
]
"""A rank, how it kills itself, how many processes go on, and from which round, where it is known."""
SLOW = """
import time
rundir.NullRunDirectory.checkpoint = lambda *_: None
if {rank}:  # process 0 takes long for its second checkpoint
    wrap(torch, 'save', 2, lambda real, *given: time.sleep(2) or real(*given))
if os.environ['RANK'] == '{rank}':
    {kill}
train.main()
"""


@pytest.mark.full
@pytest.mark.parametrize(("rank", "kill", "count", "saved_round"), KILLS)
def test_a_killed_process_ends_all_in_one_line_and_any_number_goes_on(
    rank, kill, count, saved_round, tmp_path, alone
):
    script, run = TOOLS + SLOW.format(rank=rank, kill=kill), tmp_path / "run"
    result = wait_for(torchrun(2, *RUN, cwd=tmp_path, script=script))
    assert result.code != 0
    assert "Signal 9 (SIGKILL)" in result.err
    (line,) = result.complaints
    assert line.endswith("; the same command goes on from the last checkpoint")
    assert not (run / "summary.json").exists() or read_summary(run)["status"] == "running"
    assert not list(run.glob(".*.tmp")) or rank == 0
    if saved_round:
        assert int(read_checkpoint(run)["round"]) == saved_round
    if count > 1:
        resumed = wait_for(torchrun(count, *RUN, cwd=tmp_path))
    else:
        resumed = run_command(*RUN, cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert_ends_alike(run, alone)
    assert ("resumed" in resumed.err) == ("build_run" not in kill)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_in_one_line(number, tmp_path):
    words = (*TINY, "rounds=3000", "hydra.run.dir=run", "checkpoint.seconds=0")
    process = torchrun(2, *words, cwd=tmp_path)
    rounds = tmp_path / "run" / "rounds.csv"
    while not (rounds.exists() and rounds.read_text().count("\n") > 2):
        assert process.poll() is None, wait_for(process).err
        time.sleep(0.05)
    process.send_signal(number)
    result = wait_for(process)
    assert result.code != 0
    told = "interrupted" if number == signal.SIGINT else "terminated"
    line = f"fedpfl: {told}; the same command goes on from the last checkpoint"
    assert result.complaints == [line]
    assert read_summary(tmp_path / "run")["status"] == "running"
    assert int(read_checkpoint(tmp_path / "run")["round"]) > 1


BAD = """
import os
from fedpfl import train
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, FedOBP, FedAvg
class Bad(FedOBP):
    {}
METHODS["fedobp"] = Bad
train.main()
"""
RAISES = BAD.format("""
    def before_training(self, *given):
        class Local(Exception):  # which no other process can read
            pass
        if os.environ["RANK"] == "1":
            raise Local("no such luck")
        return super().before_training(*given)
""")
ROUNDS = BAD.format("""
    def aggregate(self, *given):
        server, own = super().aggregate(*given)
        return {name: leaf + 1e-7 * int(os.environ["RANK"]) for name, leaf in server.items()}, own
""")


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "code", "line"),
    [
        (
            RAISES,
            1,
            "method=fedobp: Bad.before_training raised RuntimeError: Local: no such luck (",
        ),
        (ROUNDS, 2, "after round 1 process 1 has another server state than process 0;"),
    ],
)
def test_what_fails_in_one_process_is_told_once_and_in_the_log(script, code, line, tmp_path):
    results = processes(2, script, *RUN, cwd=tmp_path)
    assert [result.code for result in results] == [code, code], results
    (told,) = [complaint for result in results for complaint in result.complaints]
    assert line in told
    assert "Traceback" not in "".join(result.err for result in results)
    assert read_summary(tmp_path / "run")["status"] == "failed"
    log = (tmp_path / "run" / "run.log").read_text()
    assert script is ROUNDS or "in another process:\nTraceback" in log


OTHER = (
    "import os, sys\nif os.environ['RANK'] == '1': sys.argv.append('{}')\nfrom fedpfl import"
    " train\ntrain.main()"
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "words", "line"),
    [
        (OTHER.format("rounds=2"), "seed=1", "process 1 has configuration "),
        (OTHER.format("seed=3"), "-m seed=1,2", "torchrun starts one run, and no sweep; "),
    ],
)
def test_what_cannot_work_is_one_line_and_writes_nothing(script, words, line, tmp_path):
    results = processes(2, script, *RUN, *words.split(), cwd=tmp_path)
    assert all(result.code for result in results), results
    (told,) = [line for result in results for line in result.err.splitlines()]
    assert told.startswith(f"fedpfl: {line}")
    assert not list(tmp_path.iterdir())
