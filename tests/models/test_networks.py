"""The networks: the papers' counts, drawings and initial values, the shapes that each takes, texts,
mistakes of a user's own, BatchNorm of padded batches; every method on every kind of network, where
what it assumes of a network shows that the contract's one smooth network of images does not show.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl import models
from fedpfl.data.federation import Shape
from fedpfl.engine import FineTuning
from fedpfl.engine.keys import Draws
from fedpfl.ground import vision
from fedpfl.methods import METHODS
from fedpfl.models import Net
from fedpfl.models.heads import trace_layers
from fedpfl.models.norm import BatchNorm2d
from fedpfl.models.resnet import ResNet
from fedpfl.models.traits import made_up_samples
from fedpfl.testing.toy import BACKENDS, CLASSES, LOCAL
from tests import networks
from tests.conftest import (
    CUTS_NEURONS,
    HEAD,
    assert_close,
    assert_same,
    build_method,
    evaluate,
    make_federation,
    read_cases,
    record_rounds,
)
from tests.data.promises import one_line

COUNTS = [  # with the small stem: 64 * 3 * (49 - 9) fewer
    ("cnn4", (3, 32, 32), 100, {}, 924_708, 0),
    ("cnn4", (1, 28, 28), 62, {}, 608_702, 0),
    ("cnn4", (3, 32, 32), 10, {"projection": 256}, 1_269_962, 0),
    ("fedspu_emnist", (1, 28, 28), 62, {}, 64_722, 80),
    ("fedspu_cifar10", (3, 32, 32), 10, {}, 134_902, 44),
    ("fedspu_speech", (1, 32, 32), 35, {}, 26_285, 200),
    ("resnet8", (3, 32, 32), 10, {}, 1_235_274, 2_688),
    ("resnet10", (3, 32, 32), 100, {}, 4_957_092, 5_760),
    ("resnet18", (3, 32, 32), 10, {}, 11_181_642, 9_600),
    ("resnet8", (3, 32, 32), 10, {"stem": "small", "norm": "group"}, 1_227_594, 2_688),
    ("lenet5", (3, 32, 32), 10, {}, 62_006, 0),
    ("mlp", (1, 28, 28), 10, {}, 199_210, 0),
    ("har_cnn", (9, 128), 6, {}, 2_253_958, 0),
    ("text", (200,), 4, {}, 641_188, 0),
    ("lstm", (80,), 80, {}, 80 * 8 + 4 * 256 * (8 + 256 + 1 + 256 + 256 + 1) + 257 * 80, 0),
]
"""Name, shape of samples, classes, options, parameters in all and of normalisation."""


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count", "of_norms"), COUNTS)
def test_as_many_parameters_as_published(name, shape, classes, options, count, of_norms):
    net = models.build_network(name, shape, classes, 0, **options)
    assert sum(p.numel() for p in net.params.values()) == count
    assert net.parts.layers[-1] == net.parts.head == HEAD
    norms = {name for name in net.params if "norm" in name or ".project.1" in name}
    assert set(net.parts.normalisation) == norms
    assert sum(net.params[name].numel() for name in norms) == of_norms
    assert [entry for layer in net.parts.layers for entry in layer] == [*net.params]
    assert [*net.parts.body, *HEAD] == [*net.params]
    weights = [entry for entry in net.params if entry.endswith(".weight") and entry not in norms]
    assert [layer[0] for layer in net.parts.layers] == weights
    if name in ("text", "lstm"):  # which take no made-up numbers
        return
    # What is found for networks of one's own agrees with what is known of these.
    order, head = trace_layers(net.copy_module(), made_up_samples(shape, 2), classes)
    assert head == net.parts.head_layer
    traced_weights = [f"{layer}.weight" for layer in order]
    assert [entry for entry in traced_weights if entry in weights] == weights


def draw(channels: int, text: str) -> nn.Sequential:
    """Build the layers of these words, and a classifier.

    c32: convolution 5x5, ReLU, then pooling; n6: 3x3, with BatchNorm. f1024: flattened. 512: hidden,
    with a ReLU; 512-: without bias; =256: without the ReLU.
    """
    layers: list[nn.Module] = []
    width = channels
    for word in text.split():
        kind, size = word[0], int(word.strip("cnf=-"))
        if kind == "c":
            layers += [nn.Conv2d(width, size, 5), nn.ReLU(), nn.MaxPool2d(2)]
        elif kind == "n":
            layers += [nn.Conv2d(width, size, 3, padding=1), nn.BatchNorm2d(size)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        elif kind == "f":
            layers.append(nn.Flatten())
        else:
            layers.append(nn.Linear(width, size, bias=word[-1] != "-"))
            layers += [] if kind == "=" else [nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 10))


@pytest.mark.parametrize(
    ("name", "shape", "options", "drawing"),
    [
        ("cnn4", (1, 28, 28), {}, "c32 c64 f1024 512"),
        ("cnn4", (1, 28, 28), {"projection": 256}, "c32 c64 f1024 512 512 =256"),
        ("fedspu_cifar10", (3, 32, 32), {}, "n6 n16 f1024 120- 84-"),
    ],
)
def test_a_network_is_its_papers_drawing_bit_for_bit(name, shape, options, drawing):
    """In initial values, the seed's default ones in order of the layers, logits and gradients."""
    net = models.build_network(name, shape, 10, 42, **options)
    with torch.random.fork_rng():
        torch.manual_seed(42)
        drawn = draw(shape[0], drawing)
    assert_same([*net.params.values()], [*drawn.parameters()])
    assert_same([*net.buffers.values()], [*drawn.buffers()])
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    params = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    logits = net.bind({"main": net.buffers}, training=True)(params, x)
    expected = drawn(x)
    assert torch.equal(logits, expected)
    y = torch.arange(6)
    got = torch.autograd.grad(F.cross_entropy(logits, y), [*params.values()])
    assert_same(got, torch.autograd.grad(F.cross_entropy(expected, y), [*drawn.parameters()]))


