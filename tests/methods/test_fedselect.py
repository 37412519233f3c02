"""FedSelect (arXiv:2404.02478): which entries become personal, and when."""

import pytest
import torch

from fedpfl import models
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import FedPer, FedSelect
from tests.conftest import assert_same, client_row, record_states

WEIGHTS = ("conv.weight", "fc.weight", "classifier.weight")
OFTEN = [[0, 1, 2, 3]] * 6


@pytest.mark.parametrize(("size", "new"), [(5, 3), (7, 3), (9, 5), (11, 5)])
def test_half_an_entry_is_rounded_as_the_official_code_rounds(size, new):
    """Of n entries n - round((1 - p) n) become personal: of 5 with p = 1/2 all but 2 (2.5, to the
    even number).
    """
    mask = FedSelect(p=0.5, alpha=1.0)._add_largest(
        torch.zeros(size, dtype=torch.bool), torch.arange(float(size))
    )
    assert mask.tolist() == [False] * (size - new) + [True] * new


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({"alpha": 0.5}, [18, 216, 30]),
        ({"alpha": 0.5, "strict": False}, [27, 324, 45]),
        ({"alpha": 0.6}, [27, 324, 45]),
        ({"alpha": 0.6, "clamp": True}, [21, 259, 36]),
    ],
)
def test_the_personal_share_grows_up_to_alpha(values, counts, net, federation):
    """By halves: from exactly alpha on no more unless it may be passed; `clamp` stops at alpha."""
    state = record_states(FedSelect(p=0.5, **values), net, federation, OFTEN[:3])[-1]
    assert [int(state.clients["mask"][name][0].sum()) for name in WEIGHTS] == counts


def test_the_entries_that_moved_least_are_selected(backend, net, federation):
    """As found by sorting; those that moved most are for the plain loops to say."""
    method = FedSelect(personalise="least")
    state = record_states(method, net, federation, OFTEN[:1], engine=backend)[-1]
    for name in WEIGHTS:
        moved = client_row(state.clients["model"], 2)[name] - net.params[name]
        order = moved.abs().flatten().argsort()
        count = len(order) - round(0.75 * len(order))
        chosen = client_row(state.clients["mask"], 2)[name].flatten().nonzero().flatten()
        assert set(chosen.tolist()) == set(order[:count].tolist())


def test_of_ties_the_right_number_is_taken(backend, net, federation):
    """Client 9 has one sample and never moves: every distance is zero."""
    state = record_states(FedSelect(), net, federation, [[9]], engine=backend)[-1]
    for name in WEIGHTS:
        mask = client_row(state.clients["mask"], 9)[name].flatten()
        count = len(mask) - round(0.75 * len(mask))
        assert torch.equal(mask, torch.arange(len(mask)) < count)


def test_random_choices_are_drawn_anew_and_repeat(net, federation):
    states, again = (
        record_states(FedSelect(personalise="random"), net, federation, OFTEN[:2]) for _ in range(2)
    )
    assert_same(states[-1].clients, again[-1].clients)
    masks = [client_row(states[1].clients["mask"], client)["fc.weight"] for client in (0, 1)]
    assert not torch.equal(*masks)
    most = record_states(FedSelect(), net, federation, OFTEN[:2])[1]
    assert int(masks[0].sum()) == int(client_row(most.clients["mask"], 0)["fc.weight"].sum())


@pytest.mark.parametrize(
    ("layer", "name", "delta"),
    [(1, "fc", "round"), (-1, "classifier", "window"), (0, "conv.weight", "round")],
)
def test_a_whole_layer_is_personal_from_the_first_round_on(layer, name, delta, net, federation):
    own = {1: "fc", -1: "classifier", 0: "conv"}[layer]
    state = record_states(
        FedSelect(personalise=layer, delta=delta, every=1), net, federation, OFTEN[:3]
    )[-1]
    assert set(state.clients["mask"]) == {f"{own}.weight", f"{own}.bias"}
    assert all(bool(mask.all()) for mask in state.clients["mask"].values())
    assert_same(
        {n: state.server[n] for n in state.clients["mask"]},
        {n: net.params[n] for n in state.clients["mask"]},
    )
    chosen = [FedSelect(personalise=which).init(net.params, net.parts) for which in (layer, name)]
    assert_same(*chosen)


def test_a_layer_is_a_weight_with_the_normalisation_behind_it():
    """ResNet-18 has 21: stem, sixteen convolutions in blocks, three projections, the classifier."""
    net = models.build_network("resnet18", (3, 32, 32), 10, 0)
    assert len(net.parts.layers) == 21
    for number, channels in (
        (0, 64),
        (5, 128),
        (10, 256),
        (15, 512),
    ):  # the first convolution of each width
        mask = FedSelect(personalise=number).init(net.params, net.parts)[1]["mask"]
        weight, scale, shift = mask.values()
        assert weight.dim() == 4
        assert len(weight) == len(scale) == len(shift) == channels
    assert set(FedPer(layers=2)._personal(net.parts)) == {
        *net.parts.layers[-1],
        *net.parts.layers[-2],
    }


def test_an_unknown_layer_is_told(net):
    for layer, message in (
        (3, "layers 0 to 2, got 3"),
        ("fc2", "one of most, least, random, conv, fc, classifier"),
    ):
        with pytest.raises(FedpflError, match=message):
            FedSelect(personalise=layer).init(net.params, net.parts)
