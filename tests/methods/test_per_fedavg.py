"""Per-FedAvg's fine-tuning is plain descent with the inner step."""

import copy
from dataclasses import replace

from fedpfl.engine import FineTuning
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedAvg, PerFedAvg
from tests.conftest import (
    COHORTS,
    LOCAL,
    assert_close,
    assert_same,
    differing,
    evaluate,
    record_states,
)

SMALL = replace(LOCAL, batch_size=8)  # most clients have three minibatches then
METHOD = PerFedAvg("hf", inner_lr=0.1, outer_lr=0.05, delta=0.01)


def test_fine_tuning_is_plain_descent_with_the_inner_step(backend, net, federation):
    method, cohorts = METHOD, COHORTS[:1]
    state = record_states(method, net, federation, cohorts, engine=backend, local=SMALL)[-1]
    kept = copy.deepcopy(state)
    draws = Draws(0, "finetune", 3)
    plain = FineTuning(replace(LOCAL, lr=method.inner_lr, momentum=0.0), draws)
    tuned, descended, usual = (
        evaluate(own, net, federation, state, backend, tuning=tuning)
        for own, tuning in (
            *((method, FineTuning(LOCAL, draws)), (FedAvg(), plain)),
            (FedAvg(), FineTuning(LOCAL, draws)),
        )
    )
    assert_same(tuned, descended)
    assert differing(tuned, usual)
    still = replace(method, inner_lr=0.0)
    tuned, kept_still = (
        evaluate(still, net, federation, state, backend, tuning=tuning)
        for tuning in (FineTuning(LOCAL, draws), None)
    )
    assert_close(tuned, kept_still, atol=1e-5)  # another memory layout
    assert_same(state, kept)
