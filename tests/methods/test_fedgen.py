"""FedGen (arXiv:2105.10056): the generator learns labels, which are drawn by their shares."""

import pytest
import torch
import torch.nn.functional as F

from fedpfl.methods import Batch, FedGen
from fedpfl.methods.shared import features
from tests.conftest import CLASSES, assert_close, record_states


def generator(seed=0):
    return features.init_generator(
        5, 8, torch.empty(CLASSES, 12), torch.Generator().manual_seed(seed)
    )


def test_the_generator_learns_labels(net, federation):
    """Heads that have learned recognise what they taught."""
    method = FedGen(noise=5, hidden=32, steps=60, lr=0.01, batch=16)
    state = record_states(method, net, federation)[-1]
    y = state.server["counts"].nonzero().flatten().repeat(20)
    z = features.generate_features(
        state.server["generator"],
        y,
        torch.rand(len(y), 5, generator=torch.Generator().manual_seed(0)),
    )
    assert (F.linear(z, *state.server["head"].values()).argmax(1) == y).float().mean() > 0.8


def test_labels_are_drawn_by_their_shares():
    random = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    drawn = (
        torch.bincount(features.draw_labels(torch.tensor([0.0, 1, 0, 3, 0]), random), minlength=5)
        / 5000
    )
    assert_close(drawn, torch.tensor([0, 0.25, 0, 0.75, 0]), atol=0.02)
    assert features.draw_labels(
        torch.tensor([0.0, 1, 0]), torch.tensor([0.0, 1 - 2**-24])
    ).tolist() == [1, 1]


def test_what_the_generator_teaches_never_fades_to_nothing(net, federation):
    """Each of both terms counts 1e-4 at least, however late; before the first round nothing."""
    values = {"noise": 5, "hidden": 8, "steps": 3}
    state = record_states(FedGen(**values), net, federation)[-1]
    params = {**state.server["body"], **state.server["head"]}
    x, y = federation.normalize(federation.x[:20]), federation.y[:20]
    random = torch.rand(20, 11, generator=torch.Generator().manual_seed(0))

    def loss(rounds, alpha, beta):
        server = {**state.server, "rounds": torch.tensor(rounds)}
        method = FedGen(alpha=alpha, beta=beta, decay=0.5, **values)
        return method.loss(server, {}, net.bind({}), params, Batch(x, y, random=random))

    for weights in ((1.0, 0.0), (0.0, 1.0)):
        early, late, never = (
            loss(*case) for case in ((1, *weights), (5000, *weights), (1, 0.0, 0.0))
        )
        share = float((late - never) / (early - never))
        assert share == pytest.approx(1e-4 / 0.5, rel=0.3)  # of a difference of seven digits
        assert loss(0, *weights) == never
