"""FedRoD (arXiv:2107.00778): a padded sample of a class that the client lacks."""

import torch

from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedRoD
from tests.conftest import CPU


def test_a_padded_sample_of_an_absent_class_leaves_all_finite(net, federation):
    """As on the batched backend; client 5 has three samples."""
    method = FedRoD()
    state = make_initial_state(method, net, 10, CPU)
    shard = make_shard(federation, 5, 32, Draws(0, "train", 1))
    bound = net.bind({"main": {}}, training=True)
    client = state.client(5)
    client |= method.before_training(state.server, client, bound, shard)
    start = method._begin(state.server, client)
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), start)
    labels = shard.data.y.clone()
    labels[-1] = next(label for label in range(5) if label not in shard.data.y)
    batch = Batch(shard.data.x, labels, torch.tensor([1.0, 1.0, 0.0]))
    loss = method.loss(state.server, client, bound, params, batch)
    assert loss.isfinite()
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(loss, tree.leaves(params)))
