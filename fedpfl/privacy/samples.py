"""DP-SGD at clients: what hides single samples, and what each client's steps give away."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.privacy.accounting import SMALLEST_NOISE, import_dp_accounting
from fedpfl.privacy.secret import Secret
from fedpfl.privacy.settings import MOST_EPSILON, MOST_NOISE, SamplePrivacy

ORDERS = (1.75, 2.5, 3.5, *range(2, 17), 20, 24, 28, 32, 48, 64, 128, 256, 512)
"""Of Renyi divergences: most are whole, whose sums are finite and fast."""
CALIBRATION_STEPS = 10
"""Halvings of the noise's logarithm, after which it is a thousandth above the least."""


class Steps(NamedTuple):
    """Count steps with minibatches that have each sample by one chance.

    Attributes:
        rate: The chance.
        number: How many steps.
    """

    rate: float
    number: int


@dataclass(frozen=True)
class SampleProtection:
    """Hold the protection of samples in a step, and its source of random numbers.

    Attributes:
        clip: The longest gradient of a sample, perhaps infinite.
        noises: Of each client, in lengths of clip.
        secret: None where no number may be drawn any more, as after the end of a run.
    """

    clip: float
    noises: Sequence[float]
    secret: Secret | None

    def draw_minibatches(
        self, samples: int, steps: Steps, purpose: tuple[int | str, ...]
    ) -> list[Tensor]:
        """Return Poisson minibatches of a client's samples, by position, one for each step."""
        size = steps.number * samples
        numbers = self._bind_secret(purpose).draw_uniform(size, "samples")
        is_drawn = torch.from_numpy(numbers < steps.rate).view(steps.number, samples)
        return [row.nonzero()[:, 0] for row in is_drawn]

    def draw_noise(self, like: Tensor, client: int, purpose: tuple[int | str, ...]) -> Tensor:
        """Return the noise on one client's sum of clipped gradients, in the form of `like`."""
        # The account is of a fraction of clip, for a minibatch of any size.
        deviation = self.noises[client]
        if not deviation:
            return torch.zeros_like(like)
        normal = self._bind_secret((client, *purpose)).draw_normal(like.numel(), "noise")
        noise = torch.from_numpy(deviation * self.clip * normal)
        return tree.send(noise.to(like.dtype).view(like.shape), like.device)

    def _bind_secret(self, purpose: tuple[int | str, ...]) -> Secret:
        """Return the secret of a purpose. Raises FedpflError after the end of a run."""
        # Noise of another secret would be one of another run, and give away more.
        if self.secret is None:
            raise FedpflError(
                "privacy=sample: the run has ended, and what its clients may give away is spent;"
                " no model can be trained or fine-tuned on their samples any more"
            )
        return self.secret.bind_to(purpose)


