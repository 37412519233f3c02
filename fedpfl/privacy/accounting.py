"""Account for a run's privacy loss, by Google's dp-accounting."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

from fedpfl.ground.errors import FedpflError, missing_extra
from fedpfl.privacy.settings import MOST_EPSILON, MOST_NOISE, Privacy

ORDERS = (
    *(1 + step / 4 for step in range(1, 13)),
    *range(5, 17),
    20,
    24,
    28,
    32,
    40,
    48,
    64,
    96,
    128,
    256,
    512,
)
"""Of Renyi divergences; fewer than the library's, which takes longer for no more."""
SMALLEST_NOISE = 0.1
"""The noise that a calibration begins with, in lengths of clip: its epsilon is beyond what protects
anybody.
"""


@dataclass(frozen=True)
class Account:
    """Account for `rounds` in which about `cohort` of `clients` take part.

    A client's update is at most `clip` long. Under `sampling=fixed` neighbours are federations in
    which one client is replaced, so that updates differ by up to 2 clip (cohorts are drawn
    without replacement: Wang, Balle and Kasiviswanathan, AISTATS 2019); under `poisson` those with
    one client more or less, and it is clip. The count of short updates behind an adaptive clip
    counts each as 1/2 or -1/2, so that it differs by 1 or by 1/2 (Andrew et al., NeurIPS 2021,
    arXiv:1905.03871).
    """

    privacy: Privacy
    clients: int
    cohort: float
    rounds: int

    @cached_property
    def noise(self) -> float:
        """Return the noise on the sum of updates, in lengths of clip.

        It is as given, or calibrated to reach the epsilon.

        Raises:
            FedpflError: No noise reaches the epsilon.
        """
        privacy = self.privacy
        if privacy.noise is not None:
            return privacy.noise

        # ---- Step 1: epsilon as a function of the noise.
        dp = import_dp_accounting()

        def event(noise: float) -> Any:
            return dp.SelfComposedDpEvent(self._round_event(noise), self.rounds)

        def epsilon_of(noise: float) -> Any:
            return self._make_accountant().compose(event(noise)).get_epsilon(self.delta)

        # ---- Step 2: is the epsilon within reach?
        # The noise on the count of short updates is fixed, and may alone take up the epsilon.
        if epsilon_of(MOST_NOISE) > privacy.epsilon:
            raise FedpflError(
                f"privacy.epsilon={privacy.epsilon:g} (delta {self.delta:.2g}) is out of reach in"
                f" {self.rounds} rounds of {self.cohort:g} of {self.clients} clients by any noise"
                " on updates; raise it or, with quantile, count_noise"
            )
        if epsilon_of(SMALLEST_NOISE) <= privacy.epsilon:
            return SMALLEST_NOISE

        # ---- Step 3: the least noise that reaches it.
        bracket = dp.LowerEndpointAndGuess(SMALLEST_NOISE, 1.0)
        noise = dp.calibrate_dp_mechanism(
            make_fresh_accountant=self._make_accountant,
            make_event_from_param=event,
            target_epsilon=privacy.epsilon,
            target_delta=self.delta,
            bracket_interval=bracket,
            tol=1e-3,
        )
        return float(noise)

    @property
    def delta(self) -> float:
        """Return delta: as given, or a hundredth at most, less among more than 65 clients."""
        return self.privacy.delta or min(0.01, self.clients**-1.1)

    @property
    def count_noise(self) -> float:
        """Return the noise on the count of short updates, in clients."""
        return self.privacy.count_noise or self.cohort / 20

    def epsilon(self, rounds: int) -> float | None:
        """Return the epsilon of so many rounds; None without noise, as it has no bound."""
        if not self.noise:
            return None
        event = self._round_event(self.noise)
        return float(self._make_accountant().compose(event, rounds).get_epsilon(self.delta))

    def check(self) -> None:
        """Raise FedpflError for noise with an epsilon that protects no client."""
        epsilon = self.epsilon(self.rounds)
        if epsilon is None or epsilon <= MOST_EPSILON:
            return
        noises = "noise" if self.privacy.quantile is None else "noise or count_noise"
        raise FedpflError(
            f"privacy.noise={self.noise:g} comes to epsilon {epsilon:.3g} in {self.rounds} rounds,"
            f" which protects nobody (the most is {MOST_EPSILON:g}); raise {noises}, or take"
            " noise=0 to see what clipping alone costs"
        )

    def _make_accountant(self) -> Any:
        """Return an accountant that has seen no round."""
        dp = import_dp_accounting()
        relations = dp.NeighboringRelation
        fixed = self.privacy.sampling == "fixed"
        relation = relations.REPLACE_ONE if fixed else relations.ADD_OR_REMOVE_ONE
        if self.privacy.accounting == "rdp":
            return dp.rdp.RdpAccountant(ORDERS, neighboring_relation=relation)
        return dp.pld.PLDAccountant(
            neighboring_relation=relation, value_discretization_interval=1e-3
        )

    def _round_event(self, noise: float) -> Any:
        """Return the mechanisms of a round on a sampled cohort, as dp_accounting has them."""
        dp = import_dp_accounting()
        fixed = self.privacy.sampling == "fixed"
        # Replacing a client moves the sum of updates by up to 2 clip, and the count by up to 1.
        mechanisms = [dp.GaussianDpEvent(noise / (2 if fixed else 1))]
        if self.privacy.quantile is not None:
            mechanisms.append(dp.GaussianDpEvent(self.count_noise / (1 if fixed else 0.5)))
        together = mechanisms[0]
        if len(mechanisms) > 1:
            together = dp.ComposedDpEvent(mechanisms)
        if fixed:
            return dp.SampledWithoutReplacementDpEvent(self.clients, round(self.cohort), together)
        return dp.PoissonSampledDpEvent(self.cohort / self.clients, together)

    def sentence(self) -> str:
        """Describe the guarantee in one sentence: data, adversary and adjacency."""
        privacy = self.privacy
        if not self.noise:
            return "no guarantee: updates are clipped, and there is no noise"
        if privacy.seed is not None:
            return (
                "no guarantee: whoever knows privacy.seed can take the noise off; it is for tests"
            )
        if privacy.sampling == "fixed":
            neighbour = "replaced one client"
        else:
            neighbour = "had one client more or less"
        return (
            f"({self.epsilon(self.rounds):.3g}, {self.delta:.2g})-differentially private after"
            f" {self.rounds} rounds ({privacy.accounting.upper()}, noise {self.noise:.3g}): whoever"
            " sees all models that a trusted server sends in this run, and nothing else of it,"
            f" hardly tells it from a federation that {neighbour}; clients' own models, measured"
            " accuracies, settings chosen by them, and other runs on these clients are not covered"
        )


def import_dp_accounting() -> ModuleType:
    """Return dp_accounting. Raises FedpflError where it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ModuleNotFoundError as error:
        problem = f"privacy needs dp-accounting ({error.name} is not installed)"
        raise missing_extra(problem, "privacy") from None
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of each order that it leaves out
    return dp_accounting
