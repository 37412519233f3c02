"""Captured steps and scripts of steps: the same numbers as eager ones, also when a program serves
other rounds, runs and widths.

Without a GPU a stand-in captures: it may not run the step, and replaying runs what was captured,
from the memory it was captured with. What a graph would not see, such as a tensor made anew each
round, the stand-in does not see either.
"""

import dataclasses
import gc
import math
import os
import shutil
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedpfl import models
from fedpfl.data import Augment
from fedpfl.engine import Engine, Local, RoundSetup, make_backend, make_initial_state, play_round
from fedpfl.engine.backends import programs
from fedpfl.engine.backends.programs import Program, ProgramCache
from fedpfl.engine.keys import generator
from fedpfl.engine.training import scripts, turn
from fedpfl.engine.training.scripted_steps import overwrite
from fedpfl.ground import tree
from fedpfl.methods import METHODS, Data, Ditto, FedAvg, FedSelect, Phase
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    ROOT,
    assert_close,
    assert_same,
    evaluate,
    every_method,
    make_federation,
    record_rounds,
    tiny,
)


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


def play_on(runner, method, federation, cohorts=COHORTS, local=LOCAL):
    """Return what the server and the clients have after each round on this backend."""
    states, state = [], make_initial_state(method, runner.net, federation.clients, CPU)
    for cohort in cohorts:
        state, _ = play_round(RoundSetup(runner, method, federation, local, 0), state, cohort)
        states.append(tree.clone({"server": state.server, "clients": state.clients}))
    return states


def played(method, federation, capture, cohorts=COHORTS, norm=False, local=LOCAL):
    runner = make_backend(Engine("batched"), tiny(norm), CPU)
    runner._programs = ProgramCache(runner.net, runner._autocast, capture)
    return play_on(runner, method, federation, cohorts, local)


# Also with steps of a method's own, on one batch and on two, and with numbers of each sample
@every_method(quick=("fedobp", "heterofl", "seqfededt", "pfedme", "per_fedavg", "fedcp"))
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


def test_rows_are_rounded_up_to_a_width_and_no_bit_of_a_client_that_has_ended_moves():
    """Seven clients that all end at another step: one capture per width and kind of phase, not per
    number of rows.
    """
    federation, capture = make_federation(tuple(range(16, 128, 16)), (2,) * 7), Capture()
    local = Local(epochs=2, batch_size=16, lr=0.05, momentum=0.7, weight_decay=1e-4)
    captured, eager = (
        played(Ditto(lam=0.3), federation, how, [list(range(7))] * 2, True, local)
        for how in (capture, None)
    )
    assert_same(captured, eager)
    assert capture.captured == len({1, 2, 3, 4, 6, 7})


