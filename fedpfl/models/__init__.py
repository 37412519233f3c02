"""The papers' networks, as pure functions of their parameters."""

from fedpfl.models.net import Bound, Net
from fedpfl.models.registry import MODELS, build
from fedpfl.models.split import Parts, parts

__all__ = ["MODELS", "Bound", "Net", "Parts", "build", "parts"]
