"""kNN-Per against plain loops that sort distances."""

import pytest

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.methods import KNNPer
from tests.conftest import CLASSES, CPU, as_engine, assert_close, hold_out_quarter, record_rounds
from tests.methods.reference.conftest import SEED, describe_setting
from tests.methods.reference.knn_per import knn_per

CASES = [
    (10, 0.5, 1.0, "squared", "probabilities"),
    (3, 0.8, 0.05, "euclidean", "probabilities"),
    (7, 0.9, 0.01, "squared", "logits"),
    (5, None, 0.1, "squared", "probabilities"),
]


@pytest.mark.parametrize("values", CASES, ids=str)
def test_three_rounds_equal_the_plain_loops(values, backend, net, federation):
    federation = hold_out_quarter(federation)
    chosen = agree(values, backend, net, federation, describe_setting(net, federation))
    assert values[1] is not None or len({lam for row in chosen for lam in row}) > 1


def test_batch_normalisation_uses_the_models_statistics(backend, normed, federation):
    agree(CASES[0], backend, normed[0], federation, normed[1])


def agree(values, backend, net, federation, setting):
    k, lam, scale, distance, mix = values
    method = KNNPer(k=k, lam=lam, scale=scale, distance=distance, mix=mix)
    want, everyone, chosen = knn_per(setting, *values, CLASSES)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(
            state.server,
            {name: want.shared[t][name] for name in state.server},
            atol=5e-6,
            rtol=1e-5,
        )
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
        tally = make_backend(as_engine(backend), net, CPU).evaluate(
            EvalCall(method, federation, state, list(range(10)))
        )
        got = tally["test"] if isinstance(tally, dict) else tally
        assert got.correct.tolist() == everyone[t]
    return chosen
