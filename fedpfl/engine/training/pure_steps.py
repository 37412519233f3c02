"""Training steps as functions of tensors alone, which scripts can repeat."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.training.client_step import ClientStep, StepState
from fedpfl.engine.training.frozen import FrozenBody
from fedpfl.engine.training.jobs import TrainJob
from fedpfl.engine.training.minibatches import StepPlan
from fedpfl.engine.training.scripts import StepScripts
from fedpfl.ground import tree
from fedpfl.ground.origin import is_of_package
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Data, Method, Phase
from fedpfl.models import Net

LONGEST_CALL = 0.05
"""Seconds that steps take together at most: a run that is stopped waits for them."""

MOST_AT_ONCE = 64

LARGEST_STATES = 2**26
"""Bytes of states that a step looks at, at most, as a script is tried on copies of all tensors."""


@dataclass(frozen=True)
class PureStep:
    """Take a step that looks at nothing but tensors.

    Attributes:
        step: The step.
        state: The client's tensors; a script is tried on others of their form.
    """

    step: ClientStep
    state: StepState

    def __call__(self, tensors: Sequence[Tensor], minibatch: Sequence[Tensor], rate: float) -> Tree:
        """Take a step in place; return what the loss keeps of it.

        Args:
            tensors: The leaves of a StepState.
            minibatch: The rows of each batch; behind them their samples' own numbers, if a method
                has these.
            rate: The learning rate.
        """
        state: StepState = tree.rebuild(self.state, tensors)
        batches = self._read_batches(state, minibatch)
        state_after, record = self._bind_step(state, rate).update_state(state, batches)
        with torch.no_grad():
            for name in ("params", "client", "buffers"):
                values = getattr(state, name)
                values_after = getattr(state_after, name)
                if values_after is not values:
                    overwrite(values, values_after)
        return record

    def find_kind(self) -> Hashable:
        """Return all that the operations of steps depend on, but for the minibatch's size."""
        local = self.step.local
        settings = (local.momentum, local.nesterov, local.weight_decay, local.clip)
        job = self.step.job
        # A method's hook is equal to itself alone: other values would be other constants.
        hooks = None if job.is_plain else tuple(_list_hooks(job, self.step.phase))
        forms = []
        for name, leaf in tree.items(self.state):
            # How many samples a client has is no matter of a step.
            shape = leaf.shape[1:] if name.startswith("samples.") else leaf.shape
            forms.append((name, shape, leaf.stride(), leaf.dtype))
        keeps = (job.plan.by_sample, job.wants_records)
        return hooks, settings, keeps, tuple(forms)

    def _read_batches(self, state: StepState, minibatch: Sequence[Tensor]) -> list[Batch]:
        """Return the batches of a step."""
        data = Data(state.samples["x"], state.samples["y"])
        count = self.step.phase.batches
        batches = [data.rows(rows) for rows in minibatch[:count]]
        numbers = minibatch[count:]
        if numbers:
            pairs = zip(batches, numbers, strict=True)
            batches = [batch._replace(random=random) for batch, random in pairs]
        return batches

    def _bind_step(self, state: StepState, rate: float) -> ClientStep:
        """Return the step with a learning rate, and the features of a state's samples."""
        step = self.step
        # A checked copy takes longer than some steps.
        if rate != step.local.lr:
            step = replace(step, local=replace(step.local, lr=rate))
        features = state.samples.get("features")
        if features is None:
            return step
        data = Data(state.samples["x"], state.samples["y"])
        # Of several models a body is the same only where it is frozen for good, and in none.
        is_model = state.params.keys() == step.net.params.keys()
        params = state.params if is_model else step.net.params
        return replace(step, body=FrozenBody(step.net, params, state.buffers, data, features))


def find_pure_step(step: ClientStep, state: StepState) -> PureStep | None:
    """Return a phase's step by tensors alone, None where something else decides it.

    Its steps change their state in place, so that it has copies of the client's state and buffers.
    """
    if not is_pure(step):
        return None
    if step.body:
        features = step.body.compute_features(step.net.bind(state.buffers, training=True))
        if features is None:
            return None
        state = state._replace(samples={**state.samples, "features": features})
    if step.job.is_plain:
        state = state._replace(server={}, client={})
    elif step.phase.after_gradient:
        state = state._replace(client=tree.map(torch.clone, state.client))
    state = state._replace(buffers=tree.map(torch.clone, state.buffers))
    # A script has the precision of its tensors.
    return PureStep(replace(step, autocast=nullcontext, body=None), state)


