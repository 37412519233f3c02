"""HeteroFL and FedRolex: which neurons, which means, scaler and masked logits, and what the small
network would do.
"""

import copy
import itertools
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedpfl import models
from fedpfl.data.federation import Federation
from fedpfl.engine import Engine, FineTuning, make_backend, make_initial_state
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.traffic import count_traffic
from fedpfl.methods import Batch, FedAvg, FedRolex, HeteroFL
from fedpfl.methods.shared import neurons
from fedpfl.models import Net
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    client_row,
    differing,
    make_federation,
    participate,
    record_rounds,
    record_states,
    tiny,
)

EVERYONE = list(range(10))
RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)
PLAIN = {"scaler": False, "masked": False}


@dataclass(frozen=True)
class Equal(FedAvg):
    """Every client counts the same and keeps its statistics."""

    def buffers(self):
        return {"main": "local"}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        return super().aggregate(
            server, clients, net, uploads, torch.full_like(weight, 1 / len(weight)), generator
        )


@cache
def played(method, backend):
    """Three rounds, of the network with BatchNorm."""
    return record_rounds(method, tiny(norm=True), make_federation(), engine=backend)


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


# FedAvg at full width, and on the small network


def test_weights_matter():
    equal, samples = (
        played(HeteroFL(widths=(1.0,), **PLAIN, weighting=weighting), "loop")[0][-1].server["model"]
        for weighting in ("equal", "samples")
    )
    assert len(differing(equal, samples)) == len(equal)


def test_with_one_width_it_is_fedavg_on_the_small_network(backend, federation):
    net = tiny(norm=True)
    kept = first(net, 0.5)
    own = record_states(HeteroFL(widths=(0.5,), **PLAIN), net, federation, engine=backend)
    small = record_states(Equal(), dense(net, kept), federation, engine=backend)
    plan = own[0].server["plan"]
    outside = tree.invert(
        neurons.entry_masks(plan, neurons.prefix_neurons(plan, share(0.5)), net.params)
    )
    for ours, theirs in zip(own, small, strict=True):
        assert_close(cut(net, ours.server["model"], kept), theirs.server, atol=2e-6, rtol=1e-5)
        for name, others in outside.items():
            assert torch.equal(ours.server["model"][name][others], net.params[name][others])
        for client in (0, 2, 8):
            buffers = cut(net, client_row(ours.client_buffers["main"], client), kept)
            assert_close(
                buffers, client_row(theirs.client_buffers["main"], client), atol=2e-6, rtol=1e-5
            )
    assert sum(int(mask.sum()) for mask in outside.values()) > 300


def images(shape=(3, 8, 8), clients=3, samples=24) -> Federation:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (clients * samples, *shape), dtype=torch.uint8, generator=g)
    y = torch.randint(0, 4, (len(x),), generator=g)
    split = torch.arange(len(x)).view(clients, samples)
    train, test = tuple(s[:18] for s in split), tuple(s[18:] for s in split)
    return Federation("noise", x, y, 4, (0.5,) * 3, (0.25,) * 3, train=train, test=test)


