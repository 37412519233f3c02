"""Features of a body that is frozen for good, computed once a run.

With `adapter=head` a network's trees are its head's, so that all training and evaluation reads the
same features of a sample. They are computed for all samples of a client's split together, so that
neither the order of calls nor the number of workers changes a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.training.frozen import FrozenBody, compute_features, is_of_head
from fedpfl.engine.training.shard import gather_data
from fedpfl.ground import tree
from fedpfl.methods import Data
from fedpfl.models import Net


class ClientSplit(NamedTuple):
    """Name the samples of a client's split."""

    federation: Federation
    name: str
    client: int

    @property
    def sample_indices(self) -> Tensor:
        """Return the indices of the samples."""
        return getattr(self.federation, self.name)[self.client]


class FeatureStore:
    """Keep the features of each federation's samples, by split and client."""

    def __init__(self) -> None:
        self._features: WeakKeyDictionary[Federation, dict[tuple[str, int], Tensor | None]]
        self._features = WeakKeyDictionary()
        self._lock = Lock()

    def find_body(self, net: Net, splits: Sequence[ClientSplit], data: Data) -> FrozenBody | None:
        """Make the frozen body with its features of splits; None if the body has none.

        Args:
            net: The network.
            splits: One or more.
            data: Their samples, the last one perhaps repeated.
        """
        parts: list[Tensor] = []
        for split in splits:
            # A network is not called without samples.
            if split.sample_indices.numel():
                features = self.find_features(net, split)
                if features is None:
                    return None
                parts.append(features)
        if not parts:
            return None
        features = torch.cat(parts)
        missing = len(data.x) - len(features)
        last = features[-1:].expand(missing, *features.shape[1:])
        return FrozenBody(net, net.params, {}, data, torch.cat([features, last]))

    def find_features(self, net: Net, split: ClientSplit) -> Tensor | None:
        """Find or compute the features of a split; None if the body has none."""
        with self._lock:
            known_features = self._features.setdefault(split.federation, {})
        key = split.name, split.client
        if key not in known_features:
            data = gather_data(split.federation, split.sample_indices)
            known_features[key] = compute_features(net.bind({}), net.params, data)
        return known_features[key]


def make_feature_store(net: Net, device: torch.device) -> FeatureStore | None:
    """Return a store for a permanently frozen body, else None."""
    if device.type != "cpu" or not net.frozen or tree.leaves(net.buffers):
        return None
    return FeatureStore() if is_of_head(net, list(net.params)) else None
