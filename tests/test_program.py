"""Captured steps: the same numbers as eager ones, also when a program serves other rounds, runs and widths.

Without a GPU a stand-in captures: it may not run the step, and replaying runs what was captured, from the memory it was
captured with. What a graph would not see, such as a tensor made anew each round, the stand-in does not see either.
"""

import dataclasses

import pytest
import torch

from fedpfl import tree
from fedpfl.engine import Engine, begin, make, play
from fedpfl.engine.keys import generator
from fedpfl.engine.program import KEPT, Programs
from fedpfl.methods import METHODS, Ditto, FedAvg, FedOBP, FedPer, Method, Phase
from tests.conftest import COHORTS, CPU, LOCAL, assert_close, assert_same, every_method, tiny, trajectory
from tests.test_hooks import Gambler, Pairs, Stepper


class Capture:
    """Keeps the first step of a program, phase and width, and runs that one again whatever came later."""

    def __init__(self):
        self.captured, self.replayed = 0, 0

    def __call__(self, step):
        self.captured += 1

        def replay():
            self.replayed += 1
            step()

        return replay


def played(method, federation, capture, cohorts=(*COHORTS, *COHORTS[:1]), norm=False, local=LOCAL):
    net = tiny(norm)
    runner = make(Engine("batched"), net, CPU)
    runner._programs = Programs(net, runner._autocast, capture)
    states, state = [], begin(method, net, federation.clients, CPU)
    for cohort in cohorts:
        state, _ = play(runner, method, federation, state, cohort, local, 0)
        states.append(tree.clone({"server": state.server, "clients": state.clients}))
    return states


@every_method()
def test_captured_steps_are_the_eager_ones_bit_for_bit(name, values, federation, monkeypatch):
    method, capture, phases = METHODS[name](**values), Capture(), []
    real = type(method).phases

    def noted(self, *given):
        phases.extend(answer := real(self, *given))
        return answer

    monkeypatch.setattr(type(method), "phases", noted)
    captured, eager = (played(method, federation, how) for how in (capture, None))
    if len(method.turns(0, COHORTS[0], federation.clients, generator(0, "turns", 1))) > 1:
        assert_close(captured, eager)  # a small client alone is padded to a whole batch only where steps are captured
    else:
        assert_same(captured, eager)
    if any(phase.keeps for phase in phases):  # what is kept of a step would be overwritten by the next
        assert not capture.captured
    else:
        assert capture.captured
        if max(phase.batches for phase in phases) < 3:  # of so small clients only one has three minibatches
            assert capture.replayed > capture.captured


def test_with_batch_normalisation(federation):
    for method in (FedAvg(), Ditto(lam=0.3)):
        assert_same(played(method, federation, Capture(), norm=True), played(method, federation, None, norm=True))


def test_a_number_of_rows_is_captured_once(federation):
    capture = Capture()
    played(FedAvg(), federation, capture, COHORTS[:1] * 4)
    once = capture.captured
    played(FedAvg(), federation, capture := Capture(), COHORTS[:1] * 8)
    assert capture.captured == once


@dataclasses.dataclass(frozen=True)
class Masked(Method):
    """Trains the entries above their mean only: masks that differ by client and round."""

    def phases(self, server, client, params, epochs):
        return [Phase(epochs, {name: leaf > leaf.mean() for name, leaf in params.items()})]


def test_masks_of_the_round_are_used(federation):
    assert_same(played(Masked(), federation, Capture()), played(Masked(), federation, None))


@pytest.mark.parametrize("method", [Stepper(), Pairs(), Gambler()], ids=lambda m: type(m).__name__)
def test_steps_of_a_methods_own_and_random_numbers_are_captured(method, federation):
    assert_same(played(method, federation, capture := Capture()), played(method, federation, None))
    assert capture.replayed


def test_few_programs_are_kept(federation):
    net, kept = tiny(), []
    runner = make(Engine("batched"), net, CPU)
    runner._programs = Programs(net, runner._autocast, Capture())
    for width in (2, 3, 4, 5, 6, 7):
        state = begin(FedAvg(), net, federation.clients, CPU)
        play(runner, FedAvg(), federation, state, list(range(width)), LOCAL, 0)
        kept.append(len(runner._programs._kept))
    assert kept == [min(n, KEPT) for n in range(1, 7)]


def test_on_a_cpu_the_switch_changes_nothing(federation):
    net = tiny()
    on, off = (trajectory(FedOBP(q=0.9), net, federation, engine=Engine("batched", graphs=g)) for g in (True, False))
    assert_same(on[-1], off[-1])


@pytest.mark.cuda
@pytest.mark.parametrize(
    "method", [FedAvg(), FedOBP(q=0.9), FedPer(), Ditto(lam=0.3), Masked()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_graphs_replay_the_eager_steps(method, precision, federation):
    gpu = torch.device("cuda")
    ends = []
    for graphs in (False, True):
        net = tiny(norm=True)
        runner = make(Engine("batched", precision=precision, graphs=graphs), net, gpu)
        state = begin(method, net, federation.clients, gpu)
        for cohort in COHORTS * 3:
            state, _ = play(runner, method, federation.to(gpu), state, cohort, LOCAL, 0)
        ends.append({"server": state.server, "clients": state.clients, "buffers": state.server_buffers})
    assert_same(*ends)
