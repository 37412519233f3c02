"""Tune every method alike on a suite of settings and make a board of it; `verify` runs a row again.

    python -m fedpfl.board suite=small                       # conf/board/small.yaml; writes outputs/board/small/
    python -m fedpfl.board suite=small method=fedavg,fedper,local_only trials=4 seeds=2
    python -m fedpfl.board verify 3d2c suite=small           # the row whose configuration begins so: equal or not?

Each method is tuned as `python -m fedpfl.tune` does: as many trials for all, chosen by held-out
samples, then fresh seeds. Other words are those of fedpfl.train, for all runs alike, launchers
among them. The same command goes on where it was stopped. `verify` ends with status 0 where the row
is equal, 1 where it is not.
"""

from __future__ import annotations

import sys

from fedpfl.ground import interrupts, terminal

if __name__ == "__main__":
    interrupts.answer(interrupts.importing)
    terminal.outlive_readers()

import contextlib
import csv
import hashlib
import io
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from fedpfl.config import overrides
from fedpfl.config.foreign import ForeignRuns, read_command
from fedpfl.config.messages import one_line
from fedpfl.config.plan import load_data, register
from fedpfl.ground.errors import FedpflError, one_of, reason
from fedpfl.ground.files import output
from fedpfl.ground.terminal import tell
from fedpfl.ground.words import check_words, replaced_words
from fedpfl.methods import METHODS
from fedpfl.report import html
from fedpfl.report.fairness import BASELINES, as_table, compared, judged_as
from fedpfl.report.figures import accuracy_figure
from fedpfl.report.grouping import groups
from fedpfl.report.load import runs
from fedpfl.report.ranking import complete, diagram, rank_tables, ranked
from fedpfl.report.render import render, screen
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table, over_seeds
from fedpfl.report.tables import COLUMNS, ROW, accuracy_table
from fedpfl.report.text import clip, csv_cell, few
from fedpfl.runner.faults import STATUS, Diverged
from fedpfl.runner.spaces import space
from fedpfl.runner.tuning import places, tune
from fedpfl.tune import order, play

LISTED = "python -m fedpfl.board --help tells what it takes"
SUITES = Path(overrides.CONF) / "board"
MEASURED = (
    *(
        "accuracy",
        "accuracy_worst10",
        "ft_accuracy",
        "unseen_accuracy",
        "unseen_ft_accuracy",
        "gap",
    ),
    *("values_down", "values_up", "bits_down", "bits_up"),
)
SIMULATED = "sim_seconds"
"""The one column that is a mean over rounds."""
SHOWN = {
    **{
        "setting": Column("setting"),
        "rank": Column("rank", "decimal", spare=1),
        "method": ROW["method"],
    },
    **{
        key: COLUMNS[key]
        for key in ("accuracy", "accuracy_worst10", "ft_accuracy", "unseen_accuracy")
    },
    **{key: COLUMNS[key] for key in ("unseen_ft_accuracy", "gap")},
    **{
        f"harmed_{name}": Column("harmed %", "percent", f"vs {told}")
        for name, told in BASELINES.items()
    },
    **{key: COLUMNS[key] for key in ("bits_down", "bits_up")},
    **{SIMULATED: Column("sim s/round", "number"), "seeds": Column("seeds", "whole")},
    **{"chosen": Column("chosen"), "identity": Column("row")},
}
TRACED = {
    "data": Column("data"),
    "versions": Column("versions"),
    "command": Column("command", "long"),
}
_NUMBER = r"\d+(\.\d+)+\S*"
VERSIONS = re.compile(
    rf"fedpfl {_NUMBER}, torch {_NUMBER}, python {_NUMBER}, commit (None|[0-9a-f]+)( [0-9a-f]+)*"
)
"""What `traced` writes of versions."""
CAPTION = (
    "Test accuracy in percent, mean (sample standard deviation) over fresh seeds, at each run's round of the best "
    "validation accuracy; harmed: percent of clients that are worse off than with FedAvg+FT, or alone, after the last "
    "round; sim s/round: simulated, on equal devices, mean over rounds; rank: mean over settings, FedAvg judged after "
    "fine-tuning."
)


