"""Hostile clients, and aggregates that bear some of them."""

from collections.abc import Callable

from fedpfl.robust.adversary import Adversary, make_adversary
from fedpfl.robust.attack import Attack, no_attack
from fedpfl.robust.defence import DEFENCES, Defence
from fedpfl.robust.forgery import (
    InnerProduct,
    LittleIsEnough,
    MinMax,
    MinSum,
    Noise,
    Replacement,
    SignFlip,
    UploadAttack,
)
from fedpfl.robust.poison import Backdoor, DataAttack, LabelFlip

__all__ = [
    "ATTACKS",
    "DEFENCES",
    "Adversary",
    "Attack",
    "DataAttack",
    "Defence",
    "UploadAttack",
    "make_adversary",
]

ATTACKS: dict[str, Callable[..., Attack | None]] = {
    "none": no_attack,
    "label_flip": LabelFlip,
    "backdoor": Backdoor,
    "sign_flip": SignFlip,
    "noise": Noise,
    "replacement": Replacement,
    "lie": LittleIsEnough,
    "min_max": MinMax,
    "min_sum": MinSum,
    "ipm": InnerProduct,
}
