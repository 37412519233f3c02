"""pFedHN (arXiv:2103.04628): a newcomer's embedding, and the size of embeddings."""

import dataclasses

from fedpfl.engine import make_initial_state
from fedpfl.methods import PFedHN
from tests.conftest import CPU, assert_close


def made(method, state, client):
    return method.personal(state.server, state.client(client))


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


def test_the_embeddings_size_follows_the_clients(net):
    for clients, size in ((50, 13), (100, 26), (3, 1)):
        parts = dataclasses.replace(net.parts, clients=clients)
        assert PFedHN(hidden=6).init(net.params, parts)[0]["learned"]["v"].shape == (clients, size)
