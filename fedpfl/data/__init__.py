"""Data sets as tensors, their partition over clients, and the federation the engine trains on."""

from fedpfl.data.augment import Augment
from fedpfl.data.federation import Federation, build_federation, draw_newcomers
from fedpfl.data.fingerprint import fingerprint

__all__ = ["Augment", "Federation", "build_federation", "draw_newcomers", "fingerprint"]
