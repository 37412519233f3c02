"""pFedMe: the exact tests of its specification."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedpfl.engine import Engine, FineTuning, make_backend, make_initial_state
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedAvg, PFedMe
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    PLAIN,
    TRAIN,
    Tiny,
    assert_close,
    assert_same,
    client_row,
    differing,
    participate,
    record_rounds,
    record_states,
    tiny,
)

EVERYONE = list(range(10))
UNSEEN = 7  # until round 3
ONE = PFedMe(inner_steps=1, mu=0.0)


def only(part, tree_of):
    """The one client's part."""
    return tree.take(getattr(part, tree_of), 0)


class Quadratic:
    """Stands in for a network: the gradient of 0.5 |th - c|^2, whatever the objective."""

    def __init__(self, centre):
        self.centre = centre

    def gradient(self, objective, th, weight=None):
        return {k: th[k] - self.centre[k] for k in th}, torch.zeros(())


def test_the_loss_of_training_is_that_of_the_model_a_minibatch_begins_with(
    backend, net, federation
):
    """Of one full batch: the received model's, not that of the inner steps after it."""
    _, (outcome,) = record_rounds(
        PFedMe(inner_lr=0.1), net, federation, [[0, 2]], engine=backend, local=PLAIN
    )
    for client, loss in zip((0, 2), outcome.loss, strict=True):
        x, y = (
            federation.normalize(federation.x[federation.train[client]]),
            federation.y[federation.train[client]],
        )
        assert_close(
            {"": loss.float()}, {"": F.cross_entropy(net.bind({})(net.params, x), y)}, atol=1e-5
        )


def test_without_a_pull_the_global_model_never_moves(backend, net, federation):
    """And the private one is plain SGD from it."""
    method, plain = (
        PFedMe(lam=0.0, inner_steps=1, inner_lr=0.05, mu=0.0),
        replace(LOCAL, momentum=0.0, weight_decay=0.0),
    )
    one = record_states(method, net, federation, [[2]] * 2, engine=backend)[-1]
    assert_same(one.server, net.params)
    state = record_states(method, net, federation, engine=backend)[-1]
    assert_close(state.server, net.params, atol=0, rtol=1e-6)
    alone = participate(
        FedAvg(),
        net,
        federation,
        make_initial_state(FedAvg(), net, 10, CPU),
        [2],
        engine=backend,
        local=plain,
    )
    part = participate(
        method, net, federation, make_initial_state(method, net, 10, CPU), [2], engine=backend
    )
    assert_same(only(part, "client_states")["th"], only(alone, "uploads"))
    assert differing(only(part, "client_states")["th"], net.params)


def test_one_inner_step_on_one_batch_is_a_gradient_step_of_the_product_of_lengths(
    backend, net, federation
):
    part = participate(
        ONE,
        net,
        federation,
        make_initial_state(ONE, net, 10, CPU),
        [0],
        engine=backend,
        local=PLAIN,
    )
    module, rows = Tiny(), federation.train[0]
    module.load_state_dict(net.params)
    F.cross_entropy(module(federation.normalize(federation.x[rows])), federation.y[rows]).backward()
    length = ONE.outer_lr * ONE.lam * ONE.inner_lr
    expected = {name: (p - length * p.grad).detach() for name, p in module.named_parameters()}
    assert_close(only(part, "uploads"), expected, atol=1e-6, rtol=0)
    moved = tree.map(lambda new, old: (new - old).abs().max(), expected, net.params)
    assert max(tree.leaves(moved)) > 5e-5


def test_where_outer_lr_times_lam_is_1_the_global_copy_is_the_private_model(
    backend, net, federation
):
    method = PFedMe(lam=20.0, outer_lr=0.05)
    part = participate(
        method,
        net,
        federation,
        make_initial_state(method, net, 10, CPU),
        COHORTS[0],
        engine=backend,
    )
    assert_close(part.uploads, part.client_states["th"], atol=1e-6, rtol=0)
    assert differing(only(part, "uploads"), net.params)


