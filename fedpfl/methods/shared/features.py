"""A generator of features, and the server's step of Adam that trains it.

Source: Zhu, Hong and Zhou, FedGen, arXiv:2105.10056.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.layers import init_linear

ADAM_BETAS = (0.9, 0.999)  # as torch has them
ADAM_EPS = 1e-8
NORM_EPS = 1e-5


def init_generator(
    noise: int, hidden: int, head_weight: Tensor, generator: torch.Generator
) -> Tree:
    """Return the initial generator of features for a head.

    It is a linear map of noise and label, batch normalisation, ReLU and a linear map.

    Args:
        noise: numbers of noise for each sample.
        hidden: width of the hidden layer.
        head_weight: the head's weight `[classes, features]`.
        generator: draws the initial values.

    Returns:
        learned: the trained entries. moved: the statistics of batch normalisation.
    """
    classes, features = head_weight.shape
    first_layer = init_linear(noise + classes, hidden, generator)
    last_layer = init_linear(hidden, features, generator)
    norm = {"weight": torch.ones(hidden), "bias": torch.zeros(hidden)}
    learned = {"first": first_layer, "norm": norm, "last": last_layer}
    statistics = {"mean": torch.zeros(hidden), "variance": torch.ones(hidden)}
    return tree.as_type_of({"learned": learned, "moved": statistics}, head_weight)


def generate_features(generator: Tree, y: Tensor, noise: Tensor) -> Tensor:
    """Return features `[batch, size]` of labels `[batch]` and noise `[batch, noise]`.

    The generator is in evaluation mode, and the features are detached.
    """
    learned = generator["learned"]
    statistics = generator["moved"]
    hidden = _hidden_layer(learned, y, noise)
    inverse_deviation = torch.rsqrt(statistics["variance"] + NORM_EPS)
    normalised = (hidden - statistics["mean"]) * inverse_deviation
    return _output_layer(learned, normalised).detach()


def generate_in_training(
    learned: Tree, statistics: Tree, y: Tensor, noise: Tensor
) -> tuple[Tensor, Tree]:
    """Return features in training mode, and the statistics after this batch.

    Features are normalised over the batch.
    """
    hidden = _hidden_layer(learned, y, noise)
    # As torch's BatchNorm: this batch's biased variance normalises, the unbiased one is kept.
    variance, mean = torch.var_mean(hidden, 0, correction=0)
    unbiased = variance * len(hidden) / (len(hidden) - 1)
    batch_statistics = {"mean": mean, "variance": unbiased}
    statistics = tree.map(
        lambda old, new: 0.9 * old + 0.1 * new.detach(), statistics, batch_statistics
    )
    normalised = (hidden - mean) * torch.rsqrt(variance + NORM_EPS)
    return _output_layer(learned, normalised), statistics


def _hidden_layer(learned: Tree, y: Tensor, noise: Tensor) -> Tensor:
    """Return the first linear map of noise and one-hot labels, before normalisation."""
    weight = learned["first"]["weight"]
    classes = weight.shape[1] - noise.shape[1]
    # Not F.one_hot, which looks at the values, and so does not go with vmap.
    one_hot = y[:, None] == torch.arange(classes, device=y.device)
    inputs = torch.cat([noise.to(weight), one_hot.to(weight)], 1)
    return F.linear(inputs, **learned["first"])


def _output_layer(learned: Tree, normalised: Tensor) -> Tensor:
    """Return the features: scale and shift, ReLU and the last linear map."""
    norm = learned["norm"]
    activations = (normalised * norm["weight"] + norm["bias"]).relu()
    return F.linear(activations, **learned["last"])


def draw_labels(shares: Tensor, random: Tensor) -> Tensor:
    """Return a label for each uniform number.

    shares: how often labels are drawn, `[classes]`, of any sum.
    """
    # The inverse of the cumulative distribution; rounding could lead past the last class.
    thresholds = shares.cumsum(0)
    is_below = thresholds <= random[:, None] * shares.sum()
    return is_below.sum(1).clamp(max=len(shares) - 1)


def diversity_loss(features: Tensor, noise: Tensor) -> Tensor:
    """Return exp(-mean over pairs of the features' distance times the noise's).

    It is 1 where noise changes nothing.
    """
    feature_distance = (features[:, None] - features).abs().mean(2)
    noise_distance = (noise[:, None] - noise).square().mean(2)
    return torch.exp(-(feature_distance * noise_distance).mean())


def init_adam(learned: Tree) -> Tree:
    """Return Adam's state before its first step."""
    zeros = tree.full_like(learned, 0.0)
    return {
        "first": zeros,
        "second": zeros,
        "steps": tree.leaves(learned)[0].new_zeros(()),
    }


def adam_step(
    learned: Tree, grads: Tree, state: Tree, lr: Tensor, weight_decay: float
) -> tuple[Tree, Tree]:
    """Take a step of Adam with weight decay in the gradient, as torch.optim.Adam does."""
    beta1, beta2 = ADAM_BETAS
    grads = tree.map(lambda g, p: g + weight_decay * p, grads, learned)
    mean = tree.map(
        lambda m, g: beta1 * m + (1 - beta1) * g,
        state["first"],
        grads,
    )
    square = tree.map(
        lambda v, g: beta2 * v + (1 - beta2) * g.square(),
        state["second"],
        grads,
    )
    steps = state["steps"] + 1
    # Both moments began at 0, which these factors correct.
    step_size = lr / (1 - beta1**steps)
    scale = (1 - beta2**steps).sqrt()

    def update(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return p - step_size * m / (v.sqrt() / scale + ADAM_EPS)

    learned = tree.map(update, learned, mean, square)
    return learned, {"first": mean, "second": square, "steps": steps}
