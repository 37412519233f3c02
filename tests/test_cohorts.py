"""Who takes part, in what order and with what: endowments, eligibility, turns, held-out data."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from fedpfl.engine import Store, begin, pick
from fedpfl.engine.keys import cohorts, generator
from fedpfl.methods import FedAvg, FedPer
from tests.conftest import COHORTS, CPU, assert_close, assert_same, participate, rounds, row, tiny, trajectory

EVERYONE = list(range(10))

# Endowments


@dataclass(frozen=True)
class Endowed(FedAvg):
    """Clients whose uploads are scaled by what they were given."""

    def init(self, params, parts):
        return params, {"share": torch.ones(()), "kept": params["fc.bias"]}

    def endow(self, generator, clients):
        return {"share": torch.rand(clients, generator=generator)}

    def finish(self, server, mine, start, end):
        return {name: value * mine["share"] for name, value in end.items()}, mine


@pytest.mark.parametrize("store", ["auto", "disk"])
def test_clients_begin_with_what_they_are_endowed(net, store, tmp_path):
    state = begin(Endowed(), net, 10, CPU, Store(store), tmp_path, seed=3)
    assert torch.equal(state.clients["share"], torch.rand(10, generator=generator(3, "endow")))
    assert torch.equal(state.clients["kept"], net.params["fc.bias"].expand(10, 12))
    assert not torch.equal(state.clients["share"], begin(Endowed(), net, 10, CPU, seed=4).clients["share"])


def test_an_endowment_is_the_clients_own(backend, net, federation):
    state = begin(Endowed(), net, 10, CPU)
    part, plain = (participate(m, net, federation, state, EVERYONE, engine=backend) for m in (Endowed(), FedAvg()))
    for client in EVERYONE:
        expected = {k: v * state.clients["share"][client] for k, v in row(plain.uploads, client).items()}
        assert_close(row(part.uploads, client), expected)


# Eligibility


@dataclass(frozen=True)
class OnlyOnce(FedAvg):
    """A client that trained is never drawn again."""

    def init(self, params, parts):
        return params, {"done": torch.zeros((), dtype=torch.bool)}

    def eligible(self, server, mine):
        return ~mine["done"]

    def finish(self, server, mine, start, end):
        return end, {"done": ~mine["done"]}


def test_the_planned_cohorts_are_played_while_everybody_is_eligible(net, federation):
    once, plain = (trajectory(m, net, federation, COHORTS[:1]) for m in (OnlyOnce(), FedAvg()))
    assert_same(once[-1].server, plain[-1].server)
    assert pick(OnlyOnce(), once[0], COHORTS[0], 0) == COHORTS[0]
    assert pick(FedAvg(), plain[-1], COHORTS[1], 0) == COHORTS[1]


def test_others_replace_those_who_are_out_and_the_run_ends_with_the_last(net, federation):
    planned = list(cohorts(0, 10, 0.4, 10))
    states, outcomes = rounds(OnlyOnce(), net, federation, planned)
    assert [len(outcome.loss) for outcome in outcomes] == [4, 4, 2]  # of ten clients, four at a time
    counts = [int(state.clients["done"].sum()) for state in states]
    assert counts == [0, 4, 8, 10]
    assert pick(OnlyOnce(), states[-1], planned[3], 0) == []


def test_the_draw_among_those_left_depends_on_seed_and_round_alone(net, federation):
    state = trajectory(OnlyOnce(), net, federation, [[0, 1]])[-1]
    draws = {tuple(pick(OnlyOnce(), state, [5, 6, 7], seed)) for seed in range(20)}
    assert pick(OnlyOnce(), state, [5, 6, 7], 1) == pick(OnlyOnce(), state, [2, 3, 4], 1)
    assert len(draws) > 5
    assert all(len(set(draw)) == 3 and not {0, 1} & set(draw) for draw in draws)
    later = dataclasses.replace(state, round=7)
    assert any(pick(OnlyOnce(), state, [5, 6, 7], s) != pick(OnlyOnce(), later, [5, 6, 7], s) for s in range(5))


# Turns


@dataclass(frozen=True)
class Travelling(FedAvg):
    """A model that goes from client to client."""

    sequential = True

    def measure(self, server, mine):
        return {"sum": server["fc.bias"].sum()}


@pytest.mark.parametrize("norm", [False, True])
def test_turns_are_rounds_of_one_client_each_in_a_drawn_order(backend, federation, norm):
    net, cohort = tiny(norm), [0, 2, 3, 5, 9]
    order = [cohort[i] for i in torch.randperm(5, generator=generator(0, "turns", 1)).tolist()]
    assert order != cohort
    (_, end), (outcome,) = rounds(Travelling(), net, federation, [cohort], engine=backend)
    state = begin(FedAvg(), net, 10, CPU)
    losses, correct = {}, {}
    for client in order:  # all in round 1, so that the minibatches are the same
        part = participate(FedAvg(), net, federation, state, [client], engine=backend)
        buffers = {role: row(part.buffers[role], 0) for role in state.server_buffers}
        state = dataclasses.replace(state, server=row(part.uploads, 0), server_buffers=buffers)
        losses[client], correct[client] = part.loss[0], part.after.correct[0]
    assert end.round == 1
    assert_same((end.server, end.server_buffers), (state.server, state.server_buffers))
    assert_same(outcome.loss, torch.stack([losses[client] for client in cohort]))
    assert_same(outcome.after.correct, torch.stack([correct[client] for client in cohort]))


def test_turns_are_told_and_paid_like_any_cohort(net, federation):
    _, (turns, together) = zip(
        *(rounds(m, net, federation, COHORTS[:1]) for m in (Travelling(), FedAvg())), strict=True
    )
    assert (turns[0].values_down, turns[0].bits_up) == (together[0].values_down, together[0].bits_up)
    assert turns[0].before.total.tolist() == together[0].before.total.tolist()
    assert turns[0].finite.tolist() == [True] * 5


# Held-out data


@dataclass(frozen=True)
class Validator(FedPer):
    """Reports its held-out samples' number and how many of them it gets right."""

    def validate(self, net, end, batch, server, mine):
        weight = torch.ones(len(batch.y)) if batch.weight is None else batch.weight
        hits = (net(end, batch.x).argmax(1) == batch.y).float() * weight
        return {"n": weight.sum(), "hits": hits.sum()}

    def finish(self, server, mine, start, end):
        upload, kept = super().finish(server, mine, start, end)
        return {"upload": upload, **mine["validation"]}, kept

    def merge(self, server, uploads, weight):
        return super().merge(server, uploads["upload"], weight)


@pytest.mark.parametrize("norm", [False, True])
def test_a_method_validates_on_the_test_split_where_nothing_is_held_out(backend, federation, norm):
    net = tiny(norm)
    state = begin(Validator(), net, 10, CPU)
    part = participate(Validator(), net, federation, state, EVERYONE, engine=backend)
    assert part.uploads["n"].tolist() == federation.test_sizes.tolist()
    assert part.uploads["hits"].tolist() == part.after.correct.tolist()


def test_a_method_validates_on_the_validation_split_where_there_is_one(backend, net, federation):
    held = tuple(own[: len(own) // 2] for own in federation.train)
    other = dataclasses.replace(federation, validation=held)
    state = begin(Validator(), net, 10, CPU)
    part = participate(Validator(), net, other, state, EVERYONE, engine=backend)
    assert part.uploads["n"].tolist() == [len(own) for own in held]
