"""Per-FedAvg: a model from which one step on a client's data leads far."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Batch, Method, Phase, Shard
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Per-FedAvg (Fallah, Mokhtari and Ozdaglar, NeurIPS 2020, arXiv:2002.07948), with g(w; D) the gradient on D.

    A step takes as many minibatches as it needs: u = w - inner_lr g(w; D), h = g(u; D') and w <- w - outer_lr d, where
    `fo`: d = h,
    `hf`: d = h - inner_lr (g(w + delta h; D'') - g(w - delta h; D'')) / (2 delta), a Hessian-vector product.
    What is left of an epoch is skipped, so a client with fewer than 2 (`hf`: 3) minibatches does not train. All steps
    are plain: local.lr and local.momentum have no part in them, nor has local.weight_decay, except in fine-tuning. The
    mean is uniform. BatchNorm statistics move by D' at u alone.

    The result is the model AFTER adaptation, for all clients alike: with eval.finetune_epochs, the `after` columns,
    from plain gradient steps of size inner_lr; `before` is the meta-model, which is nobody's result. The paper adapts
    by one step: with adapt_steps=1 `before` is that. A round's own columns judge the meta-model, before and after its
    training.

    inner_lr, outer_lr: alpha and beta of the paper, where alpha is 0.01 or 0.001. delta: which it leaves open; 0.001 as
        in a common port.
    adapt_steps: gradient steps on the client's first minibatches before it is judged.
    """

    version: Literal["fo", "hf"] = "fo"
    inner_lr: float = 0.01
    outer_lr: float = 0.001
    delta: float = 0.001
    adapt_steps: int = 0

    def __post_init__(self) -> None:
        self.check(self.version in ("fo", "hf"), "version", "fo or hf")
        self.check(self.inner_lr >= 0, "inner_lr", "0 or more")
        self.check(self.outer_lr >= 0, "outer_lr", "0 or more")
        self.check(self.delta > 0, "delta", "a positive number")
        self.check(self.adapt_steps >= 0, "adapt_steps", "0 or more")

    @property
    def together(self) -> int:  # type: ignore[override]
        """D and D', and D'' for the Hessian-vector product."""
        return 2 if self.version == "fo" else 3

    def step(
        self, net: Bound, params: Tree, batch: tuple[Batch, ...], server: Tree, mine: dict[str, Tree]
    ) -> tuple[Tree, Tensor]:
        """One step of the meta-model; the loss is that of the adapted model on D'."""

        def gradient(params: Tree, batch: Batch) -> tuple[Tree, Tensor]:
            def objective(net: Bound, params: Tree) -> Tensor:
                return self.loss(net, params, batch, server, mine)

            return net.gradient(objective, params, weight=batch.weight)

        statistics = net.buffers
        adapted = _moved(params, gradient(params, batch[0])[0], -self.inner_lr)
        net.buffers = statistics
        direction, loss = gradient(adapted, batch[1])
        statistics = net.buffers
        if self.version == "hf":
            ahead, behind = (gradient(_moved(params, direction, sign * self.delta), batch[2])[0] for sign in (1, -1))
            scale = self.inner_lr / (2 * self.delta)
            direction = tree.map(lambda h, a, b: h - scale * (a - b), direction, ahead, behind)
        net.buffers = statistics
        return _moved(params, direction, -self.outer_lr), loss

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """The uniform mean."""
        return tree.mean(uploads, torch.full_like(weight, 1 / len(weight)))

    def adapt(self, net: Bound, shard: Shard, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """The meta-model after `adapt_steps` plain steps."""
        if not self.adapt_steps:
            return {}
        params = server
        for batch in islice(_minibatches(shard, self.adapt_steps), self.adapt_steps):

            def objective(net: Bound, params: Tree, batch: Batch = batch) -> Tensor:
                return self.loss(net, params, batch, server, mine)

            params = _moved(params, net.gradient(objective, params)[0], -self.inner_lr)
        return {"adapted": params}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The adapted model, if it is adapted before it is judged; else the meta-model."""
        return mine.get("adapted", server)

    def tune(self, params: Tree, parts: Parts, epochs: int) -> list[Phase]:
        """The adaptation: plain gradient descent with the inner step size."""
        return [Phase(epochs, lr=self.inner_lr, momentum=0.0)] if self.inner_lr else []


def _moved(params: Tree, direction: Tree, length: float) -> Tree:
    """`length` times the direction further, rounded as SGD's steps are and in the parameters' memory layout."""
    return tree.map(lambda p, d: p.clone().add_(d, alpha=length), params, direction)


def _minibatches(shard: Shard, count: int) -> Iterator[Batch]:
    """Minibatches of so many epochs, at least one each; none at all where there is none."""
    for epoch in range(count):
        yield from shard.batches("main", epoch)