IMAGES = "takes images [channels, height, width], got"
IDS = "takes token ids [length], got"
TABLE = "(data set npz); integers are token ids, save a table of features as floats"
UNFIT = f"""
cnn4 | samples | 1 15 28 | images must be at least 16x16 pixels, got 15x28
cnn4 | token ids | 7 | {IMAGES} token ids of shape [7] {TABLE}
fedspu_emnist | samples | 1 3 28 | nothing is left of images of 3x28 pixels after two poolings
har_cnn | samples | 9 27 | signals must be at least 28 points long, got 27
text | samples | 9 128 | {IDS} samples of shape [9, 128]
"""
"""Model | kind and shape of samples, of an archive where the kind is known | the message."""


@pytest.mark.parametrize(("name", "kind", "axes", "says"), read_cases(UNFIT, " | "))
def test_what_a_network_cannot_take_is_refused(name, kind, axes, says):
    shape = Shape(map(int, axes.split()), kind=kind, data_set="" if kind == "samples" else "npz")
    told = one_line(lambda: models.build_network(name, shape, 10, 0))
    assert told == f"model={name}: {says}"


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("fedspu_emnist", (1, 4, 5), {}),
        ("resnet8", (1, 1, 1), {}),
        ("resnet8", (1, 1, 1), {"stem": "small", "norm": "group"}),
    ],
)
def test_the_smallest_samples_that_fit(name, shape, options):
    """Two are a batch even where one pixel is left."""
    net = models.build_network(name, shape, 7, 0, **options)
    for training in (True, False):
        bound = net.bind({"main": net.buffers}, training=training)
        logits = bound(net.params, torch.randn(2, *shape))
        assert logits.shape == (2, 7)
        assert logits.isfinite().all()


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


# Mistakes, and BatchNorm of padded batches


