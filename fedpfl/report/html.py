"""One self-contained HTML page per experiment: `python -m fedpfl.report html [ROOT ...]`."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pandas as pd

from fedpfl.ground.files import whole
from fedpfl.report.fairness import as_table, compared
from fedpfl.report.grouping import Group, groups
from fedpfl.report.load import chosen, directories, nothing_below, runs, to_stderr
from fedpfl.report.page.data import page_data
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.table import Cell, Column, Table, as_html, number, over_seeds
from fedpfl.report.tables import accuracy_table, chosen_on
from fedpfl.report.text import html as escape

SETUP = {
    **{"model": "model.name", "clients": "clients", "participation": "participation"},
    **{
        "local epochs": "local.epochs",
        "local steps": "local.steps",
        "batch size": "local.batch_size",
        "learning rate": "local.lr",
    },
    **{"momentum": "local.momentum", "weight decay": "local.weight_decay", "evaluated every": "eval.every"},
    **{"fine-tuning epochs": "eval.finetune_epochs", "precision": "engine.precision"},
}
"""What of the configuration the page tells in its head."""
_HOST = '<noscript><p class="note">The chart needs JavaScript.</p></noscript><div class="chart"></div>'
_CHARTS = {
    "curves": (
        "Convergence",
        "Means over seeds, with a band of one sample standard deviation. Markers are measured points. "
        "Point at the chart for numbers; a click on a method hides it in all charts.",
    ),
    "clients": (
        "Clients",
        "Accuracy of every client's personal model after the last evaluation, all seeds together. "
        "Box: quartiles and median; diamond: mean; crosses: worst decile; triangle: its mean.",
    ),
    "fairness": (
        "Fairness",
        "Across: a client's accuracy in the baseline; up: its own, in percent, all seeds together. Below the diagonal "
        "are the clients that are harmed.",
    ),
    "partition": (
        "Partition",
        "Samples of each class that a client holds, training, validation and test together; the stronger the "
        "colour the more, logarithmic; empty is none.",
    ),
    "masks": ("Masks", "Entries that are personalised, by tensor over rounds, mean over the cohort and over seeds."),
    "cost": (
        "Cost",
        "Values and MB (megabytes, positions of masked entries included) per client that took part and round; GB over "
        "all rounds and clients; s/round: median over rounds, training without evaluation; hours: the whole run. Means "
        "over seeds.",
    ),
}


class Experiment(NamedTuple):
    """What one page shows. name: of its file. base: the folder that holds its runs. skipped: a line per directory."""

    name: str
    base: Path
    runs: list[Run]
    skipped: list[str]


def write(
    roots: Sequence[Path],
    out: Path,
    select: str = "last",
    every: int = 1,
    where: Sequence[str] = (),
    warn: Callable[[str], None] = to_stderr,
    table: Callable[..., Table] = accuracy_table,
) -> list[Path]:
    """Write a page per experiment into `out`, and `index.html` where there are several; returns the files.

    select, every: as in `accuracy_table`, for which `table` may stand. where: filters, such as `method=fedobp`. Raises
    FedpflError where a root does not exist, nothing can be read, or no run is let through.
    """
    found = experiments(roots, warn)
    kept = set(chosen([run for experiment in found for run in experiment.runs], where))
    found = [one._replace(runs=[run for run in one.runs if run in kept]) for one in found]
    shown = [experiment for experiment in found if experiment.runs]
    if not shown:
        raise nothing_below(roots)
    out.mkdir(parents=True, exist_ok=True)
    pages = {experiment.name: page(experiment, out, select, every, table) for experiment in shown}
    pages |= {"index": index(found, select, every, table)} if len(found) > 1 else {}
    for name, text in pages.items():
        with whole(out / f"{name}.html") as file:
            file.write_text(text, encoding="utf-8")
    return [out / f"{name}.html" for name in pages]


def experiments(roots: Iterable[Path], warn: Callable[[str], None] = to_stderr) -> list[Experiment]:
    """Return the runs by experiment: the first folder below a root, or the root if it is one or lies in one.

    Of one configuration that ran in two experiments each keeps its own.
    """
    folders: dict[Path, list[Path]] = {}
    taken: set[Path] = set()
    for root in roots:
        for path in directories(root, warn=warn):
            if path.resolve() not in taken:
                taken.add(path.resolve())
                folders.setdefault(_base(path, root), []).append(path)
    found = []
    names = {"index"}
    for base, paths in folders.items():
        skipped: list[str] = []
        members = runs(*paths, warn=skipped.append)
        for line in skipped:
            warn(line)
        skipped = [line.removeprefix("skipped ") for line in skipped]
        found.append(Experiment(_free(_name(base.resolve()), names), base, members, skipped))
    return found


def page(
    experiment: Experiment,
    out: Path,
    select: str = "last",
    every: int = 1,
    make_table: Callable[..., Table] = accuracy_table,
) -> str:
    """Return the experiment's page. out: the folder it is written to, which its links start from."""
    notes: list[str] = []
    table = make_table(experiment.runs, select, every, warn=notes.append)
    gathered = groups(experiment.runs)
    judged = [float(value) for value in table.frame["accuracy"]]
    fair, strange = compared(gathered)
    data = page_data(gathered, judged, notes.append, fair)
    has = {
        "curves": bool(data["metrics"]),
        "clients": any("clients" in record for record in data["groups"]),
        "fairness": any("fairness" in record for record in data["groups"]),
        "partition": bool(data["partitions"]),
        "masks": any("mask" in record for record in data["groups"]),
        "cost": True,
    }
    facts, overview = _overview(gathered, out, experiment.base)
    sections = {
        "runs": (
            "Runs",
            _pairs("tiles", _summary(gathered)),
            _pairs("facts", facts),
            as_html(overview, "bare"),
            _listed("Skipped, not in any table or chart:", experiment.skipped),
            _listed("Shown in part:", notes),
        ),
        "accuracy": ("Accuracy", as_html(table), _lines([*table.prose("html"), "A click on a heading sorts."])),
        **{name: (heading, _lines([text]), _HOST) for name, (heading, text) in _CHARTS.items() if has[name]},
    }
    if "clients" in sections and {"unseen_accuracy", "unseen_ft_accuracy"} & data["metrics"].keys():
        sections["clients"] = (*sections["clients"], _lines(["Clients that never take part are left out."]))
    if has["fairness"]:
        told = as_table(fair, strange)
        sections["fairness"] += (as_html(told), _lines(told.prose("html")))
    sections["cost"] += (as_html(_costs(gathered, judged), "bare"),)
    body = "\n".join(_section(name, heading, *content) for name, (heading, *content) in sections.items())
    stamp = max((run.path / "rounds.csv").stat().st_mtime for run in experiment.runs)
    newest = datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%d %H:%M UTC")
    body += f"\n<footer>{_lines([f'{experiment.base}; newest round {newest}'])}</footer>"
    return _document(experiment.name, {name: heading for name, (heading, *_) in sections.items()}, body, data)


