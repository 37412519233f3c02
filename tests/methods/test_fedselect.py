"""FedSelect (arXiv:2404.02478): which entries become personal and when, both passes, means,
traffic.
"""

import dataclasses
import itertools
from dataclasses import dataclass

import pytest
import torch

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Agreed
from fedpfl.methods import FedAvg, FedPer, FedSelect, LocalOnly, Phase
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
    with_client_states,
)

WEIGHTS = ("conv.weight", "fc.weight", "classifier.weight")
EVERYONE = list(range(10))
OFTEN = [[0, 1, 2, 3]] * 6
UNSEEN = 7  # until round 3


class Uniform(FedAvg):
    """FedAvg with equal weights."""

    def aggregate(self, server, clients, net, uploads, weight, generator):
        return super().aggregate(
            server, clients, net, uploads, torch.full_like(weight, 1 / len(weight)), generator
        )


@dataclass(frozen=True)
class Alone(LocalOnly):
    """Local-Only that draws the batches of personal passes."""

    def phases(self, server, client, params, epochs):
        return [Phase(epochs, stream="personal")]


class First(FedSelect):
    """Ends after its first epoch's pass over the personal entries."""

    def phases(self, server, client, params, epochs):
        return super().phases(server, client, params, epochs)[:1]


class Second(FedSelect):
    """Has the passes over the shared entries alone."""

    def phases(self, server, client, params, epochs):
        return super().phases(server, client, params, epochs)[1::2]


def with_masks(state, net, masks):
    """A state in which clients have these masks, of all parameters; what they own is unlike what
    the server has.
    """
    stacked = tree.stack(masks)
    own = {name: leaf + 0.1 for name, leaf in tree.repeat(net.params, len(masks)).items()}
    return with_client_states(state, client={"own": own, "mask": stacked})


def random_mask(net, share, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.rand(leaf.shape, generator=g) < share for name, leaf in net.params.items()}


def share(mask):
    return float(tree.ravel(mask).double().mean())


# Limits


def test_with_alpha_zero_it_is_fedavg_with_equal_weights(backend, net, federation):
    """Clients of several sizes train side by side within an epoch, so that products have other
    widths.
    """
    same = assert_same if backend == "loop" else assert_close
    own, fedavg = (
        record_states(m, net, federation, engine=backend) for m in (FedSelect(alpha=0.0), Uniform())
    )
    weighted = record_states(FedAvg(), net, federation, engine=backend)
    for ours, theirs in zip(own, fedavg, strict=True):
        same(ours.server, theirs.server)
        assert not tree.ravel(ours.clients["mask"]).any()
    assert differing(own[-1].server, weighted[-1].server)
    assert len(differing(own[-1].server, net.params)) == len(net.params)


def test_the_official_limit_selects_once_even_with_alpha_zero(net, federation):
    states = record_states(FedSelect(alpha=0.0, strict=False), net, federation, OFTEN[:3])
    first, last = (states[t].clients["mask"]["fc.weight"][0] for t in (1, 3))
    assert int(first.sum()) == 432 - round(0.75 * 432)
    assert torch.equal(first, last)


@pytest.mark.parametrize(("size", "new"), [(5, 3), (7, 3), (9, 5), (11, 5)])
def test_half_an_entry_is_rounded_as_the_official_code_rounds(size, new):
    """Of n entries n - round((1 - p) n) become personal: of 5 with p = 1/2 all but 2 (2.5, to the
    even number).
    """
    mask = FedSelect(p=0.5, alpha=1.0)._add_largest(
        torch.zeros(size, dtype=torch.bool), torch.arange(float(size))
    )
    assert mask.tolist() == [False] * (size - new) + [True] * new


def test_a_share_of_exactly_alpha_is_where_the_limits_differ(net, federation):
    counts = {}
    for strict in (True, False):
        method = FedSelect(p=0.5, alpha=0.5, strict=strict)
        state = record_states(method, net, federation, OFTEN[:3])[-1]
        counts[strict] = [float(state.clients["mask"][name][0].double().mean()) for name in WEIGHTS]
    assert counts[True] == [0.5] * 3
    assert counts[False] == [27 / 36, 324 / 432, 45 / 60]


def test_p_zero_never_selects_and_p_one_selects_everything(backend, net, federation):
    never = record_states(FedSelect(p=0.0), net, federation, OFTEN[:3], engine=backend)[-1]
    at_once = record_states(FedSelect(p=1.0), net, federation, OFTEN[:3], engine=backend)[-1]
    assert not tree.ravel(never.clients["mask"]).any()
    for client in range(4):
        assert tree.ravel(client_row(at_once.clients["mask"], client)).all()


# Masks


