"""Local-Only: no collaboration."""

from dataclasses import dataclass
from typing import ClassVar

from fedpfl.methods.shared.by_name import PersonalByName
from fedpfl.models import Parts


@dataclass(frozen=True)
class LocalOnly(PersonalByName):
    """Every client trains its own model in its rounds, and nothing travels.

    A client that was never sampled is evaluated by the initial model.
    """

    takes_kinds = True

    _key: ClassVar[str] = "model"

    def buffers(self):
        """Keep BatchNorm statistics on the client."""
        return {"main": "local"}

    def _personal(self, parts: Parts) -> tuple[str, ...]:
        """Return the names of all parameters."""
        return tuple(name for layer in parts.layers for name in layer)
