"""A generator of features, and the step of Adam by which a server trains it (FedGen,
arXiv:2105.10056).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.layers import init_linear

BETAS, LEAST = (0.9, 0.999), 1e-8
"""Of Adam, as torch has them."""


def init_generator(noise: int, hidden: int, head: Tensor, draw: torch.Generator) -> Tree:
    """Return a linear map of noise and label, batch normalisation, ReLU and a linear map to
    features for a head.

    head: its weight `[classes, features]`. learned: what is trained; moved: batch normalisation's
    statistics.
    """
    classes, size = head.shape
    first, last = init_linear(noise + classes, hidden, draw), init_linear(hidden, size, draw)
    norm = {"weight": torch.ones(hidden), "bias": torch.zeros(hidden)}
    moved = {"mean": torch.zeros(hidden), "variance": torch.ones(hidden)}
    return tree.to(
        {"learned": {"first": first, "norm": norm, "last": last}, "moved": moved}, head.device
    )


def generate_features(generator: Tree, y: Tensor, noise: Tensor) -> Tensor:
    """Return features `[batch, size]` of labels `[batch]` and noise `[batch, noise]`, in evaluation
    mode, detached.
    """
    learned, moved = generator["learned"], generator["moved"]
    z = (_hidden_layer(learned, y, noise) - moved["mean"]) * torch.rsqrt(moved["variance"] + 1e-5)
    return _output_layer(learned, z).detach()


def generate_in_training(
    learned: Tree, moved: Tree, y: Tensor, noise: Tensor
) -> tuple[Tensor, Tree]:
    """Return features in training mode, normalised over the batch, and the statistics as they are
    after it.
    """
    z = _hidden_layer(learned, y, noise)
    variance, mean = torch.var_mean(z, 0, correction=0)
    seen = {"mean": mean, "variance": variance * len(z) / (len(z) - 1)}
    moved = tree.map(lambda old, new: 0.9 * old + 0.1 * new.detach(), moved, seen)
    return _output_layer(learned, (z - mean) * torch.rsqrt(variance + 1e-5)), moved


def _hidden_layer(learned: Tree, y: Tensor, noise: Tensor) -> Tensor:
    classes = learned["first"]["weight"].shape[1] - noise.shape[1]
    label = (y[:, None] == torch.arange(classes, device=y.device)).to(noise)
    return F.linear(torch.cat([noise, label], 1), **learned["first"])


def _output_layer(learned: Tree, z: Tensor) -> Tensor:
    return F.linear(
        (z * learned["norm"]["weight"] + learned["norm"]["bias"]).relu(), **learned["last"]
    )


def draw_labels(shares: Tensor, random: Tensor) -> Tensor:
    """Return a label for each uniform number, by the labels' shares `[classes]`, of whatever sum."""
    below = shares.cumsum(0) <= random[:, None] * shares.sum()
    return below.sum(1).clamp(max=len(shares) - 1)


def diversity_loss(z: Tensor, noise: Tensor) -> Tensor:
    """Return exp(-mean over pairs of the features' distance times the noise's): 1 where noise
    changes nothing.
    """
    apart = (z[:, None] - z).abs().mean(2) * (noise[:, None] - noise).square().mean(2)
    return torch.exp(-apart.mean())


def init_adam(learned: Tree) -> Tree:
    """Return what Adam remembers before its first step."""
    zeros = tree.full_like(learned, 0.0)
    return {"first": zeros, "second": zeros, "steps": tree.leaves(learned)[0].new_zeros(())}


def adam_step(
    learned: Tree, grads: Tree, memory: Tree, lr: Tensor, weight_decay: float
) -> tuple[Tree, Tree]:
    """Take a step of Adam with weight decay in the gradient, as torch.optim.Adam does."""
    one, two = BETAS
    grads = tree.map(lambda g, p: g + weight_decay * p, grads, learned)
    first = tree.map(lambda m, g: one * m + (1 - one) * g, memory["first"], grads)
    second = tree.map(lambda v, g: two * v + (1 - two) * g.square(), memory["second"], grads)
    steps = memory["steps"] + 1
    rate, scale = lr / (1 - one**steps), (1 - two**steps).sqrt()
    moved = tree.map(
        lambda p, m, v: p - rate * m / (v.sqrt() / scale + LEAST), learned, first, second
    )
    return moved, {"first": first, "second": second, "steps": steps}
