"""Whole rounds against plain loops: ragged clients, momentum, weight decay, half the clients a round.

The loops see nothing of the package but the order of batches and what is drawn.
"""

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from fedpfl.engine import FineTuning, Stopping
from fedpfl.engine.keys import Draws
from fedpfl.methods import Batch, FedAvg, LocalOnly
from fedpfl.testing.toy import LOCAL, flatten
from tests.conftest import assert_close, assert_same, find_eval_job, keep_only, record_rounds
from tests.methods.reference import plain
from tests.methods.reference.cases import CASES, LEFT_TO_TEST_ALL, Case, RoundReport
from tests.methods.reference.conftest import COHORTS, SEED, make_world


@cache
def play_loops(name: str) -> plain.Result:
    case = CASES[name]
    local = case.local
    steps = {"lr": local.lr, "momentum": local.momentum, "weight_decay": local.weight_decay}
    setting = plain.replace(make_world(case.world)[2], **steps, batch_size=local.batch_size)
    return case.loops(plain.replace(setting, cohorts=case.cohorts), case.method)


def assert_parts(got: Any, want: Any, tolerance: Any) -> None:
    """Compare what the package has with the loops' entries of these names.

    Of the number of batches the server has the cohort's largest, which is no mean.
    """
    got, want = flatten(got), flatten(want)
    names = [path for path in got if not path.endswith("num_batches_tracked")]
    assert bool(names) == bool(want)
    atol, rtol = tolerance
    pairs = [{path: side[path] for path in names} for side in (got, want)]
    assert_close(*pairs, atol=atol, rtol=rtol)


def evaluated(case: Case, net: Any, report: RoundReport, client: int) -> Any:
    """Return the parameters and statistics, or the logits, by which a client is evaluated."""
    _, federation, setting = make_world(case.world)
    before = FineTuning(case.local, Draws(SEED, "adapt", report.state.round))
    subject = case.method, net, federation, report.state, client
    job = find_eval_job(*subject, before_evaluation=before)
    if case.evaluated == "logits":
        batch = Batch(setting.clients[client].test_x, None)
        return {"logits": case.method.predict(net.bind(job.buffers), job.params, batch)}
    roles = case.method.buffers()
    role = "main" if "main" in roles else list(roles)[-1]
    return {**job.params.get("model", job.params), **job.buffers.get(role, {})}


@pytest.mark.parametrize("name", keep_only(CASES, set(CASES) - LEFT_TO_TEST_ALL))
def test_rounds_equal_the_plain_loops(name, backend):
    """After every round: what is shared, what clients are evaluated by, what else a method tells,
    and the cohort's hits before and after.
    """
    case, want = CASES[name], play_loops(name)
    nearest = min(want.margins, default=1.0)
    assert nearest > case.margin, "choose another seed: rounding could cross a threshold"
    assert case.check(want), "the case tells nothing apart"
    assert not want.counts or max(want.counts) > 0
    net, federation, _ = make_world(case.world)
    if case.rounds:
        net = net.with_facts(rounds=case.rounds)
    values = {"engine": backend, "seed": SEED, "local": case.local}
    states, outcomes = record_rounds(case.method, net, federation, case.cohorts, **values)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        report = RoundReport(case.method, state, outcome, case.cohorts[t])
        if want.shared[t]:
            assert_parts(case.shared(report), want.shared[t], case.tolerance)
        for client in plain.WATCHED if case.evaluated else ():
            pair = evaluated(case, net, report, client), want.personal[t][client]
            assert_parts(*pair, case.looser or case.tolerance)
        if case.extras:
            pair = case.extras(report), want.extras[t]
            assert_parts(*pair, case.looser or case.tolerance)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


def test_the_server_counts_the_batches_of_the_cohorts_largest():
    net, federation, _ = make_world("norm")
    states = record_rounds(FedAvg(), net, federation, seed=SEED)[0]
    buffers = [state.server_buffers["main"] for state in states[1:]]
    counted = [int(own["norm.num_batches_tracked"]) for own in buffers]
    assert counted == [4, 10, 14]  # two epochs of 2, 3 and 2 batches


def test_clients_stop_once_the_loss_of_their_samples_has_risen(backend):
    """Of all epochs while they train, and of test samples afterwards."""
    net, federation, setting = make_world("norm")
    setting, local = plain.replace(setting, lr=0.2), dataclasses.replace(LOCAL, lr=0.2)
    values = {"local": local, "stopping": Stopping(early=True, lam=0.3), "seed": SEED}
    states, _ = record_rounds(LocalOnly(), net, federation, COHORTS * 2, engine=backend, **values)
    for client in COHORTS[0]:
        losses, own, held_out = [], setting.clients[client], 0.0

        def note_loss(model, x, y, losses=losses):
            value = plain.cross_entropy(model, x, y)
            losses.extend([float(value.detach())] * len(y))
            return value

        turn = plain.Turn(1, client, None)
        end = plain.train(setting, setting.initial, turn, loss=note_loss)
        if len(own.test_y):
            held_out = float(plain.cross_entropy(plain.still(setting, end), own.test_x, own.test_y))
        expected = 0.3 * sum(losses) / max(1, len(losses)) + 0.7 * held_out
        assert float(states[1].stopping["last"][client]) == pytest.approx(expected, abs=1e-5)
    last, stopped = (
        torch.stack([state.stopping[name] for state in states]) for name in ("last", "stopped")
    )
    has_risen = last[1:] > last[:-1]
    assert has_risen.any()
    assert_same(stopped[1:], has_risen.cumsum(0) > 0)


def test_every_case_that_is_left_out_is_one():
    assert set(CASES) >= LEFT_TO_TEST_ALL
    kinds = {type(CASES[name].method) for name in set(CASES) - LEFT_TO_TEST_ALL}
    assert {type(case.method) for case in CASES.values()} == kinds
