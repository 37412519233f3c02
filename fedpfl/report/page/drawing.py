"""Charts of a page as plotly draws them: dicts of numbers, thinned and rounded for JSON."""

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
from fedpfl.report.grouping import Group, common_task
from fedpfl.report.page import data
from fedpfl.report.page.data import AXIS_TITLES, COST_TITLES, PartitionCounts
from fedpfl.report.styles import COLORS, number_styles
from fedpfl.report.table import Column, Table
from fedpfl.report.text import clip_text

DOTS = 200  # clients of a method that are drawn one by one
MAX_PARTITIONS = 12  # of a page
MAX_PARTITION_CELLS = 20_000  # of one partition's heat map
MAX_MASK_CELLS = 60_000  # of all mask heat maps of a page together
MAX_LEGEND_METHODS = 14  # with more, a page begins with the best ones alone
INITIAL_METHODS = 10  # how many these are
MAX_PANELS = 12  # small charts side by side

_DASHES = ("solid", "7px,3px", "2px,2.5px", "8px,3px,2px,3px", "5px,2px,1.5px,2px")
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")
_FENCES = ("lowerfence", "q1", "median", "q3", "upperfence")
_SETTING = "data set and partition"
_SUCCESS = "asr"

Trace = dict[str, Any]
Figures = Iterator[dict[str, Any]]


