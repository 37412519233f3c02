"""APPLE (arXiv:2110.08394): its own core alone, cores that move as FedAvg's, the pull to p0, what
travels.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import APPLE, Batch, FedAvg, LocalOnly
from tests.conftest import (
    CPU,
    PLAIN,
    TRAIN,
    assert_close,
    assert_same,
    client_row,
    make_federation,
    record_states,
)

SHARES = torch.tensor(TRAIN) / sum(TRAIN)


@dataclass(frozen=True)
class Alone(APPLE):
    """p_i is a unit vector."""

    def prepare(self, server, client):
        p = (torch.arange(len(client["p"])) == client["number"]).float()
        return {**client, "p": p}


def test_of_the_own_core_alone_it_is_local_only(backend, net, federation):
    """Bit for bit where memory layouts are the same; the loop backend gives a convolution another
    one.
    """
    own, other = (
        record_states(m, net, federation, engine=backend) for m in (Alone(rate=0.0), LocalOnly())
    )
    for ours, theirs in zip(own, other, strict=True):
        if backend == "batched":
            assert_same(ours.server["cores"], theirs.clients["model"])
        assert_close(ours.server["cores"], theirs.clients["model"], atol=1e-7, rtol=0.0)


def test_p_begins_as_the_shares_of_samples_and_stays_without_a_rate(backend, net, federation):
    for method in (APPLE(rate=0.0), APPLE()):
        states = record_states(method, net, federation, engine=backend)
        assert_same(states[1].server["shares"], SHARES)
        assert_same(states[3].server["shares"], SHARES)
        trained = [client_row(states[-1].clients["p"], client) for client in (0, 2)]
        for p in trained:
            assert torch.equal(p, SHARES) == (method.rate == 0)
        assert_same(client_row(states[-1].clients["p"], 9), SHARES)  # took part, and has one sample
    assert not torch.equal(*trained)


def test_one_step_a_round_is_fedavg_with_a_shorter_one(backend, net):
    """p_ij = 1 / K: all v_i are the mean of the cores, which move by lr / K."""
    equal, cohorts, apple = (
        make_federation((16,) * 4, (4,) * 4),
        [[0, 1, 2, 3]] * 3,
        APPLE(rate=0.0),
    )
    own = record_states(apple, net, equal, cohorts, engine=backend, local=PLAIN)
    other = record_states(
        FedAvg(), net, equal, cohorts, engine=backend, local=replace(PLAIN, lr=PLAIN.lr / 4)
    )
    for ours, theirs in zip(own, other, strict=True):
        assert_close(
            tree.map(lambda leaf: leaf.mean(0), ours.server["cores"]), theirs.server, atol=1e-7
        )


def slope(method, net, played, p):
    """Of the loss in p's entries, divided by sqrt(rate), with equal cores of ones."""
    state = make_initial_state(method, net.with_facts(rounds=10), 3, CPU)
    ones = tree.map(lambda leaf: torch.ones(3, *leaf.shape) / 50, net.params)
    server = {
        **state.server,
        "played": torch.tensor(played),
        "cores": ones,
        "shares": torch.tensor([0.2, 0.3, 0.5]),
    }
    client = {"p": p, "number": torch.tensor(1)}
    x, y = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5
    core = tree.map(lambda leaf: leaf[1], ones)

    def loss(moved):
        return method.loss(
            server, client, net.bind({}), {"core": core, "moved": moved}, Batch(x, y)
        )

    return torch.func.grad(loss)(torch.zeros(3)) / method.rate**0.5


@pytest.mark.parametrize("schedule", ["cosine", "exponential"])
def test_the_pull_to_p0_falls(schedule, net):
    """L is 5 of the 10 rounds; the gradient is lambda mu (p - p0), beside that of the
    cross-entropy.
    """
    p = torch.tensor([0.4, 0.3, 0.3])
    free = slope(APPLE(mu=0.0, rate=0.25), net, 0, p)
    assert_close(free, free[:1].expand(3))  # all cores are equal
    falls = {
        "cosine": {0: 1.0, 2.5: 0.5, 5: 0.0, 7: 0.0},
        "exponential": {0: 1.0, 2.5: 0.001**0.5, 5: 0.0, 7: 0.0},
    }
    for played, share in falls[schedule].items():
        pulled = slope(APPLE(mu=3.0, rate=0.25, schedule=schedule, until=0.5), net, played, p)
        assert_close(pulled - free, share * 3.0 * torch.tensor([0.2, 0.0, -0.2]), atol=1e-5)
    assert float(free[0]) != 0


def test_the_slope_in_p_is_the_inner_product(net):
    """By central differences of the loss, in float64."""
    method, generator = APPLE(mu=0.0, rate=1.0), torch.Generator().manual_seed(3)
    module = copy.deepcopy(net.module).double()
    cores = tree.map(
        lambda leaf: leaf + 0.1 * torch.randn(3, *leaf.shape, generator=generator).double(),
        net.params,
    )
    p = torch.tensor([0.5, 0.2, 0.4], dtype=torch.float64)
    server, client = {"cores": cores}, {"p": p, "number": torch.tensor(2)}
    batch = Batch(torch.rand(8, 1, 8, 8, generator=generator).double(), torch.arange(8) % 5)

    def loss(moved):
        params = {"core": tree.map(lambda leaf: leaf[2], cores), "moved": moved}
        v = method.evaluated(server, client, params)
        return batch.loss(torch.func.functional_call(module, v, batch.x))

    found = torch.func.grad(loss)(torch.zeros(3, dtype=torch.float64))
    for j, step in enumerate(1e-5 * torch.eye(3, dtype=torch.float64)):
        assert_close((loss(step) - loss(-step)) / 2e-5, found[j], rtol=1e-5, atol=0.0)
    v = method.evaluated(
        server, client, {"core": tree.map(lambda leaf: leaf[2], cores), "moved": torch.zeros(3)}
    )
    assert_close(v, tree.map(lambda leaf: torch.tensordot(p, leaf, 1), cores))
