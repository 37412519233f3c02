"""Per-FedAvg: the exact tests of its specification."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from fedpfl.engine import (
    Engine,
    FineTuning,
    Local,
    RoundSetup,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedAvg, PerFedAvg
from tests.conftest import (
    BACKENDS,
    COHORTS,
    CPU,
    LOCAL,
    TRAIN,
    Tiny,
    assert_close,
    assert_same,
    differing,
    keep_quick,
    make_federation,
    participate,
    record_states,
    tiny,
)

EVERYONE = list(range(10))
FOUR = [0, 1, 2, 3]
SMALL = replace(LOCAL, batch_size=8)  # most clients have three minibatches then
FO, HF = PerFedAvg(outer_lr=0.05), PerFedAvg("hf", inner_lr=0.1, outer_lr=0.05, delta=0.01)
MINIBATCHES = {"fo": 2, "hf": 3}  # that a step takes
VERSIONS = pytest.mark.parametrize("method", [FO, HF], ids=["fo", "hf"])


@cache
def played(method, backend, local=SMALL, norm=False):
    """The states of three rounds."""
    return record_states(method, tiny(norm), make_federation(), engine=backend, local=local)


@pytest.fixture(scope="module")
def equal():
    """Four clients of 128 samples: four minibatches of 32."""
    return make_federation((128,) * 4, (8,) * 4)


def second_halves(federation, t):
    """The federation whose clients have the second minibatch of every pair alone, and draw them in
    that order.
    """
    own = []
    for client, rows in enumerate(federation.train):
        drawn = Draws(0, "train", t)
        minibatches = rows[drawn.order(client, "main", 0, len(rows))].split(32)
        samples = torch.cat(minibatches[1::2])
        arranged = torch.empty_like(samples)
        arranged[drawn.order(client, "main", 0, len(samples))] = samples
        own.append(arranged)
    return replace(federation, train=tuple(own))


# Limits


@pytest.mark.parametrize("norm", [False, True])
def test_without_inner_step_it_is_fedavg_on_every_second_minibatch(norm, backend, equal):
    """The statistics too, which the first minibatches do not touch."""
    net, local = tiny(norm), Local(epochs=1, batch_size=32, lr=0.05)
    method = PerFedAvg(inner_lr=0.0, outer_lr=local.lr)
    own = record_states(
        method, net, equal, [FOUR], engine=backend, local=replace(local, lr=9.0, momentum=0.5)
    )[-1]
    halves = second_halves(equal, 1)
    assert len(halves.train[0]) == 64
    shared = record_states(FedAvg(), net, halves, [FOUR], engine=backend, local=local)[-1]
    assert_same(own, shared)
    other = record_states(FO, net, equal, [FOUR], engine=backend, local=local)[-1]
    assert (
        len(differing(other.server, shared.server)) >= len(net.params) - norm
    )  # which cancels a bias


def test_without_inner_step_both_versions_are_one(backend, net):
    """With three minibatches an epoch: the first order skips the last, which is the second's D''."""
    federation = make_federation((96,) * 4, (8,) * 4)
    fo, hf = (
        record_states(
            PerFedAvg(v, inner_lr=0.0, outer_lr=0.05),
            net,
            federation,
            [FOUR, [0, 2]],
            engine=backend,
        )[-1]
        for v in ("fo", "hf")
    )
    assert_same(fo, hf)
    assert differing(fo.server, net.params)
    fo, hf = (
        record_states(replace(FO, version=v), net, federation, [FOUR, [0, 2]], engine=backend)[-1]
        for v in ("fo", "hf")
    )
    assert differing(fo.server, hf.server)


@VERSIONS
def test_without_outer_step_the_model_never_moves(method, backend, net, equal):
    assert_same(
        record_states(replace(method, outer_lr=0.0), net, equal, [FOUR] * 2, engine=backend)[
            -1
        ].server,
        net.params,
    )
    assert differing(
        record_states(method, net, equal, [FOUR] * 2, engine=backend)[-1].server, net.params
    )


# The step


class Quadratic:
    """Stands in for a network: the gradient of 0.5 (w - c)^T H (w - c), whatever the objective."""

    def __init__(self, curvature, centre):
        self.curvature, self.centre, self.buffers = curvature, centre, {}

    def gradient(self, objective, params, weight=None):
        return {"w": self.curvature @ (params["w"] - self.centre)}, torch.zeros(())


