"""FedSPU: full models, in which a random sub-model trains each round."""

from __future__ import annotations

from dataclasses import dataclass

from fedpfl.ground import tree
from fedpfl.methods.shared.submodel import RandomSubmodel


@dataclass(frozen=True)
class FedSPU(RandomSubmodel):
    """FedSPU (Niu, Dong and Qin, AAAI 2025, arXiv:2403.11464).

    A client keeps a full model. In each of its rounds a random set of neurons, new every time, is
    active: their entries come from the server, train and go back, while the rest of the client's
    model works along, frozen.

    Departures from the public code: averages are over samples and by entry (there, clients of full
    width overwrite the rest); columns behind the flattening follow their channels.
    """

    def start(self, received, client):
        """Put the server's active entries into the client's own model."""
        return tree.where(
            client["mask"],
            received["model"],
            client["model"],
        )

    def updated_buffers(self, server, client):
        """Move all statistics, since the client's whole model works."""
        return {}