def index(
    found: Sequence[Experiment], select: str = "last", every: int = 1, make_table: Callable[..., Table] = accuracy_table
) -> str:
    """Return a page that names all experiments and links to theirs."""
    rows = []
    for experiment in found:
        if not experiment.runs:
            continue
        frame = make_table(experiment.runs, select, every, warn=lambda _: None).frame
        best = "; ".join(_best(part, select) for _, part in frame.groupby(["dataset", "partition"], sort=False))
        name = Cell(experiment.name, link=f"./{quote(experiment.name)}.html")
        counts = [Cell(len(frame)), Cell(len(experiment.runs)), Cell(_states(experiment.runs)), Cell(best)]
        rows.append([name, *counts, Cell(_hours(experiment.runs))])
    best_of = Column("best mean accuracy by data set and partition", "long")
    numbers = [Column(name, "whole") for name in ("configurations", "runs")]
    heads = (Column("experiment"), *numbers, Column("status"), best_of, Column("hours", "number"))
    skipped = [line for experiment in found for line in experiment.skipped]
    table = as_html(Table("experiments", heads, rows), "bare")
    chosen = [*chosen_on(select), *["Rounds were chosen by validation accuracy."] * (select == "validation")]
    body = _section("experiments", "Experiments", table, _lines(chosen), _listed("Skipped, not in any page:", skipped))
    return _document("Experiments", {}, body)