@pytest.mark.parametrize("scope", ["tensor", "all"])
@pytest.mark.parametrize("clamp", [False, True])
def test_the_personal_share_follows_its_series(scope, clamp, net, federation):
    """1 - (1 - p)^n, up to the rounding of each step to whole entries; with `clamp` never beyond
    alpha.
    """
    states = record_states(
        FedSelect(alpha=0.8, scope=scope, clamp=clamp), net, federation, [[0, 2]] * 8
    )
    size = 36 + 432 + 60
    pieces = (
        dict.fromkeys([scope], size) if scope == "all" else {"conv.weight": 36, "fc.weight": 432}
    )
    for name, n in pieces.items():
        for client in (0, 2):
            masks = [client_row(s.clients["mask"], client) for s in states]
            counts = [
                int((tree.ravel(mask) if scope == "all" else mask[name]).sum()) for mask in masks
            ]
            expected, z = [0], n
            for _ in range(8):
                new = z - round((1 - 0.25) * z) if n - z < 0.8 * n else 0
                z -= max(0, min(new, int(0.8 * n) - (n - z))) if clamp else new
                expected.append(n - z)
            assert counts == expected
            exact = [1 - 0.75**k for k in range(6)]
            assert [c / n for c in counts[:6]] == pytest.approx(exact, abs=2 / n)
            assert (
                (counts[-1] == int(0.8 * n))
                if clamp
                else counts[-1] / n == pytest.approx(1 - 0.75**6, abs=2 / n)
            )


@pytest.mark.parametrize(
    ("delta", "personalise"), [("round", "most"), ("window", "least"), ("window", "random")]
)
def test_masks_only_grow_and_those_of_others_hold_still(
    delta, personalise, backend, net, federation
):
    method = FedSelect(delta=delta, every=1, personalise=personalise)
    states = record_states(method, net, federation, [*COHORTS, *COHORTS], engine=backend)
    for old, new in itertools.pairwise(states):
        for name in WEIGHTS:
            assert (new.clients["mask"][name] >= old.clients["mask"][name]).all()
    assert set(states[0].clients["mask"]) == set(WEIGHTS)  # never a bias
    assert not tree.ravel(client_row(states[2].clients["mask"], UNSEEN)).any()
    assert share(client_row(states[-1].clients["mask"], 2)) > 0.25


def test_the_entries_that_moved_most_are_selected(backend, net, federation):
    """As found by sorting, per tensor or over all."""
    for scope, personalise in (("tensor", "most"), ("tensor", "least"), ("all", "most")):
        method = FedSelect(scope=scope, personalise=personalise)
        states = record_states(method, net, federation, OFTEN[:2], engine=backend)
        start, mask = (client_row(states[1].clients[part], 2) for part in ("own", "mask"))
        server, new = states[1].server, client_row(states[2].clients["mask"], 2)
        start = {name: torch.where(mask[name], start[name], server[name]) for name in WEIGHTS}
        moved = {
            name: (client_row(states[2].clients["model"], 2)[name] - start[name]).abs()
            for name in WEIGHTS
        }
        pieces = [list(WEIGHTS)] if scope == "all" else [[name] for name in WEIGHTS]
        for names in pieces:
            was, now, by = (tree.ravel({n: part[n] for n in names}) for part in (mask, new, moved))
            free = (~was).nonzero().flatten()
            count = len(free) - round(0.75 * len(free))
            order = by[free].argsort(descending=personalise == "most")
            assert len(by[free].unique()) == len(free), "choose another seed: entries tie"
            assert set(free[order[:count]].tolist()) == set(
                (now & ~was).nonzero().flatten().tolist()
            )


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


def test_windows_count_participations_and_measure_from_their_beginning(backend, net, federation):
    """Selection follows the 3rd and 5th participation, by what moved since the first model and
    since the 3rd.
    """
    states = record_states(
        FedSelect(delta="window", every=2), net, federation, [[0, 1, 2]] * 5, engine=backend
    )
    shares = [share(client_row(state.clients["mask"], 0)) for state in states]
    assert shares[:3] == [0, 0, 0]
    assert shares[3] == shares[4] == pytest.approx(0.25, abs=0.01)
    assert shares[5] == pytest.approx(0.4375, abs=0.01)
    old = {name: net.params[name] for name in WEIGHTS}
    for now in (3, 5):
        for name in WEIGHTS:
            was, mask = (states[t].clients["mask"][name][0] for t in (now - 1, now))
            moved = (states[now].clients["model"][name][0] - old[name]).abs()
            assert moved[mask & ~was].min() > moved[~mask].max()
            old[name] = states[now].clients["model"][name][0]
            assert torch.equal(states[now].clients["reference"][name][0], old[name])


@pytest.mark.parametrize(("layer", "name"), [(1, "fc"), (-1, "classifier"), (0, "conv.weight")])
@pytest.mark.parametrize("delta", ["round", "window"])
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


