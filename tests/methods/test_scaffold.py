"""SCAFFOLD (arXiv:1910.06378): controls by option II's formula, FedAvg and SGD as limits, traffic."""

import dataclasses

import torch

from fedpfl.engine import Local, make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, Scaffold
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    client_row,
    make_federation,
    participate,
    record_states,
    tiny,
)

LOCAL = dataclasses.replace(LOCAL, momentum=0.0, weight_decay=0.0)
METHOD = Scaffold()


def test_the_servers_control_is_the_mean_of_the_clients(backend, net, federation):
    for state in record_states(METHOD, net, federation, engine=backend, local=LOCAL):
        mean = tree.map(lambda own: own.double().mean(0).float(), state.clients["control"])
        assert_close(state.server["control"], mean, atol=1e-7, rtol=1e-4)


def test_the_first_round_is_fedavgs_where_clients_are_of_one_size(backend, net):
    federation = make_federation((32,) * 4, (8,) * 4)
    own = record_states(Scaffold(), net, federation, [[0, 1, 2, 3]], engine=backend, local=LOCAL)[
        -1
    ]
    fedavg = record_states(FedAvg(), net, federation, [[0, 1, 2, 3]], engine=backend, local=LOCAL)[
        -1
    ]
    assert_close(own.server["model"], fedavg.server, atol=1e-6)


def test_a_new_control_is_option_twos_formula(backend, net, federation):
    """c_i - c + (x - y) / (T lr), from a state whose controls are not zero."""
    state = record_states(METHOD, net, federation, COHORTS[:1], engine=backend, local=LOCAL)[-1]
    part = participate(METHOD, net, federation, state, [2], engine=backend, local=LOCAL)
    steps = LOCAL.epochs * 2  # 65 samples in batches of 32, and a lone one that is skipped
    old, change = client_row(state.clients["control"], 2), tree.take(part.uploads["model"], 0)
    wanted = tree.map(
        lambda own, c, dy: own - c - dy / (steps * LOCAL.lr), old, state.server["control"], change
    )
    assert_close(tree.take(part.client_states["control"], 0), wanted, atol=1e-5, rtol=1e-3)
    assert_close(
        tree.take(part.uploads["control"], 0),
        tree.map(torch.sub, wanted, old),
        atol=1e-5,
        rtol=1e-3,
    )


def test_with_momentum_a_control_is_still_a_mean_gradient(net, federation):
    """Of one step: the gradient itself, whatever the momentum."""
    one = Local(epochs=1, batch_size=512, lr=0.05)
    state = make_initial_state(METHOD, net, 10, CPU)
    plain, heavy = (
        participate(METHOD, net, federation, state, [2], local=dataclasses.replace(one, momentum=m))
        for m in (0.0, 0.9)
    )
    assert_same(plain.client_states["control"], heavy.client_states["control"])
    change = tree.take(plain.uploads["model"], 0)
    control = tree.take(plain.client_states["control"], 0)
    assert_close(control, tree.map(lambda dy: -dy / one.lr, change), atol=1e-5, rtol=1e-3)


def test_one_client_is_plain_sgd(backend, net):
    federation = make_federation((40,), (8,))
    own = record_states(Scaffold(), net, federation, [[0]] * 3, engine=backend, local=LOCAL)
    fedavg = record_states(FedAvg(), net, federation, [[0]] * 3, engine=backend, local=LOCAL)
    for ours, theirs in zip(own, fedavg, strict=True):
        assert_close(ours.server["model"], theirs.server, atol=2e-6)


def test_a_client_without_a_step_changes_nothing(backend, federation):
    """Client 9 has one sample, which makes no batch."""
    net = tiny()
    state = record_states(METHOD, net, federation, COHORTS[:2], engine=backend, local=LOCAL)[-1]
    part = participate(METHOD, net, federation, state, [9], engine=backend, local=LOCAL)
    assert_same(
        tree.take(part.client_states["control"], 0), client_row(state.clients["control"], 9)
    )
    for leaf in tree.leaves(part.uploads):
        assert not leaf.any()
