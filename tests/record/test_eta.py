"""The remaining time is estimated from rounds that were played; a stalled one changes nothing after it."""

import itertools

import pytest

from fedpfl.record.eta import RemainingTime


def config(every, epochs=0, tuned_every=0):
    return {"every": every, "finetune_epochs": epochs, "finetune_every": tuned_every}


def test_evaluations_are_counted_as_they_are_made():
    for rounds, every, times in itertools.product((1, 7), (1, 3), (0, 1, 2)):
        remaining = RemainingTime(rounds, config(every, times, times * every))
        remaining.add(11.0, 10.0, is_tuned=False)
        remaining.add(101.0, 100.0, is_tuned=True)
        for played in range(rounds + 1):
            seconds = 0
            for number in range(played + 1, rounds + 1):
                is_evaluated = number % every == 0 or number == rounds
                is_tuned = times and (number % (times * every) == 0 or number == rounds)
                seconds += 1 + is_evaluated * (100 if is_tuned else 10)
            assert remaining.estimate(played) == seconds


def test_a_stalled_round_or_evaluation_is_forgotten_at_the_next():
    remaining = RemainingTime(400, config(10))
    remaining.add(350.0, None, is_tuned=False)
    for seconds in (0.2, 0.2, 0.2, 90.0, 0.2):
        remaining.add(seconds, None, is_tuned=False)
        assert remaining.estimate(100) == pytest.approx(60.0)
    remaining.add(500.2, 500.0, is_tuned=False)
    remaining.add(1.2, 1.0, is_tuned=False)
    assert remaining.estimate(100) == pytest.approx(90.0)


def test_a_run_that_becomes_slower_is_estimated_by_its_recent_rounds():
    remaining = RemainingTime(200, config(1000))
    for seconds in [1.0] * 100 + [3.0] * 50:
        remaining.add(seconds, None, is_tuned=False)
    assert remaining.estimate(150) == 150.0
