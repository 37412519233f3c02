"""The common settings of all attacks: attackers and rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Count, ProportionBelowOne, WholeNumber

ATTACKER_STREAM = 20
"""Tells these draws from others of the same seed."""


@dataclass(frozen=True)
class Attack(Checked):
    """Choose attackers and rounds."""

    share: ProportionBelowOne = 0.1
    clients: tuple[WholeNumber, ...] | None = None
    from_round: Count = 1
    every: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        # There is no attacker with share=0; here tables would name a share that counts for nothing.
        self.check(self.clients != (), "clients", "null, or the numbers of one client or more")

    def is_active(self, round_number: int) -> bool:
        """Check a round against the attack's first round and period."""
        rounds_since = round_number - self.from_round
        return rounds_since >= 0 and rounds_since % self.every == 0

    def draw_attackers(self, numbers: Sequence[int], seed: int) -> list[int]:
        """Draw the attackers' positions among the clients that take part, ascending.

        Args:
            numbers: Of the clients that take part, in the partition.
            seed: Of the run.

        Raises:
            FedpflError: There is no attacker or no honest client, or a client is not there.
        """
        count = len(numbers)
        if self.clients is not None:
            return self._find_attackers(numbers)
        # A product like 2.9999999999 counts as 3.
        attacker_count = int(round(self.share * count, 9))
        # A defence would seem to bear an attack without attackers.
        if self.share and not attacker_count:
            raise FedpflError(
                f"attack.share={self.share:g} of {count} clients is nobody; raise it, or set"
                " attack.share=0"
            )
        rng = np.random.default_rng([seed, ATTACKER_STREAM])
        return sorted(rng.permutation(count)[:attacker_count].tolist())

    def _find_attackers(self, numbers: Sequence[int]) -> list[int]:
        """Return the positions of the attackers that the settings name."""
        assert self.clients is not None
        for client in self.clients:
            if client not in numbers:
                raise FedpflError(
                    f"attack.clients: there is no client {client} among the {len(numbers)} that"
                    " take part"
                )
        if len({*self.clients}) == len(numbers):
            raise FedpflError(
                f"attack.clients: all {len(numbers)} clients would attack, and nobody be left to"
                " evaluate; leave one out"
            )
        return sorted({numbers.index(client) for client in self.clients})


def no_attack() -> None:
    """Make no attack."""
