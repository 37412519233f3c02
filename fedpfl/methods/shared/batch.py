"""What a method sees of a client's data: minibatches, and the whole of its training samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.models import Bound


class Batch(NamedTuple):
    """Hold one minibatch of one client: `x` `[batch, *shape]` (images: channels, height, width),
    `y` `[batch]`.

    y: None where labels are not shown, in the evaluation's `predict`.
    indices: the samples' numbers among the client's own of their split, `[batch]`; 0 for padding.

    The batched backend pads short batches; `mean`, `sum` and `cross_entropy` leave the padding out,
    so no method looks at `weight`, `[batch]`, which is 0 for padding and 1 for samples (None: no
    padding).
    random: uniform numbers in [0, 1), `[batch, Method.randoms]`: new ones in every step, and in
        `predict` a function of (seed, round, client, split). Numbers for a step are those of its
        first sample. None in a Shard's batches.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    random: Tensor | None = None
    indices: Tensor | None = None

    @property
    def samples(self) -> Tensor:
        """Return 1.0 for each sample and 0.0 for padding, `[batch]`."""
        return torch.ones(len(self.x), device=self.x.device) if self.weight is None else self.weight

    def without_labels(self) -> Batch:
        """Return the samples without their labels."""
        return self._replace(y=None)  # type: ignore[arg-type]

    def split(self, size: int = 256) -> Iterator[Batch]:
        """Give all samples in order, in batches of bounded size."""
        for at in range(0, max(1, len(self.x)), size):
            parts = [None if part is None else part[at : at + size] for part in self]
            yield Batch(*parts)  # type: ignore[arg-type]

    def sum(self, values: Tensor) -> Tensor:
        """Add up `values` `[batch]` over the samples."""
        return values.sum() if self.weight is None else (values * self.weight).sum()

    def mean(self, values: Tensor) -> Tensor:
        """Average `values` `[batch]` over the samples."""
        return (
            values.mean()
            if self.weight is None
            else (values * self.weight).sum() / self.weight.sum()
        )

    def losses(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy of each row of `logits` `[batch, classes]`, `[batch]`."""
        # As F.cross_entropy, without its test for labels to ignore, which under vmap is a fifth of
        # a step's launches.
        return -logits.log_softmax(1).gather(1, self.y[:, None]).squeeze(1)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Average the cross-entropy of `logits` `[batch, classes]` over the samples."""
        return (
            F.cross_entropy(logits, self.y)
            if self.weight is None
            else self.mean(self.losses(logits))
        )


class Data(NamedTuple):
    """Hold some samples of one client: `x` `[samples, *shape]`, `y` `[samples]`."""

    x: Tensor
    y: Tensor

    def rows(self, rows: Tensor) -> Batch:
        """Return samples `rows`, in memory channels last if the images are."""
        x = (
            self.x.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2)
            if self.x.dim() == 4
            else self.x[rows]
        )
        return Batch(x, self.y[rows], indices=rows)

    def chunks(self, size: int = 256, random: Tensor | None = None) -> Iterator[Batch]:
        """Give all samples in order, in batches of bounded size. random: their numbers `[samples,
        ...]`.
        """
        return Batch(
            self.x, self.y, None, random, torch.arange(len(self.x), device=self.x.device)
        ).split(size)


class Shard:
    """Hold a client's training data, which are gathered when they are first looked at.

    order: `order(stream, epoch)` is a permutation of the samples, the one that local training
    draws.
    hold: gathers the client's validation samples, which are none of them.
    """

    def __init__(
        self,
        gather: Callable[[], Data],
        batch_size: int,
        order: Callable[[str, int], Tensor],
        hold: Callable[[], Data] | None = None,
    ):
        self._gather, self.batch_size, self.order, self._hold = gather, batch_size, order, hold

    @cached_property
    def data(self) -> Data:
        """Return all samples."""
        return self._gather()

    @cached_property
    def validation(self) -> Data:
        """Return the validation samples, perhaps none; only a method that `validates` may look at
        them.
        """
        return self._hold() if self._hold else Data(self.data.x[:0], self.data.y[:0])

    def features(self, net: Bound, params: Tree) -> Tensor:
        """Return the head's inputs for all samples, `[samples, features]`, without gradients; `net`
        as it is bound.
        """
        with torch.no_grad():
            return torch.cat([net.features(params, batch.x)[1] for batch in self.data.chunks()])

    def batches(self, stream: str, epoch: int, share: float = 1.0) -> Iterator[Batch]:
        """Give minibatches of an epoch's first `share` of samples; a last partial one is kept, a
        lone sample not.
        """
        order = self.order(stream, epoch)
        for rows in order[: int(share * len(order))].split(self.batch_size):
            if len(rows) > 1:
                yield self.data.rows(tree.send(rows, self.data.y.device))
