"""FedPHP (ECML PKDD 2021): how much is inherited, and the discrepancy at its ends."""

import pytest
import torch
from torch.func import grad

from fedpfl.methods import FedPHP
from fedpfl.methods.fedphp import squared_mmd
from tests.conftest import assert_close, tiny


def method(**values):
    return FedPHP(participation=0.5, **values)


def features(seed, count=9):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


def test_momentum_ends_at_its_highest():
    known = {"expected": torch.tensor(4.0)}
    stays = [method().prepare(known, {"count": torch.tensor(float(n))})["mu"] for n in range(7)]
    assert_close(torch.stack(stays), torch.tensor([0, 0.225, 0.45, 0.675, 0.9, 0.9, 0.9]))


@pytest.mark.parametrize(
    ("participation", "rounds", "expected"), [(0.29, 100, 29), (0.5, 7, 3), (0.1, 3, 1)]
)
def test_the_expected_number_is_the_integer_part_and_at_least_one(participation, rounds, expected):
    net = tiny().with_facts(rounds=rounds)
    assert (
        FedPHP(participation=participation).init(net.params, net.parts)[0]["expected"] == expected
    )


def test_the_discrepancy_is_none_between_equals_and_grows():
    f, g, ones = features(0), features(1) + 1, torch.ones(9)
    assert squared_mmd(f, f, ones).abs() < 1e-6
    assert grad(squared_mmd)(f, f.clone(), ones).abs().max() < 1e-6
    assert_close(squared_mmd(f, g, ones), squared_mmd(g, f, ones))
    assert 0.1 < squared_mmd(f, g, ones) < squared_mmd(f, g + 3, ones) <= 10
    assert grad(squared_mmd)(f, g, ones).abs().max() > 1e-3
    padded = [torch.cat([own, torch.zeros(3, 6)]) for own in (f, g)]
    assert_close(squared_mmd(*padded, torch.tensor([1.0] * 9 + [0.0] * 3)), squared_mmd(f, g, ones))
    assert_close(
        squared_mmd(100 * f, 100 * g, ones), squared_mmd(f, g, ones)
    )  # the width follows the batch
