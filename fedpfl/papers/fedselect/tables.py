"""Declare FedSelect's tables and figures (CVPR 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedpfl.papers.drawing import (
    Axis,
    Figure,
    choose_nearest,
    groups_with_several_values,
    paint_accuracy_over,
)
from fedpfl.papers.layout import (
    Layout,
    Selection,
    TableColumn,
    TableRow,
    choose_values,
    has_config,
    measure_fine_tuned,
    measure_untrained,
)
from fedpfl.report.figures import (
    draw_line,
    draw_panels,
    groups_by_setting,
)
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEST_ALPHA = {"cifar10_c": 0.5, "mini_imagenet": 0.5, "": 0.3}
"""Limits of the personal share in Table 1, by data set (empty: any other)."""
LAYERS = {"A": 0, "B": 5, "C": 10, "D": 15}
MOST_CONFIG = {"method.personalise": ("most", None), "method.layer": (None,)}
"""What moves most becomes personal."""
JUDGED_COLUMNS = {
    "fedavg": {"FedAvg": "accuracy_pooled", "FedAvg+FT": "ft_accuracy_pooled"},
    "fedbabu": {"FedBABU": "ft_accuracy_pooled"},
}
"""Methods that the paper does not judge right after local training, unlike the rest.

As right after training, accuracies are pooled.
"""


# ---- Tables


def _shards_column(dataset: str, clients: int, classes: int, samples: int) -> TableColumn:
    """Return the column of a data set that is dealt by classes."""
    short_name = dataset.replace("10_c", "10c")
    return TableColumn(
        dataset,
        f"{clients} clients, {classes} classes each",
        config={"partition.name": "shuffled_shards"},
        overrides={"paper": f"fedselect_{short_name}"},
        setup={
            "partition.samples_per_client": samples,
            "clients": clients,
            "partition.classes_per_client": classes,
        },
    )


COLUMNS = (
    _shards_column("cifar10", clients=10, classes=2, samples=100),
    _shards_column("cifar10_c", clients=10, classes=2, samples=100),
    _shards_column("mini_imagenet", clients=20, classes=10, samples=480),
    TableColumn(
        "office_home",
        "4 clients = 4 domains",
        config={"partition.name": "groups"},
        overrides={"paper": "fedselect_office_home"},
        setup={"clients": 4, "rounds": 30},
    ),
)


def _alpha_rows(*alphas: float) -> tuple[TableRow, ...]:
    """Return a row for each limit of the personal share."""
    return tuple(
        TableRow(
            f"FedSelect (alpha={alpha:.2f})",
            "fedselect",
            "fedselect/alpha",
            config={"method.alpha": alpha},
            implied_config=MOST_CONFIG,
        )
        for alpha in alphas
    )


def _ablation_row(label: str, personalise: str | int) -> TableRow:
    """Return the row of one way to choose what becomes personal."""
    return TableRow(
        label, "fedselect", "fedselect/ablation", config={"method.personalise": personalise}
    )


_make_row = partial(TableRow, experiment="fedselect/cifar10")
_make_layout = partial(
    Layout,
    rounds=200,
    columns=COLUMNS,
    metric="personalized accuracy, final round (%)",
    rule=Selection("cohort_after", published=True),
    about=(
        "the paper judges the last round's models right after local training, here over all "
        "test samples of the clients, FedAvg's before it and FedAvg+FT's and FedBABU's after "
        "fine-tuning"
    ),
    setup={"rounds": 200, "participation": 1.0, "local.epochs": 3, "model.name": "resnet18"},
)
TABLES = {
    "table1": _make_layout(
        "FedSelect's Table 1",
        "FedSelect (CVPR 2024) Table 1",
        (
            _make_row("Local-Only", "local_only"),
            _make_row("FedAvg", "fedavg", measure=measure_untrained),
            _make_row("FedAvg+FT", "fedavg", measure=measure_fine_tuned),
            *(_make_row(METHOD_TITLES[name], name) for name in ("ditto", "fedpac")),
            *(_make_row(METHOD_TITLES[name], name) for name in ("fedrep", "fedper")),
            _make_row("FedBABU", "fedbabu", measure=measure_fine_tuned),
            _make_row("LG-FedAvg", "lg_fedavg"),
            _make_row(
                "FedSelect",
                "fedselect",
                config={"method.alpha": BEST_ALPHA},
                implied_config=MOST_CONFIG,
            ),
        ),
    ),
    "table2": _make_layout(
        "FedSelect's Table 2: the limit of the personal share",
        "FedSelect (CVPR 2024) Table 2",
        _alpha_rows(0.05, 0.3, 0.5, 0.8),
    ),
    "table3": _make_layout(
        "FedSelect's Table 3: what becomes personal",
        "FedSelect (CVPR 2024) Table 3",
        (
            _ablation_row("Personalize Least", "least"),
            *(_ablation_row(f"Layer {name}", layer) for name, layer in LAYERS.items()),
            _ablation_row("Random", "random"),
            *_alpha_rows(0.3, 0.5),
        ),
        note=(
            "Which layers the paper calls A to D is not stated: here the stem and the first "
            "convolutions of 128, 256 and 512 channels."
        ),
    ),
}


# ---- Which runs a figure shows


def _training_size(run: Run) -> int | None:
    """Return the training samples that each client is given, None where it is not set."""
    return run.config_value("partition.samples_per_client")


def _choose_table1_methods(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of Table 1's methods, FedSelect at its best limit."""
    *other_rows, fedselect_row = TABLES["table1"].rows
    other_methods = {row.method for row in other_rows}

    def fits(run: Run) -> bool:
        best_config = choose_values(fedselect_row.config, run.dataset_name) | MOST_CONFIG
        is_best = run.method_name == "fedselect" and has_config(run, best_config)
        return is_best or run.method_name in other_methods

    return [group for group in groups if fits(group.runs[0])]


