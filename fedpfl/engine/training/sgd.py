"""The one training step, and the plan of steps that local training takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, AtLeast, AtMost, Below
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Method, Phase
from fedpfl.models import Bound, Parts
from fedpfl.privacy import Steps

Beta = Annotated[float, AtLeast(0), Below(1)]


@dataclass(frozen=True)
class Local(Checked):
    """Say how clients train: by an optimizer of torch.optim, without dampening.

    Its state is new in each stream of a turn.

    Attributes:
        epochs: Passes over a client's samples; None if `steps` are given.
        lr: In the first round; `for_round` gives it in another one.
        momentum: Of sgd, as is `nesterov`.
        clip: Norm to which a client's gradient is scaled down, before weight decay; 0: never.
        steps: Minibatches that take the place of one epoch; None if `epochs` are given.
        betas: Of adam and adamw, as is `eps`.
        decay: Factor of lr after every `decay_every` rounds, or half a cosine wave from lr down to
            0 after the last round.
    """

    epochs: Annotated[int, AtLeast(1)] | None
    batch_size: Annotated[int, AtLeast(2)]  # one-sample batches are skipped
    lr: Annotated[float, Above(0)]
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.0
    """Of sgd, as is `nesterov`."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.0
    clip: Annotated[float, AtLeast(0)] = 0.0
    """Norm to which a client's gradient is scaled down, before weight decay; 0: never."""
    steps: Annotated[int, AtLeast(1)] | None = None
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    nesterov: bool = False
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Of adam and adamw, as is `eps`."""
    eps: Annotated[float, Above(0)] = 1e-8
    decay: Annotated[float, Above(0), AtMost(1)] | Literal["cosine"] = 1.0
    """Factor of lr after every `decay_every` rounds, or half a cosine wave from lr down to 0 after
    the last round.
    """
    decay_every: Annotated[int, AtLeast(1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is None:
            self.check(self.steps is not None, "steps", "1 or more where local.epochs is null")
        else:
            allowed = f"null beside local.epochs={self.epochs}; set local.epochs=null"
            self.check(self.steps is None, "steps", allowed)
        fast = self.optimizer == "sgd" and self.momentum > 0
        self.check(fast or not self.nesterov, "nesterov", "false but for sgd with momentum")

    @property
    def amount(self) -> int:
        """Return how many epochs a participation trains, or steps in their place."""
        return self.epochs or self.steps or 0

    def with_amount(self, amount: int) -> Local:
        """Return the values with so many epochs, or steps in their place."""
        return replace(self, epochs=amount) if self.epochs else replace(self, steps=amount)

    def for_phase(self, phase: Phase) -> Local:
        """Return the values that hold in a phase."""
        return replace(self, **dict[str, Any](phase.sgd)) if phase.sgd else self

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate depends on the round."""
        return self.decay != 1

    @property
    def is_plain(self) -> bool:
        """Whether this is what a `Phase.step` takes the place of: SGD at one learning rate."""
        return self.optimizer == "sgd" and not self.has_schedule

    def for_round(self, number: int, rounds: int) -> Local:
        """Return the values that hold in round `number` (from 1) of `rounds`.

        As by torch.optim.lr_scheduler's CosineAnnealingLR, and StepLR or ExponentialLR
        (`decay_every=1`), stepped once a round; the rate never rounds to zero.
        """
        if not self.has_schedule:
            return self
        past = (number - 1) // self.decay_every
        if isinstance(self.decay, str):
            scale = (1 + math.cos(math.pi * past * self.decay_every / rounds)) / 2
        else:
            scale = self.decay**past
        return replace(self, lr=max(self.lr * scale, torch.finfo(torch.float32).tiny))


