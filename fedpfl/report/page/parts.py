"""The page as text: frame, overview of the runs, tables. Everything that comes from files is escaped here."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape as _escape
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from fedpfl.report.load import STATUSES, Group, Run
from fedpfl.report.tables import ACCURACIES, TRAFFIC, Table
from fedpfl.report.text import plain

SETUP = {
    "model": "model.name",
    "clients": "clients",
    "participation": "participation",
    "local epochs": "local.epochs",
    "batch size": "local.batch_size",
    "learning rate": "local.lr",
    "momentum": "local.momentum",
    "weight decay": "local.weight_decay",
    "evaluated every": "eval.every",
    "fine-tuning epochs": "eval.finetune_epochs",
    "precision": "engine.precision",
}
"""What of the configuration the page tells in its head."""
_MARKS = ("<b>{}</b>", "<u>{}</u>", "{}")


def escape(text: str) -> str:
    """Return text as HTML."""
    return _escape(plain(text))


def document(title: str, navigation: Mapping[str, str], body: str, data: Any = None) -> str:
    """A whole page that loads nothing. navigation: heading by id of its section. data: what the charts draw."""
    style, script = _resource("style.css"), _resource("charts.js")
    # A label that slipped through would still not run: only this script may, by its hash, and nothing may be loaded.
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
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


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element, whatever its strings hold."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def section(name: str, heading: str, *content: str) -> str:
    """A section with a heading; content is HTML."""
    return f'<section id="{name}"><h2>{escape(heading)}</h2>\n' + "\n".join(content) + "\n</section>"


def tiles(values: Mapping[str, str]) -> str:
    """Big numbers with a word each."""
    pairs = "".join(f"<div><dt>{escape(word)}</dt><dd>{escape(value)}</dd></div>" for word, value in values.items())
    return f'<dl class="tiles">{pairs}</dl>'


def facts(values: Mapping[str, str]) -> str:
    """Short statements, `name: value`."""
    pairs = "".join(f"<div><dt>{escape(word)}</dt><dd>{escape(value)}</dd></div>" for word, value in values.items())
    return f'<dl class="facts">{pairs}</dl>' if pairs else ""


def lines(texts: Iterable[str], kind: str = "note") -> str:
    """One paragraph per text."""
    return "".join(f'<p class="{kind}">{escape(text)}</p>' for text in texts)


def listed(heading: str, texts: Sequence[str]) -> str:
    """A warning with a list, or nothing."""
    if not texts:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<div class="warning" role="note"><p>{escape(heading)}</p><ul>{items}</ul></div>'


def cell(text: str, value: float | None = None, kind: str = "", tag: str = "td") -> str:
    """One table cell; `text` is HTML. value: what a number is sorted by."""
    known = value is not None and math.isfinite(value)
    attributes = f' data-value="{value!r}"' if known else ""
    attributes += f' class="{kind}"' if kind else ""
    attributes += ' scope="row"' if tag == "th" else ""
    return f"<{tag}{attributes}>{text}</{tag}>"


def grid(caption: str, heads: Sequence[tuple[str, str, bool]], rows: Iterable[str], kind: str = "") -> str:
    """A table that is sorted by a click on a heading. heads: group, heading, and whether it holds numbers."""
    top = ""
    if any(group for group, _, _ in heads):
        spans: list[list[Any]] = []
        for group, _, _ in heads:
            if spans and group and spans[-1][0] == group:
                spans[-1][1] += 1
            else:
                spans.append([group, 1])
        top = "".join(
            f'<th colspan="{size}" scope="colgroup" class="group">{escape(group)}</th>' if group else "<td></td>"
            for group, size in spans
        )
        top = f"<tr>{top}</tr>"
    heading = "".join(
        f'<th scope="col"{" class=number" if number else ""}><button type="button">{escape(text)}</button></th>'
        for _, text, number in heads
    )
    body = "".join(f"<tr>{row}</tr>\n" for row in rows)
    return (
        f'<div class="scroll {kind}" tabindex="0" role="group" aria-label="{escape(caption)}">'
        f'<table class="sortable"><caption>{escape(caption)}</caption>'
        f"<thead>{top}<tr>{heading}</tr></thead><tbody>\n{body}</tbody></table></div>"
    )


def link(target: Path, out: Path, text: str) -> str:
    """A link to a file or folder, relative to the page's folder where that is possible."""
    try:
        address = quote(Path(os.path.relpath(target.resolve(), out.resolve())).as_posix())
    except ValueError:  # another drive
        address = target.resolve().as_uri()
    # The leading dot keeps a name with a colon from being read as a scheme.
    if not address.startswith((".", "file:")):
        address = f"./{address}"
    return f'<a href="{escape(address)}{"/" if target.is_dir() else ""}">{escape(text)}</a>'


