"""Whatever happens to a file of a finished run, no reader shows a number that is not the run's.

One file is damaged at a time: a bit flips, a digit changes, it is cut, it goes, or another run's or
an earlier one of the same run takes its place. Then every command of the report, `fedpfl.load` and
the export either shows what the run wrote or names the directory in one line.
"""

import csv
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import fedpfl
from fedpfl import export
from fedpfl.ground import answer
from fedpfl.ground.errors import FedpflError
from fedpfl.report.__main__ import main
from tests.command import TINY, call_main, format_override, play_run
from tests.conftest import keep_quick
from tests.record.test_damage import OTHER_LABELS, interrupt, overwrite, samples

CASES = (10, 200)  # damaged files
RUN = (*TINY, *("rounds=3", "method=fedcac", "eval.finetune_epochs=1"), "dataset=npz")


@dataclass(frozen=True)
class Ran:
    """A run directory, what its files may be exchanged for, and what is true of it."""

    path: Path
    others: list[Path]
    rounds: pd.DataFrame
    clients: pd.DataFrame
    config: dict[str, Any]
    logits: torch.Tensor


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A finished run, and others of its settings: on other data, of another seed, its beginning."""
    place = tmp_path_factory.mktemp("readers")
    path = samples(place / "own.npz")
    own = (*RUN, format_override("dataset.path", path))
    play_run(place / "finished", *own)
    interrupt(place / "interrupted", *own)
    play_run(place / "again", *own)
    play_run(place / "other seed", *own, "seed=3")
    content = path.read_bytes()
    overwrite(path, OTHER_LABELS)
    play_run(place / "other data", *own)
    path.write_bytes(content)
    found = fedpfl.load(place / "finished")
    others = sorted(
        folder for folder in place.iterdir() if folder.is_dir() and folder != found.path
    )
    logits = found.predict(0, found.samples(0)[0])
    return Ran(found.path, others, found.rounds, found.clients, found.config, logits)


def flipped(chance: random.Random, path: Path, others: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def mistyped(chance: random.Random, path: Path, others: list[Path]) -> None:
    """Another digit somewhere: the file reads as well as before."""
    content = path.read_bytes()
    at = chance.choice([match.start() for match in re.finditer(rb"\d", content)])
    digit = chance.choice([digit for digit in b"0123456789" if digit != content[at]])
    path.write_bytes(content[:at] + bytes([digit]) + content[at + 1 :])


def cut(chance: random.Random, path: Path, others: list[Path]) -> None:
    """Anywhere, or where a line ends."""
    content = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(content) if byte == ord("\n")]
    end = chance.choice([chance.randrange(len(content)), chance.choice([0, *ends])])
    path.write_bytes(content[:end])


def gone(chance: random.Random, path: Path, others: list[Path]) -> None:
    path.unlink()


def exchanged(chance: random.Random, path: Path, others: list[Path]) -> None:
    files = [folder / path.name for folder in others]
    shutil.copy(chance.choice([file for file in files if file.exists()]), path)


DAMAGE: tuple[Callable[[random.Random, Path, list[Path]], None], ...] = (
    *(flipped, mistyped, cut, gone, exchanged),
)


def told(path: Path, ask: Callable[[], Any], lines: list[str]) -> Any:
    """The answer, or None where it is a line that names the directory, one more of `lines`."""
    try:
        return ask()
    except FedpflError as error:
        line = str(error)
    assert str(path) in line
    assert "\n" not in line
    lines.append(line)
    return None


def printed(*words: str | Path) -> tuple[str, list[str]]:
    """What a command prints, and the lines on stderr; every other ending is a traceback."""
    result = call_main(main, *map(str, words))
    assert result.code in (0, 2)
    return result.out, result.err.splitlines()


def judge(run: Path, truth: Ran, lines: list[str]) -> bool:
    """Ask what reads a damaged directory; returns whether there is a run to show."""
    found = told(run, lambda: fedpfl.load(run), lines)
    table = told(run, lambda: found.rounds, lines) if found else None
    if found:
        assert found.config == truth.config
        clients = told(run, lambda: found.clients, lines)
        assert clients is None or clients.equals(truth.clients)
        logits = told(run, lambda: found.predict(0, found.samples(0)[0]), lines)
        assert logits is None or logits.equal(truth.logits)
    answer._facts.clear()
    printed("ls", run)
    listed = answer.make_plain(answer._facts.get("runs", []))
    shown, skipped = printed("tables", run, "--format", "csv")
    if table is None or not len(table):
        assert [one["accuracy"] for one in listed] in ([], [None])
        assert not shown
        assert any(str(run) in line for line in skipped)
        return False
    assert table.equals(truth.rounds)
    assert listed[0]["accuracy"] == table["accuracy"].iloc[-1]
    (row,) = csv.DictReader(StringIO(shown))
    assert (float(row["accuracy"]), row["method"]) == (table["accuracy"].iloc[-1], "FedCAC")
    return True


def draw(run: Path, truth: Ran, place: Path, shown: bool) -> None:
    """Ask what draws and what writes files. shown: whether there is a run to show."""
    for command in ("figures", "html"):
        _, lines = printed(command, run, "--out", place / command)
        assert shown or any(str(run) in line for line in lines)
    printed("compare", run, truth.path)
    exported = call_main(export.main, str(run), str(place / "models"))
    assert (place / "models").exists() == (exported.code == 0)
    assert exported.code == 0 or str(run) in exported.err
    if exported.code == 0:
        found = fedpfl.load(truth.path).personal(0)
        own = torch.load(place / "models/client0.pt", weights_only=True)
        assert all(own[name].equal(found[name]) for name in found)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("cases", keep_quick(CASES))
def test_no_reader_shows_what_the_run_did_not_write(cases, ran, tmp_path):
    named = 0
    names = sorted(path.name for path in ran.path.iterdir())
    for number in range(cases):
        chance, lines = random.Random(f"finished {number}"), list[str]()
        run, name = tmp_path / str(number) / "run", names[number % len(names)]
        shutil.copytree(ran.path, run)
        DAMAGE[(number // len(names) + number) % len(DAMAGE)](chance, run / name, ran.others)
        shown = judge(run, ran, lines)
        if cases == CASES[1]:
            draw(run, ran, tmp_path / str(number), shown)
        named += bool(lines)
        shutil.rmtree(run.parent)
    print(f"{named} of {cases} named, the others as before")
    assert cases // 4 < named < cases
