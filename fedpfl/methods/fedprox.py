"""FedProx: FedAvg whose clients are held back."""

from dataclasses import dataclass

from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Batch, Method
from fedpfl.models import Bound
from fedpfl.tree import Tree


@dataclass(frozen=True)
class FedProx(Method):
    """FedProx (Li et al., MLSys 2020, arXiv:1812.06127): each client minimises CE(w) + mu/2 |w - received w|^2.

    mu: pull towards the model received, over all trainable scalars; mu = 0 is FedAvg. No stragglers.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        self.check(self.mu >= 0, "mu", "0 or more")

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """FedAvg's objective and the proximal term."""
        loss = super().loss(net, params, batch, server, mine)
        if self.mu:
            loss = loss + self.mu / 2 * tree.squared_distance(params, server)
        return loss
