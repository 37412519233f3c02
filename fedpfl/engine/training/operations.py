"""Operations of local training, counted from the network and a client's phases: nobody measures
time.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedpfl.data.federation import Federation
from fedpfl.engine.training.jobs import ClientRow, phase_structure
from fedpfl.engine.training.sgd import (
    TrainPlan,
    count_samples,
    find_trainable_leaves,
    with_epoch_numbers,
)
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Method, Phase
from fedpfl.models import Bound, Net

_places: weakref.WeakKeyDictionary[Net, dict[str, int]] = weakref.WeakKeyDictionary()
_steps: weakref.WeakKeyDictionary[Net, list[tuple[Any, float]]] = weakref.WeakKeyDictionary()


class FlopMeter(TorchDispatchMode):
    """Count the operations of matrix products and convolutions, backward ones too; `total` grows
    while it is entered.

    A multiplication and an addition are two operations. What else there is, such as activations, is
    not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and count it."""
        answer = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=answer)
        return answer


def count_training_flops(
    method: Method,
    net: Bound,
    plan: TrainPlan,
    server: Tree,
    client: dict[str, Tree],
    start: Tree,
    row: ClientRow,
) -> float:
    """Count what a client's training by `plan` takes: forward, and backward as far as anything
    moves.

    A step is counted as the method makes it, times the part that element-wise masks leave of it
    (`share`).
    """
    federation, number = row
    total, samples = 0.0, int(federation.train_sizes[number])
    for phase, epochs in with_epoch_numbers(plan.phases):
        seen = count_samples(phase, epochs, plan.local.batch_size, samples, plan.local.steps)
        if seen and (part := trainable_share(net.net, phase, start, federation)):
            total += (
                seen
                * part
                * _per_sample(method, net, plan, phase, server, client, start, federation)
            )
    return total


def trainable_share(net: Net, phase: Phase, start: Tree, federation: Federation) -> float:
    """Return the part that a phase's element-wise masks leave of its operations: 1.0 without any,
    0.0 if none moves.

    Of a layer's weights those that move take part in the gradient; forward, and in the gradient at
    the layer's inputs, so do those that hold still and are not zero, as FedSPU's frozen ones: one
    that is zero and never moves computes nothing, as outside a sub-model.
    """
    moves = find_trainable_leaves(phase, start)
    masks = dict(zip(moves.moving, moves.masks, strict=True))
    if all(mask is None for mask in moves.masks):
        return float(bool(masks))
    if not any(mask is None or bool(mask.any()) for mask in moves.masks):
        return 0.0
    taken = whole = 0
    before = False  # whether anything moves in an earlier layer, so that gradients pass on to it
    if net not in _places:
        _places[net] = _used(net, federation)
    for i, (name, leaf) in enumerate(tree.items(start)):
        at = next((at for key, at in _places[net].items() if f".{name}".endswith(f".{key}")), 0)
        if at and leaf.dim() > 1:
            mask = masks.get(i)
            moving = torch.full_like(leaf, i in masks, dtype=torch.bool) if mask is None else mask
            moved, used = int(moving.sum()), int(((leaf != 0) | moving).sum())
            taken += at * ((1 + before) * used + moved)
            whole += at * leaf.numel() * (1 + before + (i in masks))
        before |= i in masks
    return taken / whole if whole else 1.0


def _used(net: Net, federation: Federation) -> dict[str, int]:
    """Return at how many places of a sample each weight is used, by name; looking a row up is no
    operation.
    """
    module, found = net.copy_module().to("cpu").eval(), dict[str, int]()

    def seen(prefix: str, layer: nn.Module, _: Any, made: Tensor) -> None:
        width = made.shape[1] if isinstance(layer, nn.modules.conv._ConvNd) else made.shape[-1]
        names = (f"{prefix}.{key}" if prefix else key for key in layer._parameters)
        found.update(dict.fromkeys(names, made.numel() // width))

    for name, layer in module.named_modules():
        if layer._parameters.get("weight") is not None and not isinstance(layer, nn.Embedding):
            layer.register_forward_hook(partial(seen, name))
    with torch.no_grad():
        module(_zeros(federation, 1))
    return found


def _zeros(federation: Federation, count: int) -> Tensor:
    """Return samples of the form in which steps see them."""
    dtype = torch.float32 if federation.x.dtype == torch.uint8 else federation.x.dtype
    return torch.zeros((count, *federation.shape), dtype=dtype)


def _per_sample(
    method: Method,
    net: Bound,
    plan: TrainPlan,
    phase: Phase,
    server: Tree,
    client: dict[str, Tree],
    start: Tree,
    federation: Federation,
) -> float:
    """Count a step for each of its samples, whatever element-wise masks there are; once for all
    clients.

    A step is taken on samples of zeros, and what comes of it is dropped.
    """
    functions = [getattr(own, "__qualname__", repr(own)) for own in (phase.loss, phase.step)]
    bare = phase_structure(phase._replace(loss=None, step=None, after_gradient=None, epochs=0))
    kind = method, functions, bare, plan.local.batch_size, tree.specs(start), tree.specs(client)
    known = _steps.setdefault(net.net, [])
    if found := [count for own, count in known if own == kind]:
        return found[0]
    size, device = plan.local.batch_size, federation.x.device
    leaves = tree.leaves(params := tree.map(lambda leaf: leaf.detach().clone(), start))
    y, random = torch.zeros(size, dtype=torch.int64), torch.zeros(size, method.randoms)
    parts = _zeros(federation, size), y, None, random, torch.arange(size)
    batch = Batch(*(part if part is None else part.to(device) for part in parts))  # type: ignore[arg-type]
    moving = [leaves[i].requires_grad_() for i in find_trainable_leaves(phase, start).moving]
    with FlopMeter() as meter, sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices=[]):
        if phase.step:
            with torch.no_grad():
                phase.step(
                    server,
                    client,
                    net,
                    params,
                    (batch,) * phase.batches if phase.batches > 1 else batch,
                )
        else:
            loss = (phase.loss or plan.loss)(server, client, net, params, batch)
            torch.autograd.grad(
                loss[0] if isinstance(loss, tuple) else loss, moving, materialize_grads=True
            )
    known.append((kind, meter.total / (size * phase.batches)))
    return known[-1][1]