def is_pure(step: ClientStep) -> bool:
    """Return whether nothing but tensors decides a phase's steps."""
    job = step.job
    if not has_pure_calls(step.net) or job.draws[0].protection:
        return False
    # Adam reads its number of steps.
    if step.local.optimizer != "sgd" and not step.phase.step:
        return False
    if job.rows[0].federation.augment or not step.trainable.indices:
        return False
    # Statistics of a body that holds still move.
    if step.body and step.net.buffers:
        return False
    if job.is_plain:
        return True
    is_large = tree.nbytes(job.server) + tree.nbytes(job.client) > LARGEST_STATES
    hooks = _list_hooks(job, step.phase)
    # What a user's method looks at is not known.
    is_known = is_of_package(type(job.method)) and all(
        _is_known_hook(hook, job.method) for hook in hooks
    )
    return is_known and not is_large


def has_pure_calls(net: Net) -> bool:
    """Return whether a network's logits follow from its parameters and the samples alone."""
    # A user's may look at anything.
    traits = net.traits
    return traits.trusted and not traits.draws and not traits.recomputes


def _list_hooks(job: TrainJob, phase: Phase) -> list[Callable[..., Any]]:
    """Return the functions of a method that have a part in a phase's steps."""
    hooks = [phase.step or phase.loss or job.plan.loss]
    if phase.after_gradient:
        hooks.append(phase.after_gradient)
    return hooks


def _is_known_hook(hook: Callable[..., Any], method: Method) -> bool:
    """Return whether a hook is a method's function itself, and not a check of it."""
    if inspect.ismethod(hook):
        return hook.__self__ is method
    return inspect.isfunction(hook) and getattr(type(method), hook.__name__, None) is hook


def overwrite(target: Tree, source: Tree) -> None:
    """Copy a tree's values into another one, of which they may be parts."""
    storages = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(target)}

    def separate(target_leaf: Tensor, source_leaf: Tensor) -> Tensor:
        is_part = source_leaf.untyped_storage().data_ptr() in storages
        return source_leaf.clone() if is_part and source_leaf is not target_leaf else source_leaf

    def copy_values(target_leaf: Tensor, source_leaf: Tensor) -> None:
        if source_leaf is not target_leaf:
            target_leaf.copy_(source_leaf)

    # What is part of another leaf must be read before that one changes.
    tree.map(copy_values, target, tree.map(separate, target, source))


class PureSteps:
    """Take a phase's steps, many together.

    Args:
        step: The step.
        scripts: Take it.
        stop: Once it is set, no step is begun.
    """

    def __init__(self, step: PureStep, scripts: StepScripts, stop: threading.Event):
        self._step = step
        self._scripts = scripts
        self._tensors = tree.leaves(step.state)
        self._stop = stop
        self._kind = scripts.number_kind(step.find_kind())
        self._rate = step.step.local.lr
        self._steps_at_once = 1
        self.records: list[Tree] = []
        """What the losses have kept, by step."""

    def take_epochs(self, plan: StepPlan) -> int:
        """Take the steps of some epochs; return how many there are."""
        minibatches = _list_minibatches(plan)
        start = 0
        while start < len(minibatches):
            if self._stop.is_set():
                raise CancelledError
            stop = start + self._steps_at_once
            self._take_steps(minibatches[start:stop])
            start = stop
        return len(minibatches)

    def _take_steps(self, minibatches: list[list[Tensor]]) -> None:
        """Take some steps; their time decides how many are next."""
        start_time = time.perf_counter()
        self.records += self._scripts.take_steps(
            kind=self._kind,
            step=self._step,
            tensors=self._tensors,
            minibatches=minibatches,
            rate=self._rate,
        )
        seconds_per_step = (time.perf_counter() - start_time) / len(minibatches)
        # A clock may not have moved meanwhile.
        steps_in_time = LONGEST_CALL / max(seconds_per_step, 1e-6)
        self._steps_at_once = max(1, min(MOST_AT_ONCE, int(steps_in_time)))


def _list_minibatches(plan: StepPlan) -> list[list[Tensor]]:
    """Return each step's minibatch: rows of its batches, then the samples' own numbers."""
    # All sizes at once, as each reading of a tensor costs more than a small step.
    sizes = (plan.positions >= 0).sum(-1).tolist()
    has_numbers = plan.random.shape[-1] > 0
    minibatches = []
    steps = zip(plan.positions, plan.random, sizes, strict=True)
    for step_positions, step_random, step_sizes in steps:
        minibatch = _cut_padding(step_positions, step_sizes)
        if has_numbers:
            minibatch += _cut_padding(step_random, step_sizes)
        minibatches.append(minibatch)
    return minibatches


def _cut_padding(values: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return the values `[batches, longest, ...]` of each batch without those behind its size."""
    longest = values.shape[1]
    batches = values.unbind()
    return [
        batch if size == longest else batch[:size]
        for batch, size in zip(batches, sizes, strict=True)
    ]