def test_beta_is_the_length_of_the_servers_step(backend, net, federation):
    """What clients send does not depend on it, nor on how they are averaged."""
    first, total = make_initial_state(PFedMe(), net, 10, CPU), sum(TRAIN[i] for i in COHORTS[0])
    part = participate(PFedMe(), net, federation, first, COHORTS[0], engine=backend)
    samples = [TRAIN[i] / total for i in COHORTS[0]]
    for beta, average in itertools.product((0.0, 0.5, 1.0, 2.0), ("uniform", "samples")):
        method = PFedMe(beta=beta, average=average)
        server, _ = method.aggregate(
            first.server, part.client_states, None, part.uploads, torch.tensor(samples), None
        )
        if beta == 0:
            assert_same(server, net.params)
        shares = [1 / 5] * 5 if average == "uniform" else samples
        for name, leaf in part.uploads.items():
            mean = sum(share * row.double() for share, row in zip(shares, leaf, strict=True))
            expected = (1 - beta) * net.params[name].double() + beta * mean
            assert_close(server[name], expected.float(), atol=1e-7)
        if beta == 0.5:
            assert_close(
                record_states(method, net, federation, COHORTS[:1], engine=backend)[-1].server,
                server,
                atol=1e-7,
            )


def test_inner_steps_find_the_proximal_point_of_a_quadratic():
    """(c + lam w) / (1 + lam), and w is pulled to it from where it was."""
    g = torch.Generator().manual_seed(0)
    w, centre = ({"a": torch.randn(7, generator=g, dtype=torch.float64)} for _ in range(2))
    method = PFedMe(inner_steps=400, inner_lr=0.05, lam=3.0, mu=0.0)
    batch = Batch(torch.zeros(1), torch.zeros(1))
    end, _ = method._step(w, {}, Quadratic(centre), {"w": w, "th": w}, batch)
    point = (centre["a"] + 3 * w["a"]) / 4
    assert_close(end["th"]["a"], point, atol=1e-12)
    assert_close(end["w"]["a"], w["a"] - method.outer_lr * 3 * (w["a"] - point), atol=1e-12)


