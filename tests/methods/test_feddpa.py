"""FedDPA (Yang, Huang and Ye, NeurIPS 2023): scores, thresholds, both phases, FedAvg and FedOBP as
limits.
"""

import pytest
import torch
import torch.nn.functional as F

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import FedDPA
from tests.conftest import (
    COHORTS,
    CPU,
    assert_close,
    assert_same,
    participate,
    record_rounds,
    record_states,
    tiny,
)

JOINT = {"rule": "quantile", "train": "joint"}


def masks(method, state, client):
    return method.prepare(state.server, state.client(client))["mask"]


def test_a_quantile_counts_within_each_tensor(net, federation):
    state = record_states(FedDPA(0.4, **JOINT), net, federation)[-1]
    for q in (0.0, 0.4, 0.75):
        for name, mask in masks(FedDPA(q, **JOINT), state, 2).items():
            score = state.clients["score"][name][2]
            assert len(score.unique()) == score.numel(), "choose another seed: scores tie"
            assert int(mask.sum()) == score.numel() - 1 - int(q * (score.numel() - 1)), (name, q)


def test_scores_are_those_of_a_loop_over_samples(backend, federation):
    for norm in (False, True):
        net, method = tiny(norm), FedDPA(**JOINT)
        state = make_initial_state(method, net, 10, CPU)
        part = participate(method, net, federation, state, [0], engine=backend)
        params = tree.map(lambda leaf: leaf[0].clone().requires_grad_(), part.uploads)
        buffers = tree.take(part.buffers, 0)
        total = tree.full_like(params, 0.0)
        for i in federation.train[0]:
            x = federation.normalize(federation.x[i][None])
            loss = F.cross_entropy(net.bind(buffers)(params, x), federation.y[i][None])
            grads = torch.autograd.grad(loss, tree.leaves(params))
            total = tree.map(lambda t, g: t + g.square(), total, tree.rebuild(params, grads))
        expected = tree.map(lambda t: t / len(federation.train[0]), total)
        got = tree.take(part.client_states["score"], 0)
        assert_close(got, expected, atol=1e-7, rtol=1e-3)
        assert all((leaf >= 0).all() and leaf.any() for leaf in tree.leaves(got))


@pytest.mark.parametrize("rule", ["value", "quantile"])
def test_the_scale_of_a_tensors_scores_does_not_matter(rule, net, federation):
    method = FedDPA(0.4, rule)
    state = record_states(method, net, federation)[-1]
    client = state.client(2)
    scaled = {**client["score"], "fc.weight": 64 * client["score"]["fc.weight"]}
    before, after = (
        method.prepare(state.server, {**client, "score": score})["mask"]
        for score in (client["score"], scaled)
    )
    assert before["fc.weight"].any()
    assert not before["fc.weight"].all()
    assert_same(before, after)


def test_a_tensor_of_equal_scores_is_shared(net, federation):
    method = FedDPA()
    state = record_states(method, net, federation)[-1]
    client = state.client(2)
    equal = {**client["score"], "fc.bias": torch.full((12,), 0.3)}
    mask = method.prepare(state.server, {**client, "score": equal})["mask"]
    assert not mask["fc.bias"].any()


class Half(FedDPA):
    """Ends after the first phase."""

    def phases(self, server, client, params, epochs):
        return super().phases(server, client, params, epochs)[:1]


def test_each_of_two_phases_leaves_the_others_entries_alone(net, federation):
    method, half = FedDPA(0.05), Half(0.05)
    state = record_states(method, net, federation, COHORTS[:2])[-1]
    mask = masks(method, state, 2)
    assert (
        0 < tree.size(mask) - sum(int(leaf.sum()) for leaf in tree.leaves(mask)) < tree.size(mask)
    )
    first, both = (
        tree.take(participate(m, net, federation, state, [2]).uploads, 0) for m in (half, method)
    )
    start = method._begin(state.server, method.prepare(state.server, state.client(2)))
    for name in net.params:
        personal = mask[name]
        assert torch.equal(first[name][~personal], state.server[name][~personal])
        assert torch.equal(both[name][personal], first[name][personal])
        if personal.any():
            assert (first[name][personal] != start[name][personal]).any()
        assert (both[name][~personal] != first[name][~personal]).any()


def test_personal_is_the_mean_number_of_personal_entries_in_the_cohort(backend, net, federation):
    """By the quantile 0.4 a tensor of n has n - 1 - floor(0.4 (n - 1)) of them; who never trained
    has none.
    """
    count = sum(leaf.numel() - 1 - int(0.4 * (leaf.numel() - 1)) for leaf in net.params.values())
    _, outcomes = record_rounds(
        FedDPA(**JOINT), net, federation, [[0, 2], [0, 2], [0, 2, 4, 6]], engine=backend
    )
    assert [outcome.metrics for outcome in outcomes] == [
        {"personal": value} for value in (0, count, count / 2)
    ]
