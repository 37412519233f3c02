"""Fingerprints: digests of tensors and plain values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

FINGERPRINTED_PARTS = "samples, labels, groups, scaling, who holds which, or initial weights"
"""The parts of a run's data that its fingerprint covers, in words."""

FINGERPRINTED_IF_SET = {"fingerprinted": "if set"}
"""Metadata of a field of a later release, which leaves the fingerprints of data without it."""


def fingerprint(*values: Any) -> str:
    """Hash tensors, numbers, texts and None, also in sequences, mappings and dataclasses.

    The device does not matter. Of floats six digits count, as a mean that is computed from the data
    may round differently on another machine.
    """
    return fingerprint_sequence(values)


def fingerprint_sequence(values: Sequence[Any]) -> str:
    """Hash the values of a sequence, as `fingerprint` does those that it is called with."""
    digest = hashlib.blake2b(digest_size=16)
    for piece in _byte_pieces(values):
        digest.update(piece)
    return digest.hexdigest()


def _byte_pieces(value: Any) -> Iterator[Any]:
    """Yield the bytes of a value, each part after its type and length."""
    # ---- Tensors by their bytes.
    if isinstance(value, Tensor):
        yield f"{value.dtype}{list(value.shape)}".encode()
        if value.numel():
            yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()

    # ---- Containers, with the number or the names of their values.
    elif is_dataclass(value):
        left_out = {
            field.name
            for field in fields(value)
            if field.metadata == FINGERPRINTED_IF_SET and not _is_set(getattr(value, field.name))
        }
        yield from _byte_pieces({k: v for k, v in vars(value).items() if k not in left_out})
    elif isinstance(value, Mapping):
        # In the mapping's order, which is that of the fields or of the file.
        keys_and_values = [part for item in value.items() for part in item]
        yield from _byte_pieces(keys_and_values)
    elif isinstance(value, list | tuple):
        yield f"[{len(value)}]".encode()
        for part in value:
            yield from _byte_pieces(part)

    # ---- Plain values.
    else:
        if isinstance(value, float):
            text = f"{value:.6g}"
        else:
            text = str(value)
        yield f"{type(value).__name__}{len(text)}:{text}".encode()


def _is_set(value: Any) -> bool:
    return isinstance(value, Tensor) or bool(value)
