"""A client's data, gathered and normalised."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import Data, Shard


def gather_data(federation: Federation, indices: Tensor) -> Data:
    """Return samples of a federation as a network sees them, and their labels."""
    indices = tree.send(indices, federation.x.device)
    return Data(
        normalize_samples(federation, federation.x.index_select(0, indices)),
        federation.y.index_select(0, indices),
    )


def normalize_samples(federation: Federation, samples: Tensor) -> Tensor:
    """Return normalized samples `[samples, ...]`; images in memory channels last."""
    x = federation.normalize(samples)
    # Convolutions like this layout.
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return x.contiguous(memory_format=layout)


def make_shard(federation: Federation, client: int, batch_size: int, draws: Draws) -> Shard:
    """Return a client's training data with its batch orders, and its validation data.

    Both are gathered at first sight, which raises where samples are protected.
    """
    if draws.protection:
        return Shard(_refuse_samples, batch_size, _refuse_samples, _refuse_samples)
    train = federation.train[client]
    validation = train[:0]
    if federation.validation:
        validation = federation.validation[client]
    return Shard(
        lambda: gather_data(federation, train),
        batch_size,
        lambda stream, epoch: draws.order(client, stream, epoch, len(train)),
        lambda: gather_data(federation, validation),
    )


def _refuse_samples(*_: object) -> NoReturn:
    """Raise FedpflError, as findings from samples would leave without noise."""
    raise FedpflError(
        "privacy=sample: the method looks at samples outside its training steps (before_training,"
        " after_training or before_evaluation), and what it finds there leaves without noise; choose"
        " another one"
    )
