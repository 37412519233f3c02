"""pFedHN (arXiv:2103.04628): FedAvg and Local-Only as limits of the hypernetwork, what a step
moves, what travels.
"""

import dataclasses

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, LocalOnly, PFedHN
from tests.conftest import (
    COHORTS,
    CPU,
    HEAD,
    TRAIN,
    assert_close,
    assert_same,
    client_row,
    differing,
    participate,
    record_states,
)

PURE = {"momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "hidden": 6}


def made(method, state, client):
    return method.personal(state.server, state.client(client))


def after(method, net, federation, learned, cohort, backend="loop"):
    """The server's state after a round from such a hypernetwork."""
    state = make_initial_state(method, net, 10, CPU)
    state = dataclasses.replace(state, server={**state.server, "learned": learned})
    part = participate(method, net, federation, state, cohort, engine=backend)
    clients = {**part.client_states, **state.facts(cohort)}
    weight = torch.full((len(cohort),), 1 / len(cohort))
    return method.aggregate(state.server, clients, net.bind({}), part.uploads, weight, None)[0][
        "learned"
    ]


def test_one_model_for_all_is_fedavg_with_uniform_weights(backend, net, federation):
    """Where the maps of h are zero and its last bias is the model, that bias takes the mean of the
    differences.
    """
    method = PFedHN(lr=1.0, **PURE)
    learned = tree.full_like(make_initial_state(method, net, 10, CPU).server["learned"], 0.0)
    learned["bias"] = net.params
    end = after(method, net, federation, learned, COHORTS[0], backend)
    trained = participate(
        FedAvg(),
        net,
        federation,
        make_initial_state(FedAvg(), net, 10, CPU),
        COHORTS[0],
        engine=backend,
    ).uploads
    want = tree.map(lambda leaf: leaf.mean(0), trained)
    assert_close(end["bias"], want, atol=1e-7)
    assert not any(leaf.any() for leaf in tree.leaves(end["mlp"]))


def test_a_row_that_is_the_model_takes_the_step_of_local_only(backend, net, federation):
    """Where h hands the embedding through."""
    size = tree.size(net.params)
    values = PURE | {"hidden": size, "embedding": size, "depth": 0}
    method = PFedHN(lr=1e-30, embedding_lr=1.0, **values)
    learned = tree.full_like(make_initial_state(method, net, 10, CPU).server["learned"], 0.0)
    through = torch.eye(size)
    learned["mlp"]["0"]["weight"] = through
    rows = iter(through.split([leaf.numel() for leaf in net.params.values()]))
    learned["weight"] = {name: next(rows) for name in net.params}
    learned["v"] = tree.ravel(net.params).repeat(10, 1)
    end = after(method, net, federation, learned, [2], backend)
    alone = record_states(LocalOnly(), net, federation, [[2]], engine=backend)[-1]
    assert_close(tree.unravel(end["v"][2], net.params), client_row(alone.clients["model"], 2))
    assert_same(end["v"][3], learned["v"][3])


def test_who_makes_no_step_moves_nothing_but_decay(net, federation):
    """Client 9 has one sample."""
    still = record_states(PFedHN(**PURE), net, federation, [[9]])
    assert_same(still[1].server, still[0].server)
    method = PFedHN(**PURE | {"weight_decay": 0.1})
    first, last = (own.server["learned"] for own in record_states(method, net, federation, [[9]]))
    for part in ("mlp", "weight", "bias"):
        assert_close(
            last[part], tree.map(lambda leaf: leaf * (1 - 0.01 * 0.1), first[part]), atol=1e-7
        )
    assert_same(last["v"][:9], first["v"][:9])
    assert differing(last["v"][9], first["v"][9])


@pytest.mark.parametrize("rows", ["sampled", "all"])
def test_whose_embeddings_move(rows, backend, net, federation):
    states = record_states(PFedHN(rows=rows, hidden=6), net, federation, engine=backend)
    for t, cohort in enumerate(COHORTS):
        before, later = (own.server["learned"]["v"] for own in states[t : t + 2])
        moved = {client for client in range(10) if differing(before[client], later[client])}
        assert moved == (set(cohort) if rows == "sampled" else set(range(10)))


def test_equal_embeddings_make_equal_models_and_others_do_not(net):
    method = PFedHN(hidden=20)
    state = make_initial_state(method, net, 10, CPU)
    table = state.server["learned"]["v"]
    table[4] = table[1]
    assert_same(made(method, state, 1), made(method, state, 4))
    assert differing(made(method, state, 1), made(method, state, 2))


def test_a_newcomer_has_the_mean_embedding(net):
    method = PFedHN(hidden=20)
    state = make_initial_state(method, net, 10, CPU)
    table = state.server["learned"]["v"]
    table[0] = table[1:].mean(0)  # which is that of all
    new = made(method, dataclasses.replace(state, members=state.rows), 3)
    assert_close(new, made(method, state, 0), atol=1e-6)
    assert (
        max(float((new[name] - leaf).abs().max()) for name, leaf in made(method, state, 3).items())
        > 1e-3
    )


def test_a_private_classifier_stays_with_its_client(backend, net, federation):
    method = PFedHN(variant="pc", hidden=6)
    states = record_states(method, net, federation, engine=backend)
    assert not set(HEAD) & states[0].server["learned"]["bias"].keys()
    assert_same(
        {name: made(method, states[0], 3)[name] for name in HEAD}, tree.select(net.params, HEAD)
    )
    for t, cohort in enumerate(COHORTS):
        for client in range(10):
            changed = differing(
                client_row(states[t].clients["head"], client),
                client_row(states[t + 1].clients["head"], client),
            )
            assert bool(changed) == (client in cohort and TRAIN[client] > 1)


def test_of_one_client_both_orders_are_the_same(net, federation):
    one, other = (
        record_states(PFedHN(order=order, hidden=6), net, federation, [[2], [0]])[-1]
        for order in ("parallel", "sequential")
    )
    assert_same(one, other)


@pytest.mark.parametrize("variant", ["full", "pc"])
def test_a_model_travels_and_the_hypernetwork_never(variant, net, federation):
    method = PFedHN(variant=variant, hidden=6)
    part = participate(
        method, net, federation, make_initial_state(method, net, 10, CPU), COHORTS[0]
    )
    size = tree.size(net.params) - (
        tree.size(tree.select(net.params, HEAD)) if variant == "pc" else 0
    )
    assert part.down.values.tolist() == part.up.values.tolist() == [size] * 5


def test_the_embeddings_size_follows_the_clients(net):
    for clients, size in ((50, 13), (100, 26), (3, 1)):
        parts = dataclasses.replace(net.parts, clients=clients)
        assert PFedHN(hidden=6).init(net.params, parts)[0]["learned"]["v"].shape == (clients, size)
