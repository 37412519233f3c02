"""FedRoD (arXiv:2107.00778): the balanced loss, two objectives that do not meet, FedAvg as a limit."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fedpfl.engine import FineTuning, make_backend, make_initial_state
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedRoD
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    LOOP,
    PLAIN,
    assert_close,
    assert_same,
    client_row,
    make_federation,
    participate,
    record_states,
    with_client_states,
)


def informed(method, federation, state, client, net):
    """A client's tree as it enters a round."""
    own, shard = state.client(client), make_shard(federation, client, 32, None)
    return own | method.before_training(state.server, own, net.bind({"main": {}}), shard)


@dataclasses.dataclass(frozen=True)
class WithoutPersonalHead(FedRoD):
    """The generic objective alone."""

    def loss(self, server, client, net, params, batch):
        logits = net(params["w"], batch.x) + (client["prior"] if self.gamma else 0.0)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))


def test_the_generic_model_does_not_know_of_personal_heads(backend, net, federation):
    both = record_states(FedRoD(), net, federation, engine=backend)[-1]
    alone = record_states(WithoutPersonalHead(), net, federation, engine=backend)[-1]
    assert_same(both.server, alone.server)
    assert not torch.equal(
        both.clients["q"]["classifier.weight"][2],
        alone.clients["q"]["classifier.weight"][2],
    )
    changed = with_client_states(
        both, client={"q": tree.map(lambda leaf: leaf + 1.0, both.clients["q"])}
    )
    for name in ("loop", "batched"):
        one, other = (
            participate(FedRoD(), net, federation, s, COHORTS[0], engine=name)
            for s in (both, changed)
        )
        assert_same(one.uploads, other.uploads)


def balanced(federation):
    """The same with as many samples of each class at client 0."""
    y = federation.y.clone()
    y[federation.train[0]] = torch.arange(40) % CLASSES
    return dataclasses.replace(federation, y=y)


def test_with_equal_class_counts_the_balanced_loss_is_cross_entropy(net, federation):
    """Up to rounding: the prior shifts all logits alike."""
    federation = balanced(federation)
    state = make_initial_state(FedRoD(), net, 10, CPU)
    client = informed(FedRoD(), federation, state, 0, net)
    assert client["prior"].unique().tolist() == [torch.tensor(8.0).log().item()]
    own, plain = (
        participate(m, net, federation, state, [0]) for m in (FedRoD(), FedRoD(gamma=0.0))
    )
    assert_close(own.uploads, plain.uploads, atol=1e-6)


def test_the_prior_matters_where_counts_differ(net, federation):
    state = make_initial_state(FedRoD(), net, 10, CPU)
    own, plain = (
        participate(m, net, federation, state, [0]) for m in (FedRoD(), FedRoD(gamma=0.0))
    )
    assert (
        own.uploads["classifier.weight"] - plain.uploads["classifier.weight"]
    ).abs().max() > 1e-3


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_absent_classes_have_probability_zero_and_all_stays_finite(gamma, net, federation):
    y = federation.y.clone()
    y[federation.train[0]] = torch.tensor([0] * 20 + [1] * 15 + [3] * 5)
    federation = dataclasses.replace(federation, y=y)
    method = FedRoD(gamma=gamma)
    state = make_initial_state(method, net, 10, CPU)
    client = informed(method, federation, state, 0, net)
    counts = torch.bincount(federation.y[federation.train[0]], minlength=CLASSES).double()
    assert (counts == 0).sum() == 2
    probability = (torch.zeros(CLASSES) + client["prior"]).softmax(0)
    assert_close({"": probability}, {"": (counts**gamma / (counts**gamma).sum()).float()})
    assert not probability[counts == 0].any()
    params = tree.map(
        lambda leaf: leaf.clone().requires_grad_(), method._begin(state.server, client)
    )
    x = federation.normalize(federation.x[federation.train[0]])
    # With a padded sample of an absent class, as on the batched backend.
    batch = Batch(
        x, torch.cat([federation.y[federation.train[0]][:-1], torch.tensor([4])]), torch.ones(40)
    )
    batch.weight[-1] = 0
    loss = method.loss(state.server, client, net.bind({"main": {}}, training=True), params, batch)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, tree.leaves(params)))


def test_without_a_personal_head_the_prediction_is_the_generic_one(net, federation):
    x = federation.normalize(federation.x[:20])
    bound, zero = (
        net.bind({"main": {}}),
        {name: torch.zeros_like(net.params[name]) for name in net.parts.head},
    )
    assert_same(
        FedRoD().predict(bound, {"w": net.params, "q": zero}, Batch(x, None)), bound(net.params, x)
    )
    own = {name: net.params[name] for name in net.parts.head}
    both = FedRoD().predict(bound, {"w": net.params, "q": own}, Batch(x, None))
    assert_close({"": both}, {"": 2 * bound(net.params, x)}, atol=1e-6)


def test_a_personal_head_changes_only_with_training_and_counts_from_then_on(
    backend, net, federation
):
    method = FedRoD()
    states = record_states(method, net, federation, engine=backend)
    initial = {name: net.params[name] for name in net.parts.head}
    assert_same(client_row(states[2].clients["q"], 7), initial)  # not sampled yet
    judged = method.personal(states[2].server, states[2].client(7))
    assert not any(leaf.any() for leaf in judged["q"].values())
    assert_same(judged["w"], states[2].server)
    assert_same(client_row(states[1].clients["q"], 0), client_row(states[2].clients["q"], 0))
    after = method.personal(states[3].server, states[3].client(7))
    assert_same(after["q"], client_row(states[3].clients["q"], 7))
    assert not torch.equal(after["q"]["classifier.bias"], initial["classifier.bias"])
    assert_same(client_row(states[3].clients["q"], 9), initial)  # sampled twice, without a batch
    assert not states[3].client(9)["trained"]


def test_the_personal_head_follows_its_own_loss_alone(net, federation):
    """One full-batch step: the gradient of CE(g + q) with respect to q, everything else given."""
    state = make_initial_state(FedRoD(), net, 10, CPU)
    part = participate(FedRoD(), net, federation, state, [0], local=PLAIN)
    x, y = (
        federation.normalize(federation.x[federation.train[0]]),
        federation.y[federation.train[0]],
    )
    logits, z = net.bind({"main": {}}).features(net.params, x)
    q = {name: net.params[name].clone().requires_grad_() for name in net.parts.head}
    F.cross_entropy(logits.detach() + F.linear(z.detach(), *q.values()), y).backward()
    expected = {name: (leaf - PLAIN.lr * leaf.grad).detach() for name, leaf in q.items()}
    assert_close(tree.take(part.client_states["q"], 0), expected, atol=1e-6)


def test_fine_tuning_the_head_moves_both(net):
    federation = make_federation()
    state = record_states(FedRoD(), net, federation)[-1]
    runner, tuning = (
        make_backend(LOOP, net, CPU),
        FineTuning(PLAIN, Draws(0, "finetune", 3), "head"),
    )
    before, after = (
        runner.evaluate(EvalCall(FedRoD(), federation, state, [2], t)) for t in (None, tuning)
    )
    assert after.loss != before.loss
