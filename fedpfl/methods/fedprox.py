"""FedProx: FedAvg with a proximal term that holds clients back."""

from dataclasses import dataclass

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class FedProx(Method):
    """FedProx (Li et al., MLSys 2020, arXiv:1812.06127): FedAvg with a proximal term.

    Each client minimises CE(w) + mu/2 |w - received w|^2. There are no stragglers.

    mu: pull towards the model received, over all trainable scalars; mu = 0 is FedAvg.
    """

    mixes_samples = ""

    mu: NonNegative = 0.01

    def loss(self, server, client, net, params, batch):
        """Return CE(w) + mu/2 |w - received w|^2."""
        loss = super().loss(server, client, net, params, batch)
        if not self.mu:
            return loss
        return loss + self.mu / 2 * tree.squared_distance(params, server)