class Moments(NamedTuple):
    """Hold an optimizer's state, by leaf; it is zero where a mask is False (`masked_moments`).

    Attributes:
        mean: Momentum, or Adam's mean gradient.
        square: Adam's mean squared gradient, else empty.
        counts: Adam's number of steps (per entry where a mask is element-wise), else empty.
    """

    mean: list[Tensor]
    square: Sequence[Tensor] = ()
    counts: Sequence[Tensor] = ()

    def of(self, indices: Sequence[int], rows: slice | None = None) -> Moments:
        """Return those of some leaves, perhaps of the leading rows alone."""
        selected: list[list[Tensor]] = []
        for tensors in self:
            if not tensors:
                selected.append([])
            elif rows is None:
                selected.append([tensors[i] for i in indices])
            else:
                selected.append([tensors[i][rows] for i in indices])
        mean, square, counts = selected
        return Moments(mean=mean, square=square, counts=counts)

    def leaves(self) -> list[Tensor]:
        """Return all tensors."""
        return [leaf for tensors in self for leaf in tensors]


def initial_moments(plan: TrainPlan, start: Tree, stacked: bool = False) -> dict[str, Moments]:
    """Return the optimizer's state before its first step, by stream.

    Leaves that no phase of a stream trains have an empty tensor there.

    Args:
        plan: Of training.
        start: The trees to train.
        stacked: Whether axis 0 of every tensor is the client.
    """
    return {
        stream: _initial_moments_of_stream(phases, plan.local, start, stacked)
        for stream, phases in group_by_stream(plan.phases).items()
    }


def _initial_moments_of_stream(
    phases: list[Phase], local: Local, start: Tree, stacked: bool
) -> Moments:
    """Return the optimizer's state before the first step of one stream."""
    # ---- Step 1: which leaves have a state, and which of them in part.
    is_adam = local.optimizer != "sgd"
    trained: set[int] = set()
    masked: set[int] = set()
    for phase in phases:
        if is_adam or local.for_phase(phase).momentum:
            trainable = find_trainable_leaves(phase, start)
            trained.update(trainable.indices)
            for i, mask in zip(trainable.indices, trainable.masks, strict=True):
                if mask is not None:
                    masked.add(i)
    leaves = tree.leaves(start)

    # ---- Step 2: zeros for these.
    def zeros() -> list[Tensor]:
        return [
            torch.zeros_like(leaf) if i in trained else leaf.new_empty(0)
            for i, leaf in enumerate(leaves)
        ]

    if not is_adam:
        return Moments(mean=zeros())

    # ---- Step 3: Adam's steps, by entry where entries move at different times.
    counts = zeros()
    for i in trained - masked:
        leaf = leaves[i]
        if stacked:
            counts[i] = leaf.new_zeros(len(leaf), *[1] * (leaf.dim() - 1))
        else:
            counts[i] = torch.zeros(())  # on the host, as in torch.optim
    return Moments(mean=zeros(), square=zeros(), counts=counts)


def clip_gradients(
    grads: list[Tensor], masks: list[Tensor | None], limit: float, stacked: bool
) -> list[Tensor]:
    """Return gradients scaled down to norm `limit`, as by torch.nn.utils.clip_grad_norm_.

    Args:
        grads: By leaf.
        masks: Only entries under them count for the norm.
        limit: Of the norm over all leaves.
        stacked: Whether axis 0 of every tensor is the client; each has a norm of its own then.
    """
    squares = []
    for grad, mask in zip(grads, masks, strict=True):
        square = zero_outside_mask(mask, grad).square()
        squares.append(square.flatten(1).sum(1) if stacked else square.sum())
    norm = torch.stack(squares).sum(0).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    if not stacked:
        return [grad * scale for grad in grads]
    return [grad * per_client_shape(scale, grad) for grad in grads]


