"""Kills and file systems that refuse at any moment: the same command ends bit for bit the same."""

import errno
import io
import json
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedpfl.ground.errors import FedpflError
from tests.command import TINY, play_run, start_process, wait_for
from tests.conftest import keep_only, keep_quick
from tests.record.test_damage import assert_ends_as, refusal

RUN = (*TINY, "rounds=6", "eval.every=2", "method=ditto")
KILLS = 60  # half of them at a random call to the file system, half at a random moment
FAULTS = (3, 8)  # refusals of each kind, at a random call to the file system
LIMITS = (0, 1, 100, 300, 700, 2000, 10_000, 40_000)  # bytes above which no file may grow

DRIVER = """
import io, os, random, signal, sys, time
from pathlib import Path
import torch
from fedpfl.report.load import inspect_directory
from tests.command import play_run

place, kills, overrides = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
torch.set_num_threads(1)  # there must be none that a child would miss
play_run(place / "whole", *overrides)  # loads all that children would load
chance = random.Random(7)

left = 0

def due():
    global left
    left -= 1
    return left == 0

def die(): os.kill(os.getpid(), signal.SIGKILL)

class Counted:
    "A file whose writes are counted; the last is half done."
    def __init__(self, file): self.file = file
    def __getattr__(self, name): return getattr(self.file, name)
    def __enter__(self): return self
    def __exit__(self, *error): self.file.close()
    def write(self, data):
        if due():
            self.file.write(bytes(data)[: len(data) // 2])
            self.file.flush()
            die()
        return self.file.write(data)

def kill_at(number):
    "Let the process die at its n-th call to the file system: before it, after it, or half written."
    global left
    left = number
    for name in ("open", "write", "fsync", "replace", "unlink", "ftruncate"):
        def counted(*args, real=getattr(os, name), name=name, **named):
            if due():
                if name == "write":
                    real(args[0], args[1][: len(args[1]) // 2])
                elif chance.random() < 0.5:
                    real(*args, **named)
                die()
            return real(*args, **named)
        setattr(os, name, counted)
    real_open = io.open
    io.open = lambda *args, **named: Counted(real_open(*args, **named)) if "wb" in args else real_open(*args, **named)

def read(run):
    "What a kill left are whole files."
    seen = inspect_directory(run, lambda _: False)
    told = seen.reason
    try:
        if seen.run and (run / "clients.csv").exists():
            seen.run.clients
    except Exception as error:
        told = str(error)
    assert "not as" not in told, told

done = killed = finished = 0
while killed < kills:
    run, at, seconds = place / str(done), chance.randrange(1, 100), chance.uniform(0.02, 0.3)
    by_call = killed % 2 == 0
    child = os.fork()
    if not child:
        try:
            read(run)
            if by_call:
                kill_at(at)
            play_run(run, *overrides)
            os._exit(0)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
    if not by_call:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 1:
        sys.exit("a run that was killed does not go on")
    killed += status == -signal.SIGKILL
    done += status == 0 or killed % 8 == 0  # a new run now and then
print(killed, done)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    play_run(run, *RUN)
    return run


@pytest.mark.full
def test_killed_again_and_again_a_run_ends_as_if_it_never_was(whole: Path, tmp_path: Path) -> None:
    result = wait_for(start_process(str(tmp_path), str(KILLS), *RUN, cwd=tmp_path, script=DRIVER))
    assert result.code == 0, result
    assert int(result.out.split()[0]) == KILLS
    runs = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(runs) >= KILLS // 10
    for run in runs:
        play_run(run, *RUN)
        assert_ends_as(run, whole)
        assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}


@contextmanager
def refusing(folder: Path, at: int | None, code: int = 0) -> Iterator[list[str]]:
    """The file system refuses the call number `at` that has to do with the folder, and all later
    ones of that name.

    Yields the names of the calls that were made.
    """
    calls: list[str] = []
    refused = ""

    def concerned(argument: Any) -> bool:
        if isinstance(argument, int):
            return str(folder) in os.readlink(f"/proc/self/fd/{argument}")
        return str(folder) in str(argument)

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            nonlocal refused
            if concerned(args[0]):
                calls.append(name)
                if len(calls) == at:
                    refused = name
                if name == refused:
                    raise OSError(
                        code, os.strerror(code), None if isinstance(args[0], int) else str(args[0])
                    )
            return real(*args, **named)

        return call

    names = ("open", "write", "fsync", "replace", "unlink", "ftruncate", "mkdir")
    with (
        mock.patch.multiple(os, **{name: watched(name, getattr(os, name)) for name in names}),
        mock.patch.object(io, "open", watched("io.open", io.open)),
    ):
        yield calls


@pytest.mark.parametrize("faults", keep_quick(FAULTS))
@pytest.mark.parametrize(
    "code",
    keep_quick([errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.EFBIG]),
)
def test_a_file_system_that_refuses_is_one_line_and_loses_nothing(code, faults, whole, tmp_path):
    with refusing(tmp_path / "run", None) as calls:
        play_run(tmp_path / "run", *RUN)
    chance, told = random.Random(code), 0
    for number in range(faults):
        run = tmp_path / str(number)
        at = chance.randrange(15 if number < 3 * faults / 8 else len(calls))
        with refusing(run, at + 1, code) as made:
            line = refusal(run, *RUN)
        assert not line or (
            line.startswith(("cannot write ", "cannot read ")) and os.strerror(code) in line
        ), line
        told += bool(line)
        assert made[: at + 1] == calls[: at + 1]
        if calls[at] != "unlink" and run.exists():
            assert not list(run.glob(".*.tmp"))
            assert (run / "summary.json").exists() or not list(
                run.iterdir()
            )  # the run has begun, or left nothing
        play_run(run, *RUN)
        assert_ends_as(run, whole)
        shutil.rmtree(run)
    assert told >= faults // 2  # the log, or a directory that cannot be synced, stops no run


@pytest.mark.parametrize("limit", keep_only(LIMITS, (0, 300)))
def test_a_quota_is_one_line_and_loses_nothing(limit: int, whole: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = tmp_path / "run"
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(FedpflError, match=r"^cannot write .*: File too large; ") as error:
            play_run(run, *RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(error.value)
    assert not list(run.glob(".*.tmp"))
    if not (run / "summary.json").exists():
        assert not list(run.iterdir())
    play_run(run, *RUN)
    assert_ends_as(run, whole)
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
