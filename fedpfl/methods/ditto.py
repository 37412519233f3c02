"""Ditto: a global model and a private one that stays near it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Batch, Method, Phase, flag, mean_cross_entropy, side_by_side
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class Ditto(Method):
    """Ditto (Li et al., ICML 2021, arXiv:2012.04221, Algorithm 1): FedAvg, and v_i by SGD on CE(v) + lam/2 |v - w|^2.

    w is the model RECEIVED at the beginning of the round. Both models see the same batches, as in the official code.

    lam: pull towards the global model.
    personal_epochs: epochs of the private model; None: as many as the global model's.
    cold_start: what a client without a private model starts from and is judged by: the `initial` model (as the
        references do) or the `global` one (its parameters; BatchNorm statistics of the private model stay its own).
    """

    lam: float = 1.0
    personal_epochs: int | None = None
    cold_start: Literal["initial", "global"] = "initial"

    buffers: ClassVar[dict[str, str]] = {"w": "aggregate", "v": "local"}
    judged_role: ClassVar[str] = "v"

    def __post_init__(self) -> None:
        self.check(self.lam >= 0, "lam", "0 or more")
        self.check(self.personal_epochs is None or self.personal_epochs >= 0, "personal_epochs", "0 or more, or null")
        self.check(self.cold_start in ("initial", "global"), "cold_start", "initial or global")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """Everybody starts from the same model."""
        return params, {"v": params, "trained": flag(params)}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """Both models side by side."""
        return {"w": server, "v": self.personal(server, mine)}

    def phases(self, server: Tree, mine: dict[str, Tree], params: Tree, epochs: int) -> list[Phase]:
        """Both together for as long as both train, then the one with more epochs alone."""
        own = epochs if self.personal_epochs is None else self.personal_epochs
        return side_by_side(epochs, own, self.global_loss, self.personal_loss)

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Two objectives without a common parameter."""
        own = self.personal_loss(net, params, batch, server, mine)
        return self.global_loss(net, params, batch, server, mine) + own

    def global_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """FedAvg's objective."""
        return mean_cross_entropy(net(params["w"], batch.x, "w"), batch)

    def personal_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """The private model's objective (eq. 1 of the paper)."""
        loss = mean_cross_entropy(net(params["v"], batch.x, "v"), batch)
        if self.lam:
            loss = loss + self.lam / 2 * tree.squared_distance(params["v"], server)
        return loss

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The global model goes up, the private one stays."""
        return end["w"], {"v": end["v"], "trained": ~flag(end)}

    def judged(self, server: Tree, mine: dict[str, Tree], trained: Tree) -> Tree:
        """The private model."""
        return trained["v"]

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The private model; without one, as `cold_start` says."""
        if self.cold_start == "initial":
            return mine["v"]
        return tree.where(mine["trained"], mine["v"], server)
