"""FlexFL: levels, devices, self-distillation, and what it is without them."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import Batch, FlexFL, HeteroFL
from fedpfl.methods.shared import neurons
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    client_row,
    differing,
    participate,
    record_rounds,
    record_states,
    tiny,
)

EVERYONE = list(range(10))


@dataclass(frozen=True)
class Highest(FlexFL):
    """Everyone is sent everything, and cuts it down to what its device can hold."""

    def sample(self, server, generator):
        return {"sent": torch.tensor(len(self.levels) - 1)}


def test_with_equal_shares_and_without_distillation_it_is_heterofl(backend, federation):
    net = tiny(norm=True)
    method = Highest(levels=(0.3, 1.0), devices=(1, 1), gamma=0.0)
    first = record_states(method, net, federation, [])[0]
    kept = first.server["levels"][0]
    share = (int(kept[:4].sum()) / 4, int(kept[4:16].sum()) / 12)
    width = next(
        w / 100 for w in range(1, 101) if (int(w * 4 / 100) / 4, int(w * 12 / 100) / 12) == share
    )
    plain = HeteroFL(widths=(width, 1.0), rounding="floor", weighting="samples", masked=False)
    own, other = (record_rounds(m, net, federation, engine=backend) for m in (method, plain))
    for ours, theirs in zip(own[0], other[0], strict=True):
        assert_same(ours.server["model"], theirs.server["model"])
        assert_same(
            (ours.clients["model"], ours.client_buffers),
            (theirs.clients["model"], theirs.client_buffers),
        )
        for client in EVERYONE:
            one, two = (
                m.personal(s.server, client_row(s.clients, client))
                for m, s in ((method, ours), (plain, theirs))
            )
            assert_same(one, two)
    for ours, theirs in zip(own[1], other[1], strict=True):
        assert_same(
            (ours.before, ours.after, ours.loss), (theirs.before, theirs.after, theirs.loss)
        )
        assert ours.traffic.values_up == theirs.traffic.values_up
        assert ours.traffic.values_down == 5 * tree.size(net.params)
    assert not kept.all()


# Levels


def shares(net, **values):
    """Share of the network's scalars between each level's neurons, counted on masks, and the
    levels.
    """
    server, _ = FlexFL(**values).init(net.params, net.parts)
    counts = []
    for active in server["levels"]:
        masks = neurons.entry_masks(server["plan"], active, net.params)
        counts.append(sum(int(mask.sum()) for mask in masks.values()) / tree.size(net.params))
    return counts, server["levels"]


@pytest.mark.parametrize("apoz", [(), (0.5, 0.5, 0.9), (0.9, 0.5, 0.1)])
@pytest.mark.parametrize("tolerance", [0.05, 0.005])
def test_levels_have_their_shares_of_the_scalars(apoz, tolerance):
    net = models.build_network("cnn4", (1, 28, 28), 10, 0)
    counts, levels = shares(net, apoz=apoz, tolerance=tolerance)
    assert counts == pytest.approx([0.25, 0.5, 1.0], abs=tolerance)
    assert levels[2].all()
    for low, high in itertools.pairwise(levels):
        assert (high | ~low).all()
        assert not (low == high).all()
    for level in levels:  # prefixes
        for part in level[:-1].split([32, 64, 512]):
            assert part.tolist() == sorted(part.tolist(), reverse=True)


def test_an_embedding_is_a_layer_of_its_group():
    """Shares of 100 s / gamma of 32 and 32 neurons by hand; s = 1 where there is no ReLU behind."""
    net = models.build_network("text", (5,), 4, 0)
    largest = math.log(20_000 * 32)
    worth = (1.0, 1 - 0.9 * math.log(33 * 32) / largest)
    assert shares(net)[1].equal(shares(net, apoz=(0.0, 0.0))[1])
    for target, level in zip((0.25, 0.5), shares(net, apoz=(0.0, 0.9))[1], strict=False):
        for gamma in range(1, 1000):
            a, b = (max(1, int(min(1, 100 * own / gamma) * 32 + 1e-9)) for own in worth)
            if abs(20_000 * a + (a + 1) * b + 4 * b + 4 - target * 641_188) <= 0.05 * 641_188:
                break
        assert [int(part.sum()) for part in level[:-1].split([32, 32])] == [a, b]
    assert a != b


def test_the_first_gamma_within_the_tolerance_is_taken():
    """Shares of 100 / gamma of 32, 64 and 512 neurons, counted by hand."""
    net = models.build_network("cnn4", (1, 28, 28), 10, 0)
    for target, level in zip((0.25, 0.5), shares(net)[1], strict=False):
        for gamma in range(1, 1000):
            a, b, c = (max(1, int(min(1, 100 / gamma) * width + 1e-9)) for width in (32, 64, 512))
            scalars = 26 * a + (25 * a + 1) * b + (16 * b + 1) * c + 10 * c + 10
            if abs(scalars / 582026 - target) <= 0.05:
                break
        assert [int(part.sum()) for part in level[:-1].split([32, 64, 512])] == [a, b, c]


def test_as_far_from_the_target_as_the_tolerance_is_within_it():
    """Half of Tiny's 4 channels and 12 units makes 169 scalars, the next smaller shares make 90."""
    state = make_initial_state(
        FlexFL(levels=(60 / 549, 1.0), devices=(1, 1), tolerance=169 / 549 - 60 / 549),
        tiny(),
        1,
        CPU,
    )
    assert [int(part.sum()) for part in state.server["levels"][0][:-1].split([4, 12])] == [2, 6]


