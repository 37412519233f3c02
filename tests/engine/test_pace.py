"""A run in bf16 on a CPU says in one line which precision is faster here, and is the run that it
would be without.
"""

import importlib

import numpy as np
import pytest
import torch
from torch import nn

from fedpfl.engine import Engine, PrecisionTimes, time_precisions
from fedpfl.ground import tree
from fedpfl.models import Net
from fedpfl.runner import header
from tests.command import TINY, play_run, read_checkpoint
from tests.conftest import CPU, assert_same, differing, make_federation

module = importlib.import_module("fedpfl.engine.precision_timing")
BF16 = Engine("loop", precision="bf16")
FEDERATION = make_federation((40, 33, 20), (10, 8, 16))
RUN = ("method=fedavg", "dataset=digits", *TINY, "rounds=1")


class Clocked(nn.Module):
    """A network that takes seconds of a made-up clock: so many a sample, in bf16 and in fp32; twice
    it stalls.
    """

    now, bf16, fp32, calls = 0.0, 0.0, 0.0, 0

    def __init__(self):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(64, 10)

    def forward(self, x):
        Clocked.calls += 1
        Clocked.now += 0.01 * (Clocked.calls in (5, 8)) + len(x) * (
            Clocked.bf16 if torch.is_autocast_enabled("cpu") else Clocked.fp32
        )
        return self.head(self.drop(x.flatten(1)))


@pytest.fixture
def clocked(monkeypatch):
    """Build a network that takes the time that is said."""

    def build(bf16, fp32):
        for name, value in {"now": 0.0, "calls": 0, "bf16": bf16, "fp32": fp32}.items():
            monkeypatch.setattr(Clocked, name, value)
        monkeypatch.setattr(module.time, "perf_counter", lambda: Clocked.now)
        return Net(Clocked())

    return build


@pytest.mark.parametrize(
    ("bf16", "fp32", "pays", "said"),
    [
        (0.001, 0.002, True, "32 ms in bf16, 64 ms in fp32: bf16 is faster here"),
        (0.002, 0.001, False, "64 ms in bf16, 32 ms in fp32: fp32 is faster here"),
        (0.00105, 0.001, True, "33.6 ms in bf16, 32 ms in fp32: one is as fast as the other here"),
    ],
)
def test_each_way_is_timed_and_the_faster_is_named(clocked, bf16, fp32, pays, said):
    found = time_precisions(BF16, CPU, clocked(bf16, fp32), FEDERATION, 32)
    assert str(found) == f"a step of 32 samples takes {said}"
    assert found.pays == pays


@pytest.mark.parametrize("seconds", [0.00001, 0.001, 0.01, 0.05])
def test_it_takes_a_second_at_most(clocked, seconds):
    """A network that is slow is timed with fewer samples."""
    found = time_precisions(BF16, CPU, clocked(seconds, 1.5 * seconds), FEDERATION, 32)
    assert Clocked.now < 1
    assert found.bf16 == pytest.approx(found.samples * seconds, abs=0.011)  # it may stall
    assert (found.samples == 32) == (seconds < 0.01)


def test_nothing_is_drawn_moved_or_asked_elsewhere():
    net = Net(nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10), nn.BatchNorm1d(10)))
    before = tree.map(torch.clone, {"params": net.params, "buffers": net.buffers})
    drawn = torch.get_rng_state(), np.random.get_state()[1]
    assert time_precisions(BF16, CPU, net, FEDERATION, 32)
    assert_same({"params": net.params, "buffers": net.buffers}, before)
    assert not any(leaf.requires_grad for leaf in net.params.values())
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert (drawn[1] == np.random.get_state()[1]).all()
    assert time_precisions(Engine("loop"), CPU, net, FEDERATION, 32) is None
    assert time_precisions(BF16, torch.device("cuda"), net, FEDERATION, 32) is None
    failing = Net(nn.Linear(3, 10))  # which is left to the first round
    assert time_precisions(BF16, CPU, failing, FEDERATION, 32) is None


def test_the_run_says_it_once_and_is_the_same_without(tmp_path, monkeypatch):
    """Where bf16 is slower among the warnings, which a sweep shows too."""

    def say(folder, times, *words):
        """Play a run that takes these times, and return what it says of them."""
        find = lambda *about: times and module.time_precisions(*about) and times  # noqa: E731
        monkeypatch.setattr(header.engine, "time_precisions", find)
        said = play_run(tmp_path / folder, *RUN, *words).splitlines()
        return [line for line in said if " ms in " in line]

    faster, slower = (PrecisionTimes(32, 2.0, fp32) for fp32 in (3.0, 1.0))
    bf16 = "engine.precision=bf16"
    assert say("faster", faster, bf16) == [f"precision   {faster}"]
    assert say("slower", slower, bf16) == [f"slow: {slower}; use engine.precision=fp32"]
    assert say("untimed", None, bf16) == []
    assert say("full", faster) == []
    timed, untimed, full = (
        read_checkpoint(tmp_path / name) for name in ("faster", "untimed", "full")
    )
    assert_same(timed, untimed)
    assert differing(timed, full)
