"""Every method on every kind of network: texts, LSTM, signals, residual streams, float64; a
round on both backends.

The contract suite has one smooth network of images; what a method assumes of a network shows here.
"""

import dataclasses

import pytest
import torch

from fedpfl import models
from fedpfl.engine import FineTuning
from fedpfl.engine.keys import Draws
from fedpfl.methods import METHODS
from fedpfl.models import Net
from fedpfl.models.resnet import ResNet
from fedpfl.testing.toy import BACKENDS, CLASSES, LOCAL
from tests import networks
from tests.conftest import SETTINGS, assert_close, evaluate, make_federation, record_rounds

NETWORKS = {
    "text": ((6,), {"vocabulary": 30, "width": 8}),
    "lstm": ((6,), {"vocabulary": 30, "width": 8}),
    "har_cnn": ((3, 32), {}),
    "mlp": ((11,), {"hidden": (16, 8)}),
    "resnet": ((1, 8, 8), {}),
    "double": ((1, 8, 8), {}),
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
    if network == "double":
        return Net(networks.Double(shape, CLASSES)), federation
    federation = dataclasses.replace(federation, x=x, mean=(), std=())
    return models.build_network(network, shape, CLASSES, 0, **options), federation


CASES = [(name, network) for name in METHODS for network in NETWORKS]
QUICK = {
    *(("heterofl", "mlp"), ("scaffold", "mlp")),
    *(("fedobp", network) for network in NETWORKS),
    *((name, "double") for name in ("fedmp", "fedpac", "fedgen", "pfedfda")),
}
"""What `make test` plays: methods of each kind on the smallest network, and one on every network."""


@pytest.mark.parametrize(
    ("name", "network"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full]) for case in CASES],
)
def test_a_round_and_its_evaluation(name, network):
    net, federation = setting(network)
    method = METHODS[name](**SETTINGS.get(name, [{}])[0])
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
