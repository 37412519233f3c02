"""FedProto (arXiv:2105.00243): predictions without prototypes, and what travels."""

import pytest

from fedpfl.engine import FineTuning, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedProto
from tests.conftest import COHORTS, CPU, LOCAL, as_engine, assert_same, record_rounds, record_states

EVERYONE = list(range(10))


def test_before_the_first_round_and_fine_tuned_it_predicts(backend, net, federation):
    runner, tuning = (
        make_backend(as_engine(backend), net, CPU),
        FineTuning(LOCAL, Draws(0, "finetune", 1)),
    )
    for method in (FedProto(), FedProto(judge="nearest_own")):
        states = record_states(method, net, federation, COHORTS[:1])
        head = runner.evaluate(EvalCall(FedProto(judge="head"), federation, states[0], EVERYONE))
        assert_same(
            runner.evaluate(EvalCall(method, federation, states[0], EVERYONE)).correct, head.correct
        )
        assert (
            runner.evaluate(EvalCall(method, federation, states[1], EVERYONE, tuning))
            .loss.isfinite()
            .all()
        )


@pytest.mark.parametrize(("weights", "more"), [("uniform", 0), ("counts", 1)])
def test_what_travels(weights, more, backend, net, federation):
    """The last client has one sample, and makes no step."""
    states, outcomes = record_rounds(FedProto(weights=weights), net, federation, engine=backend)
    for t, cohort in enumerate(COHORTS):
        classes = [len(federation.y[federation.train[i]].unique()) for i in cohort if i != 9]
        assert outcomes[t].traffic.values_up >= (12 + more) * (
            sum(classes) - 2
        )  # a dropped lone sample's class
        assert outcomes[t].traffic.values_up <= (12 + more) * sum(classes)
        assert outcomes[t].traffic.values_up % (12 + more) == 0
        assert outcomes[t].traffic.values_down == len(cohort) * 12 * int(
            states[t].server["seen"].sum()
        )
