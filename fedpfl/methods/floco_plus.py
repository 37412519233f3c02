"""FLOCO+: FLOCO, and beside it a private simplex that stays near the common one, as Ditto's model."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast
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

    pers_epochs: Annotated[int, AtLeast(1)] | None = None
    lam: Annotated[float, AtLeast(0)] = 1.0
    cold_start: Literal["initial", "global"] = "initial"

    def buffers(self):
        """Keep the private model's statistics on the client."""
        return {**super().buffers(), "v": "local"}

    def init(self, params, parts):
        """Start both from the same values."""
        server, client = super().init(params, parts)
        return server, {**client, "v": server}

    def start(self, received, client):
        """Return both side by side, without a private one as `cold_start` says."""
        model, own = super().start(received, client), client["v"]
        if self.cold_start == "global":
            own = tree.where(client["participated"], own, model)
        return {"w": model, "v": own}

    def phases(self, server, client, params, epochs):
        """Train both together for as long as both train, then the one with more epochs alone."""
        own = epochs if self.pers_epochs is None else self.pers_epochs
        return two_model_phases(epochs, own, self._global_loss, self._personal_loss)

    def loss(self, server, client, net, params, batch):
        """Add the two objectives, at the same point."""
        own = self._personal_loss(server, client, net, params, batch)
        return self._global_loss(server, client, net, params, batch) + own

    def _global_loss(self, server, client, net, params, batch):
        return super().loss(server, client, net, params["w"], batch)

    def _personal_loss(self, server, client, net, params, batch):
        loss = batch.cross_entropy(
            net(params_at(params["v"], self._point(batch, client)), batch.x, "v")
        )
        return (
            loss + self.lam / 2 * tree.squared_distance(params["v"], server) if self.lam else loss
        )

    def finish(self, server, client, start, params):
        """Send the common simplex up, keep the private one."""
        return params["w"], {**client, "v": params["v"]}

    def evaluated(self, server, client, params):
        """Return the client's point of the private simplex."""
        return super().evaluated(server, client, params["v"])

    def predict(self, net, params, batch):
        """Use the private model's statistics."""
        return net(params, batch.x, "v")
