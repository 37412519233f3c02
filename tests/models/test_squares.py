"""Sums of squared gradients against autograd, one sample after another."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

from fedpfl.models import build_network, squared_gradients
from fedpfl.models.net import Net
from tests.conftest import assert_close


class Mixed(nn.Module):
    """Strides, dilation, groups, no bias, a normalisation, a layer used twice, a layer on
    sequences.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.wide = nn.Conv2d(6, 4, (2, 3), dilation=2, padding=(2, 1))
        self.grouped = nn.Conv2d(4, 4, 1, groups=2)
        self.same = nn.Conv2d(4, 4, 3, padding="same")
        self.places = nn.Linear(4, 5)
        self.twice = nn.Linear(5, 5)
        self.classifier = nn.Linear(5, 3)

    def forward(self, x):
        x = self.same(self.grouped(self.wide(F.relu(self.norm(self.first(x))))))
        x = torch.tanh(self.places(x.flatten(2).transpose(1, 2))).mean(1)
        return self.classifier(self.twice(torch.tanh(self.twice(x))))


def by_hand(net, params, buffers, x, y, weight):
    total = {name: torch.zeros_like(value) for name, value in params.items()}
    for one_x, one_y, w in zip(x, y, weight, strict=True):
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        loss = F.cross_entropy(
            net.bind(buffers)({**net.params, **leaves}, one_x[None]), one_y[None]
        )
        for name, gradient in zip(
            leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True
        ):
            total[name] += w * gradient**2
    return total


def squares(net, params, buffers, x, y, weight):
    bound = net.bind(buffers)

    def loss(own, x, y):
        return F.cross_entropy(bound({**net.params, **own}, x), y)

    return squared_gradients(bound, loss, params, x, y, weight)


def samples(shape, classes, count=37):
    torch.manual_seed(3)
    return (
        torch.randn(count, *shape),
        torch.randint(classes, (count,)),
        (torch.arange(count) % 5 > 0).float(),
    )


NETS = {
    "mixed": lambda: (Net(Mixed()), (2, 9, 8)),
    "cnn4": lambda: (build_network("cnn4", (1, 16, 16), 3, seed=1), (1, 16, 16)),
    "resnet8": lambda: (build_network("resnet8", (3, 16, 16), 3, seed=1), (3, 16, 16)),
}


@pytest.mark.parametrize("name", NETS)
def test_they_are_those_of_a_loop(name):
    net, shape = NETS[name]()
    data = samples(shape, 3)
    buffers = {"main": net.buffers}
    expected = by_hand(net, net.params, buffers, *data)
    assert_close(squares(net, net.params, buffers, *data), expected, atol=1e-7, rtol=1e-4)


def test_some_parameters_only():
    net, shape = NETS["mixed"]()
    data, buffers = samples(shape, 3), {"main": net.buffers}
    some = {
        name: net.params[name]
        for name in ("wide.weight", "norm.weight", "classifier.bias", "twice.weight")
    }
    assert_close(
        squares(net, some, buffers, *data), by_hand(net, some, buffers, *data), atol=1e-7, rtol=1e-4
    )


def test_many_clients_at_once():
    net, shape = NETS["cnn4"]()
    stacked = {
        name: torch.stack([value, value * 0.5, -value]) for name, value in net.params.items()
    }
    parts = [samples(shape, 3, 5), samples(shape, 3, 5), samples(shape, 3, 5)]
    x, y, weight = (torch.stack(part) for part in zip(*parts, strict=True))
    found = vmap(lambda *row: squares(net, row[0], {}, *row[1:]))(stacked, x, y, weight)
    for i in range(3):
        own = {name: value[i] for name, value in stacked.items()}
        expected = by_hand(net, own, {}, x[i], y[i], weight[i])
        assert_close(
            {name: value[i] for name, value in found.items()}, expected, atol=1e-7, rtol=1e-4
        )
