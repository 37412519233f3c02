"""The papers' networks, as pure functions of their parameters."""

from fedpfl.models.adapter import ADAPTERS
from fedpfl.models.net import Bound, Net
from fedpfl.models.registry import MODELS, build
from fedpfl.models.split import Parts, parts
from fedpfl.models.squares import squared_gradients
from fedpfl.models.wiring import Axis, Wiring, wire

__all__ = [
    "ADAPTERS",
    "MODELS",
    "Axis",
    "Bound",
    "Net",
    "Parts",
    "Wiring",
    "build",
    "parts",
    "squared_gradients",
    "wire",
]