class Sum(nn.Module):
    """A network of somebody's own, with one mistake or another."""

    def __init__(self, shape, classes, mistake=""):
        super().__init__()
        self.mistake = mistake
        self.fc = nn.Linear(shape[0], 5 if mistake == "classes" else classes)

    def forward(self, x):
        if self.mistake == "shape":
            x = x[:, 1:]
        return self.fc(x.sum(0) if self.mistake == "batch" else x)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("classes", "answers two samples by [2, 5], expected logits [2, 3]"),
        ("shape", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_mistakes_of_a_networks_author_are_one_line(mistake, says, monkeypatch):
    monkeypatch.setitem(models.MODELS, "sum", Sum)
    assert models.build_network("sum", (4,), 3, 0).params["fc.weight"].shape == (3, 4)
    told = one_line(lambda: models.build_network("sum", (4,), 3, 0, mistake=mistake))
    assert told.startswith(f"model=sum: {says}")


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


# ResNets


@pytest.mark.parametrize(("norm", "seed"), [("group", 42), ("batch", 0)])
def test_a_seed_gives_torchvisions_network_with_its_initial_values_bit_for_bit(norm, seed):
    vision.load_torchvision()  # where its import is mended
    from torchvision.models.resnet import BasicBlock, ResNet

    layer = {"batch": nn.BatchNorm2d, "group": lambda channels: nn.GroupNorm(32, channels)}[norm]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        theirs = ResNet(BasicBlock, [1] * 4, num_classes=10, norm_layer=layer)
    net = models.build_network("resnet10", (3, 32, 32), 10, seed, norm=norm)
    assert_same(list(net.params.values()), list(theirs.parameters()))
    assert_same(list(net.buffers.values()), list(theirs.buffers()))
    x, bound = torch.randn(2, 3, 40, 40), net.bind({"main": net.buffers}, training=True)
    assert_close(bound(net.params, x), theirs(x), atol=1e-5)
    assert_close(list(bound.buffers["main"].values()), list(theirs.buffers()))


# Every method on every kind of network


NETWORKS = {
    "text": ((6,), {"vocabulary": 30, "width": 8}),
    "lstm": ((6,), {"vocabulary": 30, "width": 8}),
    "har_cnn": ((3, 32), {}),
    "mlp": ((11,), {"hidden": (16, 8)}),
    "resnet": ((1, 8, 8), {}),
    "double": ((1, 8, 8), {}),
    "temperature": ((1, 8, 8), {}),
}
TRAIN, TEST = (20, 7, 3), (5, 3, 4)


def setting(network: str):
    """A network, and three clients with samples for it."""
    shape, options = NETWORKS[network]
    federation, g = make_federation(TRAIN, TEST), torch.Generator().manual_seed(3)
    centres = federation.y.view(-1, *[1] * len(shape))
    x = centres + torch.randn(len(federation.y), *shape, generator=g)
    if network in ("text", "lstm"):
        x = (8 * x).clamp(0, 40).int()
    if network == "resnet":  # of two blocks: an identity and a projection
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Net(ResNet(shape, CLASSES, (1, 1), "batch", "small")), federation
    if network in ("double", "temperature"):
        return Net(networks.KEPT[network](shape, CLASSES)), federation
    federation = dataclasses.replace(federation, x=x, mean=(), std=())
    return models.build_network(network, shape, CLASSES, 0, **options), federation


CASES = [
    (name, network)
    for name in METHODS
    for network in NETWORKS
    if network != "temperature" or name not in CUTS_NEURONS  # of which a scalar parameter is none
]
QUICK = {
    *(("heterofl", "mlp"), ("scaffold", "mlp")),
    *(("fedobp", network) for network in NETWORKS),
    *((name, "double") for name in ("fedmp", "fedpac", "fedgen", "pfedfda")),
    *((name, "temperature") for name in ("fedpurin", "fedas")),
}
"""What `make test` plays: methods of each kind on the smallest network, and one on every network."""


@pytest.mark.parametrize(
    ("name", "network"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full]) for case in CASES],
)
def test_a_round_and_its_evaluation(name, network):
    net, federation = setting(network)
    # Beside the same network, or one without statistics
    common = net.copy()
    if net.buffers:
        common = models.build_network("mlp", federation.shape, CLASSES, 0, hidden=(6,))
    net = Net(net.module, net.traits, net.name, common, **net.facts)
    method = build_method(name)
    tuning = FineTuning(dataclasses.replace(LOCAL, epochs=1), Draws(0, "finetune", 1))
    sent, losses = [], []
    for backend in BACKENDS:
        states, (outcome,) = record_rounds(method, net, federation, [[0, 2]], engine=backend)
        assert outcome.finite.all()
        counts = evaluate(method, net, federation, states[-1], backend, tuning=tuning)
        sent.append(outcome.traffic.values_up)
        losses.append((outcome.loss, counts.loss))
    assert sent[0] == pytest.approx(sent[1], rel=1e-4)  # at a threshold scores may round
    assert_close(*losses, atol=0.01, rtol=0.01)
