"""HeteroFL and FedRolex: which neurons, and what the small network would do."""

import copy
import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedpfl import models
from fedpfl.data.federation import Federation
from fedpfl.engine import FineTuning, make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, FedRolex, HeteroFL
from fedpfl.methods.shared import neurons
from fedpfl.models import Net
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    client_row,
    evaluate,
    participate,
    record_states,
)

EVERYONE = list(range(10))
RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)


@dataclass(frozen=True)
class Equal(FedAvg):
    """Every client counts the same and keeps its statistics."""

    def buffers(self):
        return {"main": "local"}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        return super().aggregate(
            server, clients, net, uploads, torch.full_like(weight, 1 / len(weight)), generator
        )


def share(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def first(net: Net, part: float, shift: int = 0) -> dict[str, list[int]]:
    """Some neurons of every group, round about."""
    widths = net.parts.wiring.widths.items()
    return {
        group: [(shift + q) % width for q in range(int(part * width))] for group, width in widths
    }


def cut(net: Net, tensors, kept: dict[str, list[int]]):
    """What a dense network of the neurons `kept` has in the place of `tensors`."""
    out = {}
    for name, leaf in tensors.items():
        for place, axis in enumerate(net.parts.wiring.axes[name]):
            if axis:
                index = [axis.block * n + k for n in kept[axis.group] for k in range(axis.block)]
                leaf = leaf.index_select(place, torch.tensor(index))
        out[name] = leaf
    return out


def dense(net: Net, kept: dict[str, list[int]]) -> Net:
    """The small network."""
    module, own = copy.deepcopy(net.module), cut(net, {**net.params, **net.buffers}, kept)
    for prefix, part in module.named_modules():
        for key in [*part._parameters]:
            if part._parameters[key] is not None:
                part._parameters[key] = nn.Parameter(own[f"{prefix}.{key}"])
        for key in [*part._buffers]:
            part._buffers[key] = own[f"{prefix}.{key}"]
    return Net(module)


def classes(federation, client: int) -> set[int]:
    return set(federation.y[federation.train[client]].tolist())


def images(shape=(3, 8, 8), clients=3, samples=24) -> Federation:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (clients * samples, *shape), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 4, (len(x),), generator=g)
    split = torch.arange(len(x)).view(clients, samples)
    train, test = tuple(s[:18] for s in split), tuple(s[18:] for s in split)
    return Federation("noise", x, y, 4, (0.5,) * 3, (0.25,) * 3, train=train, test=test)


@pytest.mark.parametrize(
    ("kind", "shift", "backend"), [(HeteroFL, 0, "loop"), (FedRolex, 1, "batched")]
)
def test_a_resnets_sub_model_is_the_small_resnet(kind, shift, backend):
    """One round, with residual streams. FedRolex: the second, whose window has moved."""
    method = kind(widths=(0.125,), scaler=False, masked=False)
    federation, net = images(), models.build_network("resnet8", (3, 8, 8), 4, 0, stem="small")
    kept, values = (
        first(net, 0.125, shift),
        {"engine": backend, "local": replace(LOCAL, batch_size=9)},
    )
    assert len(kept) == 6  # the stem's stream is one group with the first block's
    small, near = dense(net, kept), {"atol": 1e-4, "rtol": 1e-3}
    x = federation.normalize(federation.x[:5])
    plan = neurons.build_plan(net.params, net.parts)
    active = neurons.rolling_neurons(plan, share(0.125), torch.tensor(shift))
    mask = neurons.entry_masks(plan, active, net.params)
    zeros = tree.map(lambda leaf, own: leaf * own, net.params, mask)
    for training in (False, True):
        one, other = (own.bind({"main": own.buffers}, training) for own in (net, small))
        assert_close(one(zeros, x), other(small.params, x), atol=1e-5, rtol=1e-4)
        statistics = cut(net, one.buffers["main"], kept), other.buffers["main"]
        assert_close(*statistics, atol=1e-5, rtol=1e-4)
    state, begun = (
        make_initial_state(method, net, 3, CPU),
        make_initial_state(Equal(), small, 3, CPU),
    )
    if shift:
        state.server["rounds"] += shift
    part = participate(method, net, federation, state, [0, 1], **values)
    plain = participate(Equal(), small, federation, begun, [0, 1], **values)
    for client in (0, 1):
        trained = client_row(part.uploads["model"].values, client)
        assert_close(cut(net, trained, kept), client_row(plain.uploads, client), **near)
        for name, own in mask.items():
            assert not trained[name][~own].any()
        buffers = cut(net, client_row(part.buffers["main"], client), kept)
        assert_close(buffers, client_row(plain.buffers["main"], client), **near)
    assert_close(part.loss, plain.loss, atol=1e-5, rtol=1e-4)
    assert_close(part.after.loss, plain.after.loss, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("kind", "rounds_played"), [(HeteroFL, 0), (FedRolex, 0), (FedRolex, 7)])
def test_sub_models_are_nested(kind, rounds_played, net):
    method = kind()
    server, client = method.init(net.params, net.parts)
    if kind is FedRolex:
        server["rounds"] += rounds_played
    sets = [method.prepare(server, {**client, "width": share(rate)})["active"] for rate in RATES]
    for wide, narrow in itertools.pairwise(sets):
        assert (wide | ~narrow).all()
    least = (1, 2) if kind is HeteroFL else (1, 1)  # rounded up, or down
    counts = [(int(active[:4].sum()), int(active[4:16].sum())) for active in sets]
    assert counts == [(4, 12), (2, 6), (1, 3), least, (1, 1)]


def test_all_neurons_train_evenly(net):
    """K = M / 2 of M = 4 and of M = 12: in 12 rounds each is active 6 times."""
    method, times = FedRolex(), torch.zeros(17)
    server, client = method.init(net.params, net.parts)
    for t in range(12):
        active = method.prepare(
            {**server, "rounds": torch.tensor(t)}, {**client, "width": share(0.5)}
        )["active"]
        times += active
        if t == 3:
            assert times[:4].tolist() == [2] * 4
            assert active[:4].nonzero().flatten().tolist() == [0, 3]
            assert active[4:16].nonzero().flatten().tolist() == [3, 4, 5, 6, 7, 8]
    assert times.tolist() == [6] * 16 + [12]


def test_which_entries_are_scaled():
    net = models.build_network("cnn4", (1, 28, 28), 10, 0)
    server, _ = HeteroFL().init(net.params, net.parts)
    assert set(server["scaled"]) == {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"}
    assert set(server["classes"]) == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("kind", [HeteroFL, FedRolex])
def test_clients_know_their_classes_and_tuning_leaves_them_alone(kind, backend, net, federation):
    method = kind()
    state = record_states(method, net, federation, COHORTS[:1], engine=backend)[-1]
    for client in EVERYONE:
        own = classes(federation, client) if client in COHORTS[0] else range(5)
        assert state.clients["labels"][client].tolist() == [c in own for c in range(5)]
    (phase,) = method.finetuning(method.personal(state.server, state.client(3)), net.parts, 2)
    assert phase.mask == {"model": True, "labels": False}
    for part in ("all", "head"):
        tuning = FineTuning(LOCAL, Draws(0, "finetune", 1), part)
        tuned = evaluate(method, net, federation, state, backend, tuning=tuning)
        assert tuned.loss.isfinite().all()
    plain = kind(masked=False)
    assert plain.before_training({}, {}, None, None) == {}
    assert plain.before_evaluation({}, {}, None, None) == {}
    assert "labels" not in plain.init(net.params, net.parts)[1]
