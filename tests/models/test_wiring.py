"""Wiring: which neurons entries belong to, by cutting sub-models out of networks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl import models
from fedpfl.ground import tree
from fedpfl.models import Net
from fedpfl.models.norm import BatchNorm1d
from fedpfl.models.resnet import ResNet
from fedpfl.models.wiring import Wiring, trace_wiring
from tests.conftest import CLASSES, assert_close, entries_between, tiny


def some(wiring: Wiring) -> dict[str, Tensor]:
    """A random set of neurons, at least one of each group."""
    g = torch.Generator().manual_seed(0)
    active = {}
    for group, width in wiring.widths.items():
        active[group] = torch.rand(width, generator=g) < 0.5
        active[group][int(torch.randint(width, (), generator=g))] = True
    return active


def cut(wiring: Wiring, active: dict[str, Tensor], values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows and columns of active neurons, as a small dense network has them."""
    out = {}
    for name, value in values.items():
        for at, axis in enumerate(wiring.axes[name]):
            if axis is not None:
                neurons = active[axis.group].nonzero().flatten().tolist()
                kept = [n * axis.block + i for n in neurons for i in range(axis.block)]
                value = value.index_select(at, torch.tensor(kept))
        out[name] = value
    return out


def restless(net: Net) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and buffers, float64, of which none is 0 or 1 by the initial values."""
    g = torch.Generator().manual_seed(7)

    def move(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        scale, shift = (torch.rand(leaf.shape, generator=g) for _ in range(2))
        return leaf.double() * (0.9 + 0.2 * scale) + 0.02 * shift

    return tree.map(move, net.params), tree.map(move, net.buffers)


def in_line(*layers: nn.Module) -> Net:
    return Net(nn.Sequential(*layers))


BUILT_IN = {
    "cnn4": ((1, 16, 20), {}),
    "resnet8": ((2, 12, 12), {"stem": "small"}),
    "fedspu_cifar10": ((3, 8, 8), {}),
    "mlp": ((11,), {}),
    "har_cnn": ((3, 36), {}),
    "text": ((6,), {"vocabulary": 5}),
    "lstm": ((6,), {"vocabulary": 5, "width": 7}),
}
NETS = {  # how to build, the inputs of one sample
    "tiny": (tiny, (1, 8, 8)),
    "tiny with norm": (lambda: tiny(norm=True), (1, 8, 8)),
    **{
        name: (partial(models.build_network, name, shape, CLASSES, 0, **options), shape)
        for name, (shape, options) in BUILT_IN.items()
    },
    # An identity, a projection, and an identity behind one
    "resnet": (lambda: Net(ResNet((3, 8, 8), CLASSES, (1, 2), "batch", "small")), (3, 8, 8)),
    "norm behind flattening": (
        lambda: in_line(
            *(nn.Conv2d(1, 3, 3), nn.Flatten(), BatchNorm1d(27), nn.Linear(27, 6)),
            *(BatchNorm1d(6), nn.Linear(6, CLASSES)),
        ),
        (1, 5, 5),
    ),
    "pooled to a place": (
        lambda: in_line(
            nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES)
        ),
        (1, 5, 5),
    ),
    "mean of places": (lambda: Net(Does(lambda m, x, h: h)), (1, 5, 5)),
}
MODES = [(name, "train padded") for name in NETS]
# For BatchNorm alone they differ.
MODES += [("tiny with norm", "eval"), ("tiny with norm", "train")]


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_zeroed_entries_are_as_good_as_a_small_dense_network(name, mode):
    """Logits, gradients, and statistics of the neurons that are left; nothing that is not finite
    among the others.
    """
    make, shape = NETS[name]
    net = make()
    wiring = net.parts.wiring
    active = some(wiring)
    params, buffers = restless(net)
    x = torch.randn(9, *shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = x.abs() * 3 if name in ("text", "lstm") else x
    y = torch.arange(9) % CLASSES
    weight = torch.tensor([1.0] * 6 + [0.0] * 3) if mode == "train padded" else None

    def run(
        params: dict[str, Tensor], buffers: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict]:
        bound = net.bind({"main": buffers}, training=mode != "eval", weight=weight)
        params = {n: p.clone().requires_grad_() for n, p in params.items()}
        logits = bound(params, x)
        losses = F.cross_entropy(logits, y, reduction="none")
        loss = (losses if weight is None else losses * weight).sum()
        grads = torch.autograd.grad(loss, list(params.values()))
        return logits.detach(), dict(zip(params, grads, strict=True)), bound.buffers["main"]

    mask = entries_between(net, active)
    zeroed = {n: p * mask[n] for n, p in params.items()}
    logits, grads, after = run(zeroed, {n: b * mask[n] for n, b in buffers.items()})
    small = cut(wiring, active, params)
    small_logits, small_grads, small_after = run(small, cut(wiring, active, buffers))
    kept = 6 if weight is not None else 9
    assert_close(logits[:kept], small_logits[:kept], atol=1e-5, rtol=1e-5)
    assert_close(cut(wiring, active, grads), small_grads, atol=1e-5, rtol=1e-5)
    assert_close(cut(wiring, active, after), small_after, atol=1e-9, rtol=1e-9)
    assert all(leaf.isfinite().all() for leaf in (*grads.values(), *after.values()))
    assert sum(int(mask[n].sum()) for n in params) == tree.size(small)


class Does(nn.Module):
    """conv, something, mean, classifier."""

    def __init__(self, something, **layers: nn.Module):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.classifier = nn.Linear(4, CLASSES)
        self.something = something

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.something(self, x, self.conv(x)).mean((2, 3)))


def with_more(layer):
    return lambda: Does(lambda m, x, h: m.more(h), more=layer)


def with_function(function):
    return lambda: Does(function)


UNKNOWN = [
    (with_more(nn.Conv2d(4, 4, 3, groups=4)), "more: convolutions in 4 groups"),
    (with_function(lambda m, x, h: h + x), "add: adds neurons and the network's input"),
    (with_function(lambda m, x, h: m.conv(h)), "conv: is used twice"),
    (lambda: Does(lambda m, x, h: h, unused=nn.Linear(2, 2)), r"unused\.weight belongs to no"),
    (with_function(lambda m, x, h: h if h.sum() > 0 else -h), "cannot be traced"),
    (with_function(lambda m, x, h: h * m.classifier.weight.sum()), r"classifier[._]weight"),
    (with_function(lambda m, x, h: h.mean(1, keepdim=True)), "mean: takes neurons together"),
    (lambda: Does(lambda m, x, h: h + m.more(x), more=nn.Conv2d(1, 1, 1)), "conv and more do not"),
]


@pytest.mark.parametrize(("network", "says"), UNKNOWN)
def test_what_is_not_known_is_refused_by_name(network, says):
    with pytest.raises(ValueError, match=says):
        trace_wiring(network())


def test_a_network_without_wiring_fails_only_when_asked():
    net = Net(with_more(nn.Conv2d(4, 4, 3, groups=2))())
    with pytest.raises(ValueError, match="groups"):
        _ = net.parts.wiring
