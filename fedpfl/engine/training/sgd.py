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

Beta = Annotated[float, AtLeast(0), Below(1)]


@dataclass(frozen=True)
class Local(Checked):
    """How clients train: by an optimiser of torch.optim, without dampening, its state new in each
    stream of a turn.

    epochs or steps, the other is None: passes over a client's samples, or minibatches that take the
    place of one epoch.
    lr: in the first round; `at` gives it in another one.
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
    def plain(self) -> bool:
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
    """Hold what an optimiser remembers of each leaf; it is zero where a mask is False (`parked`
    sees to it).

    first: momentum, or Adam's mean gradient. second, counts: Adam's mean square, and the number of
    steps taken (per entry where a mask is element-wise), else empty.
    """

    first: list[Tensor]
    second: Sequence[Tensor] = ()
    counts: Sequence[Tensor] = ()

    def of(self, places: Sequence[int], rows: slice | None = None) -> Moments:
        """Return those of some leaves, perhaps of the leading rows alone."""
        return Moments(
            *(
                [own[i] if rows is None else own[i][rows] for i in places] if own else []
                for own in self
            )
        )

    def leaves(self) -> list[Tensor]:
        """Return all of them."""
        return [leaf for own in self for leaf in own]


def initial_moments(plan: TrainPlan, start: Tree, stacked: bool = False) -> dict[str, Moments]:
    """Return what the optimiser remembers before its first step, by stream; nothing of leaves that
    none moves there.

    stacked: axis 0 is the client.
    """
    return {
        stream: _at_rest(own, plan.local, start, stacked)
        for stream, own in group_by_stream(plan.phases).items()
    }


def _at_rest(phases: list[Phase], local: Local, start: Tree, stacked: bool) -> Moments:
    """Return those of one stream."""
    adam = local.optimizer != "sgd"
    moves = [
        find_trainable_leaves(phase, start)
        for phase in phases
        if adam or local.for_phase(phase).momentum
    ]
    moving = {i for own in moves for i in own.moving}
    masked = {
        i
        for own in moves
        for i, mask in zip(own.moving, own.masks, strict=True)
        if mask is not None
    }

    def zeros() -> list[Tensor]:
        return [
            torch.zeros_like(leaf) if i in moving else leaf.new_empty(0)
            for i, leaf in enumerate(leaves)
        ]

    leaves = tree.leaves(start)
    if not adam:
        return Moments(zeros())
    counts = zeros()
    for i in moving - masked:
        alone = torch.zeros(())  # on the host, as in torch.optim
        counts[i] = (
            leaves[i].new_zeros(len(leaves[i]), *[1] * (leaves[i].dim() - 1)) if stacked else alone
        )
    return Moments(zeros(), zeros(), counts)


def clip_gradients(
    grads: list[Tensor], masks: list[Tensor | None], limit: float, stacked: bool
) -> list[Tensor]:
    """Gradients scaled down to norm `limit` over the entries that move, as by
    torch.nn.utils.clip_grad_norm_.

    stacked: axis 0 of every tensor is the client, and each has a norm of its own.
    """
    moving = [zero_outside_mask(mask, grad) for grad, mask in zip(grads, masks, strict=True)]
    squares = [
        leaf.square().flatten(1).sum(1) if stacked else leaf.square().sum() for leaf in moving
    ]
    scale = (limit / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1.0)
    return [leaf * (per_client_shape(scale, leaf) if stacked else scale) for leaf in grads]


def optimizer_step_(
    params: list[Tensor],
    moments: Moments,
    grads: list[Tensor],
    masks: list[Tensor | None],
    local: Local,
    stacked: bool = False,
    rates: Tensor | None = None,
) -> None:
    """One step of the optimiser on lists of tensors, in place. Entries whose mask is False hold
    still.

    masks: boolean, or the same as `bits`.
    stacked: axis 0 is the client.
    rates: each client's learning rate `[clients]`, in place of `local.lr`.
    """
    if local.clip:
        grads = clip_gradients(grads, masks, local.clip, stacked)
    if local.weight_decay and local.optimizer != "adamw":
        grads = list(torch._foreach_add(grads, params, alpha=local.weight_decay))
    grads = [zero_outside_mask(mask, grad) for grad, mask in zip(grads, masks, strict=True)]
    if local.optimizer != "sgd":
        for leaf, grad, mask, mean, square, count in zip(
            params, grads, masks, *moments, strict=True
        ):
            lr = local.lr if rates is None else per_client_shape(rates, leaf)
            _adam_(leaf, grad, mask, mean, square, count, local, lr)
        return
    if local.momentum:
        torch._foreach_mul_(moments.first, local.momentum)
        torch._foreach_add_(moments.first, grads)
        ahead = local.nesterov
        grads = list(
            torch._foreach_add(grads, moments.first, alpha=local.momentum)
            if ahead
            else moments.first
        )
    if rates is None:
        torch._foreach_add_(params, grads, alpha=-local.lr)
        return
    for leaf, grad in zip(params, grads, strict=True):
        leaf.addcmul_(grad, per_client_shape(rates, leaf), value=-1)


def _adam_(
    leaf: Tensor,
    grad: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    square: Tensor,
    count: Tensor,
    local: Local,
    lr: float | Tensor,
) -> None:
    """Adam's step of one leaf (Kingma and Ba, ICLR 2015; AdamW: Loshchilov and Hutter, ICLR 2019)."""
    one, two = local.betas
    count += 1 if mask is None else mask.bool()
    if local.weight_decay and local.optimizer == "adamw":
        kept = 1 - lr * local.weight_decay
        leaf.mul_(kept if mask is None else torch.where(mask.bool(), kept, 1.0))
    mean.lerp_(grad, 1 - one)
    square.mul_(two).addcmul_(grad, grad, value=1 - two)
    if not count.dim():  # in Python's numbers, as torch.optim does it
        number = float(count)
        leaf.addcdiv_(
            mean,
            (square.sqrt() / (1 - two**number) ** 0.5).add_(local.eps),
            value=-lr / (1 - one**number),
        )
        return
    taken = count.clamp(min=1)  # an entry that has never moved has no moments
    first, second = (
        -torch.expm1(taken * (math.log(beta) if beta else -math.inf)) for beta in (one, two)
    )
    leaf.sub_(mean / (square.sqrt() / second.sqrt()).add_(local.eps) * (lr / first))


