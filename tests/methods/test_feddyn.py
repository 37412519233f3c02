"""FedDyn (arXiv:2111.04263) at alpha 0, which is not FedAvg."""

import pytest

from fedpfl.ground import tree
from fedpfl.methods import FedAvg, FedDyn
from tests.conftest import assert_close, differing, make_federation, record_states

ALL = [list(range(4))]


@pytest.fixture(scope="module")
def even():
    """Four clients of equal size."""
    return make_federation((32,) * 4, (8,) * 4)


def test_alpha_zero_is_not_fedavg(backend, net, even):
    """All clients, round 1: th + 2 mean(Delta)."""
    own, fedavg = (
        record_states(m, net, even, ALL, engine=backend)[-1].server
        for m in (FedDyn(alpha=0.0), FedAvg())
    )
    twice = tree.map(lambda th, mean: th + 2 * (mean - th), net.params, fedavg)
    assert_close(own["model"], twice, atol=1e-6)
    assert differing(own["model"], fedavg)
