"""Encode messages between server and nodes as bytes: a JSON header, then safetensors.

Nothing in a message is executed. Of `Masked` and `Agreed` trees only the selected entries are
written, with their positions; bool tensors are packed to bits; bf16 travels as it is in memory. The
leaves of `Known` trees are texts: the paths of server entries that the client already has.
"""

from __future__ import annotations

import contextlib
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

from fedpfl.engine.calls import Counts, Participation
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.traffic import Traffic
from fedpfl.ground.tree import Agreed, Known, Masked, Tree

RECORD_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (Counts, Participation, Traffic, Masked, Agreed)
}
HEADER_LENGTH = struct.Struct("<Q")
MAX_AXES = 16
INDEX_BITS = 32  # of one listed position; a bitmask costs one bit for every entry


class SentLeaf(NamedTuple):
    """Describe one tensor that is sent.

    Attributes:
        path: Dotted path in the tree.
        value: The whole tensor.
        mask: Which entries are sent; None if all are.
    """

    path: str
    value: Tensor
    mask: Tensor | None


def pack_message(fields: Mapping[str, Any], trees: Tree, whole: bool = False) -> bytes:
    """Return a message of plain values and a tree.

    Args:
        fields: Values that JSON can hold.
        trees: Tensors, also in Masked, Agreed or Known trees.
        whole: Whether entries outside a mask travel too.
    """
    tensors: dict[str, Tensor] = {}
    form = _encode(trees, tensors, whole)
    header = json.dumps({"about": fields, "form": form}).encode()
    return HEADER_LENGTH.pack(len(header)) + header + save(tensors)


def unpack_message(message: bytes, max_entries: int | None = None) -> tuple[dict[str, Any], Tree]:
    """Return the values and the tree of a message.

    Args:
        message: What `pack_message` returns.
        max_entries: The largest number of entries of its expanded tensors; None: any.

    Raises:
        FedpflError: It is damaged or too large.
    """
    with _explain_damage():
        header, tensors_start = _read_header(message)
        # The form tells the size before anything is expanded.
        if max_entries is not None and _count_entries(header["form"]) > max_entries:
            raise FedpflError(f"a message of more than {max_entries:,} entries")
        tensors = load(message[tensors_start:])
        return dict(header["about"]), _decode(header["form"], tensors)


def unpack_fields(message: bytes) -> dict[str, Any]:
    """Return the values of a message, without its tensors. Raises FedpflError."""
    with _explain_damage():
        header, _ = _read_header(message)
        return dict(header["about"])


def _read_header(message: bytes) -> tuple[dict[str, Any], int]:
    """Return the header, and where the tensors begin."""
    (length,) = HEADER_LENGTH.unpack_from(message)
    tensors_start = HEADER_LENGTH.size + length
    return json.loads(message[HEADER_LENGTH.size : tensors_start]), tensors_start


@contextlib.contextmanager
def _explain_damage() -> Iterator[None]:
    """Turn all that decoding a damaged message raises into a FedpflError."""
    try:
        yield
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        OverflowError,
        RuntimeError,
        struct.error,
        SafetensorError,
    ) as error:
        raise FedpflError(f"a message that is cut or damaged ({type(error).__name__})") from None


def iterate_sent_leaves(sent: Tree, prefix: str = "") -> Iterator[SentLeaf]:
    """Yield the tensors that `Method.download` sends; those of `Known` trees do not travel."""
    if isinstance(sent, Masked | Agreed):
        entries = tree.items(sent.values, prefix)
        for (path, leaf), mask in zip(entries, tree.leaves(sent.mask), strict=True):
            yield SentLeaf(path, leaf, mask)
    elif isinstance(sent, dict):
        for name, subtree in sent.items():
            yield from iterate_sent_leaves(subtree, f"{prefix}.{name}" if prefix else name)
    elif not isinstance(sent, Known):
        yield SentLeaf(prefix, sent, None)


# ---- Encoding: a form in plain values, and the tensors that it names


def _encode(value: Tree, tensors: dict[str, Tensor], whole: bool = False) -> Any:
    """Return the form of a tree in plain values, and add its tensors to `tensors`."""
    if isinstance(value, Masked | Agreed) and not whole:
        return _encode_selection(value, tensors)
    if isinstance(value, Known):
        return ["known", value.values]
    if isinstance(value, tuple):
        fields = value._asdict()  # type: ignore[attr-defined]
        forms = {name: _encode(field, tensors, whole) for name, field in fields.items()}
        return ["record", type(value).__name__, forms]
    if isinstance(value, dict):
        return ["dict", {name: _encode(part, tensors, whole) for name, part in value.items()}]
    return _encode_leaf(value, tensors)


def _encode_leaf(value: Tensor, tensors: dict[str, Tensor]) -> Any:
    """Return the form of a tensor. Axes that it is expanded on are stored once."""
    stored = value.detach().cpu()
    for axis in range(value.dim()):
        # The receiver expands it again: products of a copied tensor may be rounded differently.
        if not value.stride(axis):
            stored = stored.narrow(axis, 0, min(1, value.shape[axis]))
    # safetensors refuses tensors that share memory.
    leaf = stored.clone(memory_format=torch.contiguous_format)
    if leaf.dtype == torch.bool:
        name = _add_tensor(_pack_bits(leaf.flatten()), tensors)
        return ["bits", name, list(leaf.shape), list(value.shape)]
    return ["leaf", _add_tensor(leaf, tensors), list(value.shape)]