class Asked(NamedTuple):
    """What a command line asks for: the suite's name and content, its folder, and the words for all
    its runs.
    """

    suite: Mapping[str, Any]
    folder: Path
    words: list[str]


def read(words: Sequence[str]) -> Asked:
    """Read the command line. Raises FedpflError."""
    words = check_words(words, {}, LISTED)
    if note := replaced_words(words):
        tell(note)
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    known = sorted(path.stem for path in SUITES.glob("*.yaml"))
    if (name := given.pop("suite", "")) not in known:
        raise FedpflError(f"suite: {one_of(known, name)}")
    suite = yaml.safe_load((SUITES / f"{name}.yaml").read_text())
    folder = Path(overrides.text_of(words, "hydra.sweep.dir") or f"outputs/board/{name}")
    given.pop("hydra.sweep.dir", None)
    suite |= {key: given.pop(key) for key in ("trials", "seeds", "method") if key in given}
    kept = [word for word in suite["words"] if word.partition("=")[0] not in given]
    own = ("suite", "hydra.sweep.dir", "trials", "seeds", "method")
    return Asked(
        suite, folder, [*kept, *(word for word in words if word.partition("=")[0] not in own)]
    )


def tuned(asked: Asked) -> tuple[dict[Path, Mapping[str, Any]], list[str]]:
    """Tune every method in every setting; return what was found by the final runs' directories, and
    what failed.
    """
    suite, found, failed = asked.suite, dict[Path, Mapping[str, Any]](), list[str]()
    every = [
        name for name in sorted(METHODS) if not METHODS[name].pairs
    ]  # those are for networks with low-rank pairs
    methods = every if suite["method"] == "all" else suite["method"].split(",")
    if unknown := [
        method for method in methods if method not in METHODS
    ]:  # told hours before its turn
        raise FedpflError(f"method: {one_of(sorted(METHODS), unknown[0])}")
    numbers = [f"trials={suite['trials']}", f"seeds={suite['seeds']}"]
    order([f"method={methods[0]}", *numbers])
    common = [
        word for word in asked.words if not (word.startswith("method.") or overrides.sweeps(word))
    ]
    composed = {
        setting: overrides.composed([*own, *common]) for setting, own in suite["settings"].items()
    }
    for setting, own in suite["settings"].items():
        try:
            load_data([composed[setting]])
        except FedpflError as error:
            failed.append(f"{setting}: left out: {error}")
            tell(failed[-1])
            continue
        for method in methods:
            words = [f"method={method}", *own, *asked.words, *numbers]
            words += overrides.words("hydra.sweep.dir", str(asked.folder / setting))
            try:
                (record,) = tune(order(words), play).frame.to_dict("records")
            except (FedpflError, *overrides.REFUSED) as error:
                failed.append(f"{setting}, {method}: left out: {one_line(error)}")
                tell(failed[-1])
                continue
            except SystemExit as end:
                if end.code in (130, 143):
                    raise
                failed.append(f"{setting}, {method}: left out: its runs failed (status {end.code})")
                continue
            for place in places(asked.folder / setting / "final", *_repeated(record["command"])):
                found[place.resolve()] = {**record, "setting": setting}
    return found, failed


