"""FlexFL: levels and devices."""

import math

import pytest
import torch

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import FlexFL
from fedpfl.methods.shared import neurons
from tests.conftest import COHORTS, CPU, record_rounds, tiny


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


def test_as_far_from_the_target_as_the_tolerance_is_within_it():
    """Half of Tiny's 4 channels and 12 units makes 169 scalars, the next smaller shares make 90."""
    state = make_initial_state(
        FlexFL(levels=(60 / 549, 1.0), devices=(1, 1), tolerance=169 / 549 - 60 / 549),
        tiny(),
        1,
        CPU,
    )
    assert [int(part.sum()) for part in state.server["levels"][0][:-1].split([4, 12])] == [2, 6]


def test_apoz_is_of_all_groups(net):
    with pytest.raises(FedpflError, match=r"method\.apoz has 3 numbers for 2 groups of neurons"):
        FlexFL(apoz=(0.5, 0.5, 0.5)).init(net.params, net.parts)


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