def test_the_latest_programs_are_kept(federation, monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    net, kept = tiny(), []
    runner = make_backend(Engine("batched"), net, CPU)
    runner._programs = ProgramCache(net, runner._autocast, Capture())
    for count in (1, 2, 1, 3):
        play_on(runner, FedAvg(), federation, [list(range(count))])
        kept.append([len(program._job.rows) for _, program in runner._programs._programs])
    assert kept == [[1], [2, 1], [1, 2], [3, 1]]
    assert runner._programs.forget()
    assert not runner._programs.forget()


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
    gc.disable()
    try:
        play_on(runner, FedAvg(), federation, COHORTS[:1])
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


# Scripts: the bits of steps by Python, and steps that no script repeats


SETTINGS = {
    "plain": Local(2, 16, 0.05),
    "momentum": Local(1, 16, 0.05, momentum=0.7),
    "all": Local(1, 16, 0.05, momentum=0.7, nesterov=True, weight_decay=0.01, clip=0.5),
    "schedule": Local(None, 16, 0.05, steps=7, decay=0.5),
    "adam": Local(1, 16, 0.01, optimizer="adam", weight_decay=0.01, decay=0.5),
    "adamw": Local(1, 16, 0.01, optimizer="adamw", weight_decay=0.01, decay=0.5),
}
SMALL = make_federation((40, 7, 33, 2, 65, 1), (12, 3, 9, 0, 14, 1))
FEDERATION = replace(SMALL, x=SMALL.x.repeat_interleave(2, 2).repeat_interleave(2, 3))
PAIRS = [[0, 2, 3, 5], [0, 1, 4, 5]]
VALUES = {
    "fedobp": {"q": 0.9},
    "subflot": {"rates": (0.75,)},
    "fjord": {"widths": (0.25, 0.5), "ordered": True, "distill": 0.3},
    "heterofl": {"widths": (0.25, 0.5)},
}


@pytest.fixture
def made(monkeypatch):
    """Whether scripts do what steps do, for each size that was tried."""
    made = []

    def try_and_note(*arguments):
        made.append(repeats_step(*arguments))
        return made[-1]

    repeats_step = scripts.repeats_step
    monkeypatch.setattr(scripts, "repeats_step", try_and_note)
    return made


SCRIPTED = [
    ("fedper", "all", "lenet5", True),
    ("fedper", "schedule", "mlp", True),
    ("fedobp", "momentum", "own", True),  # a user's network
    ("fedavg", "momentum", "augmented", True),
    ("fedper", "adam", "norm", True),
    ("fedavg", "adamw", "mlp", True),
    ("fedselect", "adam", "mlp", True),
    ("ditto", "all", "mlp", True),  # its loss looks at the server and the client
    ("fedselect", "all", "mlp", True),  # masks
    ("fedselect", "plain", "mlp", True),  # phases of one form, which move other leaves
    ("scaffold", "momentum", "norm", True),  # gradients change the client's state
    ("pfedfda", "momentum", "mlp", True),  # its losses keep features
    ("fedcp", "momentum", "mlp", True),  # each sample has numbers of its own
    ("pfedme", "momentum", "norm", True),  # a step of its own
    ("apfl", "momentum", "norm", True),
    # A frozen body and sub-models at their true size round where they are not.
    ("fedrep", "momentum", "mlp", False),
    ("subflot", "all", "lenet5", False),  # a loss that looks at the network at full size
    ("heterofl", "momentum", "norm", False),  # statistics
]
"""Method, settings, network, and whether all shortcuts leave the bits, or scripts alone."""


@pytest.mark.parametrize(("method", "settings", "network", "is_exact"), SCRIPTED)
def test_shortcuts_change_no_bit(method, settings, network, is_exact, made, monkeypatch):
    """Scripts and shared evaluation; frozen bodies and sub-models round (`test_frozen.py`)."""
    federation, results = FEDERATION, []
    make_method = partial(METHODS[method], **VALUES.get(method, {}))
    if network in ("norm", "own", "augmented"):
        federation, net = SMALL, tiny(norm=True)
        net.traits = replace(net.traits, trusted=network != "own")
        if network == "augmented":
            federation = replace(SMALL, augment=Augment(flip=True, rotate=30.0, crop=1))
    else:
        net = models.build_network(network, federation.shape, federation.classes, 0)
    monkeypatch.setattr(turn, "LONGEST_STEP", math.inf)
    for steps_before in (0, 10**9):
        monkeypatch.setattr(scripts, "STEPS_BEFORE", steps_before)
        monkeypatch.setattr(scripts, "STEPS_BEFORE_SIZE", steps_before)
        engine = Engine("loop", workers=2, shortcuts=not steps_before or not is_exact)
        states, outcomes = record_rounds(
            make_method(), net, federation, PAIRS, local=SETTINGS[settings], engine=engine
        )
        counts = evaluate(make_method(), net, federation, states[-1], engine=engine)
        losses = [outcome.loss for outcome in outcomes]
        results.append([states, losses, outcomes[-1].after, counts])
    assert_same(*results)
    assert made
    assert all(made)


class Warming(METHODS["fedavg"]):
    """A user's method that changes a number of its own after each round."""

    scale = 0.5

    def loss(self, server, client, net, params, batch):
        return self.scale * super().loss(server, client, net, params, batch)

    def aggregate(self, *arguments):
        self.__dict__["scale"] = self.scale + 0.5
        return super().aggregate(*arguments)


class WarmingList(Warming):
    """The same by a list."""

    scales = (0.5,)

    def loss(self, server, client, net, params, batch):
        return self.scales[-1] * METHODS["fedavg"].loss(self, server, client, net, params, batch)

    def aggregate(self, *arguments):
        self.__dict__["scales"] = [*self.scales, self.scales[-1] + 0.5]
        return METHODS["fedavg"].aggregate(self, *arguments)


class Schedule:
    scale = 0.5


class WarmingObject(METHODS["fedavg"]):
    """The same by an object."""

    def __init__(self):
        super().__init__()
        self.__dict__["schedule"] = Schedule()

    def loss(self, server, client, net, params, batch):
        return self.schedule.scale * super().loss(server, client, net, params, batch)

    def aggregate(self, *arguments):
        self.schedule.scale += 0.5
        return super().aggregate(*arguments)


class ByValues(METHODS["fedavg"]):
    """A user's method whose loss reads values of a batch."""

    def __init__(self, read):
        super().__init__()
        self.__dict__["read"] = read

    def loss(self, server, client, net, params, batch):
        losses = F.cross_entropy(net(params, batch.x), batch.y, reduction="none")
        return self.read(losses, batch.x.flatten(1).sum(1))


class Pulled(METHODS["fedavg"]):
    """A user's method that is no dataclass, so that two are equal to Python."""

    def __init__(self, mu):
        self.mu = mu

    def loss(self, server, client, net, params, batch):
        loss = super().loss(server, client, net, params, batch)
        return loss + self.mu / 2 * tree.squared_distance(params, server)


class PulledByClosure(METHODS["fedavg"]):
    """A user's method whose phase has another function each time."""

    def __init__(self, find_mu):
        self.find_mu = find_mu

    def phases(self, server, client, params, epochs):
        mu = self.find_mu()

        def loss(server, client, net, params, batch):
            return Pulled(mu).loss(server, client, net, params, batch)

        return [Phase(epochs, loss=loss)]


def find_kinds(values):
    return values.round().long() % 7


def count_present(values):
    is_present = torch.zeros(7, dtype=torch.bool).index_fill(0, find_kinds(values), True)
    return len(torch.ones(7)[is_present])


READERS = [
    lambda losses, values: losses.mean() * values.tolist()[0],
    lambda losses, values: losses.mean() * float(np.asarray(values).max()),
    lambda losses, values: losses.mean() / len(find_kinds(values).unique()),
    lambda losses, values: losses.mean() / count_present(values),
]


def test_runs_that_share_a_backend_have_scripts_of_their_own(monkeypatch):
    monkeypatch.setattr(scripts, "STEPS_BEFORE", 0)
    net = models.build_network("mlp", FEDERATION.shape, FEDERATION.classes, 0, hidden=(8,))
    local = SETTINGS["momentum"]
    runs = [
        (partial(METHODS["fedprox"], mu=0.1), local),
        (partial(METHODS["fedprox"], mu=2.0), local),
        (METHODS["fedavg"], replace(local, momentum=0.2)),
        (METHODS["fedavg"], local),
        (METHODS["fedavg"], SETTINGS["adam"]),
        (METHODS["fedavg"], SETTINGS["adamw"]),
        (METHODS["fedavg"], replace(SETTINGS["adam"], betas=(0.5, 0.9))),
        (METHODS["fedavg"], replace(SETTINGS["adam"], eps=0.1)),
        (Warming, local),
        (WarmingList, local),
        (WarmingObject, local),
        *[(partial(ByValues, read), local) for read in READERS],
    ]

    def play(backend, make_method, local):
        return play_on(backend, make_method(), FEDERATION, PAIRS, local)

    def make_loop():
        return make_backend(Engine("loop", workers=1), net, CPU)

    shared = make_loop()
    together = [play(shared, *run) for run in runs]
    monkeypatch.setattr(scripts, "STEPS_BEFORE", 10**9)
    for states, run in zip(together, runs, strict=True):
        assert_same(states, play(make_loop(), *run))


def test_methods_with_other_numbers_have_programs_of_their_own(federation):
    """On one backend, as in lockstep; a closure may have another number in each round."""

    def make_closure():
        return PulledByClosure(iter((0.1, 5.0)).__next__)

    shared, net = make_backend(Engine("batched"), tiny(), CPU), tiny()
    shared._programs = ProgramCache(net, shared._autocast, Capture())
    for make in (partial(Pulled, 0.1), partial(Pulled, 5.0), make_closure):
        together = play_on(shared, make(), federation, COHORTS[:1] * 2)
        assert_same(together, played(make(), federation, None, COHORTS[:1] * 2))


def test_one_thread_at_a_time_runs_python_where_steps_are_short():
    """Another goes on while a script runs, and also where it fails."""
    one, events = turn.Turn(), []

    def work(name, has_begun, may_end):
        with suppress(ValueError), one.hold():
            events.append(f"{name} runs")
            with one.give_away():
                has_begun.set()
                assert may_end.wait(9)
                raise ValueError
        with one.hold():
            events.append(f"{name} ends")

    one.note_step(2 * turn.LONGEST_STEP)
    with one.hold():
        assert not one._lock.locked()
    one.note_step(turn.LONGEST_STEP / 2)
    first, second, end = threading.Event(), threading.Event(), threading.Event()
    threads = [
        threading.Thread(target=work, args=("one", first, second)),
        threading.Thread(target=work, args=("other", second, end)),
    ]
    threads[0].start()
    assert first.wait(9)
    with one.hold():
        threads[1].start()
        assert not second.wait(0.05)
        assert events == ["one runs"]
    end.set()
    for thread in threads:
        thread.join(9)
    assert events[1] == "other runs"
    assert sorted(events[2:]) == ["one ends", "other ends"]


@pytest.mark.parametrize("channels", [1, 3])
def test_minibatches_are_laid_out_as_the_samples(channels):
    """Convolutions choose kernels, hence last bits, by strides, even of an axis of one entry."""
    x = torch.rand(9, channels, 8, 8).contiguous(memory_format=torch.channels_last)
    rows = torch.tensor([3, 1, 8])
    batch = Data(x, torch.arange(9)).rows(rows)
    assert torch.equal(batch.x, x[rows])
    assert batch.x.stride() == x.stride()
    assert batch.y.tolist() == rows.tolist()


def test_a_tree_takes_values_that_are_parts_of_itself():
    old = {"one": torch.zeros(2), "other": torch.ones(2), "third": torch.full((2,), 2.0)}
    leaves = dict(old)
    overwrite(old, {"one": old["other"], "other": old["one"][:], "third": old["third"] + 1})
    expected = {"one": torch.ones(2), "other": torch.zeros(2), "third": torch.full((2,), 3.0)}
    assert_same(old, expected)
    assert all(old[name] is leaf for name, leaf in leaves.items())


def plain_step(tensors, minibatch, rate):
    weight, x = tensors
    (rows,) = minibatch
    loss = F.cross_entropy(x[rows] @ weight, rows % 2)
    (gradient,) = torch.autograd.grad(loss, [weight])
    with torch.no_grad():
        weight.add_(gradient, alpha=-rate)
    return {}


def changed_by(change):
    """A step that does something more."""

    def step(tensors, minibatch, rate):
        plain_step(tensors, minibatch, rate)
        with torch.no_grad():
            change(tensors[0])
        return {}

    return step


constant = torch.ones(3, 2)
REFUSED = {
    "constant": lambda weight: weight.add_(constant),
    "random": lambda weight: weight.add_(torch.rand(3, 2)),
    "read": lambda weight: weight.mul_(float(weight.sum())),
    "branch": lambda weight: weight.add_(1 if (weight > 1).any() else 0.01),
    "as many as rows when it is recorded": lambda weight: weight.add_(scripts.ODD_ROWS[0]),
    "not pure": lambda weight: weight.add_(next(numbers)),
}
numbers = iter(range(1, 100))


def has_script(step, tensors):
    minibatch = [torch.arange(4)]
    script = scripts.write_script(step, tensors, minibatch)
    return script is not None and scripts.repeats_step(script, step, tensors, minibatch)


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_no_script_repeats_has_none(name):
    tensors = [torch.rand(3, 2).requires_grad_(), torch.rand(9, 3)]
    before = [leaf.detach().clone() for leaf in tensors]
    assert not has_script(changed_by(REFUSED[name]), tensors)
    assert has_script(plain_step, tensors)
    assert_same([leaf.detach() for leaf in tensors], before)


# The CUDA path on a pretended GPU, in a process of its own: it has to be there before torch is


CHECKS = "tests/pretend/checks.py"


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to pretend a GPU with")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is made for real GPUs")
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([CHECKS, "-m", "full or not full"], id="all methods"),
        pytest.param(["-m", "cuda"], id="all tests that need CUDA"),
    ],
)
def test_on_a_pretended_gpu(chosen):
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tests.pretend", "-p", "no:cacheprovider"),
        "--tb=short",
        *chosen,
    ]
    own = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    result = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout
