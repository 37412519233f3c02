"""FLOCO+: FLOCO, and a private simplex that stays near the common one, as Ditto's model."""

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground.ranges import Count, NonNegative
from fedpfl.methods.floco import Floco
from fedpfl.methods.shared.private import PrivateModel
from fedpfl.methods.shared.simplex import params_at


@dataclass(frozen=True)
class FlocoPlus(PrivateModel, Floco):
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
        """Return both simplexes."""
        return self._start_both(super().start(received, client), client)

    def _epochs_of_private(self, epochs):
        """Return as many as the common simplex has, by default."""
        return self.pers_epochs or epochs

    def _global_loss(self, server, client, net, params, batch):
        """Return FLOCO's loss of the common simplex."""
        return Floco.loss(self, server, client, net, params["w"], batch)

    def _private_loss(self, server, client, net, params, batch):
        """Return CE(v) at the same point."""
        v = params_at(params["v"], self._point(batch, client))
        return batch.loss(net(v, batch.x, "v"))

    def evaluated(self, server, client, params):
        """Return the client's point of the private simplex."""
        return super().evaluated(server, client, params["v"])
