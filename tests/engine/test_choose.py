"""engine=auto on a GPU, tried with backends on a CPU: the fastest that agrees answers, as if it had
been alone.
"""

import importlib
import logging
from dataclasses import replace

import pytest
import torch

from fedpfl.engine import Engine, Local, make_backend, make_initial_state
from fedpfl.engine.backends.autotune import (
    TOLERANCE,
    AutotunedBackend,
    answer_distance,
    candidate_engines,
    choose_backend,
)
from fedpfl.engine.backends.backend import Backend
from fedpfl.ground import tree
from fedpfl.methods import METHODS, FedAvg
from tests.conftest import CASES, COHORTS, CPU, LOCAL, assert_same, keep_quick, participate, tiny
from tests.engine.test_program import play_on

choosing = importlib.import_module("fedpfl.engine.backends.autotune")
GRAPHS, EAGER, LOOP = candidate_engines(Engine(precision="fp32"))


class Played(Backend):
    """A backend that takes some time on a clock of its own kind and may answer wrongly."""

    clock = 0.0

    def __init__(self, engine, net, seconds=0.1, change=lambda answers: answers):
        self._own = make_backend(replace(engine, graphs=False), net, CPU)
        self.engine, self.net, self.name = engine, net, self._own.name
        self._seconds, self._change, self.runs = seconds, change, 0

    def run(self, calls):
        self.runs += 1
        Played.clock += self._seconds
        return self._change(self._own.run(calls))


def untrained(answers):
    """As a graph would leave them that was captured on another device: nothing has moved."""
    return [
        answer._replace(uploads=tree.map(lambda leaf: leaf[:1].expand_as(leaf), answer.uploads))
        for answer in answers
    ]


def failing(answers):
    try:
        raise ValueError("no such kernel")
    except ValueError as error:
        return [error for _ in answers]


def chosen(net, **kinds):
    made = {}

    def build(engine):
        name = "graphs" if engine.graphs else engine.backend
        made[name] = Played(engine, net, **kinds.get(name, {}))
        return made[name]

    return AutotunedBackend(net, candidate_engines(Engine()), build), made


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(choosing.time, "perf_counter", lambda: Played.clock)


SLOW, SLOWER = {"seconds": 0.3}, {"seconds": 0.6}
WRONG, BROKEN = {"change": untrained}, {"change": failing}
KINDS = [
    ({"graphs": WRONG, "batched": SLOW, "loop": SLOWER}, EAGER),
    ({"graphs": SLOWER, "batched": SLOWER}, LOOP),
    ({"batched": SLOW, "loop": SLOW}, GRAPHS),
    ({"graphs": BROKEN, "loop": SLOW}, EAGER),
    ({"graphs": WRONG, "batched": WRONG, "loop": SLOW}, LOOP),
    ({"graphs": SLOW, "batched": SLOWER, "loop": BROKEN}, GRAPHS),
]


@pytest.mark.parametrize(("kinds", "taken"), keep_quick(KINDS, 2))
def test_the_fastest_that_agrees_is_taken_and_answers_from_the_first_round_on(
    kinds, taken, federation, net
):
    runner, made = chosen(net, **kinds)
    found = play_on(runner, FedAvg(), federation)
    assert runner.engine == taken
    assert_same(found, play_on(Played(taken, net), FedAvg(), federation))
    name = runner.engine.backend + (" with graphs" if runner.engine.graphs else "")
    assert runner.seconds[name] == min(runner.seconds.values())
    others = [backend for backend in made.values() if backend.engine != taken]
    assert all(backend.runs <= 3 for backend in others)


def test_what_is_left_out_is_told_and_keeps_no_frames(federation, net, caplog):
    """They would hold a candidate's memory for as long as its error is kept."""
    errors = []
    fail = lambda answers: errors.extend(failing(answers)) or errors  # noqa: E731
    runner, _ = chosen(net, graphs=WRONG, batched={"change": fail})
    with caplog.at_level(logging.WARNING):
        play_on(runner, FedAvg(), federation, COHORTS[:1])
    assert [error.__traceback__ for error in errors] == [None]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "engine: batched is left out: no such kernel"
    assert lines[1].startswith("engine: batched with graphs is left out: its results are 1")
    assert "away from those of loop, where 0.05 would do" in lines[1]


