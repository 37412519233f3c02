"""FedAdam: Adam at the server."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Positive, ProportionBelowOne
from fedpfl.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """FedAdam (Reddi et al., ICLR 2021, arXiv:2003.00295): Algorithm 2.

    With D the mean of the clients' changes: m <- beta1 m + (1 - beta1) D, v <- beta2 v + (1 -
    beta2) D^2, and w <- w + lr m / (sqrt(v) + tau), entry by entry; m begins at 0, v at tau^2, and
    neither is corrected for that. The algorithm writes a plain mean; here D weights clients by
    samples, as FedAvg does.

    beta1, beta2, tau: the paper's. lr: which it tunes for each task; a step moves an entry by about
    so much.
    """

    lr: Positive = 0.01
    beta1: ProportionBelowOne = 0.9
    beta2: ProportionBelowOne = 0.99
    tau: Positive = 0.001

    server_sees = "mean of uploads"

    def init(self, params, parts):
        """Begin with m = 0 and v = tau^2."""
        server = {
            "model": params,
            "m": tree.full_like(params, 0.0),
            "v": tree.full_like(params, self.tau**2),
        }
        return server, {}

    def download(self, server, client):
        """Return the model alone."""
        return server["model"]

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Take a step of the server's optimiser (Algorithm 2)."""
        # D: the mean of the clients' changes, which takes the place of a gradient.
        change = tree.map(
            torch.sub,
            tree.mean(uploads, weight),
            server["model"],
        )
        m = tree.map(
            lambda m, d: self.beta1 * m + (1 - self.beta1) * d,
            server["m"],
            change,
        )
        d_squared = tree.map(torch.square, change)
        v = tree.map(
            lambda v, d2: self._second_moment(v, d2),
            server["v"],
            d_squared,
        )

        # w <- w + lr m / (sqrt(v) + tau)
        def update(w: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return w + self.lr * m / (v.sqrt() + self.tau)

        model = tree.map(update, server["model"], m, v)
        return {"model": model, "m": m, "v": v}, clients

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return v <- beta2 v + (1 - beta2) D^2."""
        return self.beta2 * v + (1 - self.beta2) * square
