"""The smaller networks: the papers' counts and drawings, the shapes that each takes, texts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl import models
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.ground.errors import FedpflError
from tests.command import TINY_TASK, compose_once
from tests.conftest import assert_close, assert_same

COUNTS = [
    ("fedspu_emnist", (1, 28, 28), 62, {}, 64_722),
    ("fedspu_cifar10", (3, 32, 32), 10, {}, 134_902),
    ("fedspu_speech", (1, 32, 32), 35, {}, 26_285),
    ("lenet5", (3, 32, 32), 10, {}, 62_006),
    ("cnn4", (3, 32, 32), 10, {"projection": 256}, 1_269_962),
    ("mlp", (1, 28, 28), 10, {}, 199_210),
    ("mlp", (561,), 6, {"hidden": ()}, 562 * 6),
    ("har_cnn", (9, 128), 6, {}, 2_253_958),
    ("text", (200,), 4, {}, 641_188),
    ("lstm", (80,), 80, {}, 80 * 8 + 4 * 256 * (8 + 256 + 1 + 256 + 256 + 1) + 257 * 80),
    ("text", (20,), 4, {"vocabulary": 100, "width": 8}, 100 * 8 + 8 * 8 + 8 + 9 * 4),
]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count"), COUNTS)
def test_as_many_parameters_as_stated(name, shape, classes, options, count):
    net = models.build_network(name, shape, classes, 0, **options)
    assert sum(p.numel() for p in net.params.values()) == count
    assert net.parts.head == ("classifier.weight", "classifier.bias")
    assert net.parts.layers[-1] == net.parts.head


def normed_stage(inside, outside):
    convolution = nn.Conv2d(inside, outside, 3, padding=1)
    return convolution, nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)


def hidden_stage(inside, outside, bias=True):
    return nn.Linear(inside, outside, bias=bias), nn.ReLU()


def stage(inside, outside):
    return nn.Conv2d(inside, outside, 5), nn.ReLU(), nn.MaxPool2d(2)


LENET = [*stage(1, 6), *stage(6, 16), nn.Flatten()]
LENET += [*hidden_stage(256, 120), *hidden_stage(120, 84), nn.Linear(84, 10)]
MOON = [*stage(1, 32), *stage(32, 64), nn.Flatten(), *hidden_stage(1024, 512)]
MOON += [*hidden_stage(512, 512), nn.Linear(512, 256), nn.Linear(256, 10)]
FEDSPU = [*normed_stage(3, 6), *normed_stage(6, 16), nn.Flatten()]
FEDSPU += [*hidden_stage(1024, 120, bias=False), *hidden_stage(120, 84, bias=False)]
FEDSPU += [nn.Linear(84, 10)]


@pytest.mark.parametrize(
    ("name", "shape", "options", "layers"),
    [
        ("lenet5", (1, 28, 28), {}, LENET),
        ("fedspu_cifar10", (3, 32, 32), {}, FEDSPU),
        ("cnn4", (1, 28, 28), {"projection": 256}, MOON),
    ],
)
def test_a_network_equals_its_papers_drawing(name, shape, options, layers):
    net, drawn = models.build_network(name, shape, 10, 3, **options), nn.Sequential(*layers)
    values = net.module.state_dict().values()
    drawn.load_state_dict(dict(zip(drawn.state_dict(), values, strict=True)))
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    assert_close(net.bind({"main": net.buffers}, training=True)(net.params, x), drawn(x))


@pytest.mark.parametrize(
    ("name", "shape", "says"),
    [
        ("cnn4", (561,), r"takes images \[channels, height, width\], got samples of shape \[561\]"),
        ("resnet8", (1, 2, 3, 4), r"takes images \[channels, height, width\], got samples"),
        ("har_cnn", (1, 28, 28), r"signals \[channels, length\], got samples of shape \[1, 28, "),
        ("har_cnn", (9, 27), "at least 28 points long, got 27"),
        ("text", (9, 128), r"takes token ids \[length\], got samples of shape \[9, 128\]"),
        ("lenet5", (1, 28, 15), "at least 16x16 pixels, got 28x15"),
        ("cnn4", (1, 15, 28), "at least 16x16 pixels, got 15x28"),
        ("fedspu_emnist", (1, 3, 28), "nothing is left of images of 3x28 pixels"),
    ],
)
def test_what_a_network_cannot_take_is_refused(name, shape, says):
    with pytest.raises(FedpflError, match=f"model={name}: .*{says}"):
        models.build_network(name, shape, 10, 0)


def test_the_smallest_samples_that_fit():
    for name, shape in (
        ("har_cnn", (9, 28)),
        ("lenet5", (1, 16, 16)),
        ("fedspu_emnist", (1, 4, 5)),
    ):
        net = models.build_network(name, shape, 3, 0)
        bound = net.bind({"main": net.buffers})
        assert bound(net.params, torch.zeros(2, *shape)).shape == (2, 3)


def test_padding_takes_no_part():
    net = models.build_network("text", (5,), 3, 0, vocabulary=20, width=4)
    bound = net.bind({})
    short, padded = torch.tensor([[3, 7, 7]]), torch.tensor([[3, 7, 0, 7, 0]])
    assert_close(bound(net.params, short), bound(net.params, padded))
    embedding, *layers = net.params.values()
    hidden = F.linear(embedding[[3, 7, 7]].mean(0), *layers[:2]).relu()
    assert_close(bound(net.params, padded)[0], F.linear(hidden, *layers[2:]))
    params = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    (grad,) = torch.autograd.grad(bound(params, padded).sum(), params["embedding.weight"])
    assert grad.abs().sum(1).nonzero().flatten().tolist() == [3, 7]


@pytest.mark.parametrize("name", ["text", "lstm"])
def test_ids_have_any_type_and_large_ones_share_a_row(name):
    net = models.build_network(name, (4,), 3, 0, vocabulary=20, width=8)
    bound = net.bind({})
    ids, far = torch.tensor([[1, 19, 5, 0]]), torch.tensor([[1, 90_001, 5, 0]])
    for dtype in (torch.int32, torch.int64, torch.float32):
        assert_same(bound(net.params, far.to(dtype)), bound(net.params, ids))


def test_lstm_equals_torchs():
    net = models.build_network("lstm", (5,), 3, 0, vocabulary=20, width=6)
    drawn = nn.LSTM(8, 6, 2, batch_first=True)
    ids = torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(0))
    values = {
        name: value.unflatten(0, (6, 4)).transpose(0, 1).flatten(0, 1)
        for name, value in net.params.items()
        if "lstm" in name
    }
    for layer in (0, 1):
        for ours, name in (
            ("weight", "weight_ih"),
            ("recurrent", "weight_hh"),
            ("bias", "bias_ih"),
        ):
            getattr(drawn, f"{name}_l{layer}").data = values[f"lstm{layer + 1}.{ours}"]
        getattr(drawn, f"bias_hh_l{layer}").data.zero_()
    last = drawn(F.embedding(ids, net.params["embedding.weight"]))[0][:, -1]
    expected = F.linear(last, net.params["classifier.weight"], net.params["classifier.bias"])
    assert_close(net.bind({})(net.params, ids), expected)
    assert all(0.3 < value.abs().max() < 6**-0.5 for value in values.values())  # as nn.LSTM draws


def test_models_that_take_the_data_set_are_named():
    with pytest.raises(FedpflError) as told:
        build_run(check_config(compose_once(*TINY_TASK, "model=text")))
    assert str(told.value) == (
        "model=text: takes token ids [length], got images of shape [1, 28, 28] (data set digits);"
        " models that take these: cnn4, fedspu_cifar10, fedspu_emnist, fedspu_speech, lenet5, mlp,"
        " resnet8, resnet10, resnet18, vit"
    )
