"""A client's data as a method sees them: minibatches, and all training samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.survival import partial_losses
from fedpfl.ground.tasks import (
    CLASSIFICATION,
    MULTILABEL,
    NEXT_TOKEN,
    REGRESSION,
    SURVIVAL,
    find_task,
)
from fedpfl.ground.tree import Tree
from fedpfl.models import Bound

LONGEST_CHUNK = 256
"""Samples of a forward pass, at most, so that activations fit into memory."""


class Batch(NamedTuple):
    """One minibatch of one client.

    The batched backend pads short batches. `mean`, `sum` and `loss` leave the padding out,
    so no method needs to look at `weight`.

    Attributes:
        x: inputs `[batch, *shape]` (images: channels, height, width).
        y: labels, in the form of their task (`ground.tasks`): classes `[batch]`, bools
            `[batch, labels]`, floats `[batch]`, `[batch, 2]` in survival, or each token's next one
            `[batch, length]`; None where they are not shown, in the
            evaluation's `predict`.
        weight: 1 for samples and 0 for padding, `[batch]`; None: no padding.
        random: uniform numbers in [0, 1), `[batch, Method.randoms]`: new ones in every step, and in
            `predict` a function of (seed, round, client, split). Numbers for a step are those of
            its first sample. None in a Shard's batches.
        indices: the samples' numbers among the client's own of their split, `[batch]`; 0 for
            padding.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    random: Tensor | None = None
    indices: Tensor | None = None

    @property
    def samples(self) -> Tensor:
        """Return 1.0 for each sample and 0.0 for padding, `[batch]`."""
        if self.weight is None:
            return torch.ones(len(self.x), device=self.x.device)
        return self.weight

    def without_labels(self) -> Batch:
        """Return the samples without their labels."""
        return self._replace(y=None)  # type: ignore[arg-type]

    def split(self, size: int = LONGEST_CHUNK) -> Iterator[Batch]:
        """Give all samples in order, in batches of bounded size."""
        if 0 < len(self.x) <= size:
            yield self
            return
        present = {name: field for name, field in self._asdict().items() if field is not None}
        # No samples are one empty batch, so that sums over batches have a term.
        for start in range(0, max(1, len(self.x)), size):
            chunk = slice(start, start + size)
            chunks = {name: field[chunk] for name, field in present.items()}
            yield self._replace(**chunks)

    def sum(self, values: Tensor) -> Tensor:
        """Add up `values` `[batch]` over the samples."""
        if self.weight is None:
            return values.sum()
        return (values * self.weight).sum()

    def mean(self, values: Tensor) -> Tensor:
        """Average `values` `[batch]` over the samples."""
        if self.weight is None:
            return values.mean()
        return (values * self.weight).sum() / self.weight.sum()

    def losses(self, outputs: Tensor) -> Tensor:
        """Return the loss of the task for each row of a network's outputs, `[batch]`.

        That is the cross-entropy of classes, the binary cross-entropy averaged over labels, the
        squared error, or Cox's partial likelihood among the samples of the batch. That of next
        tokens is a row's sum over the mean number of tokens in a row, so that the mean over rows is
        the mean over the batch's tokens.
        """
        task = find_task(self.y)
        # In float32 also under autocast.
        if task is MULTILABEL:
            errors = F.binary_cross_entropy_with_logits(
                outputs.float(), self.y.float(), reduction="none"
            )
            return errors.mean(1)
        if task is REGRESSION:
            return (outputs.float().squeeze(1) - self.y).square()
        if task is SURVIVAL:
            # An evaluation may show more rows of x than labels.
            weight = torch.ones_like(self.y[:, 0]) if self.weight is None else self.weight
            return partial_losses(outputs.float().squeeze(1), self.y, weight)
        if task is NEXT_TOKEN:
            tokens_in_a_row = self.mean((self.y >= 0).sum(1).float())
            return self._sum_token_losses(outputs) / tokens_in_a_row.clamp(min=1e-6)
        # As F.cross_entropy, without its test for labels to ignore, which under vmap is a fifth of
        # a step's launches.
        log_probabilities = outputs.log_softmax(1)
        return -log_probabilities.gather(1, self.y[:, None]).squeeze(1)

    def loss(self, outputs: Tensor) -> Tensor:
        """Average the loss of the task over the samples; see `losses`."""
        if self.weight is None and find_task(self.y) is CLASSIFICATION:
            return F.cross_entropy(outputs, self.y)
        return self.mean(self.losses(outputs))

    def _sum_token_losses(self, outputs: Tensor) -> Tensor:
        """Add up the cross-entropy of each row's tokens, `[batch]`."""
        log_probabilities = outputs.log_softmax(-1)
        losses = -log_probabilities.gather(-1, self.y.clamp(min=0)[..., None]).squeeze(-1)
        return (losses * (self.y >= 0)).sum(1)

    def summed_loss(self, outputs: Tensor) -> Tensor:
        """Add up the loss of the task over the samples, or tokens; see `losses`."""
        task = find_task(self.y)
        if self.weight is None and task is CLASSIFICATION:
            return F.cross_entropy(outputs, self.y, reduction="sum")
        if task is NEXT_TOKEN:
            return self.sum(self._sum_token_losses(outputs))
        return self.sum(self.losses(outputs))

    def find_hits(self, outputs: Tensor) -> Tensor:
        """Compare the likeliest class with the sample's, bool `[batch]`; False in other tasks.

        Of next tokens it counts those that are right.
        """
        task = find_task(self.y)
        if task is CLASSIFICATION:
            return outputs.argmax(1) == self.y
        if task is NEXT_TOKEN:
            return (outputs.argmax(-1) == self.y).sum(1)
        return torch.zeros(
            len(outputs),
            dtype=torch.bool,
            device=outputs.device,
        )


