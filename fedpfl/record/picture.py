"""Draw the partition: how many samples of each class every client holds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedpfl.ground import drawing

MAX_NAMES = 60
MAX_NAME_LENGTH = 20
LETTER_WIDTH = 0.06
"""Inches of a letter in a tick's name."""


def partition_png(
    label_counts: Any,
    title: str,
    client_names: Sequence[str] = (),
    class_names: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> bytes:
    """Return the picture of `draw_partition` as a png file.

    It is cached, as the runs of a sweep may have the partition in common.
    """
    counts = tuple(map(tuple, np.asarray(label_counts).tolist()))
    return _cached_png(
        counts,
        title,
        tuple(client_names),
        tuple(class_names),
        tuple(sizes),
    )


@lru_cache(maxsize=4)
def _cached_png(
    label_counts: tuple[tuple[int, ...], ...],
    title: str,
    client_names: tuple[str, ...],
    class_names: tuple[str, ...],
    sizes: tuple[int, ...],
) -> bytes:
    file = io.BytesIO()
    draw_partition(label_counts, file, title, client_names, class_names, sizes)
    return file.getvalue()


def draw_partition(
    label_counts: Any,
    path: str | Path | BinaryIO,
    title: str,
    client_names: Sequence[str] = (),
    class_names: Sequence[str] = (),
    sizes: Sequence[int] = (),
) -> None:
    """Draw clients x classes as a heat map below each client's sample count.

    Darker is more, also in grey.

    Args:
        label_counts: samples `[clients, classes]`; without any class the sizes are drawn alone.
        path: a file, its ending gives the format (png, pdf, svg), or an open binary file for png.
        title: of the picture.
        client_names: written where there are at most MAX_NAMES, else clients have numbers.
        class_names: likewise.
        sizes: each client's sample count, where a sample may have several labels or none.
    """
    drawing.load_matplotlib()
    # pyplot would keep the figure, and choose a backend for the whole process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # ---- Step 1: a figure that grows with its cells.
    counts = np.asarray(label_counts, dtype=np.int64)
    clients, classes = counts.shape
    has_numbers = clients <= 20 and classes <= 20  # few enough cells to print them in
    width = float(np.clip(2.5 + clients * (0.45 if has_numbers else 0.11), 5, 14))
    height = float(np.clip(2.3 + classes * (0.3 if has_numbers else 0.16), 3.5, 11))
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    _leave_margins(figure, title, client_names, class_names)

    # ---- Step 2: of numbers as labels there are sizes alone.
    if not classes:
        size_axes = figure.add_subplot()
        _draw_sizes(size_axes, np.asarray(sizes))
        size_axes.tick_params(labelbottom=True)
        size_axes.set_xlabel("client")
        size_axes.set_title(title, fontsize=10, wrap=True)
        figure.savefig(path, dpi=150)
        return

    # ---- Step 3: sizes above the map, which share the axis of clients.
    grid = _divide_figure(figure)
    map_axes = figure.add_subplot(grid[1, 0])
    size_axes = figure.add_subplot(grid[0, 0], sharex=map_axes)

    image = _draw_counts(map_axes, counts, has_numbers)
    map_axes.set_xlabel("client")
    map_axes.set_ylabel("label" if len(sizes) else "class")
    _set_ticks(map_axes.xaxis, client_names, max_ticks=20, rotation=90)
    _set_ticks(map_axes.yaxis, class_names, max_ticks=12, rotation=0)
    bar = figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]), label="samples", format="%d")
    bar.minorticks_off()  # dozens, one by one

    _draw_sizes(size_axes, np.asarray(sizes) if len(sizes) else counts.sum(1))
    size_axes.set_title(title, fontsize=10, wrap=True)
    map_axes.set_xlim(-0.5, clients - 0.5)
    figure.savefig(path, dpi=150)


