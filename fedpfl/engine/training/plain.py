"""Plain steps: loss, gradient and optimizer as one function of tensors, which scripts can repeat."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.training.jobs import TrainJob
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.scripts import StepScripts
from fedpfl.engine.training.sgd import Moments, optimizer_step_
from fedpfl.engine.training.train_plan import TrainableLeaves
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Data, Phase
from fedpfl.models import Net

LONGEST_CALL = 0.05
"""Seconds that steps take together at most: a run that is stopped waits for them."""

MOST_AT_ONCE = 64

LARGEST_CONTEXT = 2**26
"""Bytes of states that a loss looks at, at most, as a script is tried on copies of all tensors."""

X = -5
Y = -4
"""The client's samples and labels among a step's tensors."""


@dataclass(frozen=True)
class PlainStep:
    """Take a step whose loss looks at trees and the minibatch alone.

    Attributes:
        net: The network, without buffers.
        job: What is trained.
        objective: The loss.
        params: A tree of the trained form.
        indices: The leaves that move, by position.
        local: The optimizer's settings.
    """

    net: Net
    job: TrainJob
    objective: Callable[..., Any]
    params: Tree
    indices: list[int]
    local: Local

    @property
    def loss_trees(self) -> Tree:
        """Return the states of server and client, if the loss looks at them."""
        if self.job.is_plain:
            return {}
        return {"server": self.job.server, "client": self.job.client}

    def __call__(self, tensors: Sequence[Tensor], rows: Tensor, rate: float) -> None:
        """Take a step in place.

        Args:
            tensors: The trained leaves, the momentum of those that move, the leaves of `loss_trees`,
                samples, labels, and the sums that mean losses are made of.
            rows: Of the minibatch.
            rate: The learning rate.
        """
        # ---- Step 1: what the tensors are
        remaining = iter(tensors)
        leaves = [next(remaining) for _ in tree.leaves(self.params)]
        velocity = [next(remaining) for _ in self.indices]
        given_leaves = [next(remaining) for _ in tree.leaves(self.loss_trees)]
        trees = tree.rebuild(self.loss_trees, given_leaves)
        x, y, loss_sum, sample_loss_sum, sample_count = remaining

        # ---- Step 2: loss and gradient
        batch = Data(x, y).rows(rows)
        bound = self.net.bind(self.job.buffers, training=True)
        params = tree.rebuild(self.params, leaves)
        moving_leaves = [leaves[i] for i in self.indices]
        with torch.enable_grad():
            loss = self.objective(
                trees.get("server", {}), trees.get("client", {}), bound, params, batch
            )
            if isinstance(loss, tuple):
                loss, _ = loss  # nobody asks for what is kept beside it
            grads = torch.autograd.grad(loss, moving_leaves, materialize_grads=True)
        loss = loss.detach()

        # ---- Step 3: the optimizer, and the sums that mean losses are made of
        with torch.no_grad():
            # A checked copy takes longer than some steps.
            local = self.local if rate == self.local.lr else replace(self.local, lr=rate)
            masks: list[Tensor | None] = [None] * len(moving_leaves)
            optimizer_step_(moving_leaves, Moments(mean=velocity), list(grads), masks, local)
            loss_sum += loss
            if self.job.plan.by_sample:
                sample_loss_sum += loss * len(rows)
                sample_count += len(rows)

    def find_kind(self, tensors: Sequence[Tensor]) -> Hashable:
        """Return all that the operations of steps depend on, but for the minibatch's size."""
        local = self.local
        settings = (local.momentum, local.nesterov, local.weight_decay, local.clip)
        names = [name for name, _ in tree.items({"params": self.params, "trees": self.loss_trees})]
        # A method's loss is equal to itself alone: other values would be other constants.
        objective = None if self.job.is_plain else self.objective
        # How many samples a client has is no matter of a step.
        forms = []
        for leaf in tensors:
            shape = leaf.shape[1:] if leaf is tensors[X] or leaf is tensors[Y] else leaf.shape
            forms.append((shape, leaf.stride(), leaf.dtype))
        by_sample = self.job.plan.by_sample
        return objective, tuple(self.indices), settings, by_sample, tuple(names), tuple(forms)


