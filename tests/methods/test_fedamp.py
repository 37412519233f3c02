"""FedAMP and HeurFedAMP (arXiv:2007.03797): message weights by hand, limits, and that the cloud
model has a pull.
"""

from functools import cache

import pytest
import torch

from fedpfl.engine import make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import FedAMP, FedAvg, LocalOnly
from tests.conftest import (
    COHORTS,
    CPU,
    PLAIN,
    assert_close,
    assert_same,
    client_row,
    differing,
    make_federation,
    record_rounds,
    record_states,
)

VARIANTS = pytest.mark.parametrize("variant", ["fedamp", "heurfedamp"])


@pytest.fixture(scope="module")
def played(net, federation):
    """Three rounds, computed once: nobody changes them."""
    return cache(
        lambda method, backend="loop": record_states(method, net, federation, engine=backend)
    )


def clouds(method, models, numbers=None):
    """The cloud models of clients `numbers` (all), by the models `[clients, ...]` of all."""
    count = len(tree.leaves(models)[0])
    states = {"model": models, "number": torch.arange(count)}
    server = {"pool": torch.ones(count, dtype=torch.bool)}
    others = lambda numbers: tree.take(states, torch.tensor(numbers))  # noqa: E731
    given = tree.take(states, torch.tensor(numbers or range(count)))
    return method.before_turn(server, given, others, torch.Generator())


@pytest.fixture(scope="module")
def models(net):
    """Seventeen, more than the server looks at at once."""
    generator = torch.Generator().manual_seed(0)
    return tree.map(
        lambda leaf: leaf + 0.1 * torch.randn(17, *leaf.shape, generator=generator), net.params
    )


@VARIANTS
def test_with_a_pull_it_is_not(variant, backend, played):
    """From the second participation on: a penalty without a gradient made PLAIN FedAMP Local-Only
    in PFLlib.
    """
    own, local = (played(m, backend) for m in (FedAMP(variant, sigma=0.3, pull=1.0), LocalOnly()))
    assert_same(own[1].clients["model"], local[1].clients["model"])
    for again, first in ((2, 1), (2, 8)):
        mine, theirs = (client_row(states[2].clients["model"], first) for states in (own, local))
        assert_same(mine, theirs)
        mine, theirs = (client_row(states[2].clients["model"], again) for states in (own, local))
        assert len(differing(mine, theirs)) == 6


def test_message_weights_by_hand():
    """Two numbers a model: distances 1, 4 and 5."""
    models = {"w": torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]])}
    alpha, e = 0.8 * 2.0 / 2, torch.tensor([1.0, 4.0]).div(-2.0).exp() / 2.0
    found = clouds(FedAMP(sigma=2.0, share=0.8), models)
    assert_close(found["cloud"]["w"][0], alpha * e * torch.tensor([1.0, 2.0]))
    assert_close(found["others_share"][0], alpha * e.sum())
    models = {"w": torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 4.0]])}
    e = torch.tensor([1.0, 0.6]).mul(2.0).exp()
    found = clouds(FedAMP("heurfedamp", sigma=2.0, share=0.8), models, [0])
    first = 0.2 * models["w"][0] + 0.8 * (e / e.sum()) @ models["w"][1:]
    assert_close(found["cloud"]["w"][0], first)
    assert_close(found["others_share"], torch.tensor([0.8]))


@VARIANTS
def test_limits_of_the_cloud_model(variant, models):
    mean, share = tree.map(lambda leaf: leaf.mean(0).expand_as(leaf), models), 16 / 17
    assert_same(clouds(FedAMP(variant, share=0.0), models)["cloud"], models)
    flat = FedAMP(variant, sigma=1e9 if variant == "fedamp" else 1e-9, share=share)
    assert_close(clouds(flat, models)["cloud"], mean, atol=1e-5)
    if variant == "fedamp":
        assert_same(clouds(FedAMP(sigma=1e-3), models)["cloud"], models)
    else:
        scaled = clouds(FedAMP(variant, sigma=20.0), tree.map(lambda leaf: 3.0 * leaf, models))[
            "cloud"
        ]
        assert_close(
            scaled,
            tree.map(lambda leaf: 3.0 * leaf, clouds(FedAMP(variant, sigma=20.0), models)["cloud"]),
        )
    same = tree.map(lambda leaf: leaf[:1].expand_as(leaf), models)
    assert_close(clouds(FedAMP(variant), same)["cloud"], same)
    for name, cloud in clouds(FedAMP(variant, sigma=5.0, share=1.0), models)["cloud"].items():
        assert (cloud <= models[name].amax(0) + 1e-6).all()
        assert (cloud >= models[name].amin(0) - 1e-6).all()


def test_the_first_step_from_the_cloud_model_feels_no_pull(net, federation):
    """The penalty's gradient is 0 there; elsewhere it is not."""
    both = [record_states(FedAMP(sigma=0.3, pull=pull, start_from="cloud"), net, federation, [[0, 2], [0, 2]], local=PLAIN)
            for pull in (0.0, 3.0)]  # fmt: skip
    assert_same(both[0][-1].clients["model"], both[1][-1].clients["model"])


def test_the_uniform_cloud_is_fedavg(net):
    """Full participation, equal clients, and training from the cloud model."""
    equal, cohorts = make_federation((16,) * 4, (4,) * 4), [[0, 1, 2, 3]] * 3
    own = FedAMP("heurfedamp", sigma=1e-9, share=0.75, pull=0.0, start_from="cloud")
    own, other = (record_states(m, net, equal, cohorts) for m in (own, FedAvg()))
    for ours, theirs in zip(own[1:], other[1:], strict=True):
        assert_close(tree.map(lambda leaf: leaf.mean(0), ours.clients["model"]), theirs.server)


def test_a_cloud_model_travels_from_the_second_participation_on(net, federation):
    sent = [outcome.traffic for outcome in record_rounds(FedAMP(), net, federation, COHORTS)[1]]
    assert [own.values_down for own in sent] == [0, 549, 549 * 4]
    assert [own.values_up for own in sent] == [5 * 549] * 3
    assert [own.bits_down for own in sent] == [32 * own.values_down for own in sent]
    assert record_rounds(FedAMP(pull=0.0), net, federation, COHORTS)[1][2].traffic.values_down == 0


def test_the_pool_is_of_all_or_of_the_last_round(net, federation):
    for pool, members in (("all", set(range(10)) - {7}), ("last_round", set(COHORTS[1]))):
        state = record_states(FedAMP(pool=pool), net, federation, COHORTS[:2])[-1]
        assert set(state.server["pool"].nonzero()[:, 0].tolist()) == members
    assert not make_initial_state(FedAMP(), net, 10, CPU).server["pool"].any()
