"""An attack as it is carried out: who attacks, on which data, and by what success is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedpfl.data import Federation
from fedpfl.robust.attack import Attack
from fedpfl.robust.poison import DataAttack, poison_federations


@dataclass(frozen=True, eq=False)
class Adversary:
    """Hold the hostile clients of a run.

    Attributes:
        attack: Their settings.
        attackers: Positions among the clients that take part, ascending.
        honest: The positions of the honest clients.
        poisoned: The samples to train on while the attack is active.
        triggered: Test samples with labels that the attack wants, of the clients that take part and
            of newcomers if any; empty where the attack wants no label.
    """

    attack: Attack
    attackers: tuple[int, ...]
    honest: tuple[int, ...]
    poisoned: Federation
    triggered: tuple[Federation, ...] = ()

    def choose_data(self, clean: Federation, round_number: int) -> Federation:
        """Return the clients' training data of a round."""
        return self.poisoned if self.attack.is_active(round_number) else clean


def make_adversary(attack: Attack, federations: Sequence[Federation], seed: int) -> Adversary:
    """Draw the attackers, and poison their samples.

    Args:
        attack: Their settings.
        federations: The clients that take part and, if any, newcomers.
        seed: Of the run.

    Raises:
        FedpflError: The attack does not fit these clients or samples.
    """
    participants = federations[0]
    # Numbers of the partition, as the settings and the user know clients; newcomers are no part.
    numbers = [participants.partition_number(client) for client in range(participants.clients)]
    attackers = attack.draw_attackers(numbers, seed)
    honest = sorted({*range(participants.clients)} - {*attackers})
    poisoned = participants
    triggered: tuple[Federation, ...] = ()
    if isinstance(attack, DataAttack):
        attack.check_federation(participants)
        attack = attack.find_classes(participants)
        poisoned, triggered = poison_federations(attack, federations, attackers, seed)
    return Adversary(
        attack=attack,
        attackers=tuple(attackers),
        honest=tuple(honest),
        poisoned=poisoned,
        triggered=triggered,
    )