def overview(gathered: Sequence[Group], out: Path, base: Path) -> str:
    """Every run, whatever its state; what is alike in all of them is said once."""
    runs = [(group, run) for group in gathered for run in group.runs]
    told = {
        "data set": [run.dataset for _, run in runs],
        "partition": [run.partition for _, run in runs],
        "device": [_device(run) for _, run in runs],
        "versions": [_versions(run) for _, run in runs],
        "commit": [_commit(run) for _, run in runs],
    }
    alike = {name: values[0] for name, values in told.items() if len(set(values)) == 1 and values[0]}
    columns = {name: values for name, values in told.items() if len(set(values)) > 1}
    heads = [("", "method", False), *(("", name, False) for name in ("data set", "partition") if name in columns)]
    heads += [("", "seed", True), ("", "status", False), ("", "rounds", True), ("", "accuracy", True)]
    heads += [("", "hours", True), *(("", name, False) for name in ("device", "versions", "commit") if name in columns)]
    heads += [("", "directory", False)]
    rows = []
    for place, (group, run) in enumerate(runs):
        reached = int(run.rounds["round"].max())
        last = run.evaluations
        accuracy = float(last["accuracy"].iloc[-1]) if len(last) else math.nan
        at = int(last["round"].iloc[-1]) if len(last) else reached
        stale = f" <small>(round {at})</small>" if len(last) and at != reached else ""
        hours = run.fact("hours")
        cells = [cell(escape(group.method), tag="th")]
        cells += [cell(escape(columns[name][place])) for name in ("data set", "partition") if name in columns]
        cells += [
            cell(str(run.seed), run.seed, "number"),
            cell(_status(run)),
            cell(f"{reached}/{run.planned}", reached, "number"),
            cell(f"{accuracy:.2f}{stale}" if math.isfinite(accuracy) else "", accuracy, "number"),
            cell(_hours(hours), hours, "number"),
        ]
        cells += [cell(escape(columns[name][place])) for name in ("device", "versions", "commit") if name in columns]
        cells += [cell(link(run.path, out, _below(run.path, base)), kind="path")]
        rows.append("".join(cells))
    table = grid("runs", heads, rows, "bare tall" if len(rows) > 16 else "bare")
    return facts(_setup([run for _, run in runs]) | alike) + table


def summary(gathered: Sequence[Group]) -> dict[str, str]:
    """The numbers at the head of the page."""
    runs = [run for group in gathered for run in group.runs]
    states = Counter(run.status for run in runs)
    hours = [value for run in runs if math.isfinite(value := run.fact("hours"))]
    moved = [total for run in runs if math.isfinite(total := traffic(run, "bits_down") + traffic(run, "bits_up"))]
    seeds = len({run.seed for run in runs})
    values = {
        "run" if len(runs) == 1 else "runs": str(len(runs)),
        **{state: str(states[state]) for state in sorted(states, key=_state_order)},
        "configuration" if len(gathered) == 1 else "configurations": str(len(gathered)),
        "seed" if seeds == 1 else "seeds": str(seeds),
    }
    if hours:
        values["hours of runs"] = _hours(sum(hours))
    if moved:
        values["sent in all"] = _bytes(sum(moved))
    return values