def find_plain_step(
    net: Net,
    job: TrainJob,
    phase: Phase,
    params: Tree,
    trainable: TrainableLeaves,
    local: Local,
) -> PlainStep | None:
    """Return a phase's step, if nothing but trees and minibatches decides it.

    Args:
        net: The network.
        job: What is trained.
        phase: Of training.
        params: The trained tree.
        trainable: The leaves that the phase moves.
        local: The optimizer's settings in it.
    """
    # Adam reads its number of steps, and networks of a user's may look at anything.
    traits = net.traits
    is_pure = traits.trusted and not traits.draws and not traits.recomputes
    has_buffers = bool(tree.leaves(job.buffers))
    is_private = bool(job.draws[0].protection)
    objective = phase.loss or job.plan.loss
    is_known = job.is_plain or _is_own_loss(job, phase, objective)
    if not is_known or not is_pure or has_buffers or is_private or local.optimizer != "sgd":
        return None
    # TorchScript has no word for the bits of a mask.
    is_masked = any(mask is not None for mask in trainable.masks)
    if is_masked or job.rows[0].federation.augment or not trainable.indices:
        return None
    return PlainStep(
        net=net,
        job=job,
        objective=objective,
        params=params,
        indices=trainable.indices,
        local=local,
    )


def _is_own_loss(job: TrainJob, phase: Phase, objective: Callable[..., Any]) -> bool:
    """Return whether a method of this package adds its loss alone to a step."""
    if phase.step or phase.after_gradient or job.wants_records or job.randoms:
        return False
    if tree.nbytes(job.server) + tree.nbytes(job.client) > LARGEST_CONTEXT:
        return False
    # A hook that is checked is none, and what a user's method looks at is not known.
    is_bound = inspect.ismethod(objective) and objective.__self__ is job.method
    return is_bound and type(job.method).__module__.startswith("fedpfl.methods.")


class PlainSteps:
    """Take a phase's plain steps, many together.

    Args:
        step: The step.
        scripts: Take it.
        tensors: Of the client, as the step reads and changes them.
        stop: Once it is set, no step is begun.
    """

    def __init__(
        self,
        step: PlainStep,
        scripts: StepScripts,
        tensors: list[Tensor],
        stop: threading.Event,
    ):
        self._step = step
        self._scripts = scripts
        self._tensors = tensors
        self._stop = stop
        self._kind = scripts.number_kind(step.find_kind(tensors))
        self._steps_at_once = 1

    def take_epochs(self, positions: Tensor) -> int:
        """Take the steps of some epochs; return how many there are.

        Args:
            positions: Of samples `[steps, batch]`, -1 behind those of a short minibatch.
        """
        # All sizes at once, as each reading of a tensor costs more than a small step.
        sizes = (positions >= 0).sum(1).tolist()
        longest = positions.shape[1]
        minibatches = [
            rows if size == longest else rows[:size]
            for rows, size in zip(positions.unbind(), sizes, strict=True)
        ]
        start = 0
        while start < len(minibatches):
            if self._stop.is_set():
                raise CancelledError
            end = start + self._steps_at_once
            self._take_steps(minibatches[start:end])
            start = end
        return len(minibatches)

    def _take_steps(self, minibatches: list[Tensor]) -> None:
        """Take some steps; their time decides how many are next."""
        start_time = time.perf_counter()
        self._scripts.take_steps(
            kind=self._kind,
            step=self._step,
            tensors=self._tensors,
            minibatches=minibatches,
            rate=self._step.local.lr,
        )
        seconds_per_step = (time.perf_counter() - start_time) / len(minibatches)
        # A clock may not have moved meanwhile.
        steps_in_time = LONGEST_CALL / max(seconds_per_step, 1e-6)
        self._steps_at_once = max(1, min(MOST_AT_ONCE, int(steps_in_time)))
