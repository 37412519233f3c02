"""Methods that take networks of several kinds, on three of them."""

from functools import partial

import pytest
import torch

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import FD, METHODS, FedAvg, FedAvgByKind
from fedpfl.models import Mixed, MixedNet, build_kinds, build_network
from tests.conftest import (
    CLASSES,
    COHORTS,
    assert_same,
    build_method,
    keep_only,
    make_federation,
    record_rounds,
    tiny,
)

KINDS = [0, 1, 2, 2, 1, 0, 0, 2, 1, 0]
HIDDEN = ([6], [9, 5], [12])
TAKERS = [name for name, method in METHODS.items() if method.takes_kinds]


def build(common=5, kinds=KINDS):
    named = [{"name": "mlp", "hidden": hidden} for hidden in (*HIDDEN, [common])]
    one = partial(build_network, shape=(1, 8, 8), classes=CLASSES, seed=1)
    return MixedNet(build_kinds(Mixed(named[:3], features=6, common=named[3]), one), kinds)


@pytest.mark.parametrize("name", keep_only(TAKERS, ("fedavg_by_kind", "fedgh", "fedkd", "fedmrl")))
def test_backends_agree_on_three_kinds(name):
    ends = []
    for backend in ("loop", "batched"):
        states, outcomes = record_rounds(
            build_method(name), build(), make_federation(), engine=backend
        )
        own = [states[-1].rows.take("client", client) for client in range(10)]
        end = {"server": states[-1].server, "own": dict(enumerate(own))}
        ends.append({**end, "loss": outcomes[-1].loss, "after": outcomes[-1].after.loss})
    tree.map(partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4), *ends)


def test_fedavg_by_kind_is_fedavg_among_each_kind():
    """Who has another kind changes nothing, and is sent nothing of it. In round 3 kind 1 is away."""
    cohorts, kinds = [[0, 1, 2, 5], [3, 4, 6, 8], [0, 6, 7]], build()
    states, outcomes = record_rounds(FedAvgByKind(), kinds, make_federation(), cohorts)
    for kind, net in enumerate(kinds.nets):
        own = [[client for client in cohort if KINDS[client] == kind] for cohort in cohorts]
        alone = record_rounds(FedAvg(), net, make_federation(), [*filter(None, own)])[0]
        for t, state in enumerate(states):
            vector = state.server["models"][kind]
            found = tree.unravel(vector[: tree.size(net.params)], net.params)
            wanted = alone[min(t, len(alone) - 1)].server
            tree.map(partial(torch.testing.assert_close, atol=1e-6, rtol=1e-5), found, wanted)
            assert not vector[tree.size(net.params) :].any()
    sizes = [tree.size(net.params) for net in kinds.nets]
    for cohort, outcome in zip(cohorts, outcomes, strict=True):
        sent = sum(sizes[KINDS[client]] for client in cohort)
        assert outcome.traffic.values_down == outcome.traffic.values_up == sent


@pytest.mark.parametrize("name", ["fml", "fedkd", "fedmrl"])
def test_a_common_network_is_asked_for_in_one_line(name):
    net = build_network("mlp", (1, 8, 8), CLASSES, 1, hidden=[6])
    with pytest.raises(FedpflError, match=f"^method={name} is about a common network"):
        METHODS[name]().init(net.params, net.parts)
    if name == "fedmrl":
        net = build(common=7)
        with pytest.raises(FedpflError, match="7 features, and clients' networks 6"):
            METHODS[name]().init(net.params, net.parts)


def test_fd_a_class_that_no_client_of_a_cohort_has_keeps_its_outputs():
    """Clients 1 and 8 lack the third class."""
    states = record_rounds(FD(), tiny(), make_federation(), [COHORTS[0], [1, 8]])[0]
    first, second = (state.server for state in states[1:])
    assert second["heard"].tolist() == [2, 2, 1, 2, 2]
    assert_same(first["sum"][2], second["sum"][2])
    assert first["count"][2] == second["count"][2] > 0
