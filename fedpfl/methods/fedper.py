"""FedPer: shared body, personal top layers."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Method, flag, top
from fedpfl.models import Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class FedPer(Method):
    """Federated learning with personalization layers (Arivazhagan et al., arXiv:1912.00818).

    layers: number of personal layers, counted from the output (the paper's K_P); 0 is FedAvg, all of them Local-Only.
    head_init: what a client that was never sampled has there: the `initial` head (the paper: personal layers never
        leave a client) or the `server_average` of uploaded ones (FL-bench; the personal layers then travel too).
    """

    layers: int = 1
    head_init: Literal["initial", "server_average"] = "initial"

    def __post_init__(self) -> None:
        self.check(self.layers >= 0, "layers", "0 or more")
        self.check(self.head_init in ("initial", "server_average"), "head_init", "initial or server_average")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """The server holds a whole model, whose top layers keep their initial values unless they are averaged."""
        return params, {"head": {name: params[name] for name in top(parts, self.layers)}, "trained": flag(params)}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The server's body under the client's head."""
        if self.head_init == "initial":
            return {**server, **mine["head"]}
        shared = {name: server[name] for name in mine["head"]}
        return {**server, **tree.where(mine["trained"], mine["head"], shared)}

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The body (with averaged heads: everything)."""
        return server if self.head_init == "server_average" else self._body(server, mine)

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The body goes up, the head stays."""
        upload = end if self.head_init == "server_average" else self._body(end, mine)
        return upload, {"head": {name: end[name] for name in mine["head"]}, "trained": ~flag(end)}

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """Average what came."""
        return {**server, **tree.mean(uploads, weight)}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The latest body under the client's head."""
        return self.start(server, mine)

    @staticmethod
    def _body(params: Tree, mine: dict[str, Tree]) -> Tree:
        return {name: value for name, value in params.items() if name not in mine["head"]}
