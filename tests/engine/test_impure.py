"""A method that draws from the generators of the process repeats itself bit for bit, and is told
of.
"""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedpfl
from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    find_global_draws,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.methods import METHODS, FedAvg
from tests.command import TINY, read_table, run_command
from tests.conftest import BACKENDS, CPU, LOCAL, assert_same, make_federation, tiny

COHORTS = [[0, 1, 2, 3], [3, 0, 4, 1], [2, 4, 1, 0]]
FEDERATION = make_federation((20, 7, 33, 12, 9), (5, 3, 1, 0, 4))
SHORT = replace(LOCAL, epochs=1)


def moved(model, by):
    return tree.map(lambda leaf: leaf + 0.1 * by, model)


class Starting(FedAvg):
    def start(self, received, client):
        return tree.map(lambda leaf: leaf + 0.1 * torch.randn(leaf.shape), received)


class Looking(FedAvg):
    def before_training(self, server, client, net, shard):
        return {"shift": torch.tensor(np.random.rand(), dtype=torch.float32)}

    before_evaluation = before_training

    def start(self, received, client):
        return moved(received, client["shift"])


class Averaging(FedAvg):
    def aggregate(self, server, clients, net, uploads, weight, generator):
        server, clients = super().aggregate(server, clients, net, uploads, weight, generator)
        return moved(server, random.random()), clients


class Turning(FedAvg):
    def turns(self, played, cohort, clients, generator):
        return super().turns(played, sorted(random.sample(range(clients), 3)), clients, generator)


class Beginning(FedAvg):
    def init(self, params, parts):
        return params, {"own": tree.map(torch.randn_like, params)}

    def start(self, received, client):
        return moved(received, client["own"]["fc.bias"].sum())


class Later(Starting):
    """Draws from the second round on."""

    def turns(self, played, cohort, clients, generator):
        _PLAYED[0] = played
        return super().turns(played, cohort, clients, generator)

    def start(self, received, client):
        return super().start(received, client) if _PLAYED[0] else received


_PLAYED = [0]
DRAW = {
    **{Starting: "torch", Looking: "numpy", Averaging: "random", Later: "torch"},
    **{Turning: "random", Beginning: "torch"},
}


def rounds(method, backend, workers=2, again=False):
    """States and evaluations; again: as a process would that goes on after each round."""
    torch.manual_seed(workers)
    net, found = tiny(), []
    state = make_initial_state(method, net, 5, CPU)
    runner = make_backend(Engine(backend, workers=workers), net, CPU)
    for cohort in COHORTS:
        random.seed(workers)
        if again:
            fresh = make_initial_state(method, net, 5, CPU)
            fresh.rows.load_(state.rows.saved())
            state = replace(state, rows=fresh.rows)
            runner = make_backend(Engine(backend, workers=workers), net, CPU)
        state, _ = play_round(RoundSetup(runner, method, FEDERATION, SHORT, 0), state, cohort)
        adapt = FineTuning(SHORT, Draws(0, "adapt", state.round))
        call = EvalCall(method, FEDERATION, state, range(5), before_evaluation=adapt)
        found.append([copy.deepcopy(state), runner.evaluate(call)])
    return found


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, BACKENDS[number % 2]) for number, kind in enumerate(DRAW)],
)
def test_it_goes_on_bit_for_bit_with_any_number_of_workers(kind, backend):
    method = kind()
    whole = rounds(method, backend)
    for (state, judged), (other, rejudged) in zip(
        whole, rounds(method, backend, 3, again=True), strict=True
    ):
        assert_same(state, other)
        assert_same(judged, rejudged)
    assert find_global_draws(method) == [DRAW[kind]]
    assert not torch.equal(*(state.server["fc.bias"] for state, _ in whole[1:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_it_draws_does_not_depend_on_the_runs_beside_it(backend):
    """As in a lockstep sweep; nor, on the loop backend, on the other clients."""
    net = tiny()
    impures, pure = Starting(), FedAvg()
    states = {method: make_initial_state(method, net, 5, CPU) for method in (impures, pure)}
    calls = [
        TrainCall(method, FEDERATION, states[method], [0, 1, 2], SHORT, Draws(seed, "train", 1))
        for method in (impures, pure)
        for seed in (0, 1)
    ]
    together = make_backend(Engine(backend), net, CPU).run(calls)
    for asked, answer in zip(calls, together, strict=True):
        assert_same(make_backend(Engine(backend), net, CPU).run([asked])[0], answer)
    assert not torch.equal(together[0].loss, together[1].loss)
    assert not find_global_draws(pure)
    if backend == "loop":
        alone = make_backend(Engine("loop"), net, CPU).run([replace(calls[0], clients=[2])])[0]
        assert torch.equal(alone.loss[0], together[0].loss[2])


class Telling(FedAvg):
    def finish(self, server, client, start, end):
        return {"drawn": torch.rand(())}, client


def test_each_client_round_and_seed_draws_numbers_of_its_own(backend):
    net, method = tiny(), Telling()
    state = make_initial_state(method, net, 5, CPU)
    call = TrainCall(method, FEDERATION, state, [0, 1, 2], SHORT, Draws(0, "train", 1))
    others = [replace(call, draws=Draws(0, "train", 2)), replace(call, draws=Draws(1, "train", 1))]
    parts = make_backend(Engine(backend), net, CPU).run([call, *others])
    assert len(torch.cat([part.uploads["drawn"] for part in parts]).unique()) == 9


def test_a_run_tells_once_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "fedavg", Looking)
    result = run_command("method=fedavg", *TINY, cwd=tmp_path)
    assert result.code == 0
    (line,) = [line for line in result.err.splitlines() if "random" in line]
    assert line.startswith("method=fedavg draws global random numbers (numpy): they are seeded")
    (path,) = tmp_path.glob("outputs/digits/fedavg/*/seed42")
    assert (path / "run.log").read_text().count("global random numbers") == 1
    assert len(read_table(path / "rounds.csv")) == 2
    loaded = fedpfl.load(path)
    assert_same(loaded.personal(1), loaded.personal(1))  # which draws in before_evaluation
    x, y = loaded.samples(1)
    correct = (loaded.predict(1, x).argmax(1) == y).double().mean()
    assert 100 * float(correct) == pytest.approx(loaded.clients["accuracy"][1])