def board(
    found: Mapping[Path, Mapping[str, Any]], failed: Sequence[str], title: str
) -> tuple[Table, list[Run]]:
    """Make the table of the final runs. found: what `tuned` returns. Returns also the runs."""
    members = [run for run in runs(*found) if run.status == "finished"]
    gathered, told = groups(members), accuracy_table(members, "validation", chosen=MEASURED)
    fair, strange = compared(gathered)
    judged = [one.group for one in fair if one.own]
    harms = dict(zip(judged, as_table(fair, ()).frame.to_dict("records"), strict=True))
    try:
        tables, ranked = rank_tables(members, select="validation")
        rank, notes = (
            ranked.places.mean().to_dict(),
            [note for note in tables[-1].notes if note.startswith("Left out")],
        )
    except FedpflError as error:
        rank, notes = {}, [f"No ranks: {error}."]
    records = []
    for group, row in zip(gathered, told.frame.to_dict("records"), strict=True):
        run, record = group.runs[0], found[group.runs[0].path.resolve()]
        label = BASELINES["fedavg"] if run.method_name == "fedavg" else judged_as(group)[0]
        harmed = {
            key: harms.get(group, {}).get(key)
            for name in BASELINES
            for key in _both(f"harmed_{name}")
        }
        own = {
            key: value
            for name in MEASURED
            for key in _both(name)
            if (value := row.get(key)) is not None
        }
        records.append(
            {
                "setting": f"{record['setting']}: {group.setting}",
                "rank": rank.get(run.called, rank.get(label)),
                "method": run.called,
                **own,
                **harmed,
                SIMULATED: over_seeds([_simulated(run) for run in group.used])[0],
                "seeds": len(group.used),
                "chosen": record["chosen"],
                "identity": run.identity,
                **traced(group.used),
                "command": record["command"],
            }
        )
    records.sort(key=lambda one: (one["setting"], -float(np.nan_to_num(one["accuracy"], nan=-1.0))))
    there = {run.path.resolve() for run in members}
    lost = dict.fromkeys(
        f"{one['setting']}, {one['method']}" for place, one in found.items() if place not in there
    )
    failed = [
        *failed,
        *(f"{name}: runs with fresh seeds diverged, and are in no mean." for name in lost),
    ]
    frame = pd.DataFrame(records)
    notes = [*notes, *failed, *strange, *(note for note in told.notes if note.startswith("Empty"))]
    table = Table.of(
        records,
        {**SHOWN, **TRACED},
        title=title,
        frame=frame,
        caption=CAPTION,
        notes=tuple(notes),
        by=1,
    )
    return table, members


def traced(members: Sequence[Run]) -> dict[str, str]:
    """Return what the runs were made from: data fingerprints, versions, and a digest of all numbers
    but times.
    """
    ordered, digest = sorted(members, key=lambda run: run.seed), hashlib.blake2b(digest_size=8)
    for run in ordered:
        digest.update(run.digits.to_csv(index=False).encode())
    versions = [
        f"{key} {run.environment.get(key)}"
        for run in ordered[:1]
        for key in ("fedpfl", "torch", "python")
    ]
    commits = dict.fromkeys(str(run.environment.get("commit"))[:10] for run in ordered)
    return {
        "data": " ".join(str(run.summary.get("data")) for run in ordered),
        "versions": ", ".join([*versions, f"commit {' '.join(commits)}"]),
        "digest": digest.hexdigest(),
    }


def write(asked: Asked, table: Table, members: Sequence[Run]) -> None:
    """Write the board as CSV, Markdown and a page, with figures and a page of each setting beside
    it.
    """
    folder = asked.folder
    shown = Table.of(
        table.frame.to_dict("records"), SHOWN, caption=table.caption, notes=table.notes, by=1
    )
    (folder / "board.csv").write_text(render(table, "csv"))
    (folder / "board.md").write_text(render(shown, "markdown") + "\n")
    with output(folder / "board.html") as file:
        file.write_text(html.single(table), encoding="utf-8")
    finals = [folder / setting / "final" for setting in asked.suite["settings"]]
    html.write([final for final in finals if final.is_dir()], folder / "pages", "validation")
    accuracy_figure(members, folder / "accuracy")
    try:
        diagram(rank_tables(members, select="validation")[1], folder / "ranks")
    except FedpflError as error:
        tell(f"no diagram of ranks: {error}")
    print(render(shown, width=screen()))
    tell(f"wrote {folder / 'board.html'}")