def test_where_all_fail_the_plainest_ones_error_is_raised(federation, net):
    runner, _ = chosen(net, **dict.fromkeys(("graphs", "batched", "loop"), BROKEN))
    with pytest.raises(ValueError, match="no such kernel"):
        play_on(runner, FedAvg(), federation, COHORTS[:1])


@pytest.mark.parametrize(("name", "values"), keep_quick(CASES))
def test_backends_are_within_the_tolerance_and_not_training_is_not(name, values, federation):
    method, net = METHODS[name](**values), tiny()
    state = make_initial_state(method, net, federation.clients, CPU)
    about = (method, net, federation, state, COHORTS[0])
    reference, batched = (participate(*about, engine=kind) for kind in ("loop", "batched"))
    still = participate(*about, local=replace(LOCAL, lr=1e-30))
    assert answer_distance(reference, reference) == 0
    assert answer_distance(batched, reference) < TOLERANCE["fp32"] / 10
    if name not in ("fedpac", "per_fedavg", "pfedme"):  # whose step sizes are their own
        assert answer_distance(still, reference) > TOLERANCE["fp32"]


def test_numbers_that_are_not_finite_must_be_so_in_both(federation, net):
    state = make_initial_state(FedAvg(), net, federation.clients, CPU)
    part = participate(FedAvg(), net, federation, state, COHORTS[0])
    broken = part._replace(loss=part.loss * float("nan"))
    assert answer_distance(broken, broken) == 0
    assert answer_distance(broken, part) == answer_distance(part, broken) == float("inf")


def test_what_was_recorded_is_taken_without_being_tried(net):
    """And a width that memory ran out for is kept by a resumed run."""
    known = {"backend": "loop", "graphs": False, "width": 3}
    assert choose_backend(Engine(), net, CPU, known).engine == Engine(**known)
    assert choose_backend(Engine(), net, CPU).name == "loop"
    recorded = {"backend": "batched", "graphs": False, "width": 3}
    for width, resumed in ((0, 3), (8, 3), (2, 2)):
        engine = Engine("batched", width=width)
        assert choose_backend(engine, net, CPU, recorded).engine.width == resumed
    assert choose_backend(Engine("loop"), net, CPU, recorded).engine == Engine("loop")


def test_processes_try_alike_whatever_their_own_clocks_say(federation, net):
    """What process 0 has seen decides; a process that tried once less would hang the others."""
    runner, made = chosen(net, batched={"seconds": 5.0}, loop={"seconds": 5.0})
    runner._share = lambda value: (0.1, False) if isinstance(value, tuple) else {**value}
    play_on(runner, FedAvg(), federation, COHORTS[:1])
    assert {backend.runs for backend in made.values()} == {choosing.TRIES}


class Small(type(make_backend(Engine("batched"), tiny(), CPU))):
    """A GPU with room for four clients."""

    def _follow(self, slices):
        if sum(len(own.clients) for own in slices) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._follow(slices)


def test_the_width_is_halved_where_memory_runs_out(federation, net, caplog):
    ends = []
    for runner in (
        Small(net, CPU, Engine("batched")),
        make_backend(Engine("batched", width=2), net, CPU),
    ):
        with caplog.at_level(logging.WARNING):
            cohorts = [list(range(federation.clients))] * 2
            ends.append(play_on(runner, FedAvg(), federation, cohorts, Local(1, 32, 0.1)))
        assert runner.engine.width == 2  # 10, 5, 2
    assert [record.getMessage() for record in caplog.records] == [
        f"engine: out of memory; from here on {width} clients at a time (engine.width={width})"
        for width in (5, 2)
    ]
    assert_same(*ends)
