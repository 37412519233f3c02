"""Ditto: a global model and a private one that stays near it."""

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground.ranges import NonNegative, WholeNumber
from fedpfl.methods.shared.private import PrivateModel


@dataclass(frozen=True)
class Ditto(PrivateModel):
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
        """Return both models."""
        return self._start_both(received, client)

    def _epochs_of_private(self, epochs):
        """Return as many as the global model has, by default."""
        return epochs if self.personal_epochs is None else self.personal_epochs

    def _global_loss(self, server, client, net, params, batch):
        """Return CE(w), FedAvg's objective."""
        return batch.loss(net(params["w"], batch.x, "w"))

    def _private_loss(self, server, client, net, params, batch):
        """Return CE(v)."""
        return batch.loss(net(params["v"], batch.x, "v"))

    def evaluated(self, server, client, params):
        """Return the private model."""
        return params["v"]
