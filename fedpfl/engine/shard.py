"""A client's data, gathered and normalised."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.methods.base import Data, Shard


def gathered(federation: Federation, indices: Tensor) -> Data:
    """Samples `indices`, in memory channels last, as convolutions like them."""
    images = federation.normalize(federation.x[indices])
    return Data(images.contiguous(memory_format=torch.channels_last), federation.y[indices])


def training_shard(federation: Federation, client: int, batch_size: int, draws: Draws) -> Shard:
    """All training data of a client, with its batch orders."""
    data = gathered(federation, federation.train[client])
    return Shard(data, batch_size, lambda stream, epoch: draws.order(client, stream, epoch, len(data.y)))
