"""Kills and file systems that refuse at any moment: the same command ends bit for bit the same."""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedpfl.ground.errors import FedpflError
from fedpfl.report import load
from tests.command import TINY, play_run
from tests.conftest import keep_quick
from tests.record.test_damage import assert_ends_as, refusal
from tests.runner.test_resume import die, start_child, wait_for_child

RUN = (*TINY, "rounds=4", "eval.every=2", "method=ditto")
KILLS = (8, 60)  # half of them at a random call to the file system, half at a random moment
FAULTS = (3, 8)  # refusals of each kind, at a random call to the file system


CALLS = ("open", "write", "fsync", "replace", "unlink", "ftruncate", "mkdir")


@contextmanager
def watching(answer: Callable[..., Any]) -> Iterator[None]:
    """Have `answer(name, call, *arguments)` stand for each call to the file system.

    `call()` makes it.
    """

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            return answer(name, partial(real, *arguments, **named), *arguments)

        return call

    opened = watched("io.open", io.open)
    with (
        mock.patch.multiple(os, **{name: watched(name, getattr(os, name)) for name in CALLS}),
        mock.patch.object(io, "open", opened),
        mock.patch.object(builtins, "open", opened),
    ):
        yield


class Killer:
    """Has its process die at a call to the file system: before it, after it, or half written."""

    def __init__(self, calls: int, chance: random.Random):
        self.calls, self.chance, self.write = calls, chance, os.write

    def is_due(self) -> bool:
        self.calls -= 1
        return self.calls == 0

    def answer(self, name: str, call: Callable[[], Any], *arguments: Any) -> Any:
        if name == "io.open":
            return KilledFile(call().detach(), self) if "wb" in arguments else call()
        if self.is_due():
            if name == "write":
                self.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif self.chance.random() < 0.5:
                call()
            die()
        return call()


class KilledFile(io.BufferedWriter):
    """A file whose writes are counted; the last is half done."""

    def __init__(self, raw: Any, killer: Killer):
        super().__init__(raw)
        self.killer = killer

    def write(self, data: Any) -> int:
        if self.killer.is_due():
            super().write(bytes(data)[: len(data) // 2])
            self.flush()
            die()
        return super().write(data)


def require_whole_files(run: Path) -> None:
    """What a kill left are whole files."""
    seen = load.inspect_directory(run)
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
            with watching(killer.answer) if killer else nullcontext():
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

    def answer(name: str, call: Callable[[], Any], place: Any, *_: Any) -> Any:
        nonlocal refused
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)
        if str(folder) in path:
            calls.append(name)
            if len(calls) == at:
                refused = name
            if name == refused:
                raise OSError(code, os.strerror(code), None if isinstance(place, int) else path)
        return call()

    with watching(answer):
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
            # The run has begun, or left nothing but its lock.
            assert (run / "summary.json").exists() or {*os.listdir(run)} <= {"run.lock"}
        play_run(run, *RUN)
        assert_ends_as(run, whole)
        shutil.rmtree(run)
    assert told >= faults // 2  # the log, or a directory that cannot be synced, stops no run