@pytest.mark.parametrize(
    ("method", "shift", "backend"),
    [
        (HeteroFL(widths=(0.125,), **PLAIN), 0, "loop"),
        (FedRolex(widths=(0.125,), **PLAIN), 1, "batched"),
    ],
)
def test_a_resnets_sub_model_is_the_small_resnet(method, shift, backend):
    """One round, with residual streams. FedRolex: the second, whose window has moved."""
    federation, net = images(), models.build_network("resnet8", (3, 8, 8), 4, 0, stem="small")
    kept, local = first(net, 0.125, shift), replace(LOCAL, batch_size=9)
    assert len(kept) == 6  # the stem's stream is one group with the first block's
    small = dense(net, kept)
    x = federation.normalize(federation.x[:5])
    plan = neurons.build_plan(net.params, net.parts)
    mask = neurons.entry_masks(
        plan, neurons.rolling_neurons(plan, share(0.125), torch.tensor(shift)), net.params
    )
    zeros = tree.map(lambda leaf, own: leaf * own, net.params, mask)
    for training in (False, True):
        one, other = (
            net.bind({"main": net.buffers}, training),
            small.bind({"main": small.buffers}, training),
        )
        assert_close(one(zeros, x), other(small.params, x), atol=1e-5, rtol=1e-4)
        assert_close(
            cut(net, one.buffers["main"], kept), other.buffers["main"], atol=1e-5, rtol=1e-4
        )
    state = make_initial_state(method, net, 3, CPU)
    if shift:
        state.server["rounds"] += shift
    part = participate(method, net, federation, state, [0, 1], engine=backend, local=local)
    plain = participate(
        Equal(),
        small,
        federation,
        make_initial_state(Equal(), small, 3, CPU),
        [0, 1],
        engine=backend,
        local=local,
    )
    for client in (0, 1):
        trained = client_row(part.uploads["model"].values, client)
        assert_close(
            cut(net, trained, kept), client_row(plain.uploads, client), atol=1e-4, rtol=1e-3
        )
        for name, own in mask.items():
            assert not trained[name][~own].any()
        buffers = cut(net, client_row(part.buffers["main"], client), kept)
        assert_close(buffers, client_row(plain.buffers["main"], client), atol=1e-4, rtol=1e-3)
    assert_close(part.loss, plain.loss, atol=1e-5, rtol=1e-4)
    assert_close(part.after.loss, plain.after.loss, atol=1e-3, rtol=1e-3)


# Which neurons


@pytest.mark.parametrize(("kind", "rounds_played"), [(HeteroFL, 0), (FedRolex, 0), (FedRolex, 7)])
def test_sub_models_are_nested(kind, rounds_played, net):
    method = kind()
    server, client = method.init(net.params, net.parts)
    if kind is FedRolex:
        server["rounds"] += rounds_played
    sets = [method.prepare(server, {**client, "width": share(rate)})["active"] for rate in RATES]
    for wide, narrow in itertools.pairwise(sets):
        assert (wide | ~narrow).all()
    counts = [(int(active[:4].sum()), int(active[4:16].sum())) for active in sets]
    ceil, floor = (
        [(4, 12), (2, 6), (1, 3), (1, 2), (1, 1)],
        [(4, 12), (2, 6), (1, 3), (1, 1), (1, 1)],
    )
    assert counts == (ceil if kind is HeteroFL else floor)


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


