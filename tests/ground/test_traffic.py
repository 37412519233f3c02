"""What travels, counted by hand."""

import pytest
import torch

from fedpfl.ground.traffic import count_traffic
from fedpfl.ground.tree import Agreed, Known, Masked
from fedpfl.methods import FedOBP
from fedpfl.methods.shared.importance import personal_count
from tests.conftest import record_rounds

N, N_HEAD = 549, 65  # of the tiny net: 40 + 444 + 65


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


@pytest.mark.parametrize(
    ("selected", "positions"),
    [
        (0, 0),
        (10, 320),  # a list of the selected
        (31, 992),
        (32, 1000),  # 1024 bits listed: the bitmap is cheaper
        (500, 1000),
        (969, 992),  # a list of the 31 others
        (999, 32),
        (1000, 0),
    ],
)
def test_masked_values_pay_the_cheapest_positions(selected, positions):
    sent = Masked({"a": torch.zeros(1000)}, {"a": torch.arange(1000) < selected})
    assert counted(sent) == (selected, 32 * selected + positions)


def test_positions_are_those_of_the_whole_masked_tree():
    values = {"a": torch.zeros(600), "b": torch.zeros(400, dtype=torch.float64)}
    masks = {"a": torch.arange(600) < 20, "b": torch.arange(400) < 15}
    assert counted(Masked(values, masks)) == (35, 20 * 32 + 15 * 64 + 1000)
    assert counted(Agreed(values, masks)) == (35, 20 * 32 + 15 * 64)  # both sides know them


def test_fedobp_counts_only_scored_entries_when_only_the_classifier_is(net, federation):
    method = FedOBP(q=0.5, classifier_only=True)
    _, outcomes = record_rounds(method, net, federation)
    sent = N - personal_count(0.5, N_HEAD)
    assert [outcome.traffic.values_down for outcome in outcomes] == [5 * N, 5 * sent, 5 * sent]
    # The bitmap of the head is cheaper.
    assert outcomes[1].traffic.bits_down == 5 * (32 * sent + N_HEAD)
