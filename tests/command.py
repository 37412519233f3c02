"""The command line, in this process or another; a tiny federation; what a run leaves."""

import contextlib
import csv
import functools
import io
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.hydra import Hydra
from omegaconf import DictConfig

from fedpfl import train
from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.config.run_location import register_resolver
from fedpfl.ground import interrupts
from fedpfl.ground.errors import FedpflError
from fedpfl.record import digests
from fedpfl.runner import resume, session
from tests.conftest import ROOT

TINY_TASK = (
    *("rounds=2", "clients=4", "participation=0.5", "partition.samples_per_client=24"),
    *("local.epochs=1", "eval.every=1", "checkpoint.seconds=0"),
)
TINY = (*TINY_TASK, "model=mlp", "model.hidden=[8]")
"""With the default network a run takes twice as long."""
FILES = {
    *("config.yaml", "rounds.csv", "clients.csv", "summary.json", "state.pt", "run.log"),
    "partition.npz",
}
CLOCKED = ("seconds", "eval_seconds")


def keep_last_words(*words: str) -> tuple[str, ...]:
    """Of words that give a key again only the last, for the command says so otherwise."""
    return tuple({word.partition("=")[0] if "=" in word else word: word for word in words}.values())


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def complaints(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("fedpfl:")]


def format_override(key: str, value: Any) -> str:
    """Return `key=value` as the command line reads it.

    A path needs this: where the tree or its temporary files lie, a name may hold what overrides
    have a meaning for.
    """
    (word,) = overrides.format_words(key, value)
    return word


def _environment() -> dict[str, str]:
    gone = ("FEDPFL_DATA", "WANDB_API_KEY", "WANDB_MODE")
    kept = {key: value for key, value in os.environ.items() if key not in gone}
    return {**kept, "PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "0"}


@functools.cache
def compose_once(*overrides: str) -> DictConfig:
    register_resolver()
    with initialize_config_dir(train.CONF, version_base="1.3"):
        return compose("train", overrides=list(overrides))


real_mode = Hydra.get_mode


def read_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Return the mode that the configuration asks for, which these words alone can set.

    Hydra composes everything for it, and once more for the run: a third of a command's time.
    """
    setting = ("experiment", "paper", "debug", "hydra.mode", "hydra.searchpath", "plugins")
    if any(word.lstrip("+~").startswith(setting) for word in overrides):
        return real_mode(self, config_name, overrides)
    return None


def run_command(*arguments: str, cwd: Path) -> Result:
    """Run `python -m fedpfl.train` in this process.

    A traceback that a user would see is raised here.
    """
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    answers = {number: signal.getsignal(number) for number in interrupts.EXIT_STATUS}
    with (
        mock.patch.object(Hydra, "get_mode", read_mode),
        mock.patch.dict(os.environ, _environment(), clear=True),
        contextlib.chdir(cwd),
    ):
        try:
            return call_main(train.main, *arguments)
        finally:
            logging.captureWarnings(False)
            root.handlers[:], root.level = handlers, level
            for number, answer in answers.items():
                signal.signal(number, answer)


def call_main(main: Callable[[], int | None], *arguments: str) -> Result:
    """Call a command in this process; returns its exit status and what it prints."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["fedpfl", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main()
        except SystemExit as stop:
            code = stop.code
    return Result(int(code or 0), out.getvalue(), err.getvalue())


def play_run(folder: Path, *overrides: str) -> str:
    """Play the run of these words, whose configuration is composed once.

    Returns what it says on the terminal; raises what it raises. folder: the run directory.
    """
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        plan = check_config(compose_once(*overrides))
        for _ in session.Session(plan=plan, path=folder).play():
            pass
    return told.getvalue()


def play_rows(folder: Path, *overrides: str) -> list[dict[str, str]]:
    """Play the run of these words, and return its rows."""
    play_run(folder, *overrides)
    return read_table(folder / "rounds.csv")


def assert_refused(folder: Path, message: str, *overrides: str) -> None:
    """Assert that a run is refused in one line, and writes no row. folder: the run directory."""
    with pytest.raises(FedpflError) as error:
        play_run(folder, *overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (folder / "rounds.csv").exists()


def start_process(
    *arguments: str, cwd: Path, script: str | None = None, alone: bool = False
) -> subprocess.Popen[str]:
    """Start the command, or a script that ends in it, as a process.

    alone: in a process group of its own.
    """
    if script is None:
        arguments = keep_last_words(*arguments)
    what = ["-c", script] if script else ["-m", "fedpfl.train"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Whoever started the tests in the background may have them ignore signals, and children inherit
    # that.
    about: dict[str, Any] = {"cwd": cwd, "env": _environment(), "preexec_fn": _heed_interrupts}
    return subprocess.Popen(
        [sys.executable, *what, *arguments], start_new_session=alone, **about, **pipes
    )


def _heed_interrupts() -> None:
    for number in interrupts.EXIT_STATUS:
        signal.signal(number, signal.SIG_DFL)


def wait_for(process: subprocess.Popen[str]) -> Result:
    out, err = process.communicate(timeout=600)
    return Result(process.returncode, out, err)


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Return the bytes of all files below a folder, and None for folders.

    The lock is left out, for it says who was last.
    """
    paths = (path for path in folder.rglob("*") if path.name != "run.lock")
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in paths
    }


def read_table(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file without the columns that a clock wrote."""
    with path.open(newline="") as file:
        return [
            {key: cell for key, cell in row.items() if key not in CLOCKED}
            for row in csv.DictReader(file)
        ]


def read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def rewrite_summary(folder: Path, without: Collection[str] = (), **changes: Any) -> None:
    """Rewrite summary.json as a run would, with its digest unless that is left out."""
    told = {
        key: value
        for key, value in {**read_summary(folder), **changes}.items()
        if key not in ("digest", *without)
    }
    if "digest" not in without:
        told["digest"] = digests.summary_digest(told)
    (folder / "summary.json").write_text(json.dumps(told))


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the trees of the last checkpoint, and its round."""
    payload = torch.load(folder / "state.pt", weights_only=True)
    return {
        "round": torch.tensor(payload["round"]),
        **{part: payload[part] for part in ("rows", *resume.STATE_TREES)},
    }
