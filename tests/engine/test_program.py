"""Captured steps: the same numbers as eager ones, also when a program serves other rounds, runs and
widths.

Without a GPU a stand-in captures: it may not run the step, and replaying runs what was captured,
from the memory it was captured with. What a graph would not see, such as a tensor made anew each
round, the stand-in does not see either.
"""

import dataclasses
import gc
import logging
import weakref

import pytest
import torch

from fedpfl.engine import Engine, Local, RoundSetup, make_backend, make_initial_state, play_round
from fedpfl.engine.backends.programs import Program, ProgramCache
from fedpfl.engine.keys import generator
from fedpfl.ground import tree
from fedpfl.methods import METHODS, Ditto, FedAvg, FedOBP, FedPer, FedSelect
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    every_method,
    keep_quick,
    make_federation,
    tiny,
)
from tests.engine.test_hooks import Gambler, Pairs, Stepper


class Capture:
    """Keeps the first step of a program, phase and width, and runs that one again whatever came
    later.
    """

    def __init__(self):
        self.captured, self.replayed = 0, 0

    def __call__(self, step):
        self.captured += 1

        def replay():
            self.replayed += 1
            step()

        return replay


class Counted(Capture):
    """Counts what another captures and replays."""

    def __init__(self, capture):
        super().__init__()
        self.capture = capture

    def __call__(self, step):
        return super().__call__(self.capture(step))


def played(method, federation, capture, cohorts=COHORTS, norm=False, local=LOCAL):
    net = tiny(norm)
    runner = make_backend(Engine("batched"), net, CPU)
    runner._programs = ProgramCache(net, runner._autocast, capture)
    states, state = [], make_initial_state(method, net, federation.clients, CPU)
    for cohort in cohorts:
        state, _ = play_round(RoundSetup(runner, method, federation, local, 0), state, cohort)
        states.append(tree.clone({"server": state.server, "clients": state.clients}))
    return states


@every_method(quick=("fedobp", "heterofl", "seqfededt"))
def test_captured_steps_are_the_eager_ones_bit_for_bit(name, values, federation, monkeypatch):
    method, capture, phases, kept = METHODS[name](**values), Capture(), [], []
    real, records = type(method).phases, Program._take_records

    def noted(self, *given):
        phases.extend(answer := real(self, *given))
        return answer

    def take_records(self):
        kept.append(bool(self._step_records))
        return records(self)

    monkeypatch.setattr(type(method), "phases", noted)
    monkeypatch.setattr(Program, "_take_records", take_records)
    cohorts = (*COHORTS, COHORTS[0])  # the last one's steps have all been captured
    captured, eager = (played(method, federation, how, cohorts) for how in (capture, None))
    if len(method.turns(0, COHORTS[0], federation.clients, generator(0, "turns", 1))) > 1:
        # A small client alone is padded to a whole batch only where steps are captured.
        assert_close(captured, eager)
    else:
        assert_same(captured, eager)
    assert any(phase.step for phase in phases) == method.own_steps
    if any(kept):  # what is kept of a step would be overwritten by the next
        assert not capture.captured
    else:
        assert capture.captured
        if max(phase.batches for phase in phases) < 3:  # which only one of so small clients has
            assert capture.replayed > capture.captured


@pytest.mark.parametrize("method", [Stepper(), Pairs(), Gambler()])
def test_steps_of_a_methods_own_and_random_numbers_are_captured(method, federation):
    assert_same(played(method, federation, capture := Capture()), played(method, federation, None))
    assert capture.replayed


@pytest.mark.parametrize("method", keep_quick([FedAvg(), Ditto(lam=0.3), FedPer()]))
def test_rows_are_rounded_up_to_a_width_and_no_bit_of_a_client_that_has_ended_moves(method):
    """Twelve clients that all end at another step: one capture per width and kind of phase, not per
    number of rows.
    """
    federation, capture = make_federation(tuple(range(16, 208, 16)), (2,) * 12), Capture()
    local = Local(epochs=2, batch_size=8, lr=0.05, momentum=0.7, weight_decay=1e-4)
    captured, eager = (
        played(method, federation, how, [list(range(12))] * 2, True, local)
        for how in (capture, None)
    )
    assert_same(captured, eager)
    assert capture.captured == len({1, 2, 3, 4, 6, 8, 12})


