"""Killed at any moment, the same command ends bit for bit as one that was never killed."""

import io
import itertools
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

from fedpfl.engine.store import Rows
from fedpfl.ground import interrupts
from fedpfl.record import rundir
from fedpfl.runner import resume
from tests.command import (
    TINY_TASK,
    play_run,
    read_checkpoint,
    read_summary,
    read_table,
    rewrite_summary,
    run_command,
    snapshot,
)
from tests.conftest import assert_same
from tests.record.test_damage import assert_ends_alike, interrupt

SETTINGS = {
    "fedobp": ("method=fedobp", "quantile.q=0.9", "method.ema=0.3"),
    "ditto": (
        *("method=ditto", "method.personal_epochs=2"),
        # What is frozen is drawn again
        *("adapter=lora", "adapter.rank=2", "adapter.layers=[linear]"),
    ),
}
COMMON = (
    *TINY_TASK,
    *("rounds=4", "partition.samples_per_client=80", "local.batch_size=16", "eval.every=2"),
    *("hydra.run.dir=run", "eval.finetune_epochs=1", "eval.finetune_every=4", "model=mlp"),
    "model.hidden=[16]",
)


# ---- Kills


def start_child(action: Callable[[], object]) -> int:
    """Begin to do something in a child of this process, which has loaded all; return its number."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(600)  # a child that hangs would be waited for
            action()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def wait_for_child(child: int) -> int:
    """Return its exit status: 1 where it raised something, below 0 where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def replace_call(owner: Any, name: str, count: int, action: Callable[..., Any]) -> None:
    """Have call number `count` of a function do something else; the others do as before."""
    real = getattr(owner, name)
    numbers = itertools.count(1)

    def call(*arguments: Any, **named: Any) -> Any:
        if next(numbers) == count:
            return action(real, *arguments, **named)
        return real(*arguments, **named)

    setattr(owner, name, call)