# Passes


def test_each_pass_leaves_the_others_entries_alone(backend, net, federation):
    """And in it all entries of its own move."""
    state = make_initial_state(FedSelect(), net, 10, CPU)
    masks = [random_mask(net, 0.4, client) for client in EVERYONE]
    state = with_masks(state, net, masks)
    starts = tree.stack(
        [FedSelect()._begin(state.server, state.client(client)) for client in EVERYONE]
    )
    for method, moving in ((First(), lambda mask: mask), (Second(), lambda mask: ~mask)):
        part = participate(method, net, federation, state, EVERYONE, engine=backend)
        end = part.uploads["model"].values
        for client in EVERYONE[:9]:
            for name in net.params:
                here = moving(masks[client][name])
                moved = end[name][client] != starts[name][client]
                assert not moved[~here].any()
            moved = tree.map(lambda new, old, k=client: new[k] != old[k], end, starts)
            here = tree.ravel({name: moving(leaf) for name, leaf in masks[client].items()})
            assert (
                tree.ravel(moved)[here].double().mean() > 0.9
            )  # some move by less than their last bit


def test_personal_entries_move_first_and_the_passes_have_batches_and_steps_of_their_own(
    net, federation
):
    """An epoch by hand on the loop backend, client by client."""
    local = dataclasses.replace(LOCAL, epochs=1)
    slow = dataclasses.replace(local, lr=0.01)
    method = FedSelect(lr_v=0.01)
    state = with_masks(
        make_initial_state(method, net, 10, CPU),
        net,
        [random_mask(net, 0.4, client) for client in EVERYONE],
    )
    part = participate(method, net, federation, state, [2], local=local)
    mask, client = client_row(state.clients["mask"], 2), state.client(2)

    @dataclass(frozen=True)
    class Pass(FedAvg):
        stream: str = "main"

        def phases(self, server, client, params, epochs):
            here = mask if self.stream == "personal" else tree.invert(mask)
            return [Phase(epochs, here, self.stream)]

    params = method._begin(state.server, client)
    for one, speed in ((Pass("personal"), slow), (Pass(), local)):
        at = dataclasses.replace(make_initial_state(one, net, 10, CPU), server=params)
        params = client_row(participate(one, net, federation, at, [2], local=speed).uploads, 0)
    assert_same(client_row(part.uploads["model"].values, 0), params)


def test_all_personal_is_local_training_without_communication(backend, net, federation):
    everything = tree.full_like(net.params, True)
    method = FedSelect()
    state = with_masks(make_initial_state(method, net, 10, CPU), net, [everything] * 10)
    alone = with_client_states(
        make_initial_state(Alone(), net, 10, CPU), client={"model": state.clients["own"]}
    )
    own, other = (
        participate(m, net, federation, s, EVERYONE, engine=backend)
        for m, s in ((method, state), (Alone(), alone))
    )
    (assert_same if backend == "loop" else assert_close)(
        own.client_states["model"], other.client_states["model"]
    )
    for count in (*own.down, *own.up):
        assert count.tolist() == [0] * 10
    _, kept = method.aggregate(
        state.server, own.client_states, None, own.uploads, torch.full((10,), 0.1), None
    )
    assert_same(kept["own"], own.uploads["model"].values)


# Aggregation


def test_entries_without_anybody_keep_their_value_and_personal_ones_are_never_replaced(
    backend, net, federation
):
    """With the masks that held during the round: what has just become personal starts from the
    mean.
    """
    states = record_states(FedSelect(p=0.4, alpha=0.8), net, federation, OFTEN[:4], engine=backend)
    for old, new in itertools.pairwise(states[1:]):
        for name in WEIGHTS:
            was, now = (s.clients["mask"][name][:4] for s in (old, new))
            own, model = new.clients["own"][name][:4], new.clients["model"][name][:4]
            assert torch.equal(own[was], model[was])
            fresh = now & ~was
            assert fresh.any()
            assert torch.equal(own[fresh], new.server[name].expand_as(own)[fresh])
            assert (
                own[fresh] != model[fresh]
            ).double().mean() > 0.5  # of some nobody else has one to average
            nobody = was.all(0)
            assert torch.equal(new.server[name][nobody], old.server[name][nobody])
    assert states[3].clients["mask"]["fc.weight"][:4].all(0).any()


