"""What travels between server and nodes, as bytes: a header in JSON, and safetensors. Nothing in it
is executed.

Of `Masked` and `Agreed` trees the selected entries alone are written, with their positions; bool
tensors are packed to bits; bf16 travels as it is in memory. The leaves of `Known` trees are texts:
where the client has them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedpfl.engine.backend import Counts, Participation
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.traffic import Traffic
from fedpfl.ground.tree import Agreed, Known, Masked, Tree

RECORDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Counts, Participation, Traffic, Masked, Agreed)
}
SELECTED: dict[str, Any] = {kind.__name__: kind for kind in (Masked, Agreed)}
_LENGTH = struct.Struct("<Q")


class Sent(NamedTuple):
    """Name a leaf of what is sent: its dotted path, its value, and which of it is sent (None: all)."""

    path: str
    value: Tensor
    mask: Tensor | None


def packed(about: Mapping[str, Any], trees: Tree, whole: bool = False) -> bytes:
    """Return a message: plain values, and a tree. whole: what is not selected travels too."""
    tensors: dict[str, Tensor] = {}
    form = _written(trees, tensors, whole)
    header = json.dumps({"about": about, "form": form}).encode()
    return _LENGTH.pack(len(header)) + header + save(tensors)


def unpacked(message: bytes) -> tuple[dict[str, Any], Tree]:
    """Return what was `packed`. Raises FedpflError for anything else."""
    try:
        (length,) = _LENGTH.unpack_from(message)
        header = json.loads(message[_LENGTH.size : _LENGTH.size + length])
        tensors = load(message[_LENGTH.size + length :])
        return dict(header["about"]), _read(header["form"], tensors)
    except (
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        RuntimeError,
        struct.error,
        SafetensorError,
    ) as error:
        raise FedpflError(f"a message that is cut or damaged ({type(error).__name__})") from None


def leaves(sent: Tree, prefix: str = "") -> Iterator[Sent]:
    """Yield the leaves of what `Method.download` returned; of `Known` trees none."""
    if isinstance(sent, Masked | Agreed):
        pairs = zip(tree.items(sent.values, prefix), tree.leaves(sent.mask), strict=True)
        yield from (Sent(path, leaf, mask) for (path, leaf), mask in pairs)
    elif isinstance(sent, dict):
        for name, part in sent.items():
            yield from leaves(part, f"{prefix}.{name}" if prefix else name)
    elif not isinstance(sent, Known):
        yield Sent(prefix, sent, None)


def _written(value: Tree, tensors: dict[str, Tensor], whole: bool = False) -> Any:
    """Return the form of a tree in plain values, its numbers put into `tensors`."""
    if isinstance(value, Masked | Agreed) and not whole:
        return _selected(value, tensors)
    if isinstance(value, Known):
        return ["known", value.values]
    if isinstance(value, tuple):
        parts = value._asdict()  # type: ignore[attr-defined]
        return [
            "record",
            type(value).__name__,
            {name: _written(part, tensors, whole) for name, part in parts.items()},
        ]
    if isinstance(value, dict):
        return ["dict", {name: _written(part, tensors, whole) for name, part in value.items()}]
    once = value.detach().cpu()
    for axis in range(value.dim()):
        if not value.stride(
            axis
        ):  # expanded, and so it is again: products of it may be rounded otherwise
            once = once.narrow(axis, 0, min(1, value.shape[axis]))
    leaf = once.clone(memory_format=torch.contiguous_format)  # safetensors wants memory of its own
    if leaf.dtype == torch.bool:
        return ["bits", _put(_bits(leaf.flatten()), tensors), list(leaf.shape), list(value.shape)]
    return ["leaf", _put(leaf, tensors), list(value.shape)]


def _selected(value: Masked | Agreed, tensors: dict[str, Tensor]) -> Any:
    """Write the selected entries, and over the whole tree which these are, in the cheapest way."""
    shapes = tree.map(lambda leaf: list(leaf.shape), value.values)
    pairs = list(zip(tree.leaves(value.values), tree.leaves(value.mask), strict=True))
    flat = torch.cat([torch.zeros(0).bool(), *(mask.cpu().reshape(-1) for _, mask in pairs)])
    count, total = int(flat.sum()), flat.numel()
    if count in (0, total):
        where = ["all" if count else "none", ""]
    elif min(count, total - count) * 32 >= total:
        where = ["bits", _put(_bits(flat), tensors)]
    else:
        kind, listed = ("these", flat) if count <= total - count else ("others", ~flat)
        where = [kind, _put(listed.nonzero()[:, 0].to(torch.int32), tensors)]
    return [
        "selected",
        type(value).__name__,
        shapes,
        where,
        [_written(leaf[mask], tensors) for leaf, mask in pairs],
    ]


def _put(leaf: Tensor, tensors: dict[str, Tensor]) -> str:
    name = str(len(tensors))
    tensors[name] = leaf
    return name


def _bits(flags: Tensor) -> Tensor:
    """Return bools `[n]` as bytes `[ceil(n / 8)]`."""
    padded = F.pad(flags.to(torch.uint8), (0, -len(flags) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _flags(packed: Tensor, count: int) -> Tensor:
    """Undo `_bits`."""
    if packed.dtype != torch.uint8 or len(packed) != math.ceil(count / 8):
        raise ValueError("another number of bits")
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten()[:count]


def _read(form: Any, tensors: dict[str, Tensor]) -> Tree:
    kind, *rest = form
    if kind == "dict":
        return {name: _read(part, tensors) for name, part in rest[0].items()}
    if kind == "record":
        return RECORDS[rest[0]](**{name: _read(part, tensors) for name, part in rest[1].items()})
    if kind == "leaf":
        return tensors[rest[0]].expand(rest[1])
    if kind == "bits":
        return _flags(tensors[rest[0]], math.prod(rest[1])).view(rest[1]).expand(rest[2])
    if kind == "known":
        return Known(rest[0])
    if kind != "selected":
        raise ValueError(kind)
    name, shapes, where, values = rest
    return SELECTED[name](
        *_placed(shapes, where, [_read(part, tensors) for part in values], tensors)
    )


def _placed(
    shapes: Any, where: list[str], chosen: list[Tensor], tensors: dict[str, Tensor]
) -> tuple[Tree, Tree]:
    """Return the tree of selected entries, zeros elsewhere, and its mask."""
    sizes = tree.leaves(shapes)
    flat = _positions(where[0], where[1], sum(map(math.prod, sizes)), tensors)
    masks = [
        own.view(size)
        for own, size in zip(flat.split([*map(math.prod, sizes)]), sizes, strict=True)
    ]
    whole = [own.new_zeros(size) for own, size in zip(chosen, sizes, strict=True)]
    for leaf, mask, own in zip(whole, masks, chosen, strict=True):
        if own.shape != (int(mask.sum()),):
            raise ValueError("another number of entries")
        leaf[mask] = own
    return tree.rebuild(shapes, whole), tree.rebuild(shapes, masks)


def _positions(kind: str, name: str, total: int, tensors: dict[str, Tensor]) -> Tensor:
    if kind in ("all", "none"):
        return torch.full((total,), kind == "all")
    if kind == "bits":
        return _flags(tensors[name], total)
    flat = torch.zeros(total, dtype=torch.bool)
    flat[tensors[name].long()] = True
    return {"these": flat, "others": ~flat}[kind]