def test_without_apoz_shares_are_equal_and_silent_groups_are_cut_more():
    net = models.build_network("cnn4", (1, 28, 28), 10, 0)

    def widths(**values):
        return [
            [int(part.sum()) / len(part) for part in level[:-1].split([32, 64, 512])]
            for level in shares(net, **values)[1]
        ]

    for level in widths():
        assert max(level) - min(level) < 1 / 32
    small, *_ = widths(apoz=(0.1, 0.1, 0.9))
    assert small[0] > 2 * small[2]
    assert small[1] > 2 * small[2]
    # Equal APoZ above 0 is not equal shares: s falls with the scalars of a group.
    small, *_ = widths(apoz=(0.5, 0.5, 0.5))
    assert small[0] > small[1] > small[2]


def test_where_no_gamma_is_within_the_tolerance_the_nearest_is_taken(net):
    exact, _ = shares(net, tolerance=0.0)
    possible = []
    for gamma in range(1, 2000):
        a, b = (max(1, int(min(1, 100 / gamma) * width + 1e-9)) for width in (4, 12))
        possible.append((10 * a + (9 * a + 1) * b + 5 * b + 5) / 549)
    for count, target in zip(exact, (0.25, 0.5, 1.0), strict=True):
        assert abs(count - target) == pytest.approx(min(abs(other - target) for other in possible))
    assert exact[0] != 0.25


def test_apoz_is_of_all_groups(net):
    with pytest.raises(FedpflError, match=r"method\.apoz has 3 numbers for 2 groups of neurons"):
        FlexFL(apoz=(0.5, 0.5, 0.5)).init(net.params, net.parts)


def test_layers_of_a_residual_stream_are_a_group():
    net = models.build_network("resnet8", (3, 8, 8), 4, 0, stem="small")
    counts, levels = shares(net, apoz=(0.5,) * 6)
    assert counts == pytest.approx([0.25, 0.5, 1.0], abs=0.05)
    assert len(levels[0]) == sum(net.parts.wiring.widths.values()) + 1


