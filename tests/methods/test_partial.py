"""FedRep, LG-FedAvg, FedBABU, FedBN and FedProx: what moves, what travels, and their limits."""

import dataclasses
from functools import cache

import pytest
import torch

from fedpfl import models
from fedpfl.engine import FineTuning, Local, make_backend, make_initial_state
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.traffic import count_traffic
from fedpfl.methods import FedAvg, FedBABU, FedBN, FedPer, FedProx, FedRep, LGFedAvg, LocalOnly
from tests.conftest import (
    COHORTS,
    CPU,
    HEAD,
    LOCAL,
    LOOP,
    assert_close,
    assert_same,
    client_row,
    differing,
    keep_quick,
    participate,
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


def body(params):
    return {name: value for name, value in params.items() if name not in HEAD}


# LG-FedAvg


def test_lg_fedavg_shares_what_fedper_keeps(net, federation):
    lg, per = (make_initial_state(method, net, 10, CPU) for method in (LGFedAvg(), FedPer()))
    shared, personal = set(lg.server), set(per.clients["head"])
    assert shared == personal == set(HEAD)
    assert set(lg.clients["own"]) | shared == set(net.params)


def test_published_sizes_of_what_lg_fedavg_and_fedrep_send():
    net = models.build_network("cnn4", (3, 32, 32), 10, 0)
    sent = {}
    for name, method in {
        "top": LGFedAvg(),
        "conv1": LGFedAvg(variant="as_published"),
        "fedrep": FedRep(),
        "fedbabu": FedBABU(),
    }.items():
        server, client = method.init(net.params, net.parts)
        sent[name] = int(count_traffic(method.download(server, client)).values)
    assert sent == {"top": 5_130, "conv1": 2_432, "fedrep": 873_408, "fedbabu": 873_408}


@pytest.mark.parametrize(
    "method", [LGFedAvg(), FedBN(), LocalOnly()], ids=lambda method: type(method).__name__
)
def test_statistics_of_batch_normalisation_stay_with_the_client(method, backend, federation):
    """After the first round they are those of the client's own training, which does not depend on
    who else plays.
    """
    net = tiny(norm=True)
    state = record_states(method, net, federation, COHORTS[:1], engine=backend)[-1]
    assert not state.server_buffers.get("main")
    for client in (0, 2):
        alone = record_states(FedAvg(), net, federation, [[client]], engine=backend)[-1]
        assert_close(client_row(state.client_buffers, client), alone.server_buffers)
    assert_same(client_row(state.client_buffers, 7), {"main": net.buffers})  # was not there


# FedRep and FedBABU


def test_fedrep_without_body_epochs_keeps_the_body(backend, net, federation):
    states = record_states(FedRep(body_epochs=0), net, federation, engine=backend)
    assert_close(states[-1].server, body(net.params), atol=1e-7)
    assert differing(
        client_row(states[-1].clients["own"], 2), {name: net.params[name] for name in HEAD}
    )


def test_fedreps_phases_hold_the_other_part_bit_for_bit(backend, net, federation):
    """Momentum and weight decay too: phase 1 alone leaves the body, phase 2 leaves the head that
    phase 1 made.
    """
    state = make_initial_state(FedRep(), net, 10, CPU)
    first = participate(
        FedRep(head_epochs=1, body_epochs=0), net, federation, state, [0, 2, 3], engine=backend
    )
    both = participate(
        FedRep(head_epochs=1, body_epochs=1), net, federation, state, [0, 2, 3], engine=backend
    )
    assert_same(first.uploads, tree.repeat(body(net.params), 3))
    assert_same(first.client_states["own"], both.client_states["own"])
    assert differing(both.uploads, first.uploads)


def test_fedbabus_head_never_moves(backend, net, federation):
    local = dataclasses.replace(LOCAL, weight_decay=0.1, momentum=0.9)
    for state in record_states(FedBABU(), net, federation, engine=backend, local=local):
        assert_same(state.server["head"], {name: net.params[name] for name in HEAD})


@pytest.mark.parametrize(
    ("base", "part"),
    [(FedBABU(), "all"), (FedBABU("head"), "head"), (FedBABU("body"), "body"), (FedRep(), "head")],
    ids=str,
)
def test_fine_tuning_moves_what_the_paper_says(base, part, played, net, federation):
    """FedRep retrains the head (arXiv:2102.07078), FedBABU what it is told. Seen through a method
    whose predictions are asked for after fine-tuning.
    """
    seen = []

    class Watched(type(base)):
        def predict(self, net, params, batch):
            if not net.training:
                seen.append({name: value.detach().clone() for name, value in params.items()})
            return super().predict(net, params, batch)

    method = Watched(**dataclasses.asdict(base))
    state = played(base)[-1]
    kept, client = tree.clone(state.server), state.client(2)
    make_backend(LOOP, net, CPU).evaluate(
        EvalCall(method, federation, state, [2], FineTuning(LOCAL, Draws(0, "finetune", 3)))
    )
    moved = {path.strip("/") for path in differing(seen[-1], method._begin(state.server, client))}
    assert (
        moved
        == {"all": set(net.params), "head": set(HEAD), "body": set(net.params) - set(HEAD)}[part]
    )
    assert_same(state.server, kept)


# FedBN


def test_fedbn_without_batch_normalisation_is_fedavg(backend, played):
    own, fedavg = (played(m, backend)[-1] for m in (FedBN(), FedAvg()))
    assert_same(own.server, fedavg.server)


def test_fedbn_shares_nothing_of_a_batch_norm_layer(federation):
    net = tiny(norm=True)
    part = participate(
        FedBN(), net, federation, make_initial_state(FedBN(), net, 10, CPU), COHORTS[0]
    )
    assert set(part.uploads) == set(net.params) - {"norm.weight", "norm.bias"}
    states = record_states(FedBN(), net, federation)
    assert states[-1].server_buffers == {}
    for t, cohort in enumerate(COHORTS):
        for client in set(range(10)) - set(cohort):
            for kept in ("clients", "client_buffers"):
                assert_same(
                    client_row(getattr(states[t], kept), client),
                    client_row(getattr(states[t + 1], kept), client),
                )


def test_fedbn_goes_by_type_and_leaves_group_normalisation_shared():
    batch, group = (
        models.build_network("resnet8", (1, 28, 28), 10, 0, norm=norm)
        for norm in ("batch", "group")
    )
    assert (
        len(FedBN()._personal(batch.parts)) == 2 * 9
    )  # seven in the blocks' paths and stem, two projections
    assert FedBN()._personal(group.parts) == ()
    assert group.parts.normalisation


# FedProx


def test_fedproxs_first_step_is_fedavgs_and_its_second_is_not(backend, net, federation):
    """The pull is zero at the model received; a reference to the live parameters would keep it
    zero.
    """
    one = Local(epochs=1, batch_size=512, lr=0.05)
    for local, same in ((one, True), (dataclasses.replace(one, epochs=2), False)):
        prox, plain = (
            record_states(m, net, federation, COHORTS[:1], engine=backend, local=local)[-1].server
            for m in (FedProx(mu=1.0), FedAvg())
        )
        assert (not differing(prox, plain)) == same


def test_more_pull_keeps_clients_nearer(net, federation):
    state = make_initial_state(FedAvg(), net, 10, CPU)

    def distance(mu):
        part = participate(FedProx(mu=mu), net, federation, state, COHORTS[0])
        return float(sum((u - net.params[name]).square().sum() for name, u in part.uploads.items()))

    distances = [distance(mu) for mu in (0.0, 0.1, 1.0, 5.0)]
    assert distances == sorted(distances, reverse=True)


def test_with_lr_times_mu_of_one_each_step_starts_from_the_model_received(net, federation):
    """W - lr (g + mu (w - r)) = r - lr g(w): the second step's result lies one gradient from the
    model received.
    """
    local = Local(epochs=2, batch_size=512, lr=0.05)
    once = dataclasses.replace(local, epochs=1)
    state = make_initial_state(FedAvg(), net, 10, CPU)
    after_one = participate(FedProx(mu=20.0), net, federation, state, [2], local=once).uploads
    after_two = participate(FedProx(mu=20.0), net, federation, state, [2], local=local).uploads
    there = dataclasses.replace(state, server=tree.take(after_one, 0))
    step = participate(FedAvg(), net, federation, there, [2], local=once).uploads
    expected = tree.map(
        lambda r, w, moved: r - (w - moved), net.params, tree.take(after_one, 0), tree.take(step, 0)
    )
    assert_close(tree.take(after_two, 0), expected, atol=1e-6)


@pytest.mark.parametrize(
    "method", keep_quick([LGFedAvg(), FedRep(), FedBABU(), FedProx(mu=0.5)]), ids=repr
)
def test_they_learn(method, net, federation):
    """Each beats its own beginning on what clients have seen."""
    _, outcomes = record_rounds(method, net, federation, COHORTS[:1] * 6)
    hits = [float(outcome.after.correct.sum()) for outcome in outcomes]
    assert hits[-1] >= hits[0]
    assert torch.stack([outcome.loss for outcome in outcomes]).mean(1)[-1] < outcomes[0].loss.mean()
