"""APFL (arXiv:2003.13461): the range of alpha, what rounds tell of it, a cold start."""

import pytest
import torch

from fedpfl.methods import APFL, FedAvg
from tests.conftest import COHORTS, assert_same, evaluate, record_rounds, record_states

EVERYONE = list(range(10))
UNSEEN = 7  # until round 3


def test_alpha_stays_between_0_and_1(backend, net, federation):
    seen = set()
    for state in record_states(APFL(alpha_lr=50.0), net, federation, engine=backend):
        seen |= set(state.clients["alpha"].tolist())
    assert min(seen) == 0.0
    assert max(seen) == 1.0


def test_the_rounds_tell_alpha_as_it_was(net, federation):
    states, outcomes = record_rounds(APFL(alpha_lr=1.0), net, federation)
    for state, outcome, cohort in zip(states, outcomes, COHORTS, strict=False):
        assert outcome.metrics == {
            "alpha": pytest.approx(float(state.clients["alpha"][cohort].mean()))
        }


def test_an_unseen_client_has_the_initial_mixture_or_the_global_model(backend, net, federation):
    initial, cold = APFL(), APFL(cold_start="global")
    state = record_states(cold, net, federation, COHORTS[:2], engine=backend)[-1]
    assert_same(state, record_states(initial, net, federation, COHORTS[:2], engine=backend)[-1])
    client = state.client(UNSEEN)
    wanted = {"w": state.server, "v": net.params, "alpha": torch.tensor(0.5)}
    assert_same(initial.personal(state.server, client), wanted)
    assert_same(cold.personal(state.server, client), {**wanted, "alpha": torch.tensor(0.0)})
    assert cold.personal(state.server, state.client(2))["alpha"] > 0.4
    fedavg = record_states(FedAvg(), net, federation, COHORTS[:2], engine=backend)[-1]
    own, shared = (
        evaluate(m, net, federation, s, backend) for m, s in ((cold, state), (FedAvg(), fedavg))
    )
    for client in EVERYONE:
        assert torch.equal(own.loss[client], shared.loss[client]) == (client in (UNSEEN, 9))