def test_a_level_of_a_trained_network_is_a_slice_of_it(backend, net, federation):
    method = FlexFL(devices=(0, 0, 1))
    states, outcomes = record_rounds(method, net, federation, engine=backend)
    server = states[-1].server
    masks = [neurons.entry_masks(server["plan"], level, net.params) for level in server["levels"]]
    for client in COHORTS[-1]:
        client = states[-1].client(client)
        level = int(client["level"])
        whole = method.personal(server, client)
        for lower in range(level):
            part = method.personal(server, {**client, "level": torch.tensor(lower)})
            for name, mask in masks[lower].items():
                assert torch.equal(part[name][mask], whole[name][mask])
                assert not part[name][~mask].any()
                assert not (masks[lower][name] & ~masks[level][name]).any()
    assert len({int(level) for level in states[-1].clients["level"]}) == 3
    assert all(
        outcome.traffic.values_down == outcome.traffic.values_up for outcome in outcomes
    )  # everyone is strong


# Devices


def test_devices_come_in_blocks_or_at_random(net):
    blocks = make_initial_state(FlexFL(), net, 100, CPU).clients
    assert blocks["device"].tolist() == [0] * 40 + [1] * 30 + [2] * 30
    assert torch.equal(blocks["level"], blocks["device"])
    three = make_initial_state(FlexFL(devices=(1, 1, 1)), net, 10, CPU).clients["device"]
    assert three.tolist() == [i * 3 // 10 for i in range(10)]
    drawn = make_initial_state(
        FlexFL(assign="random", devices=(0, 3, 1)), net, 1000, CPU, seed=1
    ).clients["device"]
    assert 680 < int((drawn == 1).sum()) < 820
    assert int((drawn == 0).sum()) == 0


def test_levels_are_drawn_for_each_client_and_round(net):
    method = FlexFL()
    state = make_initial_state(method, net, 10, CPU)
    drawn = [
        [
            int(method.sample(state.server, Draws(0, "train", t).server(client))["sent"])
            for client in EVERYONE
        ]
        for t in range(1, 31)
    ]
    assert len({tuple(own) for own in drawn}) == 30
    flat = [level for own in drawn for level in own]
    assert all(70 < flat.count(level) < 130 for level in range(3))


def test_a_device_cuts_down_what_it_cannot_hold(backend, net, federation):
    states, outcomes = record_rounds(FlexFL(), net, federation, engine=backend)
    size = [round(share * tree.size(net.params)) for share in shares(net)[0]]
    cut = 0
    for t, (cohort, outcome, state) in enumerate(
        zip(COHORTS, outcomes, states[1:], strict=True), 1
    ):
        sent = [
            int(FlexFL().sample(state.server, Draws(0, "train", t).server(client))["sent"])
            for client in cohort
        ]
        own = [
            min(level, int(states[0].clients["device"][i]))
            for i, level in zip(cohort, sent, strict=True)
        ]
        assert state.clients["level"][cohort].tolist() == own
        assert outcome.traffic.values_down == sum(size[level] for level in sent)
        assert outcome.traffic.values_up == sum(size[level] for level in own)
        assert (outcome.traffic.bits_down, outcome.traffic.bits_up) == (
            32 * outcome.traffic.values_down,
            32 * outcome.traffic.values_up,
        )
        cut += sent != own
    assert cut


def test_a_client_that_never_trained_has_what_its_device_can_hold(net, federation):
    state = record_states(FlexFL(), net, federation, [[9]])[-1]
    for client in (0, 5, 8):
        own = FlexFL().personal(state.server, state.client(client))
        level = state.server["levels"][{0: 0, 5: 1, 8: 2}[client]]
        masks = neurons.entry_masks(state.server["plan"], level, net.params)
        assert_same(own, {name: leaf * masks[name] for name, leaf in net.params.items()})


def test_entries_beyond_the_level_hold_still(backend, federation):
    net = tiny(norm=True)
    method = FlexFL(devices=(1, 0, 0), gamma=0.0)
    last = record_states(method, net, federation, engine=backend)[-1]
    masks = neurons.entry_masks(last.server["plan"], last.server["levels"][0], net.params)
    for name, mask in masks.items():
        assert torch.equal(last.server["model"][name][~mask], net.params[name][~mask])
        assert not last.clients["model"][name][0][~mask].any()
    assert differing(last.server["model"], net.params)
    narrow = last.server["levels"][0][:4]
    means = last.client_buffers["main"]["norm.running_mean"][0]
    assert (means != 0).tolist() == narrow.tolist()
    assert not narrow.all()


# Self-distillation


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_loss_is_the_formula(level, federation):
    net, method = tiny(norm=True), FlexFL(gamma=6.0, temperature=2.0)
    state = make_initial_state(method, net, 10, CPU)
    client = method.prepare(state.server, {**state.client(9), "sent": torch.tensor(level)})
    x, y = federation.normalize(federation.x[:20]), federation.y[:20]
    start = method._begin(state.server, client)
    bound = net.bind({"main": net.buffers}, training=True)

    def by_hand(params, teaching):
        """With `teaching` parameters as teachers."""
        logits = net.bind({"main": net.buffers}, training=True)(params, x)
        loss = F.cross_entropy(logits, y)
        for lower in range(level):
            masks = neurons.entry_masks(state.server["plan"], state.server["levels"][lower], params)
            part = {name: leaf * masks[name] for name, leaf in teaching.items()}
            teacher = (net.bind({"main": net.buffers}, training=True)(part, x) / 2).softmax(1)
            apart = teacher * (teacher.log() - (logits / 2).log_softmax(1))
            loss = loss + 6.0 / level * 4 * apart.sum(1).mean() / 5
        return loss

    loss = method.loss(state.server, client, bound, start, Batch(x, y))
    assert_close(loss, by_hand(start, start), atol=1e-6)
    if level:
        assert (
            float(
                loss - F.cross_entropy(net.bind({"main": net.buffers}, training=True)(start, x), y)
            )
            > 1e-4
        )
    # Teachers are given, and move no statistics.
    free = tree.map(lambda leaf: leaf.clone().requires_grad_(), start)
    own = torch.autograd.grad(
        method.loss(
            state.server, client, net.bind({"main": net.buffers}, training=True), free, Batch(x, y)
        ),
        tree.leaves(free),
    )
    expected = torch.autograd.grad(by_hand(free, start), tree.leaves(free))
    assert_close(dict(enumerate(own)), dict(enumerate(expected)), atol=1e-6)
    once = net.bind({"main": net.buffers}, training=True)
    once(start, x)
    assert_same(bound.buffers, once.buffers)
    assert differing(once.buffers["main"], net.buffers)


def test_padded_samples_teach_nothing(federation):
    net, method = tiny(), FlexFL()
    state = make_initial_state(method, net, 10, CPU)
    client = method.prepare(state.server, {**state.client(9), "sent": torch.tensor(2)})
    x, y = federation.normalize(federation.x[:6]), federation.y[:6]
    weight = torch.tensor([1.0, 1, 1, 1, 0, 0])
    padded = method.loss(
        state.server, client, net.bind({}, True, weight), net.params, Batch(x, y, weight)
    )
    assert_close(
        padded,
        method.loss(state.server, client, net.bind({}, True), net.params, Batch(x[:4], y[:4])),
    )


def test_distillation_moves_what_is_above_the_lowest_level(backend, net, federation):
    local = replace(LOCAL, epochs=1)
    with_, without = (
        participate(
            m,
            net,
            federation,
            make_initial_state(m, net, 10, CPU),
            EVERYONE,
            engine=backend,
            local=local,
        ).uploads["model"]
        for m in (Highest(), Highest(gamma=0.0))
    )
    for client in range(9):  # the tenth takes no step
        a, b = client_row(with_.values, client), client_row(without.values, client)
        close = all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)
        assert close == (client < 4)
