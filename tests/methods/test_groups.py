"""Methods whose clients have clusters, clouds, or each other, at the ends of their ranges."""

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import CFL, IFCA, FedAMP, FedFomo
from fedpfl.methods.shared.pool import choose_candidates
from fedpfl.testing.toy import CPU, tiny
from tests.conftest import assert_close, assert_same, find_eval_job, hold_out_quarter, record_states

# CFL (arXiv:1910.01991): when a cluster splits and where, by hand-made updates; newcomers.

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
        aggregated(CFL(gamma=1.0, **ROOM), pairs),
        aggregated(CFL(warmup=1), pairs),
        aggregated(CFL(warmup=0, clusters=1), pairs),
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


# FedAMP and HeurFedAMP (arXiv:2007.03797): the cloud model of many clients.


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


# FedFomo (arXiv:2012.08565): how candidates are chosen, and how long they are explored.


def candidates(affinity, pool, i=0, explore=0.0, count=3, seed=0):
    given = torch.tensor(pool), torch.tensor(affinity), i, count, explore
    return choose_candidates(*given, torch.Generator().manual_seed(seed))


def test_fedfomo_candidates_are_those_of_largest_affinity_or_any():
    pool, affinity = [True] * 5 + [False], [9.0, 0.3, -1.0, 0.7, 0.0, 8.0]
    # Neither the client itself nor who did not train
    assert candidates(affinity, pool) == [3, 1, 4]
    assert candidates(affinity, pool, count=9) == [3, 1, 4, 2]
    assert candidates(affinity, [False] * 6) == []
    drawn = [candidates(affinity, pool, explore=1.0, seed=seed) for seed in range(60)]
    assert all(sorted(set(own)) == sorted(own) and set(own) <= {1, 2, 3, 4} for own in drawn)
    assert {own[0] for own in drawn} == {1, 2, 3, 4}
    ties = [candidates([0.0] * 6, pool, count=1, seed=seed)[0] for seed in range(60)]
    assert set(ties) == {1, 2, 3, 4}


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


@pytest.mark.parametrize("fallback", ["baseline", "keep"])
def test_fedfomo_where_no_candidate_helps_a_client_falls_back(fallback, net, federation):
    """To where its last training began, or to what it has; weights below 0 are told as they are."""
    held, method = hold_out_quarter(federation), FedFomo(candidates=2, fallback=fallback)
    state = record_states(method, net, held, [[0, 2, 4]])[-1]
    client = state.client(2)
    old = client["old"]["model"]
    worse = tree.map(lambda leaf: -3 * leaf, old)
    numbers = torch.tensor([1, 3])
    candidates = {"model": tree.stack([worse, old]), "statistics": {}, "number": numbers}
    client |= {"model": worse, "sent": candidates, "there": torch.ones(2, dtype=torch.bool)}
    shard = make_shard(held, 2, 32, Draws(0, "train", 9))
    found = method.before_training(state.server, client, net.bind({"main": {}}, True), shard)
    assert_same(found["begun"]["model"], old if fallback == "baseline" else worse)
    assert found["gains"][2] == 0
    assert found["affinity"][1] < 0


# IFCA (arXiv:2006.04088): initial models, models that broke, statistics.


def test_ifca_models_begin_with_the_same_numbers_in_another_order(net):
    models = make_initial_state(IFCA(clusters=3), net, 10, CPU).server["models"]
    assert_same(tree.take(models, 0), net.params)
    for name, leaf in models.items():
        flat = leaf.flatten(1)
        assert torch.equal(flat.sort(1).values, flat[:1].sort(1).values.expand(3, -1))
        assert (flat[0] != flat[1]).any()
        assert (flat[1] != flat[2]).any()
        assert name in net.params
    more = make_initial_state(IFCA(clusters=4), net, 10, CPU).server["models"]
    assert_same(more["fc.weight"][:3], models["fc.weight"])


def test_ifca_a_model_without_a_finite_loss_is_nobodys(net, federation):
    state = make_initial_state(IFCA(clusters=3), net, 10, CPU)
    for broken in (0, 1):
        state.server["models"]["fc.bias"][broken] = torch.nan
    job = find_eval_job(IFCA(clusters=3), net, federation, state, 0)
    assert_same(job.params, tree.take(state.server["models"], 2))


def test_ifca_a_model_is_judged_by_its_own_statistics(federation):
    """Of equal models that whose statistics fit is taken."""
    method, net = IFCA(), tiny(norm=True)
    trained = record_states(IFCA(clusters=1), net, federation, [[0, 2, 4]] * 3)[-1].server
    for fits in (0, 1):
        state = make_initial_state(method, net, 10, CPU)
        state.server["models"] = tree.repeat(tree.take(trained["models"], 0), 2)
        wrong = state.server["statistics"]["norm.running_var"]
        wrong[1 - fits] = 1e6
        job = find_eval_job(method, net, federation, state, 4)
        assert_same(job.buffers["main"], tree.take(state.server["statistics"], fits))