def optimizer_step_(
    params: list[Tensor],
    moments: Moments,
    grads: list[Tensor],
    masks: list[Tensor | None],
    local: Local,
    stacked: bool = False,
    rates: Tensor | None = None,
) -> None:
    """Make one step of the optimizer in place. Entries whose mask is False do not move.

    Args:
        params: Leaves to train.
        moments: The optimizer's state of these leaves.
        grads: The gradients of these leaves.
        masks: By leaf, boolean or the same by `as_bitmask`; None for all entries.
        local: The optimizer's settings.
        stacked: Whether axis 0 of every tensor is the client.
        rates: Each client's learning rate `[clients]`, in place of `local.lr`.
    """
    # ---- Gradients: clipping, weight decay and masks, in the order of torch.optim
    if local.clip:
        grads = clip_gradients(grads, masks, local.clip, stacked)
    if local.weight_decay and local.optimizer != "adamw":
        grads = list(torch._foreach_add(grads, params, alpha=local.weight_decay))
    grads = [zero_outside_mask(mask, grad) for grad, mask in zip(grads, masks, strict=True)]

    # ---- Adam and AdamW
    if local.optimizer != "sgd":
        for i, leaf in enumerate(params):
            _adam_step_(
                leaf=leaf,
                grad=grads[i],
                mask=masks[i],
                moments=_LeafMoments(moments.mean[i], moments.square[i], moments.counts[i]),
                local=local,
                lr=local.lr if rates is None else per_client_shape(rates, leaf),
            )
        return

    # ---- SGD
    if local.momentum:
        torch._foreach_mul_(moments.mean, local.momentum)
        torch._foreach_add_(moments.mean, grads)
        if local.nesterov:
            grads = list(torch._foreach_add(grads, moments.mean, alpha=local.momentum))
        else:
            grads = list(moments.mean)
    if rates is None:
        torch._foreach_add_(params, grads, alpha=-local.lr)
        return
    for leaf, grad in zip(params, grads, strict=True):
        leaf.addcmul_(grad, per_client_shape(rates, leaf), value=-1)


class _LeafMoments(NamedTuple):
    """Hold Adam's state of one leaf."""

    mean: Tensor
    square: Tensor
    steps: Tensor


def _adam_step_(
    leaf: Tensor,
    grad: Tensor,
    mask: Tensor | None,
    moments: _LeafMoments,
    local: Local,
    lr: float | Tensor,
) -> None:
    """Make Adam's step of one leaf in place (Kingma and Ba, ICLR 2015).

    AdamW: Loshchilov and Hutter, ICLR 2019.
    """
    mean, square, count = moments
    beta1, beta2 = local.betas
    count += 1 if mask is None else mask.bool()
    if local.weight_decay and local.optimizer == "adamw":
        shrink = 1 - lr * local.weight_decay
        leaf.mul_(shrink if mask is None else torch.where(mask.bool(), shrink, 1.0))
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if not count.dim():  # one count for all entries: in Python's numbers, as torch.optim does it
        steps = float(count)
        denominator = (square.sqrt() / (1 - beta2**steps) ** 0.5).add_(local.eps)
        leaf.addcdiv_(mean, denominator, value=-lr / (1 - beta1**steps))
        return
    entry_steps = count.clamp(min=1)  # an entry that has never moved has no moments
    correction1 = _bias_correction(beta1, entry_steps)
    correction2 = _bias_correction(beta2, entry_steps)
    denominator = (square.sqrt() / correction2.sqrt()).add_(local.eps)
    leaf.sub_(mean / denominator * (lr / correction1))


def _bias_correction(beta: float, steps: Tensor) -> Tensor:
    """Return 1 - beta^steps, computed so that it is exact for a beta near 1."""
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))


def per_client_shape(values: Tensor, leaf: Tensor) -> Tensor:
    """Return numbers per client `[clients]` in a shape that goes with a stacked leaf."""
    return values.view(-1, *[1] * (leaf.dim() - 1))