class Data(NamedTuple):
    """Some samples of one client.

    Attributes:
        x: inputs `[samples, *shape]`.
        y: labels `[samples]`, or `[samples, labels]`.
    """

    x: Tensor
    y: Tensor

    def rows(self, rows: Tensor) -> Batch:
        """Return the samples with these numbers as a batch."""
        if self.x.dim() == 4 and not self.x.is_contiguous():
            # Selecting in this order leaves images channels last in memory, as convolutions want.
            x = self.x.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
        else:
            x = self.x.index_select(0, rows)
        return Batch(x, self.y.index_select(0, rows), indices=rows)

    def chunks(self, size: int = LONGEST_CHUNK, random: Tensor | None = None) -> Iterator[Batch]:
        """Give all samples in order, in batches of bounded size.

        Args:
            size: the most samples of a batch.
            random: the samples' uniform numbers `[samples, ...]`.
        """
        indices = torch.arange(len(self.x), device=self.x.device)
        everything = Batch(self.x, self.y, random=random, indices=indices)
        return everything.split(size)


class Shard:
    """A client's training data, gathered when they are first looked at.

    Args:
        gather: returns the client's training samples.
        batch_size: samples in a minibatch of local training.
        order: `order(stream, epoch)` is a permutation of the samples: the one that local training
            draws.
        gather_validation: returns the client's validation samples, which are no training
            samples.
    """

    def __init__(
        self,
        gather: Callable[[], Data],
        batch_size: int,
        order: Callable[[str, int], Tensor],
        gather_validation: Callable[[], Data] | None = None,
    ):
        self.batch_size = batch_size
        self.order = order
        self._gather = gather
        self._gather_validation = gather_validation

    @cached_property
    def data(self) -> Data:
        """Return all training samples."""
        return self._gather()

    @cached_property
    def validation(self) -> Data:
        """Return the validation samples, perhaps none.

        Only a method that `validates` may look at them.
        """
        if self._gather_validation is None:
            return Data(self.data.x[:0], self.data.y[:0])
        return self._gather_validation()

    def features(self, net: Bound, params: Tree) -> Tensor:
        """Return the head's inputs for all samples, `[samples, features]`, without gradients.

        `net` computes them in the mode in which it is bound.
        """
        with torch.no_grad():
            features = [net.features(params, batch.x)[1] for batch in self.data.chunks()]
            return torch.cat(features)

    def batches(self, stream: str, epoch: int, share: float = 1.0) -> Iterator[Batch]:
        """Give the minibatches of an epoch's first `share` of samples.

        A last partial minibatch is kept; one of a single sample is not.
        """
        order = self.order(stream, epoch)
        count = int(share * len(order))
        for rows in order[:count].split(self.batch_size):
            # BatchNorm cannot normalise over a single sample.
            if len(rows) > 1:
                yield self.data.rows(tree.send(rows, self.data.y.device))
