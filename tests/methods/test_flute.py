"""FLUTE (arXiv:2406.04596): neural collapse, both phases, the server's step, FedPer as a limit."""

import dataclasses

import pytest
import torch

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import FLUTE, FedPer, Phase
from fedpfl.methods.flute import collapse_distance
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    HEAD,
    assert_close,
    assert_same,
    participate,
    record_states,
    tiny,
)

PLAIN = {"l1": 0.0, "l2": 0.0, "l3": 0.0, "server_lr": 0.0}


def frame(classes=CLASSES, width=12, seed=0):
    """A simplex equiangular tight frame, scaled and turned."""
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(width, classes, generator=generator))
    return 2.7 * (torch.eye(classes) - 1 / classes) @ turn.T


@dataclasses.dataclass(frozen=True)
class HeadThenAll(FedPer):
    """FedRep's head phase, then everything."""

    def phases(self, server, client, params, epochs):
        return [Phase(epochs - 1, {name: name in HEAD for name in params}), Phase(1)]


def test_without_regularisers_its_steps_are_a_head_phase_and_a_joint_one(backend, net, federation):
    own = record_states(FLUTE(**PLAIN), net, federation, engine=backend)[-1]
    other = record_states(HeadThenAll(), net, federation, engine=backend)[-1]
    assert_same(own.server, {name: other.server[name] for name in own.server})
    assert_same(own.clients["head"], other.clients["head"])


@dataclasses.dataclass(frozen=True)
class HeadPhase(FLUTE):
    def phases(self, server, client, params, epochs):
        return super().phases(server, client, params, epochs)[:1]


def test_the_head_phase_leaves_the_body_and_the_second_moves_it(backend, net, federation):
    state = record_states(FLUTE(), net, federation, COHORTS[:1], engine=backend)[-1]
    first, both = (
        participate(m, net, federation, state, COHORTS[1], engine=backend).uploads
        for m in (HeadPhase(), FLUTE())
    )
    for name, value in state.server.items():
        for client in range(5):
            assert torch.equal(first["body"][name][client], value)
        assert (both["body"][name] != value).flatten(1).any(1).all()
    assert (
        first["head"]["classifier.weight"] != state.clients["head"]["classifier.weight"][COHORTS[1]]
    ).any()


def test_as_published_the_body_never_moves(backend, net, federation):
    state = record_states(FLUTE(variant="as_published"), net, federation, engine=backend)[-1]
    assert_close(
        state.server, {name: net.params[name] for name in state.server}, atol=1e-7
    )  # a mean of equals
    assert not torch.equal(
        state.clients["head"]["classifier.weight"][2], net.params["classifier.weight"]
    )


def test_collapse_is_zero_for_a_simplex_frame_and_ignores_scale():
    weight, everything = frame(), torch.ones(CLASSES, dtype=torch.bool)
    assert collapse_distance(weight, everything) < 1e-6
    other, some = (
        torch.randn(CLASSES, 12, generator=torch.Generator().manual_seed(1)),
        everything.clone(),
    )
    some[2:] = False
    for present in (everything, some):
        assert collapse_distance(other, present) > 0.1
        assert_close(
            {"": collapse_distance(5 * other, present)},
            {"": collapse_distance(other, present)},
            atol=1e-6,
        )
    assert collapse_distance(other, everything) != collapse_distance(other, some)


def test_collapse_by_hand():
    """Two classes, one of them present: W W^T = diag(3, 4)^2."""
    weight = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    norm = (81 + 256) ** 0.5
    wanted = ((9 / norm - 0.5) ** 2 + (16 / norm) ** 2) ** 0.5
    assert collapse_distance(weight, torch.tensor([True, False])).item() == pytest.approx(
        wanted, rel=1e-6
    )


def test_a_zero_weight_and_a_perfect_one_have_finite_gradients():
    for weight in (torch.zeros(CLASSES, 12), frame()):
        weight = weight.requires_grad_()
        collapse_distance(weight, torch.ones(CLASSES, dtype=torch.bool)).backward()
        assert weight.grad.isfinite().all()


