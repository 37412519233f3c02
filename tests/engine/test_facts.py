"""What the engine tells of clients beside their states, and what the server finds out before a
turn.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fedpfl.engine import FineTuning, make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.engine.store import RowStorage
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, MethodError
from fedpfl.methods import FedAvg
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    evaluate,
    next_round,
    participate,
    record_rounds,
    tiny,
)

EVERYONE = list(range(10))


@dataclass(frozen=True)
class Counting(FedAvg):
    """Each client keeps and shows the number that it is told."""

    def init(self, params, parts):
        assert (parts.clients, parts.classes) == (10, CLASSES)
        return params, {"told": torch.tensor(-1)}

    def finish(self, server, client, start, end):
        return end, {"told": client["number"]}

    def aggregate(self, server, clients, *rest):
        assert clients["number"].tolist() == clients["told"].tolist()
        assert not clients["newcomer"].any()
        return super().aggregate(server, clients, *rest)

    def personal(self, server, client):
        sign = torch.where(client["newcomer"], -1.0, 1.0)
        return tree.map(lambda leaf: leaf * 0 + sign * client["number"], server)


def test_every_hook_is_told_whom_it_is_about(backend, net, federation):
    states, _ = record_rounds(Counting(), net, federation, COHORTS[:1], engine=backend)
    told = [client if client in COHORTS[0] else -1 for client in EVERYONE]
    assert states[1].clients["told"].tolist() == told
    late = replace(
        states[1], rows=make_initial_state(Counting(), net, 10, CPU).rows, members=states[1].rows
    )
    known = late.client([0, 2])
    assert (known["number"].tolist(), known["newcomer"].tolist()) == ([10, 12], [True, True])
    assert float(Counting().personal(late.server, late.client(1))["fc.bias"][0]) == -11


@dataclass(frozen=True)
class Neighbours(FedAvg):
    """Each trains its own model, from the mean of it and that of the client after it, statistics
    included.
    """

    def init(self, params, parts):
        return {}, {"model": params}

    def buffers(self):
        return {"main": "local"}

    def before_turn(self, server, clients, others, generator):
        after = others([(int(number) + 1) % 10 for number in clients["number"]])
        pairs = ((own["model"], own["statistics"]) for own in (clients, after))
        mixed = [halfway(*pair) for pair in zip(*pairs, strict=True)]
        return {"mixed": mixed[0], "statistics": mixed[1]}

    def download(self, server, client):
        return client["mixed"]

    def finish(self, server, client, start, end):
        return {}, {"model": end}

    def aggregate(self, server, clients, *rest):
        return server, clients


def halfway(a, b):
    return tree.map(lambda one, other: (one + other) / 2 if one.is_floating_point() else one, a, b)


def test_the_server_is_asked_before_all_are_judged_too_and_of_newcomers(backend, federation):
    net, world = tiny(norm=True), federation.select_clients([0, 2, 4])
    state = record_rounds(Neighbours(), net, federation, COHORTS[:1], engine=backend)[0][-1]
    plain = make_initial_state(FedAvg(), net, 10, CPU)
    rows = make_initial_state(Neighbours(), net, 3, CPU).rows
    late = replace(state, rows=rows, members=state.rows)
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 1))
    for own, who, tuned in ((state, federation, None), (late, world, None), (late, world, tuning)):
        judged = evaluate(Neighbours(), net, who, own, backend, tuning=tuned)
        for number in range(who.clients):
            mine = own.client(number)
            after = state.client((int(mine["number"]) + 1) % 10)
            params = halfway(mine["model"], after["model"])
            statistics = halfway(mine["statistics"], after["statistics"])
            one = replace(plain, server=params, server_buffers=statistics)
            alone = evaluate(FedAvg(), net, who, one, backend, [number], tuning=tuned)
            assert_close(tree.take(judged, number), tree.take(alone, 0), atol=2e-5, rtol=1e-4)


def test_what_the_server_draws_before_a_turn_is_the_same_for_whatever_cohort(
    backend, net, federation
):
    drawn = []

    @dataclass(frozen=True)
    class Drawing(FedAvg):
        def before_turn(self, server, clients, others, generator):
            drawn.append(torch.rand(3, generator=generator))
            return {}

    state = make_initial_state(Drawing(), net, 10, CPU)
    for seed, cohort in ((0, [1, 2]), (0, [4]), (1, [1, 2])):
        next_round(Drawing(), net, federation, state, cohort, engine=backend, seed=seed)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_statistics_of_another_form_are_refused(backend, federation):
    @dataclass(frozen=True)
    class Wrong(FedAvg):
        def before_training(self, server, client, net, shard):
            return {"statistics": {"main": {}}}

    state = make_initial_state(Wrong(), tiny(norm=True), 10, CPU)
    told = r"statistics were found in another form than the network's, main.*is missing"
    with pytest.raises(MethodError, match=told):
        participate(Wrong(), tiny(norm=True), federation, state, [0], engine=backend)


def test_where_processes_store_their_own_clients_nobody_can_read_others(net):
    storage = RowStorage(is_stored_here=lambda client: True)
    told = r"Neighbours reads other clients' states .*; leave out state.sharded=true"
    with pytest.raises(FedpflError, match=told):
        make_initial_state(Neighbours(), net, 10, CPU, storage)


# Turns and phases without training


def test_a_client_may_have_nothing_to_train(backend, net, federation):
    @dataclass(frozen=True)
    class Idle(FedAvg):
        def phases(self, server, client, params, epochs):
            return []

        def finetuning(self, params, parts, epochs):
            return []

    states, (outcome, *_) = record_rounds(Idle(), net, federation, COHORTS[:1], engine=backend)
    assert_close(states[1].server, net.params, atol=1e-7)
    assert not states[1].client(EVERYONE)["trained"].any()
    assert not outcome.loss.any()
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 1))
    tuned, plain = (
        evaluate(Idle(), net, federation, states[1], backend, tuning=own) for own in (tuning, None)
    )
    assert_same(tuned, plain)


def test_a_trained_model_is_laid_out_as_one_never_trained(backend, net, federation):
    """Where an axis has one entry its stride may choose a convolution's kernel, and with it the
    last bits of a loss.
    """

    @dataclass(frozen=True)
    class Measured(FedAvg):
        def finish(self, server, client, start, end):
            trained, untrained = (map(Tensor.stride, tree.leaves(own)) for own in (end, net.params))
            assert [*trained] == [*untrained]
            return super().finish(server, client, start, end)

    assert 1 in net.params["conv.weight"].shape
    record_rounds(Measured(), net, federation, COHORTS[:1], engine=backend)
