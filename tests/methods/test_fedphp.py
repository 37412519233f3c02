"""FedPHP (ECML PKDD 2021): FedAvg as a limit bit for bit, what private models inherit, and the two
transfers.
"""

import dataclasses
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedAvg, FedPHP
from fedpfl.methods.fedphp import squared_mmd
from fedpfl.testing.toy import as_engine
from tests.conftest import (
    COHORTS,
    CPU,
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

UNSEEN = 7  # until round 3
TWICE = [[0, 2, 5], [0, 1, 2], [1, 2, 4]]


def method(**values):
    return FedPHP(participation=0.5, **values)


@cache
def played(backend, norm=False, **values):
    """The states of three rounds of eight, of which each client is expected to see four."""
    return record_states(
        method(**values), tiny(norm).with_facts(rounds=8), make_federation(), TWICE, engine=backend
    )


def features(seed, count=9):
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lam", [0.0, 0.3])
def test_without_momentum_the_private_model_is_the_last_local_one(lam, backend, federation):
    states = played(backend, lam=lam, momentum=0.0)
    for t, cohort in enumerate(TWICE):
        part = participate(
            method(lam=lam, momentum=0.0), tiny(), federation, states[t], cohort, engine=backend
        )
        for k, client in enumerate(cohort):
            assert_same(
                client_row(states[t + 1].clients["hpm"], client), client_row(part.uploads, k)
            )


def test_momentum_grows_with_the_clients_own_participations(backend, federation):
    """The first leaves nothing of the initial model, whenever it is: 0.9 / 4 and 1.8 / 4 stay of
    the next ones.
    """
    states = played(backend)
    for t, (client, past) in (
        (0, (2, 0)),
        (1, (2, 1)),
        (2, (2, 2)),
        (1, (1, 0)),
        (2, (1, 1)),
        (2, (4, 0)),
    ):
        part = participate(
            method(), tiny().with_facts(rounds=8), federation, states[t], TWICE[t], engine=backend
        )
        local, old = (
            client_row(part.uploads, TWICE[t].index(client)),
            client_row(states[t].clients["hpm"], client),
        )
        mu = 0.9 * past / 4
        wanted = tree.map(lambda q, w, mu=mu: mu * q + (1 - mu) * w, old, local)
        (assert_close if past else assert_same)(
            client_row(states[t + 1].clients["hpm"], client), wanted
        )
    assert states[-1].clients["count"].tolist() == [2, 2, 3, 0, 1, 1, 0, 0, 0, 0]
    assert_same(states[3].client(0)["hpm"], states[2].client(0)["hpm"])  # did not train in round 3


def test_momentum_ends_at_its_highest():
    known = {"expected": torch.tensor(4.0)}
    stays = [method().prepare(known, {"count": torch.tensor(float(n))})["mu"] for n in range(7)]
    assert_close(torch.stack(stays), torch.tensor([0, 0.225, 0.45, 0.675, 0.9, 0.9, 0.9]))


@pytest.mark.parametrize(
    ("participation", "rounds", "expected"), [(0.29, 100, 29), (0.5, 7, 3), (0.1, 3, 1)]
)
def test_the_expected_number_is_the_integer_part_and_at_least_one(participation, rounds, expected):
    net = tiny().with_facts(rounds=rounds)
    assert (
        FedPHP(participation=participation).init(net.params, net.parts)[0]["expected"] == expected
    )


@pytest.mark.parametrize("transfer", ["kd", "mmd"])
def test_at_lam_one_labels_do_not_matter(transfer, backend, federation):
    shuffled = dataclasses.replace(federation, y=federation.y.flip(0))
    states = [
        record_states(method(transfer=transfer, lam=1.0), tiny(), f, engine=backend)
        for f in (federation, shuffled)
    ]
    assert_same(*(own[-1].clients["hpm"] for own in states))
    assert differing(
        *(
            record_states(method(), tiny(), f, COHORTS[:1])[-1].server
            for f in (federation, shuffled)
        )
    )


def test_clients_are_judged_by_what_they_inherited(backend, federation):
    """Before training by the old one, after it by the new; who was never sampled by the global
    model.
    """
    for norm in (False, True):
        net = tiny(norm).with_facts(rounds=8)
        states, outcomes = record_rounds(
            method(momentum=1.0), net, federation, TWICE, engine=backend
        )
        runner = make_backend(as_engine(backend), net, CPU)
        for t, cohort in enumerate(TWICE):
            before, after = (
                runner.evaluate(EvalCall(method(momentum=1.0), federation, s, cohort))
                for s in states[t : t + 2]
            )
            assert_close(outcomes[t].before.loss, before.loss)
            assert_close(outcomes[t].after.loss, after.loss, atol=1e-4)
        mixed, fedavg = (
            states[1],
            record_states(FedAvg(), net, federation, TWICE[:1], engine=backend)[1],
        )
        held = {
            "server": mixed.server["model"],
            "server_buffers": {"main": mixed.server_buffers["w"]},
        }
        plain = runner.evaluate(
            EvalCall(FedAvg(), federation, dataclasses.replace(fedavg, **held), [UNSEEN, 4])
        ).loss
        assert_close(
            runner.evaluate(EvalCall(method(), federation, mixed, [UNSEEN, 4])).loss, plain
        )


def test_statistics_are_inherited_like_weights(backend, federation):
    net, states = tiny(norm=True).with_facts(rounds=8), played(backend, norm=True)
    part = participate(method(), net, federation, states[1], TWICE[1], engine=backend)
    old, new, local = (
        client_row(s["norm.running_mean"], place)
        for s, place in (
            (states[1].client_buffers["q"], 2),
            (states[2].client_buffers["q"], 2),
            (part.buffers["w"], 2),
        )
    )
    assert_close(new, 0.225 * old + 0.775 * local)
    counted = states[2].client_buffers["q"]["norm.num_batches_tracked"]
    assert counted[2] == part.buffers["w"]["norm.num_batches_tracked"][2]
    assert counted[UNSEEN] == 0


def test_the_distilled_target_has_a_temperature_and_the_student_none(net):
    """A constant teacher is a uniform target; the formula on any; the samples alone count, not the
    padding.
    """
    batch = Batch(
        torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 5
    )
    teachers = tiny(seed=2).params, tree.map(lambda leaf: leaf * 0, net.params)
    for teacher in teachers:
        client = {"hpm": teacher, "teacher": {}, "mu": torch.tensor(0.0)}

        def loss(count, weight=None, client=client):
            given = Batch(batch.x[:count], batch.y[:count], weight)
            return method(lam=0.7).loss(
                {}, client, net.bind({"w": {}, "q": {}}, True, weight), net.params, given
            )

        logits, wanted = (net.bind({})(params, batch.x[:4]) for params in (net.params, teacher))
        target = F.softmax(wanted / 4, 1)
        mixed = 0.3 * F.cross_entropy(logits, batch.y[:4]) + 0.7 * F.cross_entropy(logits, target)
        assert_close(loss(4), mixed)
        assert_close(loss(6, torch.tensor([1.0, 1, 1, 1, 0, 0])), mixed)
    assert (target == 0.2).all()


def test_the_discrepancy_is_none_between_equals_and_grows(net):
    f, g, ones = features(0), features(1) + 1, torch.ones(9)
    assert squared_mmd(f, f, ones).abs() < 1e-6
    assert grad(squared_mmd)(f, f.clone(), ones).abs().max() < 1e-6
    assert_close(squared_mmd(f, g, ones), squared_mmd(g, f, ones))
    assert 0.1 < squared_mmd(f, g, ones) < squared_mmd(f, g + 3, ones) <= 10
    assert grad(squared_mmd)(f, g, ones).abs().max() > 1e-3
    padded = [torch.cat([own, torch.zeros(3, 6)]) for own in (f, g)]
    assert_close(squared_mmd(*padded, torch.tensor([1.0] * 9 + [0.0] * 3)), squared_mmd(f, g, ones))
    assert_close(
        squared_mmd(100 * f, 100 * g, ones), squared_mmd(f, g, ones)
    )  # the width follows the batch
