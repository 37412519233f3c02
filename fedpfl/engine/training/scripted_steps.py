"""Training steps that scripts may repeat: which these are, and how many go together."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from fedpfl.engine.training.forms import describe_form_change
from fedpfl.engine.training.frozen import FrozenBody
from fedpfl.engine.training.jobs import TrainJob
from fedpfl.engine.training.kinds import method_key
from fedpfl.engine.training.scripts import StepScripts
from fedpfl.engine.training.step import PureStep, StepState
from fedpfl.engine.training.vectorize import Hook
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Tree
from fedpfl.methods import Data, Method, Phase

LONGEST_CALL = 0.05
"""Seconds that steps take together at most: a run that is stopped waits for them."""

MOST_AT_ONCE = 64

LARGEST_STATES = 2**26
"""Bytes of states that a step looks at, at most, as a script is tried on copies of all tensors."""


class ScriptedSteps:
    """Take a phase's steps in place, many together.

    Args:
        step: The step.
        state: The client's tensors. Client and buffers change in place.
        scripts: Repeat the step.
    """

    def __init__(self, step: PureStep, state: StepState, scripts: StepScripts):
        self._step = step
        self._state = state
        self._scripts = scripts
        self._tensors = tree.leaves(state)
        self._kind = scripts.find_key(self._find_kind())

    def take_steps(
        self, minibatches: Sequence[Sequence[Tensor]], stop: threading.Event
    ) -> list[Tree]:
        """Take a step on each minibatch; return the records of losses.

        Args:
            minibatches: See PureStep.
            stop: Once it is set, no step is begun.
        """
        records: list[Tree] = []
        start = 0
        while start < len(minibatches):
            if stop.is_set():
                raise CancelledError
            start_time = time.perf_counter()
            steps_at_once = self._scripts.steps_at_once.get(self._kind, 1)
            group = minibatches[start : start + steps_at_once]
            records += self._scripts.take_steps(
                kind=self._kind,
                step=self._take_step,
                tensors=self._tensors,
                minibatches=group,
                rate=self._step.local.lr,
            )
            seconds_per_step = (time.perf_counter() - start_time) / len(group)
            # A clock may not have moved meanwhile.
            steps_in_time = LONGEST_CALL / max(seconds_per_step, 1e-6)
            steps_at_once = max(1, min(MOST_AT_ONCE, int(steps_in_time)))
            self._scripts.steps_at_once[self._kind] = steps_at_once
            start += len(group)
        return records

    def restore_state(self, state: StepState) -> StepState:
        """Return a state with the client and the buffers as steps have left them."""
        state = state._replace(buffers=self._state.buffers)
        if self._step.phase.after_gradient:
            state = state._replace(client=self._state.client)
        return state

    def _take_step(
        self, tensors: Sequence[Tensor], minibatch: Sequence[Tensor], rate: float
    ) -> Tree:
        """Take a step in place; return the record of the loss.

        Args:
            tensors: The leaves of a StepState.
            minibatch: See PureStep.
            rate: The learning rate.
        """
        state: StepState = tree.rebuild(self._state, tensors)
        state_after, record = self._bind_step(state, rate)(state, minibatch)
        with torch.no_grad():
            for name in ("params", "client", "buffers"):
                values = getattr(state, name)
                values_after = getattr(state_after, name)
                if values_after is not values:
                    if change := describe_form_change(values_after, values):
                        raise MethodError(
                            f"a step changes the form of {name}, {change}; keep forms as they"
                            " begin, or set engine.shortcuts=false"
                        )
                    overwrite(values, values_after)
        return record

    def _bind_step(self, state: StepState, rate: float) -> PureStep:
        """Return the step with a learning rate, and the features of a state's samples."""
        step = self._step
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

    def _find_kind(self) -> Hashable:
        """Return all that the operations of steps depend on, but for the minibatch's size."""
        local = self._step.local
        settings = (local.momentum, local.nesterov, local.weight_decay, local.clip)
        adam = (local.optimizer, local.betas, local.eps)
        job = self._step.job
        # Other values would be other constants; a user's method may have some in another round.
        hooks = None
        if not job.is_plain:
            hooks = (*_list_hooks(job, self._step.phase), method_key(job.method))
        forms = []
        for name, leaf in tree.items(self._state):
            # Steps do not depend on how many samples a client has.
            shape = leaf.shape[1:] if name.startswith("samples.") else leaf.shape
            forms.append((name, shape, leaf.stride(), leaf.dtype))
        keeps = (job.plan.by_sample, job.wants_records)
        # Two phases may have trees of one form, and move other leaves of them.
        moving = (tuple(self._step.trainable.indices), tuple(self._state.masks))
        augment = job.rows[0].federation.augment
        return hooks, settings, adam, keeps, moving, augment, tuple(forms)


def make_scripted_steps(
    step: PureStep, state: StepState, scripts: StepScripts | None
) -> ScriptedSteps | None:
    """Return a phase's steps by scripts, None where more than tensors decides them."""
    if scripts is None or not _looks_at_tensors_alone(step):
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
    return ScriptedSteps(replace(step, autocast=nullcontext, body=None), state, scripts)


def _looks_at_tensors_alone(step: PureStep) -> bool:
    """Check that tensors alone decide a phase's steps."""
    job = step.job
    traits = step.net.traits
    if traits.draws or traits.recomputes or job.draws[0].protection:
        return False
    if not step.trainable.indices:
        return False
    # Statistics of a frozen body move.
    if step.body and step.net.buffers:
        return False
    if job.is_plain:
        return True
    if tree.nbytes(job.server) + tree.nbytes(job.client) > LARGEST_STATES:
        return False
    # A second key differs from the first where a value could change inside.
    if method_key(job.method) != method_key(job.method):
        return False
    return all(_is_known_hook(hook, job.method) for hook in _list_hooks(job, step.phase))


def _list_hooks(job: TrainJob, phase: Phase) -> list[Hook]:
    """Return the functions of a method that have a part in a phase's steps."""
    hooks = [phase.step or phase.loss or job.plan.loss]
    if phase.after_gradient:
        hooks.append(phase.after_gradient)
    return hooks


def _is_known_hook(hook: Hook, method: Method) -> bool:
    """Check that a hook is a method's function itself, and no wrapper."""
    if inspect.ismethod(hook):
        return hook.__self__ is method
    return inspect.isfunction(hook) and getattr(type(method), hook.__name__, None) is hook


def overwrite(target: Tree, source: Tree) -> None:
    """Copy a tree's values into a second tree, which may share their memory."""
    storages = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(target)}

    def separate(target_leaf: Tensor, source_leaf: Tensor) -> Tensor:
        is_part = source_leaf.untyped_storage().data_ptr() in storages
        return source_leaf.clone() if is_part and source_leaf is not target_leaf else source_leaf

    def copy_values(target_leaf: Tensor, source_leaf: Tensor) -> None:
        if source_leaf is not target_leaf:
            target_leaf.copy_(source_leaf)

    # A part of a leaf must be read before the leaf changes.
    tree.map(copy_values, target, tree.map(separate, target, source))
