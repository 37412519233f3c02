"""What a run directory is at this moment, the list of runs, and trials, which are left out."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedpfl.ground import lock
from fedpfl.report import groups, listing, load, runs
from fedpfl.report.listing import Entry
from tests.conftest import read_cases
from tests.report.test_report import amend, list_records, read_output, read_refusal, write_run

HOUR = 3600.0
HOLD = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def age(folder: Path, seconds: float) -> Path:
    """Make all files as old as this."""
    then = time.time() - seconds
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a living run renames them
            os.utime(path, (then, then))
    return folder


def hold(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the directory's lock until its input ends."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder / "run.lock")], **pipes)
    assert holder.stdout.readline() == "\n"
    return holder


def is_locked(folder: Path) -> bool:
    """Whether another process is refused the directory's lock."""
    code = "import fcntl, sys; fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    other = subprocess.run([sys.executable, "-c", code, folder / "run.lock"], capture_output=True)
    return b"BlockingIOError" in other.stderr


def look(*roots: Path) -> list[Entry]:
    return listing.list_entries(map(load.inspect_directory, load.find_run_directories(roots)))


def test_without_a_lock_the_age_decides_and_long_rounds_are_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", status="running", reached=3)
    assert lock.is_held_by_process(run) is None
    assert load.inspect_directory(run).status_text == "running 3/4"
    assert load.inspect_directory(age(run, HOUR)).status_text == "interrupted 3/4"
    (run / "rounds.csv").write_text((run / "rounds.csv").read_text().replace("3,2.0,", "3,1500.0,"))
    assert load.inspect_directory(age(run, HOUR)).status == "running"  # three rounds are 75 minutes
    assert load.inspect_directory(age(run, 1.3 * HOUR)).status == "interrupted"


def test_the_lock_decides_at_once(tmp_path: Path) -> None:
    run = age(write_run(tmp_path / "run", status="running", reached=3), 9 * HOUR)
    holder = hold(run)
    try:
        age(run, 9 * HOUR)
        assert lock.is_held_by_process(run) is True
        assert load.inspect_directory(run).status == "running"
    finally:
        holder.kill()
        holder.communicate()
    assert lock.is_held_by_process(run) is False
    assert load.inspect_directory(run).status == "interrupted"
    holder = hold(run)  # would wait for us, had looking kept the lock
    assert lock.is_held_by_process(run) is True
    holder.communicate("")


# Twelve lines of aliases that are billions of values
BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
BROKEN = r"""
it holds aliases, which no run writes | (run / "config.yaml").open("a").write(f"a0: &a0 [x, x]\n{BOMB}")
no usable value: Over | (run / "summary.json").write_text('{"status": "finished", "cohort": 1e999}')
no round recorded yet | (run / "rounds.csv").unlink()
summary.json cannot be read: JSONDecodeError | (run / "summary.json").write_text('{"status": ')
rounds.csv lacks the column accuracy | (run / "rounds.csv").write_text("round\n1\n")
no round recorded yet | (run / "rounds.csv").write_text((run / "rounds.csv").read_text().splitlines()[0] + "\n")
"""
"""What is said, and what is done to a run."""


def test_broken_directories_are_listed_with_the_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "whole")
    cases = read_cases(BROKEN, " | ")
    for number, (message, damage) in enumerate(cases):
        run = write_run(tmp_path / str(number), seed=9)
        eval(damage, {"run": run, "BOMB": BOMB, "amend": amend})
        found = load.inspect_directory(run)
        assert found.status == "broken", message
        # Without the rows only one that says it is finished is broken.
        assert message in found.reason or "rounds.csv holds no round" in found.reason
        assert str(tmp_path) not in found.reason
        assert "\n" not in found.reason
    assert [entry.directory.status for entry in look(tmp_path)].count("broken") == len(cases)


def test_what_a_line_says(tmp_path: Path) -> None:
    place = tmp_path / "table3" / "fedavg" / "0123456789" / "seed7"
    write_run(place, status="running", reached=3, seed=7)
    age(place, 2 * HOUR + 60)
    (found,) = look(tmp_path)
    record = dict(found.record)
    changed = record.pop("changed")
    # 1, 9 and 2 seconds; (192 000 + 320 000) bits / 10 clients
    assert record == {
        **{"status": "interrupted", "round": 3, "rounds": 4, "experiment": "table3", "name": None},
        **{"method": "fedavg", "label": "FedAvg", "dataset": "FMNIST", "partition": "Dir(0.1)"},
        **{"seed": 7, "evaluated": 2, "accuracy": 80.0, "ft_accuracy": 82.0, "hours": 12 / 3600},
        **{"bits": 51_200.0, "path": str(place), "reason": None},
    }
    then = time.mktime(time.strptime(changed[:19], "%Y-%m-%dT%H:%M:%S"))
    assert time.time() - then == pytest.approx(7260, abs=600)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    obp = {"name": "fedobp", "q": 0.99993, "norm": "global", "score": "obp"}
    write_run(tmp_path / "obp", {4: 95.0}, method=obp)
    write_run(tmp_path / "layer", {4: 96.0}, method=obp | {"norm": "layer"})
    write_run(tmp_path / "avg1", {4: 87.0}, seed=1)
    write_run(tmp_path / "avg0", {}, status="failed")
    write_run(tmp_path / "mnist", {4: 99.0}, dataset="mnist")
    (write_run(tmp_path / "broken") / "config.yaml").unlink()
    for number, name in enumerate(("obp", "layer", "avg1", "avg0", "mnist", "broken")):
        age(tmp_path / name, HOUR * number)
    return tmp_path


CHOICES = """
--sort accuracy => mnist layer obp avg1 avg0 broken
--status failed,broken => avg0 broken
dataset=FMNIST --status finished => avg1 obp layer
"""


def test_sorted_and_chosen(several: Path) -> None:
    for line in CHOICES.strip().splitlines():
        options, _, left = line.partition(" =>")
        found = [Path(row["path"]).name for row in list_records(several, *options.split())]
        assert found == left.split(), options


# ---- Trials of a search join no table, figure, page, rank or list unless asked for


@pytest.fixture
def outputs(tmp_path):
    """Two final runs, and a trial that agrees but by seed."""
    for seed in (43, 44):
        write_run(tmp_path / "final" / "fedavg" / "k" / f"seed{seed}", seed=seed)
    trial = tmp_path / "trials" / "search-5ea2c4" / "fedavg" / "k" / "seed42"
    amend(write_run(trial, seed=42), search="5ea2c4")
    return tmp_path


def test_a_trial_is_no_seed_of_a_group(outputs):
    """Three seeds were shown where two are final."""
    for options, seeds in (({}, (43, 44)), ({"trials": True}, (42, 43, 44))):
        (group,) = groups(runs(outputs, **options))
        assert tuple(run.seed for run in group.runs) == seeds


def test_commands_leave_trials_out_and_say_so(outputs, capsys):
    """All commands read directories in one place."""
    out, err = read_output(capsys, "ls", "--format", "csv", outputs)
    assert ("seed42" in out, err) == (False, "left out 1 trial of searches; --trials shows them\n")
    out, err = read_output(capsys, "ls", "--format", "csv", outputs, "--trials")
    assert ("seed42" in out, err) == (True, "")
    told = "there are no runs but 1 trial of searches; --trials shows them"
    for name in ("tables", "figures", "html", "ls", "ranks", "clean"):
        line = read_refusal(capsys, name, outputs / "trials")
        assert line == f"{outputs / 'trials'}: {told}"
