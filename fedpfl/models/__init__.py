"""The papers' networks, as pure functions of their parameters."""

from fedpfl.models.adapter import ADAPTERS
from fedpfl.models.mixed import Mixed, MixedNet, build_kinds
from fedpfl.models.net import Bound, Net
from fedpfl.models.registry import MODELS, build_network, make_module
from fedpfl.models.split import Parts, find_parts
from fedpfl.models.squares import squared_gradients
from fedpfl.models.wiring import Axis, Wiring, trace_wiring

MODELS["mixed"] = Mixed  # type: ignore[assignment]  # it has networks, see build_kinds

__all__ = [
    "ADAPTERS",
    "MODELS",
    "Axis",
    "Bound",
    "Mixed",
    "MixedNet",
    "Net",
    "Parts",
    "Wiring",
    "build_kinds",
    "build_network",
    "find_parts",
    "make_module",
    "squared_gradients",
    "trace_wiring",
]