def _encode_selection(value: Masked | Agreed, tensors: dict[str, Tensor]) -> Any:
    """Return the form of the selected entries and, in the cheapest way, of their positions."""
    shapes = tree.map(lambda leaf: list(leaf.shape), value.values)
    pairs = list(zip(tree.leaves(value.values), tree.leaves(value.mask), strict=True))
    flat_masks = [mask.cpu().reshape(-1) for _, mask in pairs]
    flat_mask = torch.cat([torch.zeros(0).bool(), *flat_masks])
    selected_count = int(flat_mask.sum())
    total = flat_mask.numel()

    # The shorter list of indices, perhaps of the entries that are left out, or a bitmask.
    is_mostly_selected = selected_count > total - selected_count
    rarer = ~flat_mask if is_mostly_selected else flat_mask
    if int(rarer.sum()) * INDEX_BITS > total:
        positions = ["bits", _add_tensor(_pack_bits(flat_mask), tensors)]
    else:
        indices = rarer.nonzero()[:, 0].to(torch.int32)
        kind = "all but" if is_mostly_selected else "these"
        positions = [kind, _add_tensor(indices, tensors)]

    selected_forms = [_encode(leaf[mask], tensors) for leaf, mask in pairs]
    return ["selected", type(value).__name__, shapes, positions, selected_forms]


def _add_tensor(leaf: Tensor, tensors: dict[str, Tensor]) -> str:
    """Store a tensor under a new name, and return the name."""
    name = str(len(tensors))
    tensors[name] = leaf
    return name


def _pack_bits(flags: Tensor) -> Tensor:
    """Return bools `[n]` as bytes `[ceil(n / 8)]`."""
    groups = F.pad(flags.to(torch.uint8), (0, -len(flags) % 8)).view(-1, 8)
    return (groups << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


# ---- Decoding: the tree again, from a form and the tensors that it names


def _count_entries(form: Any) -> int:
    """Count the entries and nodes of a form."""
    kind, *arguments = form
    if kind == "dict":
        return 1 + sum(map(_count_entries, arguments[0].values()))
    if kind == "record":
        return 1 + sum(map(_count_entries, arguments[1].values()))
    if kind == "leaf":
        return _count_shape(arguments[1])
    if kind == "bits":
        return _count_shape(arguments[1]) + _count_shape(arguments[2])
    if kind == "known":
        return len(tree.leaves(arguments[0]))
    if kind == "selected":
        selected = sum(map(_count_entries, arguments[3]))
        return selected + 2 * sum(map(_count_shape, tree.leaves(arguments[1])))
    raise ValueError(kind)


def _count_shape(shape: Any) -> int:
    """Count the entries of a shape."""
    if not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise ValueError("no shape")
    for size in shape:
        if type(size) is not int or not 0 <= size < 2**31:
            raise ValueError("no size")
    return math.prod(shape)


def _decode(form: Any, tensors: dict[str, Tensor]) -> Tree:
    """Return the tree that `_encode` gave this form."""
    kind, *arguments = form
    if kind == "dict":
        return {name: _decode(part, tensors) for name, part in arguments[0].items()}
    if kind == "record":
        type_name, forms = arguments
        fields = {name: _decode(field, tensors) for name, field in forms.items()}
        return RECORD_TYPES[type_name](**fields)
    if kind == "leaf":
        name, shape = arguments
        return tensors[name].expand(shape)
    if kind == "bits":
        name, stored_shape, shape = arguments
        flags = _unpack_bits(tensors[name], math.prod(stored_shape))
        return flags.view(stored_shape).expand(shape)
    if kind == "known":
        return Known(arguments[0])
    if kind == "selected":
        return _decode_selection(arguments, tensors)
    raise ValueError(kind)


def _decode_selection(arguments: list[Any], tensors: dict[str, Tensor]) -> Tree:
    """Return a Masked or Agreed tree with the selected entries, and zeros around them."""
    type_name, shapes, (positions_kind, positions_name), selected_forms = arguments
    leaf_shapes = tree.leaves(shapes)
    leaf_sizes = [math.prod(shape) for shape in leaf_shapes]
    flat_mask = _decode_positions(positions_kind, positions_name, sum(leaf_sizes), tensors)
    flat_masks = flat_mask.split(leaf_sizes)
    leaves: list[Tensor] = []
    masks: list[Tensor] = []
    for form, flat, shape in zip(selected_forms, flat_masks, leaf_shapes, strict=True):
        selected_entries = _decode(form, tensors)
        mask = flat.view(shape)
        if selected_entries.shape != (int(mask.sum()),):
            raise ValueError("another number of entries")
        leaf = selected_entries.new_zeros(shape)
        leaf[mask] = selected_entries
        leaves.append(leaf)
        masks.append(mask)
    return RECORD_TYPES[type_name](tree.rebuild(shapes, leaves), tree.rebuild(shapes, masks))


def _decode_positions(kind: str, name: str, total: int, tensors: dict[str, Tensor]) -> Tensor:
    """Return flags of the selected entries, `[total]`."""
    if kind == "bits":
        return _unpack_bits(tensors[name], total)
    is_listed = torch.zeros(total, dtype=torch.bool)
    is_listed[tensors[name].long()] = True
    return {"these": is_listed, "all but": ~is_listed}[kind]


def _unpack_bits(packed_bits: Tensor, count: int) -> Tensor:
    """Return the `count` bools that `_pack_bits` packed."""
    if packed_bits.dtype != torch.uint8 or len(packed_bits) != math.ceil(count / 8):
        raise ValueError("another number of bits")
    bits = packed_bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.bool().flatten()[:count]
