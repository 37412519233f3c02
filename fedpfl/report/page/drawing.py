"""The charts of a page as plotly draws them: dicts of numbers, thinned and rounded, ready for JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from fedpfl.record.columns import METRICS, Metric
from fedpfl.report.fairness import BASELINES, Fair, harm
from fedpfl.report.grouping import Group
from fedpfl.report.page import data
from fedpfl.report.table import Cell, Column, Table
from fedpfl.report.text import clip

DOTS = 200  # clients of a method that are drawn one by one
PARTITIONS = 12  # of a page
CELLS = 20_000  # of one partition's heat map
MASKS = 60_000  # cells of all mask heat maps of a page together
LEGEND, BEST = 14, 10  # with more methods than LEGEND a page begins with the BEST
PANELS = 12  # small charts side by side

TUNED = {"accuracy": "before fine-tuning", "ft_accuracy": "fine-tuned"}
OVER = {
    "round": "round",
    "down": "GB down, all clients",
    "both": "GB down and up, all clients",
    "hours": "hours of training",
}
MARKS = ("least", "quartile", "median", "quartile", "greatest", "mean", "worst decile")
_COLOURS = 8
_DASHES = ("solid", "7px,3px", "2px,2.5px", "8px,3px,2px,3px", "5px,2px,1.5px,2px")
_SIGNS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
_PLOTLY = ("lowerfence", "q1", "median", "q3", "upperfence")
_ACCURACY = METRICS["accuracy"].label


class Drawing:
    """All charts of a page. A figure stands for one choice of the reader's; its long arrays are kept once.

    gathered: the configurations. judged: each one's accuracy in the table, in percent. note: called with a line about
    each run whose `clients.csv` cannot be read, or lacks an accuracy. fair: each configuration beside its baselines.
    """

    def __init__(
        self, gathered: Sequence[Group], judged: Sequence[float], note: Callable[[str], None], fair: Sequence[Fair]
    ):
        self.gathered, self.judged, self.fair = gathered, judged, fair
        self.settings = list(dict.fromkeys(group.setting for group in gathered))
        self.methods = self._methods()
        self.tables = {run.path: data.read_clients(run, note) for group in gathered for run in group.runs}
        self.spreads = {key: {group: data.spread(group, self.tables, key) for group in gathered} for key in TUNED}
        self.partitions = data.partitions(gathered, self.tables)
        self.size = max(1, math.ceil(max(run.reached for group in gathered for run in group.used) / data.POINTS))
        self.curves = {group: data.curves(group, self.size) for group in gathered}
        self.totals = {group: data.totals(group) for group in gathered}
        self.arrays: list[Any] = []
        self._places: dict[str, int] = {}
        charts = ("curves", "clients", "sizes", "fairness", "partition", "masks", "cost")
        self.charts = {name: list(getattr(self, f"_{name}")()) for name in charts}

    def data(self) -> dict[str, Any]:
        """Return what the page's script needs; numbers as `x`, `y`, `z` or `customdata` are places among the arrays."""
        hidden = []
        for setting in self.settings:
            ranked = [self.methods.index(group.method) for group in self._ranked(setting)]
            hidden.append(ranked[BEST:] if len(ranked) > LEGEND else [])
        return {"settings": self.settings, "hidden": hidden, "charts": self.charts, "arrays": self.arrays}

    def curve_numbers(self) -> Table:
        """Return the means of the accuracy after some of the rounds, for who cannot see or point at the chart."""
        curves = {group: own["accuracy"]["mean"] for group, own in self.curves.items() if "accuracy" in own}
        rounds = sorted({int(number) for over in curves.values() for number in over.index})
        rounds = [rounds[at] for at in data.spaced(len(rounds), 12)]
        heads = (*map(Column, ("method", "setting")), *(Column(str(number), "percent", "round") for number in rounds))
        rows = [
            [Cell(group.method), Cell(group.setting), *(Cell(over.get(at, math.nan)) for at in rounds)]
            for group, over in curves.items()
        ]
        return Table(_ACCURACY, heads, rows)

    def client_numbers(self) -> Table:
        """Return what the boxes show."""
        heads = [Column("method"), Column("setting"), Column("accuracy"), Column("clients", "whole")]
        rows = [
            [*map(Cell, [group.method, group.setting, TUNED[key]]), Cell(len(spread)), *map(Cell, data.box(spread))]
            for key, spreads in self.spreads.items()
            for group, spread in spreads.items()
            if len(spread)
        ]
        return Table("clients' accuracy (%)", (*heads, *(Column(word, "percent") for word in MARKS)), rows)

    def _methods(self) -> list[str]:
        """The labels, the best of each setting first: colours repeat, and the best shall not share one."""
        places: dict[str, int] = {}
        for setting in self.settings:
            for rank, group in enumerate(self._ranked(setting)):
                places[group.method] = min(rank, places.get(group.method, rank))
        return sorted(places, key=places.__getitem__)

    def _ranked(self, setting: str) -> list[Group]:
        """The configurations of a setting, the best first."""
        pairs = zip(self.judged, self.gathered, strict=True)
        ranked = sorted(pairs, key=lambda pair: -pair[0] if pair[0] >= 0 else 1.0)
        return [group for _, group in ranked if group.setting == setting]

    def _share(self, values: list[Any]) -> int:
        """The place of an array, the same for equal ones."""
        place = self._places.setdefault(json.dumps(values), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(values)
        return place

    def _figure(
        self, setting: str, choice: dict[str, str], traces: list[Any], note: str = "", **layout: Any
    ) -> dict[str, Any]:
        place = self.settings.index(setting)
        return {"setting": place, "choice": choice, "note": note, "data": traces, "layout": layout}

    def _look(self, group: Group, sign: str = "", size: int = 8, **others: Any) -> dict[str, Any]:
        """A method's name, and its colour, dash and sign, which are the same in all charts."""
        at = self.methods.index(group.method)
        colour = f"var(--c{at % _COLOURS})"
        sign = sign or _SIGNS[at % len(_SIGNS)] + ("-open" if at // len(_SIGNS) % 2 else "")
        line = {"color": colour, "dash": _DASHES[at % len(_DASHES)]}
        marker = {"color": colour, "symbol": sign, "size": size}
        return {"type": "scatter", "name": _label(group.method), "meta": at, "line": line, "marker": marker} | others

    def _curves(self) -> Iterator[dict[str, Any]]:
        for metric, smooth, setting in itertools.product(data.CURVES, (True, False), self.settings):
            groups = [group for group in self._ranked(setting) if metric.name in self.curves[group]]
            lines = {group: self.curves[group][metric.name] for group in groups}
            if not lines or (smooth and (metric.evaluated or max(map(len, lines.values())) < 40)):
                continue
            if smooth:
                lines = {group: data.smoothed(over) for group, over in lines.items()}
            order = sorted(lines, key=lambda group: lines[group]["mean"].iloc[-1], reverse=metric.best == "max")
            drawn = [(group, self._curve(metric, group, lines[group])) for group in order]
            what = metric.label + (", running mean" if smooth else "")
            what += f", means of {self.size} rounds" if self.size > 1 and not metric.evaluated else ""
            hover = "x unified" if len(drawn) <= LEGEND else "closest"
            for key, title in OVER.items():
                traces = []
                for group, parts in drawn:
                    at = _numbers(data.reached(self.totals[group], key, lines[group].index.to_numpy(float)), 6)
                    if any(value is not None for value in at):
                        shared = self._share(at), self._share(at + at[::-1])
                        traces += [part | {"x": shared["fill" in part]} for part in parts]
                x, y = _axis(title, rangemode="tozero"), _axis(metric.label)
                if traces:
                    yield self._figure(
                        setting, {"what": what, "over": title}, traces, xaxis=x, yaxis=y, hovermode=hover, height=480
                    )

    def _curve(self, metric: Metric, group: Group, over: pd.DataFrame) -> list[dict[str, Any]]:
        """The line of means and, of several seeds, the band of one standard deviation below it; without `x`."""
        digits = ".2f" if metric.unit == "%" else ".4g"
        name = f"{_label(group.method)}  {over['mean'].iloc[-1]:{digits}}"
        name += "" if group.status.startswith("finished") else f", {_label(group.status)}"
        hover = f"%{{y:{digits}}}"
        line = self._look(group, mode="lines+markers", name=name, y=self._share(_numbers(over["mean"])))
        line["marker"]["maxdisplayed"] = 12
        if over["std"].isna().all():
            return [line | {"hovertemplate": hover}]
        spread = over["std"].fillna(0.0)
        ends = self._share(_numbers([*(over["mean"] + spread), *(over["mean"] - spread)[::-1]]))
        quiet: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip", "showlegend": False, "line": {"width": 0}}
        band = self._look(group, y=ends, fill="toself", opacity=0.16, **quiet)
        band["fillcolor"] = band.pop("marker")["color"]
        hover += f" ± %{{customdata:{digits}}}"
        return [band, line | {"customdata": self._share(_numbers(over["std"])), "hovertemplate": hover}]

    def _clients(self) -> Iterator[dict[str, Any]]:
        for setting, (key, words) in itertools.product(self.settings, TUNED.items()):
            spreads = [(group, self.spreads[key][group]) for group in self._ranked(setting)]
            boxes = [(data.box(spread), group, spread) for group, spread in spreads if len(spread)]
            traces = [
                trace
                for marks, group, spread in sorted(boxes, key=lambda box: -box[0][5])
                for trace in self._row(group, marks, spread.iloc[data.spaced(len(spread), DOTS)])
            ]
            if traces:
                x, y = _axis(f"client's accuracy (%), {words}"), {"autorange": "reversed", "type": "category"}
                layout: dict[str, Any] = {"xaxis": x, "yaxis": y, "showlegend": False}
                yield self._figure(setting, {"accuracy": words}, traces, **layout)

    def _row(self, group: Group, marks: list[float], some: pd.DataFrame) -> list[dict[str, Any]]:
        """A method's box and clients, those of the worst decile crossed, and means. marks: the numbers of MARKS."""
        row, low = [_label(group.method)], some[some["low"]]
        box = self._look(group, "circle", 4, y=row, x=[_numbers(some["value"])], text=[_clients_words(some)])
        box |= {name: [_number(value)] for name, value in zip(_PLOTLY, marks[:5], strict=True)}
        del box["line"]
        crosses = self._look(group, "x-thin-open", mode="markers", x=_numbers(low["value"]), y=row * len(low))
        crosses |= {"text": _clients_words(low), "hovertemplate": "%{text}, in the worst decile"}
        means = self._look(group, mode="markers", x=_numbers(marks[5:]), y=row * 2, text=MARKS[5:])
        means["marker"] = {"color": "var(--paper)", "symbol": ["diamond", "triangle-up"], "size": 9}
        means["marker"]["line"] = {"color": "var(--ink)", "width": 1.4}
        return [box | {"type": "box", "orientation": "h"}, crosses, means | {"hovertemplate": "%{text} %{x:.2f}"}]

    def _sizes(self) -> Iterator[dict[str, Any]]:
        """A panel per method; its line joins the medians of five equal parts of the clients by size."""
        for setting, (key, told) in itertools.product(self.settings, TUNED.items()):
            panels = []
            for group in self._ranked(setting):
                spread = self.spreads[key][group]
                spread = spread[spread["train"] > 0]
                if spread.empty:
                    continue
                some = spread.iloc[data.spaced(len(spread), DOTS)]
                traces = [self._dots(group, some, some["train"], some["value"])]
                if len(spread) >= 15:
                    ordered = spread.sort_values("train", kind="stable")
                    part = ordered[["train", "value"]].groupby(np.arange(len(ordered)) * 5 // len(ordered)).median()
                    line = {"type": "scatter", "mode": "lines", "line": {"color": "var(--ink)"}, "hoverinfo": "skip"}
                    traces.append(line | {"x": _numbers(part["train"]), "y": _numbers(part["value"])})
                panels.append((_label(group.method), traces))
            yield from self._panels(setting, {"accuracy": told}, panels, {"type": "log", "dtick": "D2"})

    def _fairness(self) -> Iterator[dict[str, Any]]:
        for setting, (key, baseline) in itertools.product(self.settings, BASELINES.items()):
            panels = []
            for group, fair in zip(self.gathered, self.fair, strict=True):
                pairs = fair.pairs.get(key, {})
                if group.setting != setting or not pairs:
                    continue
                both = pd.concat([own.assign(seed=run.seed) for run, own in pairs.items()]).reset_index()
                some = both.sort_values(["baseline", "own"]).iloc[data.spaced(len(both), DOTS)]
                line = {"color": "var(--quiet)", "dash": "dot", "width": 1.2}
                diagonal = {"type": "scatter", "mode": "lines", "x": [0, 100], "y": [0, 100], "line": line}
                title = f"{_label(fair.method)}: {harm(both['own'] - both['baseline']).harmed:.3g} % harmed"
                dots = self._dots(group, some, some["baseline"], some["own"])
                panels.append((title, [diagonal | {"hoverinfo": "skip"}, dots]))
            yield from self._panels(setting, {"baseline": baseline}, panels, {})

    def _dots(self, group: Group, clients: pd.DataFrame, x: pd.Series, y: pd.Series) -> dict[str, Any]:
        hover = "%{text}: %{y:.2f} %, at %{x}<extra></extra>"
        dots = self._look(group, "circle", 5, mode="markers", text=_clients_words(clients), hovertemplate=hover)
        return dots | {"x": _numbers(x), "y": _numbers(y), "opacity": 0.6}

    def _panels(
        self, setting: str, choice: dict[str, str], panels: list[tuple[str, list[Any]]], across: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Small charts of equal axes beside each other, in as many figures as they need."""
        for start in range(0, len(panels), PANELS):
            part = panels[start : start + PANELS]
            # The script adds rows, columns and height, as wide as the window is.
            grid = {"pattern": "independent", "ygap": 0.35, "xgap": 0.12}
            layout: dict[str, Any] = {"grid": grid, "annotations": [], "showlegend": False}
            traces = []
            for number, (title, own) in enumerate(part, 1):
                at = str(number) if number > 1 else ""
                for trace in own:
                    # Without `meta` they show what the legend of the curves hides: an empty panel would say nothing.
                    trace.pop("meta", None)
                    traces.append(trace | {"xaxis": f"x{at}", "yaxis": f"y{at}"})
                alike = ({"matches": "x"}, {"matches": "y"}) if at else ({}, {})
                layout |= {f"xaxis{at}": across | alike[0], f"yaxis{at}": alike[1]}
                where = {"xref": f"x{at} domain", "yref": f"y{at} domain", "xanchor": "left", "yanchor": "bottom"}
                layout["annotations"].append({"text": title, "x": 0, "y": 1, "showarrow": False} | where)
            more = {"methods": f"{start + 1} to {start + len(part)}"} if len(panels) > PANELS else {}
            yield self._figure(setting, choice | more, traces, **layout)

    def _partition(self) -> Iterator[dict[str, Any]]:
        for entry in self.partitions[:PARTITIONS]:
            counts, sizes = entry["counts"], entry["counts"].sum(1)
            kept = data.spaced(len(counts), max(1, CELLS // counts.shape[1]))
            held, names = counts[kept].T, entry["clients"][kept].astype(str)
            orders = {
                "by number": names,
                "by size": names[np.argsort(-sizes[kept], kind="stable")],
                "by largest class": names[np.lexsort((-held.max(0), held.argmax(0)))],
            }
            logs = np.log10(held, out=np.full(held.shape, math.nan), where=held > 0)
            heat = {"type": "heatmap", "x": self._share([*names]), "y": entry["classes"], "zmin": 0}
            heat |= {"z": self._share([_numbers(row, 3) for row in logs]), "customdata": self._share(held.tolist())}
            heat |= {"hovertemplate": "client %{x}, class %{y}: %{customdata} samples<extra></extra>"}
            heat |= {"colorbar": _log_ticks(held.max())}
            note = f"{len(counts)} clients hold {sizes.sum():,} samples: least {sizes.min()}, median "
            note += f"{np.median(sizes):g}, most {sizes.max()}; {(counts > 0).sum(1).mean():.3g} of {counts.shape[1]} "
            note += "classes per client on average"
            note += f"; {len(kept)} clients are drawn, evenly spaced" if len(kept) < len(counts) else ""
            one = f"seed {', '.join(map(str, sorted(entry['seeds'])))} ({entry['runs']} run{'s'[: entry['runs'] - 1]})"
            y = _axis("class", type="category", autorange="reversed", showgrid=False)
            height = min(560, 190 + 24 * len(held))
            for word, order in orders.items():
                x = _axis("client", type="category", categoryorder="array", categoryarray=[*order], showgrid=False)
                choice = {"partition of": one, "clients": word}
                yield self._figure(entry["setting"], choice, [heat], note, xaxis=x, yaxis=y, height=height)

    def _masks(self) -> Iterator[dict[str, Any]]:
        masks = {group: pd.concat([run.personal for run in group.used]) for group in self.gathered}
        bins = max(8, min(100, MASKS // max(1, sum(len(mask.columns) for mask in masks.values()))))
        for setting, scale in itertools.product(self.settings, ("share of the mask", "entries")):
            for group in self._ranked(setting):
                if len(masks[group].columns):
                    yield self._mask(group, masks[group].groupby(level="round").mean(), bins, scale)

    def _mask(self, group: Group, over: pd.DataFrame, bins: int, scale: str) -> dict[str, Any]:
        """Personalised entries in all above those of each tensor. over: by round and tensor."""
        size = math.ceil(len(over) / bins)
        places = np.arange(len(over)) // size
        ends = _numbers(over.index.to_series().groupby(places).max(), 6)
        entries = over.groupby(places).mean().T
        shares = scale.startswith("share")
        cells = 100 * entries / entries.sum() if shares else np.log10(entries.where(entries > 0))
        bar = {"ticksuffix": " %"} if shares else _log_ticks(entries.max(axis=None))
        names = [_label(name) for name in entries.index]
        heat: dict[str, Any] = {"type": "heatmap", "x": ends, "y": names, "yaxis": "y2"}
        heat |= {"colorbar": bar | {"y": 0.36, "len": 0.78}}
        heat |= {"z": self._share([_numbers(row, 3) for row in cells.to_numpy()])}
        heat |= {"customdata": self._share([_numbers(row) for row in entries.to_numpy()])}
        heat |= {"hovertemplate": "%{y}, to round %{x}: %{customdata} entries<extra></extra>"}
        line = self._look(group, mode="lines+markers", x=ends, y=_numbers(entries.sum()))
        del line["meta"]
        totals = {run.summary.get("parameters") for run in group.used}
        whole = totals.pop() if len(totals) == 1 else None
        return self._figure(
            group.setting,
            {"method": clip(group.method, 60), "scale": scale},
            [line | {"hovertemplate": "%{y}<extra></extra>"}, heat],
            "Above: personalised entries in all" + (f", of {whole:,} parameters" if isinstance(whole, int) else ""),
            xaxis=_axis("round" if size == 1 else f"round, means of {size}", anchor="y2"),
            yaxis={"domain": [0.8, 1], "rangemode": "tozero"},
            yaxis2={"domain": [0, 0.74], "autorange": "reversed", "type": "category", "showgrid": False},
            height=240 + max(9, min(24, 520 // len(names))) * len(names),
            showlegend=False,
        )

    def _cost(self) -> Iterator[dict[str, Any]]:
        totals = {group: spent.iloc[-1] for group, spent in self.totals.items()}
        for setting, (key, title) in itertools.product(self.settings, [*OVER.items()][1:]):
            points = [
                (group, float(totals[group][key]), accuracy)
                for group, accuracy in zip(self.gathered, self.judged, strict=True)
                if group.setting == setting and math.isfinite(accuracy) and math.isfinite(totals[group][key])
            ]
            traces, most = [], max((cost for _, cost, _ in points), default=0.0)
            for group, cost, accuracy in points:
                side = "left" if cost > most / 2 else "right"  # where there is room
                look = self._look(group, size=11, mode="markers+text", textposition=f"middle {side}")
                look |= {"x": [_number(cost)], "y": [_number(accuracy)], "text": [look["name"]]}
                traces.append(look | {"hovertemplate": "%{text}<br>%{y:.2f} %, " + title + " %{x}<extra></extra>"})
            if traces:
                least = min(cost for _, cost, _ in points)
                scale = {"type": "log"} if 0 < 20 * least < most else {"rangemode": "tozero"}
                x, y = _axis(title, **scale), _axis(_ACCURACY)
                yield self._figure(
                    setting, {"accuracy against": title}, traces, xaxis=x, yaxis=y, height=440, showlegend=False
                )


def _axis(title: str, **others: Any) -> dict[str, Any]:
    return {"title": {"text": title}} | others


def _clients_words(clients: pd.DataFrame) -> list[str]:
    return [
        f"client {client:.0f}, seed {seed}" for client, seed in zip(clients["client"], clients["seed"], strict=True)
    ]


def _log_ticks(most: float) -> dict[str, Any]:
    """A scale of the logarithms of counts that tells the counts."""
    powers = range(math.floor(math.log10(max(most, 1))) + 1)
    return {"tickvals": [*powers], "ticktext": [f"{10**power:,}" for power in powers]}


def _label(text: str) -> str:
    """Text as plotly shows it: it reads a few tags in all that it writes."""
    return escape(clip(text, 60), quote=False)


def _numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    return [_number(value, digits) for value in values]


def _number(value: float, digits: int = 4) -> float | None:
    """A number of so many digits; None where it is not finite, which JSON cannot hold."""
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value == int(value) else value
