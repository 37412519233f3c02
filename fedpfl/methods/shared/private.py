"""Methods that train a global model w and a client's private one v on the same batches."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from fedpfl.ground import tree
from fedpfl.methods.shared.method import Method, Phase


@dataclass(frozen=True)
class PrivateModel(Method):
    """Train v beside w: it is drawn to w and never leaves the client.

    A method's fields are `lam`, the strength of the pull, and `cold_start`: whether the first v is
    the `initial` model or the `global` one.
    """

    lam = 1.0
    cold_start = "initial"

    @abstractmethod
    def _epochs_of_private(self, epochs):
        """Return the epochs of v, where w has `epochs`."""

    @abstractmethod
    def _global_loss(self, server, client, net, params, batch):
        """Return the objective of w."""

    @abstractmethod
    def _private_loss(self, server, client, net, params, batch):
        """Return the objective of v, without the pull."""

    def _start_both(self, w, client):
        """Return both models; a client's first private one is what `cold_start` says."""
        v = client["v"]
        # Else v is the initial model, where `init` put it.
        if self.cold_start == "global":
            v = tree.where(client["participated"], v, w)
        return {"w": w, "v": v}

    def phases(self, server, client, params, epochs):
        """Train both models together, then the one with more epochs alone."""
        private_epochs = self._epochs_of_private(epochs)
        global_alone = max(0, epochs - private_epochs)
        private_alone = max(0, private_epochs - epochs)
        return [
            Phase(min(epochs, private_epochs)),
            Phase(global_alone, {"w": True, "v": False}, loss=self._global_loss),
            Phase(private_alone, {"w": False, "v": True}, loss=self._pulled_loss),
        ]

    def loss(self, server, client, net, params, batch):
        """Add the two objectives, which have no common parameter."""
        private_loss = self._pulled_loss(server, client, net, params, batch)
        return self._global_loss(server, client, net, params, batch) + private_loss

    def _pulled_loss(self, server, client, net, params, batch):
        """Return the objective of v + lam/2 |v - w|^2, w being the model received."""
        loss = self._private_loss(server, client, net, params, batch)
        if not self.lam:
            return loss
        # Only where it counts: 0 times the distance of a model that diverged is nan.
        return loss + self.lam / 2 * tree.squared_distance(params["v"], server)

    def finish(self, server, client, start, params):
        """Send the global model up, keep the private one."""
        return params["w"], {**client, "v": params["v"]}

    def predict(self, net, params, batch):
        """Use the private model's statistics."""
        return net(params, batch.x, "v")
