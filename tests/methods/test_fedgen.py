"""FedGen (arXiv:2105.10056): FedAvg as a limit, what the generator learns from, what travels."""

import dataclasses

import torch
import torch.nn.functional as F

from fedpfl.ground import tree
from fedpfl.methods import FedGen
from fedpfl.methods.shared import features
from tests.conftest import CLASSES, COHORTS, HEAD, assert_close, assert_same, record_states

SMALL = {"noise": 5, "hidden": 8, "steps": 3, "batch": 6}


def model(state):
    return {**state.server["body"], **state.server["head"]}


def generator(seed=0):
    return features.init_generator(
        5, 8, torch.empty(CLASSES, 12), torch.Generator().manual_seed(seed)
    )


def test_a_generator_without_steps_stays(net, federation):
    states = record_states(FedGen(**SMALL | {"steps": 0}), net, federation)
    assert_same(states[-1].server["generator"], states[0].server["generator"])
    assert_same(states[-1].server["adam"], states[0].server["adam"])


def test_equal_heads_teach_by_their_cross_entropy_whatever_the_weights(net):
    """And heads that differ do not."""
    made, method = generator(), FedGen(eta=0.0, **SMALL)
    y, noise = (
        torch.tensor([0, 2, 2, 3]),
        torch.rand(4, 5, generator=torch.Generator().manual_seed(1)),
    )
    heads = tree.repeat(tree.select(net.params, HEAD), 3)
    counts = torch.tensor([[1.0, 0, 5, 3, 0], [0, 0, 1, 9, 1], [7, 1, 0, 2, 0]])
    z = features.generate_in_training(made["learned"], made["moved"], y, noise)[0]
    want = F.cross_entropy(F.linear(z, *(net.params[name] for name in HEAD)), y)
    lesson = method._lesson(heads, counts, y, noise, made["learned"], made["moved"])[0]
    assert_close(lesson, want)
    mean = FedGen(eta=0.0, teacher="mean_logits", **SMALL)
    assert_close(mean._lesson(heads, counts, y, noise, made["learned"], made["moved"])[0], want)
    heads["classifier.bias"][0, 2] += 1.0
    other = method._lesson(heads, counts, y, noise, made["learned"], made["moved"])[0]
    swapped = method._lesson(heads, counts.flip(0), y, noise, made["learned"], made["moved"])[0]
    assert abs(other - want) > 1e-2
    assert abs(other - swapped) > 1e-2


def test_diversity_is_at_most_one_and_so_where_noise_changes_nothing():
    noise = torch.rand(6, 5, generator=torch.Generator().manual_seed(1))
    z = features.generate_features(generator(), torch.arange(6) % CLASSES, noise)
    assert 0 < features.diversity_loss(z, noise) < 1
    assert features.diversity_loss(z[:1].expand(6, -1), noise) == 1


def test_clients_do_not_differentiate_the_generator_nor_its_answer(net):
    """The gradient of the distillation is that of the softmax cross-entropy against a constant."""
    made = tree.map(lambda leaf: leaf.requires_grad_(), generator())
    assert not features.generate_features(
        made, torch.tensor([1, 2]), torch.rand(2, 5)
    ).requires_grad


def test_the_generator_learns_labels(net, federation):
    """Heads that have learned recognise what they taught."""
    method = FedGen(noise=5, hidden=32, steps=60, lr=0.01, batch=16)
    state = record_states(method, net, federation)[-1]
    y = state.server["counts"].nonzero().flatten().repeat(20)
    z = features.generate_features(
        state.server["generator"],
        y,
        torch.rand(len(y), 5, generator=torch.Generator().manual_seed(0)),
    )
    assert (F.linear(z, *state.server["head"].values()).argmax(1) == y).float().mean() > 0.8


def test_labels_are_drawn_by_their_shares():
    random = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    drawn = (
        torch.bincount(features.draw_labels(torch.tensor([0.0, 1, 0, 3, 0]), random), minlength=5)
        / 5000
    )
    assert_close(drawn, torch.tensor([0, 0.25, 0, 0.75, 0]), atol=0.02)
    assert features.draw_labels(
        torch.tensor([0.0, 1, 0]), torch.tensor([0.0, 1 - 2**-24])
    ).tolist() == [
        1,
        1,
    ]


def test_the_server_knows_the_labels_of_those_who_took_part(backend, net, federation):
    states = record_states(FedGen(**SMALL), net, federation, engine=backend)
    counts = torch.zeros(CLASSES)
    for t, cohort in enumerate(COHORTS):
        for client in cohort:
            counts += torch.bincount(federation.y[federation.train[client]], minlength=CLASSES)
        assert_same(states[t + 1].server["counts"], counts)
        assert states[t + 1].server["rounds"] == t + 1


def test_draws_are_the_rounds_alone(net, federation):
    """The generator of a round does not depend on how often was drawn before."""
    method = FedGen(**SMALL)
    states = record_states(method, net, federation)
    again = record_states(dataclasses.replace(method, steps=0), net, federation, COHORTS[:1])
    assert_same(model(again[1]), model(states[1]))
