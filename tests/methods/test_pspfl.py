"""Update-magnitude personalisation: entries that did not move, and what travels."""

import torch

from fedpfl.ground import tree
from fedpfl.methods import PSPFL
from tests.conftest import record_states


def masks(method, state, client):
    return method.prepare(state.server, state.client(client))["mask"]


def test_entries_that_did_not_move_are_shared(net, federation):
    """Ties at zero; client 9 has one sample and never moves."""
    method = PSPFL(0.0)
    state = record_states(method, net, federation, [[2, 9]])[-1]
    assert not tree.ravel(masks(method, state, 9)).any()
    client = state.client(2)
    dead = {**client["score"], "fc.weight": torch.zeros(12, 36)}
    mask = method.prepare(state.server, {**client, "score": dead})["mask"]
    assert not mask["fc.weight"].any()
    assert mask["conv.weight"].any()
