"""The plan of a client's training: its loss, its phases, and which entries move in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.keys import Draws
from fedpfl.engine.training.local import Local, unused_optimizer_text
from fedpfl.engine.training.vectorize import Hook
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Batch, Method, Phase
from fedpfl.models import Bound, Parts


@dataclass(frozen=True)
class TrainPlan:
    """Plan local training: its loss, phases and settings.

    Attributes:
        loss: Of phases that have none of their own.
        tuned: Whether this is fine-tuning of an evaluated model, not the method's own training.
        by_sample: Whether the mean loss over samples is asked for, beside that over steps.
    """

    loss: Hook
    phases: list[Phase]
    local: Local
    tuned: bool = False
    by_sample: bool = False


def make_training_plan(
    method: Method, local: Local, server: Tree, client: Entries, start: Tree
) -> TrainPlan:
    """Return the plan of a method's own local training.

    Raises:
        FedpflError: `local` has an optimizer or a schedule, and a phase makes its own steps.
    """
    phases = method.phases(server, client, start, local.epochs or 1)
    if not local.is_plain and any(phase.step for phase in phases):
        raise FedpflError(unused_optimizer_text(type(method).__name__, local))
    return TrainPlan(loss=method.loss, phases=phases, local=local)


class FineTuning(NamedTuple):
    """Hold settings of fine-tuning.

    Attributes:
        part: All entries (`all`), or the `head` alone.
        stages: Parts one after another, each with its epochs; empty: `part` alone.
    """

    local: Local
    draws: Draws
    part: str = "all"
    stages: tuple[tuple[str, int], ...] = ()


def make_fine_tuning_plan(
    method: Method, tuning: FineTuning, parts: Parts, params: Tree
) -> TrainPlan:
    """Return the plan of fine-tuning an evaluated model by the task's loss alone."""

    def plain_loss(server: Tree, client: Entries, net: Bound, params: Tree, batch: Batch) -> Tensor:
        return batch.loss(method.predict(net, params, batch))

    phases: list[Phase] = []
    stages = tuning.stages or ((tuning.part, tuning.local.epochs or 1),)
    for number, (part, epochs) in enumerate(stages):
        for phase in method.finetuning(params, parts, epochs):
            mask = _mask_of_entries(params, parts.head) if part == "head" else phase.mask
            # A later stage is a fine-tuning anew, with a new optimizer.
            stream = f"{phase.stream} {number}" if number else phase.stream
            phases.append(phase._replace(mask=mask, stream=stream))
    return TrainPlan(loss=plain_loss, phases=phases, local=tuning.local, tuned=True)


def _mask_of_entries(params: Tree, names: tuple[str, ...]) -> Tree:
    """Return a mask of the entries with these names, in each model."""
    if not isinstance(params, dict):
        return False
    return {name: name in names or _mask_of_entries(value, names) for name, value in params.items()}


def with_epoch_numbers(phases: list[Phase]) -> Iterator[tuple[Phase, range]]:
    """Yield phases with the numbers of their epochs, which count up per stream.

    Phases without epochs are dropped.
    """
    next_epoch: dict[str, int] = {}
    for phase in phases:
        start = next_epoch.get(phase.stream, 0)
        if phase.epochs > 0:
            next_epoch[phase.stream] = start + phase.epochs
            yield phase, range(start, start + phase.epochs)


def group_by_stream(phases: list[Phase]) -> dict[str, list[Phase]]:
    """Return those phases that have epochs, by stream."""
    groups: dict[str, list[Phase]] = {}
    for phase, _ in with_epoch_numbers(phases):
        groups.setdefault(phase.stream, []).append(phase)
    return groups


def streams_with_differing_masks(phases: list[Phase]) -> set[str]:
    """Return the streams of phases with different masks, where optimizer states meet."""
    streams = set()
    for stream, members in group_by_stream(phases).items():
        if any(phase.mask is not members[0].mask for phase in members):
            streams.add(stream)
    return streams


@dataclass(frozen=True)
class TrainableLeaves:
    """Hold the leaves that a phase differentiates, and their element-wise masks.

    Attributes:
        indices: The leaves, by position.
        masks: Of these leaves; None where all entries move.
    """

    indices: list[int]
    masks: list[Tensor | None]


def find_trainable_leaves(phase: Phase, trained: Tree) -> TrainableLeaves:
    """Return the leaves that a phase trains. Those masked with a plain False are left out."""
    phase_mask = True if phase.mask is None else phase.mask
    indices = []
    masks = []
    for i, leaf in enumerate(tree.leaves(tree.expand(phase_mask, trained))):
        if leaf is False:
            continue
        indices.append(i)
        masks.append(leaf if isinstance(leaf, Tensor) else None)
    return TrainableLeaves(indices=indices, masks=masks)


def clients_without_trainable_entries(phase: Phase, rows: int | None = None) -> Tensor | None:
    """Flag clients without a trainable entry in a phase; None if all have one.

    Args:
        phase: Of training.
        rows: How many clients the phase's masks are stacked for. The answer is `[rows]` then, and
            0-dimensional for a single client.
    """
    mask = [True] if phase.mask is None else tree.leaves(phase.mask)
    if any(leaf is True for leaf in mask):
        return None
    has_entries = []
    for leaf in mask:
        if isinstance(leaf, Tensor):
            has_entries.append(tree.as_matrix(leaf).any(1) if rows else leaf.any())
    if not has_entries:
        return torch.ones(rows or (), dtype=torch.bool)
    return ~torch.stack(has_entries).any(0)
