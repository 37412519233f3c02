"""Run directories and callbacks: what is on the disk after a kill, and what the user is told."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedpfl
from fedpfl.ground.errors import FedpflError
from fedpfl.record import rundir
from fedpfl.record.callbacks import Callback, Callbacks, RunInfo
from fedpfl.record.console import Console, run_label
from fedpfl.record.environment import describe_environment
from fedpfl.record.logfile import LogFile
from fedpfl.record.picture import draw_partition
from fedpfl.record.rundir import PartitionRecord, RunDirectory
from tests.conftest import keep_quick
from tests.report.test_listing import hold, is_locked

COLUMNS = ("round", "seconds", "cohort_before", "cohort_after", "accuracy", "values_down")


def opened(path: Path, identity: str = "abc", config: str = "seed: 1\n") -> RunDirectory:
    return RunDirectory.open(path, config, identity)


def done(row: dict) -> SimpleNamespace:
    """A round, as far as loggers look at it."""
    return SimpleNamespace(row=row)


def row(number: int, accuracy: float | None = None) -> dict:
    values = (number, 0.1 * number, 50 / 3, 200 / 3, accuracy, 10**12 + number)
    return dict(zip(COLUMNS, values, strict=True))


@pytest.fixture(autouse=True)
def real_pictures(monkeypatch):
    monkeypatch.setattr(rundir, "draw_partition", draw_partition)


# ---- directory, status, lock


def test_summary_merges_and_stays_valid_json(tmp_path):
    with opened(tmp_path) as directory:
        best = {"accuracy": np.float32(0.5), "loss": math.nan}
        directory.write_summary(status="running", best=best, cohort=np.int64(3))
        directory.write_summary(status="failed", error="boom", identity="other")
        directory.write_summary(cohort=3)
        assert directory.summary["error"] == "boom"  # as long as the status is this one
        directory.write_summary(status="running", last=[math.inf, 1])
        held = directory.summary
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told.pop("digest")
    best = {"accuracy": 0.5, "loss": None}
    expected = {"identity": "abc", "data": None, "status": "running"}
    assert told == held == {**expected, "best": best, "cohort": 3, "last": [None, 1]}


def test_a_lock_is_held_by_one_process(tmp_path):
    """Killed with -9 it goes with the process."""
    with opened(tmp_path):
        with pytest.raises(FedpflError, match=f"{tmp_path}.*in use by process {os.getpid()};"):
            opened(tmp_path)
        # The refusal must not have lost the lock, as closing a second file would with POSIX locks.
        assert is_locked(tmp_path)
    other = hold(tmp_path)
    (tmp_path / "run.lock").write_text(f"{other.pid}\n")
    with pytest.raises(FedpflError, match=f"in use by process {other.pid};"):
        opened(tmp_path)
    other.kill()
    other.communicate()
    opened(tmp_path).close()


# ---- rows and checkpoints


def test_the_first_row_fixes_the_columns(tmp_path):
    with opened(tmp_path) as directory:
        directory.row({"round": 1, "accuracy": None})
        line = "has other columns than rounds now have, such as 'loss'; restart=true"
        with pytest.raises(FedpflError, match=line):
            directory.row({"round": 2, "loss": 1.0})
        directory.row({"accuracy": 2.0, "round": 2})
    assert (tmp_path / "rounds.csv").read_text() == "round,accuracy\n1,\n2,2.0\n"


def test_no_code_is_loaded_from_a_checkpoint(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    with opened(tmp_path) as directory:
        torch.save({"round": 1, "x": Bomb()}, tmp_path / "state.pt")
        with pytest.raises(FedpflError, match="is damaged"):
            directory.restore()
    assert not (tmp_path / "exploded").exists()


def test_a_checkpoint_takes_only_what_can_be_loaded(tmp_path):
    with opened(tmp_path) as directory:
        with pytest.raises(TypeError, match=r"cannot hold a PosixPath: PosixPath\('x'\)"):
            directory.checkpoint({"round": 1, "best": [1, Path("x")]})
        assert not (tmp_path / "state.pt").exists()
        directory.row({"round": 1})
        plain, half = {"round": 1, "t": (1, None, True, "s")}, torch.ones(2).bfloat16()
        directory.checkpoint({**plain, "numpy": np.float64(0.25), 7: {"half": half}})
        restored = directory.restore()
    assert torch.equal(restored[7].pop("half"), half)
    assert restored == {**plain, "numpy": 0.25, 7: {}}


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    for name in ("one", "other"):
        with opened(tmp_path / name, identity=name) as directory:
            directory.row({"round": 1})
            directory.checkpoint({"round": 1})
    (tmp_path / "other/state.pt").replace(tmp_path / "one/state.pt")
    with (
        opened(tmp_path / "one", identity="one") as directory,
        pytest.raises(FedpflError, match="belongs to a different run"),
    ):
        directory.restore()


def test_a_finished_run_keeps_no_secret(tmp_path):
    """Nor does one that was killed before it had removed it."""
    for _ in range(2):
        with opened(tmp_path) as directory:
            directory.write_summary(status="finished")
            (tmp_path / "privacy.key").write_bytes(b"left")
        opened(tmp_path).close()
        assert not (tmp_path / "privacy.key").exists()


def test_a_view_is_saved_without_what_lies_behind_it(tmp_path):
    clients = torch.randn(1000, 1000)
    with opened(tmp_path) as directory:
        directory.row({"round": 1})
        directory.checkpoint({"round": 1, "one": clients[3], "turned": clients[:10].T})
        restored = directory.restore()
    assert (tmp_path / "state.pt").stat().st_size < 100_000
    assert torch.equal(restored["one"], clients[3])
    assert torch.equal(restored["turned"], clients[:10].T)


# ---- clients, partition, environment


def test_partition_files(tmp_path, monkeypatch):
    train = [np.array([5, 1]), np.array([], dtype=np.int64), np.array([7])]
    test = [np.array([2], dtype=np.int32), np.array([3]), np.array([], dtype=np.int64)]
    counts = np.array([[2, 1], [0, 1], [1, 0]])
    with opened(tmp_path) as directory:
        record = PartitionRecord(train, test, counts, "three clients")
        directory.write_partition(record, has_picture=True)
        with np.load(tmp_path / "partition.npz", allow_pickle=False) as stored:
            arrays = {name: array.tolist() for name, array in stored.items()}
        assert arrays == {
            **{"train_indices": [5, 1, 7], "train_offsets": [0, 2, 2, 3]},
            **{"test_indices": [2, 3], "test_offsets": [0, 1, 2, 2]},
            "label_counts": counts.tolist(),
        }
        assert (tmp_path / "partition.png").read_bytes().startswith(b"\x89PNG")
        monkeypatch.setattr(rundir, "draw_partition", None)  # what is there is not drawn again
        directory.write_partition(record, has_picture=True)


@pytest.mark.parametrize(("clients", "classes"), keep_quick([(1, 1), (100, 10), (1000, 200)]))
def test_picture_of_any_size(tmp_path, clients, classes):
    from matplotlib import image

    before = "matplotlib.pyplot" in sys.modules  # a test before this one may have loaded it
    filled = np.arange(classes) % 3 == 0
    counts = np.random.default_rng(0).integers(0, 300, (clients, classes)) * filled
    names = [r"$\frac$", "long" * 9, *map(str, range(2, clients))][:clients]  # no formulas
    draw_partition(counts, tmp_path / "p.png", "Dir(0.1)", names, ["$x"] * classes)
    pixels = image.imread(tmp_path / "p.png")
    height, width = pixels.shape[:2]
    assert 400 < height < 2000
    assert 600 < width < 2500
    assert ("matplotlib.pyplot" in sys.modules) == before
    # Only greys: nothing is told by colour.
    assert np.ptp(pixels[..., :3], axis=2).max() < 0.02


def test_environment_is_plain_and_names_no_host():
    import platform

    told = describe_environment()
    text = json.dumps(told)
    assert told["fedpfl"] == fedpfl.__version__
    assert told["torch"] == torch.__version__
    assert told["cores"] >= 1
    assert platform.node() not in told.values()
    assert str(Path.home()) not in text or str(Path.home()) == "/"
    assert told["commit"] is None or (len(told["commit"]) == 40 and isinstance(told["dirty"], bool))


def test_commit_of_tracked_source_only(tmp_path):
    from fedpfl.record import environment

    ask = environment._git.__wrapped__  # a process asks once

    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True)

    (tmp_path / "__init__.py").write_text("")
    git("init", "-q")
    git("commit", "-q", "--no-verify", "--allow-empty", "-m", "one")
    assert ask(tmp_path) == (None, None)  # in another project's checkout
    git("add", "__init__.py")
    git("commit", "-q", "--no-verify", "-m", "two")
    (commit, dirty) = ask(tmp_path)
    assert (len(commit), dirty) == (40, False)
    (tmp_path / "__init__.py").write_text("changed = True\n")
    assert ask(tmp_path) == (commit, True)


# ---- callbacks


def info(path: Path, **changes) -> RunInfo:
    values = {
        "name": "FedOBP-abc-seed1",
        "group": "digits",
        "job_type": "fedobp",
        "tags": ("digits",),
        "config": {"seed": 1, "method": {"name": "fedobp"}, "eval": {"every": 10}},
        "path": path,
        "identity": "abc",
        "seed": 1,
        "rounds": 20,
        "lines": ("data set    digits",),
    }
    return RunInfo(**{**values, **changes})


def play_twenty_rounds(console, clock, seconds: float, judged: dict[int, dict]) -> None:
    """Let a console hear of rounds of so many seconds; every tenth takes 7 more to evaluate."""
    for number in range(1, 21):
        clock.now += seconds
        values = row(number)
        if number % 10 == 0:
            console.on_evaluation(number)
            clock.now += 7.0
            values |= {"eval_seconds": 7.0, "ft_accuracy": None, **judged.get(number, {})}
        console.on_round(done(values))


def test_console_plain_lines(tmp_path):
    stream, clock = io.StringIO(), SimpleNamespace(now=0.0)
    console = Console(stream=stream, clock=lambda: clock.now)
    console.on_begin(info(tmp_path))
    play_twenty_rounds(console, clock, 2.0, {10: {"accuracy": 90.0, "ft_accuracy": 91.5}})
    console.on_note("a [bold]note[/bold]")
    console.on_end("finished", {})
    lines = stream.getvalue().splitlines()
    # First, then each 5 s or later (rounds of 2 s: every third), evaluated ones (10), and the last.
    assert [line.split("/")[0] for line in lines if line.startswith("round")] == [
        f"round {number}" for number in (1, 4, 7, 10, 13, 16, 19, 20)
    ]
    assert lines[0] == "data set    digits"
    assert lines[1] == "round 1/20  cohort 16.67 -> 66.67 %  0.10 s  ETA 0:00:38 + evaluations"
    tuned = "round 10/20  cohort 16.67 -> 66.67 %  all clients 90.00 % (fine-tuned 91.50 %)  1.00 s  ETA 0:00:27"
    assert tuned in lines
    assert lines[-3] == "round 20/20  cohort 16.67 -> 66.67 %  2.00 s"
    assert lines[-2] == "a [bold]note[/bold]"
    ended = "finished after round 20 in 0:00:54, all clients 90.00 % (fine-tuned 91.50 %)"
    assert lines[-1] == ended


def test_a_run_of_a_sweep_has_a_line_a_minute_and_warnings_once(tmp_path, monkeypatch):
    monkeypatch.setattr(Console, "_print_times", {})
    stream, clock = io.StringIO(), SimpleNamespace(now=0.0)
    runs = {own: Console(stream=stream, clock=lambda: clock.now) for own in ("seed=1", "seed=2")}
    for own, run in runs.items():
        before = run_label.set(own)
        start = int(own == "seed=2")
        run.on_begin(info(tmp_path, rounds=46, notes=("slow: use another",), start_round=start))
        run_label.reset(before)
    for number in range(2, 47):
        clock.now += 4.0
        for run in runs.values():
            if number % 10 == 0:
                run.on_evaluation(number)
            run.on_round(done(row(number, 50.0 if number % 10 == 0 else None)))
    for run in runs.values():
        run.on_end("finished", {})
    assert stream.getvalue().splitlines() == [
        "seed=1: slow: use another",
        "seed=2: resumed     after round 1 of 46",
        "seed=1: round 16/46  cohort 16.67 -> 66.67 %  1.60 s  ETA 0:02:00 + evaluations",
        "seed=1: round 31/46  cohort 16.67 -> 66.67 %  3.10 s  ETA 0:01:00 + evaluations",
    ]


def test_console_bar_on_a_terminal(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    console = Console(stream=stream)
    console.on_begin(info(tmp_path))
    console.on_round(done(row(1, 90.0)))
    console.on_round(done(row(2)))
    console.on_note("[in brackets] stays")
    console.on_end("finished", {})
    text = stream.getvalue()
    assert "\x1b[" in text
    assert "round 2/20" in text
    assert "all clients 90.00 %" in text.split("round 2/20")[-1]  # the last known stays in view
    assert "ETA" in text
    assert "[in brackets] stays" in text


def test_log_file_appends_over_resumes(tmp_path):
    for start in (0, 1):
        log = LogFile()
        log.on_begin(info(tmp_path, start_round=start))
        log.on_round(done(row(start + 1, 50.0)))
        log.on_note("two\nlines")
        log.on_end("diverged" if start else "interrupted", {"error": "boom"} if start else {})
        if not start:
            with (tmp_path / "run.log").open("a") as file:
                file.write("torn")
    lines = (tmp_path / "run.log").read_text().splitlines()
    stamped = [line.split(" ", 1) for line in lines if line != "torn"]
    assert all(len(stamp) == len("2026-01-01T00:00:00+00:00") for stamp, _ in stamped)
    assert [text for _, text in stamped] == [
        "data set    digits".replace("    ", " "),
        *("round 1/20 cohort 16.67 -> 66.67 % all clients 50.00 % 0.10 s", "two lines"),
        *("interrupted", "data set digits", "resumed after round 1 of 20"),
        *("round 2/20 cohort 16.67 -> 66.67 % all clients 50.00 % 0.20 s", "two lines"),
        "diverged: boom",
    ]


def test_what_the_package_logs_while_a_run_goes_on_is_a_note():
    notes, log = list[str](), logging.getLogger("fedpfl.engine.backends.programs")
    listener = Callback()
    listener.on_note = notes.append
    with Callbacks([listener]) as callbacks:
        log.debug("of no interest")
        log.info("loop is taken")
        log.warning("a step could not be %s", "captured")
        callbacks.on_end("finished", {})
    log.warning("nobody's run")
    assert notes == ["loop is taken", "a step could not be captured"]


def test_ctrl_c_while_a_checkpoint_is_written_stays_ctrl_c(tmp_path, monkeypatch):
    def interrupted(payload, file):
        try:
            raise KeyboardInterrupt
        finally:
            # What torch's writer says when it is closed half written
            raise RuntimeError("unexpected pos")

    with opened(tmp_path) as directory:
        directory.restore()
        directory.checkpoint({"round": 1})
        before = (tmp_path / "state.pt").read_bytes()
        monkeypatch.setattr(torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            directory.checkpoint({"round": 2})
        assert (tmp_path / "state.pt").read_bytes() == before