def per_client_shape(rates: Tensor, leaf: Tensor) -> Tensor:
    """Numbers per client `[clients]`, in a shape that goes with a stacked leaf."""
    return rates.view(-1, *[1] * (leaf.dim() - 1))


def as_bitmask(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of float32 tensors as integers with all bits set or none, laid out as `like`.

    On a CPU a bitwise `and` with it takes a twentieth of torch.where's time and gives the same,
    also for infinities.
    """
    return torch.empty_like(like, dtype=torch.int32).copy_(-mask.int())


def zero_outside_mask(mask: Tensor | None, grad: Tensor) -> Tensor:
    """Zero where the mask is False."""
    if mask is None:
        return grad
    if mask.dtype == torch.int32:
        return (grad.view(torch.int32) & mask).view(torch.float32)
    return torch.where(mask, grad, 0.0)


@contextmanager
def masked_moments(moments: Moments, masks: list[Tensor | None], local: Local) -> Iterator[None]:
    """While a phase lasts: no moments where a mask is False. They are put back afterwards, as they
    were.
    """
    needed = local.momentum or local.optimizer != "sgd"
    pairs = [
        pair
        for own in (moments.first, moments.second)
        for pair in zip(own, masks, strict=bool(own))
    ]
    held = [(buffer, mask) for buffer, mask in pairs if mask is not None and needed]
    kept = [torch.where(mask, 0.0, buffer) for buffer, mask in held]
    for buffer, mask in held:
        buffer.copy_(torch.where(mask, buffer, 0.0))
    yield
    for (buffer, _), own in zip(held, kept, strict=True):
        buffer.add_(own)  # one of the two is zero


def streams_with_differing_masks(phases: list[Phase]) -> set[str]:
    """Name the streams whose phases have masks of their own, so that some of them park what others
    remember.
    """
    return {
        stream
        for stream, own in group_by_stream(phases).items()
        if any(one.mask is not own[0].mask for one in own)
    }


@dataclass(frozen=True)
class TrainableLeaves:
    """Which leaves of a trained tree a phase differentiates, by position, and their element-wise
    masks.
    """

    moving: list[int]
    masks: list[Tensor | None]


def find_trainable_leaves(phase: Phase, trained: Tree) -> TrainableLeaves:
    """Read a phase's mask. Leaves masked with a plain False are left out of differentiation
    altogether.
    """
    mask = tree.leaves(tree.expand(True if phase.mask is None else phase.mask, trained))
    moving = [i for i, leaf in enumerate(mask) if leaf is not False]
    return TrainableLeaves(
        moving, [mask[i] if isinstance(mask[i], Tensor) else None for i in moving]
    )


def clients_without_trainable_entries(phase: Phase, rows: int | None = None) -> Tensor | None:
    """Tell which clients leave a phase out, as nothing of theirs moves in it: `[rows]` or
    0-dimensional; None: nobody.

    rows: their number where the phase's masks are stacked.
    """
    mask = [True] if phase.mask is None else tree.leaves(phase.mask)
    if any(leaf is True for leaf in mask):
        return None
    moving = [
        leaf.flatten(1).any(1) if rows else leaf.any() for leaf in mask if isinstance(leaf, Tensor)
    ]
    return ~torch.stack(moving).any(0) if moving else torch.ones(rows or (), dtype=torch.bool)


def with_epoch_numbers(phases: list[Phase]) -> Iterator[tuple[Phase, range]]:
    """Give phases with the numbers of their epochs, which count up per stream; those without epochs
    are dropped.
    """
    done: dict[str, int] = {}
    for phase in phases:
        first = done.get(phase.stream, 0)
        if phase.epochs > 0:
            done[phase.stream] = first + phase.epochs
            yield phase, range(first, first + phase.epochs)


def group_by_stream(phases: list[Phase]) -> dict[str, list[Phase]]:
    """Group those phases that have epochs."""
    found: dict[str, list[Phase]] = {}
    for phase, _ in with_epoch_numbers(phases):
        found.setdefault(phase.stream, []).append(phase)
    return found


@dataclass(frozen=True)
class TrainPlan:
    """Say what local training minimises, in which phases, and how.

    tuned: whether this is fine-tuning of an evaluated model, not the method's own training.
    by_sample: whether the mean loss over samples is asked for, beside that over steps.
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

    Raises: FedpflError where `local` has an optimiser or a schedule and a phase makes its own
    steps.
    """
    phases = method.phases(server, client, start, local.epochs or 1)
    if not local.plain and any(phase.step for phase in phases):
        raise FedpflError(unused_optimizer_text(type(method).__name__, local))
    return TrainPlan(method.loss, phases, local)


def unused_optimizer_text(method: str, local: Local) -> str:
    """Say that a method which makes its own steps has no use for an optimiser or a schedule."""
    key = "optimizer" if local.optimizer != "sgd" else "decay"
    return (
        f"local.{key}={getattr(local, key)} has no part in {method}, which makes its own steps; leave it at "
        f"{getattr(Local, key)}"
    )


class StepPlan(NamedTuple):
    """Hold what the steps of one client take, in order.

    positions: of samples in its training data, `[steps, Phase.batches, batch]`; -1 behind those of
    a short minibatch.
    views: how each of them is seen, uniform numbers `[steps, Phase.batches, batch,
    Federation.views]`.
    random: the samples' numbers `[steps, Phase.batches, batch, randoms]`.
    """

    positions: Tensor
    views: Tensor
    random: Tensor


def plan_steps(
    phase: Phase,
    epochs: range,
    batch_size: int,
    draws: Draws,
    federation: Federation,
    client: int,
    fixed: int | None = None,
    randoms: int = 0,
) -> StepPlan:
    """Deal a client's samples to the steps of some epochs of a phase, reshuffled each epoch.

    A last partial minibatch is kept, a lone sample not; minibatches that do not make a whole step
    are left out.
    fixed: so many steps take the place of an epoch, from one pass over the samples into the next.
    randoms: how many numbers each sample is given.
    """
    samples = len(federation.train[client])
    count = (samples // batch_size + (samples % batch_size > 1)) // phase.batches
    now = slice(None)
    if fixed and count:
        first, last = fixed * epochs.start, fixed * epochs.stop
        epochs, now = (
            range(first // count, -(-last // count)),
            slice(first % count, first % count + last - first),
        )
    batch = min(batch_size, samples)
    room = count * phase.batches * batch
    taken = min(samples, room)
    positions = torch.full((len(epochs), room), -1)
    views = torch.zeros(len(epochs), room, federation.augment_numbers)
    for place, epoch in enumerate(epochs):
        order = draws.order(client, phase.stream, epoch, samples)[:taken]
        positions[place, :taken] = order
        if federation.augment_numbers:
            seen = draws.random(
                client, phase.stream, epoch, samples, federation.augment_numbers, "views"
            )
            views[place, :taken] = seen[order]
    drawn = [draws.random(client, phase.stream, epoch, room, randoms) for epoch in epochs]
    # The numbers of all first samples are drawn first, then those of all second ones.
    random = [own.view(phase.batches, batch, count, randoms).permute(2, 0, 1, 3) for own in drawn]
    shape = (len(epochs) * count, phase.batches, batch)
    whole = StepPlan(
        positions.view(shape), views.view(*shape, federation.augment_numbers), torch.cat(random)
    )
    return StepPlan(*(part[now] for part in whole))


def count_samples(
    phase: Phase, epochs: range, batch_size: int, samples: int, fixed: int | None = None
) -> int:
    """Count the samples of a client that has so many which `steps` deals, each as often as it is
    dealt.
    """
    count = (samples // batch_size + (samples % batch_size > 1)) // phase.batches
    batch = min(batch_size, samples)
    a_pass = min(samples, count * phase.batches * batch)
    if not fixed or not count:
        return len(epochs) * a_pass

    def until(step: int) -> int:
        return step // count * a_pass + step % count * phase.batches * batch

    return until(fixed * epochs.stop) - until(fixed * epochs.start)


class FineTuning(NamedTuple):
    """How judged models are fine-tuned: all their entries or the head's alone (`part`)."""

    local: Local
    draws: Draws
    part: str = "all"


def make_fine_tuning_plan(
    method: Method, tuning: FineTuning, parts: Parts, params: Tree
) -> TrainPlan:
    """Return the plan of fine-tuning an evaluated model by plain cross-entropy."""

    def loss(
        server: Tree, client: dict[str, Tree], net: Bound, params: Tree, batch: Batch
    ) -> Tensor:
        return batch.cross_entropy(method.predict(net, params, batch))

    phases = method.finetuning(params, parts, tuning.local.epochs or 1)
    if tuning.part == "head":
        phases = [phase._replace(mask=_named(params, parts.head)) for phase in phases]
    return TrainPlan(loss, phases, tuning.local, tuned=True)


def _named(params: Tree, names: tuple[str, ...]) -> Tree:
    """A mask of the entries called so, in one model or in each of several."""
    if not isinstance(params, dict):
        return False
    return {name: name in names or _named(value, names) for name, value in params.items()}


def complete_gradients(
    grads: list[Tensor], leaves: list[Tensor], moving: list[int]
) -> list[Tensor]:
    """Gradients of all leaves, from those of the moving ones: zero for the others."""
    known = dict(zip(moving, grads, strict=True))
    return [known[i] if i in known else torch.zeros_like(leaf) for i, leaf in enumerate(leaves)]
