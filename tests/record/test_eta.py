"""The remaining time is estimated from rounds that were played; a stalled one changes nothing after it."""

import pytest

from fedpfl.record.eta import RemainingTime


@pytest.mark.parametrize("rounds", [1, 7])
@pytest.mark.parametrize("every", [1, 3])
def test_evaluations_are_counted_as_they_are_made(rounds, every):
    remaining = RemainingTime(rounds, every)
    remaining.add(11.0, 10.0)
    remaining.add(31.0, 30.0)
    for played in range(rounds):
        later = range(played + 1, rounds + 1)
        evaluations = sum(number % every == 0 or number == rounds for number in later)
        assert remaining.estimate(played) == len(later) + 20 * evaluations


def test_a_stalled_round_is_forgotten_and_a_slower_run_is_not():
    remaining = RemainingTime(400, 1000)
    remaining.add(350.0, None)
    for seconds in (0.2, 0.2, 0.2, 90.0, 0.2):
        remaining.add(seconds, None)
        assert remaining.estimate(100) == pytest.approx(60.0)
    for _ in range(50):
        remaining.add(3.0, None)
    assert remaining.estimate(350) == 150.0
