"""Ditto: a global model and a private one that stays near it."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast
from fedpfl.methods.shared.method import Method
from fedpfl.methods.shared.private import two_model_phases


@dataclass(frozen=True)
class Ditto(Method):
    """Ditto (Li et al., ICML 2021, arXiv:2012.04221, Algorithm 1): FedAvg, and v_i by SGD on CE(v)
    + lam/2 |v - w|^2.

    w is the model RECEIVED at the beginning of the round. Both models see the same batches, as in
    the official code.

    lam: pull towards the global model.
    personal_epochs: epochs of the private model; None: as many as the global model's.
    cold_start: what a client without a private model starts from and is evaluated by: the `initial`
        model (as the references do) or the `global` one (its parameters; BatchNorm statistics of
        the private model stay its own).
    """

    lam: Annotated[float, AtLeast(0)] = 1.0
    personal_epochs: Annotated[int, AtLeast(0)] | None = None
    cold_start: Literal["initial", "global"] = "initial"

    def init(self, params, parts):
        """Start both models from the same values."""
        return params, {"v": params}

    def buffers(self):
        """Keep the private model's statistics on the client."""
        return {"w": self.statistics or "aggregate", "v": "local"}

    def start(self, received, client):
        """Return both models side by side, without a private one as `cold_start` says."""
        own = (
            client["v"]
            if self.cold_start == "initial"
            else tree.where(client["participated"], client["v"], received)
        )
        return {"w": received, "v": own}

    def phases(self, server, client, params, epochs):
        """Train both together for as long as both train, then the one with more epochs alone."""
        own = epochs if self.personal_epochs is None else self.personal_epochs
        return two_model_phases(epochs, own, self._global_loss, self._personal_loss)

    def loss(self, server, client, net, params, batch):
        """Add the two objectives, which have no common parameter."""
        own = self._personal_loss(server, client, net, params, batch)
        return self._global_loss(server, client, net, params, batch) + own

    def _global_loss(self, server, client, net, params, batch):
        return batch.cross_entropy(net(params["w"], batch.x, "w"))

    def _personal_loss(self, server, client, net, params, batch):
        loss = batch.cross_entropy(net(params["v"], batch.x, "v"))
        return (
            loss + self.lam / 2 * tree.squared_distance(params["v"], server) if self.lam else loss
        )

    def finish(self, server, client, start, params):
        """Send the global model up, keep the private one."""
        return params["w"], {"v": params["v"]}

    def evaluated(self, server, client, params):
        """Return the private model."""
        return params["v"]

    def predict(self, net, params, batch):
        """Use the private model's statistics."""
        return net(params, batch.x, "v")
