"""HeteroFL and FedRolex: which neurons, and what the small network would do."""

import itertools

import pytest
import torch

from fedpfl import models
from fedpfl.engine import FineTuning
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedRolex, HeteroFL
from tests.conftest import COHORTS, LOCAL, evaluate, record_states

EVERYONE = list(range(10))
RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)


def share(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def classes(federation, client: int) -> set[int]:
    return set(federation.y[federation.train[client]].tolist())


@pytest.mark.parametrize(("kind", "rounds_played"), [(HeteroFL, 0), (FedRolex, 0), (FedRolex, 7)])
def test_sub_models_are_nested(kind, rounds_played, net):
    method = kind()
    server, client = method.init(net.params, net.parts)
    if kind is FedRolex:
        server["rounds"] += rounds_played
    sets = [method.prepare(server, {**client, "width": share(rate)})["active"] for rate in RATES]
    for wide, narrow in itertools.pairwise(sets):
        assert (wide | ~narrow).all()
    least = (1, 2) if kind is HeteroFL else (1, 1)  # rounded up, or down
    counts = [(int(active[:4].sum()), int(active[4:16].sum())) for active in sets]
    assert counts == [(4, 12), (2, 6), (1, 3), least, (1, 1)]


def test_which_entries_are_scaled():
    net = models.build_network("cnn4", (1, 28, 28), 10, 0)
    server, _ = HeteroFL().init(net.params, net.parts)
    assert set(server["scaled"]) == {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"}
    assert set(server["classes"]) == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("kind", [HeteroFL, FedRolex])
def test_clients_know_their_classes_and_tuning_leaves_them_alone(kind, backend, net, federation):
    method = kind()
    state = record_states(method, net, federation, COHORTS[:1], engine=backend)[-1]
    for client in EVERYONE:
        own = classes(federation, client) if client in COHORTS[0] else range(5)
        assert state.clients["labels"][client].tolist() == [c in own for c in range(5)]
    (phase,) = method.finetuning(method.personal(state.server, state.client(3)), net.parts, 2)
    assert phase.mask == {"model": True, "labels": False}
    for part in ("all", "head"):
        tuning = FineTuning(LOCAL, Draws(0, "finetune", 1), part)
        tuned = evaluate(method, net, federation, state, backend, tuning=tuning)
        assert tuned.loss.isfinite().all()
    plain = kind(masked=False)
    assert plain.before_training({}, {}, None, None) == {}
    assert plain.before_evaluation({}, {}, None, None) == {}
    assert "labels" not in plain.init(net.params, net.parts)[1]
