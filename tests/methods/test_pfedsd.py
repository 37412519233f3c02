"""pFedSD: the exact tests of its specification."""

import dataclasses
from functools import cache

import torch
import torch.nn.functional as F
from torch.func import grad

from fedpfl.engine import Local, make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedAvg, PFedSD
from fedpfl.methods.pfedsd import kl_divergence
from tests.conftest import (
    COHORTS,
    CPU,
    assert_close,
    assert_same,
    client_row,
    differing,
    make_federation,
    participate,
    record_states,
    tiny,
    with_client_states,
)

UNSEEN = 7  # until round 3
ONE = Local(epochs=1, batch_size=512, lr=0.05)


class Averaging(FedAvg):
    """FedAvg whose statistics stay with the clients."""

    def buffers(self):
        return {"main": "local"}


@cache
def played(backend, norm=False):
    """The states of three rounds."""
    return record_states(PFedSD(), tiny(norm), make_federation(), engine=backend)


# The divergence


def logits(seed, count=6):
    return 3 * torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))


def test_the_divergence_is_forward_and_one_per_sample():
    teacher, student = logits(0), logits(1)
    wanted = F.kl_div(
        F.log_softmax(student / 2, 1), F.softmax(teacher / 2, 1), reduction="none"
    ).sum(1)
    assert_close(kl_divergence(teacher, student, 2.0), wanted)
    assert abs(kl_divergence(student, teacher, 2.0) - wanted).min() > 0.01
    assert not kl_divergence(teacher, teacher, 2.0).any()


def test_scaling_logits_and_temperature_changes_nothing():
    teacher, student = logits(0), logits(1)
    for scale in (0.5, 3.0):
        assert_close(
            kl_divergence(scale * teacher, scale * student, 2 * scale),
            kl_divergence(teacher, student, 2.0),
        )
    away = kl_divergence(3 * teacher, 3 * student, 2.0) - kl_divergence(teacher, student, 2.0)
    assert abs(away).min() > 0.01


def test_the_loss_is_the_formula_over_the_samples_that_are_no_padding(federation):
    """Cross-entropy + lam tau^2 times the mean divergence, without statistics."""
    net, method = tiny(), PFedSD(lam=0.7, tau=2.0)
    client = {
        "teacher": tiny(seed=2).params,
        "teacher_buffers": {},
        "participated": torch.tensor(True),
    }
    x, y = federation.normalize(federation.x[:6]), federation.y[:6]
    weight = torch.tensor([1.0, 1, 1, 1, 0, 0])

    def loss(count, weight=None):
        batch = Batch(x[:count], y[:count], weight)
        return method.loss(net.params, client, net.bind({}, True, weight), net.params, batch)

    student, teacher = (net.bind({})(params, x) for params in (net.params, client["teacher"]))
    apart = F.kl_div(
        F.log_softmax(student / 2, 1), F.softmax(teacher / 2, 1), reduction="none"
    ).sum(1)
    for count in (4, 6):
        assert_close(
            loss(count),
            F.cross_entropy(student[:count], y[:count]) + 0.7 * 4 * apart[:count].mean(),
        )
    assert_close(loss(6, weight), loss(4))
    assert abs(loss(6) - loss(4)) > 1e-3


# Limits


def test_who_trains_first_has_no_teacher(backend, net, federation):
    """Round 2 is the first in which somebody has one."""
    own, fedavg = (
        played(backend),
        record_states(FedAvg(), net, federation, COHORTS[:2], engine=backend),
    )
    (assert_same if backend == "loop" else assert_close)(own[1].server, fedavg[1].server)
    assert differing(own[2].server, fedavg[2].server)
    part, plain = (
        participate(m, net, federation, dataclasses.replace(make_initial_state(m, net, 10, CPU), server=own[1].server), [1, 4],
                    engine=backend)
        for m in (PFedSD(), FedAvg())
    )  # fmt: skip
    (assert_same if backend == "loop" else assert_close)(part.uploads, plain.uploads)


def test_a_teacher_equal_to_the_student_has_no_pull(net, federation):
    """One client, no change: divergence 0, and the gradient that of cross-entropy; further on there
    is one.
    """
    method, bound = PFedSD(), net.bind({"main": {}}, training=True)
    batch = Batch(
        torch.randn(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 5
    )
    client = {"teacher": net.params, "teacher_buffers": {}, "participated": torch.tensor(True)}

    def loss(params):
        return method.loss(net.params, client, bound, params, batch)

    def plain(params):
        return F.cross_entropy(bound(params, batch.x), batch.y)

    assert loss(net.params) == plain(net.params)
    assert_close(grad(loss)(net.params), grad(plain)(net.params), atol=1e-7)
    away = tree.map(lambda leaf: leaf + 0.1, net.params)
    assert loss(away) > plain(away)
    assert differing(grad(loss)(away), grad(plain)(away))


def test_the_first_step_of_one_clients_second_round_is_fedavgs(backend):
    """Under BatchNorm if the teacher uses the minibatch's statistics too."""
    federation = make_federation((40,), (8,))
    for net, teacher in ((tiny(), "eval"), (tiny(norm=True), "train")):
        for local, close in ((ONE, True), (dataclasses.replace(ONE, epochs=2), False)):
            own, fedavg = (
                record_states(m, net, federation, [[0]] * 2, engine=backend, local=local)[-1].server
                for m in (PFedSD(lam=5.0, teacher=teacher), Averaging())
            )
            gap = max(float((own[name] - fedavg[name]).abs().max()) for name in own)
            assert gap < 1e-6 if close else gap > 1e-5


# Teachers


def test_the_teacher_is_the_clients_last_model_and_stays_that_of_its_last_training(
    backend, net, federation
):
    method, states = PFedSD(), played(backend)
    part = participate(method, net, federation, states[1], COHORTS[1], engine=backend)
    for k, client in enumerate(COHORTS[1]):
        model = method.personal(states[2].server, states[2].client(client))
        assert_same(model, client_row(part.uploads, k))
    assert_same(states[3].client(2), states[2].client(2))  # who did not train in round 3
    assert_same(method.personal(states[2].server, states[2].client(UNSEEN)), net.params)
    assert states[2].client(range(10))["participated"].tolist() == [
        client != UNSEEN for client in range(10)
    ]


def test_a_teachers_passes_count_nothing(backend):
    counted = (
        played(backend, norm=True)[-1].client_buffers["main"]["norm.num_batches_tracked"].tolist()
    )
    assert counted[2] == 2 * 2 * 2  # two rounds of two epochs of two batches
    assert counted[9] == 0


def test_a_teacher_judges_by_its_own_statistics_or_by_the_minibatchs(backend, federation):
    """The statistics that the client's last training left, however far training has moved them
    since.
    """
    net = tiny(norm=True)
    state = played(backend, norm=True)[2]
    moved = {"main": {**state.client_buffers["main"]}}
    moved["main"]["norm.running_mean"] = moved["main"]["norm.running_mean"] + 1
    for teacher in ("eval", "train"):
        method = PFedSD(teacher=teacher)
        one, other = (
            participate(method, net, federation, s, [2], engine=backend)
            for s in (state, with_client_states(state, buffers=moved))
        )
        assert bool(differing(one.uploads, other.uploads)) == (teacher == "eval")
    assert set(state.client_buffers) == {"main"}
    assert state.server_buffers == {}
