"""What travels: everything comes back bit for bit, at the cost that is counted; what is cut or
damaged is one line.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpfl.ground import traffic, tree
from fedpfl.ground.tree import Agreed, Masked
from fedpfl.remote import wire


def trees(share: float, size: int = 4012) -> dict:
    """All kinds of leaves, of which a share is selected."""
    g = torch.Generator().manual_seed(0)
    values = {
        "a": torch.randn(size // 4, 3, generator=g),
        "b": {"c": torch.randn(size // 4, generator=g), "d": torch.tensor(2.0)},
    }
    mask = tree.map(lambda leaf: torch.rand(leaf.shape, generator=g) < share, values)
    return {
        "bf16": torch.randn(7, generator=g).bfloat16(),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0]),
        "empty": torch.zeros(0, 3),
        "count": torch.tensor(2**40),
        "flags": torch.rand(11, generator=g) < 0.5,
        "masked": Masked(values, mask),
        "agreed": Agreed(values, mask),
        "wide": torch.randn(1, 3, generator=g).expand(5, 3),
        "view": torch.arange(20).view(4, 5).T[1:],
    }


@given(st.sampled_from([0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.0]))
def test_what_is_packed_comes_back(share: float):
    """Of what is not selected zeros; in the same order."""
    sent = trees(share)
    about, found = wire.unpack_message(wire.pack_message({"round": 3}, sent))
    assert about == {"round": 3}
    assert [*found] == [*sent]
    for name in ("masked", "agreed"):
        kept = type(sent[name])(tree.unmask_received(sent[name]), sent[name].mask)
        assert type(found[name]) is type(kept)
        assert_bits(tree.leaves(found[name]), tree.leaves(kept))
    rest = [name for name in sent if name not in ("masked", "agreed")]
    assert_bits(tree.leaves(tree.select(found, rest)), tree.leaves(tree.select(sent, rest)))
    _, whole = wire.unpack_message(wire.pack_message({}, sent, whole=True))
    assert_bits(tree.leaves(whole), tree.leaves(sent))


def assert_bits(found, known):
    for own, other in zip(found, known, strict=True):
        assert (own.dtype, own.shape) == (other.dtype, other.shape)
        assert (0 in own.stride()) == (0 in other.stride())
        own, other = (part.contiguous().view(-1).view(torch.uint8) for part in (own, other))
        assert torch.equal(own, other)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_what_travels_costs_what_is_counted(share: float):
    """But for a header, and for the positions of what both sides know the mask of."""
    masked = trees(share, 40_000)["masked"]
    empty = lambda leaf: leaf[..., :0] if leaf.dim() else leaf[None][:0]  # noqa: E731
    nothing = wire.pack_message({}, Masked(*(tree.map(empty, part) for part in masked)))
    counted = int(traffic.count_traffic(masked).bits) / 8
    assert -16 <= len(wire.pack_message({}, masked)) - len(nothing) - counted < 250
