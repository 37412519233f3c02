"""FedAvgM: FedAvg with momentum at the server."""

from dataclasses import dataclass

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import Positive, ProportionBelowOne
from fedpfl.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with server momentum (Hsu, Qi and Brown 2019, arXiv:1909.06335).

    With D the weighted mean of the clients' changes: v <- momentum v + D, w <- w + lr v. The paper
    has no lr (1); Reddi et al. (ICLR 2021, arXiv:2003.00295) tune it. With momentum=0 and lr=1 this
    is FedAvg.

    nesterov: whether the step is the accelerated one, w <- w + lr (D + momentum v), as
        torch.optim.SGD takes it. FL-bench and Flower's baseline take it, which says that the
        paper's experiments do.
    """

    lr: Positive = 1.0
    momentum: ProportionBelowOne = 0.9
    nesterov: bool = False

    server_sees = "mean of uploads"

    def init(self, params, parts):
        """Begin with no momentum."""
        return {"model": params, "momentum": tree.full_like(params, 0.0)}, {}

    def download(self, server, client):
        """Return the model alone."""
        return server["model"]

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Take a step of SGD with momentum, D in the place of the negative gradient."""
        # D: the mean of the clients' changes.
        change = tree.map(
            torch.sub,
            tree.mean(uploads, weight),
            server["model"],
        )
        momentum = tree.map(
            lambda v, d: self.momentum * v + d,
            server["momentum"],
            change,
        )
        # v, or D + momentum v as torch.optim.SGD has it for Nesterov's step
        step = momentum
        if self.nesterov:
            step = tree.map(
                lambda v, d: d + self.momentum * v,
                momentum,
                change,
            )
        model = tree.map(
            lambda w, s: w + self.lr * s,
            server["model"],
            step,
        )
        return {"model": model, "momentum": momentum}, clients
