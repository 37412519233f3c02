"""FedCAC and FedPURIN (arXiv:2510.16065): critical entries, collaborators and traffic."""

import pytest
import torch

from fedpfl.ground import tree
from fedpfl.methods import FedPURIN
from fedpfl.methods.shared.critical import collaboration_mask, mask_overlaps, select_highest
from tests.conftest import make_federation, record_rounds

EVERYONE = [[0, 1, 2, 3]]


@pytest.fixture(scope="module")
def equal():
    """Four clients of one size, whose plain mean is the mean by samples."""
    return make_federation((40,) * 4, (8,) * 4)


def begins(method, server, client):
    """The model that a client's local training starts from."""
    return method._begin(server, method.prepare(server, client))


def test_scores_up_to_the_cutoff_are_not_critical_as_long_as_there_are_others():
    score = torch.tensor([0.0, 1e-11, 3e-11, 2.0, 0.0, 1.0])
    assert select_highest(score, 0.5, 1e-10).tolist() == [False, False, False, True, False, True]
    assert select_highest(score, 0.5, -1).tolist() == [False, False, True, True, False, True]
    assert select_highest(score, 0.5, 0.0).tolist() == [False, False, True, True, False, True]
    assert select_highest(score, 0.9, 0.0).tolist() == [False, True, True, True, False, True]
    assert select_highest(score, 0.3, 1e-10).tolist() == [False, False, False, True, False, False]
    assert select_highest(score[:3], 0.4, 1e-10).tolist() == [False, False, True]  # there are none


def test_equal_scores_are_all_critical_and_without_scores_a_tensor_stays_intact():
    assert select_highest(torch.tensor([1.0, 2.0, 2.0, 2.0]), 0.25, 1e-10).tolist() == [
        *(False, True, True, True)
    ]
    for cutoff in (1e-10, -1.0):
        assert select_highest(torch.zeros(2, 3), 0.5, cutoff).all()


def test_an_empty_mask_overlaps_with_nobody():
    found = mask_overlaps({"a": torch.tensor([[False, False], [True, False], [True, True]])})
    assert found.tolist() == [[0, 0, 0], [0.5, 1, 0.5], [0.5, 0.75, 1]]
    assert collaboration_mask(found, 3, 10).diagonal().all()  # but each collaborates with itself


@pytest.mark.parametrize("value", [0.7, 1 / 3, 0.1, 1.0, 0.0])
def test_equal_overlaps_let_everybody_collaborate_in_every_round(value):
    overlap = torch.full((7, 7), value, dtype=torch.float64).fill_diagonal_(1.0)
    for t in (1, 3, 10, 11, 1000):
        assert collaboration_mask(overlap, t, 10).all()


def test_critical_entries_go_up_and_what_is_not_zero_comes_down(backend, net, equal):
    method, size, half = FedPURIN(beta=2), tree.size(net.params), 2 + 18 + 6 + 216 + 2 + 30
    states, outcomes = record_rounds(method, net, equal, EVERYONE * 4, engine=backend)
    for t, (state, outcome) in enumerate(zip(states, outcomes, strict=False)):
        assert outcome.traffic.values_up == 4 * half
        assert outcome.traffic.bits_up == 4 * (32 * half + size)
        wanted = 0
        for client in range(4):
            own = state.client(client)
            start, alone = begins(method, state.server, own), t > 0 and own["partners"] == 0
            for name, leaf in start.items():
                wanted += int(((leaf != 0) & ~(own["mask"][name] & alone)).sum())
        assert outcome.traffic.values_down == wanted
        assert outcome.traffic.bits_down > 32 * wanted or wanted == 4 * size
    assert outcomes[0].traffic.values_down == 4 * size
    assert outcomes[3].traffic.values_down < 4 * half < outcomes[1].traffic.values_down < 4 * size
    told = outcomes[3].metrics
    assert told == {"critical_share": half / size, "collaborators": 0}
    assert outcomes[1].metrics["collaborators"] > 0
    assert outcomes[0].metrics == {"critical_share": 0, "collaborators": 0}
