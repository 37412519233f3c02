"""What a body that is frozen for good makes of samples: computed once a run.

With `adapter=head` a network's trees are its head's, so that whatever a method trains or evaluates
reads the same features of a sample. They are computed for all samples of a client's split at once,
by which neither the order of calls nor the number of workers has a part in their bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.store import map_file
from fedpfl.engine.training.frozen import FrozenBody, compute_features, is_of_head
from fedpfl.engine.training.shard import gather_data
from fedpfl.ground import tree
from fedpfl.methods import Data
from fedpfl.models import Net

MEMORY = 2**28
"""Bytes of a federation's features up to which they are in memory, and in a mapped file beyond."""


class ClientSplit(NamedTuple):
    """Name the samples of a client's split."""

    federation: Federation
    name: str
    client: int

    @property
    def sample_indices(self) -> Tensor:
        """Return the indices of the samples."""
        return getattr(self.federation, self.name)[self.client]


def _has_samples(split: ClientSplit) -> bool:
    return split.sample_indices.numel() > 0


class FeatureStore:
    """Keep the features of each federation's samples.

    Attributes:
        folder: Of mapped files; None for that of temporary files.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = folder
        self._tables: WeakKeyDictionary[Federation, _FeatureTable] = WeakKeyDictionary()
        self._lock = Lock()

    def find_body(self, net: Net, splits: Sequence[ClientSplit], data: Data) -> FrozenBody | None:
        """Return the frozen body with its features of splits, None where there are none.

        Args:
            net: The network.
            splits: One or more.
            data: Their samples, the last one perhaps repeated.
        """
        parts = []
        # A network is not asked about a split without samples.
        for split in filter(_has_samples, splits):
            features = self.find_features(net, split)
            if features is None:
                return None
            parts.append(features)
        if not parts:
            return None
        features = torch.cat(parts)
        missing = len(data.x) - len(features)
        if missing:
            features = torch.cat([features, features[-1:].expand(missing, *features.shape[1:])])
        return FrozenBody(net, net.params, {}, data, features)

    def find_features(self, net: Net, split: ClientSplit) -> Tensor | None:
        """Return the features of a split, None where they cannot be told or kept."""
        with self._lock:
            table = self._tables.get(split.federation)
            if table is None:
                table = self._tables[split.federation] = _FeatureTable(split.federation)
        key = split.name, split.client
        if key not in table.computed and table.is_possible:
            data = gather_data(split.federation, split.sample_indices)
            features = compute_features(net.bind({}), net.params, data)
            with self._lock:
                table.put_features(key, features, self.folder)
        return table.rows_of(key) if table.is_possible else None


class _FeatureTable:
    """Hold the features of a federation's samples, one split and client after the other."""

    def __init__(self, federation: Federation):
        self.computed: set[tuple[str, int]] = set()
        self.is_possible = True
        self._values: Tensor | None = None
        self._slices: dict[tuple[str, int], slice] = {}
        keys = []
        sizes = []
        for split in ("train", "test", "validation"):
            for client, indices in enumerate(getattr(federation, split)):
                keys.append((split, client))
                sizes.append(len(indices))
        stops = list(accumulate(sizes))
        # Clients of one federation stand behind each other: thousands of files would be too many.
        for key, size, stop in zip(keys, sizes, stops, strict=True):
            self._slices[key] = slice(stop - size, stop)
        self._count = sum(sizes)

    def rows_of(self, key: tuple[str, int]) -> Tensor:
        """Return the features of a split that are there."""
        assert self._values is not None
        return self._values[self._slices[key]]

    def put_features(
        self, key: tuple[str, int], features: Tensor | None, folder: Path | None
    ) -> None:
        """Write the features of a split; None where a body has none."""
        try:
            if features is None:
                self.is_possible = False
                return
            if self._values is None:
                shape = (self._count, *features.shape[1:])
                is_small = features[:1].nbytes * self._count <= MEMORY
                self._values = (
                    torch.empty(shape, dtype=features.dtype)
                    if is_small
                    else map_file(shape, features.dtype, folder)
                )
            self.rows_of(key).copy_(features)
            self.computed.add(key)
        except OSError:  # the disk has no room: features are computed in each phase
            self.is_possible = False


def make_feature_store(net: Net, device: torch.device) -> FeatureStore | None:
    """Return a store for a network whose body is frozen for good, None for others."""
    if device.type != "cpu" or not net.frozen or tree.leaves(net.buffers):
        return None
    return FeatureStore() if is_of_head(net, list(net.params)) else None