def newest(runs: Iterable[Run]) -> str:
    """When the newest round was written, in UTC."""
    stamp = max((run.path / "rounds.csv").stat().st_mtime for run in runs)
    return datetime.fromtimestamp(stamp, UTC).strftime("%Y-%m-%d %H:%M UTC")


def accuracies(table: Table) -> str:
    """The accuracy table, one block per data set and partition; best bold, second underlined, where methods compare."""
    columns = [column for column in table.shown if column.key not in ("dataset", "partition")]
    frame = table.frame.reset_index(drop=True)
    blocks = []
    for (dataset, partition), part in frame.groupby(["dataset", "partition"], sort=False):
        marks = {key: ranked(part, key) for key in ACCURACIES}
        rows = []
        for row in part.index:
            cells = []
            for column in columns:
                value = frame[column.key].iloc[row]
                text = escape(table.text(column, row))
                text = _MARKS[marks.get(column.key, {}).get(row, 2)].format(text)
                if column.key == "round":  # one, or a span where the seeds are at different ones
                    cells.append(cell(text, float(text) if text.isdigit() else None, "number"))
                elif column.kind == "text":
                    cells.append(cell(text, tag="th" if column.key == "method" else "td"))
                else:
                    cells.append(cell(text, float(value) if pd.notna(value) else None, "number"))
            rows.append("".join(cells))
        heads = [(c.group, c.heading, c.kind != "text" or c.key == "round") for c in columns]
        blocks.append(grid(f"{dataset}, {partition}", heads, rows, "tall" if len(rows) > 30 else ""))
    return "\n".join(blocks)


def ranked(part: pd.DataFrame, key: str) -> dict[int, int]:
    """By row 0 for the best as displayed and 1 for the second; equal numbers share a place.

    Unfinished runs do not compete with finished ones, and one number is no best.
    """
    rows = part.index[part[key].notna()]
    finished = [row for row in rows if "finished" in part["status"][row]]
    shown = {row: round(float(part[key][row]), 2) for row in finished or rows}
    if len(shown) < 2:
        return {}
    order = sorted(set(shown.values()), reverse=True)
    places = {row: order.index(value) for row, value in shown.items()}
    firsts = sum(place == 0 for place in places.values())
    # After two firsts there is no second.
    return {row: place for row, place in places.items() if place == 0 or (place == 1 and firsts == 1)}


def costs(gathered: Sequence[Group], judged: Sequence[float]) -> str:
    """What travelled and how long it took, by configuration; means over seeds."""
    several = len({(group.dataset, group.partition) for group in gathered}) > 1
    heads = [("", "method", False), *([("", "setting", False)] if several else []), ("", "accuracy", True)]
    heads += [("values per client and round", "down", True), ("values per client and round", "up", True)]
    heads += [("MB per client and round", "down", True), ("MB per client and round", "up", True)]
    heads += [("whole run so far, all clients", word, True) for word in ("GB down", "GB up", "rounds")]
    heads += [("time", "s/round", True), ("time", "hours", True)]
    rows = []
    for group, accuracy in zip(gathered, judged, strict=True):
        numbers = np.mean([_costs(run) for run in group.used], axis=0).tolist()
        values = [f"{value:,.0f}" for value in numbers[:2]]
        texts = [*values, *map(_three, numbers[2:6]), f"{numbers[6]:g}", _three(numbers[7]), _hours(numbers[8])]
        cells = [cell(escape(group.method), tag="th")]
        cells += [cell(escape(f"{group.dataset}, {group.partition}"))] if several else []
        cells.append(_numeric(f"{accuracy:.2f}", accuracy))
        cells += [_numeric(text, value) for text, value in zip(texts, numbers, strict=True)]
        rows.append("".join(cells))
    return grid("cost", heads, rows, "bare tall" if len(rows) > 24 else "bare")


