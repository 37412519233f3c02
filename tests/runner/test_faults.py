"""Kills and file systems that refuse at any moment: the same command ends bit for bit the same."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest

from fedpfl.ground.errors import FedpflError
from fedpfl.report import load
from tests.command import TINY, play_run
from tests.conftest import keep_only, keep_quick
from tests.record.test_damage import assert_ends_as, refusal
from tests.runner.test_resume import die, start_child, wait_for_child

RUN = (*TINY, "rounds=6", "eval.every=2", "method=ditto")
KILLS = (8, 60)  # half of them at a random call to the file system, half at a random moment
FAULTS = (3, 8)  # refusals of each kind, at a random call to the file system
LIMITS = (0, 300, 2000, 40_000)  # bytes above which no file may grow


class KilledFile:
    """A file whose writes are counted; the last is half done."""

    def __init__(self, file: IO[bytes], killer: Killer):
        self.file, self.killer = file, killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> KilledFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> int:
        if self.killer.is_due():
            self.file.write(bytes(data)[: len(data) // 2])
            self.file.flush()
            die()
        return self.file.write(data)


class Killer:
    """Has its process die at a call to the file system: before it, after it, or half written."""

    def __init__(self, calls: int, chance: random.Random):
        self.calls, self.chance = calls, chance

    def is_due(self) -> bool:
        self.calls -= 1
        return self.calls == 0

    def arm(self) -> None:
        for name in ("open", "write", "fsync", "replace", "unlink", "ftruncate"):
            setattr(os, name, self.watch(name, getattr(os, name)))
        open_file = io.open

        def open_watched(*arguments: Any, **named: Any) -> Any:
            file = open_file(*arguments, **named)
            return KilledFile(file, self) if "wb" in arguments else file

        io.open = open_watched

    def watch(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.is_due():
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                elif self.chance.random() < 0.5:
                    real(*arguments, **named)
                die()
            return real(*arguments, **named)

        return call


def require_whole_files(run: Path) -> None:
    """What a kill left are whole files."""
    seen = load.inspect_directory(run, lambda _: False)
    reason = seen.reason
    try:
        if seen.run and (run / "clients.csv").exists():
            assert seen.run.clients is not None
    except FedpflError as error:
        reason = str(error)
    assert "not as" not in (reason or "")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    play_run(run, *RUN)
    return run


@pytest.mark.parametrize("kills", keep_quick(KILLS))
def test_killed_again_and_again_a_run_ends_as_if_it_never_was(kills, whole, tmp_path):
    chance, killed, done = random.Random(7), 0, 0
    while killed < kills:
        run, seconds = tmp_path / str(done), chance.uniform(0.02, 0.3)
        killer = Killer(chance.randrange(1, 100), chance) if killed % 2 == 0 else None

        def play(run: Path = run, killer: Killer | None = killer) -> None:
            require_whole_files(run)
            if killer:
                killer.arm()
            play_run(run, *RUN)

        child = start_child(play)
        if killer is None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        status = wait_for_child(child)
        assert status != 1, "a run that was killed does not go on"
        killed += status == -signal.SIGKILL
        # A new run now and then
        done += status == 0 or killed % 8 == 0
    runs = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(runs) >= kills // 10
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
@pytest.mark.parametrize("code", keep_quick([errno.ENOSPC, errno.EACCES, errno.EIO]))
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


@pytest.mark.parametrize("limit", keep_only(LIMITS, (300,)))
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
