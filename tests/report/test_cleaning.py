"""What `clean` removes, and above all what it leaves."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedpfl.report import cleaning
from fedpfl.report.__main__ import main
from tests.conftest import read_cases
from tests.report.test_listing import HOUR, age, hold
from tests.report.test_report import amend, write_run

ALL = ["--status", ",".join(cleaning.REMOVABLE)]


def run(folder: Path, status: str = "failed", **options: Any) -> Path:
    """A run as it is left behind, an hour old, without a checkpoint."""
    write_run(folder, status=status, reached=2, **options)
    (folder / "run.lock").write_text("1\n")
    (folder / "run.log").touch()
    return age(folder, HOUR)


def there(root: Path) -> list[str]:
    """Every directory below."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir())


def clean(root: Path, *options: str) -> int:
    return main(["clean", str(root), *options])


def assert_left(path: Path, reason: str, err: str) -> None:
    assert re.search(rf"left {path}, [a-z]+( \d+/\d+)?: {re.escape(reason)}", err)


def on_terminal(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[str]:
    """Make standard input a terminal that answers; returns the questions."""
    asked: list[str] = []

    def reply(question: str) -> str:
        asked.append(question)
        return answer() if callable(answer) else answer

    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setattr("builtins.input", reply)
    return asked


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "outputs"
    for number, status in enumerate(("finished", "failed", "diverged", "running")):
        run(root / status / f"seed{number}", status, seed=number)
    (run(root / "broken" / "seed9") / "config.yaml").unlink()
    return root


def test_failed_diverged_and_broken_runs_go_by_yes_alone(root, monkeypatch, capsys):
    before = there(root)
    asked = on_terminal(monkeypatch, "Y es")
    assert clean(root) == 0
    assert there(root) == before
    on_terminal(monkeypatch, " YES ")
    assert clean(root) == 0
    assert there(root) == ["finished", "finished/seed0", "running", "running/seed3"]
    assert asked == ["Remove 3 directories? [y/N] "]
    out = capsys.readouterr().out
    assert "diverged 2/4" in out
    assert out.endswith("removed 3 runs of 3\n")


def test_a_checkpoint_is_removed_only_by_its_status(tmp_path, capsys):
    for status in ("failed", "diverged"):
        (run(tmp_path / status, status) / "state.pt").touch()
        age(tmp_path / status, HOUR)
    assert clean(tmp_path, "--yes") == 0
    assert there(tmp_path) == ["failed"]
    reason = "its command goes on from its checkpoint; --status failed removes it"
    assert_left(tmp_path / "failed", reason, capsys.readouterr().err)
    assert clean(tmp_path, "--yes", "--status", "failed") == 0
    assert there(tmp_path) == []


def test_mistakes_remove_nothing_and_interrupted_runs_go_only_by_name(root, capsys):
    before = there(root)
    assert clean(root) == 2
    asking = "removed nothing: there is no terminal to ask on; add --yes to remove what is listed"
    assert asking in capsys.readouterr().err
    assert there(root) == before
    assert clean(root, "--yes", "--status", "interrupted") == 0
    assert not (root / "running").exists()
    assert (root / "failed/seed1").exists()


LEFT = """
(run / "notes.txt").touch() | it holds notes.txt, which no run wrote
there.mkdir(), (run / "wandb").symlink_to(there) | it holds wandb, which no run wrote
(run / "summary.json").unlink() | nothing says that fedpfl wrote it: its summary.json holds no identity
amend(run, status="finished"), (run / "config.yaml").unlink() | its summary.json says finished, though it is broken: no config.yaml
(run / "run.lock").unlink(), os.utime(run / "rounds.csv") | a run may be writing there
"""
"""What is done to a run, and why it is left."""


@pytest.mark.parametrize(("damage", "reason"), read_cases(LEFT, " | "))
def test_left_and_named(tmp_path: Path, damage: str, reason: str, capsys) -> None:
    path = run(tmp_path / "a" / "seed0")
    run(tmp_path / "b" / "seed0")
    names = {"run": path, "there": path.parent / "elsewhere", "amend": amend, "age": age}
    eval(damage, {"os": os, "HOUR": HOUR, **names})
    before = there(tmp_path / "a"), sorted(file.name for file in path.iterdir())
    assert clean(tmp_path, "--yes", *ALL) == 0
    assert (there(tmp_path / "a"), sorted(file.name for file in path.iterdir())) == before
    assert not (tmp_path / "b").exists()
    assert_left(path, reason, capsys.readouterr().err)


def test_a_run_that_is_held_is_kept(tmp_path, monkeypatch, capsys):
    path = run(tmp_path / "a")
    holders: list[subprocess.Popen[str]] = []

    def resumed() -> str:
        holders.append(hold(path))
        return "y"

    on_terminal(monkeypatch, resumed)
    assert clean(tmp_path) == 1
    assert f"left {path}: a run has begun to write there" in capsys.readouterr().err
    assert clean(tmp_path, "--yes") == 0  # seen as running from the beginning
    holders[0].communicate("")
    assert (path / "run.log").exists()


def test_empty_parents_go_up_to_the_root(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    run(root / "fmnist" / "fedavg" / "k1" / "seed0")
    run(root / "fmnist" / "fedper" / "k2" / "seed0", "finished")
    run(root / "mnist" / "fedavg" / "k3" / "seed0")
    (root / "mnist" / "multirun.yaml").touch()
    assert clean(root, "--yes") == 0
    assert there(root) == [
        *("fmnist", "fmnist/fedper", "fmnist/fedper/k2", "fmnist/fedper/k2/seed0", "mnist")
    ]
    assert clean(run(root / "k" / "seed0"), "--yes") == 0
    assert (root / "k").exists()  # above a root