def test_windows_start_as_prefixes_and_roll_with_the_rounds(backend, net, federation):
    rolling = FedRolex(widths=(0.5, 1.0), weighting="equal")
    prefix = HeteroFL(widths=(0.5, 1.0), rounding="floor")
    own, other = (record_states(m, net, federation, engine=backend) for m in (rolling, prefix))
    assert_same(own[1].server["model"], other[1].server["model"])
    assert_same(own[1].clients["model"], other[1].clients["model"])
    assert differing(own[2].server["model"], other[2].server["model"])
    assert [int(state.server["rounds"]) for state in own] == [0, 1, 2, 3]
    for name in (
        "fc.bias",
        "conv.bias",
    ):  # a narrow client's last round: 0 in the third, 2 in the second
        alive = (own[3].clients["model"][name] != 0).long()
        width = alive.shape[1]
        for client, t in ((0, 2), (2, 1)):
            assert alive[client].nonzero().flatten().tolist() == sorted(
                (t + q) % width for q in range(width // 2)
            )


def test_a_window_that_stands_still_is_heterofls(backend, net, federation):
    @dataclass(frozen=True)
    class Still(FedRolex):
        def aggregate(self, server, clients, net, uploads, weight, generator):
            new, clients = super().aggregate(server, clients, net, uploads, weight, generator)
            return {**new, "rounds": server["rounds"]}, clients

    own, other = (
        record_states(m, net, federation, engine=backend)[-1]
        for m in (
            Still(widths=(0.3, 1.0)),
            HeteroFL(widths=(0.3, 1.0), rounding="floor", weighting="samples"),
        )
    )
    assert_same(own.server["model"], other.server["model"])
    assert_same(own.clients["model"], other.clients["model"])


def test_dynamic_widths_are_drawn_for_each_client_and_round(net):
    method = HeteroFL(dynamic=True)
    state = make_initial_state(method, net, 10, CPU)
    seen = [
        float(method.sample(state.server, Draws(0, "train", t).server(client))["width"])
        for t in range(1, 21)
        for client in EVERYONE
    ]
    assert set(seen) == set(RATES)
    assert all(20 < seen.count(rate) < 60 for rate in RATES)
    assert len({tuple(seen[10 * t : 10 * t + 10]) for t in range(20)}) == 20
    assert HeteroFL().sample(state.server, Draws(0, "train", 1).server(0)) == {}


def test_a_client_keeps_the_width_it_trained_last(backend, net, federation):
    method = HeteroFL(dynamic=True, masked=False)
    states = record_states(method, net, federation, engine=backend)
    for t, (old, new) in enumerate(itertools.pairwise(states), 1):
        for client in EVERYONE:
            width = old.clients["width"][client]
            if client in COHORTS[t - 1]:
                width = method.sample(new.server, Draws(0, "train", t).server(client))["width"]
            assert new.clients["width"][client] == width
            own = method.personal(new.server, new.client(client))
            active = neurons.prefix_neurons(new.server["plan"], width, "ceil")
            assert torch.equal(own["fc.bias"] != 0, active[4:16])


# Means


def test_means_are_over_exactly_those_who_hold_an_entry(backend, net, federation):
    method = HeteroFL(widths=(0.25, 0.5, 1.0), masked=False)
    cohort = [0, 3, 5, 8]  # widths 0.25, 0.25, 0.5, 1
    old, new = record_states(method, net, federation, [cohort], engine=backend)
    assert old.clients["width"][cohort].tolist() == [0.25, 0.25, 0.5, 1.0]
    plan = old.server["plan"]
    for name, merged in new.server["model"].items():
        total, holders = torch.zeros_like(merged), torch.zeros_like(merged)
        for client in cohort:
            active = neurons.prefix_neurons(plan, old.clients["width"][client], "ceil")
            mask = neurons.entry_masks(plan, active, net.params)[name]
            total += torch.where(mask, new.clients["model"][name][client], 0.0)
            holders += mask
        assert set(holders.unique().tolist()) <= {1.0, 2.0, 4.0}
        assert_close(merged, total / holders)


@pytest.mark.parametrize("kind", [HeteroFL, FedRolex])
def test_rows_of_a_class_are_averaged_over_those_who_have_it(kind, backend, net, federation):
    method, cohort = kind(widths=(1.0,)), [0, 3, 7, 9]
    own = {client: classes(federation, client) for client in cohort}
    present = set().union(*own.values())
    partly = [c for c in present if not all(c in labels for labels in own.values())]
    assert partly
    old, new = record_states(method, net, federation, [cohort], engine=backend)
    uploads = (
        participate(method, net, federation, old, cohort, engine=backend).uploads["model"].values
    )
    size = {client: 1.0 if kind is HeteroFL else len(federation.train[client]) for client in cohort}
    for name in ("classifier.weight", "classifier.bias"):
        for c in range(5):
            having = [client for client in cohort if c in own[client]]
            merged = new.server["model"][name][c]
            if not having:
                assert torch.equal(merged, net.params[name][c])
                continue
            total = sum(size[client] * uploads[name][cohort.index(client)][c] for client in having)
            assert_close(merged, total / sum(size[client] for client in having))


def test_rows_that_nobody_has_a_class_for_do_not_change(backend, net, federation):
    cohort = [3, 9]
    absent = sorted(set(range(5)) - classes(federation, 3) - classes(federation, 9))
    assert absent
    masked, free = (
        record_states(
            HeteroFL(widths=(1.0,), masked=flag), net, federation, [cohort], engine=backend
        )[-1].server["model"]
        for flag in (True, False)
    )
    for name in ("classifier.weight", "classifier.bias"):
        assert torch.equal(masked[name][absent], net.params[name][absent])
        assert not torch.equal(free[name][absent], net.params[name][absent])
    assert not torch.equal(masked["fc.weight"], net.params["fc.weight"])


# Scaler and masked logits


def prepared(method, net, federation, client):
    state = make_initial_state(method, net, 10, CPU)
    labels = torch.tensor([c in classes(federation, client) for c in range(5)])
    own = {**state.client(client), **({"labels": labels} if method.masked else {})}
    return state.server, method.prepare(state.server, own)


@pytest.mark.parametrize("norm", [False, True])
def test_the_scaler_divides_what_convolutions_give_in_training_alone(norm, federation):
    net = tiny(norm)
    method, plain = (HeteroFL(widths=(0.5,), masked=False, scaler=flag) for flag in (True, False))
    server, client = prepared(method, net, federation, 0)
    start = method._begin(server, client)
    x, y = federation.normalize(federation.x[:20]), federation.y[:20]
    bound = net.bind({"main": net.buffers}, training=True)
    scaled = copy.deepcopy(net.module)
    scaled.conv.register_forward_hook(lambda module, inputs, output: output / 0.5)
    scaled.load_state_dict({**start, **net.buffers})
    expected = F.cross_entropy(scaled.train()(x), y)
    assert_close(
        method.loss(server, client, bound, start, Batch(x, y)), expected.detach(), atol=1e-6
    )
    still = net.bind({"main": net.buffers})
    assert_same(
        method.predict(still, start, Batch(x, None)), plain.predict(still, start, Batch(x, None))
    )
    assert_same(
        method.predict(still, start, Batch(x, None)), net.bind({"main": net.buffers})(start, x)
    )
    other = net.bind({"main": net.buffers}, training=True)
    without = plain.loss(server, client, other, start, Batch(x, y))
    assert_same(bound.buffers, other.buffers)  # statistics are those of the network that is judged
    assert (abs(float((without - expected).detach())) > 1e-3) is not norm
    if norm:
        assert differing(bound.buffers["main"], net.buffers)


def test_under_batch_normalisation_the_scaler_is_a_smaller_eps(backend, federation):
    net = tiny(norm=True)
    scaled, plain = (
        record_states(HeteroFL(widths=(0.25, 0.5), scaler=flag), net, federation, engine=backend)[
            -1
        ]
        for flag in (True, False)
    )
    assert_close(scaled.server["model"], plain.server["model"], atol=1e-3, rtol=1e-2)
    assert_close(scaled.client_buffers, plain.client_buffers, atol=1e-2, rtol=1e-2)
    assert differing(scaled.server["model"], plain.server["model"])


def test_which_entries_are_scaled():
    net = models.build_network("cnn4", (1, 28, 28), 10, 0)
    server, _ = HeteroFL().init(net.params, net.parts)
    assert set(server["scaled"]) == {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"}
    assert set(server["classes"]) == {"classifier.weight", "classifier.bias"}


def test_masked_logits_are_zero_in_the_loss_and_in_judging(net, federation):
    client = 3
    method = HeteroFL()
    server, client = prepared(method, net, federation, client)
    absent = ~client["labels"]
    assert absent.any()
    assert client["labels"].any()
    start, x = method._begin(server, client), federation.normalize(federation.x[:9])
    logits = net.bind({})(start, x)
    judged = method.predict(net.bind({}), method.evaluated(server, client, start), Batch(x, None))
    assert not judged[:, absent].any()
    assert torch.equal(judged[:, ~absent], logits[:, ~absent])
    y = federation.y[:9]
    loss = method.loss(server, client, net.bind({}, training=True), start, Batch(x, y))
    assert_close(loss, F.cross_entropy(judged, y))
    assert abs(float(loss - F.cross_entropy(logits, y))) > 1e-3


@pytest.mark.parametrize("kind", [HeteroFL, FedRolex])
def test_clients_know_their_classes_and_tuning_leaves_them_alone(kind, backend, net, federation):
    method = kind()
    state = record_states(method, net, federation, COHORTS[:1], engine=backend)[-1]
    for client in EVERYONE:
        expected = [
            c in classes(federation, client) if client in COHORTS[0] else True for c in range(5)
        ]
        assert state.clients["labels"][client].tolist() == expected
    judged = method.personal(state.server, state.client(3))
    (phase,) = method.finetuning(judged, net.parts, 2)
    assert phase.mask == {"model": True, "labels": False}
    judge = make_backend(Engine(backend), net, CPU)
    for part in ("all", "head"):
        tuned = judge.evaluate(
            EvalCall(
                method,
                federation,
                state,
                EVERYONE,
                FineTuning(LOCAL, Draws(0, "finetune", 1), part),
            )
        )
        assert tuned.loss.isfinite().all()
    plain = kind(masked=False)
    assert (
        plain.before_training({}, {}, None, None)
        == plain.before_evaluation({}, {}, None, None)
        == {}
    )
    assert "labels" not in plain.init(net.params, net.parts)[1]


# What is judged, what travels


@pytest.mark.parametrize("kind", [HeteroFL, FedRolex])
def test_a_client_that_never_trained_has_its_part_of_the_initial_model(
    kind, backend, net, federation
):
    method = kind(widths=(0.25, 1.0), masked=False)
    state = record_states(method, net, federation, [[0, 6], [0, 9]], engine=backend)[-1]
    for client, width in ((3, 0.25), (8, 1.0)):
        own = method.personal(state.server, state.client(client))
        active = neurons.prefix_neurons(state.server["plan"], share(width))
        masks = neurons.entry_masks(state.server["plan"], active, net.params)
        assert_same(own, {name: leaf * masks[name] for name, leaf in net.params.items()})
    trained = method.personal(state.server, state.client(0))
    assert_same(trained, client_row(state.clients["model"], 0))


@pytest.mark.parametrize("kind", [HeteroFL, FedRolex])
def test_the_small_networks_values_travel(kind):
    net, method = models.build_network("cnn4", (1, 28, 28), 10, 0), kind()
    state = make_initial_state(method, net, 5, CPU)
    for client, rate in enumerate(RATES):
        client = method.prepare(state.server, state.client(client))
        a, b, c = (round(rate * width) for width in (32, 64, 512))
        expected = 26 * a + (25 * a + 1) * b + (16 * b + 1) * c + 10 * c + 10
        down = count_traffic(method.download(state.server, client))
        up = count_traffic(method.finish(state.server, client, net.params, net.params)[0])
        assert (int(down.values), int(up.values)) == (expected, expected)
        assert (int(down.bits), int(up.bits)) == (
            32 * expected,
            32 * expected + 10,
        )  # a bit per class


def test_statistics_of_other_channels_stay_as_they_were(backend, federation):
    net = tiny(norm=True)
    states = record_states(FedRolex(widths=(0.5,)), net, federation, [[0], [0]], engine=backend)
    means = [state.client_buffers["main"]["norm.running_mean"][0] for state in states]
    assert torch.equal(means[0], torch.zeros(4))
    assert (means[1] != 0).tolist() == [True, True, False, False]
    assert means[2][0] == means[1][0]
    assert means[2][1] != means[1][1]
    assert (means[2] != 0).tolist() == [True, True, True, False]


def test_defaults():
    assert (HeteroFL().widths, HeteroFL().rounding, HeteroFL().weighting) == (
        RATES,
        "ceil",
        "equal",
    )
    assert (FedRolex().widths, FedRolex().rounding, FedRolex().weighting) == (
        RATES,
        "floor",
        "samples",
    )
