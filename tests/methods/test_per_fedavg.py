"""Per-FedAvg's fine-tuning is plain descent with the inner step."""

import copy
from dataclasses import replace

from fedpfl.engine import Engine, FineTuning, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedAvg, PerFedAvg
from tests.conftest import COHORTS, CPU, LOCAL, assert_close, assert_same, differing, record_states

EVERYONE = list(range(10))
SMALL = replace(LOCAL, batch_size=8)  # most clients have three minibatches then
METHOD = PerFedAvg("hf", inner_lr=0.1, outer_lr=0.05, delta=0.01)


def judged(method, net, federation, state, backend, tuning=None, before=None):
    return make_backend(Engine(backend), net, CPU).evaluate(
        EvalCall(method, federation, state, EVERYONE, tuning, before)
    )


def test_fine_tuning_is_plain_descent_with_the_inner_step(backend, net, federation):
    method, cohorts = METHOD, COHORTS[:1]
    state = record_states(method, net, federation, cohorts, engine=backend, local=SMALL)[-1]
    kept = copy.deepcopy(state)
    draws = Draws(0, "finetune", 3)
    plain = FineTuning(replace(LOCAL, lr=method.inner_lr, momentum=0.0), draws)
    tuned = judged(method, net, federation, state, backend, FineTuning(LOCAL, draws))
    assert_same(tuned, judged(FedAvg(), net, federation, state, backend, plain))
    assert differing(
        tuned, judged(FedAvg(), net, federation, state, backend, FineTuning(LOCAL, draws))
    )
    still = replace(method, inner_lr=0.0)
    tuned, kept_still = (
        judged(still, net, federation, state, backend, tuning)
        for tuning in (FineTuning(LOCAL, draws), None)
    )
    assert_close(tuned, kept_still, atol=1e-5)  # another memory layout
    assert_same(state, kept)
