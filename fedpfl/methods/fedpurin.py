"""FedPURIN: FedCAC with other scores, and critical entries alone go up."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import Above, AtMost
from fedpfl.ground.tree import Masked
from fedpfl.methods.shared.critical import Critical, alone
from fedpfl.methods.shared.method import Phase
from fedpfl.methods.shared.submodel import padded


@dataclass(frozen=True)
class FedPURIN(Critical):
    """FedPURIN (Xie, He and Shi 2025, arXiv:2510.16065): FedCAC with sparse uploads theta_i m_i.

    Means include the zeros: an entry that is critical for c of K clients shrinks to c / K of their mean for everybody
    else, and to zero if it is for nobody. Defaults of the paper's main table (beta for FMNIST and CIFAR10).
    The authors' code keeps gradients in half precision, which enlarges the cut-off and what it saves; here float32.

    score: s = |g theta|, theta after training, g = the last minibatch's `gradient` or the `delta` theta - theta_start.
    hessian: s = |-g theta + (g theta)^2 / 2|.
    include_norm: score and share weights and biases of BatchNorm; otherwise they never leave the client.
    judge: the model evaluated after training: `sparse` theta m (the authors' code, so their tables) or `dense` theta.
    """

    tau: Annotated[float, Above(0), AtMost(1)] = 0.5
    score: Literal["gradient", "delta"] = "gradient"
    hessian: bool = False
    include_norm: bool = False
    judge: Literal["sparse", "dense"] = "sparse"

    def _shared(self, params, parts):
        return params if self.include_norm else tree.without(params, parts.batch_norm)

    def _scores(self, client, start, end):
        """Return the loss's change if an entry were zero, to first or second order."""
        slope = client["gradient"] if self.score == "gradient" else tree.map(torch.sub, end, start)
        product = tree.map(torch.mul, slope, end)
        return tree.map(lambda leaf: (leaf.square() / 2 - leaf if self.hessian else leaf).abs(), product)

    def prepare(self, server, client):
        """Find out which entries come down: those that are not zero, but for a lone client's own.

        There is room for a gradient too.
        """
        reply = tree.where(client["mask"], client["own"], server["model"])
        sent = tree.map(lambda leaf, kept: (leaf != 0) & ~kept, reply, alone(client))
        gradient = {"gradient": tree.full_like(client["own"], 0.0)} if self.score == "gradient" else {}
        return {**client, **gradient, "sent": sent}

    def download(self, server, client):
        """Return the sent entries of the reply, and where they are."""
        return Masked(tree.where(client["mask"], client["own"], server["model"]), client["sent"])

    def phases(self, server, client, params, epochs):
        """Train everything; the last gradient matters, before the last step."""
        return [Phase(epochs, after_gradient=self._remember if self.score == "gradient" else None)]

    @staticmethod
    def _remember(server, client, params, grads, loss, batch):
        return {**client, "gradient": tree.named(grads, client["own"])}

    def finish(self, server, client, start, end):
        """Return the critical entries and where they are."""
        upload, kept = super().finish(server, client, start, end)
        sparse = padded(upload["model"], upload["mask"])
        model = {**end, **sparse} if self.judge == "sparse" else end
        return {"model": Masked(sparse, upload["mask"])}, {**kept, "model": model}

    def aggregate(self, server, clients, uploads, weight):
        """Average with the zeros."""
        return super().aggregate(server, clients, {"model": uploads["model"].values}, weight)

    def evaluated(self, server, client, params):
        """Return the trained model, or what is critical of it; before training all scores are zero and all stays."""
        if self.judge == "dense":
            return params
        mask = self._critical(client, self._begin(server, client), params)
        return {**params, **padded(tree.named(params, mask), mask)}
