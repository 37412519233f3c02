"""ResNets: the papers' counts, torchvision's topology, both normalisations, both backends."""

import pytest
import torch
from torch import nn

from fedpfl import models
from fedpfl.ground import vision
from tests.conftest import assert_close, assert_same

COUNTS = [  # FedPURIN and FedSelect; the small stem: 64 * 3 * (49 - 9) fewer
    ("resnet8", (1, 28, 28), 10, {}, 1_229_002, 2_688),
    ("resnet8", (3, 32, 32), 10, {}, 1_235_274, 2_688),
    ("resnet10", (3, 32, 32), 100, {}, 4_957_092, 5_760),
    ("resnet18", (3, 32, 32), 10, {}, 11_181_642, 9_600),
    ("resnet8", (3, 32, 32), 10, {"stem": "small", "norm": "group"}, 1_227_594, 2_688),
]


@pytest.mark.parametrize(("name", "shape", "classes", "options", "count", "of_norms"), COUNTS)
def test_as_many_parameters_as_published(name, shape, classes, options, count, of_norms):
    net = models.build_network(name, shape, classes, 0, **options)
    assert sum(p.numel() for p in net.params.values()) == count
    assert net.parts.head == ("classifier.weight", "classifier.bias")
    norms = {name for name in net.params if "norm" in name or ".project.1" in name}
    assert set(net.parts.normalisation) == norms
    assert sum(net.params[name].numel() for name in norms) == of_norms
    assert sum(map(len, net.parts.layers)) == len(net.params)
    for weight, *normalisation in net.parts.layers[:-1]:
        assert weight not in norms
        assert len(normalisation) == 2
        assert {*normalisation} <= norms


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


@pytest.mark.parametrize(
    ("shape", "stem", "norm"),
    [
        ((1, 1, 1), "large", "batch"),
        ((1, 1, 1), "small", "group"),
        ((1, 33, 40), "large", "batch"),
    ],
)
def test_no_image_is_too_small(shape, stem, norm):
    """Two are a batch even where one pixel is left."""
    net = models.build_network("resnet8", shape, 7, 0, norm=norm, stem=stem)
    for training in (True, False):
        bound = net.bind({"main": net.buffers}, training=training)
        logits = bound(net.params, torch.randn(2, *shape))
        assert logits.shape == (2, 7)
        assert logits.isfinite().all()
