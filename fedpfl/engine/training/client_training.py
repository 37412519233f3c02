"""A client's training on the loop backend: all steps of all its phases."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fedpfl.engine.training.features import ClientSplit
from fedpfl.engine.training.frozen import FrozenBody, find_frozen_body
from fedpfl.engine.training.jobs import Autocast, TrainJob, TrainResult
from fedpfl.engine.training.minibatches import StepPlan, plan_steps
from fedpfl.engine.training.scripted_steps import ScriptedSteps, make_scripted_steps
from fedpfl.engine.training.sgd import as_float_mask, initial_moments, masked_moments
from fedpfl.engine.training.shard import gather_data
from fedpfl.engine.training.shortcuts import Shortcuts
from fedpfl.engine.training.step import PureStep, StepState
from fedpfl.engine.training.train_plan import (
    TrainableLeaves,
    find_trainable_leaves,
    streams_with_differing_masks,
)
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Phase
from fedpfl.models import Net


class ClientTraining:
    """Hold a client's tensors on the way through its phases.

    Args:
        net: The network.
        job: The training of one client.
        autocast: Enters the precision of losses.
        stop: Once it is set, no step is begun.
        shortcuts: None computes each step in full.
    """

    def __init__(
        self,
        net: Net,
        job: TrainJob,
        autocast: Autocast,
        stop: threading.Event,
        shortcuts: Shortcuts | None,
    ):
        # ---- Step 1: what steps need, and the client's samples
        self._net = net
        self._job = job
        self._autocast = autocast
        self._stop = stop
        self._shortcuts = shortcuts
        ((federation, client),) = job.rows
        self._split = ClientSplit(federation, "train", client)
        self._data = gather_data(federation, self._split.sample_indices)
        samples = self._data._asdict()
        if federation.augment:
            samples["black"] = federation.black
        self._streams_with_differing_masks = streams_with_differing_masks(job.plan.phases)

        # ---- Step 2: what steps change
        params = tree.map(working_copy, job.start)
        self._moments = initial_moments(job.plan, params)
        # On the device: to read a loss at every step would make the host wait for the GPU.
        zeros = torch.zeros(3, device=self._data.y.device)
        sums = dict(zip(("loss", "sample_loss", "samples"), zeros.unbind(), strict=True))
        self._state = StepState(
            params=params,
            server=job.server,
            client=job.client,
            buffers=job.buffers,
            surroundings=job.surroundings,
            samples=samples,
            sums=sums,
        )
        self._step_count = 0
        self._records: list[Tree] = []

    def train_phase(self, phase: Phase, epochs: range) -> None:
        """Take the steps of a phase."""
        # ---- Step 1: which leaves move, and where in them
        local = self._job.plan.local.for_phase(phase)
        leaves = tree.leaves(self._state.params)
        trainable = find_trainable_leaves(phase, self._state.params)
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i in trainable.indices)
        moments = self._moments[phase.stream].of(trainable.indices)
        masks = {}
        for i, mask in zip(trainable.indices, trainable.masks, strict=True):
            if mask is not None:
                masks[i] = as_float_mask(mask, leaves[i])
        self._state = self._state._replace(moments=moments, masks=masks)
        masking: AbstractContextManager = nullcontext()
        if phase.stream in self._streams_with_differing_masks:
            masking = masked_moments(moments, trainable.masks, local)

        # ---- Step 2: the steps
        step = PureStep(
            net=self._net,
            job=self._job,
            phase=phase,
            trainable=trainable,
            local=local,
            autocast=self._autocast,
            body=self._find_frozen_body(phase, trainable),
            noise_key=f"{phase.stream} {epochs.start}",
        )
        with masking:
            self._take_steps(step, epochs)

    def make_result(self) -> TrainResult:
        """Return the client's trees after all phases."""
        state = self._state
        sums = state.sums
        loss = sums["loss"] / max(1, self._step_count)
        records: Tree = {}
        if self._records:
            records = tree.concatenate_trees(self._records)
        return TrainResult(
            params=tree.map(detached_copy, state.params),
            client=state.client,
            buffers=state.buffers,
            loss=loss,
            sample_loss=sums["sample_loss"] / sums["samples"].clamp(min=1),
            has_stepped=torch.full_like(loss, self._step_count > 0, dtype=torch.bool),
            records=[records],
        )

    def _find_frozen_body(self, phase: Phase, trainable: TrainableLeaves) -> FrozenBody | None:
        """Return the body if the head alone moves in a phase."""
        # Samples that look new each time have no features to keep.
        if self._shortcuts is None or phase.step or self._job.rows[0].federation.augment:
            return None
        feature_store = self._shortcuts.feature_store
        if feature_store:
            with self._autocast():
                body = feature_store.find_body(self._net, [self._split], self._data)
            if body:
                return body
        state = self._state
        return find_frozen_body(
            self._net, state.params, trainable.indices, state.buffers, self._data
        )

    def _take_steps(self, step: PureStep, epochs: range) -> None:
        """Take a phase's steps, by scripts where these repeat them."""
        scripted: ScriptedSteps | None = None
        if self._shortcuts:
            scripted = make_scripted_steps(step, self._state, self._shortcuts.scripts)
        plan = plan_steps(self._job.sample_source(0, step.phase), step.phase, epochs)
        minibatches = self._list_minibatches(plan)
        self._step_count += len(minibatches)
        if scripted:
            self._records += scripted.take_steps(minibatches, self._stop)
            self._state = scripted.restore_state(self._state)
            return
        for number, minibatch in enumerate(minibatches):
            if self._stop.is_set():
                raise CancelledError
            self._state, record = step(self._state, minibatch, number)
            if record:
                self._records.append(record)

    def _list_minibatches(self, plan: StepPlan) -> list[list[Tensor]]:
        """List each step's minibatch: rows of its batches, then numbers of their samples."""
        # Padding is -1. All sizes in one call: reading a tensor costs more than a small step.
        sizes = (plan.positions >= 0).sum(-1).tolist()
        device = self._data.y.device
        parts = [tree.send(plan.positions, device)]
        numbers = torch.cat([plan.random, plan.views], -1)
        if numbers.shape[-1]:
            parts.append(tree.send(numbers, device))
        minibatches: list[list[Tensor]] = [[] for _ in sizes]
        for part in parts:
            for minibatch, values, step_sizes in zip(minibatches, part, sizes, strict=True):
                minibatch += _cut_padding(values, step_sizes)
        return minibatches


def _cut_padding(values: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the values `[batches, longest, ...]` of each batch without those behind its size."""
    longest = values.shape[1]
    return [
        batch if size == longest else batch[:size]
        for batch, size in zip(values.unbind(), sizes, strict=True)
    ]


def working_copy(leaf: Tensor) -> Tensor:
    """Return a leaf to train, four axes channels last, as convolutions like them."""
    layout = torch.channels_last if leaf.dim() == 4 else torch.contiguous_format
    return leaf.detach().clone(memory_format=layout)


def detached_copy(leaf: Tensor) -> Tensor:
    """Return a trained leaf laid out as one never trained.

    An axis of one entry is contiguous at any stride, and a convolution chooses its kernel, hence
    last bits, by strides.
    """
    return leaf.detach().contiguous().flatten().view(leaf.shape)
