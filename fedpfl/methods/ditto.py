"""Ditto: a global model and a private one that stays near it."""

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, WholeNumber
from fedpfl.methods.shared.method import Method
from fedpfl.methods.shared.private import two_model_phases


@dataclass(frozen=True)
class Ditto(Method):
    """Ditto (Li et al., ICML 2021, arXiv:2012.04221, Algorithm 1).

    FedAvg trains w, and beside it v_i follows SGD on CE(v) + lam/2 |v - w|^2, where w is the model
    RECEIVED at the beginning of the round. Both models see the same batches, as in the official
    code.

    lam: pull towards the global model.
    personal_epochs: epochs of the private model; None: as many as the global model's.
    cold_start: what a client without a private model starts from and is evaluated by: the `initial`
        model (as the references do) or the `global` one (its parameters; BatchNorm statistics of
        the private model stay its own).
    """

    mixes_samples = ""

    lam: NonNegative = 1.0
    personal_epochs: WholeNumber | None = None
    cold_start: Literal["initial", "global"] = "initial"

    def init(self, params, parts):
        """Start both models from the same values."""
        return params, {"v": params}

    def buffers(self):
        """Keep the private model's statistics on the client."""
        return {"w": self.statistics or "aggregate", "v": "local"}

    def start(self, received, client):
        """Return both models; a client's first private one is what `cold_start` says."""
        v = client["v"]
        # Else v is the initial model, where `init` put it.
        if self.cold_start == "global":
            v = tree.where(client["participated"], v, received)
        return {"w": received, "v": v}

    def phases(self, server, client, params, epochs):
        """Train both models together, then the one with more epochs alone."""
        personal_epochs = epochs if self.personal_epochs is None else self.personal_epochs
        return two_model_phases(epochs, personal_epochs, self._global_loss, self._personal_loss)

    def loss(self, server, client, net, params, batch):
        """Add the two objectives, which have no common parameter."""
        personal_loss = self._personal_loss(server, client, net, params, batch)
        return self._global_loss(server, client, net, params, batch) + personal_loss

    def _global_loss(self, server, client, net, params, batch):
        """Return CE(w), FedAvg's objective."""
        return batch.loss(net(params["w"], batch.x, "w"))

    def _personal_loss(self, server, client, net, params, batch):
        """Return CE(v) + lam/2 |v - w|^2, w being the model received."""
        loss = batch.loss(net(params["v"], batch.x, "v"))
        if not self.lam:
            return loss
        # Only where it counts: 0 times the distance of a model that diverged is nan.
        return loss + self.lam / 2 * tree.squared_distance(params["v"], server)

    def finish(self, server, client, start, params):
        """Send the global model up, keep the private one."""
        return params["w"], {"v": params["v"]}

    def evaluated(self, server, client, params):
        """Return the private model."""
        return params["v"]

    def predict(self, net, params, batch):
        """Use the private model's statistics."""
        return net(params, batch.x, "v")