def _costs(run: Run) -> list[float]:
    """Values and megabytes down and up per client and round, gigabytes down and up, rounds, seconds, hours."""
    totals = {key: traffic(run, key) for key in TRAFFIC}
    return [
        *(run.per_client(key) for key in ("values_down", "values_up")),
        *(run.per_client(key) / 8e6 for key in ("bits_down", "bits_up")),
        *(totals[key] / 8e9 for key in ("bits_down", "bits_up")),
        float(run.rounds["round"].max()),
        float(run.rounds["seconds"].median()) if "seconds" in run.rounds else math.nan,
        run.fact("hours"),
    ]


def _numeric(text: str, value: float) -> str:
    return cell(text if math.isfinite(value) else "", value, "number")


def traffic(run: Run, key: str) -> float:
    """A traffic column summed over the rounds and the cohort; nan where it was not recorded."""
    return float(run.rounds[key].sum()) if key in run.rounds and run.rounds[key].notna().any() else math.nan


def _resource(name: str) -> str:
    return resources.files("fedpfl.report.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _setup(runs: Sequence[Run]) -> dict[str, str]:
    found = {}
    for name, key in SETUP.items():
        values: list[str] = []
        for run in runs:
            if (value := run.get(key)) is not None:
                values.append(f"{value:g}" if isinstance(value, float) else str(value))
        several = list(dict.fromkeys(values))
        if several:
            found[name] = several[0] if len(several) == 1 else f"{', '.join(several[:4])}{' …' if several[4:] else ''}"
    return found


def _device(run: Run) -> str:
    found = run.environment
    if found.get("gpu"):
        return str(found["gpu"])
    cores = f", {found['cores']} cores" if found.get("cores") else ""
    return f"{found['cpu']}{cores}" if found.get("cpu") else ""


def _versions(run: Run) -> str:
    found = run.environment
    names = {"fedpfl": "fedpfl", "torch": "PyTorch", "cuda": "CUDA", "python": "Python"}
    return ", ".join(f"{name} {found[key]}" for key, name in names.items() if found.get(key))


def _commit(run: Run) -> str:
    found = run.environment
    return str(found["commit"])[:10] + (" with changes" if found.get("dirty") else "") if found.get("commit") else ""


def _state_order(state: str) -> tuple[int, str]:
    return STATUSES.index(state) if state in STATUSES else len(STATUSES), state


def _status(run: Run) -> str:
    known = run.status if run.status in STATUSES else "other"
    error = run.summary.get("error")
    why = f"<small>{escape(' '.join(str(error).split())[:300])}</small>" if error else ""
    word = "running or killed" if run.status == "running" else run.status
    return f'<span class="status {known}">{escape(word)}</span>{why}'


def _below(path: Path, base: Path) -> str:
    try:
        return path.resolve().relative_to(base.resolve()).as_posix()
    except ValueError:
        return str(path)


def _hours(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def _three(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _bytes(bits: float) -> str:
    size = bits / 8
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{_three(size / scale)} {unit}"
    return f"{_three(size / 1e3)} kB"


def experiment_row(name: str, gathered: Sequence[Group], best: Sequence[str]) -> str:
    """One experiment in the index."""
    runs = [run for group in gathered for run in group.runs]
    states = Counter(run.status for run in runs)
    hours = [value for run in runs if math.isfinite(value := run.fact("hours"))]
    return "".join(
        [
            cell(f'<a href="./{quote(name)}.html">{escape(name)}</a>', tag="th"),
            cell(str(len(gathered)), len(gathered), "number"),
            cell(str(len(runs)), len(runs), "number"),
            cell(", ".join(escape(f"{states[state]} {state}") for state in sorted(states, key=_state_order))),
            cell("<br>".join(map(escape, best))),
            cell(_hours(sum(hours)) if hours else "", sum(hours) if hours else None, "number"),
        ]
    )
