"""Which samples initial weights were trained on, so that nobody is tested on what a network has
seen.

Samples are known by their content: another split, another file or another order of the same data do
not hide them.
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
    """Say what weights were trained on.

    samples: hashes of samples, sorted. unrecorded: names of files that the training began with, of
    which nobody knows what they were trained on.
    """

    samples: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    unrecorded: tuple[str, ...] = ()

    def joined_with(self, hashes: np.ndarray) -> Provenance:
        """Return that of weights that were trained further, on samples of these hashes."""
        return Provenance(np.union1d(self.samples, hashes), self.unrecorded)

    def are_seen(self, hashes: np.ndarray) -> np.ndarray:
        """Tell which of these samples are among those that were trained on."""
        return np.isin(hashes, self.samples)

    # ---- arrays of an archive

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return arrays for an archive."""
        return {"trained_on": self.samples, "unrecorded": np.array(self.unrecorded, dtype=np.str_)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Provenance | None:
        """Return what such arrays say; None where an older version wrote the archive."""
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
        """Return what a safetensors file's metadata say, None where they say nothing."""
        if not header or KEY not in header:
            return None
        hashes, *unrecorded = header[KEY].split("\n")
        return cls(np.frombuffer(base64.b64decode(hashes), "<u8"), tuple(unrecorded))

    def attach_to(self, values: Mapping[str, Tensor]) -> OrderedDict[str, Tensor]:
        """Return a state_dict that `torch.save` writes together with its provenance."""
        state = OrderedDict(values)
        hashes = torch.from_numpy(self.samples.astype(np.uint64).view(np.int64).copy())
        state.provenance = {"samples": hashes, "unrecorded": [*self.unrecorded]}  # type: ignore[attr-defined]
        return state

    @classmethod
    def from_state(cls, state: Any) -> Provenance | None:
        """Return what a loaded state_dict says, None where it says nothing."""
        told = getattr(state, "provenance", None)
        if not (isinstance(told, dict) and isinstance(told.get("samples"), Tensor)):
            return None
        return cls(
            told["samples"].numpy().view(np.uint64), tuple(map(str, told.get("unrecorded", ())))
        )


@dataclass(frozen=True, eq=False)
class Weights:
    """Hold initial values by name, where they are from, and their provenance; None: nobody knows."""

    values: dict[str, Tensor]
    place: str
    provenance: Provenance | None

    @property
    def known(self) -> Provenance:
        """Return the provenance; where nobody knows it, that these weights are unrecorded."""
        return self.provenance or Provenance(unrecorded=(self.place,))


def hash_samples(x: Tensor) -> np.ndarray:
    """Hash each sample's content, uint64 `[samples]`; labels do not matter, nor on what device they
    are.
    """
    rows = x.detach().cpu().contiguous().flatten(1).numpy()
    digests = (hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def pick_hashes(hashes: np.ndarray, indices: Iterable[Tensor]) -> np.ndarray:
    """Return the hashes of all samples of these clients."""
    parts = [hashes[index.cpu().numpy()] for index in indices]
    return np.concatenate([np.empty(0, np.uint64), *parts])
