"""FedCP (arXiv:2307.01217): the policy between two heads, the alignment, limits and what travels."""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from fedpfl.engine import make_backend, make_initial_state
from fedpfl.engine.calls import EvalCall
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedCP, FedPer
from fedpfl.methods.fedcp import BANK, _body_features, _kernel_matrix, _mixed_logits
from tests.conftest import (
    COHORTS,
    CPU,
    HEAD,
    LOOP,
    PLAIN,
    assert_close,
    assert_same,
    client_row,
    differing,
    participate,
    record_states,
)


def logits(method, net, federation, state, client, **changes):
    x = federation.normalize(federation.x[:20])
    params = {**method.personal(state.server, state.client(client)), **changes}
    return method.predict(net.bind(state.server_buffers), params, Batch(x, None))


def pinned(state, r):
    """The state in which all policies are near r."""
    policy = tree.full_like(state.server["policy"], 0.0)
    policy["shift"][: 12 if r else 0] = 1e4
    policy["shift"][12 if not r else 24 :] = 1e4
    return dataclasses.replace(state, server={**state.server, "policy": policy})


def test_with_equal_heads_the_policy_does_not_matter(net, federation):
    method = FedCP()
    state = make_initial_state(method, net, 10, CPU)
    x = federation.normalize(federation.x[:20])
    want = net.bind({})(net.params, x) + net.params["classifier.bias"]
    assert_close(logits(method, net, federation, state, 0), want)
    assert_close(logits(method, net, federation, pinned(state, True), 0), want)
    alone = record_states(FedCP(lam=0.0), net, federation, [[0]], local=PLAIN)  # one step
    assert_close(alone[1].server["policy"], alone[0].server["policy"], atol=1e-7)
    heads_apart = record_states(FedCP(lam=0.0), net, federation, [[0], [0]], local=PLAIN)
    assert differing(heads_apart[2].server["policy"], heads_apart[1].server["policy"])


@pytest.mark.parametrize("personal", [True, False])
def test_a_policy_of_one_side_uses_its_head_and_both_biases(personal, net, federation):
    method = FedCP()
    state = pinned(record_states(method, net, federation)[-1], personal)
    own, shared = client_row(state.clients["head"], 0), state.server["head"]
    _, h = net.bind({}).features(
        {**state.server["body"], **own}, federation.normalize(federation.x[:20])
    )
    want = F.linear(h, (own if personal else shared)["classifier.weight"])
    assert_close(
        logits(method, net, federation, state, 0),
        want + own["classifier.bias"] + shared["classifier.bias"],
    )


def test_the_context_is_the_heads_direction(net, federation):
    """A longer head is the same context, which the policy sees; another one is another."""
    method = FedCP()
    state = record_states(method, net, federation)[-1]
    shared = {**state.server["head"], "classifier.weight": torch.zeros(5, 12)}
    head = client_row(state.clients["head"], 0)
    weight, bias = head["classifier.weight"], torch.zeros(5)
    one, longer, other = (
        logits(
            method,
            net,
            federation,
            state,
            0,
            shared=shared,
            head=dict(zip(HEAD, (own, bias), strict=True)),
        )
        for own in (weight, 3 * weight, weight * torch.linspace(0.1, 2, 12))
    )
    shift = shared["classifier.bias"]
    assert_close((longer - shift) / 3, one - shift, atol=1e-5)
    assert (other - one).abs().max() > 1e-3


def test_training_begins_where_evaluation_is(net, federation):
    """The context is the client's in both; with a head far from the global one, and a policy that
    feels it.
    """
    method = FedCP(lam=0.0, policy_noise="off")
    server, client = method.init(net.params, net.parts)
    client["head"] = tree.map(
        lambda leaf: leaf.flip(0) * torch.linspace(-3, 3, leaf.shape[-1]), client["head"]
    )
    params, x = (
        method.start(server, client),
        federation.normalize(federation.x[federation.train[0]]),
    )
    batch, bound = Batch(x, federation.y[federation.train[0]]), net.bind({})
    want = batch.loss(method.predict(bound, method.evaluated(server, client, params), batch))
    assert_close(method.loss(server, client, bound, params, batch), want)
    other = batch.loss(
        _mixed_logits(_body_features(bound, params, x), params, server["head"], server["head"])
    )
    assert abs(other - want) > 1e-4


