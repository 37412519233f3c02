"""HeteroFL and FedRolex: which neurons, and what the small network would do."""

import pytest

from fedpfl.engine import FineTuning
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedRolex, HeteroFL
from tests.conftest import COHORTS, LOCAL, evaluate, record_states

EVERYONE = list(range(10))


def classes(federation, client: int) -> set[int]:
    return set(federation.y[federation.train[client]].tolist())


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
