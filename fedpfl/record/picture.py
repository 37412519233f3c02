"""Draw the partition: how many samples of each class every client holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedpfl.ground import drawing

MAX_NAMES = 60
MAX_NAME_LENGTH = 20


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
    from matplotlib.colors import ListedColormap, LogNorm
    from matplotlib.figure import Figure

    # ---- Step 1: a figure that grows with its cells.
    counts = np.asarray(label_counts, dtype=np.int64)
    clients, classes = counts.shape
    width = float(np.clip(2.5 + clients * 0.11, 5, 14))
    height = float(np.clip(2.3 + classes * 0.16, 3.5, 11))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)

    # ---- Step 2: sizes above the map, which share the axis of clients.
    ratios = [1, max(2.0, height - 2)] if classes else [1]
    all_axes = figure.subplots(len(ratios), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    # One outline: thousands of bars take a minute.
    heights = np.asarray(sizes) if len(sizes) else counts.sum(1)
    all_axes[0].stairs(heights, np.arange(clients + 1) - 0.5, fill=True, color="0.35")
    all_axes[0].set_ylabel("samples")
    all_axes[0].set_title(title, fontsize=10, wrap=True)
    for axes in all_axes[1:]:
        # Counts span orders of magnitude. White is no sample; a single sample is visibly grey.
        norm = LogNorm(vmin=1, vmax=max(2, int(counts.max(initial=0))))
        greys = ListedColormap([str(level) for level in np.linspace(0.88, 0.0, 256)])
        cells = np.ma.masked_equal(counts.T, 0)
        image = axes.imshow(
            cells, cmap=greys, norm=norm, aspect="auto", origin="lower", interpolation="nearest"
        )
        axes.set_ylabel("label" if len(sizes) else "class")
        _set_ticks(axes.yaxis, class_names, rotation=0)
        bar = figure.colorbar(image, ax=axes, label="samples", format="%d", pad=0.01, aspect=49)
        bar.minorticks_off()  # dozens, one by one
    all_axes[-1].set_xlabel("client")
    all_axes[-1].set_xlim(-0.5, clients - 0.5)
    _set_ticks(all_axes[-1].xaxis, client_names, rotation=90)
    figure.savefig(path, dpi=150)


def _set_ticks(axis: Any, names: Sequence[str], rotation: int) -> None:
    """Name the ticks of an axis, or number them without names or with too many."""
    from matplotlib.ticker import MaxNLocator

    if not 0 < len(names) <= MAX_NAMES:
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True))
        return
    # matplotlib reads text between dollars as a formula.
    texts = [name[:MAX_NAME_LENGTH].replace("$", r"\$") for name in names]
    axis.set_ticks(range(len(names)), texts, rotation=rotation, size=7)
