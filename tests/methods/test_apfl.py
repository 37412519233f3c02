"""APFL (arXiv:2003.13461): FedAvg as a limit, alpha's range, fine-tuning, a cold start."""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedpfl.engine import Engine, FineTuning, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import APFL, FedAvg
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    client_row,
    differing,
    participate,
    record_rounds,
    record_states,
)

EVERYONE = list(range(10))
UNSEEN = 7  # until round 3
TUNED = FineTuning(LOCAL, Draws(0, "finetune", 3))
NO_DECAY = replace(LOCAL, weight_decay=0.0)


def fixed(alpha, mixing="output", **values):
    return APFL(alpha, adaptive=False, mixing=mixing, **values)


def judged(method, net, federation, state, backend, tuning=None):
    return make_backend(Engine(backend), net, CPU).evaluate(
        EvalCall(method, federation, state, EVERYONE, tuning)
    )


@pytest.mark.parametrize("mixing", ["output", "param"])
def test_with_alpha_0_a_client_is_fedavgs(mixing, backend, net, federation):
    """The private model never moves, in fine-tuning neither."""
    method, fedavg = fixed(0.0, mixing), FedAvg()
    own = record_states(method, net, federation, engine=backend, local=NO_DECAY)[-1]
    shared = record_states(fedavg, net, federation, engine=backend, local=NO_DECAY)[-1]
    for client in EVERYONE:
        assert_same(client_row(own.clients["v"], client), net.params)
    for tuning in (None, TUNED):
        counts = judged(method, net, federation, own, backend, tuning)
        shared_counts = judged(fedavg, net, federation, shared, backend, tuning)
        assert_same(counts.correct, shared_counts.correct)
        # Clients that share a model are counted in one pass, whose sums round in other places.
        assert_close(counts.loss, shared_counts.loss, atol=1e-5)


def test_alpha_stays_between_0_and_1(backend, net, federation):
    seen = set()
    for state in record_states(
        APFL(alpha_lr=50.0), net, federation, [*COHORTS, *COHORTS], engine=backend
    ):
        seen |= set(state.clients["alpha"].tolist())
    assert min(seen) == 0.0
    assert max(seen) == 1.0


def test_the_rounds_tell_alpha_as_it_was(net, federation):
    states, outcomes = record_rounds(APFL(alpha_lr=1.0), net, federation)
    for state, outcome, cohort in zip(states, outcomes, COHORTS, strict=False):
        assert outcome.metrics == {
            "alpha": pytest.approx(float(state.clients["alpha"][cohort].mean()))
        }


@dataclass(frozen=True)
class Watched(APFL):
    """Notes what is judged."""

    seen: ClassVar[list] = []

    def predict(self, net, params, batch):
        if not torch.is_grad_enabled():
            self.seen.append(copy.deepcopy(params))
        return super().predict(net, params, batch)


def test_fine_tuning_moves_both_models_and_leaves_alpha_still(net, federation):
    method = Watched(alpha_lr=1.0)
    state = record_states(method, net, federation)[-1]
    method.seen.clear()
    make_backend(Engine("loop"), net, CPU).evaluate(EvalCall(method, federation, state, [0], TUNED))
    (tuned,) = method.seen
    plain = method.personal(state.server, state.client(0))
    assert differing(tuned, plain) == [
        f"/{role}/{name}" for role in ("w", "v") for name in net.params
    ]


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
        judged(m, net, federation, s, backend) for m, s in ((cold, state), (FedAvg(), fedavg))
    )
    for client in EVERYONE:
        assert torch.equal(own.loss[client], shared.loss[client]) == (client in (UNSEEN, 9))


def test_the_first_round_of_a_cold_client_is_judged_like_that_too(backend, net, federation):
    """Before training by the global model, afterwards by the mixture; client 9 takes no step."""
    method = APFL(cold_start="global")
    state = record_states(method, net, federation, COHORTS[:2], engine=backend)[-1]
    cold, initial = (
        participate(m, net, federation, state, [7, 9], engine=backend) for m in (method, APFL())
    )
    fedavg = record_states(FedAvg(), net, federation, COHORTS[:2], engine=backend)[-1]
    shared = participate(FedAvg(), net, federation, fedavg, [7, 9], engine=backend)
    assert_close(cold.before, shared.before)
    assert_same(cold.after, initial.after)
    assert not torch.equal(cold.before.loss, initial.before.loss)
    assert cold.trained.tolist() == [True, False]
