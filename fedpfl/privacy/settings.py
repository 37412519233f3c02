"""The settings of a run's privacy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, AtLeast, AtMost, Below, Between, Positive

MOST_EPSILON = 100.0
"""Above it a guarantee is none: an attacker may be right as good as always."""
MOST_DELTA = 0.1
MOST_NOISE = 1e4
"""In lengths of clip; with far more the account fails for lack of digits."""


@dataclass(frozen=True)
class Guarantee(Checked):
    """Hold the settings of every private run.

    Attributes:
        hides: The protected unit, which is also the choice's name.
    """

    hides: ClassVar[str]

    epsilon: Annotated[float, Above(0), AtMost(MOST_EPSILON)] | None = None
    delta: Annotated[float, Above(0), Below(MOST_DELTA)] | None = None
    noise: Annotated[float, AtLeast(0), AtMost(MOST_NOISE)] | None = None
    clip: Positive | None = 1.0
    seed: Annotated[int, Between(0, 2**32 - 1)] | None = None
    public_weights: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_one_given = (self.epsilon is None) != (self.noise is None)
        self.check(is_one_given, "epsilon", "given, or else noise: one of the two")
        self.check(
            self.clip is not None or self.noise == 0, "clip", "a number where there is noise"
        )

    @property
    def clip_length(self) -> float:
        """Return `clip`, infinity where nothing is clipped."""
        return math.inf if self.clip is None else self.clip


@dataclass(frozen=True)
class SamplePrivacy(Guarantee):
    """Hide any one sample of a client; see conf/privacy/sample.yaml."""

    hides: ClassVar[str] = "sample"
    # Cohorts are as in other runs, and known to all: no privacy is gained by who takes part.
    sampling: ClassVar[str] = "fixed"


@dataclass(frozen=True)
class Privacy(Guarantee):
    """Hide the participation of a client; see conf/privacy/client.yaml."""

    hides: ClassVar[str] = "client"

    quantile: Annotated[float, Above(0), Below(1)] | None = None
    rate: Positive = 0.2
    count_noise: Annotated[float, Above(0), AtMost(1e6)] | None = None
    sampling: Literal["fixed", "poisson"] = "fixed"
    accounting: Literal["rdp", "pld"] = "rdp"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            self.clip is not None or self.quantile is None,
            "clip",
            "a number to begin with where quantile is set",
        )
        is_adaptive_or_null = self.quantile is not None or self.count_noise is None
        self.check(is_adaptive_or_null, "count_noise", "null where clip stays (quantile=null)")
        has_pld = self.sampling == "poisson" and self.quantile is None and self.noise is not None
        self.check(
            self.accounting == "rdp" or has_pld,
            "accounting",
            "rdp, but for sampling=poisson with noise and a fixed clip",
        )

    def check_clients(self, clients: int) -> None:
        """Raise FedpflError where the guarantee would be none among so many clients."""
        if clients < 2:
            raise FedpflError(
                "privacy=client needs 2 clients or more: one has nobody to be hidden among"
            )
        if self.delta is not None and self.delta * clients >= 1:
            raise FedpflError(
                f"privacy.delta must be below 1 / clients, here {1 / clients:.3g}, got"
                f" {self.delta:g}: with it, what gives one client away whole would count as private"
            )


def no_privacy() -> None:
    """Protect nothing."""


PRIVACIES: dict[str, Callable[..., Privacy | SamplePrivacy | None]] = {
    "none": no_privacy,
    "client": Privacy,
    "sample": SamplePrivacy,
}
