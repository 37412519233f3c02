"""FedAS (CVPR 2024): FedPer as a limit, the alignment, Fisher traces, what is judged."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import Batch, Data, FedAS, Shard
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    HEAD,
    PLAIN,
    assert_close,
    assert_same,
    client_row,
    differing,
    participate,
    record_rounds,
    record_states,
)


@dataclasses.dataclass(frozen=True)
class AlignmentAlone(FedAS):
    def phases(self, server, client, params, epochs):
        return super().phases(server, client, params, epochs)[:1]


def drawn(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 8, 8, generator=g), torch.randint(CLASSES, (count,), generator=g)


def shard(x, y, size=32):
    return Shard(lambda: Data(x, y), size, None)


def test_alignment_moves_the_body_alone_and_depends_on_no_other_client(backend, net, federation):
    state = record_states(FedAS(), net, federation, COHORTS[:1], engine=backend)[-1]
    method = AlignmentAlone(align_lr=0.1)
    cohort = [0, 2, 3, 5]
    one, other = (
        participate(method, net, federation, state, c, engine=backend)
        for c in (cohort, cohort[::-1])
    )
    for place, client in enumerate(cohort):
        model = client_row(one.client_states["model"], place)
        assert_same(model, client_row(other.client_states["model"], 3 - place))
        assert_same(
            tree.select(model, HEAD), tree.select(client_row(state.clients["model"], client), HEAD)
        )
        assert len(differing(tree.drop(model, HEAD), state.server)) == 4


def test_who_was_never_sampled_aligns_to_what_first_says(backend, net, federation):
    """In the first round all bodies are the same, so only what aligns at all differs from what does
    not.
    """
    state = make_initial_state(FedAS(), net, 10, CPU)
    starts = {
        first: participate(
            AlignmentAlone(first=first, align_lr=0.1), net, federation, state, [0], engine=backend
        )
        for first in ("skip", "init", "global")
    }
    assert_same(client_row(starts["skip"].uploads["body"], 0), state.server)
    assert_same(starts["init"].uploads["body"], starts["global"].uploads["body"])
    assert differing(client_row(starts["init"].uploads["body"], 0), state.server)


@pytest.mark.parametrize("align", ["samples", "means"])
def test_the_alignment_is_zero_where_features_are_the_prototypes(align, net):
    """Of samples, with one per class; of means, with any number. Else it is the variance within
    classes.
    """
    method, bound = FedAS(align=align), net.bind({"main": {}})
    server, client = method.init(net.params, net.parts)
    for x, y in (drawn(40), (drawn(CLASSES)[0], torch.arange(CLASSES))):
        found = method.before_training(server, client, bound, shard(x, y))
        loss = method._alignment_loss(server, client | found, bound, net.params, Batch(x, y))
        z = bound.features(net.params, x)[1]
        within = sum((z[y == c] - z[y == c].mean(0)).square().mean() for c in y.unique())
        wanted = within if align == "samples" else torch.zeros(())
        assert_close(loss, wanted, atol=1e-10)


def test_fisher_is_a_sum_over_batches_of_the_gradients_squared_norm(net):
    method, bound = FedAS(), net.bind({"main": {}})

    def trace(x, y, size):
        return method.after_training({}, {}, bound, net.params, shard(x, y, size), {})["fisher"]

    x, y = drawn(8)
    params = {name: leaf.clone().requires_grad_() for name, leaf in net.params.items()}
    grads = torch.autograd.grad(F.cross_entropy(bound(params, x[:1]), y[:1]), list(params.values()))
    assert_close(trace(x[:1], y[:1], 32), sum(g.square().sum() for g in grads))
    assert_close(trace(torch.cat([x, x]), torch.cat([y, y]), 4), 2 * trace(x, y, 4))
    assert_close(trace(x, y, 1), sum(trace(x[i : i + 1], y[i : i + 1], 1) for i in range(8)))


@pytest.mark.parametrize(
    ("fisher", "shares"),
    [
        ([1.0, 3.0], [0.25, 0.75]),
        ([5.0, 5.0], [0.5, 0.5]),
        ([0.0, 0.0], [0.9, 0.1]),
        ([float("inf"), 1.0], [0.9, 0.1]),
        ([float("nan"), 1.0], [0.9, 0.1]),
    ],
)
def test_bodies_count_by_fisher_and_without_one_by_samples(fisher, shares):
    uploads = {"body": {"w": torch.eye(2)}, "fisher": torch.tensor(fisher)}
    server, _ = FedAS().aggregate({}, {}, None, uploads, torch.tensor([0.9, 0.1]), None)
    assert_close(server["w"], torch.tensor(shares))


def test_the_stored_model_is_of_the_last_training_and_the_received_one_has_the_latest_body(
    backend, net, federation
):
    states, outcomes = record_rounds(FedAS(), net, federation, COHORTS[:2], engine=backend)
    last, received = states[-1], FedAS(judge="received")
    assert_same(
        FedAS().personal(last.server, last.client(3)), client_row(states[1].clients["model"], 3)
    )
    assert_same(FedAS().personal(last.server, last.client(7)), net.params)
    now = received.personal(last.server, last.client(3))
    assert_same(tree.drop(now, HEAD), last.server)
    assert_same(tree.select(now, HEAD), tree.select(client_row(last.clients["model"], 3), HEAD))
    body = tree.size(last.server)
    assert [(o.traffic.values_down, o.traffic.values_up) for o in outcomes] == [
        (5 * body, 5 * (body + 1))
    ] * 2


def test_the_alignment_has_a_pace_of_its_own_and_no_memory(net, federation):
    """Nesterov's momentum and weight decay are the training's."""
    fast = dataclasses.replace(PLAIN, momentum=0.9, nesterov=True, weight_decay=0.1)
    method, state = (
        AlignmentAlone(first="init", align_epochs=3),
        make_initial_state(FedAS(), net, 10, CPU),
    )
    one, other = (
        participate(method, net, federation, state, [0], local=own).uploads for own in (fast, PLAIN)
    )
    assert_same(one["body"], other["body"])
