"""Whether a network can be vectorised over clients, as engine=batched does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.seeding import seeded_process
from fedpfl.ground.tree import Tree
from fedpfl.models.net import Net
from fedpfl.models.traits import SEED, made_up_samples

ROWS = 4
"""Samples of the minibatches that are tried; half of them are padding."""


def find_obstacle(net: Net) -> str:
    """Return why the batched backend cannot take a network, in words; "" where it can."""
    if net.common and (obstacle := find_obstacle(net.common)):
        return obstacle
    # Networks of this package are known to be fit.
    if net.traits.trusted or not net.parts.sample:
        return ""
    if net.traits.recomputes:
        return "it recomputes activations in the backward pass (checkpointing)"
    try:
        _differentiate_together(net)
        reads_padding = _reads_others(net, _weigh_padding())
    except FedpflError:
        raise
    except Exception as error:
        return error_text(error, with_class=True)[:160]
    if reads_padding:
        return "it looks at other samples of a minibatch, and short minibatches are padded there"
    if net.traits.crosses_samples and not net.traits.draws:
        return "it looks at other samples of a batch in evaluation, and those are others there"
    return ""


def mixes_samples(net: Net) -> bool:
    """Check whether logits depend on the samples that are trained on beside them."""
    if net.traits.trusted or not net.parts.sample:
        return bool(net.norms)
    return _reads_others(net, weight=None)


def require_vectorized(net: Net) -> None:
    """Raise FedpflError for a network that the batched backend cannot take."""
    if obstacle := find_obstacle(net):
        raise FedpflError(
            f"model={net.name}: engine=batched cannot vectorise this network over clients "
            f"({obstacle}); use engine=loop"
        )


def _weigh_padding() -> Tensor:
    """Return the weights of a minibatch; its second half is padding."""
    weight = torch.ones(ROWS)
    weight[ROWS // 2 :] = 0
    return weight


def _differentiate_together(net: Net) -> None:
    """Take the gradients of two clients together, in training and evaluation."""
    params, buffers = (
        tree.map(lambda leaf: torch.stack([leaf, leaf]), values)
        for values in (net.params, net.buffers)
    )
    x = made_up_samples(net.parts.sample, ROWS).expand(2, ROWS, *net.parts.sample)

    def sum_logits(params: Tree, buffers: Tree, x: Tensor, training: bool) -> Tensor:
        bound = net.bind({"main": buffers} if buffers else {}, training, _weigh_padding())
        return bound(params, x).logsumexp(1).sum()

    for training in (True, False):
        with seeded_process(SEED):
            vmap(grad(sum_logits), in_dims=(0, 0, 0, None), randomness="different")(
                params, buffers, x, training
            )


def _reads_others(net: Net, weight: Tensor | None) -> bool:
    """Check whether logits or buffers of training change with half of the samples.

    Args:
        net: The network.
        weight: Of the samples; None: all count, and logits alone are looked at.
    """
    x = made_up_samples(net.parts.sample, ROWS)
    other_x = made_up_samples(net.parts.sample, ROWS, SEED + 1)
    other_x[: ROWS // 2] = x[: ROWS // 2]
    answers = []
    for samples in (x, other_x):
        bound = net.bind({"main": net.buffers} if net.buffers else {}, True, weight)
        with seeded_process(SEED), torch.no_grad():
            logits = bound(net.params, samples)[: ROWS // 2]
        moved = {} if weight is None else bound.buffers.get("main", {})
        answers.append({"logits": logits, "buffers": moved})
    return not all(map(torch.equal, *map(tree.leaves, answers)))