def test_the_decay_is_part_of_an_inner_step():
    w, centre = ({"a": torch.tensor([value], dtype=torch.float64)} for value in (2.0, 0.5))
    method = PFedMe(inner_steps=2, inner_lr=0.1, lam=3.0, mu=0.5)
    end, _ = method._step(
        w, {}, Quadratic(centre), {"w": w, "th": w}, Batch(torch.zeros(1), torch.zeros(1))
    )
    first = 2.0 - 0.1 * (1.5 + 0.5 * 2.0)
    second = first - 0.1 * (first - 0.5 + 3 * (first - 2.0) + 0.5 * first)
    assert_close(end["th"]["a"], torch.tensor([second], dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("batch_size", [16, 64])
def test_the_private_model_carries_on_from_minibatch_to_minibatch(
    batch_size, backend, net, federation
):
    """One step of all samples is the same from both; of several, a fresh start would end elsewhere."""

    class Fresh(PFedMe):
        def _step(self, server, client, net, params, batch):
            return super()._step(server, client, net, {"w": params["w"], "th": params["w"]}, batch)

    local = replace(PLAIN, batch_size=batch_size)
    warm, fresh = (
        participate(
            m,
            net,
            federation,
            make_initial_state(m, net, 10, CPU),
            [0],
            engine=backend,
            local=local,
        )
        for m in (PFedMe(), Fresh())
    )
    assert bool(differing(warm.client_states["th"], fresh.client_states["th"])) == (
        batch_size < TRAIN[0]
    )


def test_learning_rate_momentum_and_decay_of_sgd_have_no_part(backend, net, federation):
    method, other = PFedMe(), replace(LOCAL, lr=0.7, momentum=0.0, weight_decay=0.1)
    one, two = (
        record_states(method, net, federation, engine=backend, local=local)
        for local in (LOCAL, other)
    )
    assert_same(one, two)


def test_the_round_starts_from_the_global_model(net, federation, backend):
    """What a client kept is for judging alone."""
    method = PFedMe()
    state = record_states(method, net, federation, COHORTS[:1], engine=backend)[-1]
    part = participate(method, net, federation, state, COHORTS[1], engine=backend)
    for leaf in state.clients["th"].values():
        leaf += 1
    assert_same(
        participate(method, net, federation, state, COHORTS[1], engine=backend).uploads,
        part.uploads,
    )


def test_clients_are_judged_by_the_stored_private_model_and_unseen_ones_by_the_global_one(
    backend, net, federation
):
    method = PFedMe(inner_lr=0.05, outer_lr=0.02)
    states = record_states(method, net, federation, engine=backend)
    for t, cohort in enumerate(COHORTS):
        for client in EVERYONE:
            old, new = (client_row(state.clients["th"], client) for state in states[t : t + 2])
            if client in cohort and TRAIN[client] == 1:
                assert_same(new, states[t].server)  # which no minibatch has moved
            else:
                assert bool(differing(old, new)) == (client in cohort)
    assert_same(method.personal(states[2].server, states[2].client(UNSEEN)), states[2].server)
    judge = make_backend(Engine(backend), net, CPU)
    losses = judge.evaluate(EvalCall(method, federation, states[2], EVERYONE)).loss
    for client in EVERYONE[:9]:
        model = (
            states[2].server if client == UNSEEN else client_row(states[2].clients["th"], client)
        )
        rows = federation.test[client]
        logits = net.bind({})(model, federation.normalize(federation.x[rows]))
        assert_close(
            losses[client], F.cross_entropy(logits, federation.y[rows], reduction="sum"), atol=1e-5
        )


def test_fine_tuning_moves_the_private_model_by_sgd(backend, net, federation):
    """Of an unseen client: FedAvg's global model, fine-tuned."""
    state, tuning = (
        make_initial_state(PFedMe(), net, 10, CPU),
        FineTuning(LOCAL, Draws(0, "finetune", 0)),
    )
    fedavg = make_initial_state(FedAvg(), net, 10, CPU)
    judge = make_backend(Engine(backend), net, CPU)
    tuned = judge.evaluate(EvalCall(PFedMe(), federation, state, EVERYONE, tuning))
    assert_same(tuned, judge.evaluate(EvalCall(FedAvg(), federation, fedavg, EVERYONE, tuning)))
    assert not torch.equal(
        tuned.loss, judge.evaluate(EvalCall(PFedMe(), federation, state, EVERYONE)).loss
    )


def test_statistics_follow_the_private_model_and_are_averaged(backend, federation):
    net, method = tiny(norm=True), PFedMe(inner_steps=3)
    state = record_states(method, net, federation, [[2]], engine=backend, local=PLAIN)[-1]
    assert state.client_buffers == {}
    assert state.server_buffers["main"]["norm.num_batches_tracked"] == 3
    both = make_initial_state(method, net, 10, CPU)
    part = participate(method, net, federation, both, [0, 2], engine=backend, local=PLAIN)
    mean = {k: (40 * leaf[0] + 65 * leaf[1]) / 105 for k, leaf in part.buffers["main"].items()}
    state = record_states(method, net, federation, [[0, 2]], engine=backend, local=PLAIN)[-1]
    for name in ("norm.running_mean", "norm.running_var"):
        assert_close(state.server_buffers["main"][name], mean[name], atol=1e-6)
        assert differing(mean[name], net.buffers[name])


def test_without_a_pull_no_step_is_too_long():
    assert PFedMe(lam=0.0, inner_lr=5.0, outer_lr=5.0).inner_lr == 5.0
