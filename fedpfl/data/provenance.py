"""Which samples initial weights were trained on, so that no client is tested on them.

Samples are identified by their content: another split, file or order of the same data does not hide
them.
"""

from __future__ import annotations

import base64
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

KEY = "fedpfl.provenance"


@dataclass(frozen=True, eq=False)
class Provenance:
    """The samples that weights were trained on.

    Attributes:
        samples: Sorted hashes of the samples.
        unrecorded: Files that the training began with and that have no provenance.
    """

    samples: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    unrecorded: tuple[str, ...] = ()

    def joined_with(self, hashes: np.ndarray) -> Provenance:
        """Return the provenance after further training on samples of these hashes."""
        return Provenance(np.union1d(self.samples, hashes), self.unrecorded)

    def are_seen(self, hashes: np.ndarray) -> np.ndarray:
        """Return which of these samples were trained on, as bools."""
        return np.isin(hashes, self.samples)

    # ---- arrays of an archive

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return arrays for an archive."""
        return {
            "trained_on": self.samples,
            "unrecorded": np.array(self.unrecorded, dtype=np.str_),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Provenance | None:
        """Read it from an archive's arrays, None where it is not there."""
        if "trained_on" not in arrays:
            return None
        return cls(arrays["trained_on"], tuple(arrays["unrecorded"].tolist()))

    # ---- files of weights

    def to_header(self) -> dict[str, str]:
        """Return the metadata of a safetensors file."""
        hashes = base64.b64encode(self.samples.astype("<u8").tobytes()).decode()
        return {KEY: "\n".join([hashes, *self.unrecorded])}

    @classmethod
    def from_header(cls, header: Mapping[str, str] | None) -> Provenance | None:
        """Read it from a safetensors file's metadata, None where it is not there."""
        if not header or KEY not in header:
            return None
        hashes, *unrecorded = header[KEY].split("\n")
        return cls(
            np.frombuffer(base64.b64decode(hashes), "<u8"),
            tuple(unrecorded),
        )

    def attach_to(self, values: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
        """Return a state_dict with the provenance as an attribute, which `torch.save` writes."""
        state = OrderedDict(values)
        hashes = torch.from_numpy(self.samples.astype(np.uint64).view(np.int64).copy())
        state.provenance = {"samples": hashes, "unrecorded": [*self.unrecorded]}  # type: ignore[attr-defined]
        return state

    @classmethod
    def from_state(cls, state: Any) -> Provenance | None:
        """Read it from a loaded state_dict, None where it is not there."""
        stored = getattr(state, "provenance", None)
        if not isinstance(stored, dict) or not isinstance(stored.get("samples"), Tensor):
            return None
        unrecorded = tuple(map(str, stored.get("unrecorded", ())))
        return cls(stored["samples"].numpy().view(np.uint64), unrecorded)


@dataclass(frozen=True, eq=False)
class Weights:
    """Initial values of a network.

    Attributes:
        values: Tensors by name.
        path: The file or run they are from.
        provenance: What they were trained on; None: unknown.
    """

    values: dict[str, Tensor]
    path: str
    provenance: Provenance | None

    @property
    def provenance_or_unrecorded(self) -> Provenance:
        """Return the provenance, or one that names these weights as unrecorded."""
        return self.provenance or Provenance(unrecorded=(self.path,))


def hash_samples(x: Tensor) -> np.ndarray:
    """Hash the content of each sample, without its label: uint64 `[samples]`."""
    # As stored, before any scaling: the same image of two data sets has one hash.
    rows = x.detach().cpu().contiguous().flatten(1).numpy()
    digests = (hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def pick_hashes(hashes: np.ndarray, indices: Iterable[Tensor]) -> np.ndarray:
    """Return the hashes of all samples with these indices, client after client."""
    parts = [hashes[client_indices.cpu().numpy()] for client_indices in indices]
    return np.concatenate([np.empty(0, np.uint64), *parts])
