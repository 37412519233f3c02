"""What holds still is computed once: a body while the head trains once a phase, a body that is
frozen for good once a run. Nothing else changes.
"""

import errno
import os
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch

from fedpfl.data.augment import Augment
from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.backends import loop
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.store import RowStorage, Store
from fedpfl.engine.training import client_training, features
from fedpfl.ground import tree
from fedpfl.methods import METHODS, FedAvg, Phase
from fedpfl.models import ADAPTERS, Net, build_network
from tests.conftest import CPU, LOCAL, assert_close, assert_same, tiny

COHORTS = [[0, 2, 4], [0, 1, 4]]
LONG = replace(LOCAL, epochs=3)
HEAD_TUNING = FineTuning(LONG, Draws(0, "finetune", 2), part="head")


def play(method, net, federation, tuning=None, workers=2, folder=None):
    """Return what two rounds and an evaluation give, and how many samples the network saw."""
    backend = make_backend(Engine("loop", workers=workers), net, CPU)
    storage = RowStorage(Store(), folder)
    state = make_initial_state(method, net, federation.clients, CPU, storage)
    setup = RoundSetup(backend, method, federation, LONG, 0)
    everybody = list(range(federation.clients))
    call = Net._call
    with mock.patch.object(Net, "_call", autospec=True, side_effect=call) as calls:
        for cohort in COHORTS:
            state, outcome = play_round(setup, state, cohort)
        counts = backend.evaluate(EvalCall(method, federation, state, everybody, tuning))
    clients = dict(enumerate(state.client(client) for client in everybody))
    result = {"server": state.server, "clients": clients, "loss": outcome.loss, "counts": counts}
    return result, sum(len(x) for (_, _, x), _ in calls.call_args_list)


def play_step_by_step(method, net, federation, tuning=None):
    """Return the same, the body computed in every step."""
    with (
        mock.patch.object(loop, "make_feature_store", return_value=None),
        mock.patch.object(client_training, "find_frozen_body", return_value=None),
    ):
        return play(method, net, federation, tuning)


# While the head trains


@pytest.mark.parametrize(
    ("name", "norm"), [("fedrep", True), ("fedrep", False), ("flute", False), ("fedbabu", False)]
)
def test_heads_train_on_features_that_are_computed_once(name, norm, federation):
    method, net = METHODS[name](), tiny(norm)
    result, count = play(method, net, federation, HEAD_TUNING)
    expected, plain_count = play_step_by_step(method, net, federation, HEAD_TUNING)
    assert count < 0.9 * plain_count
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
    result, count = play(Curious(), tiny(norm), federation, HEAD_TUNING)
    expected, plain_count = play_step_by_step(Curious(), tiny(norm), federation, HEAD_TUNING)
    assert count < plain_count or norm
    assert_close(result, expected)


@pytest.mark.parametrize(
    ("name", "norm", "augment"), [("fedrep", False, Augment(flip=True)), ("fedbabu", True, None)]
)
def test_new_views_of_samples_and_statistics_that_move_are_computed_each_time(
    name, norm, augment, federation
):
    method, net, viewed = METHODS[name](), tiny(norm), replace(federation, augment=augment)
    result, count = play(method, net, viewed, HEAD_TUNING)
    expected, plain_count = play_step_by_step(method, net, viewed, HEAD_TUNING)
    assert count == plain_count
    assert_same(result, expected)


# For good


def make_net(model="mlp", **options):
    return build_network(model, (1, 8, 8), 5, 0, adapter=ADAPTERS["head"], **options)


@pytest.mark.parametrize(
    ("name", "model"), [("fedavg", "mlp"), ("ditto", "mlp"), ("fedrod", "mlp"), ("fedper", "vit")]
)
def test_each_sample_goes_through_the_body_once(name, model, federation):
    net = make_net(model, **({"layers": 1, "heads": 1, "width": 8} if model == "vit" else {}))
    result, count = play(METHODS[name](), net, federation)
    expected, plain_count = play_step_by_step(METHODS[name](), net, federation)
    assert_close(result, expected)
    if name != "fedrod":  # which reads what the body makes of samples itself
        trained = sum(len(federation.train[client]) for client in {0, 1, 2, 4})
        assert count == trained + sum(map(len, federation.test))
    assert count < plain_count / 2


def test_neither_files_nor_workers_change_a_bit(federation, tmp_path, monkeypatch):
    net, method = make_net(), METHODS["ditto"]()
    expected, _ = play(method, net, federation, workers=1)
    monkeypatch.setattr(features, "MEMORY", 0)
    with mock.patch.object(features, "map_file", side_effect=features.map_file) as files:
        result, _ = play(method, net, federation, workers=3, folder=tmp_path)
    assert files.call_count == 1
    assert os.listdir(tmp_path) == []
    assert_same(result, expected)


def test_a_full_disk_costs_time_alone(federation, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    expected, _ = play_step_by_step(FedAvg(), make_net(), federation)
    monkeypatch.setattr(features, "MEMORY", 0)
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full))
    result, _ = play(FedAvg(), make_net(), federation)
    assert_close(result, expected)


def test_augmented_samples_are_computed_anew_and_test_samples_once(federation):
    augmented = replace(federation, augment=Augment(flip=True))
    result, count = play(FedAvg(), make_net(), augmented)
    expected, plain_count = play_step_by_step(FedAvg(), make_net(), augmented)
    evaluated = [client for cohort in COHORTS for client in cohort]
    again = 2 * sum(len(federation.test[client]) for client in evaluated)
    assert_close(result, expected)
    assert plain_count / 2 < count <= plain_count - again


@pytest.mark.parametrize(
    ("model", "adapter"), [("resnet8", "head"), ("vit", "lora"), ("mlp", "none")]
)
def test_a_body_that_moves_or_keeps_statistics_has_no_store(model, adapter):
    net = build_network(model, (3, 32, 32), 5, 0, adapter=ADAPTERS[adapter])
    assert features.make_feature_store(net, CPU) is None


def test_other_samples_have_other_features(federation):
    store, net = features.FeatureStore(), make_net()
    brighter = replace(federation, x=torch.full_like(federation.x, 200))
    splits = [features.ClientSplit(data, "train", 0) for data in (federation, brighter)]
    first, second = (store.find_features(net, split) for split in splits)
    assert not torch.equal(first, second)
    assert torch.equal(store.find_features(net, splits[0]), first)