def replied(method, state, part):
    weight = torch.full((len(part.uploads["present"]),), 1 / len(part.uploads["present"]))
    return method.aggregate(state.server, part.client_states, None, part.uploads, weight, None)[1][
        "head"
    ]


def test_the_servers_step(net, federation):
    state = make_initial_state(FLUTE(), net, 10, CPU)
    part = participate(FLUTE(), net, federation, state, COHORTS[0])
    heads = part.uploads["head"]
    assert_same(replied(FLUTE(server_lr=0.0), state, part), heads)

    def objective(weights):
        return torch.stack(
            [collapse_distance(w, u) for w, u in zip(weights, part.uploads["present"], strict=True)]
        ).mean()

    weights = heads["classifier.weight"].clone().requires_grad_()
    objective(weights).backward()
    moved = replied(FLUTE(), state, part)
    assert_close(
        {"": moved["classifier.weight"]}, {"": (weights - 0.5 * weights.grad).detach()}, atol=1e-7
    )
    assert torch.equal(moved["classifier.bias"], heads["classifier.bias"])
    small = replied(FLUTE(server_lr=0.01), state, part)
    assert objective(small["classifier.weight"]) < objective(heads["classifier.weight"])
    alone = tree.take(part.uploads, slice(0, 1))
    step = FLUTE(server_lr=0.1).aggregate(state.server, {}, None, alone, torch.ones(1), None)[1][
        "head"
    ]  # 0.5 / 5
    assert_close({"": step["classifier.weight"][0]}, {"": moved["classifier.weight"][0]}, atol=1e-7)


def test_present_classes_are_those_of_the_training_labels(backend, net, federation):
    part = participate(
        FLUTE(),
        net,
        federation,
        make_initial_state(FLUTE(), net, 10, CPU),
        list(range(10)),
        engine=backend,
    )
    for client, present in enumerate(part.uploads["present"]):
        assert (
            present.nonzero().flatten().tolist()
            == federation.y[federation.train[client]].unique().tolist()
        )
    assert not part.uploads["present"].all()


def test_the_features_of_padding_do_not_count(net, federation):
    """The third regulariser is a sum over the batch; the batched backend pads."""
    method = FLUTE(l1=0.0, l2=0.0, l3=0.05, server_lr=0.0, rep_epochs=2)
    states = [
        record_states(method, net, federation, engine=name)[-1] for name in ("loop", "batched")
    ]
    assert_close(states[0], states[1], atol=2e-6, rtol=1e-4)
    plain = record_states(FLUTE(**PLAIN, rep_epochs=2), net, federation)[-1]
    assert (states[0].server["fc.weight"] - plain.server["fc.weight"]).abs().max() > 1e-3


def test_each_regulariser_has_an_effect(net, federation):
    ends = [
        record_states(FLUTE(**{**PLAIN, **change}), net, federation)[-1].clients["head"][
            "classifier.weight"
        ][2]
        for change in ({}, {"l1": 0.25}, {"l2": 0.0025}, {"l3": 0.0005}, {"server_lr": 0.5})
    ]
    for i, one in enumerate(ends):
        for other in ends[i + 1 :]:
            assert not torch.equal(one, other)


def test_what_travels():
    net = models.build_network("cnn4", (3, 32, 32), 10, 0)
    server, client = FLUTE().init(net.params, net.parts)
    assert tree.size(FLUTE().download(server, client)) == 873_408 + 5_120
    upload, _ = FLUTE().finish(
        server, client | {"present": torch.ones(10, dtype=torch.bool)}, {}, net.params
    )
    assert tree.size(upload) == 873_408 + 5_130 + 10  # the last ten are bits


def test_batch_normalisation_moves_in_the_second_phase_alone(backend, federation):
    net = tiny(norm=True)
    state = make_initial_state(FLUTE(), net, 10, CPU)
    first = participate(HeadPhase(), net, federation, state, COHORTS[0], engine=backend)
    for client in range(5):
        assert_same(tree.take(first.buffers["main"], client), state.server_buffers["main"])
    both = participate(FLUTE(), net, federation, state, COHORTS[0], engine=backend)
    assert (
        int(both.buffers["main"]["norm.num_batches_tracked"][1]) == 2
    )  # one epoch of client 2: 65 samples