def test_programs_are_kept_as_far_as_there_is_room(federation):
    net, kept = tiny(), []
    runner = make_backend(Engine("batched"), net, CPU)
    rows = 2 * tree.nbytes(net.params)  # the model and its momentum
    runner._programs = ProgramCache(net, runner._autocast, Capture(), room=18 * rows)
    for count in (2, 3, 4, 5, 6, 7):
        state = make_initial_state(FedAvg(), net, federation.clients, CPU)
        play_round(RoundSetup(runner, FedAvg(), federation, LOCAL, 0), state, list(range(count)))
        kept.append([len(program._job.rows) for _, program in runner._programs._programs])
    assert kept == [[2], [3, 2], [4, 3, 2], [5, 4, 3, 2], [6, 5, 4, 3], [7, 6, 5]]
    assert runner._programs.forget()
    assert not runner._programs.forget()


def test_a_capture_that_fails_changes_no_bit_and_is_one_line(federation, caplog):
    def fails(step):
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    with caplog.at_level(logging.WARNING):
        eager = played(FedOBP(q=0.9), federation, fails)
    assert_same(eager, played(FedOBP(q=0.9), federation, Capture()))
    (line,) = [entry.getMessage() for entry in caplog.records]
    assert line == (
        "engine.graphs: a step could not be captured, so steps run eagerly from here on "
        "(operation not permitted when stream is capturing)"
    )


@pytest.mark.parametrize("hidden", [False, True], ids=["plain", "under another error"])
def test_a_capture_without_room_is_tried_again_by_fewer_clients(hidden, federation):
    """Memory that runs out says nothing of the next capture; graphs stay on."""
    capture = Capture()

    def starved(step):
        if capture.captured == 1 and not starved.has_failed:
            starved.has_failed = True
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            finally:
                if hidden:
                    raise RuntimeError("the capture was invalidated")
        return capture(step)

    starved.has_failed = False
    found, plain = (played(FedAvg(), federation, how, COHORTS[:2]) for how in (starved, None))
    assert starved.has_failed
    assert capture.captured > 2
    assert_close(found, plain, atol=1e-5)


def test_a_dropped_cache_leaves_no_program_behind(federation):
    """Reference counts free the graphs' memory; nobody waits for the collector of garbage."""
    net = tiny()
    runner = make_backend(Engine("batched"), net, CPU)
    runner._programs = ProgramCache(net, runner._autocast, lambda step: lambda: None)
    state = make_initial_state(FedAvg(), net, federation.clients, CPU)
    gc.disable()
    try:
        play_round(RoundSetup(runner, FedAvg(), federation, LOCAL, 0), state, COHORTS[0])
        made = [weakref.ref(program) for _, program in runner._programs._programs]
        runner._programs = None
        assert made
        assert [program() for program in made] == [None] * len(made)
    finally:
        gc.enable()


def test_memory_of_a_later_phase_leaves_the_graphs_of_another(federation):
    """Phases that come again, in later epochs and rounds, are captured once."""
    capture, local = Capture(), dataclasses.replace(LOCAL, epochs=3)
    played(FedSelect(p=0.5), federation, capture, COHORTS[:1] * 3, local=local)
    assert capture.captured == 4  # two kinds of phase; discarded graphs would be captured anew


@pytest.mark.cuda
@pytest.mark.parametrize("method", [FedAvg(), FedOBP(q=0.9), Ditto(lam=0.3), FedSelect(p=0.5)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_graphs_replay_the_eager_steps(method, precision, federation):
    """Bit for bit in the same shapes, which a failed capture keeps; near to steps of just the rows
    that take them.
    """
    gpu, ends = torch.device("cuda"), []
    for graphs, failed in ((True, False), (True, True), (False, False)):
        net = tiny(norm=True)
        runner = make_backend(Engine("batched", precision=precision, graphs=graphs), net, gpu)
        capture = None
        if graphs:
            own = runner._programs._capture
            own.has_failed = failed
            capture = own._capture = Counted(own._capture)
        state = make_initial_state(method, net, federation.clients, gpu)
        setup = RoundSetup(runner, method, federation.to(gpu), LOCAL, 0)
        for cohort in COHORTS * 2:
            state, _ = play_round(setup, state, cohort)
        if capture:
            # Without these a capture that always fails would pass.
            assert bool(capture.captured) == (not failed)
            assert capture.replayed >= capture.captured
        ends.append([state.server, state.clients, state.server_buffers])
    captured, same_shapes, eager = ends
    assert_same(captured, same_shapes)
    assert_close(captured, eager, atol=1e-4 if precision == "fp32" else 1e-2)
