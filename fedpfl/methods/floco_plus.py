"""FLOCO+: FLOCO, and a private simplex that stays near the common one, as Ditto's model."""

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground import tree
from fedpfl.ground.ranges import Count, NonNegative
from fedpfl.methods.floco import Floco
from fedpfl.methods.shared.private import two_model_phases
from fedpfl.methods.shared.simplex import params_at


@dataclass(frozen=True)
class FlocoPlus(Floco):
    """FLOCO+ (Grinwald, Wiesner and Nakajima, NeurIPS 2024, arXiv:2403.03333).

    A client trains a private copy v of body and endpoints on CE(v) + lam/2 |v - received|^2 beside
    FLOCO's, on the same batches and alphas, and is evaluated by v at its centre beta_i.

    pers_epochs: epochs of the private copy; None: as many as the common one's.
    lam: pull towards the common one (the official code scales the private model by it, not the
    difference).
    cold_start: the private copy of a client that was never sampled: `initial`, or the `global` one.
    """

    pers_epochs: Count | None = None
    lam: NonNegative = 1.0
    cold_start: Literal["initial", "global"] = "initial"

    def buffers(self):
        """Keep the private model's statistics on the client."""
        return {**super().buffers(), "v": "local"}

    def init(self, params, parts):
        """Start both from the same values."""
        server, client = super().init(params, parts)
        return server, {**client, "v": server}

    def start(self, received, client):
        """Return both simplexes; a client's first private one is what `cold_start` says."""
        w = super().start(received, client)
        v = client["v"]
        if self.cold_start == "global":
            v = tree.where(client["participated"], v, w)
        return {"w": w, "v": v}

    def phases(self, server, client, params, epochs):
        """Train both simplexes together, then the one with more epochs alone."""
        personal_epochs = epochs if self.pers_epochs is None else self.pers_epochs
        return two_model_phases(epochs, personal_epochs, self._global_loss, self._personal_loss)

    def loss(self, server, client, net, params, batch):
        """Add the two objectives, at the same point."""
        personal_loss = self._personal_loss(server, client, net, params, batch)
        return self._global_loss(server, client, net, params, batch) + personal_loss

    def _global_loss(self, server, client, net, params, batch):
        """Return FLOCO's loss of the common simplex."""
        return super().loss(server, client, net, params["w"], batch)

    def _personal_loss(self, server, client, net, params, batch):
        """Return CE(v) + lam/2 |v - received|^2."""
        v = params_at(params["v"], self._point(batch, client))
        loss = batch.loss(net(v, batch.x, "v"))
        if not self.lam:
            return loss
        return loss + self.lam / 2 * tree.squared_distance(params["v"], server)

    def finish(self, server, client, start, params):
        """Send the common simplex up, keep the private one."""
        return params["w"], {**client, "v": params["v"]}

    def evaluated(self, server, client, params):
        """Return the client's point of the private simplex."""
        return super().evaluated(server, client, params["v"])

    def predict(self, net, params, batch):
        """Use the private model's statistics."""
        return net(params, batch.x, "v")
