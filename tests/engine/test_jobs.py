"""Calls of several runs answered together equal the same calls alone: bit for bit on loop, within
rounding on batched.

test_contract.py asks the same of every registered method; here is which calls join, and what does
not spread.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from fedpfl.engine import Engine, make_backend
from fedpfl.engine.backends.programs import ProgramCache
from fedpfl.engine.calls import TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.jobs import phase_structure
from fedpfl.methods import Ditto, FedAvg, FedOBP, FedPer, LocalOnly, Phase
from tests.conftest import (
    BACKENDS,
    COHORTS,
    CPU,
    LOCAL,
    TRAIN,
    assert_close,
    assert_same,
    make_federation,
    record_states,
    tiny,
)

EVERYONE = list(range(len(TRAIN)))
METHODS = [
    FedAvg(),
    FedOBP(q=0.5),
    FedOBP(q=0.9),
    FedPer(),
    LocalOnly(),
    Ditto(lam=0.3),
    Ditto(lam=0.3),
    Ditto(lam=2.0),
]


@pytest.fixture(scope="module")
def federations():
    """One data set dealt out in as many ways as there are runs."""
    first = make_federation()
    turns = (
        (first.train[k:] + first.train[:k], first.test[k:] + first.test[:k])
        for k in range(len(METHODS))
    )
    return [replace(first, train=train, test=test) for train, test in turns]


STATES = {}


def states(methods, federations, net):
    """Each run after one round, of its own seed; played once."""
    found = []
    for seed, (method, federation) in enumerate(zip(methods, federations, strict=False)):
        key = method, seed, id(federation), id(net)
        if key not in STATES:
            STATES[key] = record_states(method, net, federation, COHORTS[:1], seed=seed)[-1], net
        found.append(STATES[key][0])
    return found


def trainings(methods, federations, net):
    zipped = zip(methods, federations, states(methods, federations, net), strict=False)
    return [
        TrainCall(m, f, s, COHORTS[k % 3], LOCAL, Draws(k, "train", 2 + k))
        for k, (m, f, s) in enumerate(zipped)
    ]


def compare(backend, calls):
    runner = make_backend(Engine(backend), tiny(), CPU)
    together, alone = runner.run(calls), [runner.run([call])[0] for call in calls]
    for one, other in zip(together, alone, strict=True):
        assert not isinstance(one, Exception), one
        if backend == "loop":
            assert_same(one, other)
        else:
            assert_close(one, other, atol=2e-5, rtol=1e-4)


def programs(monkeypatch):
    """The number of rows of every training program run from here on."""
    seen, real = [], ProgramCache.run

    def counted(self, job):
        seen.append(len(job.rows))
        return real(self, job)

    monkeypatch.setattr(ProgramCache, "run", counted)
    return seen


def test_plain_methods_train_as_one_program_and_others_with_their_equals(
    federations, net, monkeypatch
):
    calls = trainings(METHODS, federations, net)
    seen = programs(monkeypatch)
    make_backend(Engine("batched"), net, CPU).run(calls)
    five_plain, two_equal_dittos, another = 25, 10, 5
    assert seen == [five_plain, two_equal_dittos, another]


def test_another_learning_rate_or_data_set_is_another_program(federations, net, monkeypatch):
    a, b, c, d = trainings(METHODS[:4], federations, net)
    b = replace(b, local=replace(LOCAL, lr=0.01))
    c = replace(c, federation=make_federation(seed=5))
    seen = programs(monkeypatch)
    compare("batched", [a, b, c, d])
    assert seen[:3] == [10, 5, 5]


def test_runs_of_other_rates_share_a_program(federations, net, monkeypatch):
    """As those of a sweep in other rounds of one schedule."""
    local, calls = replace(LOCAL, decay=0.5), trainings([FedAvg()] * 2, federations, net)
    rounds = zip(calls, (1, 4), strict=True)
    calls = [replace(call, local=local.for_round(number, 9)) for call, number in rounds]
    seen = programs(monkeypatch)
    compare("batched", calls)
    assert seen[0] == 10


def test_programs_keep_to_the_width(federations, net, monkeypatch):
    calls = trainings(METHODS, federations, net)
    seen = programs(monkeypatch)
    runner = make_backend(Engine("batched", width=3), net, CPU)
    together = runner.run(calls)
    assert max(seen) == 3
    wide = make_backend(Engine("batched"), net, CPU)
    for one, call in zip(together, calls, strict=True):
        assert_close(one, wide.run([call])[0], atol=2e-5, rtol=1e-4)


@dataclass(frozen=True)
class Broken(FedAvg):
    """Fails at its first batch."""

    def loss(self, server, client, net, params, batch):
        raise ZeroDivisionError("broken")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_that_fails_takes_nobody_down(backend, federations, net):
    calls = trainings([FedAvg(), FedAvg(), FedOBP(q=0.5)], federations, net)
    calls[1] = replace(calls[1], method=Broken())
    runner = make_backend(Engine(backend), net, CPU)
    answers = runner.run(calls)
    assert isinstance(answers[1], ZeroDivisionError)
    for k in (0, 2):
        assert_close(answers[k], runner.run([calls[k]])[0], atol=2e-5, rtol=1e-4)
    with pytest.raises(ZeroDivisionError, match="broken"):
        runner.run_one(calls[1])


def test_phases_are_alike_but_for_the_values_of_masks_by_entry():
    few, many = (Phase(1, {"a": torch.tensor([flag, True]), "b": False}) for flag in (False, True))
    assert phase_structure(few) == phase_structure(many)
    assert phase_structure(few) != phase_structure(Phase(1, {"a": True, "b": False}))
    assert phase_structure(Phase(1, {"a": True, "b": False})) != phase_structure(
        Phase(1, {"a": False, "b": True})
    )