def as_bitmask(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as integers with all bits set or none, laid out as `like`.

    On a CPU a bitwise `and` with it takes a twentieth of torch.where's time and gives the same,
    also for infinities.
    """
    return torch.empty_like(like, dtype=torch.int32).copy_(-mask.int())


def zero_outside_mask(mask: Tensor | None, grad: Tensor) -> Tensor:
    """Return a gradient with zeros where the mask is False."""
    if mask is None:
        return grad
    if mask.dtype == torch.int32:
        return (grad.view(torch.int32) & mask).view(torch.float32)
    return torch.where(mask, grad, 0.0)


@contextmanager
def masked_moments(moments: Moments, masks: list[Tensor | None], local: Local) -> Iterator[None]:
    """Keep the optimizer's state zero where a mask is False while a phase lasts.

    Afterwards the entries outside the mask are put back as they were.
    """
    masked_buffers: list[tuple[Tensor, Tensor]] = []
    if local.momentum or local.optimizer != "sgd":
        for tensors in (moments.mean, moments.square):
            for buffer, mask in zip(tensors, masks, strict=bool(tensors)):
                if mask is not None:
                    masked_buffers.append((buffer, mask))
    outside = [torch.where(mask, 0.0, buffer) for buffer, mask in masked_buffers]
    for buffer, mask in masked_buffers:
        buffer.copy_(torch.where(mask, buffer, 0.0))
    yield
    for (buffer, _), values in zip(masked_buffers, outside, strict=True):
        buffer.add_(values)  # one of the two is zero


def streams_with_differing_masks(phases: list[Phase]) -> set[str]:
    """Return the streams whose phases have different masks, so that optimizer states meet."""
    streams = set()
    for stream, members in group_by_stream(phases).items():
        if any(phase.mask is not members[0].mask for phase in members):
            streams.add(stream)
    return streams


@dataclass(frozen=True)
class TrainableLeaves:
    """Hold which leaves of a trained tree a phase differentiates, and their element-wise masks.

    Attributes:
        indices: The leaves, by position.
        masks: Of these leaves; None where all entries move.
    """

    indices: list[int]
    masks: list[Tensor | None]


def find_trainable_leaves(phase: Phase, trained: Tree) -> TrainableLeaves:
    """Return the leaves that a phase trains. Those masked with a plain False are left out."""
    mask = tree.leaves(tree.expand(True if phase.mask is None else phase.mask, trained))
    indices = [i for i, leaf in enumerate(mask) if leaf is not False]
    masks = [mask[i] if isinstance(mask[i], Tensor) else None for i in indices]
    return TrainableLeaves(indices=indices, masks=masks)


def clients_without_trainable_entries(phase: Phase, rows: int | None = None) -> Tensor | None:
    """Return which clients have no trainable entry in a phase; None if all have.

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
            has_entries.append(leaf.flatten(1).any(1) if rows else leaf.any())
    if not has_entries:
        return torch.ones(rows or (), dtype=torch.bool)
    return ~torch.stack(has_entries).any(0)


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


@dataclass(frozen=True)
class TrainPlan:
    """Say what local training minimizes, in which phases, and how.

    Attributes:
        loss: Of phases that have none of their own.
        tuned: Whether this is fine-tuning of an evaluated model, not the method's own training.
        by_sample: Whether the mean loss over samples is asked for, beside that over steps.
    """

    loss: Callable[..., Any]
    phases: list[Phase]
    local: Local
    tuned: bool = False
    by_sample: bool = False


def make_training_plan(
    method: Method, local: Local, server: Tree, client: dict[str, Tree], start: Tree
) -> TrainPlan:
    """Return the plan of a method's own local training.

    Raises:
        FedpflError: `local` has an optimizer or a schedule, and a phase makes its own steps.
    """
    phases = method.phases(server, client, start, local.epochs or 1)
    if not local.is_plain and any(phase.step for phase in phases):
        raise FedpflError(unused_optimizer_text(type(method).__name__, local))
    return TrainPlan(loss=method.loss, phases=phases, local=local)


def unused_optimizer_text(method: str, local: Local) -> str:
    """Say that a method with its own steps uses no optimizer or schedule."""
    key = "optimizer" if local.optimizer != "sgd" else "decay"
    return (
        f"local.{key}={getattr(local, key)} has no part in {method}, which makes its own steps; "
        f"leave it at {getattr(Local, key)}"
    )


class StepPlan(NamedTuple):
    """Hold what the steps of one client take, in order.

    Attributes:
        positions: Of samples in its training data, `[steps, Phase.batches, batch]`; -1 behind those
            of a short minibatch.
        views: How each of them is augmented, uniform numbers `[steps, Phase.batches, batch,
            Federation.augment_numbers]`.
        random: The samples' own numbers, `[steps, Phase.batches, batch, Method.randoms]`.
    """

    positions: Tensor
    views: Tensor
    random: Tensor


def _minibatches_per_epoch(samples: int, batch_size: int) -> int:
    """Return how many minibatches an epoch has; a lone last sample makes none."""
    return samples // batch_size + (samples % batch_size > 1)


def plan_steps(  # noqa: PLR0913 - what one step needs
    phase: Phase,
    epochs: range,
    batch_size: int,
    draws: Draws,
    federation: Federation,
    client: int,
    fixed: int | None = None,
    randoms: int = 0,
) -> StepPlan:
    """Deal a client's samples to a phase's steps, reshuffled each epoch.

    A last partial minibatch is kept, a lone sample not; minibatches that do not make a whole step
    are left out.

    Args:
        phase: Of training.
        epochs: Their numbers.
        batch_size: Of minibatches.
        draws: The orders of samples.
        federation: Has the client's samples.
        client: Its number.
        fixed: How many steps take the place of an epoch, from one pass over the samples into the
            next.
        randoms: How many numbers each sample is given.
    """
    samples = len(federation.train[client])
    if draws.protection:
        steps = find_poisson_steps(batch_size, samples, fixed)
        return _draw_steps(phase.stream, epochs, steps, draws, federation, client, randoms)
    steps_per_pass = _minibatches_per_epoch(samples, batch_size) // phase.batches
    # ---- A fixed number of steps may begin and end within a pass.
    taken_steps = slice(None)
    if fixed and steps_per_pass:
        first_step = fixed * epochs.start
        end_step = fixed * epochs.stop
        epochs = range(first_step // steps_per_pass, -(-end_step // steps_per_pass))
        offset = first_step % steps_per_pass
        taken_steps = slice(offset, offset + end_step - first_step)

    # ---- Samples in the order of each pass, and how they are augmented
    batch = min(batch_size, samples)
    slots = steps_per_pass * phase.batches * batch
    used = min(samples, slots)
    positions = torch.full((len(epochs), slots), -1)
    count = federation.augment_numbers
    views = torch.zeros(len(epochs), slots, count)
    for row, epoch in enumerate(epochs):
        order = draws.order(client, phase.stream, epoch, samples)[:used]
        positions[row, :used] = order
        if count:
            sample_views = draws.random(client, phase.stream, epoch, samples, count, "views")
            views[row, :used] = sample_views[order]

    # ---- Their own numbers: those of all first samples are drawn first, then of all second ones.
    random = []
    for epoch in epochs:
        numbers = draws.random(client, phase.stream, epoch, slots, randoms)
        by_slot = numbers.view(phase.batches, batch, steps_per_pass, randoms)
        random.append(by_slot.permute(2, 0, 1, 3))
    shape = (len(epochs) * steps_per_pass, phase.batches, batch)
    return StepPlan(
        positions=positions.view(shape)[taken_steps],
        views=views.view((*shape, count))[taken_steps],
        random=torch.cat(random)[taken_steps],
    )


def find_poisson_steps(batch_size: int, samples: int, fixed: int | None = None) -> Steps:
    """Return how a client of so many samples steps through an epoch of Poisson minibatches.

    There are as many steps as without protection, and `batch_size` samples in each on average.
    """
    count = _minibatches_per_epoch(samples, batch_size)
    if fixed and count:
        count = fixed
    return Steps(min(1.0, batch_size / max(1, samples)), count)


def _draw_steps(
    stream: str,
    epochs: range,
    steps: Steps,
    draws: Draws,
    federation: Federation,
    client: int,
    randoms: int,
) -> StepPlan:
    """Plan steps as `plan_steps` does, each on a Poisson minibatch that is drawn in secret."""
    protection = draws.protection
    assert protection
    samples = len(federation.train[client])

    # ---- Which samples are in which minibatch; short ones are filled up with -1.
    minibatches: list[Tensor] = []
    for epoch in epochs:
        purpose = draws.purpose, draws.round, client, stream, epoch
        minibatches += protection.draw_minibatches(samples, steps, purpose)
    batch = max([1, *map(len, minibatches)])
    positions = torch.full((len(minibatches), 1, batch), -1)
    for row, members in enumerate(minibatches):
        positions[row, 0, : len(members)] = members

    # ---- Numbers and views follow from the seed, as they tell nothing of samples.
    def draw_numbers(count: int, what: str) -> Tensor:
        rows = steps.number * samples
        numbers = [draws.random(client, stream, epoch, rows, count, what) for epoch in epochs]
        by_sample = torch.cat(numbers).view(len(minibatches), samples, count)
        indices = positions[:, 0, :, None].clamp(min=0).expand(-1, -1, count)
        return by_sample.gather(1, indices)[:, None]

    return StepPlan(
        positions=positions,
        views=draw_numbers(federation.augment_numbers, "views"),
        random=draw_numbers(randoms, "random"),
    )


def count_samples(
    phase: Phase, epochs: range, batch_size: int, samples: int, fixed: int | None = None
) -> int:
    """Return how many samples `plan_steps` deals, each as often as it is dealt.

    Args:
        phase: Of training.
        epochs: Their numbers.
        batch_size: Of minibatches.
        samples: How many the client has.
        fixed: As in `plan_steps`.
    """
    steps_per_pass = _minibatches_per_epoch(samples, batch_size) // phase.batches
    samples_per_step = phase.batches * min(batch_size, samples)
    samples_per_pass = min(samples, steps_per_pass * samples_per_step)
    if not fixed or not steps_per_pass:
        return len(epochs) * samples_per_pass

    def samples_before(step: int) -> int:
        passes, steps = divmod(step, steps_per_pass)
        return passes * samples_per_pass + steps * samples_per_step

    return samples_before(fixed * epochs.stop) - samples_before(fixed * epochs.start)


class FineTuning(NamedTuple):
    """Say how evaluated models are fine-tuned: all their entries, or the head alone (`part`)."""

    local: Local
    draws: Draws
    part: str = "all"


def make_fine_tuning_plan(
    method: Method, tuning: FineTuning, parts: Parts, params: Tree
) -> TrainPlan:
    """Return the plan of fine-tuning an evaluated model by the task's loss alone."""

    def plain_loss(
        server: Tree, client: dict[str, Tree], net: Bound, params: Tree, batch: Batch
    ) -> Tensor:
        return batch.loss(method.predict(net, params, batch))

    phases = method.finetuning(params, parts, tuning.local.epochs or 1)
    if tuning.part == "head":
        head_mask = _mask_of_entries(params, parts.head)
        phases = [phase._replace(mask=head_mask) for phase in phases]
    return TrainPlan(loss=plain_loss, phases=phases, local=tuning.local, tuned=True)


def _mask_of_entries(params: Tree, names: tuple[str, ...]) -> Tree:
    """Return a mask of the entries with these names, in each model."""
    if not isinstance(params, dict):
        return False
    return {name: name in names or _mask_of_entries(value, names) for name, value in params.items()}


def complete_gradients(
    grads: list[Tensor], leaves: list[Tensor], moving: list[int]
) -> list[Tensor]:
    """Return gradients of all leaves, zero for those that do not move."""
    gradient_of_leaf = dict(zip(moving, grads, strict=True))
    return [
        gradient_of_leaf[i] if i in gradient_of_leaf else torch.zeros_like(leaf)
        for i, leaf in enumerate(leaves)
    ]
