"""Declare FedSelect's tables and figures: how large masks become, and how they overlap (CVPR 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpfl.papers.drawing import (
    Figure,
    Points,
    choose_method,
    draw_points,
    groups_with_several_values,
    masks_by_seed,
    paint_accuracy_over,
)
from fedpfl.papers.layout import (
    Layout,
    Selection,
    TableColumn,
    TableRow,
    measure_fine_tuned,
    measure_untrained,
)
from fedpfl.report.figures import (
    THIN_LINE_WIDTH,
    draw_line,
    draw_panels,
    groups_by_setting,
    legible_text,
    line_style,
)
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import Run
from fedpfl.report.styles import number_styles
from fedpfl.report.table import mean_and_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEST_ALPHA = {"cifar10_c": 0.5, "mini_imagenet": 0.5, "": 0.3}
"""Limits of the personal share in Table 1, by data set (empty: any other)."""
LAYERS = {"A": 0, "B": 5, "C": 10, "D": 15}
MOST_CONFIG = {"method.personalise": "most", "method.layer": (None,)}
"""What moves most becomes personal."""
MAX_WRITTEN_CLIENTS = 20
"""Up to so many clients, figure 4 writes out their overlaps."""
JUDGED_COLUMNS = {
    "fedavg": {"FedAvg": "accuracy_pooled", "FedAvg+FT": "ft_accuracy_pooled"},
    "fedbabu": {"FedBABU": "ft_accuracy_pooled"},
}
"""Methods that the paper does not judge right after local training, unlike the rest.

As right after training, accuracies are pooled.
"""


# ---- Tables


def _shards_column(
    dataset: str, short_name: str, clients: int, classes: int, samples: int
) -> TableColumn:
    """Return the column of a data set that is dealt by classes."""
    return TableColumn(
        dataset,
        f"{clients} clients, {classes} classes each",
        config={"partition.name": "shuffled_shards"},
        experiment=f"fedselect/{short_name}",
        setup={
            "partition.samples_per_client": samples,
            "clients": clients,
            "partition.classes_per_client": classes,
        },
    )


COLUMNS_OF_DATASETS = (
    _shards_column("cifar10", "cifar10", clients=10, classes=2, samples=100),
    _shards_column("cifar10_c", "cifar10c", clients=10, classes=2, samples=100),
    _shards_column("mini_imagenet", "mini_imagenet", clients=20, classes=10, samples=480),
    TableColumn(
        "office_home",
        "4 clients = 4 domains",
        config={"partition.name": "groups"},
        experiment="fedselect/office_home",
        setup={"clients": 4, "rounds": 30},
    ),
)
COLUMNS_OF_ONE_EXPERIMENT = tuple(
    dataclasses.replace(column, overrides={"paper": column.experiment.replace("/", "_")})
    for column in COLUMNS_OF_DATASETS
)
"""The same, as one experiment of all four data sets has them."""


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


_make_layout = partial(
    Layout,
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
            TableRow("Local-Only", "local_only"),
            TableRow("FedAvg", "fedavg", measure=measure_untrained),
            TableRow("FedAvg+FT", "fedavg", measure=measure_fine_tuned),
            *(
                TableRow(METHOD_TITLES[name], name)
                for name in ("ditto", "fedpac", "fedrep", "fedper")
            ),
            TableRow("FedBABU", "fedbabu", measure=measure_fine_tuned),
            TableRow("LG-FedAvg", "lg_fedavg"),
            TableRow(
                "FedSelect",
                "fedselect",
                config={"method.alpha": BEST_ALPHA},
                implied_config=MOST_CONFIG,
            ),
        ),
        COLUMNS_OF_DATASETS,
    ),
    "table2": _make_layout(
        "FedSelect's Table 2: the limit of the personal share",
        "FedSelect (CVPR 2024) Table 2",
        _alpha_rows(0.05, 0.3, 0.5, 0.8),
        COLUMNS_OF_ONE_EXPERIMENT,
        is_whole_sweep=True,
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
        COLUMNS_OF_ONE_EXPERIMENT,
        note=(
            "Which layers the paper calls A to D is not stated: here the stem and the first "
            "convolutions of 128, 256 and 512 channels."
        ),
    ),
}


# ---- Which runs a figure shows


def _has_personal_share(group: Group) -> bool:
    return any("personal_share" in run.rounds for run in group.reported_runs)


def _is_most_moved(run: Run) -> bool:
    """Return True if what moves most becomes personal."""
    return (
        run.config_value("method.personalise") in (None, "most")
        and run.config_value("method.layer") is None
    )


def _training_size(run: Run) -> int | None:
    """Return the training samples that each client is given, None where it is not set."""
    return run.config_value("partition.samples_per_client")


def _choose_table1_methods(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of Table 1's methods, FedSelect at its best limit."""
    other_methods = {row.method for row in TABLES["table1"].rows} - {"fedselect"}

    def fits(run: Run) -> bool:
        if run.method_name != "fedselect":
            return run.method_name in other_methods
        best_alpha = BEST_ALPHA.get(run.dataset_name, BEST_ALPHA[""])
        return _is_most_moved(run) and run.config_value("method.alpha") == best_alpha

    return [group for group in groups if fits(group.runs[0])]