@pytest.mark.parametrize("delta", [1e-3, 0.1, 7.0])
def test_both_versions_are_exact_on_a_quadratic(delta):
    g = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=g, dtype=torch.float64)
    w, centre = torch.randn(2, 6, generator=g, dtype=torch.float64)
    curvature, alpha, beta = root @ root.T / 6, 0.3, 0.7
    u = w - alpha * curvature @ (w - centre)
    first_order = curvature @ (u - centre)
    second_order = (torch.eye(6, dtype=torch.float64) - alpha * curvature) @ first_order
    batches = (Batch(torch.zeros(1), torch.zeros(1)),) * 3
    for version, direction in (("fo", first_order), ("hf", second_order)):
        method = PerFedAvg(version, alpha, beta, delta)
        end, _ = method._step(
            {}, {}, Quadratic(curvature, centre), {"w": w}, batches[: MINIBATCHES[version]]
        )
        assert_close(end["w"], w - beta * direction, atol=1e-9, rtol=0)
    assert (second_order - first_order).abs().max() > 0.1


def test_a_first_order_step_by_hand(backend, net, federation):
    """Client 0: 40 samples, minibatches of 32 and 8."""
    method = PerFedAvg(inner_lr=0.3, outer_lr=0.5)
    state = make_initial_state(method, net, 10, CPU)
    part = participate(
        method, net, federation, state, [0], engine=backend, local=replace(LOCAL, epochs=1)
    )
    first, second = Draws(0, "train", 1).order(0, "main", 0, 40).split(32)
    adapted = descended(net.params, federation, 0, [first], 0.3)
    end = {k: net.params[k] - 0.5 * g for k, g in gradients(adapted, federation, 0, second).items()}
    assert_close(tree.take(part.uploads, 0), end, atol=1e-6, rtol=0)
    assert_close(part.loss[0], loss_of(adapted, federation, 0, second).detach())


def loss_of(params, federation, client, rows):
    module, samples = Tiny(), federation.train[client][rows]
    module.load_state_dict(params)
    return F.cross_entropy(
        module(federation.normalize(federation.x[samples])), federation.y[samples]
    )


def gradients(params, federation, client, rows):
    module, samples = Tiny(), federation.train[client][rows]
    module.load_state_dict(params)
    F.cross_entropy(
        module(federation.normalize(federation.x[samples])), federation.y[samples]
    ).backward()
    return {name: p.grad for name, p in module.named_parameters()}


def descended(params, federation, client, minibatches, length):
    for rows in minibatches:
        step = gradients(params, federation, client, rows)
        params = {name: leaf - length * step[name] for name, leaf in params.items()}
    return params


@pytest.mark.parametrize(("method", "norm"), keep_quick([(HF, True), (FO, True), (HF, False)]))
def test_backends_agree_with_three_minibatches_and_more(method, norm, federation):
    """Where the last ones are short, and the contract's clients have too few for a Hessian-vector
    product.
    """
    net = tiny(norm)
    state = make_initial_state(method, net, 10, CPU)
    for cohort in COHORTS:
        loop, batched = (
            play_round(
                RoundSetup(make_backend(Engine(b), net, CPU), method, federation, SMALL, 0),
                copy.deepcopy(state),
                cohort,
            )[0]
            for b in BACKENDS
        )
        assert_close(loop, batched, atol=1e-5 if norm else 2e-6, rtol=1e-3 if norm else 1e-4)
        assert differing(state.server, loop.server)
        state = loop


@VERSIONS
def test_sgds_learning_rate_momentum_and_decay_have_no_part(method, backend, net, federation):
    other = replace(SMALL, lr=0.7, momentum=0.0, weight_decay=0.1)
    assert_same(
        played(method, backend), record_states(method, net, federation, engine=backend, local=other)
    )


@VERSIONS
def test_a_client_with_too_few_minibatches_trains_nothing(method, backend, net, federation):
    state = played(method, backend)[1]
    part = participate(method, net, federation, state, EVERYONE, engine=backend, local=SMALL)
    for client, samples in enumerate(TRAIN):
        minibatches = samples // 8 + (samples % 8 > 1)
        moved = bool(differing(tree.take(part.uploads, client), state.server))
        assert moved == (minibatches >= MINIBATCHES[method.version])
        assert (part.loss[client] > 0) == moved


def test_the_mean_is_uniform(backend, net, federation):
    part = participate(
        FO,
        net,
        federation,
        make_initial_state(FO, net, 10, CPU),
        COHORTS[0],
        engine=backend,
        local=SMALL,
    )
    state = played(FO, backend)[1]
    assert_close(
        state.server, tree.map(lambda leaf: leaf.double().mean(0).float(), part.uploads), atol=1e-7
    )


@VERSIONS
def test_statistics_move_once_a_step(method, backend, equal):
    net = tiny(norm=True)
    local = Local(epochs=2, batch_size=32, lr=0.05)
    state = record_states(method, net, equal, [[0]], engine=backend, local=local)[-1]
    steps = 2 * (2 if method is FO else 1)
    assert state.server_buffers["main"]["norm.num_batches_tracked"] == steps
    assert differing(
        state.server_buffers["main"]["norm.running_mean"], net.buffers["norm.running_mean"]
    )


# Adaptation


