"""Operations on trees of tensors; what travels, counted by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpfl.ground import tree
from fedpfl.ground.traffic import count_traffic
from fedpfl.ground.tree import Agreed, Known, Masked
from tests.conftest import assert_close, assert_same

shapes = st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=4)


@given(shapes)
def test_unflat_and_rebuild_invert(shapes):
    values = {str(i): torch.randn(shape) for i, shape in enumerate(shapes)}
    assert_same(tree.unravel(tree.ravel(values), values), values)
    assert_same(tree.rebuild(values, tree.leaves(values)), values)


def test_clone_shares_nothing_and_is_contiguous():
    original = {"a": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)}
    copied = tree.clone(original)
    assert_same(copied, original)
    assert copied["a"].is_contiguous()
    copied["a"].zero_()
    assert original["a"].abs().sum() > 0


def test_where_picks_bits_and_never_mixes():
    a = {"x": torch.tensor([1.0, float("nan"), -0.0])}
    b = {"x": torch.tensor([float("inf"), 2.0, 3.0])}
    picked = tree.where({"x": torch.tensor([True, False, True])}, a, b)["x"]
    assert picked.tolist() == [1.0, 2.0, -0.0]
    assert torch.signbit(picked[2])


def test_stack_take_and_put():
    rows = [{"a": torch.full((2,), float(i)), "deep": {"n": torch.tensor(i)}} for i in range(4)]
    stacked = tree.stack(rows)
    assert_same(tree.take(stacked, 2), rows[2])
    assert_same(tree.take(stacked, torch.tensor([3, 1])), tree.stack([rows[3], rows[1]]))
    tree.put_(stacked, torch.tensor([0, 3]), tree.stack([rows[1], rows[2]]))
    assert_same(stacked, tree.stack([rows[1], rows[1], rows[2], rows[2]]))


def test_a_masked_mean_is_over_those_who_hold_an_entry():
    """By hand: all, some and none of three clients; with all of them it is the mean, bit for bit."""
    values = torch.tensor([[1.0, 2.0, 9.0], [3.0, 6.0, 9.0], [5.0, 10.0, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [True, True, False]])
    old, weight = torch.tensor([7.0] * 3), torch.tensor([0.5, 0.3, 0.2])
    merged = tree.masked_mean({"a": old}, {"a": values}, {"a": mask}, weight)["a"]
    assert_close(merged, torch.tensor([2.4, (0.5 * 2 + 0.2 * 10) / 0.7, 7.0]))
    whole = {"a": torch.randn(3, 50)}
    weight = torch.tensor([0.01, 0.78, 0.21])  # whose sum is rounded to less than 1
    same = tree.masked_mean({"a": torch.zeros(50)}, whole, tree.full_like(whole, True), weight)
    assert_same(same, tree.mean(whole, weight))


def test_mean_depends_on_the_order_of_rows_only_by_rounding_and_not_on_threads():
    """Of one row it is that row, bit for bit."""
    stacked, weight = {"a": torch.randn(10, 5000)}, torch.rand(10)
    weight /= weight.sum()
    back = torch.arange(9, -1, -1)
    expected = (stacked["a"].double() * weight.double()[:, None]).sum(0).float()
    assert_close(tree.mean(stacked, weight)["a"], expected)
    assert_close(tree.mean(stacked, weight), tree.mean({"a": stacked["a"][back]}, weight[back]))
    assert_same(tree.mean(tree.take(stacked, slice(1)), torch.ones(1)), tree.take(stacked, 0))
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(tree.mean(stacked, weight))
    torch.set_num_threads(threads)
    assert_same(*results)


def test_what_is_received_is_what_was_sent_with_zeros_for_the_rest():
    values, mask = {"a": torch.tensor([2.0, torch.nan])}, {"a": torch.tensor([True, False])}
    whole, known = torch.ones(2), torch.zeros(3)
    sent = {"few": Masked(values, mask), "agreed": Agreed(values, mask)}
    sent |= {"whole": whole, "known": Known({"b": known})}
    seen = tree.unmask_received(sent)
    assert seen["few"]["a"].tolist() == seen["agreed"]["a"].tolist() == [2.0, 0.0]
    assert seen["whole"] is whole  # not copied
    assert seen["known"]["b"] is known


# What travels


def counted(sent) -> tuple[int, int]:
    values, bits = count_traffic(sent)
    return int(values), int(bits)


def test_tensors_travel_whole_by_their_width():
    assert counted({}) == (0, 0)
    assert counted(torch.zeros(3)) == (3, 96)
    half = torch.zeros(5, dtype=torch.float16)
    assert counted({"a": torch.zeros(2, 2), "b": {"c": half}}) == (9, 128 + 80)
    assert counted({"a": torch.zeros(2), "known": Known({"b": torch.zeros(9)})}) == (2, 64)
    assert counted({"signs": torch.zeros(7, dtype=torch.bool)}) == (0, 7)


# Lists of the selected or of the others; 1024 bits listed: the bitmap is cheaper.
@pytest.mark.parametrize(
    ("selected", "positions"), [(0, 0), (31, 992), (32, 1000), (500, 1000), (969, 992), (1000, 0)]
)
def test_masked_values_pay_the_cheapest_positions(selected, positions):
    sent = Masked({"a": torch.zeros(1000)}, {"a": torch.arange(1000) < selected})
    assert counted(sent) == (selected, 32 * selected + positions)


def test_positions_are_those_of_the_whole_masked_tree():
    values = {"a": torch.zeros(600), "b": torch.zeros(400, dtype=torch.float64)}
    masks = {"a": torch.arange(600) < 20, "b": torch.arange(400) < 15}
    assert counted(Masked(values, masks)) == (35, 20 * 32 + 15 * 64 + 1000)
    assert counted(Agreed(values, masks)) == (35, 20 * 32 + 15 * 64)  # both sides know them