def _leave_margins(
    figure: Any, title: str, client_names: Sequence[str], class_names: Sequence[str]
) -> None:
    """Leave room for what stands around the axes."""
    # A layout that matplotlib finds takes half as long as the rest of the picture.
    width, height = figure.get_size_inches()
    title_lines = -(-len(title) // int(13 * width))
    left_margin = 0.7 + LETTER_WIDTH * _longest_tick(class_names)
    bottom_margin = 0.6 + LETTER_WIDTH * _longest_tick(client_names)
    figure.subplots_adjust(
        left=left_margin / width,
        right=1 - 0.75 / width,
        bottom=bottom_margin / height,
        top=1 - (0.15 + 0.17 * title_lines) / height,
    )


def _divide_figure(figure: Any) -> Any:
    """Return a grid of the sizes above the map, and of its scale beside it."""
    height = figure.get_size_inches()[1]
    return figure.add_gridspec(
        2,
        2,
        height_ratios=(1, max(2.0, height - 2)),
        width_ratios=(49, 1),
        wspace=0.05,
        hspace=0.12,
    )


def _longest_tick(names: Sequence[str]) -> int:
    """Return how many letters the longest name has that stands at a tick."""
    if len(names) > MAX_NAMES:
        return 0
    return max((len(_tick_text(name)) for name in names), default=0)


def _draw_counts(map_axes: Any, counts: np.ndarray, has_numbers: bool) -> Any:
    """Draw the sample counts `[clients, classes]` as a heat map; return its image."""
    from matplotlib.colors import ListedColormap, LogNorm

    # Counts span orders of magnitude. White is none at all; a single sample can be told from it.
    norm = LogNorm(vmin=1, vmax=max(2, int(counts.max(initial=0))))
    greys = ListedColormap([str(level) for level in np.linspace(0.88, 0.0, 256)])
    cells = np.ma.masked_equal(counts.T, 0)
    image = map_axes.imshow(
        cells, cmap=greys, norm=norm, aspect="auto", origin="lower", interpolation="nearest"
    )
    if has_numbers:
        _write_counts(map_axes, counts, norm)
    return image


def _set_ticks(axis: Any, names: Sequence[str], max_ticks: int, rotation: int) -> None:
    """Name the ticks of an axis, or number them without names or with too many."""
    from matplotlib.ticker import MaxNLocator

    if 0 < len(names) <= MAX_NAMES:
        tick_texts = [_tick_text(name) for name in names]
        axis.set_ticks(
            range(len(names)),
            tick_texts,
            rotation=rotation,
            size=7,
        )
    else:
        axis.set_major_locator(MaxNLocator(nbins=max_ticks, integer=True))


def _write_counts(map_axes: Any, counts: np.ndarray, norm: Any) -> None:
    """Write the sample counts `[clients, classes]` into the cells of the map."""
    for client, label in zip(*np.nonzero(counts), strict=True):
        count = int(counts[client, label])
        # A dark cell has light digits.
        color = "white" if norm(count) > 0.5 else "black"
        map_axes.text(
            client, label, str(count), ha="center", va="center", fontsize=6.5, color=color
        )


def _tick_text(name: str) -> str:
    """Return a name as a tick shows it: short, and without mathtext."""
    # matplotlib reads what stands between dollars as a formula.
    short = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
    return short.replace("$", r"\$")


def _draw_sizes(size_axes: Any, sizes: np.ndarray) -> None:
    """Draw each client's sample count."""
    from matplotlib.ticker import MaxNLocator

    clients = len(sizes)
    if clients <= 200:
        size_axes.bar(np.arange(clients), sizes, width=0.8, color="0.35")
    else:  # one outline: thousands of bars take a minute
        size_axes.stairs(
            sizes,
            np.arange(clients + 1) - 0.5,
            fill=True,
            color="0.35",
        )
    size_axes.tick_params(labelbottom=False)
    size_axes.set_ylabel("samples")
    size_axes.yaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    for side in ("top", "right"):
        size_axes.spines[side].set_visible(False)
