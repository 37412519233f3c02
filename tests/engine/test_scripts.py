"""Scripts of training steps: the bits of steps by Python, and steps that no script repeats."""

from dataclasses import replace
from itertools import count

import pytest
import torch
import torch.nn.functional as F

from fedpfl import models
from fedpfl.engine import Engine, Local, RoundSetup, make_backend, make_initial_state, play_round
from fedpfl.engine.training import scripts
from fedpfl.engine.training.pure_steps import overwrite
from fedpfl.methods import METHODS
from tests.conftest import CPU, assert_same, make_federation, record_rounds

SETTINGS = {
    "momentum": Local(2, 16, 0.05, momentum=0.7),
    "all": Local(2, 16, 0.05, momentum=0.7, nesterov=True, weight_decay=0.01, clip=0.5),
    "schedule": Local(None, 16, 0.05, steps=7, decay=0.5),
}
SMALL = make_federation((40, 7, 33, 2, 65, 1), (12, 3, 9, 0, 14, 1))
FEDERATION = replace(SMALL, x=SMALL.x.repeat_interleave(2, 2).repeat_interleave(2, 3))
COHORTS = [[0, 2, 3, 5], [0, 1, 4, 5]]


@pytest.fixture
def made(monkeypatch):
    """Whether scripts do what steps do, for each size that was tried."""
    made = []

    def try_and_note(*arguments):
        made.append(repeats_step(*arguments))
        return made[-1]

    repeats_step = scripts.repeats_step
    monkeypatch.setattr(scripts, "repeats_step", try_and_note)
    return made


@pytest.mark.parametrize(
    ("method", "settings", "network"),
    [
        ("fedavg", "momentum", "mlp"),
        ("fedper", "all", "lenet5"),
        ("fedper", "schedule", "mlp"),
        ("ditto", "all", "mlp"),  # its loss looks at the server and the client
        ("fedselect", "all", "mlp"),  # masks
        ("scaffold", "momentum", "mlp"),  # gradients change the client's state
        ("pfedfda", "momentum", "mlp"),  # its losses keep features
        ("fedcp", "momentum", "mlp"),  # each sample has numbers of its own
        # A step of its own, on several batches.
        pytest.param("per_fedavg", "momentum", "mlp", marks=pytest.mark.full),
        ("fedrep", "momentum", "mlp"),  # the body holds still
        ("fedper", "momentum", "resnet8"),  # statistics of BatchNorm move
    ],
)
def test_scripts_train_to_the_same_bits(method, settings, network, made, monkeypatch):
    net = models.build_network(network, FEDERATION.shape, FEDERATION.classes, 0)
    results = []
    for steps_before in (0, 10**9):
        monkeypatch.setattr(scripts, "STEPS_BEFORE", steps_before)
        engine = Engine("loop", workers=2)
        states, outcomes = record_rounds(
            METHODS[method](), net, FEDERATION, COHORTS, local=SETTINGS[settings], engine=engine
        )
        losses = [outcome.loss for outcome in outcomes]
        results.append({"states": dict(enumerate(states)), "losses": dict(enumerate(losses))})
    assert_same(*results)
    assert made
    assert all(made)


loss_scales = count(1)


class Restless(METHODS["fedavg"]):
    """A user's method, whose losses look at something beside trees and batches."""

    def loss(self, server, client, net, params, batch):
        return next(loss_scales) * super().loss(server, client, net, params, batch)


def test_runs_that_share_a_backend_have_scripts_of_their_own(monkeypatch):
    monkeypatch.setattr(scripts, "STEPS_BEFORE", 0)
    net = models.build_network("mlp", FEDERATION.shape, FEDERATION.classes, 0, hidden=(8,))
    local = SETTINGS["momentum"]
    runs = [
        (METHODS["fedprox"](mu=0.1), local),
        (METHODS["fedprox"](mu=2.0), local),
        (METHODS["fedavg"](), replace(local, momentum=0.2)),
        (METHODS["fedavg"](), local),
        (Restless(), local),
    ]

    def play(backend, method, local):
        global loss_scales
        loss_scales = count(1)
        setup = RoundSetup(backend, method, FEDERATION, local, 0)
        state = make_initial_state(method, net, FEDERATION.clients, CPU)
        for cohort in COHORTS:
            state, _ = play_round(setup, state, cohort)
        return state.server

    def make_loop():
        return make_backend(Engine("loop", workers=1), net, CPU)

    shared = make_loop()
    together = [play(shared, *run) for run in runs]
    monkeypatch.setattr(scripts, "STEPS_BEFORE", 10**9)
    for server, run in zip(together, runs, strict=True):
        assert_same(server, play(make_loop(), *run))


def test_a_tree_takes_values_that_are_parts_of_itself():
    old = {"one": torch.zeros(2), "other": torch.ones(2), "third": torch.full((2,), 2.0)}
    leaves = dict(old)
    overwrite(old, {"one": old["other"], "other": old["one"][:], "third": old["third"] + 1})
    expected = {"one": torch.ones(2), "other": torch.zeros(2), "third": torch.full((2,), 3.0)}
    assert_same(old, expected)
    assert all(old[name] is leaf for name, leaf in leaves.items())


def plain_step(tensors, minibatch, rate):
    weight, x = tensors
    (rows,) = minibatch
    loss = F.cross_entropy(x[rows] @ weight, rows % 2)
    (gradient,) = torch.autograd.grad(loss, [weight])
    with torch.no_grad():
        weight.add_(gradient, alpha=-rate)
    return {}


def changed_by(change):
    """A step that does something more."""

    def step(tensors, minibatch, rate):
        plain_step(tensors, minibatch, rate)
        with torch.no_grad():
            change(tensors[0])
        return {}

    return step


constant = torch.ones(3, 2)
REFUSED = {
    "constant": lambda weight: weight.add_(constant),
    "random": lambda weight: weight.add_(torch.rand(3, 2)),
    "read": lambda weight: weight.mul_(float(weight.sum())),
    "as many as rows when it is recorded": lambda weight: weight.add_(scripts.ODD_ROWS[0]),
    "not pure": lambda weight: weight.add_(next(numbers)),
}
numbers = iter(range(1, 100))


def has_script(step, tensors):
    minibatch = [torch.arange(4)]
    script = scripts.write_script(step, tensors, minibatch)
    return script is not None and scripts.repeats_step(script, step, tensors, minibatch)


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_no_script_repeats_has_none(name):
    tensors = [torch.rand(3, 2).requires_grad_(), torch.rand(9, 3)]
    before = [leaf.detach().clone() for leaf in tensors]
    assert not has_script(changed_by(REFUSED[name]), tensors)
    assert has_script(plain_step, tensors)
    assert_same([leaf.detach() for leaf in tensors], before)
