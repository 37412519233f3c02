"""The papers' networks, as pure functions of their parameters."""

from fedpfl.models.adapter import ADAPTERS
from fedpfl.models.net import Bound, Net
from fedpfl.models.registry import MODELS, build_network, make_module
from fedpfl.models.split import Parts, find_parts
from fedpfl.models.squares import squared_gradients
from fedpfl.models.wiring import Axis, Wiring, trace_wiring

__all__ = [
    "ADAPTERS",
    "MODELS",
    "Axis",
    "Bound",
    "Net",
    "Parts",
    "Wiring",
    "build_network",
    "find_parts",
    "make_module",
    "squared_gradients",
    "trace_wiring",
]
