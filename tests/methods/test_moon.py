"""MOON (arXiv:2103.16257): the contrast by its formula, FedAvg as a limit bit for bit, last models."""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch.func import grad

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedAvg, Moon
from tests.conftest import (
    COHORTS,
    CPU,
    HEAD,
    assert_close,
    assert_same,
    client_row,
    differing,
    make_federation,
    participate,
    record_states,
    tiny,
    with_client_states,
)

UNSEEN = 7  # until round 3
BATCH = Batch(
    torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 5
)
YES = torch.tensor(True)


def contrast(net, params, shared, last, mu=1.0, tau=0.5, seen=YES):
    """What the method adds to cross-entropy, of one batch."""
    references = {"main": net.buffers, "last": net.buffers}
    client = {"last": last, "references": references, "participated": seen}
    bound = net.bind(references, training=True)
    loss = Moon(mu, tau).loss(shared, client, bound, params, BATCH)
    return loss - FedAvg().loss(shared, {}, bound, params, BATCH)


def apart(net, seed):
    """Parameters at a distance, of features that differ in direction."""
    g = torch.Generator().manual_seed(seed)
    return tree.map(lambda leaf: leaf + 0.3 * torch.randn(leaf.shape, generator=g), net.params)


def test_who_trains_first_has_no_contrast(backend, net, federation):
    """Bit for bit, in any round; client 7 is first sampled in the third, 2 has trained before the
    second.
    """
    states = record_states(Moon(mu=5.0), net, federation, engine=backend)
    fedavg = record_states(FedAvg(), net, federation, COHORTS[:2], engine=backend)
    (assert_same if backend == "loop" else assert_close)(states[1].server, fedavg[1].server)
    assert differing(states[2].server, fedavg[2].server)
    fresh = dataclasses.replace(make_initial_state(FedAvg(), net, 10, CPU), server=states[2].server)
    part = participate(Moon(mu=5.0), net, federation, states[2], [UNSEEN, 9], engine=backend)
    plain = participate(
        FedAvg(), net, federation, dataclasses.replace(fresh, round=2), [UNSEEN, 9], engine=backend
    )
    assert_same(part.uploads, plain.uploads)


def test_the_contrast_is_the_formula(net):
    params, shared, last = (apart(net, seed) for seed in range(3))

    def z(weights):
        return net.bind({}).features(weights, BATCH.x)[1]

    near, far = (
        (z(params) * z(p)).sum(1) / z(params).norm(dim=1) / z(p).norm(dim=1) for p in (shared, last)
    )
    wanted = -((near / 0.2).exp() / ((near / 0.2).exp() + (far / 0.2).exp())).log()
    assert wanted.std() > 0.1
    assert_close(contrast(net, params, shared, last, mu=3.0, tau=0.2), 3 * wanted.mean(), atol=1e-5)


def test_equal_references_pull_nowhere(net):
    """Log 2 for every sample; one client, whose last model is the global one, is FedAvg."""
    assert_close(
        contrast(net, apart(net, 0), apart(net, 1), apart(net, 1)), torch.tensor(math.log(2))
    )
    for leaf in tree.leaves(
        grad(lambda p: contrast(net, p, apart(net, 1), apart(net, 1)))(apart(net, 0))
    ):
        assert leaf.abs().max() < 1e-6
    own, fedavg = (
        record_states(m, net, make_federation((40,), (8,)), [[0]] * 3)[-1].server
        for m in (Moon(mu=5.0), FedAvg())
    )
    assert_close(own, fedavg, atol=1e-5)


def test_the_contrast_has_bounds_and_forgets_scales(net):
    params, shared, last = (apart(net, seed) for seed in range(3))
    value = contrast(net, params, shared, last)
    assert F.softplus(torch.tensor(-4.0)) < value < F.softplus(torch.tensor(4.0))
    z = [net.bind({}).features(p, BATCH.x)[1] for p in (params, shared, last)]

    class Seen:
        """A network whose features are given."""

        buffers = {"main": {}}  # noqa: RUF012

        def still(self, buffers):
            return self

        def features(self, params, x, role="main"):
            return torch.zeros(len(x), 5), params

    def loss(own, shared, last, tau=0.5):
        client = {"last": last, "references": {}, "participated": YES}
        return Moon(tau=tau).loss(shared, client, Seen(), own, BATCH)

    assert_close(loss(z[0], 3 * z[1], 0.1 * z[2]), loss(*z))
    slope = grad(loss)(*z)
    assert slope.abs().max() > 1e-3
    assert ((z[0] * slope).sum(1)).abs().max() < 1e-6
    assert grad(loss)(*z, tau=1e4).abs().max() < 1e-3 * slope.abs().max()


def test_the_head_feels_no_contrast(net):
    slope = grad(lambda p: contrast(net, p, apart(net, 1), apart(net, 2)))(apart(net, 0))
    assert not any(slope[name].any() for name in HEAD)
    assert all(slope[name].any() for name in tree.drop(slope, HEAD))


def test_the_last_model_is_the_clients_last_upload(backend, net, federation):
    states = record_states(Moon(), net, federation, engine=backend)
    part = participate(Moon(), net, federation, states[1], COHORTS[1], engine=backend)
    for k, client in enumerate(COHORTS[1]):
        assert_same(client_row(states[2].clients["last"], client), client_row(part.uploads, k))
    assert_same(
        states[3].client(2)["last"], states[2].client(2)["last"]
    )  # did not train in round 3
    assert_same(states[2].client(UNSEEN)["last"], net.params)


def test_references_are_judged_by_their_own_statistics(backend, federation):
    """A last model by those that its training left, the global one by those received."""
    net = tiny(norm=True)
    state = record_states(Moon(mu=5.0), net, federation, COHORTS[:2], engine=backend)[-1]
    held = state.client_buffers["last"]
    assert held["norm.num_batches_tracked"].tolist()[1:3] == [
        6,
        8,
    ]  # 4 received, and two epochs of 1 and 2 batches
    moved = {"last": {**held, "norm.running_mean": held["norm.running_mean"] + 1}}
    one, other = (
        participate(Moon(mu=5.0), net, federation, s, [2], engine=backend)
        for s in (state, with_client_states(state, buffers=moved))
    )
    assert differing(one.uploads, other.uploads)


def test_the_papers_projection_is_part_of_the_network():
    """1,269,962 scalars instead of 878,538; z is the classifier's input and may be negative."""
    net = models.build_network("cnn4", (3, 32, 32), 10, 0, projection=256)
    assert tree.size(net.params) == 1_269_962
    assert net.parts.head == HEAD
    logits, z = net.bind({}).features(net.params, torch.rand(4, 3, 32, 32))
    assert z.shape == (4, 256)
    assert (z < 0).any()
    assert_close(logits, F.linear(z, *(net.params[name] for name in HEAD)))
