"""FedProto (arXiv:2105.00243): what travels."""

import pytest

from fedpfl.methods import FedProto
from tests.conftest import COHORTS, record_rounds


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
