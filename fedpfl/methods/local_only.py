"""Local-Only: no collaboration."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedpfl.methods.base import Method
from fedpfl.models import Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class LocalOnly(Method):
    """Every client trains its own model, in the rounds in which it is sampled; nothing travels.

    A client that was never sampled is judged by the initial model.
    """

    buffers: ClassVar[dict[str, str]] = {"main": "local"}

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """The server knows nothing; the client owns everything."""
        return {}, {"model": params}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """From where the client stopped."""
        return mine["model"]

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Keep, upload nothing."""
        return {}, {"model": end}

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """Nothing to merge."""
        return server

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The client's own model."""
        return mine["model"]
