"""Who takes part, in what order and with what: clients that differ from the beginning, turns."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from fedpfl.engine import Store, make_initial_state
from fedpfl.engine.keys import generator
from fedpfl.engine.store import RowStorage
from fedpfl.methods import FedAvg, Turn
from tests.conftest import (
    CPU,
    assert_close,
    assert_same,
    client_row,
    participate,
    record_rounds,
    tiny,
)

EVERYONE = list(range(10))


@dataclass(frozen=True)
class Scaled(FedAvg):
    """Clients whose uploads are scaled by what they have from the beginning."""

    def init(self, params, parts):
        return params, {"share": torch.ones(()), "kept": params["fc.bias"]}

    def init_clients(self, clients, generator):
        return {"share": torch.rand(clients, generator=generator)}

    def finish(self, server, client, start, end):
        return {name: value * client["share"] for name, value in end.items()}, client


@pytest.mark.parametrize("store", ["auto", "disk"])
def test_clients_begin_with_what_init_clients_gives_them(net, store, tmp_path):
    state = make_initial_state(Scaled(), net, 10, CPU, RowStorage(Store(store), tmp_path), seed=3)
    assert torch.equal(state.clients["share"], torch.rand(10, generator=generator(3, "endow")))
    assert torch.equal(state.clients["kept"], net.params["fc.bias"].expand(10, 12))
    assert not torch.equal(
        state.clients["share"], make_initial_state(Scaled(), net, 10, CPU, seed=4).clients["share"]
    )


def test_what_a_client_has_from_the_beginning_is_its_own(backend, net, federation):
    state = make_initial_state(Scaled(), net, 10, CPU)
    part, plain = (
        participate(m, net, federation, state, EVERYONE, engine=backend)
        for m in (Scaled(), FedAvg())
    )
    for client in EVERYONE:
        expected = {
            k: v * state.clients["share"][client]
            for k, v in client_row(plain.uploads, client).items()
        }
        assert_close(client_row(part.uploads, client), expected)


@dataclass(frozen=True)
class Travelling(FedAvg):
    """A model that goes from client to client."""

    def turns(self, played, cohort, clients, generator):
        return [
            Turn([cohort[i]]) for i in torch.randperm(len(cohort), generator=generator).tolist()
        ]


def test_turns_are_rounds_of_one_client_each_in_a_drawn_order(backend, federation):
    net, cohort = tiny(norm=True), [0, 2, 3, 5, 9]
    order = [cohort[i] for i in torch.randperm(5, generator=generator(0, "turns", 1)).tolist()]
    assert order != cohort
    (_, end), (outcome,) = record_rounds(Travelling(), net, federation, [cohort], engine=backend)
    state = make_initial_state(FedAvg(), net, 10, CPU)
    losses, correct = {}, {}
    for client in order:  # all in round 1, so that the minibatches are the same
        part = participate(FedAvg(), net, federation, state, [client], engine=backend)
        buffers = {role: client_row(part.buffers[role], 0) for role in state.server_buffers}
        state = dataclasses.replace(
            state, server=client_row(part.uploads, 0), server_buffers=buffers
        )
        losses[client], correct[client] = part.loss[0], part.after.correct[0]
    assert end.round == 1
    assert_same((end.server, end.server_buffers), (state.server, state.server_buffers))
    assert_same(outcome.loss, torch.stack([losses[client] for client in cohort]))
    assert_same(outcome.after.correct, torch.stack([correct[client] for client in cohort]))