def embedded(data: Any) -> str:
    """Return JSON that can stand inside a script element, whatever its strings hold."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _document(title: str, navigation: Mapping[str, str], body: str, data: Any = None) -> str:
    """A whole page that loads nothing. navigation: heading by id of its section. data: what the charts draw."""
    style, script = (
        resources.files("fedpfl.report.page").joinpath(name).read_text(encoding="utf-8")
        for name in ("style.css", "charts.js")
    )
    own = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)]
    # A label that slipped through would still not run: only this script may, by its hash, and nothing may be loaded.
    policy = f"default-src 'none'; style-src 'sha256-{own[0]}'; script-src 'sha256-{own[1]}'; base-uri 'none'"
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading in navigation.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · fedpfl</title>
<style>{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><nav aria-label="sections">{links}</nav>
<div id="settings" role="group" aria-label="data set and partition of the charts"></div>
<button id="theme" type="button" hidden>dark</button></header>
<main>
{body}
</main>
<script type="application/json" id="data">{embedded(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def _section(name: str, heading: str, *content: str) -> str:
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n' + "\n".join(content) + "\n</section>"


def _pairs(kind: str, values: Mapping[str, str]) -> str:
    pairs = "".join(f"<div><dt>{escape(word)}</dt><dd>{escape(value)}</dd></div>" for word, value in values.items())
    return f'<dl class="{kind}">{pairs}</dl>' if pairs else ""


def _lines(texts: Iterable[str]) -> str:
    return "".join(f'<p class="note">{escape(text)}</p>' for text in texts)


def _listed(heading: str, texts: Sequence[str]) -> str:
    """A warning with a list, or nothing."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<div class="warning" role="note"><p>{escape(heading)}</p><ul>{items}</ul></div>' if texts else ""


def _overview(gathered: Sequence[Group], out: Path, base: Path) -> tuple[dict[str, str], Table]:
    """What is alike in all runs, and every run, whatever its state."""
    members = [(group, run) for group in gathered for run in group.runs]
    facts: dict[str, str] = {}
    for name, key in SETUP.items():
        values = [value for _, run in members if (value := run.get(key)) is not None]
        shown = list(dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in values))
        facts |= {name: ", ".join(shown[:4]) + " …" * bool(shown[4:])} if shown else {}
    told = {name: [tell(run) for _, run in members] for name, tell in _TOLD.items()}
    facts |= {name: values[0] for name, values in told.items() if len(set(values)) == 1 and values[0]}
    differing = [name for name, values in told.items() if len(set(values)) > 1]
    early = [name for name in differing if name not in _ENVIRONMENT]
    late = [name for name in differing if name in _ENVIRONMENT]
    heads = [*map(Column, ("method", *early)), Column("seed", "whole"), Column("status"), Column("rounds", "whole")]
    heads += [Column("accuracy", "percent"), Column("hours", "number"), *map(Column, late), Column("directory", "long")]
    rows = []
    for place, (group, run) in enumerate(members):
        last = run.evaluations.iloc[-1] if len(run.evaluations) else pd.Series({"round": run.reached})
        stale = f"(round {int(last['round'])})" if last["round"] != run.reached else ""
        why = " ".join(str(run.summary.get("error") or "").split())[:300]
        cells = [Cell(group.method), *(Cell(told[name][place]) for name in early), Cell(run.seed)]
        cells += [
            Cell(run.status, state=run.status, below=why),
            Cell(f"{run.reached}/{run.planned}", order=run.reached),
        ]
        cells += [Cell(float(last.get("accuracy", math.nan)), below=stale), Cell(run.fact("hours"))]
        below = run.path.resolve().relative_to(base.resolve()).as_posix()
        rows.append([*cells, *(Cell(told[name][place]) for name in late), Cell(below, link=_link(run.path, out))])
    return facts, Table("runs", tuple(heads), rows)


def _summary(gathered: Sequence[Group]) -> dict[str, str]:
    """The numbers at the head of the page."""
    every = [run for group in gathered for run in group.runs]
    seeds, hours = len({run.seed for run in every}), _hours(every)
    bits = [_total(run, "bits_down") + _total(run, "bits_up") for run in every]
    moved = math.fsum(value for value in bits if not math.isnan(value)) / 8
    states = Counter(run.status for run in every)
    return {
        "run" if len(every) == 1 else "runs": str(len(every)),
        **{state: str(states[state]) for state in STATUSES if state in states},
        "configuration" if len(gathered) == 1 else "configurations": str(len(gathered)),
        "seed" if seeds == 1 else "seeds": str(seeds),
        **({} if math.isnan(hours) else {"hours of runs": number("number", hours)}),
        **({"sent in all": number("size", moved, 3)} if moved else {}),
    }


