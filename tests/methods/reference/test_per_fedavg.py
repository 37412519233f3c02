"""Per-FedAvg's whole rounds against plain loops: ragged clients, half of them a round, some without
a step.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl.engine import Engine, FineTuning, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import PerFedAvg
from tests.conftest import CPU, LOCAL, Tiny, assert_close, record_rounds, tiny
from tests.methods.reference import per_fedavg
from tests.methods.reference.conftest import SEED

SMALL = dataclasses.replace(LOCAL, batch_size=8)
CASES = {
    "fo": (PerFedAvg("fo", inner_lr=0.1, outer_lr=0.05), (False, 0.1, 0.05, 0.0)),
    "hf": (PerFedAvg("hf", inner_lr=0.2, outer_lr=0.05, delta=0.05), (True, 0.2, 0.05, 0.05)),
}


def normalised(setting, net):
    module = Tiny()
    module.norm = nn.BatchNorm2d(4)
    module.load_state_dict({**net.params, **net.buffers})
    return dataclasses.replace(setting, module=module)


@pytest.fixture(
    scope="module",
    params=[("hf", False), ("fo", True), ("hf", True)],
    ids=["hf", "fo-norm", "hf-norm"],
)
def case(request, setting):
    """The network, the method, and the rounds by the plain loops."""
    name, norm = request.param
    (method, values), net = CASES[name], tiny(norm)
    setting = dataclasses.replace(
        normalised(setting, net) if norm else setting, batch_size=SMALL.batch_size
    )
    return net, method, per_fedavg.per_fedavg(setting, *values)


def test_three_rounds_equal_the_plain_loops(case, backend, federation):
    """Rounding only: 1e-6 for parameters of order 0.1, 5e-6 with BatchNorm, which divides by small
    spreads.
    """
    net, method, want = case
    norm = bool(net.buffers)
    states, outcomes = record_rounds(
        method, net, federation, engine=backend, seed=SEED, local=SMALL
    )
    tolerance = {"atol": 5e-6 if norm else 1e-6, "rtol": 1e-5 if norm else 0.0}
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        statistics = {
            k: v for k, v in state.server_buffers["main"].items() if v.is_floating_point()
        }
        got = {**state.server, **statistics}
        assert_close(got, {k: want.shared[t][k] for k in got}, **tolerance)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


@pytest.mark.parametrize(("steps", "norm"), [(1, True), (4, False)])
def test_adapted_models_predict_what_the_plain_loops_do(steps, norm, backend, setting, federation):
    net = tiny(norm)
    setting = dataclasses.replace(
        normalised(setting, net) if norm else setting,
        batch_size=SMALL.batch_size,
        order=lambda t, i, epoch, samples: Draws(SEED, "adapt", t).order(i, "main", epoch, samples),
    )
    method = PerFedAvg(inner_lr=0.3, outer_lr=0.05, adapt_steps=steps)
    state = record_rounds(method, net, federation, engine=backend, seed=SEED, local=SMALL)[0][-1]
    everyone, before = list(range(10)), FineTuning(SMALL, Draws(SEED, "adapt", 3))
    counts = make_backend(Engine(backend), net, CPU).evaluate(
        EvalCall(method, federation, state, everyone, before_evaluation=before)
    )
    shared = {**state.server, **state.server_buffers["main"]}
    for i, client in enumerate(setting.clients):
        module = setting.module.eval()
        weights = per_fedavg.adapted(setting, shared, 3, i, 0.3, steps)
        with torch.no_grad():
            logits = torch.func.functional_call(module, weights, (client.test_x,))
        assert counts.correct[i] == (logits.argmax(1) == client.test_y).sum()
        assert_close(
            counts.loss[i], F.cross_entropy(logits, client.test_y, reduction="sum"), atol=5e-5
        )
