"""One step of an optimizer, and its state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.training.local import Local
from fedpfl.engine.training.train_plan import TrainPlan, find_trainable_leaves, group_by_stream
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Phase


class Moments(NamedTuple):
    """Hold an optimizer's state of leaves by position; zero outside a mask (`masked_moments`).

    Attributes:
        mean: Momentum, or Adam's mean gradient; empty for SGD without momentum.
        square: Adam's mean squared gradient, else empty.
        counts: Adam's number of steps (per entry where a mask is element-wise), else empty.
    """

    mean: dict[int, Tensor]
    square: dict[int, Tensor]
    counts: dict[int, Tensor]

    def of(self, indices: Sequence[int], rows: slice | None = None) -> Moments:
        """Return those of some leaves, perhaps of the leading rows alone."""
        selected: list[dict[int, Tensor]] = []
        for tensors in self:
            part = {i: tensors[i] for i in indices if i in tensors}
            if rows is not None:
                part = {i: tensor[rows] for i, tensor in part.items()}
            selected.append(part)
        mean, square, counts = selected
        return Moments(mean=mean, square=square, counts=counts)


def initial_moments(plan: TrainPlan, start: Tree, stacked: bool = False) -> dict[str, Moments]:
    """Return the optimizer's state before its first step, by stream.

    Leaves that no phase of a stream trains have none there.

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
    masked_leaves: set[int] = set()
    for phase in phases:
        if is_adam or local.for_phase(phase).momentum:
            trainable = find_trainable_leaves(phase, start)
            trained.update(trainable.indices)
            for i, mask in zip(trainable.indices, trainable.masks, strict=True):
                if mask is not None:
                    masked_leaves.add(i)
    leaves = tree.leaves(start)

    # ---- Step 2: zeros for these.
    def zeros() -> dict[int, Tensor]:
        return {i: torch.zeros_like(leaves[i]) for i in sorted(trained)}

    if not is_adam:
        return Moments(mean=zeros(), square={}, counts={})

    # ---- Step 3: Adam's steps, by entry where entries move at different times.
    counts = zeros()
    for i in trained - masked_leaves:
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
        stacked: Whether axis 0 of every tensor is the client; each has its own norm then.
    """
    squares = []
    for grad, mask in zip(grads, masks, strict=True):
        square = zero_outside_mask(mask, grad).square()
        squares.append(tree.as_matrix(square).sum(1) if stacked else square.sum())
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
    """Make one step of the optimizer in place. Entries with a mask of False do not move.

    Args:
        params: Leaves to train.
        moments: The optimizer's state of these leaves.
        grads: The gradients of these leaves.
        masks: By leaf, boolean or the same by `as_float_mask`; None for all entries.
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
        mean, square, counts = [tensors.values() for tensors in moments]
        for i, leaf_moments in enumerate(zip(mean, square, counts, strict=True)):
            _adam_step_(
                leaf=params[i],
                grad=grads[i],
                mask=masks[i],
                moments=leaf_moments,
                local=local,
                lr=local.lr if rates is None else per_client_shape(rates, params[i]),
            )
        return

    # ---- SGD
    if local.momentum:
        velocity = list(moments.mean.values())
        torch._foreach_mul_(velocity, local.momentum)
        torch._foreach_add_(velocity, grads)
        if local.nesterov:
            grads = list(torch._foreach_add(grads, velocity, alpha=local.momentum))
        else:
            grads = velocity
    if rates is None:
        torch._foreach_add_(params, grads, alpha=-local.lr)
        return
    for leaf, grad in zip(params, grads, strict=True):
        leaf.addcmul_(grad, per_client_shape(rates, leaf), value=-1)


def _adam_step_(
    leaf: Tensor,
    grad: Tensor,
    mask: Tensor | None,
    moments: tuple[Tensor, Tensor, Tensor],
    local: Local,
    lr: float | Tensor,
) -> None:
    """Make Adam's step of one leaf in place (Kingma and Ba, ICLR 2015).

    AdamW: Loshchilov and Hutter, ICLR 2019. `moments` are those of the leaf, as in Moments.
    """
    mean, square, count = moments
    beta1, beta2 = local.betas
    count += 1 if mask is None else mask.bool()
    if not count.dim():  # one count for all entries
        # A script would take numbers that Python computes for constants.
        lr = torch.full((), local.lr, dtype=torch.float64)
    if local.weight_decay and local.optimizer == "adamw":
        shrink = 1 - lr * local.weight_decay
        leaf.mul_(shrink if mask is None else torch.where(mask.bool(), shrink, 1.0))
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if not count.dim():
        steps = count.double()
        denominator = (square.sqrt() / (1 - beta2**steps).sqrt()).add_(local.eps)
        leaf.sub_(mean * (lr / (1 - beta1**steps)) / denominator)
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


def as_float_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as ones and zeros, laid out as `like`; see `zero_outside_mask`.

    Leaves of other types than float32 keep their mask.
    """
    if like.dtype != torch.float32:
        return mask
    return torch.empty_like(like).copy_(mask)


def zero_outside_mask(mask: Tensor | None, grad: Tensor) -> Tensor:
    """Return a gradient with zeros where the mask is False, or 0."""
    if mask is None:
        return grad
    if mask.dtype == torch.bool:
        return torch.where(mask, grad, 0.0)
    # ReLU's backward pass gives the same, also for infinities, and takes on a CPU a twentieth of
    # torch.where's time.
    masked_grad = torch.empty_like(grad)  # sums go by the layout, which would else be the mask's
    return torch.ops.aten.threshold_backward(grad, mask, 0, grad_input=masked_grad)


@contextmanager
def masked_moments(moments: Moments, masks: list[Tensor | None], local: Local) -> Iterator[None]:
    """Keep the optimizer's state zero where a mask is False while a phase lasts.

    Afterwards the entries outside the mask are put back as they were.
    """
    masked_buffers: list[tuple[Tensor, Tensor]] = []
    if local.momentum or local.optimizer != "sgd":
        for tensors in (moments.mean, moments.square):
            for buffer, mask in zip(tensors.values(), masks, strict=bool(tensors)):
                if mask is not None:
                    masked_buffers.append((buffer, mask))
    outside = [torch.where(mask, 0.0, buffer) for buffer, mask in masked_buffers]
    for buffer, mask in masked_buffers:
        buffer.copy_(torch.where(mask, buffer, 0.0))
    yield
    for (buffer, _), values in zip(masked_buffers, outside, strict=True):
        buffer.add_(values)  # one of the two is zero