def judged(method, net, federation, state, backend, tuning=None, before=None):
    return make_backend(Engine(backend), net, CPU).evaluate(
        EvalCall(method, federation, state, EVERYONE, tuning, before)
    )


@VERSIONS
def test_fine_tuning_is_plain_descent_with_the_inner_step(method, backend, net, federation):
    state = played(method, backend)[-1]
    kept = copy.deepcopy(state)
    draws = Draws(0, "finetune", 3)
    plain = FineTuning(replace(LOCAL, lr=method.inner_lr, momentum=0.0), draws)
    tuned = judged(method, net, federation, state, backend, FineTuning(LOCAL, draws))
    assert_same(tuned, judged(FedAvg(), net, federation, state, backend, plain))
    assert differing(
        tuned, judged(FedAvg(), net, federation, state, backend, FineTuning(LOCAL, draws))
    )
    still = replace(method, inner_lr=0.0)
    tuned, kept_still = (
        judged(still, net, federation, state, backend, tuning)
        for tuning in (FineTuning(LOCAL, draws), None)
    )
    assert_close(tuned, kept_still, atol=1e-5)  # another memory layout
    assert_same(state, kept)


def test_without_adaptation_the_meta_model_is_judged(backend, net, federation):
    state = played(FO, backend, LOCAL)[-1]
    assert_same(FO.personal(state.server, state.client(0)), state.server)
    assert_same(
        judged(FO, net, federation, state, backend),
        judged(FedAvg(), net, federation, state, backend),
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_adaptation_is_some_steps_on_the_first_minibatches(steps, backend, net, federation):
    """Of the next epoch too, where one has too few; a client of one sample has none at all."""
    method = PerFedAvg(inner_lr=0.4, outer_lr=0.05, adapt_steps=steps)
    state = played(FO, backend, LOCAL)[-1]
    kept, draws = copy.deepcopy(state), Draws(0, "adapt", 3)
    losses = judged(method, net, federation, state, backend, before=FineTuning(LOCAL, draws)).loss
    assert_same(state, kept)
    for client in EVERYONE[:9]:
        orders = [draws.order(client, "main", epoch, TRAIN[client]).split(32) for epoch in range(3)]
        minibatches = [rows for order in orders for rows in order if len(rows) > 1][:steps]
        assert len(minibatches) == steps
        model = descended(state.server, federation, client, minibatches, 0.4)
        rows = federation.test[client]
        logits = net.bind({})(model, federation.normalize(federation.x[rows]))
        assert_close(
            losses[client], F.cross_entropy(logits, federation.y[rows], reduction="sum"), atol=2e-5
        )
    alone = make_backend(Engine(backend), net, CPU).evaluate(
        EvalCall(
            method,
            replace(federation, test=federation.test[::-1]),
            state,
            [9],
            before_evaluation=FineTuning(LOCAL, draws),
        )
    )
    meta = make_backend(Engine(backend), net, CPU).evaluate(
        EvalCall(FO, replace(federation, test=federation.test[::-1]), state, [9])
    )
    assert_same(alone, meta)
    assert alone.total.tolist() == [10]


def test_one_step_is_fine_tuning_for_an_epoch_of_one_minibatch(backend, net, federation):
    state = played(FO, backend, LOCAL)[-1]
    tuned = judged(
        FO, net, federation, state, backend, FineTuning(Local(1, 512, 9.0), Draws(0, "finetune", 3))
    )
    adapting = FineTuning(Local(1, 512, 9.0), Draws(0, "adapt", 3))
    adapted = judged(replace(FO, adapt_steps=1), net, federation, state, backend, before=adapting)
    assert_close(adapted.loss, tuned.loss, atol=1e-5)
    assert differing(adapted.loss, judged(FO, net, federation, state, backend).loss)


def test_adaptation_uses_the_models_statistics_and_leaves_them(backend, federation):
    """Judged in evaluation mode by the server's, which no adaptation moves."""
    net, method = tiny(norm=True), PerFedAvg(inner_lr=0.4, outer_lr=0.05, adapt_steps=1)
    state = played(FO, backend, LOCAL, norm=True)[-1]
    draws, buffers = Draws(0, "adapt", 3), state.server_buffers
    losses = judged(method, net, federation, state, backend, before=FineTuning(LOCAL, draws)).loss
    rows = federation.train[0][draws.order(0, "main", 0, 40)[:32]]
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), state.server)
    logits = net.bind(buffers, training=True)(params, federation.normalize(federation.x[rows]))
    grads = torch.autograd.grad(F.cross_entropy(logits, federation.y[rows]), tree.leaves(params))
    model = tree.map(lambda p, g: (p - 0.4 * g).detach(), params, tree.rebuild(params, grads))
    rows = federation.test[0]
    logits = net.bind(buffers)(model, federation.normalize(federation.x[rows]))
    assert_close(losses[0], F.cross_entropy(logits, federation.y[rows], reduction="sum"), atol=2e-5)


# Traffic, ranges
