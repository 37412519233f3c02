"""APFL (arXiv:2003.13461): alpha by its formula, FedAvg and Local-Only as limits, evaluation by the
mixture.
"""

import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl.engine import Engine, FineTuning, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.methods import APFL, FedAvg
from fedpfl.models import Net
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    PLAIN,
    TRAIN,
    assert_close,
    assert_same,
    client_row,
    differing,
    participate,
    record_rounds,
    record_states,
    tiny,
    with_client_states,
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


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Linear(64, 5)

    def forward(self, x):
        return self.classifier(x.flatten(1))


# Limits


@pytest.mark.parametrize("mixing", ["output", "param"])
def test_with_alpha_0_a_client_is_fedavgs(mixing, backend, net, federation):
    """The private model never moves, in fine-tuning neither."""
    method, fedavg = fixed(0.0, mixing), FedAvg()
    own = record_states(method, net, federation, engine=backend, local=NO_DECAY)[-1]
    shared = record_states(fedavg, net, federation, engine=backend, local=NO_DECAY)[-1]
    for client in EVERYONE:
        assert_same(client_row(own.clients["v"], client), net.params)
    for tuning in (None, TUNED):
        assert_same(
            judged(method, net, federation, own, backend, tuning),
            judged(fedavg, net, federation, shared, backend, tuning),
        )


def test_in_a_linear_model_both_mixings_are_one(backend, net, federation):
    def private(net):
        return [
            record_states(fixed(0.3, m), net, federation, engine=backend)[-1].clients["v"]
            for m in ("output", "param")
        ]

    linear = Net(Linear())
    output, param = private(linear)
    assert_close(output, param, atol=1e-6, rtol=0)
    assert (
        client_row(output, 2)["classifier.weight"] - linear.params["classifier.weight"]
    ).abs().max() > 0.01
    output, param = private(net)
    assert (output["fc.weight"] - param["fc.weight"]).abs().max() > 1e-4


# The weight


@pytest.mark.parametrize("mixing", ["output", "param"])
def test_alpha_moves_by_its_formula_on_the_first_batch(mixing, backend, net, federation):
    """From the models that the client starts with; before round 3 they differ."""
    method = APFL(0.4, mixing=mixing, alpha_lr=0.5, alpha_decay=0.1)
    states = record_states(method, net, federation, engine=backend)
    for client in (0, 1, 5):
        alpha, shared, own = (
            states[2].clients["alpha"][client],
            states[2].server,
            client_row(states[2].clients["v"], client),
        )
        order = Draws(0, "train", 3).order(client, "main", 0, TRAIN[client])[: LOCAL.batch_size]
        rows = federation.train[client][order]
        x, y = federation.normalize(federation.x[rows]), federation.y[rows]
        w, v = (
            {k: leaf.clone().requires_grad_() for k, leaf in model.items()}
            for model in (shared, own)
        )
        bound = net.bind({})
        if mixing == "output":
            F.cross_entropy(alpha * bound(v, x) + (1 - alpha) * bound(w, x), y).backward()
            gradient = {k: alpha * v[k].grad + (1 - alpha) * w[k].grad for k in v}
        else:
            mixed = {k: (alpha * own[k] + (1 - alpha) * shared[k]).requires_grad_() for k in v}
            F.cross_entropy(bound(mixed, x), y).backward()
            gradient = {k: leaf.grad for k, leaf in mixed.items()}
        slope = sum(((own[k] - shared[k]) * gradient[k]).sum() for k in own)
        assert abs(slope) > 1e-3
        expected = alpha - 0.5 * (slope + 0.1 * alpha)
        assert 0 < expected < 1, (
            "choose another alpha_lr: the formula is not seen where it is clipped"
        )
        assert_close(states[3].clients["alpha"][client], expected)


def test_the_first_batch_is_trained_with_the_old_alpha_and_the_second_with_the_new(
    backend, net, federation
):
    moving, still = APFL(alpha_lr=10.0), fixed(0.5)
    for local, alike in ((PLAIN, True), (replace(PLAIN, epochs=2), False)):
        a, b = (
            record_states(m, net, federation, [[0, 2]], engine=backend, local=local)[-1]
            for m in (moving, still)
        )
        assert a.clients["alpha"].tolist()[:3] == pytest.approx(
            [0.4, 0.5, 0.4]
        )  # v = w: the decay alone
        assert (differing(a.clients["v"], b.clients["v"]) == []) == alike


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


# Judging


@dataclass(frozen=True)
class Watched(APFL):
    """Notes what is judged."""

    seen: ClassVar[list] = []

    def predict(self, net, params, batch):
        if not torch.is_grad_enabled():
            self.seen.append(copy.deepcopy(params))
        return super().predict(net, params, batch)


@pytest.mark.parametrize("mixing", ["output", "param"])
def test_a_client_is_judged_by_the_mixture_with_the_latest_global_model(
    mixing, backend, net, federation
):
    method = APFL(mixing=mixing, alpha_lr=5.0)
    state = record_states(method, net, federation, engine=backend)[-1]
    for client, tally in enumerate(judged(method, net, federation, state, backend).loss):
        alpha, own, rows = (
            state.clients["alpha"][client],
            client_row(state.clients["v"], client),
            federation.test[client],
        )
        x, y, bound = federation.normalize(federation.x[rows]), federation.y[rows], net.bind({})
        if mixing == "output":
            logits = alpha * bound(own, x) + (1 - alpha) * bound(state.server, x)
        else:
            logits = bound({k: alpha * own[k] + (1 - alpha) * state.server[k] for k in own}, x)
        assert_close(tally, F.cross_entropy(logits, y, reduction="sum"), atol=1e-5)


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


# Statistics, traffic, ranges


@pytest.mark.parametrize("mixing", ["output", "param"])
def test_mixed_parameters_use_the_private_models_statistics(mixing, backend, federation):
    method, net = fixed(0.5, mixing), tiny(norm=True)
    state = record_states(method, net, federation, engine=backend)[-1]
    assert set(state.server_buffers) == {"w"}
    assert set(state.client_buffers) == {"v"}
    assert differing(
        client_row(state.client_buffers["v"], 0), client_row(state.client_buffers["v"], 2)
    )
    kept = judged(method, net, federation, state, backend)
    moved = {
        part: {
            role: {**own, "norm.running_mean": own["norm.running_mean"] + 1}
            for role, own in buffers.items()
        }
        for part, buffers in (("server", state.server_buffers), ("clients", state.client_buffers))
    }
    shared = replace(state, server_buffers=moved["server"])
    for other, matters in (
        (shared, mixing == "output"),
        (with_client_states(state, buffers=moved["clients"]), True),
    ):
        assert bool(differing(judged(method, net, federation, other, backend), kept)) == matters