def _choose_paper_sizes(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with as many training samples as the tables state."""
    size_by_dataset = {
        column.dataset: column.setup.get("partition.samples_per_client") for column in COLUMNS
    }
    chosen_groups = []
    for group in groups:
        run = group.runs[0]
        if size_by_dataset.get(run.dataset_name) in (None, _training_size(run)):
            chosen_groups.append(group)
    return chosen_groups


def _choose_table1_runs(groups: Sequence[Group]) -> list[Group]:
    """Return Table 1's groups, the nearest one of each method in each setting."""
    fitting_groups = _choose_table1_methods(_choose_paper_sizes(groups))
    return choose_nearest(fitting_groups, lambda group: (group.setting, group.method_name))


def _choose_table2_masks(groups: Sequence[Group]) -> list[Group]:
    """Return Table 2's groups with masks, the nearest one of each limit in each setting."""

    def has_masks(run: Run) -> bool:
        is_fitting = run.method_name == "fedselect" and has_config(run, MOST_CONFIG)
        return is_fitting and bool(run.mask_pairs)

    with_masks = [one for one in _choose_paper_sizes(groups) if has_masks(one.reported_runs[0])]
    return choose_nearest(
        with_masks, lambda group: (group.setting, group.runs[0].config_value("method.alpha"))
    )


# ---- How a figure is drawn


def _judged_lines(group: Group) -> dict[str, str]:
    """Return a group's lines as the paper judges them, each with its column."""
    run = group.runs[0]
    return JUDGED_COLUMNS.get(run.method_name, {run.method_title: "cohort_after"})


def _paint_convergence(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw each method's accuracy over rounds, a panel per setting."""
    line_names = list(dict.fromkeys(name for group in groups for name in _judged_lines(group)))

    def draw_panel(ax: Axes, members: list[Group]) -> None:
        for group in members:
            for name, column in _judged_lines(group).items():
                draw_line(ax, group, column, name, line_names.index(name))
        ax.set(xlabel="round", ylabel="test accuracy (%)", xlim=(0, None))

    return draw_panels(groups_by_setting(groups), path, draw_panel)


def _paint_last_layers(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw the overlap of clients' masks in the last layer, a panel per configuration."""

    def draw_panel(ax: Axes, group: Group) -> None:
        # ---- Step 1: one seed's overlaps: clients hold other classes with each.
        run = group.reported_runs[0]
        overlap = _intersection_over_union([*run.mask_pairs.values()][-1])
        client_count = len(overlap)
        ax.imshow(overlap, vmin=0, vmax=1, cmap="magma")

        # ---- Step 2: clients by their classes, as the paper orders them.
        client_labels = _class_labels(run, client_count)
        ax.set_xticks(range(client_count), client_labels, rotation=90, fontsize=6)
        ax.set_yticks(range(client_count), client_labels, fontsize=6)
        ax.grid(visible=False)

    titles = {
        f"{group.setting}\nlimit alpha = {group.runs[0].config_value('method.alpha')}": group
        for group in groups
    }
    return draw_panels(titles, path, draw_panel, size=(3.4, 3.4))


def _intersection_over_union(intersections: np.ndarray) -> np.ndarray:
    """Return the overlap of each two masks, 0 of empty ones.

    Args:
        intersections: Entries that both clients hold, `[clients, clients]`.
    """
    # A mask's intersection with itself is its size; |A or B| = |A| + |B| - |A and B|.
    sizes = intersections.diagonal()
    union = sizes[:, None] + sizes - intersections
    return intersections / np.maximum(union, 1)


def _class_labels(run: Run, client_count: int) -> list[str]:
    """Return the classes of each client; where masks are not of all clients, its number."""
    label_counts = run.clients.filter(regex=r"^label_\d+$")
    if len(label_counts) != client_count or label_counts.empty:
        return [str(number) for number in range(client_count)]
    classes = label_counts.columns.str.removeprefix("label_")
    return [" ".join(classes[row > 0]) for row in label_counts.to_numpy()]


FIGURES = {
    "figure2": Figure(_choose_table1_runs, _paint_convergence, "fedselect/cifar10"),
    "figure3": Figure(
        lambda groups: groups_with_several_values(
            _choose_table1_methods(groups), lambda run: True, _training_size
        ),
        paint_accuracy_over(
            Axis(lambda group: _training_size(group.runs[0]), "training samples of a client"),
            _judged_lines,
            panel=lambda group: group.dataset,
        ),
        "fedselect/sizes",
    ),
    "figure4": Figure(_choose_table2_masks, _paint_last_layers, "fedselect/alpha"),
}