def _choose_paper_sizes(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with as many training samples as the tables state."""
    sizes = {
        column.dataset: column.setup.get("partition.samples_per_client")
        for column in COLUMNS_OF_DATASETS
    }
    chosen_groups = []
    for group in groups:
        run = group.runs[0]
        if sizes.get(run.dataset_name) in (None, _training_size(run)):
            chosen_groups.append(group)
    return chosen_groups


def _choose_table1_runs(groups: Sequence[Group]) -> list[Group]:
    """Return Table 1's groups, the last one of each method in each setting."""
    fitting_groups = _choose_table1_methods(_choose_paper_sizes(groups))
    # Later entries take the place of earlier ones.
    last_groups = {(group.setting, group.runs[0].method_name): group for group in fitting_groups}
    return list(last_groups.values())


def _choose_table2_masks(groups: Sequence[Group]) -> list[Group]:
    """Return Table 2's groups with masks, the last one of each limit in each setting."""
    with_masks = choose_method("fedselect", masks_by_seed)(_choose_paper_sizes(groups))
    last_groups = {
        (group.setting, group.runs[0].config_value("method.alpha")): group
        for group in with_masks
        if _is_most_moved(group.runs[0])
    }
    return list(last_groups.values())


# ---- How a figure is drawn


def _paint_sizes(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw each configuration's personal share over rounds, a panel per setting."""
    style_numbers = number_styles(groups)

    def draw_panel(ax: Axes, members: list[Group]) -> None:
        for group in members:
            draw_line(ax, group, "personal_share", group.method, style_numbers[group.method])
        ax.set(xlabel="round", ylabel="personal share of the model", xlim=(0, None), ylim=(0, 1))

    return draw_panels(groups_by_setting(groups), path, draw_panel)


def _paint_overlaps(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw the overlap of two clients' masks by tensor, a panel per setting."""

    def draw_panel(ax: Axes, members: list[Group]) -> None:
        # ---- Step 1: tensors in the network's order, as the masks have it.
        tensors = list(
            dict.fromkeys(
                name for group in members for masks in masks_by_seed(group) for name in masks
            )
        )

        # ---- Step 2: a line for each group, and a thin one of what chance gives.
        for index, group in enumerate(members):
            chance_points = _overlap_points(group, tensors, by_chance=True)
            points = _overlap_points(group, tensors)
            if points:
                draw_points(ax, points, group.method, index)
            ax.plot(
                [x for x, _ in chance_points],
                [mean for _, (mean, _) in chance_points],
                color=line_style(index)["color"],
                linewidth=THIN_LINE_WIDTH,
                alpha=0.6,
            )

        # ---- Step 3: axes.
        tick_labels = [legible_text(name) for name in tensors]
        ax.set_xticks(range(len(tensors)), tick_labels, rotation=90, fontsize=6)
        ax.set(ylabel="intersection over union", ylim=(0, 1))

    return draw_panels(
        groups_by_setting(groups),
        path,
        draw_panel,
        note="thin: independent masks of the same sizes",
        size=(7.2, 3.6),
    )


def _overlap_points(group: Group, tensors: list[str], by_chance: bool = False) -> Points:
    """Return each tensor's overlap over seeds, or what independent masks would have."""
    points = []
    for index, name in enumerate(tensors):
        seed_means = []
        for masks in masks_by_seed(group):
            if name not in masks:
                continue
            overlaps = masks[name].overlaps(by_chance)
            # Pairs of empty masks have no overlap; a tensor with empty pairs alone has no point.
            if not np.isnan(overlaps).all():
                seed_means.append(float(np.nanmean(overlaps)))
        if seed_means:
            points.append((float(index), mean_and_std(seed_means)))
    return points


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
        run = next(run for run in group.reported_runs if run.masks)
        last_mask = [*run.masks.values()][-1]
        overlap = _intersection_over_union(last_mask.pair_counts)
        client_count = len(overlap)
        ax.imshow(overlap, vmin=0, vmax=1, cmap="magma")

        # ---- Step 2: numbers, where they can be read.
        if client_count <= MAX_WRITTEN_CLIENTS:
            for i, j in np.ndindex(client_count, client_count):
                # In magma, bright is much.
                color = "black" if overlap[i, j] > 0.6 else "white"
                text = f"{overlap[i, j]:.2f}"
                ax.text(
                    j,
                    i,
                    text,
                    ha="center",
                    va="center",
                    fontsize=5,
                    color=color,
                )

        # ---- Step 3: clients by their classes, as the paper orders them.
        client_labels = _class_labels(run, client_count)
        ax.set_xticks(range(client_count), client_labels, rotation=90, fontsize=6)
        ax.set_yticks(range(client_count), client_labels, fontsize=6)
        ax.grid(visible=False)

    titles = [
        f"{group.setting}\nlimit alpha = {group.runs[0].config_value('method.alpha')}"
        for group in groups
    ]
    return draw_panels(
        dict(zip(titles, groups, strict=True)),
        path,
        draw_panel,
        size=(3.4, 3.4),
    )


def _intersection_over_union(intersections: Any) -> Any:
    """Return the overlap of each two masks, 0 of empty ones.

    Args:
        intersections: Entries that both clients hold, `[clients, clients]`.
    """
    # A mask's intersection with itself is its size; |A or B| = |A| + |B| - |A and B|.
    sizes = intersections.diagonal()
    union = sizes[:, None] + sizes - intersections
    return np.divide(
        intersections,
        union,
        out=np.zeros_like(union),
        where=union > 0,
    )


def _class_labels(run: Run, client_count: int) -> list[str]:
    """Return the classes of each client.

    Where masks are not of all clients, it is numbers.
    """
    label_counts = run.clients.filter(regex=r"^label_\d+$")
    if len(label_counts) != client_count or label_counts.empty:
        return [str(number) for number in range(client_count)]
    texts = []
    for _, row in label_counts.iterrows():
        classes = [name.removeprefix("label_") for name in label_counts if row[name] > 0]
        texts.append(" ".join(classes))
    return texts


FIGURES = {
    "figure2": Figure(_choose_table1_runs, _paint_convergence, "fedselect/cifar10"),
    "figure3": Figure(
        lambda groups: groups_with_several_values(
            _choose_table1_methods(groups), lambda run: True, _training_size
        ),
        paint_accuracy_over(_training_size, "training samples of a client", _judged_lines),
        "fedselect/sizes",
    ),
    "figure4": Figure(_choose_table2_masks, _paint_last_layers, "fedselect/alpha"),
    "sizes": Figure(
        choose_method("fedselect", _has_personal_share), _paint_sizes, "fedselect/alpha"
    ),
    "overlaps": Figure(
        choose_method("fedselect", masks_by_seed), _paint_overlaps, "fedselect/alpha"
    ),
}