def verify(row: str, asked: Asked) -> int:
    """Run a row of the board again, in a folder of its own, and say whether all that it shows is
    equal; 1 if not.

    The row is data of a stranger's: of its command nothing is run but known keys with plain values.
    What it shows beside FedAvg and Local-Only needs the runs of their rows, too. Raises FedpflError
    where there is no such row.
    """
    path = asked.folder / "board.csv"
    listed = read_rows(path)
    chosen = listed[listed["identity"].str.startswith(row)]
    if len(chosen) != 1:
        rows = few((listed if chosen.empty else chosen)["identity"])
        raise FedpflError(
            f"{path}: {len(chosen) or 'no'} rows begin with {row!r}; there are {rows}"
        )
    (shown,) = chosen.to_dict("records")

    # ---- the runs of the row, and of those that it is measured beside
    played: dict[Path, Mapping[str, Any]] = {}
    for record in (shown, *_baseline_rows(listed, shown)):
        runs_of_row = _with_known_data(read_command(record["command"]), asked)
        setting = _setting_of(record, runs_of_row, asked)
        for place in _play_again(runs_of_row, asked.folder / "verify"):
            played[place.resolve()] = {**record, "setting": setting}

    # ---- every column again
    table, _ = board(played, [], "")
    again = pd.read_csv(_text(table.frame), dtype=str, keep_default_na=False).to_dict("records")
    (here,) = [record for record in again if record["identity"] == shown["identity"]] or [{}]
    if not here:
        made = few(record["identity"] for record in again) or "no finished run"
        tell(
            f"{shown['method']}, {shown['setting']}: not equal: its command makes {made}, no {shown['identity']}"
        )
        return 1
    here |= {"rank": _rank(listed, shown), "chosen": _chosen(shown, asked)}
    # Versions follow from no run made here: those of another machine are told, not held against the
    # row.
    form = "versions" not in shown or VERSIONS.fullmatch(shown["versions"])
    different = [
        key for key in shown if shown[key] != here.get(key, "") and (key != "versions" or not form)
    ]
    name = f"{shown['method']}, {shown['setting']}"
    if different:
        what = "; ".join(f"{key} {shown[key]} there, {here.get(key, '')} here" for key in different)
        tell(f"{name}: not equal: {what}; versions {here['versions']}")
        return 1
    print(f"{name}: equal, every number of {here['seeds']} runs")
    if shown.get("versions", here["versions"]) != here["versions"]:
        print(f"  made with other versions: {shown['versions']} there, {here['versions']} here")
    return 0


def read_rows(path: Path) -> pd.DataFrame:
    """Return the rows of a board's CSV as texts, which may be anybody's.

    Raises:
        FedpflError: for what no board writes: cells that a spreadsheet would take for a formula or
            a terminal obey, rows of another length, a column twice.
    """
    if not path.is_file():
        raise FedpflError(
            f"{path} is absent; make it with python -m fedpfl.board, or give its folder"
        )
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = csv.reader(file, strict=True)
    except (OSError, ValueError, csv.Error) as error:
        raise FedpflError(f"{path} cannot be read as a board: {reason(error)}") from None
    if lacking := {"identity", "command", "setting", "method", "chosen"} - {*header}:
        raise FedpflError(f"{path} is no board: it has no column {min(lacking)}")
    for number, line in enumerate([header, *lines], start=1):
        if len(line) != len(header) or len({*header}) < len(header):
            raise FedpflError(
                f"{path}: line {number} has not one cell for each of {len(header)} different columns"
            )
        cells = [re.sub(r"\s", " ", cell) for cell in line]
        if strange := [cell for cell in cells if csv_cell(cell) != cell]:
            raise FedpflError(
                f"{path}: line {number} has a cell that is no plain text: {clip(strange[0])!r}"
            )
    return pd.DataFrame(lines, columns=header, dtype=str)


def _with_known_data(foreign: ForeignRuns, asked: Asked) -> ForeignRuns:
    """Return a stranger's runs, which download no data set but those of the suite."""
    suite_words = [word for words in asked.suite["settings"].values() for word in words]
    if all(word in suite_words for word in foreign.words if word.startswith("dataset=")):
        return foreign
    return foreign._replace(words=[*foreign.words, "dataset.download=false"])


def _setting_of(record: Mapping[str, str], foreign: ForeignRuns, asked: Asked) -> str:
    """Return the setting of the suite whose words a row has: the one that it names, where several
    fit.
    """
    name, settings = record["setting"].partition(": ")[0], asked.suite["settings"]
    fitting = [setting for setting in settings if {*settings[setting]} <= {*foreign.words}]
    return name if name in fitting else (*fitting, "none of the suite")[0]


