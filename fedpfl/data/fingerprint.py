"""What tells data apart: a digest of tensors and plain values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

FINGERPRINTED_PARTS = "samples, labels, groups, scaling, who holds which, or initial weights"
"""What a fingerprint of data is of, in words."""


def fingerprint(*values: Any) -> str:
    """Return a digest of tensors, numbers, text, None, and of sequences, mappings and dataclasses
    of these.

    The device does not matter. Of numbers that are not whole six digits count: what is computed
    from the data may round differently elsewhere.
    """
    digest = hashlib.blake2b(digest_size=16)
    for piece in _byte_pieces(values):
        digest.update(piece)
    return digest.hexdigest()


def _byte_pieces(value: Any) -> Iterator[Any]:
    """The value's bytes, each part behind what and how long it is."""
    if isinstance(value, Tensor):
        yield f"{value.dtype}{list(value.shape)}".encode()
        if value.numel():
            yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    elif is_dataclass(value):
        yield from _byte_pieces(vars(value))
    elif isinstance(value, Mapping):
        yield from _byte_pieces([part for item in value.items() for part in item])
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}]".encode()
        for part in value:
            yield from _byte_pieces(part)
    else:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        yield f"{type(value).__name__}{len(text)}:{text}".encode()
