"""Layers are torch's: pooling of models side by side with gradients of both orders, convolutions with
channels last, sums of squared gradients against a loop over samples.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from fedpfl.models import build_network, convolution, squared_gradients
from fedpfl.models.convolution import Conv2d
from fedpfl.models.net import Net
from fedpfl.models.pool import max_pool
from fedpfl.models.resnet import ResNet
from tests.conftest import assert_close, assert_same


def test_pooling_of_models_is_pytorchs_with_gradients_of_both_orders():
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(3, 4, 2, 3, 3, generator=g), torch.randn(3, 5, 2, 13, 11, generator=g)

    def results(pool, x_dim):
        images = x if x_dim == 0 else x[0]

        def loss(w, x):
            return (pool(F.conv2d(x, w), 2) ** 3).sum()

        def slope(w, x):
            return (grad(loss)(w, x) ** 2).sum()

        def samples(w, x):
            return vmap(grad(lambda w, x: loss(w, x[None])), (None, 0))(w, x)

        return [vmap(f, (0, x_dim))(w, images) for f in (loss, grad(loss), grad(slope), samples)]

    for x_dim in (0, None):
        convolved = vmap(F.conv2d, (x_dim, 0))(x if x_dim == 0 else x[0], w)
        pooled, expected = (
            vmap(pool, (0, None))(convolved, 2) for pool in (max_pool, F.max_pool2d)
        )
        assert_same(pooled, expected)
        assert_close(results(max_pool, x_dim), results(F.max_pool2d, x_dim), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "size"), [((3, 5, 8, 8), 2), ((2, 3, 7, 9), 3)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_pooling_without_gradients_is_pytorchs_to_the_bit(shape, size, dtype, layout):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x.to(dtype).contiguous(memory_format=layout)
    x[0, 0, 0, 0], x[-1, -1, 0, 1], x[-1, -1, 1, 1] = torch.nan, torch.inf, -torch.inf
    integer = torch.int32 if dtype is torch.float32 else torch.int16
    pooled, expected = max_pool(x, size), F.max_pool2d(x, size)
    assert torch.equal(pooled.contiguous().view(integer), expected.contiguous().view(integer))
    assert pooled.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("several", [False, True], ids=["one model", "three models"])
def test_channels_last_change_no_value(several, monkeypatch):
    layer = Conv2d(8, 6, 5)
    models = (3,) if several else ()
    params = {"weight": torch.randn(*models, 6, 8, 5, 5), "bias": torch.randn(*models, 6)}
    x = torch.randn(*models, 4, 8, 9, 9)

    def mean_square(params, x):
        return functional_call(layer, params, (x,)).square().mean()

    differentiate = vmap(grad(mean_square)) if several else grad(mean_square)
    plain = differentiate(params, x)
    monkeypatch.setattr(convolution, "prefers_channels_last", lambda x, weight: True)
    assert_close(differentiate(params, x), plain, rtol=1e-5, atol=1e-5)


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
    params = {name: net.params[name] for name in chosen or net.params}
    buffers, weight = {"main": net.buffers}, (torch.arange(count) % 5 > 0).float()
    data = torch.randn(count, *shape), torch.randint(3, (count,)), weight
    bound = net.bind(buffers)

    def loss(own, x, y):
        return F.cross_entropy(bound({**net.params, **own}, x), y)

    found = squared_gradients(bound, loss, params, *data)
    assert_close(found, by_hand(net, params, buffers, *data), atol=1e-7, rtol=1e-4)