def test_the_mean_is_over_those_who_share_an_entry(net):
    """Three clients with masks 0, 0, 1: of the first two."""
    method = FedSelect()
    state = make_initial_state(method, net, 3, CPU)
    uploads = tree.map(lambda leaf: torch.stack([leaf, leaf + 1, leaf + 7]), net.params)
    shared = tree.full_like(uploads, True)
    shared["fc.weight"][2] = False
    shared["classifier.weight"][:] = False
    sent, weight = {"model": Agreed(uploads, shared)}, torch.tensor([0.7, 0.2, 0.1])
    server, _ = method.aggregate(state.server, state.clients, None, sent, weight, None)
    assert_close(server["fc.weight"], net.params["fc.weight"] + 0.5)
    assert_close(server["fc.bias"], net.params["fc.bias"] + 8 / 3)
    assert_same(server["classifier.weight"], net.params["classifier.weight"])


def test_two_clients_with_complementary_masks_each_keep_their_own(backend, net):
    federation = make_federation((40, 33), (8, 8))
    mask = random_mask(net, 0.5)
    method = FedSelect(p=0.0)
    state = with_masks(make_initial_state(method, net, 2, CPU), net, [mask, tree.invert(mask)])
    part = participate(method, net, federation, state, [0, 1], engine=backend)
    server, kept = method.aggregate(
        state.server, part.client_states, None, part.uploads, torch.tensor([0.9, 0.1]), None
    )
    for client in (0, 1):
        assert_same(
            method._begin(server, client_row(kept, client)),
            client_row(part.uploads["model"].values, client),
        )
    assert len(
        differing(
            client_row(part.client_states["model"], 0), client_row(part.client_states["model"], 1)
        )
    ) == len(net.params)


# Who is judged by what


def test_a_client_is_judged_by_its_model_before_aggregation(backend, net, federation):
    method = FedSelect()
    states = record_states(method, net, federation, engine=backend)
    part = participate(method, net, federation, states[1], COHORTS[1], engine=backend)
    for k, client in enumerate(COHORTS[1]):
        model = method.personal(states[2].server, states[2].client(client))
        assert_same(model, client_row(part.uploads["model"].values, k))
    assert_same(method.personal(states[2].server, states[2].client(UNSEEN)), net.params)
    later = method.personal(states[3].server, states[3].client(2))  # who did not train in round 3
    assert_same(later, method.personal(states[2].server, states[2].client(2)))


def test_who_returns_takes_the_latest_shared_entries(net, federation):
    method = FedSelect()
    state = record_states(method, net, federation, COHORTS[:2])[-1]
    for client in (0, UNSEEN):
        kept = state.client(client)
        start = method._begin(state.server, kept)
        for name in net.params:
            mask = kept["mask"].get(name, torch.zeros_like(start[name], dtype=torch.bool))
            assert torch.equal(start[name][~mask], state.server[name][~mask])
            assert not mask.any() or torch.equal(start[name][mask], kept["own"][name][mask])


def test_batch_normalisation_keeps_its_statistics_and_shares_its_shift(backend, federation):
    net = tiny(norm=True)
    states = record_states(FedSelect(), net, federation, engine=backend)
    assert states[-1].server_buffers == {}
    assert set(states[-1].clients["mask"]) == {*WEIGHTS, "norm.weight"}
    assert int(states[-1].clients["mask"]["norm.weight"][2].sum()) == 2  # 4, then 3 left: one each
    part = participate(FedSelect(), net, federation, states[2], COHORTS[2], engine=backend)
    for client, k in ((0, 0), (1, 1)):
        mean = states[3].client_buffers["main"]["norm.running_mean"]
        assert torch.equal(mean[client], part.buffers["main"]["norm.running_mean"][k])
    assert not torch.equal(mean[0], mean[1])
    counted = states[3].client_buffers["main"]["norm.num_batches_tracked"]
    assert (
        counted[UNSEEN] == 2 * 2
    )  # two epochs of two batches; the empty pass over personal entries is left out
    assert counted[1] == 2 + 4  # one batch an epoch; in its second round in two passes


# Traffic


def test_shared_entries_travel_and_a_mask_when_it_is_another(backend, net, federation):
    size, weights = tree.size(net.params), 36 + 432 + 60
    _, outcomes = record_rounds(
        FedSelect(p=0.5, alpha=0.5), net, federation, OFTEN[:3], engine=backend
    )
    personal = weights // 2
    assert [o.traffic.values_down // 4 for o in outcomes] == [
        size,
        size - personal,
        size - personal,
    ]
    assert [o.traffic.values_up for o in outcomes] == [o.traffic.values_down for o in outcomes]
    assert [o.traffic.bits_down for o in outcomes] == [32 * o.traffic.values_down for o in outcomes]
    assert [(o.traffic.bits_up - 32 * o.traffic.values_up) // 4 for o in outcomes] == [
        weights,
        0,
        0,
    ]
    told = outcomes[1].metrics
    assert told["personal_share"] == pytest.approx(personal / size)
    assert [told[f"personal/{name}"] for name in WEIGHTS] == [18, 216, 30]
    assert outcomes[0].metrics["personal_share"] == 0
