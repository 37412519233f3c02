"""The charts of a page as plotly draws them: dicts of numbers, thinned and rounded, ready for JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd

from fedpfl.record.columns import METRICS, Metric
from fedpfl.report.fairness import BASELINES, BaselineComparison, measure_harm
from fedpfl.report.grouping import Group
from fedpfl.report.page import data
from fedpfl.report.page.data import AXIS_TITLES, PartitionCounts
from fedpfl.report.table import Column, Table
from fedpfl.report.text import clip_text

DOTS = 200  # clients of a method that are drawn one by one
PARTITIONS = 12  # of a page
CELLS = 20_000  # of one partition's heat map
MASKS = 60_000  # cells of all mask heat maps of a page together
LEGEND, BEST = 14, 10  # with more methods than LEGEND a page begins with the BEST
PANELS = 12  # small charts side by side

TUNED = {"accuracy": "before fine-tuning", "ft_accuracy": "fine-tuned"}
_COLOURS = 8
_DASHES = ("solid", "7px,3px", "2px,2.5px", "8px,3px,2px,3px", "5px,2px,1.5px,2px")
_SIGNS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
_FENCES = ("lowerfence", "q1", "median", "q3", "upperfence")
_ACCURACY = METRICS["accuracy"].label
_SETTING = "data set and partition"

Figures = Iterator[dict[str, Any]]


class PageCharts:
    """All charts of a page. A figure stands for one choice of the reader's; its long arrays are
    kept once.

    gathered: the configurations. judged: each one's accuracy in the table, in percent. note: called
    with a line about
    what is left out. fair: each configuration beside its baselines.
    """

    def __init__(
        self,
        gathered: Sequence[Group],
        judged: Sequence[float],
        note: Callable[[str], None],
        fair: Sequence[BaselineComparison],
    ):
        self.judged, self.fair = dict(zip(gathered, judged, strict=True)), fair
        settings = dict.fromkeys(group.setting for group in gathered)
        self.ranked = {setting: self._best_first(gathered, setting) for setting in settings}
        # The best of each setting first: colours repeat, and the best shall not share one.
        ranks = itertools.zip_longest(*self.ranked.values())
        self.methods = list(
            dict.fromkeys(group.method for rank in ranks for group in rank if group)
        )
        clients = {run: data.read_clients(run, note) for group in gathered for run in group.runs}
        self.spreads = {
            key: {group: data.client_accuracies(group, clients, key) for group in gathered}
            for key in TUNED
        }
        self.size = max(
            1,
            math.ceil(
                max(run.rounds_done for group in gathered for run in group.reported_runs)
                / data.POINTS
            ),
        )
        self.curves = {group: data.metric_curves(group, self.size) for group in gathered}
        self.totals = {group: data.spent_by_round(group) for group in gathered}
        self.arrays: list[Any] = []
        self._places: dict[str, int] = {}
        partitions = data.distinct_partitions(gathered)
        if (left := len(partitions) - PARTITIONS) > 0:
            note(f"partitions left out of this page: {left}")
        self.charts = {
            "curves": list(self._curves()),
            "clients": list(self._boxes()),
            "sizes": list(self._sizes()),
            "fairness": list(self._fairness()),
            "partition": [
                figure for one in partitions[:PARTITIONS] for figure in self._partition(one)
            ],
            "common": list(self._common(note)),
            "masks": list(self._masks()),
            "cost": list(self._cost()),
        }

    def data(self) -> dict[str, Any]:
        """Return what the page's script needs; numbers as `x`, `y`, `z` or `customdata` are places
        among the arrays.
        """
        hidden = list(range(BEST, len(self.methods))) if len(self.methods) > LEGEND else []
        template = json.loads(
            resources.files("fedpfl.report.page").joinpath("template.json").read_text("utf-8")
        )
        return {
            "hidden": hidden,
            "charts": self.charts,
            "arrays": self.arrays,
            "template": template,
        }

    def curve_numbers(self) -> Table:
        """Return the means of the accuracy after some of the rounds, for who cannot see or point at
        the chart.
        """
        curves = {
            group: lines["accuracy"]["mean"]
            for group, lines in self.curves.items()
            if "accuracy" in lines
        }
        rounds = sorted({number for over in curves.values() for number in over.index})
        rounds = [rounds[at] for at in data.evenly_spaced(len(rounds), 12)]
        columns = {number: Column(str(number), "percent", "round") for number in rounds}
        records = [
            _named(group) | {number: over.get(number) for number in rounds}
            for group, over in curves.items()
        ]
        return Table.of(records, _NAMED | columns, title=_ACCURACY, by=1)

    def client_numbers(self) -> Table:
        """Return what the boxes show."""
        records = [
            _named(group)
            | {"accuracy": TUNED[key], "clients": len(spread)}
            | data.box_numbers(spread)
            for key, spreads in self.spreads.items()
            for group, spread in spreads.items()
            if len(spread)
        ]
        columns = {"accuracy": Column("accuracy (%)"), "clients": Column("clients", "whole")}
        columns |= {name: Column(name, "percent") for name in data.BOX_NUMBERS}
        return Table.of(records, _NAMED | columns, title="clients' accuracy", by=1)

    def _best_first(self, gathered: Sequence[Group], setting: str) -> list[Group]:
        members = [group for group in gathered if group.setting == setting]
        return sorted(members, key=lambda group: float(np.nan_to_num(-self.judged[group], nan=1.0)))

    def _share(self, values: list[Any]) -> int:
        """The place of an array, the same for equal ones."""
        place = self._places.setdefault(json.dumps(values), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(values)
        return place

    def _look(self, group: Group, sign: str = "", size: int = 8, **others: Any) -> dict[str, Any]:
        """A method's name, and its colour, dash and sign, which are the same in all charts."""
        at = self.methods.index(group.method)
        colour = f"var(--c{at % _COLOURS})"
        sign = sign or _SIGNS[at % len(_SIGNS)] + ("-open" if at // len(_SIGNS) % 2 else "")
        line = {"color": colour, "dash": _DASHES[at % len(_DASHES)]}
        marker = {"color": colour, "symbol": sign, "size": size}
        return {
            "type": "scatter",
            "name": _label(group.method),
            "meta": at,
            "line": line,
            "marker": marker,
        } | others

    def _curves(self) -> Figures:
        for (setting, rivals), metric in itertools.product(self.ranked.items(), data.CURVES):
            known = [group for group in rivals if metric.name in self.curves[group]]
            lines = {group: self.curves[group][metric.name] for group in known}
            order = sorted(
                lines, key=lambda group: lines[group]["mean"].iloc[-1], reverse=metric.best == "max"
            )
            binned = self.size > 1 and not metric.is_evaluated
            what = metric.label + (f", means of {self.size} rounds" if binned else "")
            for key, title in AXIS_TITLES.items():
                traces = []
                for group in order:
                    at = data.spent_at_rounds(
                        self.totals[group], key, lines[group].index.to_numpy(float)
                    )
                    if np.isfinite(at).any():
                        traces += self._curve(metric, group, lines[group], _numbers(at, 6))
                x, y = _axis(title, rangemode="tozero"), _axis(metric.label)
                hover = "x unified" if len(lines) <= LEGEND else "closest"
                if traces:
                    choice = {"what": what, "over": title}
                    yield _figure(
                        setting, choice, traces, xaxis=x, yaxis=y, hovermode=hover, height=480
                    )

    def _curve(
        self, metric: Metric, group: Group, over: pd.DataFrame, at: list[Any]
    ) -> list[dict[str, Any]]:
        """The line of means and, of several seeds, the band of one standard deviation below it. at:
        along the axis.
        """
        digits = ".2f" if metric.unit == "%" else ".4g"
        name = f"{_label(group.method)}  {over['mean'].iloc[-1]:{digits}}"
        name += "" if group.status.startswith("finished") else f", {_label(group.status)}"
        line = self._look(
            group,
            mode="lines+markers",
            name=name,
            x=self._share(at),
            hovertemplate=f"%{{y:{digits}}}",
        )
        line |= {"y": self._share(_numbers(over["mean"]))}
        line["marker"]["maxdisplayed"] = 12
        if over["std"].isna().all():
            return [line]
        line |= {"customdata": self._share(_numbers(over["std"]))}
        line["hovertemplate"] += f" ± %{{customdata:{digits}}}"
        spread = over["std"].fillna(0.0)
        ends = self._share(_numbers([*(over["mean"] + spread), *(over["mean"] - spread)[::-1]]))
        quiet: dict[str, Any] = {
            "mode": "lines",
            "hoverinfo": "skip",
            "showlegend": False,
            "line": {"width": 0},
        }
        band = self._look(
            group, x=self._share(at + at[::-1]), y=ends, fill="toself", opacity=0.16, **quiet
        )
        band["fillcolor"] = band.pop("marker")["color"]
        return [band, line]

    def _boxes(self) -> Figures:
        for (setting, rivals), (key, words) in itertools.product(
            self.ranked.items(), TUNED.items()
        ):
            spreads = [(group, self.spreads[key][group]) for group in rivals]
            boxes = [
                (data.box_numbers(spread), group, spread)
                for group, spread in spreads
                if len(spread)
            ]
            boxes.sort(key=lambda box: -box[0]["mean"])
            if traces := [trace for box in boxes for trace in self._row(*box)]:
                x, y = (
                    _axis(f"client's accuracy (%), {words}"),
                    {"autorange": "reversed", "type": "category"},
                )
                yield _figure(
                    setting, {"accuracy": words}, traces, xaxis=x, yaxis=y, showlegend=False
                )

    def _row(
        self, box: dict[str, float], group: Group, spread: pd.DataFrame
    ) -> list[dict[str, Any]]:
        """A method's box and clients, those of the worst decile crossed, and means. box: the
        numbers of BOX.
        """
        some = spread.iloc[data.evenly_spaced(len(spread), DOTS)]
        row, low, marks = [_label(group.method)], some[some["low"]], _numbers(box.values())
        dots = self._look(
            group, "circle", 4, y=row, x=[_numbers(some["value"])], text=[_clients_words(some)]
        )
        dots |= {"type": "box", "line": {}} | {
            name: [mark] for name, mark in zip(_FENCES, marks, strict=False)
        }
        crosses = self._look(
            group, "x-thin-open", mode="markers", x=_numbers(low["value"]), y=row * len(low)
        )
        crosses |= {"text": _clients_words(low), "hovertemplate": "%{text}, in the worst decile"}
        means = self._look(group, mode="markers", x=marks[5:], y=row * 2, text=data.BOX_NUMBERS[5:])
        means["marker"] = {"color": "var(--paper)", "symbol": ["diamond", "triangle-up"], "size": 9}
        means["marker"]["line"] = {"color": "var(--ink)", "width": 1.4}
        return [dots, crosses, means | {"hovertemplate": "%{text} %{x:.2f}"}]

    def _sizes(self) -> Figures:
        """A panel per method; its line joins the medians of five equal parts of the clients by
        size.
        """
        for (setting, rivals), (key, words) in itertools.product(
            self.ranked.items(), TUNED.items()
        ):
            panels = []
            for group in rivals:
                spread = self.spreads[key][group].query("train > 0")
                if spread.empty:
                    continue
                traces = [self._dots(group, spread.assign(at=spread["train"]))]
                if len(spread) >= 15:
                    ordered = spread.sort_values("train", kind="stable")
                    part = (
                        ordered[["train", "value"]]
                        .groupby(np.arange(len(ordered)) * 5 // len(ordered))
                        .median()
                    )
                    line = {
                        "type": "scatter",
                        "mode": "lines",
                        "line": {"color": "var(--ink)"},
                        "hoverinfo": "skip",
                    }
                    traces.append(
                        line | {"x": _numbers(part["train"]), "y": _numbers(part["value"])}
                    )
                panels.append((_label(group.method), traces))
            yield from _panels(setting, {"accuracy": words}, panels, type="log", dtick="D2")

    def _fairness(self) -> Figures:
        for setting, (key, baseline) in itertools.product(self.ranked, BASELINES.items()):
            panels = []
            for fair in self.fair:
                pairs = fair.pairs.get(key, {})
                if fair.group.setting != setting or not pairs:
                    continue
                both = pd.concat(
                    [pair.assign(seed=run.seed) for run, pair in pairs.items()]
                ).reset_index()
                both = both.rename(columns={"baseline": "at", "accuracy": "value"}).sort_values(
                    ["at", "value"]
                )
                line = {"color": "var(--quiet)", "dash": "dot", "width": 1.2}
                diagonal = {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [0, 100],
                    "y": [0, 100],
                    "line": line,
                }
                title = f"{_label(fair.group.method)}: {measure_harm(both['value'] - both['at']).harmed:.3g} % harmed"
                panels.append(
                    (title, [diagonal | {"hoverinfo": "skip"}, self._dots(fair.group, both)])
                )
            yield from _panels(setting, {"baseline": baseline}, panels)

    def _dots(self, group: Group, clients: pd.DataFrame) -> dict[str, Any]:
        """Some of the clients, which have the columns client, seed, at and value; the legend does
        not hide them.
        """
        some = clients.iloc[data.evenly_spaced(len(clients), DOTS)]
        hover = "%{text}: %{y:.2f} %, at %{x}<extra></extra>"
        dots = self._look(
            group, "circle", 5, mode="markers", text=_clients_words(some), hovertemplate=hover
        )
        return dots | {
            "x": _numbers(some["at"]),
            "y": _numbers(some["value"]),
            "opacity": 0.6,
            "meta": None,
        }

    def _partition(self, one: PartitionCounts) -> Figures:
        counts, sizes = one.counts.to_numpy(), one.counts.to_numpy().sum(1)
        kept = data.evenly_spaced(len(counts), max(1, CELLS // counts.shape[1]))
        held, names = counts[kept].T, one.counts.index[kept].astype(str)
        orders = {
            "by number": names,
            "by size": names[np.argsort(-sizes[kept], kind="stable")],
            "by largest class": names[np.lexsort((-held.max(0), held.argmax(0)))],
        }
        logs = np.log10(held, out=np.full(held.shape, math.nan), where=held > 0)
        heat = {"type": "heatmap", "x": self._share([*names]), "y": [*one.counts], "zmin": 0}
        heat |= {
            "z": self._share([_numbers(row, 3) for row in logs]),
            "customdata": self._share(held.tolist()),
        }
        heat |= {"hovertemplate": "client %{x}, class %{y}: %{customdata} samples<extra></extra>"}
        heat |= {"colorbar": _log_ticks(held.max())}
        note = (
            f"{len(counts)} clients hold {sizes.sum():,} samples: least {sizes.min()}, median {np.median(sizes):g}, "
            f"most {sizes.max()}; {(counts > 0).sum(1).mean():.3g} of {counts.shape[1]} classes per client on average"
        )
        note += f"; {len(kept)} clients are drawn, evenly spaced" if len(kept) < len(counts) else ""
        seeds = f"seed {', '.join(map(str, sorted(one.seeds)))} ({one.runs} {'run' if one.runs == 1 else 'runs'})"
        y = _axis("class", type="category", autorange="reversed", showgrid=False)
        height = min(560, 190 + 24 * len(held))
        for word, order in orders.items():
            x = _axis(
                "client",
                type="category",
                categoryorder="array",
                categoryarray=[*order],
                showgrid=False,
            )
            choice = {"partition of": seeds, "clients": word}
            yield _figure(one.setting, choice, [heat], note, xaxis=x, yaxis=y, height=height)

    def _common(self, note: Callable[[str], None]) -> Figures:
        """Everybody's model on everybody's samples, of a configuration's first seed."""
        for group in (group for rivals in self.ranked.values() for group in rivals):
            run = min(group.reported_runs, key=lambda one: one.seed)
            if (frame := data.read_cross_accuracy(run, note)).empty:
                continue
            names = [str(number) for number in frame.index]
            heat = {
                "type": "heatmap",
                "x": self._share(names),
                "y": self._share(names),
                "zmin": 0,
                "zmax": 100,
            }
            heat |= {"z": self._share([_numbers(row) for row in frame.to_numpy()])}
            heat |= {
                "hovertemplate": "model of client %{y} on samples of client %{x}: %{z} %<extra></extra>"
            }
            axes = [
                _axis(title, type="category", showgrid=False)
                for title in ("samples of client", "model of client")
            ]
            y = axes[1] | {"autorange": "reversed"}
            choice = {"method": clip_text(group.method, 60)}
            yield _figure(
                group.setting,
                choice,
                [heat],
                f"seed {run.seed}",
                xaxis=axes[0],
                yaxis=y,
                height=560,
            )

    def _masks(self) -> Figures:
        masks = {
            group: pd.concat([run.personalized_entries for run in group.reported_runs])
            for rivals in self.ranked.values()
            for group in rivals
        }
        bins = max(8, min(100, MASKS // max(1, sum(len(mask.columns) for mask in masks.values()))))
        for group, mask in masks.items():
            if len(mask.columns):
                yield self._mask(group, mask.groupby(level="round").mean(), bins)

    def _mask(self, group: Group, over: pd.DataFrame, bins: int) -> dict[str, Any]:
        """Personalised entries in all above those of each tensor. over: by round and tensor."""
        size = math.ceil(len(over) / bins)
        places = np.arange(len(over)) // size
        ends = _numbers(over.index.to_series().groupby(places).max(), 6)
        entries = over.groupby(places).mean().T
        shares = 100 * entries / entries.sum()
        names = [_label(name) for name in entries.index]
        heat: dict[str, Any] = {"type": "heatmap", "x": ends, "y": names, "yaxis": "y2"}
        heat |= {"colorbar": {"ticksuffix": " %", "y": 0.36, "len": 0.78}}
        heat |= {"z": self._share([_numbers(row, 3) for row in shares.to_numpy()])}
        heat |= {"customdata": self._share([_numbers(row) for row in entries.to_numpy()])}
        heat |= {
            "hovertemplate": "%{y}, to round %{x}: %{customdata} entries, %{z} %<extra></extra>"
        }
        line = self._look(group, mode="lines+markers", x=ends, y=_numbers(entries.sum()), meta=None)
        totals = {run.summary.get("parameters") for run in group.reported_runs}
        whole = totals.pop() if len(totals) == 1 else None
        return _figure(
            group.setting,
            {"method": clip_text(group.method, 60)},
            [line | {"hovertemplate": "%{y}<extra></extra>"}, heat],
            "Above: personalised entries in all"
            + (f", of {whole:,} parameters" if isinstance(whole, int) else ""),
            xaxis=_axis("round" if size == 1 else f"round, means of {size}", anchor="y2"),
            yaxis={"domain": [0.8, 1], "rangemode": "tozero"},
            yaxis2={
                "domain": [0, 0.74],
                "autorange": "reversed",
                "type": "category",
                "showgrid": False,
            },
            height=240 + max(9, min(24, 520 // len(names))) * len(names),
            showlegend=False,
        )

    def _cost(self) -> Figures:
        for (setting, rivals), (key, title) in itertools.product(
            self.ranked.items(), [*AXIS_TITLES.items()][1:]
        ):
            costs = {group: float(self.totals[group][key].iloc[-1]) for group in rivals}
            costs = {
                group: cost
                for group, cost in costs.items()
                if math.isfinite(cost + self.judged[group])
            }
            if not costs:
                continue
            traces, most = [], max(costs.values())
            for group, cost in costs.items():
                side = "left" if cost > most / 2 else "right"  # where there is room
                look = self._look(
                    group, size=11, mode="markers+text", textposition=f"middle {side}"
                )
                look |= {
                    "x": _numbers([cost]),
                    "y": _numbers([self.judged[group]]),
                    "text": [look["name"]],
                }
                traces.append(
                    look
                    | {"hovertemplate": "%{text}<br>%{y:.2f} %, " + title + " %{x}<extra></extra>"}
                )
            scale = (
                {"type": "log"} if 0 < 20 * min(costs.values()) < most else {"rangemode": "tozero"}
            )
            x, y = _axis(title, **scale), _axis(_ACCURACY)
            yield _figure(
                setting,
                {"accuracy against": title},
                traces,
                xaxis=x,
                yaxis=y,
                height=440,
                showlegend=False,
            )


def _figure(
    setting: str,
    choice: dict[str, str],
    traces: Sequence[dict[str, Any]],
    note: str = "",
    **layout: Any,
) -> dict[str, Any]:
    return {"choice": {_SETTING: setting} | choice, "note": note, "data": traces, "layout": layout}


def _panels(
    setting: str,
    choice: dict[str, str],
    panels: Sequence[tuple[str, list[dict[str, Any]]]],
    **across: Any,
) -> Figures:
    """Small charts of equal axes beside each other, in as many figures as they need. across: of
    their axes.
    """
    for start in range(0, len(panels), PANELS):
        part = panels[start : start + PANELS]
        # The script adds rows, columns and height, as wide as the window is.
        grid = {"pattern": "independent", "ygap": 0.35, "xgap": 0.12}
        layout: dict[str, Any] = {"grid": grid, "annotations": [], "showlegend": False}
        traces = []
        for number, (title, inside) in enumerate(part, 1):
            at = str(number) if number > 1 else ""
            traces += [trace | {"xaxis": f"x{at}", "yaxis": f"y{at}"} for trace in inside]
            layout |= {f"xaxis{at}": across | {"matches": "x"}, f"yaxis{at}": {"matches": "y"}}
            where = {
                "xref": f"x{at} domain",
                "yref": f"y{at} domain",
                "xanchor": "left",
                "yanchor": "bottom",
            }
            layout["annotations"].append(
                {"text": title, "x": 0, "y": 1, "showarrow": False} | where
            )
        methods = {"methods": f"{start + 1} to {start + len(part)} of {len(panels)}"}
        yield _figure(setting, choice | methods, traces, **layout)


_NAMED = {"setting": Column(_SETTING), "method": Column("method")}


def _named(group: Group) -> dict[str, Any]:
    return {"setting": group.setting, "method": group.method}


def _axis(title: str, **others: Any) -> dict[str, Any]:
    return {"title": {"text": title}} | others


def _clients_words(clients: pd.DataFrame) -> list[str]:
    pairs = zip(clients["client"], clients["seed"], strict=True)
    return [f"client {client:.0f}, seed {seed}" for client, seed in pairs]


def _log_ticks(most: float) -> dict[str, Any]:
    """A scale of the logarithms of counts that tells the counts."""
    powers = range(math.floor(math.log10(max(most, 1))) + 1)
    return {"tickvals": [*powers], "ticktext": [f"{10**power:,}" for power in powers]}


def _label(text: str) -> str:
    """Text as plotly shows it: it reads a few tags in all that it writes."""
    return escape(clip_text(text, 60), quote=False)


def _numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Numbers of so many digits; None where they are not finite, which JSON cannot hold."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
