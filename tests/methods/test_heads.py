"""Methods that know a network's features and its head, and those whose clients have clusters, clouds
or each other, at the ends of their ranges.
"""

import dataclasses
import math

import pytest
import torch

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.clients import OneClient
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import (
    CFL,
    FLUTE,
    GPFL,
    IFCA,
    Batch,
    FedAMP,
    FedAvg,
    FedFomo,
    FedPAC,
    FedProto,
    Floco,
    KNNPer,
    PFedFDA,
)
from fedpfl.methods.pfedfda import Features
from fedpfl.methods.shared.gaussian import pack_symmetric
from fedpfl.methods.shared.pool import choose_candidates
from fedpfl.testing.toy import CLASSES, CPU, differing, tiny
from tests.conftest import (
    COHORTS,
    HEAD,
    assert_close,
    assert_same,
    record_rounds,
    record_states,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_fedpac_a_class_that_nobody_has_loses_its_prototype_or_keeps_it(net, federation):
    y = federation.y.clone()
    for client in (1, 8):
        y[federation.train[client]] = 0
    federation = dataclasses.replace(federation, y=y)
    for keep in (False, True):
        method = FedPAC(keep_prototypes=keep)
        first, second = record_states(method, net, federation, [COHORTS[0], [1, 8]])[1:]
        assert first.server["prototypes"]["seen"].all()
        assert second.server["prototypes"]["seen"].tolist() == [True] + [keep] * 4
        if keep:
            old, new = (state.server["prototypes"]["mean"] for state in (first, second))
            assert torch.equal(old[1:], new[1:])
            assert not torch.equal(old[0], new[0])


@pytest.mark.parametrize(("weights", "more"), [("uniform", 0), ("counts", 1)])
def test_fedproto_what_travels(weights, more, backend, net, federation):
    """The last client has one sample, and makes no step."""
    states, outcomes = record_rounds(FedProto(weights=weights), net, federation, engine=backend)
    for t, cohort in enumerate(COHORTS):
        classes = sum(len(federation.y[federation.train[i]].unique()) for i in cohort if i != 9)
        sent, rest = divmod(outcomes[t].traffic.values_up, 12 + more)
        assert classes - 2 <= sent <= classes  # but for that of a dropped lone sample
        assert rest == 0
        seen = int(states[t].server["seen"].sum())
        assert outcomes[t].traffic.values_down == len(cohort) * 12 * seen


def test_flute_as_published_the_body_never_moves(backend, net, federation):
    method = FLUTE(variant="as_published")
    state = record_states(method, net, federation, [[0, 2]], engine=backend)[-1]
    body = {name: net.params[name] for name in state.server}
    assert_close(state.server, body, atol=1e-7)  # a mean of equals
    assert differing(state.clients["head"]["classifier.weight"][2], net.params["classifier.weight"])


def test_gpfl_published_sizes_and_what_is_drawn():
    built = models.build_network("cnn4", (3, 32, 32), 10, 0)
    server = GPFL().init(built.params, built.parts)[0]
    assert tree.size(server["valve"]) == 527_360
    assert tree.size(server) == 1_405_888
    assert float(server["embeddings"].std()) == pytest.approx(1, abs=0.05)
    weight = server["valve"]["gamma"]["weight"]
    assert float(weight.abs().max()) <= 512**-0.5
    assert float(weight.std()) == pytest.approx(512**-0.5 / 3**0.5, rel=0.02)


def laid_by(method, net, federation, client, state):
    shard = make_shard(federation, client, 32, Draws(0, "adapt", 1))
    own, bound = state.client(client), net.bind({"main": {}}, True)

    def look(number, own):
        return method.before_evaluation(state.server, own, bound, shard)

    return method.personal(state.server, own | OneClient(client).one_by_one(look, own))


def test_knn_per_as_many_samples_are_laid_by_as_there_is_room(net, federation):
    state = record_states(FedAvg(), net, federation, COHORTS[:1])[-1]
    whole = laid_by(KNNPer(), net, federation, 0, state)["memory"].values
    for capacity, count in ((5, 5), (99, 40)):
        own = laid_by(KNNPer(capacity=capacity), net, federation, 0, state)["memory"].values
        rows = [(whole["z"] == z).all(1).nonzero().item() for z in own["z"]]
        assert len({*rows}) == count == len(own["y"])
        assert_same(whole["y"][rows], own["y"])
        assert capacity > 40 or rows != [0, 1, 2, 3, 4]


def problem(samples=60, seed=0):
    """Features of unlike classes, and global statistics."""
    mean, factor = draw(CLASSES, 12, seed=seed), draw(12, 12, seed=seed)
    cov = factor @ factor.T / 12 + 0.1 * torch.eye(12).double()
    y = torch.arange(samples) % 3
    z = draw(CLASSES, 12, seed=seed + 1)[y] + 0.7 * draw(samples, 12, seed=seed + 2)
    return z, y, torch.full((CLASSES,), 1 / CLASSES).double(), mean, cov


def test_pfedfda_without_a_class_of_enough_samples_beta_is_zero():
    z, _, prior, mean, cov = problem(samples=4)
    samples = Features(z, torch.tensor([0, 0, 1, 2]), prior)
    found = PFedFDA(folds=3)._search_beta(samples, (mean, cov), torch.full((2,), 0.7))
    assert found.tolist() == [0, 0]


def test_pfedfda_where_the_search_fails_the_last_beta_stays():
    z, y, prior, mean, cov = problem()
    last = torch.tensor([0.2, 0.9], dtype=torch.float64)
    for found, covariance in ((z, -cov), (z * math.nan, cov)):
        samples = Features(found, y, prior)
        assert torch.equal(PFedFDA()._search_beta(samples, (mean, covariance), last), last)


def test_pfedfda_a_covariance_without_regularisation_is_made_positive_definite():
    z, y, prior, mean, cov = problem(samples=6)  # fewer samples than features: singular
    known, samples = {"mean": mean, "cov": pack_symmetric(cov)}, Features(z, y, prior)
    got = PFedFDA(cov_reg=0.0)._fit_statistics(samples, known, torch.zeros(2), 1)
    assert torch.linalg.eigvalsh(got[1]).min() > 0


def draw_point(method, beta, random, projected=True):
    """The alpha of one step."""
    batch = Batch(torch.empty(0), torch.empty(0), random=random[None])
    client = {"beta": torch.tensor(beta), "projected": torch.tensor(projected)}
    return method._point(batch, client)


def test_floco_endpoints_are_the_networks_head_and_xavier_normals(net):
    server, client = Floco(endpoints=6).init(net.params, net.parts)
    ends = server["endpoints"][HEAD[0]]
    assert_same(ends[0], net.params[HEAD[0]])
    assert client["beta"].tolist() == pytest.approx([1 / 6] * 6)
    few = Floco(endpoints=3).init(net.params, net.parts)[0]["endpoints"][HEAD[0]]
    assert_same(ends[:3], few)
    built = models.build_network("cnn4", (3, 32, 32), 10, 5)
    for end in Floco().init(built.params, built.parts)[0]["endpoints"][HEAD[0]][1:]:
        assert float(end.std()) == pytest.approx((2 / 522) ** 0.5, rel=0.05)


def test_floco_points_may_stay_inside_the_simplex():
    """The published code leaves it."""
    method, beta = Floco(endpoints=4, rho=0.3), [0.7, 0.1, 0.1, 0.1]
    inside = dataclasses.replace(method, stay_inside=True)
    randoms = torch.rand(50, 5, generator=torch.Generator().manual_seed(0))
    free, near = (
        torch.stack([draw_point(own, beta, random) for random in randoms])
        for own in (method, inside)
    )
    assert (free < 0).any()
    assert (near >= 0).all()
    assert_close(near.sum(1), torch.ones(50), atol=1e-6)


ROOM = {"warmup": 0, "clusters": 3}
U = torch.tensor([2.0] + [0.0] * 11)


def aggregated(method, changes, numbers=(0, 1, 2, 3), clients=4, weight=None):
    """The server's state after one round with these updates of a model of zeros."""
    net = tiny()
    zeros = tree.full_like(net.params, 0.0)
    server = make_initial_state(method, net, clients, CPU).server
    server = {**server, "models": tree.full_like(server["models"], 0.0)}
    uploads = tree.stack([{**zeros, "fc.bias": change} for change in changes])
    given = {"number": torch.tensor(numbers)}
    weight = torch.tensor(weight or [1 / len(changes)] * len(changes))
    return method.aggregate(server, given, net.bind({}), uploads, weight, None)[0]


def test_cfl_two_opposite_pairs_part():
    """u, u, -u, -u: the mean is 0 and the longest |u|."""
    pairs = [U, U, -U, -U]
    after = aggregated(CFL(**ROOM), pairs)
    assert after["cluster_of"].tolist() == [0, 0, 1, 1, 3]
    assert_same(after["models"]["fc.bias"], torch.stack([U, -U, 0 * U, 0 * U]))
    for whole in (
        aggregated(CFL(eps2=2.1, **ROOM), pairs),
        aggregated(CFL(warmup=1), pairs),
        aggregated(CFL(eps1=2.0, eps2=2.0, warmup=0), [U, U, U, U]),  # mean and longest are one
        aggregated(CFL(**ROOM), [U, -U], (0, 1), 2),  # of two clients
        aggregated(CFL(**ROOM), pairs, clients=5),  # one of them is not here
        aggregated(CFL(**ROOM), pairs, weight=[0.4, 0.3, 0.2, 0.1]),  # a mean of 0.4 |u|
    ):
        assert whole["count"] == 1


def test_cfl_a_newcomer_has_the_model_from_before_the_first_split():
    method = CFL(eps1=9.0, **ROOM)
    after = aggregated(method, [U, 0.5 * U, -U, -U])
    given = {"number": torch.tensor(5), "newcomer": torch.tensor(True)}
    assert_close(method.personal(after, given)["fc.bias"], -U / 8)
    net, uploads = tiny(), tree.map(lambda leaf: leaf[[0, 0, 1, 1]] + 1, after["models"])
    numbers, weight = {"number": torch.arange(4)}, torch.full((4,), 0.25)
    later, _ = method.aggregate(after, numbers, net.bind({}), uploads, weight, None)
    assert_same(method.personal(later, given), method.personal(after, given))
    given["number"] = torch.tensor(2)
    assert_same(method.personal(after, given)["fc.bias"], -U)


@pytest.mark.parametrize(("variant", "sigma"), [("fedamp", 1e9), ("heurfedamp", 1e-9)])
def test_fedamp_without_a_difference_in_attention_the_cloud_is_the_mean(variant, sigma, net):
    """Of seventeen, more than the server looks at at once."""
    generator = torch.Generator().manual_seed(0)
    move = lambda leaf: leaf + 0.1 * torch.randn(17, *leaf.shape, generator=generator)  # noqa: E731
    models = tree.map(move, net.params)
    states = {"model": models, "number": torch.arange(17)}
    server = {"pool": torch.ones(17, dtype=torch.bool)}
    method = FedAMP(variant, sigma=sigma, share=16 / 17)
    read_others = lambda numbers: tree.take(states, torch.tensor(numbers))  # noqa: E731
    found = method.before_turn(server, states, read_others, torch.Generator())
    mean = tree.map(lambda leaf: leaf.mean(0).expand_as(leaf), models)
    assert_close(found["cloud"], mean, atol=1e-5)


def candidates(affinity, pool, i=0, explore=0.0, count=3, seed=0):
    given = torch.tensor(pool), torch.tensor(affinity), i, count, explore
    return choose_candidates(*given, torch.Generator().manual_seed(seed))


def test_fedfomo_candidates_are_those_of_largest_affinity_or_any():
    pool, affinity = [True] * 5 + [False], [9.0, 0.3, -1.0, 0.7, 0.0, 8.0]
    # Neither the client itself nor who did not train
    assert candidates(affinity, pool) == [3, 1, 4]
    assert candidates(affinity, pool, count=9) == [3, 1, 4, 2]
    drawn = [candidates(affinity, pool, explore=1.0, seed=seed) for seed in range(60)]
    assert all(sorted(set(own)) == sorted(own) and set(own) <= {1, 2, 3, 4} for own in drawn)
    assert {own[0] for own in drawn} == {1, 2, 3, 4}


def test_fedfomo_exploration_ends(net):
    """After six rounds of 0.3 - 0.05 t; the numbers that a client is sent do not depend on its
    cohort.
    """
    method, seen = FedFomo(candidates=1, explore=1.0, decay=0.5), []
    for played, wanted in ((0, False), (2, True)):
        server = {"pool": torch.ones(10, dtype=torch.bool), "played": torch.tensor(played)}
        affinity = torch.zeros(10, 10).index_fill(1, torch.tensor([7]), 1.0)
        model = net.params["fc.bias"].expand(10, -1)
        states = {"number": torch.arange(10), "affinity": affinity, "model": model}
        states |= {"statistics": {"main": {}}, "participated": torch.ones(10, dtype=torch.bool)}
        others = lambda numbers, states=states: tree.take(states, torch.tensor(numbers))  # noqa: E731
        for cohort in ([0, 1, 2, 3], [3, 0]):
            given = tree.take(states, torch.tensor(cohort))
            found = method.before_turn(server, given, others, torch.Generator().manual_seed(1))
            seen.append(dict(zip(cohort, found["sent"]["number"][:, 0].tolist(), strict=True)))
        assert seen[-1] == {i: seen[-2][i] for i in (3, 0)}
        assert (set(seen[-2].values()) == {7}) == wanted


def test_ifca_models_begin_with_the_same_numbers_in_another_order(net):
    models = make_initial_state(IFCA(clusters=3), net, 10, CPU).server["models"]
    assert_same(tree.take(models, 0), net.params)
    for leaf in models.values():
        flat = leaf.flatten(1)
        assert torch.equal(flat.sort(1).values, flat[:1].sort(1).values.expand(3, -1))
        assert (flat[0] != flat[1]).any()
