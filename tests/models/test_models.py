"""The papers' networks: counts, parts, initial values, and the functional face."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl import models
from fedpfl.ground import memory
from fedpfl.ground.errors import FedpflError
from fedpfl.models.norm import BatchNorm2d
from tests.conftest import assert_close, assert_same

PUBLISHED = [  # shape, classes, parameters, body
    ((3, 32, 32), 10, 878_538, 873_408),
    ((3, 32, 32), 100, 924_708, 873_408),
    ((1, 28, 28), 10, 582_026, 576_896),
    ((1, 28, 28), 62, 608_702, 576_896),
    ((1, 28, 28), 11, 582_539, 576_896),
]


def sequential(shape: tuple[int, int, int], classes: int, flat: int) -> nn.Sequential:
    """The network as the paper draws it: ReLU, then pooling."""
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(flat, 512), nn.ReLU(), nn.Linear(512, classes)),
    )


@pytest.mark.parametrize(("shape", "classes", "total", "body"), PUBLISHED)
def test_cnn4_has_the_published_number_of_parameters(shape, classes, total, body):
    net = models.build_network("cnn4", shape, classes, seed=0)
    count = {name: p.numel() for name, p in net.params.items()}
    assert sum(count.values()) == total
    assert sum(count[name] for name in net.parts.body) == body
    assert sum(count[name] for name in net.parts.head) == total - body == 513 * classes
    layers = [sum(count[name] for name in layer) for layer in net.parts.layers]
    convolution, hidden = (832, 524_800) if shape[0] == 1 else (2_432, 819_712)
    assert layers == [convolution, 51_264, hidden, 513 * classes]
    assert net.buffers == {}


@pytest.mark.parametrize("seed", [0, 42])
def test_cnn4_starts_from_the_seeds_default_initialisation_in_order_of_the_layers(seed):
    net = models.build_network("cnn4", (1, 28, 28), 10, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = sequential((1, 28, 28), 10, 1024)
    assert_same(list(net.params.values()), list(plain.parameters()))


def test_cnn4_equals_relu_then_pool_bit_for_bit_in_values_and_gradients():
    net = models.build_network("cnn4", (3, 32, 32), 10, 1)
    plain = sequential((3, 32, 32), 10, 1600)
    plain.load_state_dict(dict(zip(plain.state_dict(), net.params.values(), strict=True)))
    x = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    params = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    logits, expected = net.bind({})(params, x), plain(x)
    assert torch.equal(logits, expected)
    y = torch.arange(6)
    got = torch.autograd.grad(F.cross_entropy(logits, y), list(params.values()))
    want = torch.autograd.grad(F.cross_entropy(expected, y), list(plain.parameters()))
    assert_same(got, want)


@pytest.mark.parametrize(
    ("name", "shape", "options", "mend"),
    [
        ("mlp", (784,), {"hidden": (10**9,)}, "lower model.hidden"),
        ("mlp", (784,), {"hidden": (10**5, 10**5)}, "lower model.hidden"),
        ("text", (64,), {"vocabulary": 10**30, "width": 32}, "lower model.vocabulary or .*"),
        ("cnn4", (3, 10_000, 10_000), {}, "lower the size of the samples"),
        ("resnet8", (10**12, 8, 8), {"norm": "group"}, "lower the size of the samples"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_before_any_is_taken(
    name, shape, options, mend, monkeypatch
):
    monkeypatch.setattr(memory, "total_memory", lambda: 16 * 2**30)
    told = rf"^model={name}: its parameters.* would take .*; {mend}$"
    with pytest.raises(FedpflError, match=told):
        models.build_network(name, shape, 10, 0, **options)


class Sum(nn.Module):
    """A network of somebody's own, with one mistake or another."""

    def __init__(self, shape, classes, mistake=""):
        super().__init__()
        self.mistake = mistake
        self.fc = nn.Linear(shape[0], 5 if mistake == "classes" else classes)
        if mistake == "meta":  # none: what needs values to be made cannot be made without
            self.scale = float(self.fc.weight.detach().abs().max())
        if mistake == "name":
            self.absent(shape)

    def forward(self, x):
        if self.mistake == "shape":
            x = x[:, 1:]
        return self.fc(x.sum(0) if self.mistake == "batch" else x)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("classes", r"answers two samples by \[2, 5\], expected logits \[2, 3\]"),
        ("batch", r"answers two samples by \[3\], expected logits \[2, 3\]"),
        ("shape", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("name", "AttributeError: 'Sum' object has no attribute 'absent'"),
    ],
)
def test_mistakes_of_a_networks_author_are_one_line(mistake, says, monkeypatch):
    monkeypatch.setitem(models.MODELS, "sum", Sum)
    assert models.build_network("sum", (4,), 3, 0).params["fc.weight"].shape == (3, 4)
    meta = models.build_network("sum", (4,), 3, 0, mistake="meta")
    assert meta.params["fc.weight"].shape == (3, 4)
    with pytest.raises(FedpflError, match=f"^model=sum: {says}") as error:
        models.build_network("sum", (4,), 3, 0, mistake=mistake)
    assert "\n" not in str(error.value)


def test_batch_norm_ignores_rows_of_weight_zero():
    """Values, gradients and statistics are those of nn.BatchNorm2d on the real rows, whatever the
    padding holds.
    """
    real = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    plain, padded = nn.BatchNorm2d(3), BatchNorm2d(3)
    x = torch.cat([real, torch.full((4, 3, 4, 4), 1e4)]).requires_grad_()
    y = real.clone().requires_grad_()
    for _ in range(3):
        padded.sample_weight = torch.tensor([1.0] * 5 + [0.0] * 4)
        out, want = padded(x), plain(y)
        assert_close(out[:5], want)
    probe = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (got_grad,) = torch.autograd.grad((out[:5] * probe).sum(), x)
    (want_grad,) = torch.autograd.grad((want * probe).sum(), y)
    assert_close(got_grad[:5], want_grad)
    assert got_grad[5:].abs().max() == 0
    assert_close(dict(padded.named_buffers()), dict(plain.named_buffers()))


def test_batch_norm_in_bf16_has_float32_statistics():
    """As torch's: means far from zero keep their digits, and what goes on is bf16."""
    x = 3 + torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    plain, weighted = nn.BatchNorm2d(3), BatchNorm2d(3)
    weighted.sample_weight = torch.ones(16)
    want, got = plain(x.bfloat16()), weighted(x.bfloat16())
    assert got.dtype == want.dtype == torch.bfloat16
    assert_close(got, want, atol=1e-2, rtol=1e-2)
    assert_close(dict(weighted.named_buffers()), dict(plain.named_buffers()), rtol=1e-5)
