"""Clients that are evaluated together because they have one model in common.

Each has the numbers that it has alone, bit for bit, and nobody is judged by another's model.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fedpfl.engine import FineTuning, RoundSetup, make_backend, make_initial_state, play_round
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shared_model import find_shared_model
from fedpfl.ground import tree
from fedpfl.methods import LONGEST_CHUNK, METHODS, FedAvg
from fedpfl.models import Net
from tests.conftest import (
    CPU,
    LOCAL,
    as_engine,
    assert_close,
    assert_same,
    hold_out_quarter,
    make_federation,
    tiny,
)

SIZES = (3, 1, 0, 2, 600, 17, 40, 5, 18, 1, 256, 2, 2)
CLIENTS = list(range(len(SIZES)))
COHORT = [1, 3, 6]


@pytest.fixture(scope="module")
def various():
    """Clients of very different sizes, with validation samples and classes that do not count."""
    federation = hold_out_quarter(make_federation(tuple(8 + size % 9 for size in SIZES), SIZES))
    excluded = torch.arange(federation.classes) == torch.arange(len(SIZES))[:, None] % 4
    return replace(federation, excluded_classes=excluded)


def play_once(method, net, federation, engine="loop"):
    """Return a backend, and the state after a round of COHORT."""
    backend = make_backend(as_engine(engine), net, CPU)
    state = make_initial_state(method, net, federation.clients, CPU)
    setup = RoundSetup(backend, method, federation, LOCAL, 0)
    return backend, play_round(setup, state, COHORT)[0]


def evaluate_alone(backend, call):
    """Return the numbers of the call's clients, each evaluated alone."""
    alone = [backend.evaluate(replace(call, clients=[client])) for client in call.clients]
    return tree.map(lambda *leaves: torch.cat(leaves), *alone)


@pytest.mark.parametrize("name", ["fedavg", "fedper", "fedbabu", "fedobp"])
def test_each_client_has_its_numbers_of_being_alone(name, net, various):
    method = METHODS[name](**{"q": 0.5} if name == "fedobp" else {})
    backend, state = play_once(method, net, various)
    everybody = various.merge_clients(4)
    call = EvalCall(method, various, state, CLIENTS[::-1], common_federation=everybody)
    together = backend.evaluate_splits(call)
    for row, client in enumerate(call.clients):
        alone = backend.evaluate_splits(replace(call, clients=[client]))
        assert find_shared_model(replace(call, clients=[client]), net) is None
        assert_same(alone, tree.take(together, slice(row, row + 1)))


@pytest.mark.parametrize("outputs", [1, 10])
def test_the_rows_of_its_products_are_alike_together_and_alone(outputs, various):
    first, last = nn.Linear(various.x[0].numel(), 512), nn.Linear(512, outputs)
    nn.init.normal_(last.weight)  # small outputs would hide a bit in the loss
    net = Net(nn.Sequential(nn.Flatten(), first, nn.ReLU(), last))
    labels = various.y.float() if outputs == 1 else various.y
    federation = replace(various, y=labels, excluded_classes=None)
    backend = make_backend(as_engine("loop"), net, CPU)
    state = make_initial_state(FedAvg(), net, len(SIZES), CPU)
    call = EvalCall(FedAvg(), federation, state, CLIENTS)
    assert_same(evaluate_alone(backend, call), backend.evaluate(call))


def test_statistics_that_stay_at_clients_keep_those_apart_that_took_part(various):
    norm_net = tiny(True)
    method = METHODS["fedavg"](statistics="local")
    backend, state = play_once(method, norm_net, various)
    call = EvalCall(method, various, state, CLIENTS)
    shared = find_shared_model(call, norm_net)
    assert shared is not None
    assert shared.other_clients == COHORT
    assert_same(evaluate_alone(backend, call), backend.evaluate(call))


def test_many_clients_on_the_batched_backend_have_loops_numbers(net):
    federation = make_federation((4,) * 300, tuple(number % 7 for number in range(300)))
    backend, state = play_once(METHODS["fedper"](), net, federation)
    call = EvalCall(METHODS["fedper"](), federation, state, list(range(300)))
    batched = make_backend(as_engine("batched"), net, CPU)
    assert_close(batched.evaluate(call), backend.evaluate(call))


def test_passes_hold_all_samples_once_and_few_at_a_time(net, various):
    call = EvalCall(FedAvg(), various, make_initial_state(FedAvg(), net, 13, CPU), CLIENTS)
    passes = [one for one in find_shared_model(call, net).passes if one.split == "test"]
    assert [client for one in passes for client in one.clients] == CLIENTS
    for one in passes:
        assert len(one.clients) == 1 or sum(map(len, one.samples)) <= LONGEST_CHUNK


# ---- who has a model in common


class _Curious(FedAvg):
    """Looks at the client's state in some way, which makes no difference here."""

    def personal(self, server, client):
        self._look(client)
        return server


def _look_bravely(client):
    try:
        return client["number"]
    except Exception:
        return None


LOOKS = {
    "reads": lambda client: client["trained"],
    "reads if there": _look_bravely,
    "asks if there": lambda client: "trained" in client,
    "unpacks": lambda client: {**client},
    "asks its kind": lambda client: isinstance(client, dict),
    "takes if any": lambda client: client or {},
    "maps": lambda client: tree.map(torch.clone, client),
    "lists": lambda client: list(client.items()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_model_is_everybodys_only_where_the_client_is_not_looked_at(look, net, various):
    method_type = type("Curious", (_Curious,), {"_look": staticmethod(LOOKS[look])})
    _, state = play_once(FedAvg(), net, various)
    shared = find_shared_model(EvalCall(FedAvg(), various, state, CLIENTS), net)
    assert shared.clients == CLIENTS
    curious = find_shared_model(EvalCall(method_type(), various, state, CLIENTS), net)
    # In the initial state all are alike but for their numbers.
    assert curious is None or curious.other_clients == COHORT


def test_a_client_that_goes_by_its_number_has_a_model_of_its_own(net, various):
    @dataclass(frozen=True)
    class Numbered(FedAvg):
        def personal(self, server, client):
            return tree.map(lambda leaf: leaf * (1 + client["number"] / 10), server)

    backend, state = play_once(FedAvg(), net, various)
    call = EvalCall(Numbered(), various, state, CLIENTS)
    assert find_shared_model(call, net) is None
    third = replace(state, server=Numbered().personal(state.server, {"number": 3}))
    expected = backend.evaluate(EvalCall(FedAvg(), various, third, [3]))
    assert_same(expected, tree.take(backend.evaluate(call), slice(3, 4)))


def test_nobody_shares_a_model_that_is_fine_tuned(net, various):
    state = make_initial_state(FedAvg(), net, various.clients, CPU)
    call = EvalCall(FedAvg(), various, state, CLIENTS)
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 1))
    assert find_shared_model(replace(call, tuning=tuning), net) is None
    assert find_shared_model(replace(call, overlay={"x": torch.zeros(13)}), net) is None
