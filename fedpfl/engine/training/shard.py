"""A client's data, gathered and normalised."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.methods import Data, Shard


def gather_data(federation: Federation, indices: Tensor) -> Data:
    """Samples `indices`, laid out."""
    indices = tree.send(indices, federation.x.device)
    return Data(normalize_samples(federation, federation.x[indices]), federation.y[indices])


def normalize_samples(federation: Federation, samples: Tensor) -> Tensor:
    """Return samples `[samples, ...]` normalised; images in memory channels last, as convolutions
    like them.
    """
    x = federation.normalize(samples)
    return x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format
    )


def make_shard(federation: Federation, client: int, batch_size: int, draws: Draws) -> Shard:
    """Return a client's training data with its batch orders, and what it holds out; gathered when
    looked at.
    """
    indices = federation.train[client]
    held = federation.validation[client] if federation.validation else indices[:0]
    return Shard(
        lambda: gather_data(federation, indices),
        batch_size,
        lambda stream, epoch: draws.order(client, stream, epoch, len(indices)),
        lambda: gather_data(federation, held),
    )
