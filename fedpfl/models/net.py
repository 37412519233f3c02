"""A network as a pure function of its parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.models.norm import BatchNorm2d
from fedpfl.models.split import Parts, parts


class Net:
    """A module without values of its own but the frozen ones: `net.bind(buffers)(params, x)`.

    One Net serves one thread, because a functional call borrows the module for its duration; `copy()` makes more.
    frozen: parameters that ask for no gradient. They stay in the module, one for all clients and threads, and are in no
    tree that a method, a store or a checkpoint sees.
    facts: of Parts, what a module does not tell.
    """

    def __init__(self, module: nn.Module, **facts: Any):
        self.module, self._facts = module, facts
        named = dict(module.named_parameters())
        self.params: Tree = {name: p.detach().clone() for name, p in named.items() if p.requires_grad}
        self.frozen: Tree = {name: p.detach() for name, p in named.items() if not p.requires_grad}
        self.buffers: Tree = {name: b.detach().clone() for name, b in module.named_buffers()}
        self.parts: Parts = parts(module, statistics=self.buffers, **facts)
        self.head: nn.Module = module.get_submodule(self.parts.head[0].rpartition(".")[0])
        self.norms = [m for m in module.modules() if isinstance(m, BatchNorm2d)]
        self.slots: list[tuple[dict[str, Any], str, str]] = [
            (kind, name, f"{prefix}.{name}" if prefix else name)
            for prefix, part in module.named_modules()
            for kind in (part._parameters, part._buffers)
            for name, value in kind.items()
            if value is not None and (kind is part._buffers or value.requires_grad)
        ]
        """Where the module keeps each parameter that trains, and buffer: a dict, its key there, the full name."""

    def told(self, **facts: Any) -> Net:
        """Return the same Net, which knows more of a run."""
        return Net(self.module, **{**self._facts, **facts})

    def copy(self) -> Net:
        """Return an independent Net for another thread."""
        shared = {id(p): p for p in self.module.parameters() if not p.requires_grad}
        return Net(copy.deepcopy(self.module, shared), **self._facts)

    def to(self, device: torch.device) -> Net:
        """Move what is frozen to a device, and return the Net."""
        for leaf in self.module.parameters():
            if not leaf.requires_grad:
                leaf.data = leaf.data.to(device)
        return Net(self.module, **self._facts)

    def bind(self, buffers: dict[str, Tree], training: bool = False, weight: Tensor | None = None) -> Bound:
        """Attach buffers (one tree per role) and, for padded batches, the samples' weights `[batch]`."""
        return Bound(self, buffers, training, weight)


class Bound:
    """A Net with its buffers attached; `buffers` holds their latest values after calls in training mode."""

    def __init__(self, net: Net, buffers: dict[str, Tree], training: bool, weight: Tensor | None):
        self.net, self.buffers, self.training, self.weight = net, buffers, training, weight

    def still(self, buffers: dict[str, Tree] | None = None) -> Bound:
        """Return the same in evaluation mode, with other `buffers` if given: statistics are used and do not move."""
        return Bound(self.net, self.buffers if buffers is None else buffers, False, self.weight)

    def aside(self, params: Tree, x: Tensor, role: str = "main") -> Tensor:
        """Return logits as a call does, but leave the statistics as they are."""
        kept = self.buffers
        logits = self(params, x, role)
        self.buffers = kept
        return logits

    def gradient(
        self, objective: Callable[[Bound, Tree, Any], Tensor], params: Tree, batch: Any
    ) -> tuple[Tree, Tensor]:
        """Return the gradient of `objective(net, params, batch)` and its value; statistics move as in training."""

        def inner(params: Tree) -> tuple[Tensor, dict[str, Tree]]:
            bound = Bound(self.net, self.buffers, self.training, batch.weight)
            return objective(bound, params, batch), bound.buffers

        grads, (value, self.buffers) = grad_and_value(inner, has_aux=True)(params)
        return grads, value

    def features(self, params: Tree, x: Tensor, role: str = "main") -> tuple[Tensor, Tensor]:
        """Return logits as by a call, and the head's input `[batch, features]`, float32."""
        seen: list[Tensor] = []
        hook = self.net.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self(params, x, role)
        finally:
            hook.remove()
        return logits, seen[0].float()

    def __call__(self, params: Tree, x: Tensor, role: str = "main") -> Tensor:
        """Return float32 logits `[batch, classes]` of the network with `params`; `role` picks a model's buffers."""
        net = self.net
        if net.module.training != self.training:
            net.module.train(self.training)
        for norm in net.norms:
            norm.sample_weight = self.weight
        buffers = self.buffers.get(role, {})
        if buffers and self.training:
            buffers = tree.map(lambda leaf: leaf.clone(), buffers)  # updated in place by the module, never the caller's
            self.buffers = {**self.buffers, role: buffers}
        # What torch.func.functional_call does, without its checks, which cost a few per cent of a step.
        values = {**params, **buffers}
        before = [place[name] for place, name, _ in net.slots]
        try:
            for place, name, full_name in net.slots:
                place[name] = values[full_name]
            return net.module(x).float()
        finally:
            for (place, name, _), value in zip(net.slots, before, strict=True):
                place[name] = value
            for norm in net.norms:
                norm.sample_weight = None