@dataclass(frozen=True)
class SampleAccount:
    """Account for the steps of DP-SGD that each client takes in a run.

    Neighbours are data of a client with and without one sample, its number of samples being
    public. A step's sum of clipped gradients differs by up to `clip` then.

    Attributes:
        sizes: Training samples of each client.
        training: The steps of a participation, by client.
        tuning: The steps of one fine-tuning, by client.
        cohorts: The clients of each planned round, which follow from the seed.
        tuned_rounds: The rounds after which all clients are fine-tuned.
    """

    privacy: SamplePrivacy
    sizes: tuple[int, ...]
    training: tuple[tuple[Steps, ...], ...]
    tuning: tuple[tuple[Steps, ...], ...]
    cohorts: tuple[tuple[int, ...], ...]
    tuned_rounds: tuple[int, ...]

    @property
    def common_delta(self) -> float:
        """Return delta: as given, or a hundredth at most, less where a client has many samples."""
        # One for all clients, so that a run has one guarantee.
        return self.privacy.delta or min(0.01, max(self.sizes) ** -1.1)

    @cached_property
    def client_noises(self) -> tuple[float, ...]:
        """Return each client's noise, in lengths of clip."""
        return tuple(map(self.client_noise, range(len(self.sizes))))

    def client_noise(self, client: int) -> float:
        """Return a client's noise, in lengths of clip: as given, or what reaches the epsilon."""
        if self.privacy.noise is not None:
            return self.privacy.noise
        assert self.privacy.epsilon
        steps = self.count_steps(client, len(self.cohorts))
        return calibrate_noise(steps, self.privacy.epsilon, self.common_delta)

    @property
    def noise(self) -> float:
        """Return the largest noise."""
        return max(self.client_noises)

    def count_steps(self, client: int, rounds: int) -> tuple[Steps, ...]:
        """Return the steps that a client has taken after so many rounds, by rate."""
        tunings = sum(number <= rounds for number in self.tuned_rounds)
        participations = sum(client in cohort for cohort in self.cohorts[:rounds])
        return self.sum_steps(client, participations, tunings)

    def sum_steps(self, client: int, participations: int, tunings: int) -> tuple[Steps, ...]:
        """Return the steps of so many participations and fine-tunings of a client, by rate."""
        # Steps of one rate are accounted for together, for any purpose.
        counts: dict[float, int] = {}
        for rate, number in self.training[client]:
            counts[rate] = counts.get(rate, 0) + participations * number
        for rate, number in self.tuning[client]:
            counts[rate] = counts.get(rate, 0) + tunings * number
        return tuple(Steps(rate, count) for rate, count in counts.items() if count)

    def client_epsilon(self, client: int, rounds: int) -> float:
        """Return a client's epsilon after so many rounds; infinity without noise."""
        return self.price_steps(client, self.count_steps(client, rounds))

    def price_steps(self, client: int, steps: tuple[Steps, ...]) -> float:
        """Return the epsilon of a client's steps; infinity without noise."""
        return compute_epsilon(steps, self.client_noise(client), self.common_delta)

    def epsilon(self, rounds: int) -> float | None:
        """Return the most that a client has given away, None without noise."""
        largest = max(self.client_epsilon(client, rounds) for client in range(len(self.sizes)))
        return largest if math.isfinite(largest) else None

    def check(self) -> None:
        """Raise FedpflError for an epsilon or delta that protects nothing."""
        self.check_delta()
        epsilon = self.epsilon(len(self.cohorts))
        if epsilon is not None and epsilon > MOST_EPSILON:
            raise FedpflError(
                f"privacy.noise={self.noise:g} comes to epsilon {epsilon:.3g} for a client, which"
                f" protects nobody (the most is {MOST_EPSILON:g}); raise noise, or take noise=0 to"
                " see what clipping alone costs"
            )

    def check_delta(self) -> None:
        """Raise FedpflError for a delta that lets a whole sample leak."""
        most_samples = max(self.sizes)
        if self.common_delta * most_samples >= 1:
            raise FedpflError(
                f"privacy.delta must be below 1 / samples, here {1 / most_samples:.3g}, got"
                f" {self.common_delta:g}: with it, what gives a sample away whole would pass"
            )

    def sentence(self) -> str:
        """Describe the guarantee in one sentence: data, adversary and adjacency."""
        if not self.noise:
            return "no guarantee: gradients of samples are clipped, and there is no noise"
        if self.privacy.seed is not None:
            return (
                "no guarantee: whoever knows privacy.seed can take the noise off; it is for tests"
            )
        rounds = len(self.cohorts)
        noises = f"{min(self.client_noises):.3g} to {self.noise:.3g}"
        return (
            f"each client's models are ({self.epsilon(rounds):.3g},"
            f" {self.common_delta:.2g})-differentially private or better after {rounds} rounds"
            f" (RDP, noise {noises}): whoever sees all that a client sends of them, its server too,"
            " hardly tells whether any one of its training samples was among them; numbers of"
            " samples, measured accuracies, settings chosen by them, and other runs on these"
            " samples are not covered"
        )


@functools.cache
def compute_epsilon(steps: tuple[Steps, ...], noise: float, delta: float) -> float:
    """Return the epsilon of steps on Poisson minibatches; infinity without noise."""
    if not steps:
        return 0.0
    if not noise:
        return math.inf
    dp = import_dp_accounting()
    accountant: Any = dp.rdp.RdpAccountant(ORDERS)
    for rate, number in steps:
        step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
        accountant.compose(step, number)
    return float(accountant.get_epsilon(delta))


@functools.cache
def calibrate_noise(steps: tuple[Steps, ...], epsilon: float, delta: float) -> float:
    """Return the least noise that keeps steps below epsilon, in lengths of clip.

    Raises:
        FedpflError: No noise does.
    """
    if compute_epsilon(steps, SMALLEST_NOISE, delta) <= epsilon:
        return SMALLEST_NOISE
    if compute_epsilon(steps, MOST_NOISE, delta) > epsilon:
        raise FedpflError(
            f"privacy.epsilon={epsilon:g} (delta {delta:.2g}) is out of reach by any noise;"
            " raise it"
        )
    # Epsilon falls with noise, so that the least noise lies between two values.
    low = SMALLEST_NOISE
    high = 2 * SMALLEST_NOISE
    while compute_epsilon(steps, high, delta) > epsilon:
        low = high
        high = 2 * high
    for _ in range(CALIBRATION_STEPS):
        middle = math.sqrt(low * high)
        if compute_epsilon(steps, middle, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high
