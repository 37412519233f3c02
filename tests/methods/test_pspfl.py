"""Update-magnitude personalisation: entries that did not move, and what travels."""

import pytest
import torch

from fedpfl.ground import tree
from fedpfl.methods import PSPFL
from fedpfl.methods.shared import importance
from tests.conftest import record_rounds, record_states

OFTEN = [[0, 2, 4]] * 3
UPLOADS = pytest.mark.parametrize("upload", ["shared", "all"])


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


@UPLOADS
def test_shared_entries_travel(upload, backend, net, federation):
    size = tree.size(net.params)
    method = PSPFL(0.5, upload)
    _, outcomes = record_rounds(method, net, federation, OFTEN, engine=backend)
    shared = size - importance.personal_count(0.5, size)
    assert [o.traffic.values_down for o in outcomes] == [3 * size, 3 * shared, 3 * shared]
    assert [o.traffic.bits_down - 32 * o.traffic.values_down for o in outcomes] == [
        0,
        3 * size,
        3 * size,
    ]
    up = 3 * (shared if upload == "shared" else size)
    assert [o.traffic.values_up for o in outcomes] == [3 * size, up, up]
    assert [o.traffic.bits_up for o in outcomes] == [32 * o.traffic.values_up for o in outcomes]
    told = [sum(v for k, v in o.metrics.items() if k.startswith("personal/")) for o in outcomes]
    assert told == pytest.approx([0, size - shared, size - shared])
    assert outcomes[1].metrics["personal_share"] == pytest.approx((size - shared) / size)
