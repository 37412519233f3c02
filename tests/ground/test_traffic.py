"""What travels, counted by hand."""

import pytest
import torch

from fedpfl.ground.traffic import count_traffic
from fedpfl.ground.tree import Known, Masked
from fedpfl.methods import FedOBP
from fedpfl.methods.shared.importance import personal_count
from tests.conftest import COHORTS, record_rounds, record_states

N, N_HEAD = 549, 65  # of the tiny net: 40 + 444 + 65


def counted(sent) -> tuple[int, int]:
    values, bits = count_traffic(sent)
    return int(values), int(bits)


def mask(selected: int, n: int) -> torch.Tensor:
    return torch.arange(n) < selected


def test_tensors_travel_whole_by_their_width():
    assert counted({}) == (0, 0)
    assert counted(torch.zeros(3)) == (3, 96)
    assert counted({"a": torch.zeros(2, 2), "b": {"c": torch.zeros(5, dtype=torch.float16)}}) == (
        9,
        128 + 80,
    )
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
    sent = Masked({"a": torch.zeros(1000)}, {"a": mask(selected, 1000)})
    assert counted(sent) == (selected, 32 * selected + positions)


def test_positions_are_those_of_the_whole_masked_tree():
    sent = Masked(
        {"a": torch.zeros(600), "b": torch.zeros(400, dtype=torch.float64)},
        {"a": mask(20, 600), "b": mask(15, 400)},
    )
    assert counted(sent) == (35, 20 * 32 + 15 * 64 + 1000)


def test_fedobp_counts_only_scored_entries_when_only_the_classifier_is(net, federation):
    method = FedOBP(q=0.5, classifier_only=True)
    _, outcomes = record_rounds(method, net, federation)
    n_q = personal_count(0.5, N_HEAD)
    assert [outcome.traffic.values_down for outcome in outcomes] == [
        5 * N,
        5 * (N - n_q),
        5 * (N - n_q),
    ]
    assert outcomes[1].traffic.bits_down == 5 * (
        32 * (N - n_q) + N_HEAD
    )  # the bitmap of the head is cheaper
    assert set(outcomes[1].metrics) == {f"personal/{name}" for name in net.parts.head}


def test_personal_entries_never_trained_are_not_counted_with_cold_start_global(net, federation):
    state = record_states(FedOBP(q=0.9, cold_start="global"), net, federation, COHORTS[:1])[-1]
    method = FedOBP(q=0.9, cold_start="global")
    for client in range(10):
        prepared = method.prepare(state.server, state.client(client))
        values, _ = counted(method.download(state.server, prepared))
        assert values == (N - personal_count(0.9, N) if client in COHORTS[0] else N)
