"""A training step of one client: gradient, the method's use of it, and the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedpfl.engine.training.cutting import embed_objective
from fedpfl.engine.training.frozen import FrozenBody
from fedpfl.engine.training.jobs import Autocast, TrainJob
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.protected import (
    explaining_failure,
    require_no_record,
    sum_clipped_gradients,
)
from fedpfl.engine.training.sgd import Moments, optimizer_step_
from fedpfl.engine.training.train_plan import TrainableLeaves
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Batch, Data, Phase
from fedpfl.models import Bound, Net


class StepState(NamedTuple):
    """Hold all tensors that a client's steps read and change.

    Attributes:
        params: The trained tree.
        server: The server's state.
        client: The client's state.
        buffers: By role.
        moments: The optimizer's state of the leaves that move.
        masks: Masks of leaves that move in part, by position; see `as_float_mask`.
        surroundings: As in TrainJob.
        samples: The client's training samples: `x`, `y`, `black` where they are augmented, and
            `features` where a script repeats steps on a frozen body.
        sums: Of the losses, of the losses weighted by samples, and of the samples.
    """

    params: Tree
    server: Tree
    client: Entries
    buffers: Entries
    moments: Moments = Moments(mean={}, square={}, counts={})
    masks: Mapping[int, Tensor] = {}
    surroundings: Mapping[str, Tree] = {}
    samples: Mapping[str, Tensor] = {}
    sums: Mapping[str, Tensor] = {}


class Gradient(NamedTuple):
    """Hold the gradient of a step by torch.func.

    Attributes:
        grads: Of the leaves that move.
        loss: At these leaves.
        buffers: After the forward pass, by role.
        client: The client's state after `Phase.after_gradient`, {} without one.
        record: Of the loss.
    """

    grads: list[Tensor]
    loss: Tensor
    buffers: Entries
    client: Entries
    record: Tree


@dataclass(frozen=True)
class PureStep:
    """Take a step of a phase, as a function of tensors.

    Attributes:
        net: The network.
        job: The training.
        phase: Of the training.
        trainable: The leaves that move.
        local: The optimizer's settings.
        autocast: Enters the precision of losses.
        body: The frozen body, if the head alone moves.
        noise_key: Names the phase in draws of noise where samples are protected.
    """

    net: Net
    job: TrainJob
    phase: Phase
    trainable: TrainableLeaves
    local: Local
    autocast: Autocast
    body: FrozenBody | None = None
    noise_key: str = ""

    def __call__(
        self, state: StepState, minibatch: Sequence[Tensor], number: int = 0
    ) -> tuple[StepState, Tree]:
        """Return the state after a step, and the record of the loss.

        Moments and sums change in place, and so do parameters unless the phase has its own step.

        Args:
            state: Before the step.
            minibatch: The rows of each batch; behind them the numbers of their samples, if any.
            number: Of the step in its phase.
        """
        # ---- Step 1: the batches, and the network with its buffers
        batches = self._read_batches(state, minibatch)
        batch = batches[0]
        bound = self.net.bind(state.buffers, training=True)
        if self.body:
            bound = self.body.bind_batch(bound, batch)
        record: Tree = {}
        if self.phase.step:
            params, loss = self.take_phase_step(state, bound, batches)
            with torch.no_grad():
                # Steps of SGD would move states that share memory with the parameters.
                params = tree.copy_shared(params, {"server": state.server, "client": state.client})
            loss = loss.detach()
            state = state._replace(params=params)
        else:
            # ---- Step 2: the gradient of the loss at the leaves that move
            leaves = self.list_moving(state.params)
            if self.job.draws[0].protection:
                # The loss would tell of samples.
                loss = torch.zeros((), device=batch.x.device)
                grads = self._find_protected_gradient(state, batch, number)
            else:
                loss, record = self.compute_loss(state, bound, batch)
                grads = self.net.differentiate_loss(loss, leaves)
                loss, record = loss.detach(), tree.map(Tensor.detach, record)

            # ---- Step 3: the method's use of it, and the update
            with torch.no_grad():
                if self.phase.after_gradient:
                    client = self.show_gradient(state, batch, loss, grads, record)
                    # The update would move parameters that the client keeps.
                    state = state._replace(client=tree.copy_shared(client, state.params))
                masks = [state.masks.get(i) for i in self.trainable.indices]
                optimizer_step_(leaves, state.moments, grads, masks, self.local)

        # ---- Step 4: sums of losses, and buffers
        self._add_loss(state.sums, loss, len(batch.y))
        if bound.buffers is not state.buffers:
            state = state._replace(buffers=bound.buffers)
        return state, record if self.job.wants_records else {}

    # ---- parts of a step, which both backends take

    def list_moving(self, params: Tree) -> list[Tensor]:
        """List the leaves that move."""
        leaves = tree.leaves(params)
        return [leaves[i] for i in self.trainable.indices]

    def replace_moving(self, params: Tree, values: Sequence[Tensor]) -> Tree:
        """Return parameters with other values of the leaves that move."""
        leaves = tree.leaves(params)
        for i, value in zip(self.trainable.indices, values, strict=True):
            leaves[i] = value
        return tree.rebuild(params, leaves)

    def compute_loss(self, state: StepState, bound: Bound, batch: Batch) -> tuple[Tensor, Tree]:
        """Compute the loss and its record. Raises MethodError for one without gradient."""
        objective = self.phase.loss or self.job.plan.loss
        if state.surroundings:
            objective = embed_objective(objective, state.surroundings)
        with self.autocast():
            loss = objective(state.server, state.client, bound, state.params, batch)
        loss, record = loss if isinstance(loss, tuple) else (loss, {})
        if not loss.requires_grad:  # the batched backend would train by zeros, in silence
            raise MethodError(
                f"{type(self.job.method).__name__}: the loss has no gradient (is it or `predict`"
                " detached, or computed under torch.no_grad?)"
            )
        return loss, record

    def find_gradient(self, state: StepState, batch: Batch) -> Gradient:
        """Compute the gradient as a pure function, which vmap takes."""

        def compute_loss(values: list[Tensor]) -> tuple[Tensor, tuple[Entries, Tree]]:
            params = self.replace_moving(state.params, values)
            bound = self.net.bind(state.buffers, training=True, weight=batch.weight)
            loss, record = self.compute_loss(state._replace(params=params), bound, batch)
            return loss, (bound.buffers, record)

        differentiate = grad_and_value(compute_loss, has_aux=True)
        grads, (loss, (buffers, record)) = differentiate(self.list_moving(state.params))
        client: Entries = {}
        if self.phase.after_gradient:
            client = self.show_gradient(state, batch, loss, grads, record)
        return Gradient(grads, loss, buffers, client, record)

    def show_gradient(
        self, state: StepState, batch: Batch, loss: Tensor, grads: list[Tensor], record: Tree
    ) -> Entries:
        """Return the client's state after `Phase.after_gradient` has seen a gradient."""
        assert self.phase.after_gradient
        params = tree.map(Tensor.detach, state.params)
        still = tree.map(torch.zeros_like, params)
        return self.phase.after_gradient(
            state.server,
            state.client,
            params,
            self.replace_moving(still, grads),
            batch,
            loss,
            record,
        )

    def take_phase_step(
        self, state: StepState, bound: Bound, batches: Sequence[Batch]
    ) -> tuple[Tree, Tensor]:
        """Return parameters and loss of a step by `Phase.step`."""
        assert self.phase.step
        batch = tuple(batches) if len(batches) > 1 else batches[0]
        with torch.no_grad(), self.autocast():
            return self.phase.step(state.server, state.client, bound, state.params, batch)

    def sum_clipped_gradients(
        self, state: StepState, batch: Batch, masks: list[Tensor | None]
    ) -> list[Tensor]:
        """Return the sum of the samples' gradients, each of them clipped."""
        protection = self.job.draws[0].protection
        assert protection

        def compute_loss(values: list[Tensor], sample: Batch) -> Tensor:
            params = self.replace_moving(state.params, values)
            bound = self.net.bind(state.buffers, training=True)
            loss, record = self.compute_loss(state._replace(params=params), bound, sample)
            require_no_record(record)
            return loss

        values = [leaf.detach() for leaf in self.list_moving(state.params)]
        with self.autocast(), explaining_failure():
            return sum_clipped_gradients(compute_loss, values, masks, batch, protection.clip)

    # ---- parts of a step of the loop backend

    def _read_batches(self, state: StepState, minibatch: Sequence[Tensor]) -> list[Batch]:
        """Read the samples of each batch, augmented, with their numbers."""
        data = Data(state.samples["x"], state.samples["y"])
        batches = [data.rows(rows) for rows in minibatch[: self.phase.batches]]
        randoms = self.job.randoms
        federation = self.job.rows[0].federation
        for position, numbers in enumerate(minibatch[self.phase.batches :]):
            batch = batches[position]
            if randoms:
                batch = batch._replace(random=numbers[:, :randoms])
            if federation.augment:
                x = federation.augment(batch.x, numbers[:, randoms:], state.samples["black"])
                batch = batch._replace(x=x.contiguous(memory_format=torch.channels_last))
            batches[position] = batch
        return batches

    def _find_protected_gradient(self, state: StepState, batch: Batch, number: int) -> list[Tensor]:
        """Return a gradient that hides single samples.

        Args:
            state: Before the step.
            batch: A Poisson minibatch, perhaps empty.
            number: Of the step in its phase.
        """
        # ---- Step 1: gradients, clipped sample by sample
        ((_, client),) = self.job.rows
        (draws,) = self.job.draws
        assert draws.protection
        # An empty minibatch is a step of noise alone: to skip it would tell who was drawn.
        sums = [torch.zeros_like(leaf) for leaf in self.list_moving(state.params)]
        if len(batch.x):
            sums = self.sum_clipped_gradients(state, batch, self.trainable.masks)

        # ---- Step 2: noise, and the mean over as many samples as a minibatch has on average
        # How many were drawn is a secret, too.
        expected = min(self.local.batch_size, len(state.samples["y"]))
        grads = []
        for i, gradient in zip(self.trainable.indices, sums, strict=True):
            key = draws.purpose, draws.round, self.noise_key, number, i
            noise = draws.protection.draw_noise(gradient, client, key)
            grads.append((gradient + noise) / expected)
        return grads

    def _add_loss(self, sums: Mapping[str, Tensor], loss: Tensor, samples: int) -> None:
        """Add a step's loss to the sums that mean losses are made of."""
        with torch.no_grad():
            sums["loss"].add_(loss)
            if self.job.plan.by_sample:
                sums["sample_loss"].add_(loss * samples)
                sums["samples"].add_(samples)
