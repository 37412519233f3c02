"""What `clean` removes, and above all what it leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedpfl.record import rundir
from fedpfl.report import cleaning, state
from fedpfl.report.__main__ import main
from fedpfl.report.cleaning import Candidate, Kept, candidates, remove
from tests.command import TINY, snapshot, start
from tests.test_listing import HOUR, age, hold
from tests.test_report import write_run

ALL = ["--status", ",".join(cleaning.REMOVABLE)]


def run(folder: Path, status: str = "failed", **options: Any) -> Path:
    """A run as it is left behind, an hour old, with a checkpoint."""
    write_run(folder, status=status, reached=2, **options)
    (folder / "run.lock").write_text("1\n")
    (folder / "state.pt").write_bytes(bytes(1000))
    (folder / "run.log").touch()
    return age(folder, HOUR)


def broken(folder: Path) -> Path:
    (run(folder) / "config.yaml").unlink()
    return folder


def half(folder: Path) -> Path:
    """What a killed `clean` leaves."""
    run(folder)
    (folder / "rounds.csv").unlink()
    (folder / "summary.json").unlink()
    return folder


def there(root: Path) -> list[str]:
    """Every directory below."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir())


def clean(root: Path, *options: str) -> int:
    return main(["clean", str(root), *options])


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
    broken(root / "broken" / "seed9")
    return root


def test_failed_diverged_and_broken_runs_go(root: Path, capsys: pytest.CaptureFixture) -> None:
    assert clean(root, "--yes") == 0
    assert there(root) == ["finished", "finished/seed0", "running", "running/seed3"]
    out, err = capsys.readouterr()
    assert err == "left 1 run, interrupted: to be resumed, or removed with --status interrupted\n"
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["broken", "diverged", "failed"]
    assert lines[3].split()[:2] == ["diverged", "2/4"]
    assert "checkpoint" in lines[3]
    assert lines[-1].startswith("removed 3 directories (")


def test_interrupted_runs_go_only_by_name(root: Path) -> None:
    assert clean(root, "--yes", "--status", "interrupted") == 0
    assert not (root / "running").exists()
    assert (root / "failed/seed1").exists()


def test_what_is_left_is_untouched(root: Path) -> None:
    before = snapshot(root / "finished")
    assert clean(root, "--yes", *ALL) == 0
    assert there(root) == ["finished", "finished/seed0"]
    assert snapshot(root / "finished") == before


def test_the_size_is_that_of_all_files(tmp_path: Path) -> None:
    path = run(tmp_path / "run")
    (found,), _ = candidates([tmp_path])
    assert found.size == sum(file.stat().st_size for file in path.iterdir())
    (path / "wandb" / "run-1").mkdir(parents=True)
    (path / "wandb" / "run-1" / "run.wandb").write_bytes(bytes(500))
    (again,), _ = candidates([tmp_path])
    assert again.size == found.size + 500


@pytest.mark.parametrize("answer", ["", "n", "no", "Y es"])
def test_only_yes_removes(root: Path, monkeypatch: pytest.MonkeyPatch, answer: str, capsys) -> None:
    before = there(root)
    asked = on_terminal(monkeypatch, answer)
    assert clean(root) == 0
    assert there(root) == before
    assert capsys.readouterr().out.endswith("removed nothing\n")
    size = sum(file.stat().st_size for name in ("failed", "diverged", "broken") for file in (root / name).rglob("*.*"))
    assert asked == [f"Remove 3 directories ({size / 1000:.1f} kB)? [y/N] "]


