"""Every method on every kind of network: texts, LSTM, signals, residual streams, float64; a
round on both backends.

The contract suite has one smooth network of images; what a method assumes of a network shows here.
"""

import dataclasses

import pytest
import torch

from fedpfl import models
from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import METHODS
from fedpfl.models import Net
from fedpfl.models.resnet import ResNet
from tests import networks
from tests.conftest import (
    BACKENDS,
    CLASSES,
    CPU,
    LOCAL,
    SETTINGS,
    assert_close,
    make_federation,
)

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
    x = torch.randn(len(federation.y), *shape, generator=g) + federation.y.view(
        -1, *[1] * len(shape)
    )
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
    ends = []
    for backend in BACKENDS:
        engine = make_backend(Engine(backend), net, CPU)
        state = make_initial_state(method, net, 3, CPU)
        state, outcome = play_round(RoundSetup(engine, method, federation, LOCAL, 0), state, [0, 2])
        assert outcome.finite.all()
        ends.append(
            (
                outcome.loss,
                outcome.traffic.values_up,
                engine.evaluate(EvalCall(method, federation, state, [0, 1, 2], tuning)),
            )
        )
    assert ends[0][1] == pytest.approx(
        ends[1][1], rel=1e-4
    )  # scores at a threshold may round to either side
    assert_close((ends[0][0], ends[0][2].loss), (ends[1][0], ends[1][2].loss), atol=0.01, rtol=0.01)