def test_with_the_personal_side_alone_it_is_fedper(backend, net, federation):
    """As the policy holds at r = 1 and the other bias is 0."""
    method = FedCP(lam=0.0, policy_noise="off")
    state = pinned(make_initial_state(method, net, 10, CPU), True)
    shared = {**state.server["head"], "classifier.bias": torch.zeros(5)}
    state = dataclasses.replace(state, server={**state.server, "head": shared})
    part = participate(method, net, federation, state, COHORTS[0], engine=backend)
    plain = participate(
        FedPer(),
        net,
        federation,
        make_initial_state(FedPer(), net, 10, CPU),
        COHORTS[0],
        engine=backend,
    )
    assert_same(part.uploads["body"], plain.uploads)
    assert_same(part.client_states["head"], plain.client_states["head"])


def test_the_alignment_is_none_at_first_and_bounded():
    g = torch.Generator().manual_seed(0)
    h, other = torch.randn(2, 9, 12, generator=g).unbind()
    for a, b in ((h, other), (h, h), (50 * h, 50 * other)):
        mmd = (_kernel_matrix(a, a) + _kernel_matrix(b, b) - 2 * _kernel_matrix(a, b)).mean()
        assert -1e-5 <= mmd <= 8
    assert_close(
        _kernel_matrix(h, other).diag(),
        sum(torch.exp(-(h - other).square().sum(1) / w) for w in (20, 30, 40, 100)),
    )
    assert_close(_kernel_matrix(h, h).diag(), torch.full((9,), 4.0))


def test_one_step_does_not_see_the_alignment_and_more_do(net, federation):
    for local, most, least in (
        (PLAIN, 1e-6, 0.0),
        (dataclasses.replace(PLAIN, epochs=4), 1.0, 1e-4),
    ):
        one, other = (
            record_states(FedCP(lam=lam), net, federation, [[0, 2]], local=local)[-1].server["body"]
            for lam in (0.0, 50.0)
        )
        apart = max(float((one[name] - other[name]).abs().max()) for name in one)
        assert least <= apart <= most


def test_the_uploaded_head_is_the_mean_of_both(backend, net, federation):
    """Of one client for several rounds."""
    states = record_states(FedCP(), net, federation, [[0]] * 3, engine=backend)
    for before, after in itertools.pairwise(states):
        own = client_row(after.clients["head"], 0)
        assert_same(
            after.server["head"],
            tree.map(lambda a, b: 0.5 * a + 0.5 * b, own, before.server["head"]),
        )


def test_noise_is_of_training_alone_and_logistic(net, federation):
    method = FedCP()
    state = record_states(method, net, federation)[-1]
    runner = make_backend(LOOP, net, CPU)
    one, two = (
        runner.evaluate(EvalCall(method, federation, state, list(range(10)))) for _ in range(2)
    )
    assert_same(one.loss, two.loss)
    quiet = runner.evaluate(EvalCall(FedCP(policy_noise="off"), federation, state, list(range(10))))
    assert_same(one.loss, quiet.loss)
    g = torch.Generator().manual_seed(1)
    drawn = method._noise(torch.rand(2, BANK, 8, generator=g), torch.rand(20_000, 2, generator=g))
    assert abs(float(drawn.mean())) < 0.05
    assert abs(float(drawn.std()) - torch.pi / 3**0.5) < 0.05
    assert len(drawn.unique(dim=0)) > 16_000
    assert torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max() < 0.15
