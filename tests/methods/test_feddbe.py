"""FedDBE (arXiv:2311.14975): clients are evaluated by the latest model and their memory."""

import dataclasses

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.methods import FedAvg, FedDBE
from fedpfl.testing.toy import as_engine
from tests.conftest import COHORTS, CPU, assert_close, assert_same, client_row, record_states

UNSEEN, WEIGHT = 7, "classifier.weight"


def test_clients_are_judged_by_the_latest_model_and_their_own_memory(backend, net, federation):
    method = FedDBE(bias_lr=0.5)
    state = record_states(method, net, federation, COHORTS[:2], engine=backend)[-1]
    personal = [method.personal(state.server, state.client(client)) for client in (0, UNSEEN)]
    assert_same(
        personal[0], {"model": state.server["model"], "u": client_row(state.clients["u"], 0)}
    )
    runner = make_backend(as_engine(backend), net, CPU)
    plain = dataclasses.replace(
        record_states(FedAvg(), net, federation, [])[0], server=state.server["model"]
    )
    own, fedavg = (
        runner.evaluate(EvalCall(m, federation, s, [0, UNSEEN])).loss
        for m, s in ((method, state), (FedAvg(), plain))
    )
    assert_close(own[1], fedavg[1])
    assert abs(own[0] - fedavg[0]) > 1e-2
