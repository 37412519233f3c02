"""A client's training on the loop backend: all steps of all its phases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fedpfl.engine.training.client_step import ClientStep, StepState
from fedpfl.engine.training.features import ClientSplit, FeatureStore
from fedpfl.engine.training.frozen import FrozenBody, find_frozen_body
from fedpfl.engine.training.jobs import TrainJob, TrainResult
from fedpfl.engine.training.minibatches import StepPlan, plan_steps
from fedpfl.engine.training.pure_steps import PureStep, PureSteps, find_pure_step
from fedpfl.engine.training.scripts import StepScripts
from fedpfl.engine.training.sgd import Moments, as_float_mask, initial_moments, masked_moments
from fedpfl.engine.training.shard import gather_data
from fedpfl.engine.training.train_plan import (
    TrainableLeaves,
    find_trainable_leaves,
    streams_with_differing_masks,
)
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Phase
from fedpfl.models import Net

MOST_PLANNED = 4096
"""Samples that are dealt to steps at once, if an epoch has no more."""


class ClientTraining:
    """Hold a client's tensors on the way through its phases.

    Args:
        net: The network.
        job: What one client trains.
        autocast: Enters the precision of losses.
        stop: Once it is set, no step is begun.
        feature_store: Of bodies that are frozen for good.
        scripts: Take steps by tensors alone; None: Python takes all.
    """

    def __init__(
        self,
        net: Net,
        job: TrainJob,
        autocast: Callable[[], AbstractContextManager],
        stop: threading.Event,
        feature_store: FeatureStore | None,
        scripts: StepScripts | None,
    ):
        # ---- Step 1: what steps need, and the client's samples
        self._net = net
        self._job = job
        self._autocast = autocast
        self._stop = stop
        self._scripts = scripts
        self._feature_store = feature_store
        ((federation, client),) = job.rows
        self._split = ClientSplit(federation, "train", client)
        self._data = gather_data(federation, self._split.sample_indices)
        self._streams_with_differing_masks = streams_with_differing_masks(job.plan.phases)

        # ---- Step 2: what steps change
        params = tree.map(working_copy, job.start)
        self._moments = initial_moments(job.plan, params)
        # On the device: to read a loss at every step would make the host wait for the GPU.
        zeros = torch.zeros(3, device=self._data.y.device)
        sums = dict(zip(("loss", "sample_loss", "samples"), zeros.unbind(), strict=True))
        self._state = StepState(
            params=params,
            moments=Moments(mean={}, square={}, counts={}),
            masks={},
            server=job.server,
            client=job.client,
            buffers=job.buffers,
            surroundings=job.surroundings,
            samples=self._data._asdict(),
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
        step = ClientStep(
            net=self._net,
            job=self._job,
            phase=phase,
            trainable=trainable,
            local=local,
            autocast=self._autocast,
            body=self._find_frozen_body(phase, trainable),
        )
        pure_step = find_pure_step(step, self._state) if self._scripts else None
        with masking:
            if pure_step:
                self._take_pure_steps(pure_step, epochs)
            else:
                self._take_steps(step, epochs)

    def make_result(self) -> TrainResult:
        """Return what the phases have made of the client."""
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
        if phase.step or self._job.rows[0].federation.augment:
            return None
        if self._feature_store:
            with self._autocast():
                body = self._feature_store.find_body(self._net, [self._split], self._data)
            if body:
                return body
        state = self._state
        return find_frozen_body(
            self._net, state.params, trainable.indices, state.buffers, self._data
        )

    def _take_pure_steps(self, step: PureStep, epochs: range) -> None:
        """Take a phase's steps by tensors alone."""
        assert self._scripts
        steps = PureSteps(step, self._scripts, self._stop)
        for plan in self._plan_steps(step.step, epochs):
            self._step_count += steps.take_epochs(plan)
        self._records += steps.records
        state = self._state._replace(buffers=step.state.buffers)
        if step.step.phase.after_gradient:
            state = state._replace(client=step.state.client)
        self._state = state

    def _take_steps(self, step: ClientStep, epochs: range) -> None:
        """Take a phase's steps by Python."""
        phase_key = f"{step.phase.stream} {epochs.start}"
        for number, batches in enumerate(self._read_minibatches(step, epochs)):
            if self._stop.is_set():
                raise CancelledError
            self._state, record = step.update_state(self._state, batches, (phase_key, number))
            self._step_count += 1
            if record:
                self._records.append(record)

    def _plan_steps(self, step: ClientStep, epochs: range) -> Iterator[StepPlan]:
        """Yield the client's steps, those of as many epochs as may be held at once."""
        ((federation, client),) = self._job.rows
        (draws,) = self._job.draws
        samples = max(1, len(federation.train[client]))
        count = max(1, MOST_PLANNED // samples)
        for start in range(epochs.start, epochs.stop, count):
            yield plan_steps(
                phase=step.phase,
                epochs=range(start, min(start + count, epochs.stop)),
                batch_size=step.local.batch_size,
                draws=draws,
                federation=federation,
                client=client,
                fixed=step.local.steps,
                randoms=self._job.randoms,
            )

    def _read_minibatches(self, step: ClientStep, epochs: range) -> Iterator[list[Batch]]:
        """Yield the minibatches of each step."""
        for plan in self._plan_steps(step, epochs):
            # Padding is -1. All sizes at once, as each reading of a tensor costs more than a small
            # step.
            batch_sizes = (plan.positions >= 0).sum(-1).tolist()
            steps = zip(plan.positions, plan.views, plan.random, batch_sizes, strict=True)
            for step_positions, step_views, step_random, step_sizes in steps:
                batches = []
                minibatches = zip(step_positions, step_views, step_random, step_sizes, strict=True)
                for positions, views, random, size in minibatches:
                    batches.append(self._read_batch(positions[:size], views[:size], random[:size]))
                yield batches

    def _read_batch(self, positions: Tensor, views: Tensor, random: Tensor) -> Batch:
        """Return samples of the client as they are augmented, with numbers of their own."""
        federation = self._job.rows[0].federation
        device = self._data.y.device
        batch = self._data.rows(tree.send(positions, device))
        batch = batch._replace(random=tree.send(random, device))
        if federation.augment:
            x = federation.apply_augmentation(batch.x, tree.send(views, device))
            batch = batch._replace(x=x.contiguous(memory_format=torch.channels_last))
        return batch


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
