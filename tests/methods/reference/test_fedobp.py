"""FedOBP whose clients choose q, against plain loops in which a client has nothing but what it
received.
"""

import dataclasses
from contextlib import nullcontext

import pytest
import torch

from fedpfl.engine.calls import EvalCall
from fedpfl.engine.training.participation import OneClient, run_evaluation
from fedpfl.methods import FedOBPAdaptive
from tests.conftest import COHORTS, assert_close, hold_out_quarter, make_federation, record_rounds
from tests.methods.reference import plain
from tests.methods.reference.conftest import SEED, describe_setting

SEVERAL = (0.3, 0.7, 0.9, 0.98)
FIVE = [*COHORTS, *COHORTS[:2]]


@pytest.fixture(scope="module")
def federation():
    """Three clients are too small to hold anything out."""
    return hold_out_quarter(make_federation())


@pytest.fixture(scope="module")
def expected(net, federation):
    return plain.fedobp_choosing(
        dataclasses.replace(describe_setting(net, federation), cohorts=FIVE), list(SEVERAL)
    )


def personal(method, net, federation, state, client):
    """The model that the engine evaluates."""
    call = EvalCall(method, federation, state, [client])
    return next(run_evaluation(call, OneClient(client), net, nullcontext)).params


def test_five_rounds_equal_the_plain_loops(backend, expected, net, federation):
    method = FedOBPAdaptive(q=SEVERAL)
    states, outcomes = record_rounds(method, net, federation, FIVE, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert state.clients["q"][FIVE[t]].tolist() == expected.chosen[t]
        assert_close(state.server, expected.shared[t], atol=1e-6, rtol=0.0)
        assert outcome.before.correct.tolist() == expected.before[t]
        assert outcome.after.correct.tolist() == expected.after[t]
        for client, model in enumerate(expected.personal[t]):
            assert_close(
                personal(method, net, federation, state, client), model, atol=1e-6, rtol=0.0
            )
        assert outcome.metrics["q_mean"] == pytest.approx(sum(expected.chosen[t]) / 5)
        for q in SEVERAL:
            assert outcome.metrics[f"q_share/{q}"] == pytest.approx(expected.chosen[t].count(q) / 5)


def test_the_choices_differ_and_are_clear(expected, federation):
    assert [len(own) for own in federation.validation].count(0) == 3
    assert {q for chosen in expected.chosen for q in chosen} == {*SEVERAL}
    assert min(expected.margins) > 1e-5, "choose another seed: rounding could change a choice"
    last = [
        torch.cat([leaf.flatten() for leaf in model.values()]) for model in expected.personal[-1]
    ]
    assert all((one != last[0]).any() for one in last[1:])
