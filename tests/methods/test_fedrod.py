"""FedRoD (arXiv:2107.00778): absent classes, and fine-tuning of both heads."""

import dataclasses

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedRoD
from tests.conftest import CLASSES, CPU, assert_close


def informed(method, federation, state, client, net):
    """A client's tree as it enters a round."""
    own, shard = state.client(client), make_shard(federation, client, 32, Draws(0, "train", 1))
    return own | method.before_training(state.server, own, net.bind({"main": {}}), shard)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_absent_classes_have_probability_zero_and_all_stays_finite(gamma, net, federation):
    y = federation.y.clone()
    y[federation.train[0]] = torch.tensor([0] * 20 + [1] * 15 + [3] * 5)
    federation = dataclasses.replace(federation, y=y)
    method = FedRoD(gamma=gamma)
    state = make_initial_state(method, net, 10, CPU)
    client = informed(method, federation, state, 0, net)
    counts = torch.bincount(federation.y[federation.train[0]], minlength=CLASSES).double()
    assert (counts == 0).sum() == 2
    probability = (torch.zeros(CLASSES) + client["prior"]).softmax(0)
    assert_close({"": probability}, {"": (counts**gamma / (counts**gamma).sum()).float()})
    assert not probability[counts == 0].any()
    params = tree.map(
        lambda leaf: leaf.clone().requires_grad_(), method._begin(state.server, client)
    )
    x = federation.normalize(federation.x[federation.train[0]])
    # With a padded sample of an absent class, as on the batched backend.
    batch = Batch(
        x, torch.cat([federation.y[federation.train[0]][:-1], torch.tensor([4])]), torch.ones(40)
    )
    batch.weight[-1] = 0
    loss = method.loss(state.server, client, net.bind({"main": {}}, training=True), params, batch)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, tree.leaves(params)))
