"""One HTML page per experiment, beside plotly's script: `python -m fedpfl.report html [ROOT ...]`."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from fedpfl.ground.files import whole
from fedpfl.report.fairness import as_table, compared
from fedpfl.report.grouping import Group, groups
from fedpfl.report.load import chosen, directories, nothing_below, runs, to_stderr
from fedpfl.report.page.drawing import DOTS, PARTITIONS, Drawing
from fedpfl.report.render import as_html
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.table import Cell, Column, Table, number, over_seeds
from fedpfl.report.tables import accuracy_table, chosen_on
from fedpfl.report.text import plain

SETUP = {
    "model": "model.name",
    "clients": "clients",
    "participation": "participation",
    "local epochs": "local.epochs",
    "local steps": "local.steps",
    "batch size": "local.batch_size",
    "learning rate": "local.lr",
    "momentum": "local.momentum",
    "weight decay": "local.weight_decay",
    "evaluated every": "eval.every",
    "fine-tuning epochs": "eval.finetune_epochs",
    "precision": "engine.precision",
}
"""What of the configuration the page tells in its head."""


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
    script = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    with whole(out / plotly_name()) as file:
        file.write_bytes(script.read_bytes())
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
    drawing = Drawing(gathered, judged, notes.append, fair)
    facts, overview = _overview(gathered, out, experiment.base)
    tables, remarks = {"cost": _table(_costs(gathered, judged))}, dict[str, list[str]]()
    if drawing.charts["fairness"]:
        judgement = as_table(fair, strange)
        tables["fairness"], remarks["fairness"] = _table(judgement, ""), judgement.prose("html")
    if any(own is not None and own.get("unseen", pd.Series()).any() for own in drawing.tables.values()):
        remarks["clients"] = ["Clients that never take part are left out."]
    if (left := len(drawing.partitions) - PARTITIONS) > 0:
        remarks["partition"] = [f"Partitions left out of this page: {left}."]
    stamp = max((run.path / "rounds.csv").stat().st_mtime for run in experiment.runs)
    newest = datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return _rendered(
        "page.html",
        title=experiment.name,
        summary=_summary(gathered),
        facts=facts,
        overview=_table(overview),
        skipped=experiment.skipped,
        notes=notes,
        accuracy=_table(table, ""),
        prose=table.prose("html"),
        charts=drawing.charts,
        dots=DOTS,
        numbers={"curves": _table(drawing.curve_numbers()), "clients": _table(drawing.client_numbers())},
        tables=tables,
        remarks=remarks,
        footer=f"{experiment.base}; newest round {newest}",
        settings=drawing.settings,
        data=Markup(embedded(drawing.data())),
        plotly=plotly_name(),
    )


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
    notes = list(chosen_on(select))
    if select == "validation":
        notes.append("Rounds were chosen by validation accuracy.")
    table = _table(Table("experiments", heads, rows))
    return _rendered("index.html", title="Experiments", table=table, notes=notes, skipped=skipped)


def embedded(data: Any) -> str:
    """Return JSON that can stand inside a script element, whatever its strings hold."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def plotly_name() -> str:
    """Return the name of plotly's script beside the pages; it tells its version, so that browsers may keep it."""
    return f"plotly-{version('plotly')}.min.js"


def _rendered(template: str, **values: Any) -> str:
    """A whole page. Only the scripts beside it and inside it may run, and nothing comes from elsewhere."""
    environment = Environment(
        loader=PackageLoader("fedpfl.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else plain(value),
    )
    folder = resources.files("fedpfl.report.page")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # A label that slipped through would still not run. `file:` is the neighbour of a page that is opened from disk;
    # plotly writes styles, which load nothing.
    policy = (
        f"default-src 'none'; script-src 'self' file: 'sha256-{own}'; style-src 'unsafe-inline'; img-src data: blob:"
    )
    policy += "; base-uri 'none'; form-action 'none'"
    common = {"policy": Markup(policy), "style": Markup(style), "script": Markup(script)}
    return environment.get_template(template).render(values | common)


def _table(table: Table, kind: str = "bare") -> Markup:
    return Markup(as_html(table, kind))


def _overview(gathered: Sequence[Group], out: Path, base: Path) -> tuple[dict[str, str], Table]:
    """What is alike in all runs, and every run, whatever its state."""
    members = [(group, run) for group in gathered for run in group.runs]
    facts: dict[str, str] = {}
    for name, key in SETUP.items():
        values = [value for _, run in members if (value := run.get(key)) is not None]
        shown = list(dict.fromkeys(f"{value:g}" if isinstance(value, float) else str(value) for value in values))
        facts |= {name: ", ".join([*shown[:4], *(["…"] if shown[4:] else [])])} if shown else {}
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
    return f"{found['commit']!s:.10}{' with changes' if found.get('dirty') else ''}" if found.get("commit") else ""


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
