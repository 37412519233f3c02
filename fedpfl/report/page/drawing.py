"""Charts of a page as plotly's figures, each with the reader's choice that shows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from operator import add
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.intervals import HIGH, LOW
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import Task
from fedpfl.record.columns import METRICS
from fedpfl.report.grouping import Group, common_task
from fedpfl.report.page import data
from fedpfl.report.page.data import AXIS_TITLES
from fedpfl.report.styles import COLORS, number_styles
from fedpfl.report.tables import CURVES
from fedpfl.report.text import clip_text, wrap_lines

MAX_SHOWN_METHODS = 10  # with more, a chart begins with the best ones
MAX_SHOWN_CLIENTS = 20
MAX_PARTITION_CELLS = 20_000
MAX_MASK_POINTS = 100
_DASHES = ("solid", "7px,3px", "2px,2.5px", "8px,3px,2px,3px", "5px,2px,1.5px,2px")
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
_SETTING = "data set and partition"


Trace = Record


class Chart(NamedTuple):
    """A plotly figure, and the choices in the menus that show it."""

    choice: dict[str, str]
    data: list[Trace]
    layout: Record


Charts = Iterator[Chart]


@dataclass(frozen=True)
class Content:
    """Hold the content of a page's charts.

    Attributes:
        ranked: the configurations of each setting, the best score first.
        task: their task.
        spent: the result of `spent_by_round`, by configuration.
        style_numbers: the result of `number_styles`.
        note: called with a line about each part that is left out.
    """

    ranked: dict[str, list[Group]]
    task: Task
    spent: dict[Group, pd.DataFrame]
    style_numbers: dict[str, int]
    note: Callable[[str], None]

    def style(self, group: Group, rank: int = 0) -> Trace:
        """Return a trace with a method's name, colour, dash and symbol."""
        number = self.style_numbers[group.method]
        color = COLORS[number % len(COLORS)]
        return {
            "type": "scatter",
            "name": _plotly_text(group.method),
            "line": {"color": color, "dash": _DASHES[number % len(_DASHES)]},
            "marker": {"color": color, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
            "legendgroup": group.method,
            "visible": True if rank < MAX_SHOWN_METHODS else "legendonly",
        }


def draw_charts(
    shown_groups: Sequence[Group],
    accuracy: pd.DataFrame,
    note: Callable[[str], None],
) -> dict[str, list[Chart]]:
    """Return the charts of each section.

    Args:
        shown_groups: the configurations.
        accuracy: the numbers of the table of accuracies, a row per configuration.
        note: called with a line about each part that is left out.
    """
    task = common_task(shown_groups)
    scores = pd.Series(accuracy[task.score].to_numpy(float), pd.Index(shown_groups))
    best_first = scores.sort_values(ascending=not task.is_higher_better).index
    ranked: dict[str, list[Group]] = {group.setting: [] for group in shown_groups}
    for group in best_first:
        ranked[group.setting].append(group)
    content = Content(
        ranked=ranked,
        task=task,
        spent={group: data.spent_by_round(group) for group in shown_groups},
        style_numbers=number_styles(shown_groups),
        note=note,
    )
    charts = {}
    for name, draw in SECTIONS.items():
        charts[name] = [chart for chart in draw(content) if chart.data]
    return charts


def _draw_curves(content: Content) -> Charts:
    evaluated_first = sorted(CURVES, key=lambda name: not METRICS[name].is_evaluated)
    for (setting, rivals), name in itertools.product(content.ranked.items(), evaluated_first):
        # Runs record some of the many columns.
        if not any(name in run.rounds for group in rivals for run in group.reported_runs):
            continue
        curves = {group: data.mean_by_round(group, name) for group in rivals}
        for key, title in AXIS_TITLES.items():
            choice = {_SETTING: setting, "what": METRICS[name].label, "over": title}
            chart = _make_chart(choice, title, METRICS[name].label, hovermode="x unified")
            for rank, (group, curve) in enumerate(curves.items()):
                curve = curve.iloc[data.evenly_spaced(len(curve))]
                positions = data.spent_at_rounds(content.spent[group], key, curve.index.to_numpy())
                if np.isfinite(positions).any():
                    chart.data.extend(_curve_traces(content.style(group, rank), positions, curve))
            yield chart


def _curve_traces(style: Trace, x: np.ndarray, curve: pd.DataFrame) -> Iterator[Trace]:
    """Yield, of several seeds, the band of one standard deviation, then the line of means."""
    mean = curve["mean"]
    std = curve["std"].fillna(0.0)
    if std.any():
        band = {"fill": "toself", "mode": "none", "fillcolor": style["line"]["color"]}
        y = [*(mean + std), *(mean - std)[::-1]]
        hidden = {"opacity": 0.16, "hoverinfo": "skip", "showlegend": False}
        yield style | band | hidden | {"x": [*x, *x[::-1]], "y": _round_numbers(y)}
    yield style | {
        "x": _round_numbers(x),
        "y": _round_numbers(mean),
        "customdata": _round_numbers(std),
        "mode": "lines+markers",
        "marker": style["marker"] | {"maxdisplayed": 12},
        "hovertemplate": "%{y} ± %{customdata}",
    }


def _draw_clients(content: Content) -> Charts:
    """Yield boxes of the clients' scores, all seeds together."""
    task = content.task
    clients = {group: data.read_clients(group, content.note) for group in content.spent}
    titles = {task.score: "before fine-tuning", f"ft_{task.score}": "fine-tuned"}
    for setting, (key, title) in itertools.product(content.ranked, titles.items()):
        x_title = f"client's {task.score_word}{' (%)' if task.unit else ''}, {title}"
        choice = {_SETTING: setting, task.score_word: title}
        chart = _make_chart(choice, x_title, "", showlegend=False)
        for group in content.ranked[setting]:
            # Some runs were not fine-tuned, and clients without test samples have no score.
            ends = [f"{key}{end}" for end in (LOW, HIGH)]
            columns = [key, "seed", "client", "text"]
            scored = (
                clients[group].reindex(columns=[*columns, *ends, "kind"]).dropna(subset=columns)
            )
            points = scored.sort_values([key, "seed", "client"])
            points = points.iloc[data.evenly_spaced(len(points))]
            # A box for each kind of network, where clients have several.
            kinds = points["kind"].astype(object).fillna("")
            for kind, own in points.groupby(kinds):
                style = content.style(group)
                box = {"type": "box", "name": f"{style['name']} {kind}".strip(), "x": own[key]}
                intervals = map(_interval_text, *own[ends].to_numpy().T)
                box["text"] = [*map(add, map(_plotly_text, own["text"]), intervals)]
                box |= {"boxpoints": "all", "jitter": 0.6, "pointpos": 0, "boxmean": True}
                box |= {"marker": {"size": 4, "opacity": 0.5}}
                chart.data.append(box | {"line": {"color": style["line"]["color"]}})
        chart.layout["height"] = 110 + 50 * len(chart.data)
        chart.layout["yaxis"]["autorange"] = "reversed"
        yield chart


def _draw_partitions(content: Content) -> Charts:
    """Yield the classes of each setting's clients, in the first seed."""
    for setting, rivals in content.ranked.items():
        run = rivals[0].runs[0]
        try:
            counts = data.count_labels(run)
        except FedpflError:
            continue
        if counts.size:
            clients = data.evenly_spaced(len(counts), MAX_PARTITION_CELLS // len(counts.columns))
            cells = counts.iloc[clients].T
            choice = {_SETTING: setting}
            chart = _make_chart(choice, f"client, seed {run.seed}", "class")
            powers = range(len(str(int(cells.max(axis=None)))))
            scale = {"tickvals": [*powers], "ticktext": [f"{10**power:,}" for power in powers]}
            logarithms = np.log10(cells.where(cells > 0))
            heatmap = _draw_heatmap(chart, cells, logarithms, "%{customdata} samples")
            heatmap["colorbar"] = scale
            yield chart


def _draw_survival(content: Content) -> Charts:
    """Yield Kaplan-Meier's curve of each setting's clients, in the first seed."""
    for setting, rivals in content.ranked.items():
        run = rivals[0].runs[0]
        chart = _make_chart({_SETTING: setting}, f"time, seed {run.seed}", "share without an event")
        curves = [*data.read_survival(run).groupby(level="client")]
        for number in data.evenly_spaced(len(curves), MAX_SHOWN_CLIENTS):
            name, curve = curves[number]
            line = {"shape": "hv", "color": COLORS[number % len(COLORS)]}
            trace = {"type": "scatter", "mode": "lines", "name": _plotly_text(str(name))}
            y = _round_numbers(curve["share"])
            chart.data.append(trace | {"line": line, "x": _round_numbers(curve["time"]), "y": y})
        yield chart


def _draw_common(content: Content) -> Charts:
    """Yield every client's model on every client's samples, of a configuration's first seed."""
    for group in content.spent:
        run = group.reported_runs[0]
        try:
            frame = run.cross_accuracy.rename(index=run.client_names, columns=run.client_names)
        except FedpflError as error:
            content.note(f"without everybody's samples: {error}")
            continue
        x_title = f"samples of client, seed {run.seed}"
        chart = _make_chart(_choose_method(group), x_title, "model of client")
        if len(frame):
            _draw_heatmap(chart, frame, frame, "%{z} %")
        yield chart


def _draw_masks(content: Content) -> Charts:
    """Yield the share of personalised entries that each tensor has, over rounds."""
    for group in content.spent:
        chart = _make_chart(_choose_method(group), "round", "")
        frames = [run.personalized_entries for run in group.reported_runs]
        entries = pd.concat(frames).groupby(level="round").mean()
        if len(entries.columns):
            cells = entries.iloc[data.evenly_spaced(len(entries), MAX_MASK_POINTS)].T
            shares = 100 * cells / cells.sum()
            _draw_heatmap(chart, cells, shares, "%{customdata:.4g} entries, %{z:.3g} %")
        yield chart


def _choose_method(group: Group) -> dict[str, str]:
    return {_SETTING: group.setting, "method": clip_text(group.method, 60)}


def _draw_heatmap(chart: Chart, frame: pd.DataFrame, colors: pd.DataFrame, text: str) -> Trace:
    """Add a heat map of a frame's cells, coloured by another frame."""
    chart.layout["height"] = min(560, 190 + 24 * len(frame))
    chart.layout["xaxis"] |= {"type": "category"}
    chart.layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    heatmap = {
        "type": "heatmap",
        "x": [_plotly_text(str(name)) for name in frame.columns],
        "y": [_plotly_text(str(name)) for name in frame.index],
        "z": [_round_numbers(row) for row in colors.to_numpy()],
        "customdata": frame.to_numpy(),
        "colorscale": "Blues",
        "reversescale": True,
        "hovertemplate": f"%{{y}}, %{{x}}: {text}<extra></extra>",
    }
    chart.data.append(heatmap)
    return heatmap


SECTIONS: dict[str, Callable[[Content], Charts]] = {
    "curves": _draw_curves,
    "clients": _draw_clients,
    "partition": _draw_partitions,
    "survival": _draw_survival,
    "common": _draw_common,
    "masks": _draw_masks,
}
"""The functions that draw the charts of each section of a page."""


def _make_chart(choice: dict[str, str], x_title: str, y_title: str, **layout: Any) -> Chart:
    """Return an empty chart that a narrow window does not cut."""
    axes = {}
    for name, title in (("xaxis", x_title), ("yaxis", y_title)):
        text = "<br>".join(wrap_lines(escape(title, quote=False), 36))
        axes[name] = {"title": {"text": text}, "automargin": True}
    margin = {"l": 10, "r": 10, "t": 10, "b": 10}
    legend = {"orientation": "h", "yanchor": "bottom", "y": 1.02}
    return Chart(choice, [], axes | {"height": 480, "margin": margin, "legend": legend} | layout)


def _plotly_text(text: str) -> str:
    """Return text as plotly shows it: it reads a few tags in all that it writes."""
    return escape(clip_text(text, 60), quote=False)


def _interval_text(low: float, high: float) -> str:
    """Write the interval of a client's own score, nothing where it is not recorded."""
    return f", 95 %: {low:.4g} to {high:.4g}" if low == low else ""


def _round_numbers(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