def _costs(gathered: Sequence[Group], judged: Sequence[float]) -> Table:
    """What travelled and how long it took, by configuration; means over seeds."""
    several = len({group.setting for group in gathered}) > 1
    each, whole = "per client and round", "whole run so far, all clients"
    values: dict[Column, Callable[[Run], float]] = {
        Column("down", "entries", f"values {each}"): lambda run: run.per_client("values_down"),
        Column("up", "entries", f"values {each}"): lambda run: run.per_client("values_up"),
        Column("down", "number", f"MB {each}"): lambda run: run.per_client("bits_down") / 8e6,
        Column("up", "number", f"MB {each}"): lambda run: run.per_client("bits_up") / 8e6,
        Column("GB down", "number", whole): lambda run: _total(run, "bits_down") / 8e9,
        Column("GB up", "number", whole): lambda run: _total(run, "bits_up") / 8e9,
        Column("rounds", "whole", whole): lambda run: run.reached,
        Column("s/round", "number", "time"): lambda run: run.seconds,
        Column("hours", "number", "time"): lambda run: run.fact("hours"),
    }
    rows = []
    for group, accuracy in zip(gathered, judged, strict=True):
        setting = [Cell(group.setting)] if several else []
        means = [Cell(over_seeds([value(run) for run in group.used])[0]) for value in values.values()]
        rows.append([Cell(group.method), *setting, Cell(accuracy), *means])
    heads = (Column("method"), *([Column("setting")] if several else []), Column("accuracy", "percent"), *values)
    return Table("cost", heads, rows)


def _total(run: Run, key: str) -> float:
    """A traffic column summed over the rounds; nan where it was not recorded."""
    return float(run.rounds[key].sum(skipna=False)) if key in run.rounds else math.nan


def _hours(members: Iterable[Run]) -> float:
    known = [hours for run in members if not math.isnan(hours := run.fact("hours"))]
    return math.fsum(known) if known else math.nan


def _states(members: Iterable[Run]) -> str:
    states = Counter(run.status for run in members)
    return ", ".join(f"{states[state]} {state}" for state in STATUSES if state in states)


def _device(run: Run) -> str:
    found = run.environment
    cores = f", {found['cores']} cores" if found.get("cores") else ""
    return str(found.get("gpu") or (f"{found['cpu']}{cores}" if found.get("cpu") else ""))


def _versions(run: Run) -> str:
    names = {"fedpfl": "fedpfl", "torch": "PyTorch", "cuda": "CUDA", "python": "Python"}
    return ", ".join(f"{name} {run.environment[key]}" for key, name in names.items() if run.environment.get(key))


def _commit(run: Run) -> str:
    found = run.environment
    return str(found["commit"])[:10] + " with changes" * bool(found.get("dirty")) if found.get("commit") else ""


_ENVIRONMENT: dict[str, Callable[[Run], str]] = {"device": _device, "versions": _versions, "commit": _commit}
_TOLD = {"data set": lambda run: run.dataset, "partition": lambda run: run.partition, **_ENVIRONMENT}


def _best(part: pd.DataFrame, select: str) -> str:
    """The best configuration of a data set and partition, of the finished ones if there are any."""
    setting = f"{part['dataset'].iloc[0]}, {part['partition'].iloc[0]}"
    part = part[part["accuracy"].notna()]
    if part.empty:
        return f"{setting}: {'no validation accuracy' if select == 'validation' else 'not evaluated yet'}"
    finished = part[part["status"].str.contains("finished")]
    part = part if finished.empty else finished
    row = part.loc[part["accuracy"].idxmax()]
    return f"{setting}: {row['method']} {row['accuracy']:.2f}"


def _base(path: Path, root: Path) -> Path:
    """The folder whose runs make one page, judged by where `seed<k>` lies: `<experiment>/<method>/<key>/seed<k>`."""
    path, top = path.resolve(), root.resolve()
    own = path.parents[2] if re.fullmatch(r"seed\d+", path.name) and len(path.parents) > 2 else path.parent
    return root if top == own or own in top.parents else root / path.relative_to(top).parts[0]


def _name(base: Path) -> str:
    """The folder's name; a single run, whose folder only tells the seed, is named by its place in its experiment."""
    return "-".join(base.parts[-4:]).strip(os.sep) if re.fullmatch(r"seed\d+", base.name) else base.name or "runs"


def _free(name: str, names: set[str]) -> str:
    """The name, with a number where it is taken; file systems may not tell letters' case apart."""
    name = name[:100]
    chosen, count = name, 1
    while chosen.casefold() in names:
        count += 1
        chosen = f"{name}-{count}"
    names.add(chosen.casefold())
    return chosen


def _link(target: Path, out: Path) -> str:
    """The address of a run directory, relative to the page's folder where that is possible."""
    try:
        address = quote(os.fsencode(Path(os.path.relpath(target.resolve(), out.resolve())).as_posix()))
    except ValueError:  # another drive
        return target.resolve().as_uri() + "/"
    # The leading dot keeps a name with a colon from being read as a scheme.
    return f"{address}/" if address.startswith(".") else f"./{address}/"
