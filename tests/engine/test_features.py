"""A body that is frozen for good computes each sample once a run, and nothing else changes."""

import errno
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fedpfl.data.augment import Augment
from fedpfl.engine import Engine, RoundSetup, make_backend, make_initial_state, play_round
from fedpfl.engine.backends import loop
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.store import RowStorage, Store
from fedpfl.engine.training import client_training, features
from fedpfl.methods import METHODS
from fedpfl.models import ADAPTERS, Net, build_network
from tests.conftest import CPU, LOCAL, assert_close, assert_same

COHORTS = [[0, 2, 4], [0, 1, 4]]


def make_net(model="mlp", **options):
    shape = (1, 8, 8)
    return build_network(model, shape, 5, 0, adapter=ADAPTERS["head"], **options)


def play(name, net, federation, workers=2, folder=None):
    """Return what two rounds and an evaluation of all give, and how many samples the body saw."""
    method = METHODS[name]()
    backend = make_backend(Engine("loop", workers=workers), net, CPU)
    storage = RowStorage(Store(), folder)
    state = make_initial_state(method, net, federation.clients, CPU, storage)
    setup = RoundSetup(backend, method, federation, replace(LOCAL, epochs=3), 0)
    seen = []
    call = Net._call

    def count_rows(self, values, x):
        seen.append(len(x))
        return call(self, values, x)

    with mock.patch.object(Net, "_call", autospec=True, side_effect=count_rows):
        for cohort in COHORTS:
            state, outcome = play_round(setup, state, cohort)
        everybody = list(range(federation.clients))
        counts = backend.evaluate(EvalCall(method, federation, state, everybody))
    clients = dict(enumerate(state.client(client) for client in everybody))
    result = {"server": state.server, "clients": clients, "loss": outcome.loss, "counts": counts}
    return result, sum(seen)


def play_without(name, net, federation):
    """Return the same, the body computed in each call."""
    with (
        mock.patch.object(loop, "make_feature_store", return_value=None),
        mock.patch.object(client_training, "find_frozen_body", return_value=None),
    ):
        return play(name, net, federation)


@pytest.mark.parametrize(
    ("name", "model"), [("fedavg", "mlp"), ("ditto", "mlp"), ("fedrod", "mlp"), ("fedper", "vit")]
)
def test_each_sample_goes_through_the_body_once(name, model, federation):
    net = make_net(model, **({"layers": 1, "heads": 1, "width": 8} if model == "vit" else {}))
    result, count = play(name, net, federation)
    expected, plain_count = play_without(name, net, federation)
    assert_close(result, expected)
    if name != "fedrod":  # which reads what the body makes of samples itself
        trained = sum(len(federation.train[client]) for client in {0, 1, 2, 4})
        assert count == trained + sum(map(len, federation.test))
    assert count < plain_count / 2


def test_neither_files_nor_workers_change_a_bit(federation, tmp_path, monkeypatch):
    net = make_net()
    expected, _ = play("ditto", net, federation, workers=1)
    monkeypatch.setattr(features, "MEMORY", 0)
    with mock.patch.object(features, "map_file", side_effect=features.map_file) as files:
        result, _ = play("ditto", net, federation, workers=3, folder=tmp_path)
    assert files.call_count == 1
    assert os.listdir(tmp_path) == []
    assert_same(result, expected)


def test_a_full_disk_costs_time_alone(federation, monkeypatch):
    def refuse_room(file, start, length):
        raise OSError(errno.ENOSPC, "No space left on device")

    expected, _ = play_without("fedavg", make_net(), federation)
    monkeypatch.setattr(features, "MEMORY", 0)
    monkeypatch.setattr(os, "posix_fallocate", refuse_room)
    result, _ = play("fedavg", make_net(), federation)
    assert_close(result, expected)


def test_augmented_samples_are_computed_anew_and_test_samples_once(federation):
    augmented = replace(federation, augment=Augment(flip=True))
    result, count = play("fedavg", make_net(), augmented)
    expected, plain_count = play_without("fedavg", make_net(), augmented)
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