@pytest.mark.parametrize("answer", ["y", " YES "])
def test_yes_removes(root: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    on_terminal(monkeypatch, answer)
    assert clean(root) == 0
    assert not (root / "failed").exists()


@pytest.mark.parametrize("error", [EOFError, KeyboardInterrupt])
def test_no_answer_is_no(root: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def silent() -> str:
        raise error

    on_terminal(monkeypatch, silent)
    assert clean(root) == 0
    assert (root / "failed/seed1").exists()


def test_without_a_terminal_nothing_is_removed(root: Path, capsys: pytest.CaptureFixture) -> None:
    before = there(root)
    assert clean(root) == 2
    assert there(root) == before
    out, err = capsys.readouterr()
    assert str(root / "failed/seed1") in out
    assert err.endswith("error: removed nothing: there is no terminal to ask on; add --yes to remove what is listed\n")


@pytest.mark.parametrize("status", ["finished", "running", "failed,finished", "done"])
def test_other_statuses_are_refused(root: Path, status: str, capsys: pytest.CaptureFixture) -> None:
    before = there(root)
    assert clean(root, "--yes", "--status", status) == 2
    assert there(root) == before
    assert "clean removes only runs that are failed, diverged, broken, interrupted" in capsys.readouterr().err


def test_nothing_to_remove(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run(tmp_path / "run", "finished")
    assert clean(tmp_path) == 0
    assert capsys.readouterr().out == "nothing to remove\n"


def strange(folder: Path) -> None:
    (folder / "notes.txt").touch()


def strange_folder(folder: Path) -> None:
    (folder / "figures").mkdir()


def strange_run_within(folder: Path) -> None:
    write_run(folder / "seed1")


def linked_file(folder: Path) -> None:
    (folder / "state.pt").rename(folder.parent / "elsewhere.pt")
    (folder / "state.pt").symlink_to(folder.parent / "elsewhere.pt")


def linked_folder(folder: Path) -> None:
    (folder.parent / "kept").mkdir()
    (folder / "wandb").symlink_to(folder.parent / "kept")


def finished_but_broken(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    (folder / "summary.json").write_text('{"status": "finished"}')


def no_run_at_all(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "config.yaml":
            path.unlink()


def in_the_making(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    os.utime(folder / "run.lock")


LEFT = {
    "it holds notes.txt, which no run wrote": strange,
    "it holds figures, which no run wrote": strange_folder,
    "it holds seed1, which no run wrote": strange_run_within,
    "it holds state.pt, which no run wrote": linked_file,
    "it holds wandb, which no run wrote": linked_folder,
    "its summary.json says finished, though it is broken: no config.yaml": finished_but_broken,
    "nothing says that a run wrote it": no_run_at_all,
    "written a moment ago, ": in_the_making,
}


@pytest.mark.parametrize("reason", LEFT)
def test_left_and_named(tmp_path: Path, reason: str, capsys: pytest.CaptureFixture) -> None:
    path = run(tmp_path / "a" / "seed0")
    run(tmp_path / "b" / "seed0")
    LEFT[reason](path)
    before = snapshot(tmp_path / "a")
    assert clean(tmp_path, "--yes", *ALL) == 0
    assert snapshot(tmp_path / "a") == before
    assert not (tmp_path / "b").exists()
    assert f"left {path}: {reason}" in capsys.readouterr().err


def test_many_that_were_just_written_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number in range(4):
        os.utime(run(tmp_path / f"seed{number}", "running") / "rounds.csv")
    assert clean(tmp_path, "--yes", *ALL) == 0
    assert len(there(tmp_path)) == 4
    assert capsys.readouterr().err == f"left 4 directories, the first {tmp_path / 'seed0'}: {cleaning.RECENT}\n"


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    path = run(tmp_path / "a")
    run(tmp_path / "b")

    def late() -> str:
        (path / "notes.txt").touch()
        os.utime(path / "notes.txt", (0, 0))
        return "y"

    on_terminal(monkeypatch, late)
    assert clean(tmp_path) == 1
    assert there(tmp_path) == ["a"]
    out, err = capsys.readouterr()
    assert f"left {path}: it holds notes.txt, which no run wrote" in err
    assert "removed 1 of 2 directories" in out


def test_a_run_that_is_resumed_meanwhile_is_kept(tmp_path: Path) -> None:
    path = run(tmp_path / "a")
    (found,), _ = candidates([tmp_path])
    holder = hold(path)
    try:
        with pytest.raises(Kept, match="a run is being written there"):
            remove(found, [tmp_path])
    finally:
        holder.communicate("")
    assert path.exists()
    (path / "rounds.csv").touch()  # it went on, and stopped
    with pytest.raises(Kept, match="it has changed meanwhile"):
        remove(found, [tmp_path])
    assert path.exists()


def test_no_run_starts_while_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run(tmp_path / "seed0")
    attempt = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    errors: list[str] = []
    rename = Path.rename

    def meanwhile(source: Path, target: Path) -> Path:
        tried = subprocess.run([sys.executable, "-c", attempt, str(path / "run.lock")], capture_output=True, text=True)
        errors.append(tried.stderr.splitlines()[-1])
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", meanwhile)
    assert clean(tmp_path, "--yes") == 0
    assert [line.split(":")[0] for line in errors] == ["BlockingIOError"]
    assert there(tmp_path) == []


def test_a_runs_files_are_known() -> None:
    assert set(rundir._REPLACED) <= cleaning._FILES


def test_links_are_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    outside = run(tmp_path / "outside" / "seed0")
    root = tmp_path / "outputs"
    run(root / "mine" / "seed0")
    (root / "folder").symlink_to(tmp_path / "outside")
    (root / "mine" / "seed1").symlink_to(outside)
    (root / ".removing-seed2").symlink_to(outside)
    before = snapshot(outside)
    assert clean(root, "--yes", *ALL) == 0
    assert snapshot(outside) == before
    assert sorted(path.name for path in root.rglob("*")) == [".removing-seed2", "folder", "mine", "seed1"]
    assert f"left {root / '.removing-seed2'}: it is a symbolic link" in capsys.readouterr().err
    assert clean(root / "mine" / "seed1", "--yes", *ALL) == 0
    assert snapshot(outside) == before


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    run(tmp_path / "outputs" / "a" / "seed0")
    (tmp_path / "link").symlink_to(tmp_path / "outputs")
    assert clean(tmp_path / "link", "--yes") == 0
    assert there(tmp_path) == ["link", "outputs"]


def test_wandbs_own_links_go_and_what_they_point_to_stays(tmp_path: Path) -> None:
    path = run(tmp_path / "run")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "debug.log").touch()
    (path / "wandb").mkdir()
    (path / "wandb" / "latest-run").symlink_to(tmp_path / "logs")
    assert clean(tmp_path, "--yes") == 0
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["logs", "debug.log"]


def test_unfinished_writing_goes_too(tmp_path: Path) -> None:
    path = run(tmp_path / "run")
    for name in (".state.pt.tmp", ".clients.x1y2"):
        (path / name).touch()
    age(path, HOUR)
    assert clean(tmp_path, "--yes") == 0
    assert there(tmp_path) == []


def test_empty_parents_go_up_to_the_root(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    run(root / "fmnist" / "fedavg" / "k1" / "seed0")
    run(root / "fmnist" / "fedper" / "k2" / "seed0", "finished")
    run(root / "mnist" / "fedavg" / "k3" / "seed0")
    (root / "mnist" / "multirun.yaml").touch()
    (root / "empty").mkdir()
    assert clean(root, "--yes") == 0
    assert there(root) == ["empty", "fmnist", "fmnist/fedper", "fmnist/fedper/k2", "fmnist/fedper/k2/seed0", "mnist"]


def test_a_root_stays_and_so_does_one_within(tmp_path: Path) -> None:
    run(tmp_path / "a" / "b" / "seed0")
    assert main(["clean", str(tmp_path / "a"), str(tmp_path / "a" / "b"), "--yes"]) == 0
    assert there(tmp_path) == ["a", "a/b"]


def test_a_single_run_may_be_named(tmp_path: Path) -> None:
    path = run(tmp_path / "k" / "seed0")
    assert clean(path, "--yes") == 0
    assert there(tmp_path) == ["k"]


@pytest.mark.parametrize("after", range(4))
def test_a_killed_clean_leaves_a_whole_run_or_what_the_next_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, capsys: pytest.CaptureFixture
) -> None:
    path = run(tmp_path / "k" / "seed0")
    before = snapshot(path)

    class Killed(BaseException):
        pass

    def torn(folder: Path) -> None:
        for file in sorted(folder.iterdir())[: max(0, after - 1)]:
            file.unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", torn)
        if not after:
            patch.setattr(Path, "rename", lambda *_: torn(path))
        with pytest.raises(Killed):
            clean(tmp_path, "--yes")
    if not after:
        assert snapshot(path) == before
        return
    assert there(tmp_path) == ["k", "k/.removing-seed0"]
    capsys.readouterr()
    assert main(["ls", str(tmp_path)]) == 2  # no run any more
    run(path)  # the same command again
    assert clean(tmp_path, "--yes", "--status", "diverged") == 0
    assert there(tmp_path) == ["k", "k/seed0"]
    assert "half removed" in capsys.readouterr().out


def test_half_removed_is_left_where_it_holds_something_else(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    strange(half(tmp_path / ".removing-seed0"))
    half(tmp_path / ".removing-seed1")
    assert clean(tmp_path, "--yes") == 0
    assert there(tmp_path) == [".removing-seed0"]
    assert "it holds notes.txt, which no run wrote" in capsys.readouterr().err


def test_a_name_that_is_taken_is_not_overwritten(tmp_path: Path) -> None:
    path = run(tmp_path / "seed0")
    strange(half(tmp_path / ".removing-seed0"))
    assert clean(path, "--yes") == 0
    assert there(tmp_path) == [".removing-seed0"]
    assert (tmp_path / ".removing-seed0" / "notes.txt").exists()


def test_without_a_lock_file_it_goes_too(tmp_path: Path) -> None:
    path = run(tmp_path / "run", "running")
    (path / "run.lock").unlink()
    assert clean(tmp_path, "--yes", *ALL) == 0
    assert not path.exists()


def test_another_clean_was_quicker(tmp_path: Path) -> None:
    path = run(tmp_path / "k" / "seed0")
    (found,), _ = candidates([tmp_path])
    shutil.rmtree(path)
    remove(found, [tmp_path])
    assert there(tmp_path) == []


def test_what_the_file_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    path = run(tmp_path / "seed0")

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    assert clean(tmp_path, "--yes") == 1
    assert f"left {path}: cannot be removed: Permission denied" in capsys.readouterr().err
    assert path.exists()


@pytest.mark.slow
def test_a_living_run_is_left_and_a_killed_one_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "live"
    process = start("rounds=100000", *TINY[1:], f"hydra.run.dir={path}", cwd=tmp_path)
    try:
        until = time.monotonic() + 100
        while state.read(path).reached < 1:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        found = state.read(path)
        assert found.words == f"running {found.reached}/100000"
        age(path, HOUR)  # however long its rounds take
        assert state.read(path).status == "running"
        assert main(["ls", str(tmp_path)]) == 0
        assert capsys.readouterr().out.splitlines()[2].startswith("running ")
        assert clean(tmp_path, "--yes", *ALL) == 0
        assert process.poll() is None
        assert state.read(path).reached >= found.reached
        stale = Candidate(path, "failed", "failed", 0.0, 0, True)
        with pytest.raises(Kept, match="a run is being written there"):
            remove(stale, [tmp_path])
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    capsys.readouterr()
    age(path, 0)  # it may not have written since
    assert state.read(path).status == "interrupted"
    assert clean(tmp_path, "--yes", *ALL) == 0
    assert f"left {path}: written a moment ago" in capsys.readouterr().err
    age(path, HOUR)
    assert clean(tmp_path, "--yes") == 0
    assert path.exists()
    assert clean(tmp_path, "--yes", *ALL) == 0
    assert there(tmp_path) == []
