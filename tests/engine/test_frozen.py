"""What holds still while the head trains is computed once a phase, and nothing else is."""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from fedpfl.data.augment import Augment
from fedpfl.engine import FineTuning
from fedpfl.engine.keys import Draws
from fedpfl.engine.training import client_training
from fedpfl.ground import tree
from fedpfl.methods import METHODS, FedAvg, Phase
from fedpfl.models import Net
from tests.conftest import LOCAL, assert_close, assert_same, evaluate, record_rounds, tiny

COHORTS = [[0, 2, 4], [0, 1, 4]]
LONG = replace(LOCAL, epochs=3)


def play(method, net, federation):
    """Return states and judgements of two rounds, and how often the network was called."""
    call = Net._call
    with mock.patch.object(Net, "_call", autospec=True, side_effect=call) as calls:
        states, outcomes = record_rounds(method, net, federation, COHORTS, local=LONG)
        tuning = FineTuning(LONG, Draws(0, "finetune", 2), part="head")
        tuned = evaluate(method, net, federation, states[-1], clients=[0, 1, 3], tuning=tuning)
        clients = [states[-1].client(client) for client in range(5)]
        losses = [outcome.loss for outcome in outcomes]
        result = {"server": states[-1].server, "clients": dict(enumerate(clients))}
        return {**result, "tuned": tuned, "losses": torch.stack(losses)}, calls.call_count


def play_step_by_step(method, net, federation):
    """Return the same, the body computed in every step."""
    with mock.patch.object(client_training, "find_frozen_body", return_value=None):
        return play(method, net, federation)


@pytest.mark.parametrize(
    ("name", "norm"), [("fedrep", True), ("fedrep", False), ("flute", False), ("fedbabu", False)]
)
def test_heads_train_on_features_that_are_computed_once(name, norm, federation):
    method, net = METHODS[name](), tiny(norm)
    result, calls = play(method, net, federation)
    expected, step_calls = play_step_by_step(method, net, federation)
    assert calls < 0.9 * step_calls
    assert_close(result, expected)


@dataclass(frozen=True)
class Curious(FedAvg):
    """Train the head, on more than the answers to a minibatch."""

    mixes_samples = ""

    def init(self, params, parts):
        marker = torch.zeros(())
        return {"model": params, "head": dict.fromkeys(parts.head, marker)}, {}

    def start(self, received, client):
        return received["model"]

    def phases(self, server, client, params, epochs):
        mask = {name: name in server["head"] for name in params}
        return [Phase(1, mask), Phase(1), Phase(1, mask)]

    def loss(self, server, client, net, params, batch):
        shifted = net.still()(params, batch.x + 0.1)
        doubled = {name: 2 * leaf for name, leaf in params.items()}
        other_body = net.still()(doubled, batch.x)
        _, features = net.still().features(params, batch.x)
        terms = shifted.square().mean() + other_body.square().mean() + features.square().mean()
        return batch.loss(net(params, batch.x)) + 0.1 * terms

    def finish(self, server, client, start, params):
        return {"model": params}, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        return {**server, "model": tree.mean(uploads["model"], weight)}, clients

    def personal(self, server, client):
        return server["model"]


@pytest.mark.parametrize("norm", [True, False])
def test_a_loss_may_look_at_anything(norm, federation):
    result, calls = play(Curious(), tiny(norm), federation)
    expected, step_calls = play_step_by_step(Curious(), tiny(norm), federation)
    assert calls < step_calls or norm
    assert_close(result, expected)


@pytest.mark.parametrize(
    ("name", "norm", "augment"), [("fedrep", False, Augment(flip=True)), ("fedbabu", True, None)]
)
def test_new_views_of_samples_and_statistics_that_move_are_computed_each_time(
    name, norm, augment, federation
):
    method, net, seen = METHODS[name](), tiny(norm), replace(federation, augment=augment)
    result, calls = play(method, net, seen)
    expected, step_calls = play_step_by_step(method, net, seen)
    assert calls == step_calls
    assert_same(result, expected)
