"""FLOPs of local training, counted from the network and a client's phases: nothing is timed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedpfl.data.federation import Federation
from fedpfl.engine.training.jobs import TrainJob, phase_structure
from fedpfl.engine.training.minibatches import count_samples
from fedpfl.engine.training.step import PureStep, StepState
from fedpfl.engine.training.train_plan import find_trainable_leaves, with_epoch_numbers
from fedpfl.ground import tree
from fedpfl.ground.seeding import restored_process
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Phase
from fedpfl.models import Bound, Net

_uses_of_net: weakref.WeakKeyDictionary[Net, dict[str, int]] = weakref.WeakKeyDictionary()
"""By network and weight, at how many places of a sample the weight is used."""
_step_flops_of_net: weakref.WeakKeyDictionary[Net, list[tuple[Any, float]]] = (
    weakref.WeakKeyDictionary()
)
"""By network, the FLOPs of a step per sample, for each kind of step."""


class FlopMeter(TorchDispatchMode):
    """Count the FLOPs of matrix products and convolutions, backward ones too, while entered.

    A multiplication and an addition are two. What else there is, such as activations, is not
    counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and count its FLOPs."""
        result = func(*args, **(kwargs or {}))
        count_flops = flop_registry.get(func._overloadpacket)
        if count_flops:
            self.total += count_flops(*args, **(kwargs or {}), out_val=result)
        return result


def count_training_flops(net: Bound, job: TrainJob) -> float:
    """Count the FLOPs of a client's training: forward, and backward as far as anything moves.

    A step is counted as the method makes it, times the part that element-wise masks leave of it
    (`trainable_share`).
    """
    ((federation, client),) = job.rows
    train_samples = int(federation.train_sizes[client])
    local = job.plan.local
    total = 0.0
    for phase, epochs in with_epoch_numbers(job.plan.phases):
        samples = count_samples(phase, epochs, local.batch_size, train_samples, local.steps)
        share = trainable_share(net.net, phase, job.start, federation) if samples else 0.0
        if share:
            trainable = find_trainable_leaves(phase, job.start)
            step = PureStep(net.net, job, phase, trainable, local, nullcontext)
            total += samples * share * _find_step_flops(step)
    return total


def trainable_share(net: Net, phase: Phase, start: Tree, federation: Federation) -> float:
    """Return the share of FLOPs that a phase's element-wise masks leave.

    Of a layer's weights those that move take part in the gradient. Forward, and in the gradient at
    the layer's inputs, so do those that hold still and are not zero, as FedSPU's frozen ones: one
    that is zero and never moves computes nothing, as outside a sub-model.
    """
    trainable = find_trainable_leaves(phase, start)
    masks = dict(zip(trainable.indices, trainable.masks, strict=True))
    if all(mask is None for mask in trainable.masks):
        return float(bool(masks))
    if not any(mask is None or bool(mask.any()) for mask in trainable.masks):
        return 0.0
    if net not in _uses_of_net:
        _uses_of_net[net] = _count_uses(net, federation)
    masked_flops = full_flops = 0
    has_trainable_before = False  # gradients then pass on to an earlier layer
    for i, (name, leaf) in enumerate(tree.items(start)):
        uses = _uses_of_leaf(_uses_of_net[net], name)
        is_trainable = i in masks
        if uses and leaf.dim() > 1:
            mask = masks.get(i)
            if mask is None:
                mask = torch.full_like(leaf, is_trainable, dtype=torch.bool)
            active = int(((leaf != 0) | mask).sum())
            masked_flops += uses * ((1 + has_trainable_before) * active + int(mask.sum()))
            full_flops += uses * leaf.numel() * (1 + has_trainable_before + is_trainable)
        has_trainable_before |= is_trainable
    return masked_flops / full_flops if full_flops else 1.0


def _uses_of_leaf(uses: dict[str, int], name: str) -> int:
    """Count the uses of a leaf by a sample, 0 if it is no weight."""
    for weight, count in uses.items():
        # A trained tree may hold several models, each under its own name.
        if f".{name}".endswith(f".{weight}"):
            return count
    return 0


def _count_uses(net: Net, federation: Federation) -> dict[str, int]:
    """Return at how many places of a sample each weight is used, by name.

    Embeddings are left out: looking a row up is no FLOP.
    """
    module = net.copy_module().to("cpu").eval()
    uses: dict[str, int] = {}

    def count(prefix: str, layer: nn.Module, _: Any, output: Any) -> None:
        if not isinstance(output, Tensor):  # a recurrent layer also returns its states
            return
        is_convolution = isinstance(layer, nn.modules.conv._ConvNd)
        channels = output.shape[1] if is_convolution else output.shape[-1]
        for key in layer._parameters:
            name = f"{prefix}.{key}" if prefix else key
            uses[name] = uses.get(name, 0) + output.numel() // channels

    for name, layer in module.named_modules():
        if layer._parameters.get("weight") is not None and not isinstance(layer, nn.Embedding):
            layer.register_forward_hook(partial(count, name))
    with torch.no_grad(), _without_draws(net):
        module(_zero_samples(federation, 1))
    return uses


def _zero_samples(federation: Federation, count: int) -> Tensor:
    """Return samples of the form in which steps see them."""
    dtype = torch.float32 if federation.x.dtype == torch.uint8 else federation.x.dtype
    return torch.zeros((count, *federation.shape), dtype=dtype)


@contextmanager
def _without_draws(net: Net) -> Iterator[None]:
    """Draw nothing from what clients draw from: the first one alone is measured."""
    generator = net.generator
    if generator is None:
        with restored_process():
            yield
        return
    # Threads share the process's generators, and each has one for its client.
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


def _find_step_flops(step: PureStep) -> float:
    """Return the FLOPs of a step per sample, without regard to element-wise masks.

    Counted once for all clients, on a step with samples of zeros; its result is dropped.
    """
    kind = _kind_of_step(step)
    known_flops = _step_flops_of_net.setdefault(step.net, [])
    for known_kind, flops in known_flops:
        if known_kind == kind:
            return flops
    flops = _measure_step(step) / (step.local.batch_size * step.phase.batches)
    known_flops.append((kind, flops))
    return flops


def _kind_of_step(step: PureStep) -> tuple[Any, ...]:
    """Return the key of steps with equal FLOPs."""
    phase = step.phase
    names = [getattr(hook, "__qualname__", repr(hook)) for hook in (phase.loss, phase.step)]
    plain_phase = phase._replace(loss=None, step=None, after_gradient=None, epochs=0)
    return (
        step.job.method,
        names,
        phase_structure(plain_phase),
        step.local.batch_size,
        tree.specs(step.job.start),
        tree.specs(step.job.client),
    )


def _measure_step(step: PureStep) -> int:
    """Make the step, and return its FLOPs."""
    job = step.job
    params = tree.map(lambda leaf: leaf.detach().clone(), job.start)
    leaves = [leaf.requires_grad_() for leaf in step.list_moving(params)]
    state = StepState(params=params, server=job.server, client=job.client, buffers=job.buffers)
    bound = step.net.bind(job.buffers, training=True)
    batch = _make_zero_batch(step)
    # Fused attention is counted on some devices alone; the plain one is matrix products.
    with _without_draws(step.net), FlopMeter() as meter, sdpa_kernel(SDPBackend.MATH):
        if step.phase.step:
            step.take_phase_step(state, bound, [batch] * step.phase.batches)
        else:
            loss, _ = step.compute_loss(state, bound, batch)
            step.net.differentiate_loss(loss, leaves)
    return meter.total


def _make_zero_batch(step: PureStep) -> Batch:
    """Make a minibatch of zeros."""
    size = step.local.batch_size
    federation = step.job.rows[0].federation
    device = federation.x.device
    return Batch(
        x=_zero_samples(federation, size).to(device),
        y=federation.y.new_zeros((size, *federation.y.shape[1:])),
        random=torch.zeros(size, step.job.method.randoms).to(device),
        indices=torch.arange(size).to(device),
    )
