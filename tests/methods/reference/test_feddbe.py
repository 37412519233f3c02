"""FedDBE's whole rounds against plain loops, the initial pass included."""

from functools import cache

import pytest
import torch

from fedpfl.engine.keys import Draws
from fedpfl.methods import FedDBE
from tests.conftest import assert_close, record_rounds
from tests.methods.reference.conftest import SEED
from tests.methods.reference.feddbe import feddbe

CASES = {
    "paper": FedDBE(bias_lr=0.05),
    "slow": FedDBE(kappa=20.0, rho=0.3, bias_lr=0.5),
    "data": FedDBE(kappa=20.0, rho=0.6, bias_lr=0.1, mean="data"),
}


@pytest.fixture(scope="module")
def expected(setting):
    def order(t, i, epoch, samples):
        return Draws(SEED, "gather", t).order(i, "main", epoch, samples)

    return cache(
        lambda name: (
            feddbe(setting, m.kappa, m.rho, m.bias_lr, order, m.mean)
            if (m := CASES[name])
            else None
        )
    )


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_equal_the_plain_loops(name, backend, expected, net, federation):
    want, method = expected(name), CASES[name]
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        (mean,) = state.server["mean"].values()
        assert_close(mean, want.mean, atol=1e-6, rtol=0)
        assert_close(state.server["model"], want.shared[t], atol=2e-6, rtol=0)
        (biases,) = state.clients["u"].values()
        assert_close(biases, torch.stack(want.biases[t]), atol=1e-6, rtol=0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