class PageCharts:
    """All charts of a page.

    A figure stands for one choice of the reader's; its long arrays are kept once.

    Args:
        shown_groups: the configurations.
        scores: the numbers of the table of accuracies, a row per configuration.
        note: called with a line about what is left out.
        comparisons: each configuration and its baselines.
    """

    def __init__(
        self,
        shown_groups: Sequence[Group],
        scores: pd.DataFrame,
        note: Callable[[str], None],
        comparisons: Sequence[BaselineComparison],
    ):
        self.task = common_task(group.runs[0] for group in shown_groups)
        score = self.task.score
        self.titles = {score: "before fine-tuning", f"ft_{score}": "fine-tuned"}
        numbers = scores.reindex(columns=[score, _SUCCESS]).astype(float)
        self.accuracies = dict(zip(shown_groups, numbers[score], strict=True))
        # Of the same evaluations: a validation score may have chosen others than the last.
        self.successes = dict(zip(shown_groups, numbers[_SUCCESS], strict=True))
        self.comparisons = comparisons
        self.ranked: dict[str, list[Group]] = {}
        for setting in dict.fromkeys(group.setting for group in shown_groups):
            self.ranked[setting] = self._best_first(shown_groups, setting)
        # The best of each setting first, as legends list them.
        same_rank_groups = itertools.zip_longest(*self.ranked.values())
        self.methods = list(
            dict.fromkeys(group.method for rank in same_rank_groups for group in rank if group)
        )

        self.style_numbers = number_styles(shown_groups)

        # ---- Step: the numbers behind the charts.
        clients = {
            run: data.read_clients(run, note) for group in shown_groups for run in group.runs
        }
        self.client_accuracies = {
            key: {group: data.client_accuracies(group, clients, key) for group in shown_groups}
            for key in self.titles
        }
        rounds_done = [run.rounds_done for group in shown_groups for run in group.reported_runs]
        self.bin_size = max(1, math.ceil(max(rounds_done) / data.POINTS))
        self.curves = {group: data.metric_curves(group, self.bin_size) for group in shown_groups}
        self.spent = {group: data.spent_by_round(group) for group in shown_groups}
        # Plotly's figures repeat long arrays: JSON holds each once, and figures name its index.
        self.arrays: list[Any] = []
        self._array_indices: dict[str, int] = {}
        partitions = data.distinct_partitions(shown_groups)
        left_out = len(partitions) - MAX_PARTITIONS
        if left_out > 0:
            note(f"partitions left out of this page: {left_out}")
        self.charts = self._make_charts(partitions, note)

    def _make_charts(
        self, partitions: Sequence[PartitionCounts], note: Callable[[str], None]
    ) -> dict[str, list[dict[str, Any]]]:
        """Return the figures of each section. The order numbers the shared arrays."""
        return {
            "curves": list(self._curve_figures()),
            "clients": list(self._client_figures()),
            "sizes": list(self._size_figures()),
            "fairness": list(self._fairness_figures()),
            "partition": [
                figure
                for partition in partitions[:MAX_PARTITIONS]
                for figure in self._partition_figures(partition)
            ],
            "common": list(self._cross_accuracy_figures(note)),
            "masks": list(self._mask_figures()),
            "cost": list(self._cost_figures()),
        }

    def data(self) -> dict[str, Any]:
        """Return the input of the page's script.

        Numbers as `x`, `y`, `z` or `customdata` are indices of the arrays.
        """
        hidden: list[int] = []
        if len(self.methods) > MAX_LEGEND_METHODS:
            hidden = list(range(INITIAL_METHODS, len(self.methods)))
        template = resources.files("fedpfl.report.page").joinpath("template.json")
        return {
            "hidden": hidden,
            "charts": self.charts,
            "arrays": self.arrays,
            "template": json.loads(template.read_text("utf-8")),
        }

    def curve_numbers(self) -> Table:
        """Return mean accuracies after some rounds, for who cannot see the chart."""
        score = self.task.score
        curves = {
            group: metric_curves[score]["mean"]
            for group, metric_curves in self.curves.items()
            if score in metric_curves
        }
        all_rounds = sorted({number for curve in curves.values() for number in curve.index})
        rounds = [all_rounds[index] for index in data.evenly_spaced(len(all_rounds), 12)]
        columns = {number: Column(str(number), METRICS[score].kind, "round") for number in rounds}
        records = []
        for group, curve in curves.items():
            values = {number: curve.get(number) for number in rounds}
            records.append(_group_cells(group) | values)
        return Table.of(
            records,
            _GROUP_COLUMNS | columns,
            title=METRICS[score].label,
            by=1,
        )

    def client_numbers(self) -> Table:
        """Return the numbers of the boxes."""
        records = []
        for key, accuracies_by_group in self.client_accuracies.items():
            for group, accuracies in accuracies_by_group.items():
                if len(accuracies):
                    counts = {"accuracy": self.titles[key], "clients": len(accuracies)}
                    numbers = data.box_numbers(accuracies)
                    records.append(_group_cells(group) | counts | numbers)
        word = self.task.score_word
        columns = {
            "accuracy": Column(self._score_label()),
            "clients": Column("clients", "whole"),
        }
        kind = METRICS[self.task.score].kind
        columns |= {name: Column(name, kind) for name in data.BOX_NUMBERS}
        return Table.of(
            records,
            _GROUP_COLUMNS | columns,
            title=f"clients' {word}",
            by=1,
        )

    def _score_label(self) -> str:
        """Return what a client is judged by, with its unit."""
        return f"{self.task.score_word} (%)" if self.task.unit else self.task.score_word

    def _best_first(self, shown_groups: Sequence[Group], setting: str) -> list[Group]:
        # A configuration without an accuracy comes last.
        def sort_key(group: Group) -> float:
            score = self.accuracies[group]
            if self.task.is_higher_better:
                # -score is at most 0, so that 1 comes last.
                return float(np.nan_to_num(-score, nan=1.0))
            return float(np.nan_to_num(score, nan=np.inf))

        return sorted((group for group in shown_groups if group.setting == setting), key=sort_key)

    def _add_array(self, values: list[Any]) -> int:
        """Return the index of an array, the same for equal ones."""
        # By its text: lists cannot be keys.
        index = self._array_indices.setdefault(
            json.dumps(values),
            len(self.arrays),
        )
        if index == len(self.arrays):
            self.arrays.append(values)
        return index

    def _style(self, group: Group, symbol: str = "", size: int = 8, **fields: Any) -> Trace:
        """Return a trace with a method's name, and its colour, dash and symbol everywhere."""
        style_number = self.style_numbers[group.method]
        colour = f"var(--c{style_number % len(COLORS)})"
        symbol = symbol or _SYMBOLS[style_number % len(_SYMBOLS)]
        return {
            "type": "scatter",
            "name": _plotly_text(group.method),
            # By this number the script hides a method in all charts at once.
            "meta": self.methods.index(group.method),
            "line": {"color": colour, "dash": _DASHES[style_number % len(_DASHES)]},
            "marker": {"color": colour, "symbol": symbol, "size": size},
        } | fields

    # ---- curves

    def _curve_figures(self) -> Figures:
        # ---- Step 1: the curves of a metric in a setting, the best last value first.
        for (setting, rivals), metric in itertools.product(self.ranked.items(), data.CURVES):
            curves = {
                group: self.curves[group][metric.name]
                for group in rivals
                if metric.name in self.curves[group]
            }
            last_means = {group: curve["mean"].iloc[-1] for group, curve in curves.items()}
            best_first = sorted(
                curves,
                key=last_means.__getitem__,
                reverse=metric.best == "max",
            )
            label = metric.label
            if self.bin_size > 1 and not metric.is_evaluated:
                label += f", means of {self.bin_size} rounds"

            # ---- Step 2: a figure for each axis along which anything was recorded.
            for key, title in AXIS_TITLES.items():
                traces = []
                for group in best_first:
                    rounds = curves[group].index.to_numpy(float)
                    positions = data.spent_at_rounds(self.spent[group], key, rounds)
                    if np.isfinite(positions).any():
                        x = _round_numbers(positions, 6)
                        traces += self._curve_traces(
                            metric,
                            group,
                            curves[group],
                            x,
                        )
                if traces:
                    yield _make_figure(
                        setting,
                        {"what": label, "over": title},
                        traces,
                        xaxis=_make_axis(title, rangemode="tozero"),
                        yaxis=_make_axis(metric.label),
                        hovermode="x unified" if len(curves) <= MAX_LEGEND_METHODS else "closest",
                        height=480,
                    )

    def _curve_traces(
        self, metric: Metric, group: Group, curve: pd.DataFrame, x: list[Any]
    ) -> list[Trace]:
        """Return the line of means and, of several seeds, the band of one standard deviation.

        Args:
            metric: the metric.
            group: the configuration.
            curve: mean and standard deviation by round.
            x: the position of each round along the axis.
        """
        # ---- Step 1: the line of means. Arrays are numbered in the order of their first use.
        number_format = ".2f" if metric.unit == "%" else ".4g"
        name = f"{_plotly_text(group.method)}  {curve['mean'].iloc[-1]:{number_format}}"
        if not group.status.startswith("finished"):
            name += f", {_plotly_text(group.status)}"
        line = self._style(
            group,
            mode="lines+markers",
            name=name,
            x=self._add_array(x),
            hovertemplate=f"%{{y:{number_format}}}",
        )
        line["y"] = self._add_array(_round_numbers(curve["mean"]))
        line["marker"]["maxdisplayed"] = 12
        if curve["std"].isna().all():
            return [line]
        line["customdata"] = self._add_array(_round_numbers(curve["std"]))
        line["hovertemplate"] += f" ± %{{customdata:{number_format}}}"

        # ---- Step 2: the band below it, once around its outline.
        std = curve["std"].fillna(0.0)
        outline = [*(curve["mean"] + std), *(curve["mean"] - std)[::-1]]
        outline_index = self._add_array(_round_numbers(outline))
        band = self._style(
            group,
            x=self._add_array(x + x[::-1]),
            y=outline_index,
            fill="toself",
            opacity=0.16,
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            line={"width": 0},
        )
        band["fillcolor"] = band.pop("marker")["color"]
        return [band, line]

    # ---- clients

    def _client_figures(self) -> Figures:
        choices = itertools.product(
            self.ranked.items(),
            self.titles.items(),
        )
        for (setting, rivals), (key, title) in choices:
            boxes = []
            for group in rivals:
                accuracies = self.client_accuracies[key][group]
                if len(accuracies):
                    boxes.append((data.box_numbers(accuracies), group, accuracies))
            boxes.sort(key=lambda box: -box[0]["mean"])
            traces = []
            for numbers, group, accuracies in boxes:
                traces += self._box_traces(numbers, group, accuracies)
            if traces:
                yield _make_figure(
                    setting,
                    {self.task.score_word: title},
                    traces,
                    xaxis=_make_axis(f"client's {self._score_label()}, {title}"),
                    yaxis={"autorange": "reversed", "type": "category"},
                    showlegend=False,
                )

    def _box_traces(
        self, numbers: dict[str, float], group: Group, accuracies: pd.DataFrame
    ) -> list[Trace]:
        """Return a method's box with clients, crosses of the worst decile, and means.

        Args:
            numbers: the values of BOX_NUMBERS.
            group: the configuration.
            accuracies: the result of `client_accuracies`.
        """
        # ---- Step 1: the box, from numbers over all clients, with dots of some of them.
        drawn = accuracies.iloc[data.evenly_spaced(len(accuracies), DOTS)]
        row = [_plotly_text(group.method)]
        rounded = _round_numbers(numbers.values())
        x = [_round_numbers(drawn["value"])]
        dots = self._style(
            group,
            "circle",
            4,
            y=row,
            x=x,
            text=[_client_names(drawn)],
        )
        dots |= {"type": "box", "line": {}}
        for fence, number in zip(_FENCES, rounded, strict=False):
            dots[fence] = [number]

        # ---- Step 2: crosses over the dots of the worst decile.
        worst = drawn[drawn["low"]]
        crosses = self._style(
            group,
            "x-thin-open",
            mode="markers",
            x=_round_numbers(worst["value"]),
            y=row * len(worst),
        )
        crosses["text"] = _client_names(worst)
        crosses["hovertemplate"] = "%{text}, in the worst decile"

        # ---- Step 3: the mean and the worst decile's.
        means = self._style(
            group, mode="markers", x=rounded[5:], y=row * 2, text=data.BOX_NUMBERS[5:]
        )
        means["marker"] = {
            "color": "var(--paper)",
            "symbol": ["diamond", "triangle-up"],
            "size": 9,
            "line": {"color": "var(--ink)", "width": 1.4},
        }
        means["hovertemplate"] = "%{text} %{x:.2f}"
        return [dots, crosses, means]

    def _size_figures(self) -> Figures:
        """Yield panels of accuracy against training samples, one per method."""
        choices = itertools.product(
            self.ranked.items(),
            self.titles.items(),
        )
        for (setting, rivals), (key, title) in choices:
            panels = []
            for group in rivals:
                accuracies = self.client_accuracies[key][group].query("train > 0")
                if accuracies.empty:
                    continue
                traces = [self._client_dots(group, accuracies.assign(at=accuracies["train"]))]
                # Five parts of three clients at least, below which a median says nothing.
                if len(accuracies) >= 15:
                    traces.append(_median_line(accuracies))
                panels.append((_plotly_text(group.method), traces))
            yield from _panel_figures(
                setting, {self.task.score_word: title}, panels, type="log", dtick="D2"
            )

    def _fairness_figures(self) -> Figures:
        """Yield panels of clients' accuracies against those of a baseline, one per method."""
        # ---- Step 1: on the diagonal a client is as well off under the baseline.
        diagonal = {
            "type": "scatter",
            "mode": "lines",
            "x": [0, 100],
            "y": [0, 100],
            "line": {"color": "var(--quiet)", "dash": "dot", "width": 1.2},
            "hoverinfo": "skip",
        }

        # ---- Step 2: a panel per method of a setting.
        for setting, (key, baseline) in itertools.product(self.ranked, BASELINES.items()):
            panels = []
            for comparison in self.comparisons:
                pairs = comparison.pairs.get(key, {})
                if comparison.group.setting != setting or not pairs:
                    continue
                frames = [
                    pair.assign(seed=run.seed, name=data.label_clients(run, pair.index))
                    for run, pair in pairs.items()
                ]
                clients = pd.concat(frames).reset_index()
                clients = clients.rename(columns={"baseline": "at", "accuracy": "value"})
                clients = clients.sort_values(["at", "value"])
                harmed = measure_harm(clients["value"] - clients["at"]).harmed
                title = f"{_plotly_text(comparison.group.method)}: {harmed:.3g} % harmed"
                panels.append((title, [diagonal, self._client_dots(comparison.group, clients)]))
            yield from _panel_figures(setting, {"baseline": baseline}, panels)

    def _client_dots(self, group: Group, clients: pd.DataFrame) -> Trace:
        """Return dots of some of the clients; the legend does not hide them.

        Args:
            group: the configuration.
            clients: the columns name, seed, at (the position across) and value.
        """
        # Clients are sorted, so that evenly spaced ones show the whole range.
        drawn = clients.iloc[data.evenly_spaced(len(clients), DOTS)]
        dots = self._style(
            group,
            "circle",
            5,
            mode="markers",
            text=_client_names(drawn),
            hovertemplate="%{text}: %{y:.2f} %, at %{x}<extra></extra>",
        )
        return dots | {
            "x": _round_numbers(drawn["at"]),
            "y": _round_numbers(drawn["value"]),
            "opacity": 0.6,
            "meta": None,
        }

    # ---- heat maps

    def _partition_figures(self, partition: PartitionCounts) -> Figures:
        # ---- Step 1: the clients that are drawn, in three orders.
        counts = partition.counts.to_numpy()
        client_count, class_count = counts.shape
        sizes = counts.sum(1)
        max_clients = max(1, MAX_PARTITION_CELLS // class_count)
        drawn = data.evenly_spaced(client_count, max_clients)
        drawn_counts = counts[drawn].T
        names = pd.Index(_distinct_labels(map(str, partition.counts.index)))[drawn]
        largest_class = drawn_counts.argmax(0)
        orders = {
            "by number": names,
            "by size": names[np.argsort(-sizes[drawn], kind="stable")],
            "by largest class": names[np.lexsort((-drawn_counts.max(0), largest_class))],
        }

        # ---- Step 2: the heat map and the note.
        no_samples = np.full(drawn_counts.shape, math.nan)
        logarithms = np.log10(drawn_counts, out=no_samples, where=drawn_counts > 0)
        heatmap = {
            "type": "heatmap",
            "x": self._add_array([*names]),
            "y": _distinct_labels(partition.counts),
            "zmin": 0,
            "z": self._add_array([_round_numbers(row, 3) for row in logarithms]),
            "customdata": self._add_array(drawn_counts.tolist()),
            "hovertemplate": "client %{x}, class %{y}: %{customdata} samples<extra></extra>",
            "colorbar": _log_ticks(drawn_counts.max()),
        }
        note = _partition_note(counts, len(drawn))

        # ---- Step 3: a figure per order.
        seeds = ", ".join(map(str, sorted(partition.seeds)))
        runs = f"{partition.runs} {'run' if partition.runs == 1 else 'runs'}"
        for order_title, order in orders.items():
            yield _make_figure(
                partition.setting,
                {"partition of": f"seed {seeds} ({runs})", "clients": order_title},
                [heatmap],
                note,
                xaxis=_make_axis(
                    "client",
                    type="category",
                    categoryorder="array",
                    categoryarray=[*order],
                    showgrid=False,
                ),
                yaxis=_make_axis("class", type="category", autorange="reversed", showgrid=False),
                height=min(560, 190 + 24 * len(drawn_counts)),
            )

    def _cross_accuracy_figures(self, note: Callable[[str], None]) -> Figures:
        """Yield every client's model on every client's samples, of a configuration's first seed."""
        # ---- Step 1: what the first seed measured; a square of numbers per seed is too much.
        for group in itertools.chain(*self.ranked.values()):
            run = min(group.reported_runs, key=lambda run: run.seed)
            frame = data.read_cross_accuracy(run, note)
            if frame.empty:
                continue
            names = _distinct_labels(
                [run.client_names.get(number, str(number)) for number in frame.index]
            )

            # ---- Step 2: models down, samples across.
            heatmap = {
                "type": "heatmap",
                "x": self._add_array(names),
                "y": self._add_array(names),
                "zmin": 0,
                "zmax": 100,
                "z": self._add_array([_round_numbers(row) for row in frame.to_numpy()]),
                "hovertemplate": (
                    "model of client %{y} on samples of client %{x}: %{z} %<extra></extra>"
                ),
            }
            y = _make_axis("model of client", type="category", showgrid=False)
            yield _make_figure(
                group.setting,
                {"method": clip_text(group.method, 60)},
                [heatmap],
                f"seed {run.seed}",
                xaxis=_make_axis("samples of client", type="category", showgrid=False),
                yaxis=y | {"autorange": "reversed"},
                height=560,
            )

    def _mask_figures(self) -> Figures:
        entries_by_group = {
            group: pd.concat([run.personalized_entries for run in group.reported_runs])
            for group in itertools.chain(*self.ranked.values())
        }
        tensor_count = sum(len(entries.columns) for entries in entries_by_group.values())
        bin_count = max(
            8,
            min(100, MAX_MASK_CELLS // max(1, tensor_count)),
        )
        for group, entries in entries_by_group.items():
            if len(entries.columns):
                mean_entries = entries.groupby(level="round").mean()
                yield self._mask_figure(group, mean_entries, bin_count)

    def _mask_figure(
        self, group: Group, mean_entries: pd.DataFrame, bin_count: int
    ) -> dict[str, Any]:
        """Return personalised entries in all above those of each tensor.

        Args:
            group: the configuration.
            mean_entries: by round and tensor.
            bin_count: how many means of rounds to show.
        """
        # ---- Step 1: means over bins of rounds.
        bin_size = math.ceil(len(mean_entries) / bin_count)
        bins = np.arange(len(mean_entries)) // bin_size
        last_rounds = _round_numbers(mean_entries.index.to_series().groupby(bins).max(), 6)
        entries = mean_entries.groupby(bins).mean().T
        shares = 100 * entries / entries.sum()
        names = [_plotly_text(name) for name in entries.index]

        # ---- Step 2: the heat map of tensors and the line of all.
        heatmap: Trace = {
            "type": "heatmap",
            "x": last_rounds,
            "y": names,
            "yaxis": "y2",
            "colorbar": {"ticksuffix": " %", "y": 0.36, "len": 0.78},
            "z": self._add_array([_round_numbers(row, 3) for row in shares.to_numpy()]),
            "customdata": self._add_array([_round_numbers(row) for row in entries.to_numpy()]),
            "hovertemplate": ("%{y}, to round %{x}: %{customdata} entries, %{z} %<extra></extra>"),
        }
        line = self._style(
            group,
            mode="lines+markers",
            x=last_rounds,
            y=_round_numbers(entries.sum()),
            meta=None,
        )
        line["hovertemplate"] = "%{y}<extra></extra>"

        # ---- Step 3: the figure.
        x_title = "round" if bin_size == 1 else f"round, means of {bin_size}"
        return _make_figure(
            group.setting,
            {"method": clip_text(group.method, 60)},
            [line, heatmap],
            f"Above: personalised entries in all{_of_parameters(group)}",
            xaxis=_make_axis(x_title, anchor="y2"),
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

    # ---- costs

    def _cost_figures(self) -> Figures:
        # ---- Step 1: what accuracy is shown against.
        axis_titles = [*COST_TITLES.items()]
        axis_titles.append((_SUCCESS, METRICS[_SUCCESS].label))
        for (setting, rivals), (key, title) in itertools.product(self.ranked.items(), axis_titles):
            costs = {}
            for group in rivals:
                cost = self._read_cost(group, key)
                if math.isfinite(cost + self.accuracies[group]):
                    costs[group] = cost
            if not costs:
                continue

            # ---- Step 2: a dot per method.
            greatest = max(costs.values())
            traces = [
                self._cost_trace(group, cost, title, is_text_left=cost > greatest / 2)
                for group, cost in costs.items()
            ]

            # ---- Step 3: the figure, logarithmic where costs differ by more than a factor of 20.
            scale = {"rangemode": "tozero"}
            if key != _SUCCESS and 0 < 20 * min(costs.values()) < greatest:
                scale = {"type": "log"}
            yield _make_figure(
                setting,
                {f"{self.task.score_word} against": title},
                traces,
                xaxis=_make_axis(title, **scale),
                yaxis=_make_axis(METRICS[self.task.score].label),
                height=440,
                showlegend=False,
            )

    def _read_cost(self, group: Group, key: str) -> float:
        """Return what accuracy is shown against: what was spent, or an attack's success."""
        if key != _SUCCESS:
            return float(self.spent[group][key].iloc[-1])
        return self.successes[group]

    def _cost_trace(self, group: Group, cost: float, title: str, is_text_left: bool) -> Trace:
        """Return a method's dot, with its name on the side where there is room."""
        side = "left" if is_text_left else "right"
        trace = self._style(group, size=11, mode="markers+text", textposition=f"middle {side}")
        return trace | {
            "x": _round_numbers([cost]),
            "y": _round_numbers([self.accuracies[group]]),
            "text": [trace["name"]],
            "hovertemplate": f"%{{text}}<br>%{{y:.2f}} %, {title} %{{x}}<extra></extra>",
        }


def _partition_note(counts: np.ndarray, drawn_count: int) -> str:
    """Describe a partition in numbers.

    Args:
        counts: samples, `[clients, classes]`.
        drawn_count: how many clients are drawn.
    """
    client_count, class_count = counts.shape
    sizes = counts.sum(1)
    mean_classes = (counts > 0).sum(1).mean()
    note = (
        f"{client_count} clients hold {sizes.sum():,} samples: least {sizes.min()}, median "
        f"{np.median(sizes):g}, most {sizes.max()}; {mean_classes:.3g} of {class_count} "
        "classes per client on average"
    )
    if drawn_count < client_count:
        note += f"; {drawn_count} clients are drawn, evenly spaced"
    return note


def _make_figure(
    setting: str,
    choice: dict[str, str],
    traces: Sequence[Trace],
    note: str = "",
    **layout: Any,
) -> dict[str, Any]:
    return {
        "choice": {_SETTING: setting} | choice,
        "note": note,
        "data": traces,
        "layout": layout,
    }


def _panel_figures(
    setting: str,
    choice: dict[str, str],
    panels: Sequence[tuple[str, list[Trace]]],
    **x_axis: Any,
) -> Figures:
    """Yield figures of small charts with equal axes side by side.

    Args:
        setting: data set and partition.
        choice: the reader's choice that the figures stand for.
        panels: title and traces of each.
        x_axis: fields of their axes across.
    """
    # ---- Step 1: as many panels as a figure has room for.
    for start in range(0, len(panels), MAX_PANELS):
        figure_panels = panels[start : start + MAX_PANELS]
        # The script adds rows, columns and height, as wide as the window is.
        grid = {"pattern": "independent", "ygap": 0.35, "xgap": 0.12}
        layout: dict[str, Any] = {"grid": grid, "annotations": [], "showlegend": False}
        traces = []
        for number, (title, panel_traces) in enumerate(figure_panels, 1):
            suffix = str(number) if number > 1 else ""
            axes = {"xaxis": f"x{suffix}", "yaxis": f"y{suffix}"}
            traces += [trace | axes for trace in panel_traces]
            # "matches": panels of a figure zoom together.
            layout[f"xaxis{suffix}"] = x_axis | {"matches": "x"}
            layout[f"yaxis{suffix}"] = {"matches": "y"}
            layout["annotations"].append(
                {
                    "text": title,
                    "x": 0,
                    "y": 1,
                    "showarrow": False,
                    "xref": f"x{suffix} domain",
                    "yref": f"y{suffix} domain",
                    "xanchor": "left",
                    "yanchor": "bottom",
                }
            )

        # ---- Step 2: the figure, which says which of all methods it shows.
        methods = f"{start + 1} to {start + len(figure_panels)} of {len(panels)}"
        yield _make_figure(setting, choice | {"methods": methods}, traces, **layout)


def _of_parameters(group: Group) -> str:
    """Return `, of 1,000 parameters` where all runs have the same number."""
    counts = {run.summary.get("parameters") for run in group.reported_runs}
    count = counts.pop() if len(counts) == 1 else None
    return f", of {count:,} parameters" if isinstance(count, int) else ""


def _median_line(accuracies: pd.DataFrame) -> Trace:
    """Return a line through the medians of five equal parts of the clients by size."""
    by_size = accuracies.sort_values("train", kind="stable")
    parts = np.arange(len(by_size)) * 5 // len(by_size)
    medians = by_size[["train", "value"]].groupby(parts).median()
    return {
        "type": "scatter",
        "mode": "lines",
        "line": {"color": "var(--ink)"},
        "hoverinfo": "skip",
        "x": _round_numbers(medians["train"]),
        "y": _round_numbers(medians["value"]),
    }


_GROUP_COLUMNS = {"setting": Column(_SETTING), "method": Column("method")}


def _group_cells(group: Group) -> dict[str, Any]:
    return {"setting": group.setting, "method": group.method}


def _make_axis(title: str, **fields: Any) -> dict[str, Any]:
    return {"title": {"text": title}} | fields


def _client_names(clients: pd.DataFrame) -> list[str]:
    pairs = zip(clients["name"], clients["seed"], strict=True)
    return [_plotly_text(f"{name}, seed {seed}") for name, seed in pairs]


def _log_ticks(greatest: float) -> dict[str, Any]:
    """Return a scale that shows counts beside their logarithms."""
    powers = range(math.floor(math.log10(max(greatest, 1))) + 1)
    return {
        "tickvals": [*powers],
        "ticktext": [f"{10**power:,}" for power in powers],
    }


def _plotly_text(text: str) -> str:
    """Return text as plotly shows it: it reads a few tags in all that it writes."""
    return escape(clip_text(text, 60), quote=False)


def _distinct_labels(names: Iterable[str]) -> list[str]:
    """Return names as plotly shows them; numbers where two look alike.

    Plotly would join these.
    """
    labels = [_plotly_text(name) for name in names]
    return labels if len(set(labels)) == len(labels) else [*map(str, range(len(labels)))]


def _round_numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Return rounded numbers; None where they are not finite, as JSON has no nan."""
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]
