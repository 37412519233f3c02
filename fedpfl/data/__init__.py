"""Data sets as tensors, their partition over clients, and the federation the engine trains on."""

from fedpfl.data.augment import Augment
from fedpfl.data.federation import (
    Federation,
    build_federation,
    draw_newcomers,
    find_clients_of_groups,
)
from fedpfl.data.fingerprint import fingerprint
from fedpfl.data.shift import Shift, ShiftedClients, require_fit_of_shift, thin_classes

__all__ = [
    "Augment",
    "Federation",
    "Shift",
    "ShiftedClients",
    "build_federation",
    "draw_newcomers",
    "find_clients_of_groups",
    "fingerprint",
    "require_fit_of_shift",
    "thin_classes",
]
