"""Sums of squared gradients against autograd, one sample after another."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl.models import build_network, squared_gradients
from fedpfl.models.net import Net
from fedpfl.models.resnet import ResNet
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
        logits = net.bind(buffers)({**net.params, **leaves}, one_x[None])
        loss = F.cross_entropy(logits, one_y[None])
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        for name, gradient in zip(leaves, slopes, strict=True):
            total[name] += w * gradient**2
    return total


def squares(net, params, buffers, x, y, weight):
    bound = net.bind(buffers)

    def loss(own, x, y):
        return F.cross_entropy(bound({**net.params, **own}, x), y)

    return squared_gradients(bound, loss, params, x, y, weight)


NETS = {
    "mixed": (lambda: Net(Mixed()), (2, 9, 8)),
    "cnn4": (lambda: build_network("cnn4", (1, 16, 16), 3, seed=1), (1, 16, 16)),
    "resnet": (lambda: Net(ResNet((3, 8, 8), 3, (1, 1), "batch", "small")), (3, 8, 8)),
}
SOME = ("wide.weight", "norm.weight", "classifier.bias", "twice.weight")


@pytest.mark.parametrize(
    ("name", "chosen"), [*((name, None) for name in NETS), ("mixed", SOME)], ids=str
)
def test_they_are_those_of_a_loop(name, chosen):
    make, shape = NETS[name]
    torch.manual_seed(3)
    net, count = make(), 37
    params, buffers = (
        {name: net.params[name] for name in chosen or net.params},
        {"main": net.buffers},
    )
    data = (
        torch.randn(count, *shape),
        torch.randint(3, (count,)),
        (torch.arange(count) % 5 > 0).float(),
    )
    expected = by_hand(net, params, buffers, *data)
    assert_close(squares(net, params, buffers, *data), expected, atol=1e-7, rtol=1e-4)
