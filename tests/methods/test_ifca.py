"""IFCA (arXiv:2006.04088): one cluster, equal ones, forced ones, empty ones; what travels."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import IFCA, FedAvg, LocalOnly
from tests.conftest import (
    COHORTS,
    CPU,
    assert_close,
    assert_same,
    find_eval_job,
    record_rounds,
    record_states,
    tiny,
)


@pytest.fixture(scope="module")
def played(net, federation):
    """Three rounds, computed once: nobody changes them."""
    return cache(
        lambda method, backend="loop": record_states(method, net, federation, engine=backend)
    )


@dataclass(frozen=True)
class Equal(IFCA):
    """All models begin as the first."""

    def init(self, params, parts):
        server, client = super().init(params, parts)
        return {**server, "models": tree.repeat(params, self.clusters)}, client


@dataclass(frozen=True)
class Forced(Equal):
    """Clients are in the cluster of their number's remainder."""

    def before_training(self, server, client, net, shard):
        cluster = client["number"] % self.clusters
        return {
            "cluster": cluster,
            "statistics": {"main": tree.take(server["statistics"], int(cluster))},
        }


def test_of_equal_models_clients_take_the_first(backend, played, net):
    """Nobody takes the others, which stay bit for bit; later the first may have become worse for
    somebody.
    """
    ours, theirs = (played(method, backend)[1].server for method in (Equal(clusters=3), FedAvg()))
    assert_same(tree.take(ours["models"], 0), theirs)
    for empty in (1, 2):
        assert_same(tree.take(ours["models"], empty), net.params)


def test_clusters_that_are_given_train_apart(backend, played, net, federation):
    """Each as FedAvg alone, and a cluster for each client as Local-Only."""
    for parity in (0, 1):
        cohorts = [[i for i in cohort if i % 2 == parity] for cohort in COHORTS]
        alone = record_states(FedAvg(), net, federation, cohorts, engine=backend)
        for ours, theirs in zip(played(Forced(), backend), alone, strict=True):
            assert_close(tree.take(ours.server["models"], parity), theirs.server)
    for ours, theirs in zip(
        played(Forced(clusters=10), backend), played(LocalOnly(), backend), strict=True
    ):
        assert_same(ours.server["models"], theirs.clients["model"])


def test_models_begin_with_the_same_numbers_in_another_order(net):
    models = make_initial_state(IFCA(clusters=3), net, 10, CPU).server["models"]
    assert_same(tree.take(models, 0), net.params)
    for name, leaf in models.items():
        flat = leaf.flatten(1)
        assert torch.equal(flat.sort(1).values, flat[:1].sort(1).values.expand(3, -1))
        assert (flat[0] != flat[1]).any()
        assert (flat[1] != flat[2]).any()
        assert name in net.params
    assert_same(
        make_initial_state(IFCA(clusters=4), net, 10, CPU).server["models"]["fc.weight"][:3],
        models["fc.weight"],
    )


def test_a_model_without_a_finite_loss_is_nobodys(net, federation):
    state = make_initial_state(IFCA(clusters=3), net, 10, CPU)
    for broken in (0, 1):
        state.server["models"]["fc.bias"][broken] = torch.nan
    assert_same(
        find_eval_job(IFCA(clusters=3), net, federation, state, 0).params,
        tree.take(state.server["models"], 2),
    )


def test_a_model_is_judged_by_its_own_statistics(federation):
    """Of equal models that whose statistics fit is taken."""
    method, net = Equal(), tiny(norm=True)
    trained = record_states(Equal(clusters=1), net, federation, [[0, 2, 4]] * 3)[-1].server
    for fits in (0, 1):
        state = make_initial_state(method, net, 10, CPU)
        state.server["models"].update(
            tree.map(lambda leaf: leaf.repeat(2, *[1] * (leaf.dim() - 1)), trained["models"])
        )
        wrong = state.server["statistics"]["norm.running_var"]
        wrong[1 - fits] = 1e6
        job = find_eval_job(method, net, federation, state, 4)
        assert_same(job.buffers["main"], tree.take(state.server["statistics"], fits))


@pytest.mark.parametrize(("layers", "down"), [(None, 2 * 549), (1, 549 + 65)])
def test_all_models_travel_down_and_one_up(layers, down, net, federation):
    outcome = record_rounds(IFCA(layers=layers), net, federation, COHORTS[:1])[1][0]
    assert (outcome.traffic.values_down, outcome.traffic.values_up) == (5 * down, 5 * 549)
    assert outcome.traffic.bits_up == 5 * (32 * 549 + 2)
