"""Training of sub-models at their true size: cut out before, put back afterwards.

A neuron with entries that are zero and never move has no part in a network: the network without it
computes the same but for rounding, in less time. Nothing is asked of methods: which
neurons these are shows in the masks of their phases and in the tree that training starts from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.training.jobs import TrainJob, TrainResult
from fedpfl.engine.training.train_plan import with_epoch_numbers
from fedpfl.engine.training.vectorize import Hook
from fedpfl.ground import tree
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Batch, Phase
from fedpfl.models import Bound, Net
from fedpfl.models.subnetwork import PartBound, Subnetwork, find_subnetwork

ROLE = "main"
LEAST_EVALUATED = 100_000
"""Fewest entries of a network that is cut for evaluation: finding zero neurons takes time too."""


@dataclass(frozen=True)
class CutJob:
    """Hold a client's training, and the neurons that have part in it.

    Attributes:
        net: The network.
        full: The job at full size.
        part: The neurons.
    """

    net: Net
    full: TrainJob
    part: Subnetwork

    @property
    def job(self) -> TrainJob:
        """Return the job on these neurons alone."""
        full = self.full
        masks = {id(phase.mask): self._cut_mask(phase.mask) for phase in full.plan.phases}
        phases = [phase._replace(mask=masks[id(phase.mask)]) for phase in full.plan.phases]
        surroundings: Tree = {}
        # A method's own loss sees all of the network.
        if not full.is_plain:
            surroundings = {
                "entries": self.part.entries,
                "params": full.start,
                "buffers": full.buffers,
            }
        return replace(
            full,
            plan=replace(full.plan, phases=phases),
            start=self.part.cut_tree(full.start),
            buffers={role: self.part.cut_tree(values) for role, values in full.buffers.items()},
            surroundings=surroundings,
        )

    def put_back(self, result: TrainResult) -> TrainResult:
        """Return the result at full size."""
        buffers = {}
        for role, values in result.buffers.items():
            buffers[role] = self.part.embed_tree(values, self._decay_statistics(role, values))
        params = self.part.embed_tree(result.params, self.full.start)
        return replace(result, params=params, buffers=buffers)

    def _cut_mask(self, mask: Tree) -> Tree:
        """Return a mask of the remaining entries; True stands for all of a leaf."""
        masks: Tree = tree.expand(mask, self.full.start)
        element_wise = {name: leaf for name, leaf in masks.items() if isinstance(leaf, Tensor)}
        for name, leaf in self.part.cut_tree(element_wise).items():
            # True where nothing is left to mask: such a leaf takes a plain step.
            masks[name] = True if leaf.all() else leaf
        return masks

    def _decay_statistics(self, role: str, after: Tree) -> Tree:
        """Return running statistics, decayed as if dropped neurons had output zero."""
        before = self.full.buffers[role]
        decayed = dict(before)
        for name in before:
            layer_name, _, kind = name.rpartition(".")
            # The counter is one for all neurons, and comes back with the part.
            if kind not in ("running_mean", "running_var"):
                continue
            counter = f"{layer_name}.num_batches_tracked"
            calls_before, calls = int(before[counter]), int(after[counter])
            momentum: Any = self.net.module.get_submodule(layer_name).momentum
            if momentum is not None:
                decayed[name] = before[name] * (1 - momentum) ** (calls - calls_before)
            elif calls:  # the mean over all batches
                decayed[name] = before[name] * (calls_before / calls)
        return decayed


def cut_job(net: Net, job: TrainJob) -> CutJob | None:
    """Return the job cut to active neurons; None if all are active."""
    phases = [phase for phase, _ in with_epoch_numbers(job.plan.phases)]
    if (
        not all(map(_may_be_cut, phases))
        or not phases
        or job.draws[0].protection  # noise is drawn for whole leaves
        or not _has_plain_calls(net)
        # Several models of one client may lack different neurons.
        or job.buffers.keys() != {ROLE}
        or not isinstance(job.start, dict)
        or job.start.keys() != net.params.keys()
    ):
        return None
    masks = [tree.expand(phase.mask, job.start) for phase in phases]
    trainable = {name: _any_of([mask[name] for mask in masks]) for name in job.start}
    part = find_subnetwork(net, job.start, trainable)
    return CutJob(net, job, part) if part else None


def embed_objective(objective: Hook, surroundings: Tree) -> Hook:
    """Return a loss of a part, for one of the network at full size.

    Args:
        objective: As `Method.loss`.
        surroundings: As in TrainJob.
    """

    def loss(server: Tree, client: Tree, net: Bound, params: Tree, batch: Batch) -> Any:
        part = Subnetwork(surroundings["entries"])
        all_params = part.embed_tree(params, surroundings["params"])
        all_net = PartBound(net, part, surroundings["buffers"], (all_params, params))
        answer = objective(server, client, all_net, all_params, batch)
        net.buffers = all_net.part_buffers
        return answer

    return loss


def bind_for_evaluation(net: Net, params: Tree, buffers: Entries) -> Bound:
    """Return the network of those neurons that have part in a model.

    Args:
        net: The network.
        params: A model, or a dict of a model and further inputs of its prediction.
        buffers: The model's, by role.
    """
    bound = net.bind(buffers)
    is_large = sum(leaf.numel() for leaf in net.params.values()) >= LEAST_EVALUATED
    if not is_large or not _has_plain_calls(net) or buffers.keys() != {ROLE}:
        return bound
    if not isinstance(params, dict):
        return bound
    for model in (params, *params.values()):
        part = None
        if isinstance(model, dict):
            part = find_subnetwork(net, model, dict.fromkeys(model, False))
        if part:
            part_bound = net.bind({ROLE: part.cut_tree(buffers[ROLE])})
            return PartBound(part_bound, part, buffers, (model, part.cut_tree(model)))
    return bound


def _has_plain_calls(net: Net) -> bool:
    """Check that the network draws nothing, and is called once a step."""
    return not net.traits.draws and not net.traits.recomputes


def _may_be_cut(phase: Phase) -> bool:
    """Check that the engine makes a phase's steps, and some masks are element-wise."""
    if phase.step or phase.after_gradient or phase.mask is None:
        return False
    return any(isinstance(leaf, Tensor) for leaf in tree.leaves(phase.mask))


def _any_of(masks: list[Any]) -> Any:
    """Return where any mask of a leaf holds."""
    if any(mask is True for mask in masks):
        return True
    tensors = [mask for mask in masks if isinstance(mask, Tensor)]
    if not tensors:
        return False
    return torch.stack(tensors).any(0) if len(tensors) > 1 else tensors[0]
