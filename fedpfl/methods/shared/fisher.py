"""The diagonal of the empirical Fisher information, from a client's training samples."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import SURVIVAL, find_task
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.batch import Batch, Shard
from fedpfl.models import Bound, squared_gradients


def fisher_scores(
    net: Bound,
    logits: Callable[[Tree, Batch], Tensor],
    scored: Tree,
    shard: Shard,
    by_sample: bool = True,
) -> Tree:
    """Return for each entry of `scored` its empirical Fisher information.

    That is the mean over the samples of (d log p(y | x) / d entry)^2.

    Args:
        net: computes the logits.
        logits: `logits(scored, batch)`.
        scored: the entries of the model that get a score.
        shard: the client's training data.
        by_sample: False: the square of the mean gradient takes the place of the mean square.

    Raises:
        FedpflError: There are no gradients of single samples.
    """
    if by_sample and find_task(shard.data.y) is SURVIVAL:
        raise FedpflError("task=survival compares samples, which have no gradient of their own")
    if by_sample and net.net.traits.recomputes:
        raise FedpflError(
            f"model={net.net.name}: it recomputes activations (checkpointing), which gives no "
            "gradients of single samples; switch that off, or choose another method"
        )

    def summed_loss(scored: Tree, x: Tensor, y: Tensor) -> Tensor:
        batch = Batch(x, y)
        return batch.summed_loss(logits(scored, batch))

    def objective(_: Bound, scored: Tree, batch: Batch) -> Tensor:
        return summed_loss(scored, batch.x, batch.y)

    # ---- Step 1: the sum over all samples.
    total = None
    for batch in shard.data.chunks():
        if by_sample:
            part = squared_gradients(
                net,
                summed_loss,
                scored,
                batch.x,
                batch.y,
                batch.samples,
            )
        else:
            part, _ = net.gradient(objective, scored, batch)
        total = part if total is None else tree.map(torch.add, total, part)

    # ---- Step 2: its mean.
    samples = shard.data.y.new_full(
        (),
        len(shard.data.y),
        dtype=torch.float32,
    )
    mean = tree.map(lambda leaf: leaf / samples, total)
    if by_sample:
        return mean  # of squares already
    return tree.map(torch.square, mean)
