"""FedSPU and its baselines against dense small networks and plain loops, three rounds, on both
backends.
"""

import copy
from dataclasses import replace

import pytest
import torch

from fedpfl.engine import Stopping, pick_cohort
from fedpfl.engine.keys import Draws
from fedpfl.methods import FedMP, FedSPU, FjORD, Hermes, PruneFL, RandomDropout
from tests.conftest import COHORTS, LOCAL, assert_close, client_row, record_rounds, tiny
from tests.methods.reference.conftest import SEED
from tests.methods.reference.plain import Setting
from tests.methods.reference.submodels import Sets, cut, dense, fedspu, grown, ranked, statistics

WIDTHS = (0.3, 0.5, 0.8, 1.0)


def width(client: int) -> float:
    """Blocks of the ten clients: 3, 2, 3, 2."""
    return WIDTHS[client * 4 // 10]


def counts(client: int) -> tuple[int, int]:
    return max(1, int(width(client) * 4 + 1e-9)), max(1, int(width(client) * 12 + 1e-9))


def drawn(t: int, client: int) -> Sets:
    """The highest of the lots that the server draws, layer by layer."""
    lots = torch.rand(16, generator=Draws(SEED, "train", t).server(client)).tolist()
    a, b = counts(client)
    channels = sorted(sorted(range(4), key=lambda j: -lots[j])[:a])
    return channels, sorted(sorted(range(12), key=lambda j: -lots[4 + j])[:b])


def first(t: int, client: int) -> Sets:
    a, b = counts(client)
    return list(range(a)), list(range(b))


@pytest.fixture(scope="module")
def world(setting) -> tuple[Setting, object]:
    """The setting with BatchNorm, and the network."""
    net = tiny(norm=True)
    module = copy.deepcopy(net.module)
    module.load_state_dict({**net.params, **net.buffers})
    return replace(setting, module=module), net


def compare(method, want, states, outcomes):
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        shared = {name: want.shared[t][name] for name in state.server["model"]}
        assert_close(state.server["model"], shared, atol=2e-6, rtol=0.0)
        for i, personal in enumerate(want.personal[t]):
            own = method.personal(state.server, state.client(i))
            assert_close(own, {name: personal[name] for name in own}, atol=2e-6, rtol=0.0)
            if method.buffers()["main"] == "local" and state.client_buffers["main"]:
                kept = client_row(state.client_buffers["main"], i)
                assert_close(kept, {name: personal[name] for name in kept}, atol=1e-5, rtol=1e-5)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


def test_fedspu(backend, world, federation):
    setting, net = world
    method = FedSPU(widths=WIDTHS)
    compare(
        method,
        fedspu(setting, drawn)[0],
        *record_rounds(method, net, federation, engine=backend, seed=SEED),
    )


def test_fedspu_with_early_stopping(backend, world, federation):
    """Given is only who is drawn in place of those who have stopped."""
    setting, net = world
    planned, local, stopping = COHORTS * 2, replace(LOCAL, lr=0.2), Stopping(early=True, lam=0.7)
    setting = replace(setting, lr=local.lr)
    method = FedSPU(widths=WIDTHS)
    states, outcomes = record_rounds(
        method, net, federation, planned, engine=backend, seed=SEED, local=local, stopping=stopping
    )
    played = [
        pick_cohort(state, cohort, SEED) for state, cohort in zip(states[:-1], planned, strict=True)
    ]
    want, losses, stopped = fedspu(replace(setting, cohorts=played), drawn, lam=0.7)
    compare(method, want, states, outcomes)
    for state, last, gone in zip(states[1:], losses, stopped, strict=True):
        assert set(state.stopping["stopped"].nonzero().flatten().tolist()) == gone
        for client, loss in last.items():
            assert float(state.stopping["last"][client]) == pytest.approx(loss, abs=1e-5)
    assert stopped[-2]
    assert played != planned


def test_random_dropout(backend, setting, net, federation):
    """Without BatchNorm: its statistics are averaged at the server."""
    method = RandomDropout(widths=WIDTHS, judge="own")
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    compare(method, dense(setting, drawn), states, outcomes)
    method = RandomDropout(widths=WIDTHS)
    last = record_rounds(method, net, federation, engine=backend, seed=SEED)[0][-1]
    assert_close(last.server["model"], states[-1].server["model"], atol=1e-7)
    assert_close(
        method.personal(last.server, client_row(last.clients, 4)), last.server["model"], atol=0.0
    )


def test_fjord(backend, world, federation):
    setting, net = world
    want = dense(setting, first)
    zeros = {name: torch.zeros_like(value) for name, value in setting.initial.items()}
    for personal in want.personal:
        for i, model in enumerate(
            personal
        ):  # what no client has trained yet is cut out of the initial model
            personal[i] = grown(
                cut(model, first(1, i)), first(1, i), {**zeros, **statistics(model)}
            )
    method = FjORD(widths=WIDTHS)
    compare(method, want, *record_rounds(method, net, federation, engine=backend, seed=SEED))


@pytest.mark.parametrize(
    ("kind", "score", "begin"),
    [(Hermes, "l2", "initial"), (FedMP, "l1", "current"), (PruneFL, "gradient", "initial")],
)
def test_pruned(kind, score, begin, backend, world, federation):
    setting, net = world
    sets: dict[int, Sets] = {}

    def begins(t, i, shared):
        new = i not in sets
        received = setting.initial if begin == "initial" and new else shared
        if new:
            order = Draws(SEED, "train", t).order(i, "ranking", 0, len(setting.clients[i].y))
            values = {**received, **statistics(setting.initial)}
            sets[i] = ranked(setting, i, values, score, 0.05, order, counts(i))
        return received

    want = dense(setting, lambda t, i: sets[i], begins)
    method = kind(widths=WIDTHS, ranking_lr=0.05, first=begin)
    compare(method, want, *record_rounds(method, net, federation, engine=backend, seed=SEED))
