"""FedRolex: narrow devices train a window of neurons that rolls on every round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedpfl.methods.heterofl import HeteroFL
from fedpfl.methods.shared import neurons
from fedpfl.methods.shared.method import flag
from fedpfl.methods.shared.neurons import Rounding


@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """FedRolex (Alam et al., NeurIPS 2022, arXiv:2212.01548): HeteroFL with a window that rolls on.

    In round t = 0, 1, ... a client of width r trains the neurons {(t + q) mod M : q = 0, ...,
    floor(r M) - 1} of the M of each hidden layer, the same t for everyone; means are by samples.
    The authors' code rolls the window backwards, rounds up and weights clients equally; which way
    it rolls makes no difference in distribution.
    """

    rounding: Rounding = "floor"
    weighting: Literal["equal", "samples"] = "samples"

    server_sees = "each upload"

    def init(self, params, parts):
        """Count the rounds played, and at the client those before its last training."""
        server, client = super().init(params, parts)
        rounds = flag(params).long()
        return {**server, "rounds": rounds}, {**client, "rounds": rounds}

    def prepare(self, server, client):
        """Move the client's window to where it is this round."""
        return super().prepare(server, {**client, "rounds": server["rounds"]})

    def _active(self, server, client):
        """Return the neurons of the client's window."""
        return neurons.rolling_neurons(
            server["plan"], client["width"], client["rounds"], self.rounding
        )

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Roll the window on."""
        server, clients = super().aggregate(server, clients, net, uploads, weight, generator)
        return {**server, "rounds": server["rounds"] + 1}, clients
