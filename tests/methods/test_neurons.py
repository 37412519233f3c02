"""Sub-models along neurons: counts, choices, and which entries lie between chosen neurons."""

import pytest
import torch

from fedpfl import models
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods.shared import neurons
from tests.conftest import tiny

NET = tiny(norm=True)  # conv 4, norm 4, fc 12 over 4 x 9, classifier 5
PLAN = neurons.build_plan(NET.params, NET.parts)


def share(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def chosen(active: torch.Tensor) -> tuple[list[int], list[int]]:
    """Numbers of the active neurons of conv and of fc."""
    assert active[-1]
    return active[:4].nonzero().flatten().tolist(), active[4:16].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("width", "rounding", "expected"),
    [
        *((1.0, "floor", [4, 12]), (0.6, "floor", [2, 7]), (0.6, "ceil", [3, 8])),
        *((0.6, "round", [2, 7]), (0.625, "round", [3, 8]), (0.25, "floor", [1, 3])),
        *((0.2, "floor", [1, 2]), (0.01, "ceil", [1, 1]), (0.25, "ceil", [1, 3])),  # one at least
    ],
)
def test_kept(width, rounding, expected):
    kept = neurons.neuron_counts(PLAN, share(width), rounding)
    assert [own.unique().tolist() for own in kept.split([4, 12])] == [[own] for own in expected]


def test_exact_shares_are_not_rounded_away():
    plan = {"width": torch.full((100,), 100)}
    for hundredths in range(1, 101):
        for rounding in ("floor", "ceil", "round"):
            kept = neurons.neuron_counts(plan, share(hundredths / 100), rounding)
            assert kept.unique().tolist() == [hundredths]


def test_top_takes_the_highest_of_each_group_and_of_equals_the_first():
    score = torch.tensor([1.0, 5.0, 5.0, -2.0, *torch.arange(12).tolist()])
    assert chosen(neurons.top_neurons(PLAN, share(0.25), score)) == ([1], [9, 10, 11])
    assert chosen(neurons.top_neurons(PLAN, share(0.5), score)) == ([1, 2], [6, 7, 8, 9, 10, 11])
    assert chosen(neurons.top_neurons(PLAN, share(0.5), torch.zeros(16))) == (
        [0, 1],
        [0, 1, 2, 3, 4, 5],
    )


def test_networks_without_a_wiring_say_so():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.b(self.a(x).cumsum(1))

    net = models.Net(Odd())
    with pytest.raises(FedpflError, match="cannot tell this one's neurons: cumsum"):
        neurons.build_plan(net.params, net.parts)
    assert tree.size(net.params) > 0


def test_a_network_without_hidden_neurons_says_so():
    net = models.Net(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)))
    with pytest.raises(FedpflError, match="this one has no hidden neurons"):
        neurons.build_plan(net.params, net.parts)
