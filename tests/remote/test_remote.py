"""A federation in memory: every method as on the loop backend, bit for bit; nodes that fail are
left out by name.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch

from fedpfl.config.schema import Eval
from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Masked
from fedpfl.methods import METHODS, SEES, FedAvg, Method
from fedpfl.record import checkpoint
from fedpfl.remote import wire
from fedpfl.remote.download import NotSentError
from fedpfl.remote.node import Node, NodePolicy
from fedpfl.remote.schedule import Schedule
from fedpfl.remote.server import FederateSettings, InProcessGrid, RemoteBackend
from fedpfl.testing.toy import MethodTrial, tiny_federation
from tests.conftest import CPU, LOCAL, SETTINGS, assert_same, every_method
from tests.remote.grids import Overheard

KEY = {"configuration": "abc-seed0", "data": "123", "version": "1"}
ONE = replace(LOCAL, epochs=None, steps=1)
EVERY = Eval(every=1, finetune_epochs=0, finetune_every=1, finetune_part="all")
LOOP = Engine("loop", workers=1)
COHORTS = ((0, 2, 3), (0, 2, 5))
ALL = [0, 2, 3, 4, 5]
FOLDER = tempfile.TemporaryDirectory(prefix="nodes")

MORE = [
    *("apple", "feddbe", "fedgen", "fedproto", "fedrolex", "flexfl", "random_dropout", "seqfededt"),
    *("fedavg_by_kind", "fedtgp"),
]
"""The methods whose server needs no client states, and whose clients need more of the server than
they are sent.
"""

SOMETIMES = ("heterofl", "random_dropout")
"""The methods of which that depends on the setting; MORE tells of the default one."""


class Played:
    """Play rounds of a method on nodes in memory."""

    def __init__(self, method: Method, shares: bool = False, nodes: int = 2, **own):
        self.shares, self.method = shares, method
        self.net, self.federation = MethodTrial(method).net(norm=True), tiny_federation()
        made = {number: self.node(range(number, 6, nodes)) for number in range(nodes)}
        self.grid = InProcessGrid(made)
        own = FederateSettings(timeout=0.01, share_states=shares, **own)
        self.remote = RemoteBackend(self.net, LOOP, self.grid, KEY, self.first(), own)
        self.state = self.remote.select_local_state(self.first())

    def first(self):
        return make_initial_state(self.method, self.net, 6, CPU)

    def node(self, clients, folder=None, key=KEY) -> Node:
        backend = make_backend(LOOP, MethodTrial(self.method).net(norm=True), CPU)
        schedule = Schedule(RoundSetup(backend, self.method, self.federation, ONE, 0), 9, EVERY)
        folder = folder or Path(tempfile.mkdtemp(dir=FOLDER.name))
        return Node(schedule, key, clients, folder, NodePolicy(self.shares))

    def round(self, cohort):
        setup = RoundSetup(self.remote, self.method, self.federation, ONE, 0)
        self.state, outcome = play_round(setup, self.state, list(cohort))
        return outcome

    def judged(self):
        return judged(self.remote, self.method, self.state)


def judged(backend, method, state):
    adapt = FineTuning(ONE, Draws(0, "adapt", state.round))
    call = EvalCall(method, tiny_federation(), state, ALL, before_evaluation=adapt)
    return backend.evaluate_splits(call)


@cache
def in_one_place(method: Method, *cohorts: tuple[int, ...]):
    """What the loop backend makes of it: the state, the outcomes, and an evaluation in the end."""
    backend = make_backend(LOOP, MethodTrial(method).net(norm=True), CPU)
    setup = RoundSetup(backend, method, tiny_federation(), ONE, 0)
    state, outcomes = make_initial_state(method, backend.net, 6, CPU), []
    for cohort in cohorts:
        state, outcome = play_round(setup, state, list(cohort))
        outcomes.append(outcome)
    return state, outcomes, judged(backend, method, state)


@every_method(quick=("fedper", "fedobp", "scaffold"))
def test_every_method_as_on_the_loop_backend(name: str, values: dict):
    """With states at the nodes where that is all it needs, else with shared ones: that it needs
    more is found out by asking for what is not there, never by other numbers.
    """
    method = METHODS[name](**values)
    if method.pools_samples:
        return  # a federation refuses it: test_app.py
    state, outcomes, judgement = in_one_place(method, *COHORTS)
    played, shares = Played(method), False
    try:
        assert_played(played, outcomes, judgement)
    except (NotSentError, KeyError):
        played, shares = Played(method, shares=True), True
        assert_played(played, outcomes, judgement)
    if name not in SOMETIMES or values == SETTINGS[name][0]:
        assert shares == (name in MORE or method.server_sees == SEES[-1])
    assert_same(played.state.server, state.server)
    assert_same(played.state.server_buffers, state.server_buffers)
    if shares:
        assert_same(played.state.clients, state.clients)
    else:
        own = method.init_clients(6, torch.Generator())
        assert played.state.rows.initial["client"].keys() == own.keys()
        assert not played.state.rows.initial["buffers"]


def assert_played(played: Played, outcomes, judgement):
    for cohort, known in zip(COHORTS, outcomes, strict=True):
        outcome = played.round(cohort)
        for name in ("traffic", "metrics", "state_is_finite"):
            assert getattr(outcome, name) == getattr(known, name)
        for name in ("before", "after", "loss"):
            assert_same(getattr(outcome, name), getattr(known, name))
    assert_same(played.judged(), judgement)


# ---- nodes that fail


class Faulty(InProcessGrid):
    """Nodes of which one answers something else, to a greeting or to all other messages."""

    def __init__(
        self, there: InProcessGrid, node: int, fault: Callable[[bytes], object], hello: bool = False
    ):
        super().__init__(there.node_by_id)
        self._node, self._fault, self._hello = node, fault, hello

    def send_and_receive(self, messages, timeout):
        found = super().send_and_receive(messages, timeout)
        for place, (node, message) in enumerate(messages):
            is_greeting = wire.unpack_message(message)[0].get("wants") == "clients"
            if node == self._node and is_greeting == self._hello:
                found[place] = self._fault(found[place])
        return found


def changed(answer: bytes, change: Callable) -> bytes:
    about, found = wire.unpack_message(answer)
    return wire.pack_message(*change(about, found))


def test_a_node_comes_back_with_its_states(tmp_path):
    """Killed after a round and within one; the server goes back to its checkpoint, too."""
    method = METHODS["ditto"]()
    state, _, judgement = in_one_place(method, *[(0, 2, 3)] * 3)
    played = Played(method, nodes=1)

    def again():
        played.grid.node_by_id = {max(played.grid.node_by_id) + 1: played.node(range(6), tmp_path)}

    again()
    played.round([0, 2, 3])
    saved = copy.deepcopy(played.state)
    again()
    played.round([0, 2, 3])  # which the server forgets
    again()
    played.state = saved
    for _ in range(2):
        played.round([0, 2, 3])
    assert_same(played.state.server, state.server)
    assert_same(played.judged(), judgement)
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt")}
    assert kept == {f"client{client}/round{number}.pt" for client in (0, 2, 3) for number in (2, 3)}
    shown = checkpoint.load_checkpoint(tmp_path / "client3" / "round3.pt")["row"]
    assert tree.specs(shown) == tree.specs(state.rows.initial)
    assert_same(shown["client"], tree.take(state.clients, 3))


def test_a_run_that_begins_anew_finds_no_states(tmp_path):
    """Those of clients that take no part this time are forgotten, too."""
    method = METHODS["ditto"]()
    for cohorts in ([[0, 4], [0, 4]], [[0, 2], [0, 2]]):
        played = Played(method, nodes=1)
        played.grid.node_by_id = {0: played.node(range(6), tmp_path)}
        for cohort in cohorts:
            played.round(cohort)
    assert_same(played.judged(), in_one_place(method, (0, 2), (0, 2))[2])


@dataclass(frozen=True)
class Peeks(FedAvg):
    """Sends a half, and is held by the whole."""

    def download(self, server, client):
        places = tree.map(lambda leaf: torch.arange(leaf.numel()).view(leaf.shape), server)
        return Masked(server, tree.map(lambda place: place % 2 == 0, places))

    def loss(self, server, client, net, params, batch):
        own = super().loss(server, client, net, params, batch)
        return own + tree.squared_distance(params, server)


def test_what_is_not_sent_is_no_number(caplog):
    """In round 1 clients know the server's model from the beginning."""
    played = Played(Peeks())
    played.round([0, 2])
    with pytest.raises(FedpflError, match="or the method reads what it is not sent"):
        played.round([0, 2])
    assert "numbers that are not finite" in caplog.text


# ---- what travels


def test_nothing_travels_but_what_is_sent():
    """FedPer's heads stay where they are: no message has a tensor of a head's size, nor bytes for
    one.
    """
    method = METHODS["fedper"]()
    played = Played(method, nodes=1)
    grid = played.remote._grid = Overheard(played.grid.node_by_id)
    for cohort in COHORTS:
        played.round(cohort)
    played.judged()
    heads = {leaf.shape for leaf in played.first().rows.initial["client"]["head"].values()}
    assert len(grid.exchanges) > 10
    for message in [*grid.requests, *grid.replies]:
        assert not heads & {leaf.shape for leaf in tree.leaves(wire.unpack_message(message)[1])}
    assert max(map(len, grid.replies)) < 3 * 549 * 4