def die_after(real: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    real(*arguments, **named)
    die()


def save_half(real: Callable[..., Any], value: Any, file: BinaryIO) -> None:
    whole = io.BytesIO()
    real(value, whole)
    file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    file.flush()
    die()


def append_half(real: Callable[..., Any], file: int, data: bytes) -> None:
    os.write(file, data[: len(data) // 2])
    die()


def finish(cwd: Path, *overrides: str) -> str:
    result = run_command(*overrides, cwd=cwd)
    assert result.code == 0, result
    return result.err


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run directory of each method."""
    done = {}
    for method, settings in SETTINGS.items():
        place = tmp_path_factory.mktemp(method)
        finish(place, *COMMON, *settings)
        done[method] = place / "run"
    return done


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["fedobp", "fedselect", "fedpac", "knn_per"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_gives_the_same_bits_each_time(method, precision, tmp_path):
    """Of two runs and a resumed one; with graphs, which are captured anew after the resumption."""
    words = [
        *TINY_TASK,
        *("rounds=4", "model=cnn4", "partition.samples_per_client=80", "local.batch_size=16"),
        # Which engine is the fastest may differ from run to run.
        *(f"method={method}", f"engine.precision={precision}", "device=cuda", "engine=batched"),
    ]
    folders = [tmp_path / name for name in ("one", "two", "resumed")]
    interrupt(folders[2], *words, after=2)
    for folder in folders:
        play_run(folder, *words)
    assert read_summary(folders[0])["engine"]["graphs"]
    for folder in folders[1:]:
        assert read_table(folder / "rounds.csv") == read_table(folders[0] / "rounds.csv")
        one, other = (read_checkpoint(path) for path in (folders[0], folder))
        assert_same(*({name: end[name] for name in ("server", "rows")} for end in (one, other)))


@pytest.mark.parametrize(
    ("written", "left", "number"),
    [
        pytest.param(False, [2], signal.SIGUSR2, id="in training"),
        pytest.param(True, [], signal.SIGTERM, id="states half written"),
    ],
)
def test_a_signal_saves_the_last_finished_round_where_it_is_left(
    written, left, number, tmp_path, uninterrupted, monkeypatch
):
    """It comes in round 3, right before or after the first of its writes; else it starts again."""
    command = (*COMMON, *SETTINGS["ditto"], "checkpoint.seconds=1e6")
    put = Rows.put_
    calls = list[object]()

    def signalled(self: Rows, *given: Any) -> None:
        calls.append(given)
        if len(calls) < 5 or written:
            put(self, *given)
        if len(calls) == 5:
            assert signal.getsignal(number) != signal.SIG_DFL  # it would end the tests
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "put_", signalled)
        result = run_command(*command, cwd=tmp_path)
    assert result.code == interrupts.EXIT_STATUS[number] == 143
    line = "fedpfl: terminated; the same command goes on from the last checkpoint"
    assert result.complaints == [line]
    assert "Traceback" not in result.err
    saved = [read_checkpoint(path.parent) for path in tmp_path.glob("run/state.pt")]
    assert [int(one["round"]) for one in saved] == left
    assert (tmp_path / "run/rounds.csv").exists()
    finish(tmp_path, *command, "engine.workers=1")  # the number of workers changes nothing
    assert_ends_alike(tmp_path / "run", uninterrupted["ditto"])


@pytest.mark.parametrize("whose", ["client states", "a server state"])
def test_a_checkpoint_of_another_form_is_one_line(whose, tmp_path, uninterrupted):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted["fedobp"], run)
    rewrite_summary(run, status="running")
    payload = torch.load(run / "state.pt", weights_only=True)
    parts = [payload["server"]]
    if whose == "client states":
        parts = [block["client"]["model"] for block in payload["rows"]]
    for part in parts:
        part.popitem()
    torch.save(payload, run / "state.pt")
    result = run_command(*COMMON, *SETTINGS["fedobp"], cwd=tmp_path)
    assert result.code == 2
    (line,) = result.complaints
    fault = f"{run}/state.pt holds {whose} of another form than the method now has; restart=true"
    assert line.startswith(f"fedpfl: {fault}")


def test_a_finished_run_keeps_no_state_if_it_is_told_so(tmp_path, uninterrupted):
    command, run = (*COMMON, *SETTINGS["fedobp"], "checkpoint.keep=false"), tmp_path / "run"
    interrupt(run, *command)
    saved = torch.load(run / "state.pt", weights_only=True)
    assert int(saved["round"]) == 2
    torch.save({**saved, "seconds": 7200.0}, run / "state.pt")
    assert "after round 2 of 4" in finish(tmp_path, *command)
    assert read_summary(run)["hours"] > 2
    assert not (run / "state.pt").exists()
    assert read_table(run / "rounds.csv") == read_table(uninterrupted["fedobp"] / "rounds.csv")
    assert read_summary(run)["identity"] == read_summary(uninterrupted["fedobp"])["identity"]
    before = snapshot(run)
    assert "already finished" in run_command(*command, cwd=tmp_path).out
    assert snapshot(run) == before


def test_a_dear_checkpoint_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one of a tenth of a second the next is due two seconds later; the last always is.

    By a clock that rounds of 1.5 seconds and checkpoints move.
    """
    written, now = [], [0.0]
    write_row, write = rundir.RunDirectory.row, rundir.RunDirectory.checkpoint

    def write_row_late(self: rundir.RunDirectory, values: dict[str, int]) -> None:
        now[0] += 1.5
        write_row(self, values)

    def write_slowly(self: rundir.RunDirectory, payload: dict[str, Any]) -> None:
        written.append(payload["round"])
        write(self, payload)
        now[0] += 0.1

    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(rundir.RunDirectory, "row", write_row_late)
    monkeypatch.setattr(rundir.RunDirectory, "checkpoint", write_slowly)
    finish(tmp_path, *COMMON, *SETTINGS["fedobp"], "checkpoint.seconds=1e-6", "rounds=6")
    assert written == [1, 3, 5, 6]
