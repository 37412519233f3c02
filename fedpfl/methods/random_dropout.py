"""Federated dropout: random sub-models of one global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground import tree
from fedpfl.methods.shared.submodel import RandomSubmodel


@dataclass(frozen=True)
class RandomDropout(RandomSubmodel):
    """Random federated dropout (Caldas et al. 2018, arXiv:1812.07210), as FedSPU compares with it.

    Each client of a round trains a random sub-model of its width; activations are not rescaled.
    BatchNorm statistics are averaged at the server over the clients in which their channel was
    active.

    judge: evaluate clients with the `global` model (the method is not personalised), or with their
        `own` last sub-model, which is the initial model before the first one.
    """

    judge: Literal["global", "own"] = "global"

    def init(self, params, parts):
        """Keep a model at the client only if it is evaluated."""
        server, client = super().init(params, parts)
        return server, self._without_unused_model(client)

    def buffers(self):
        """Average statistics at the server."""
        return {"main": self.statistics or "aggregate"}

    def finish(self, server, client, start, params):
        """Keep the trained model only if it is evaluated."""
        upload, client = super().finish(server, client, start, params)
        return upload, self._without_unused_model(client)

    def personal(self, server, client):
        """Return the model that `judge` names."""
        return client["model"] if self.judge == "own" else server["model"]

    def _without_unused_model(self, client):
        """Drop the model from the client's state unless the client is evaluated by it."""
        if self.judge == "own":
            return client
        return tree.drop(client, ["model"])
