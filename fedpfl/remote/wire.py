"""Encode messages between server and nodes as bytes: a JSON header, then safetensors.

Nothing in a message is executed. Of `Masked` and `Agreed` trees only the selected entries are
written, with their positions; bool tensors are packed to bits; bf16 travels as it is in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field, Strict, TypeAdapter
from safetensors.torch import load, save
from torch import Tensor

from fedpfl.engine.calls import Counts, Participation
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record, Values
from fedpfl.ground.traffic import Traffic
from fedpfl.ground.tree import Agreed, Masked, Tree

RECORD_TYPES: Record = {
    kind.__name__: kind for kind in (Counts, Participation, Traffic, Masked, Agreed)
}
HEADER_LENGTH = struct.Struct("<Q")
MAX_AXES = 16
_Size = Annotated[int, Strict(), Field(ge=0, lt=2**31)]
_SHAPE: TypeAdapter[list[int]] = TypeAdapter(Annotated[list[_Size], Field(max_length=MAX_AXES)])
INDEX_BITS = 32  # of one listed position; a bitmask costs one bit for every entry


def pack_message(fields: Values, trees: Tree, whole: bool = False) -> bytes:
    """Return a message of plain values and a tree.

    Args:
        fields: Values that JSON can hold.
        trees: Tensors, also in Masked or Agreed trees.
        whole: Whether entries outside a mask travel too.
    """
    tensors: dict[str, Tensor] = {}
    form = _encode(trees, tensors, whole)
    header = json.dumps({"about": fields, "form": form}).encode()
    return HEADER_LENGTH.pack(len(header)) + header + save(tensors)


def unpack_message(message: bytes, max_entries: int | None = None) -> tuple[Record, Tree]:
    """Return the values and the tree of a message.

    Args:
        message: What `pack_message` returns.
        max_entries: The largest number of entries of its expanded tensors; None: any.

    Raises:
        FedpflError: It is damaged or too large.
    """
    with _explain_damage():
        header, tensors_start = _read_header(message)
        tensors = load(message[tensors_start:])
        decoder = _Decoder(tensors, math.inf if max_entries is None else max_entries)
        return dict(header["about"]), decoder.decode(header["form"])


def unpack_fields(message: bytes) -> Record:
    """Return the values of a message, without its tensors. Raises FedpflError."""
    with _explain_damage():
        header, _ = _read_header(message)
        return dict(header["about"])


def _read_header(message: bytes) -> tuple[Record, int]:
    """Return the header, and where the tensors begin."""
    (length,) = HEADER_LENGTH.unpack_from(message)
    tensors_start = HEADER_LENGTH.size + length
    return json.loads(message[HEADER_LENGTH.size : tensors_start]), tensors_start


@contextlib.contextmanager
def _explain_damage() -> Iterator[None]:
    """Turn all that decoding a damaged message raises into a FedpflError."""
    try:
        yield
    except FedpflError:
        raise
    except Exception as error:
        raise FedpflError(f"a message that is cut or damaged ({type(error).__name__})") from None


# ---- Encoding: a form in plain values, and the tensors that it names


def _encode(value: Tree, tensors: dict[str, Tensor], whole: bool = False) -> Any:
    """Return the form of a tree in plain values, and add its tensors to `tensors`."""
    if isinstance(value, Masked | Agreed) and not whole:
        return _encode_selection(value, tensors)
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


class _Decoder:
    """Rebuild a tree from its form.

    Args:
        tensors: The tensors of the message.
        max_entries: The most entries of the rebuilt tensors, counted before each is made.
    """

    def __init__(self, tensors: Mapping[str, Tensor], max_entries: float):
        self._tensors = tensors
        self._entries_left = max_entries

    def decode(self, form: Any) -> Tree:
        """Return the tree that `_encode` gave this form."""
        kind, *arguments = form
        if kind == "dict":
            return {name: self.decode(part) for name, part in arguments[0].items()}
        if kind == "record":
            fields = {name: self.decode(field) for name, field in arguments[1].items()}
            return RECORD_TYPES[arguments[0]](**fields)
        if kind == "leaf":
            name, shape = arguments
            self._spend(shape)
            return self._tensors[name].expand(shape)
        if kind == "bits":
            name, stored_shape, shape = arguments
            flags = self._unpack_bits(name, self._spend(stored_shape))
            self._spend(shape)
            return flags.view(stored_shape).expand(shape)
        if kind == "selected":
            return self._decode_selection(*arguments)
        raise ValueError(kind)

    def _decode_selection(
        self, type_name: str, shapes: Tree, positions: list[str], selected_forms: list[Any]
    ) -> Tree:
        """Return a Masked or Agreed tree with the selected entries, and zeros around them."""
        leaf_shapes = tree.leaves(shapes)
        leaf_sizes = [self._spend(shape) for shape in leaf_shapes]
        flat_mask = self._decode_positions(positions, sum(leaf_sizes))
        leaves: list[Tensor] = []
        masks: list[Tensor] = []
        for form, flat, shape in zip(
            selected_forms, flat_mask.split(leaf_sizes), leaf_shapes, strict=True
        ):
            selected_entries = self.decode(form)
            mask = flat.view(shape)
            leaf = selected_entries.new_zeros(shape)
            leaf[mask] = selected_entries
            leaves.append(leaf)
            masks.append(mask)
        return RECORD_TYPES[type_name](tree.rebuild(shapes, leaves), tree.rebuild(shapes, masks))

    def _decode_positions(self, positions: list[str], total: int) -> Tensor:
        """Return flags of the selected entries, `[total]`."""
        kind, name = positions
        if kind == "bits":
            return self._unpack_bits(name, total)
        is_listed = torch.zeros(total, dtype=torch.bool)
        is_listed[self._tensors[name].long()] = True
        return {"these": is_listed, "all but": ~is_listed}[kind]

    def _unpack_bits(self, name: str, count: int) -> Tensor:
        """Return the `count` bools that `_pack_bits` packed."""
        packed_bits = self._tensors[name]
        bits = packed_bits[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        flags = bits.bool().flatten()[:count]
        if len(flags) != count:
            raise ValueError("another number of bits")
        return flags

    def _spend(self, shape: Any) -> int:
        """Return the number of entries of a shape. Raises FedpflError where these are too many."""
        sizes = _SHAPE.validate_python(shape)
        count = math.prod(sizes)
        self._entries_left -= count
        if self._entries_left < 0:
            raise FedpflError("a message of more entries than any of this run")
        return count
