"""Time is told before a run, by timed steps, and the run is what it would be without."""

import copy
import io
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from fedpfl.config import plugins
from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.engine.training import evaluation
from fedpfl.record import console
from fedpfl.record.console import Console
from fedpfl.record.forecast import Forecast, Remaining, Schedule
from fedpfl.runner import loop, resume, timing
from tests.command import (
    CLOCKED,
    TINY_TASK,
    compose_once,
    format_override,
    play_run,
    read_summary,
)
from tests.conftest import ROOT, keep_quick, read_cases
from tests.data.promises import build
from tests.record.test_damage import assert_ends_as
from tests.record.test_record import info, play_twenty_rounds

STATEFUL = ("dropped", "noisy_by_numpy", "frozen_average")
EQUAL = (
    *TINY_TASK,
    *("clients=6", "partition.samples_per_client=40", "partition.alpha=100", "rounds=4"),
    "eval.every=2",
)


TIMED = [
    "method=fedobp model=counter_assigned eval.finetune_epochs=1 validation=0.1 unseen=0.2",
    "method=fedpac model=mlp local.optimizer=adam local.decay=cosine",
    *(f"method=fedavg model={name}" for name in STATEFUL),
]


@pytest.mark.parametrize("words", keep_quick(TIMED))
def test_a_timed_run_is_bit_for_bit_the_run_without(words, tmp_path, monkeypatch):
    """Also with a network that draws or counts, whose steps are timed with a copy."""
    file = ROOT / "tests/networks.py"
    plugins.load_plugins([file])
    words = (*EQUAL, format_override("plugins", [file]), *words.split())
    monkeypatch.setattr(timing, "is_worth_timing", lambda run, done: True)
    told = play_run(tmp_path / "timed", *words)
    assert "\ntime        about " in told
    assert "draws" not in told  # nobody blames the method
    monkeypatch.setattr(timing, "is_worth_timing", lambda run, done: False)
    assert "\ntime  " not in play_run(tmp_path / "plain", *words)
    plugins.load_plugins([])
    assert_ends_as(tmp_path / "timed", tmp_path / "plain")
    one, other = (read_summary(tmp_path / name)["engine"] for name in ("timed", "plain"))
    assert {name for name in one if one[name] != other[name]} <= {*CLOCKED}


# By a clock that only the network moves


class Ticking(nn.Module):
    """A network that takes a millisecond a sample."""

    now = 0.0

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(784, 16), nn.Linear(16, 10)

    def forward(self, x):
        Ticking.now += 0.001 * len(x)
        return self.head(self.body(x.flatten(1)).relu())


@pytest.fixture
def ticking(monkeypatch):
    """Build a run of a network by whose clock all is timed, its state and the rows that it has."""
    monkeypatch.setattr(Ticking, "now", 0.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: Ticking.now)
    monkeypatch.setattr(loop.time, "monotonic", lambda: Ticking.now)
    monkeypatch.setattr(evaluation, "ROW_BLOCK", 1)  # evaluated samples are the clients' alone
    from fedpfl.models import MODELS

    monkeypatch.setitem(MODELS, "ticking", lambda shape, classes: Ticking())

    def play_rounds(*words):
        sizes = "partition.samples_per_client=96", "rounds=8"
        engine_words = "engine.workers=1", "engine.backend=loop"
        cfg = copy.deepcopy(compose_once("model=mlp", *engine_words, *EQUAL, *sizes, *words))
        cfg.model = {"name": "ticking"}
        run = build_run(check_config(cfg))
        began = resume.restore_state(run, {}, None)
        told = timing.forecast_run(run, began)
        backend = timing.engine.make_backend(run.engine, run.net, run.device)
        return told, [round.row for round in loop.train_rounds(run, backend, began)]

    return play_rounds


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    read_cases("""
    method=fedavg local.epochs=3 eval.finetune_epochs=2 eval.finetune_every=4
    method=fedrep local.epochs=2 method.head_epochs=4 validation=0.2
    method=per_fedavg local.batch_size=8
    """),
)
def test_what_is_foretold_is_what_rounds_and_evaluations_take(words, ticking):
    told, rows = ticking(*words.split())
    plain = [
        row["eval_seconds"] for row in rows if row["eval_seconds"] and row["ft_accuracy"] is None
    ]
    tuned = [row["eval_seconds"] for row in rows if row["ft_accuracy"] is not None]
    assert told.round == pytest.approx(np.mean([row["seconds"] for row in rows[1:]]), rel=0.15)
    # Before the first one it is found out once that the network takes each sample by itself.
    assert told.evaluation == pytest.approx(plain[-1], rel=0.15)
    assert tuned == [] or told.tuned_evaluation == pytest.approx(np.mean(tuned), rel=0.15)
    assert bool(tuned) == ("eval.finetune" in words)


def test_a_run_of_a_few_small_rounds_is_not_timed():
    for rounds, is_timed in ((timing.SHORT_ROUNDS, False), (timing.SHORT_ROUNDS + 1, True)):
        words = ("method=fedavg", *TINY_TASK, f"rounds={rounds}")
        run = build("model=mlp", *words)
        assert timing.is_worth_timing(run, 0) == is_timed
        assert not timing.is_worth_timing(run, run.settings.rounds)
        many = ("model=cnn4", *words, "local.epochs=5000")
        assert timing.is_worth_timing(build(*many), 0)


# What is said


def test_evaluations_are_counted_as_they_are_made():
    for rounds, every, times in itertools.product((1, 7), (1, 3), (0, 1, 2)):
        schedule = Schedule(rounds, every, times * every)
        for played in range(rounds + 1):
            plain = tuned = 0
            for number in range(played + 1, rounds + 1):
                if number % every == 0 or number == rounds:
                    is_tuned = times and (number % (times * every) == 0 or number == rounds)
                    tuned, plain = tuned + bool(is_tuned), plain + (not is_tuned)
            assert schedule.remaining(played) == Remaining(rounds - played, plain, tuned)


def test_the_first_eta_counts_evaluations_and_fine_tuning(tmp_path):
    """Before an evaluation that took 6.7 rounds it was `0:00:02 + evaluations`."""
    stream, clock = io.StringIO(), SimpleNamespace(now=0.0)
    config = {"eval": {"every": 10, "finetune_epochs": 5, "finetune_every": 20}}
    forecast = Forecast(round=0.1, evaluation=6.7, tuned_evaluation=20.0)
    shown = Console(stream=stream, clock=lambda: clock.now)
    shown.on_begin(info(tmp_path, config=config, forecast=forecast))
    judged = {10: {"accuracy": 90.0}, 20: {"accuracy": 90.0, "ft_accuracy": 91.0}}
    play_twenty_rounds(shown, clock, 0.1, judged)
    told = stream.getvalue().splitlines()
    assert told[1].endswith("ETA 0:00:29")  # 19 rounds, 6.7 and 20 s
    assert "ETA 0:00:21" in next(line for line in told if line.startswith("round 10/20  cohort"))
    assert "+ evaluations" not in stream.getvalue()


def test_a_long_run_of_a_sweep_says_how_long_it_will_take(tmp_path, monkeypatch):
    monkeypatch.setattr(Console, "_print_times", {})
    told = []
    for seconds in (1.0, 10.0):
        stream = io.StringIO()
        before = console.run_label.set("seed=1")
        Console(stream=stream).on_begin(info(tmp_path, forecast=Forecast(seconds, seconds, 0.0)))
        console.run_label.reset(before)
        told.append(stream.getvalue())
    assert told == ["", "seed=1: about 0:03:40: 20 rounds of 10 s, 2 evaluations of 10 s\n"]