def _baseline_rows(listed: pd.DataFrame, shown: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the rows of the same setting that `harmed` is told by. Raises FedpflError where there
    are two of one.
    """
    names = [
        name for name in BASELINES if f"harmed_{name}" in shown
    ]  # an emptied cell is an altered one
    here = listed[
        (listed["setting"] == shown["setting"]) & (listed["identity"] != shown["identity"])
    ]
    methods = here["command"].str.extract(r" method=(\w+) ", expand=False)
    if twice := [name for name in names if (methods == name).sum() > 1]:
        raise FedpflError(
            f"{shown['setting']} has several rows of method={twice[0]}, which others are measured by"
        )
    return [record for name in names for record in here[methods == name].to_dict("records")]


def _play_again(foreign: ForeignRuns, root: Path) -> list[Path]:
    """Run a stranger's words anew; return the run directories."""
    seeds = ",".join(map(str, foreign.seeds))
    words = [*foreign.words, f"seed=choice({seeds})", "hydra.sweeper.table=false", "restart=true"]
    play(["-m", *overrides.words("hydra.sweep.dir", str(root))], words, bears=STATUS[Diverged])
    return places(root, foreign.words, foreign.seeds)


def _rank(listed: pd.DataFrame, shown: Mapping[str, str]) -> str:
    """Return a row's mean rank as the accuracies of all rows make it, "" where nothing can be
    ranked.
    """
    accuracies: dict[str, dict[str, float]] = {}
    for record in listed.to_dict("records"):
        column = (
            "ft_accuracy"
            if record["method"].startswith("FedAvg") and _is_fedavg(record)
            else "accuracy"
        )
        with contextlib.suppress(ValueError):  # no number: that row is not equal, this one may be
            if value := record.get(column):
                accuracies.setdefault(record["setting"], {})[record["method"]] = float(value)
    try:
        rank = ranked(complete(accuracies)[0]).places.mean().get(shown["method"])
    except FedpflError:
        return ""
    return "" if rank is None else _as_text(rank)


def _is_fedavg(record: Mapping[str, str]) -> bool:
    return " method=fedavg " in record["command"]


def _as_text(value: float) -> str:
    """Return a number as the board's CSV has it."""
    return pd.read_csv(_text(pd.DataFrame({"value": [value]})), dtype=str)["value"][0]


def _chosen(shown: Mapping[str, str], asked: Asked) -> str:
    """Return which words of a row's command its search has chosen."""
    words = read_command(shown["command"]).words
    method = next((word.partition("=")[2] for word in words if word.startswith("method=")), "")
    of_setting = asked.suite["settings"].get(shown["setting"].partition(": ")[0], [])
    searched = {word.partition("=")[0] for word in space(method, [*of_setting, *asked.words])}
    return " ".join(word for word in words if word.partition("=")[0] in searched)


def _simulated(run: Run) -> float:
    return float(run.rounds.reindex(columns=[SIMULATED]).mean().item())


def _text(frame: pd.DataFrame) -> io.StringIO:
    return io.StringIO(render(Table("", (), [], frame), "csv"))


def _both(name: str) -> tuple[str, str]:
    return name, f"{name}_seed_std"


def _repeated(command: str) -> tuple[list[str], list[int]]:
    """Return the words and the seeds of a row's command."""
    *words, seeds = shlex.split(command)[4:]
    return words, [int(seed) for seed in seeds.partition("=")[2].split(",")]


def main() -> int:
    """Run the command: faults of the user's making are one line and a non-zero exit."""
    words = sys.argv[1:]
    if {"-h", "--help"} & {*words} or not words:
        print(__doc__)
        return 0
    try:
        register()
        if words[0] == "verify":
            if len(words) < 2:
                raise FedpflError(
                    "verify needs a row: python -m fedpfl.board verify ROW suite=small"
                )
            if more := [
                word for word in words[2:] if not word.startswith(("suite=", "hydra.sweep.dir="))
            ]:
                raise FedpflError(
                    f"{more[0]}: verify runs the words of the row itself; leave it out"
                )
            check_words(words[1:2], {}, LISTED)
            return verify(words[1], read(words[2:]))
        asked = read(words)
        found, failed = tuned(asked)
        if not found:
            raise FedpflError(
                f"no method came to its end: {failed[0] if failed else 'none was named'}"
            )
        write(asked, *board(found, failed, f"Board {asked.folder.name}"))
        return 1 if failed else 0
    except (FedpflError, *overrides.REFUSED) as error:
        tell(one_line(error))
        return 2
    except KeyboardInterrupt as error:
        interrupts.ended(error, tell)
        return 130


if __name__ == "__main__":
    interrupts.answer(interrupts.playing)
    raise SystemExit(main())
