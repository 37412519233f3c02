"""FedPURIN: FedCAC with other scores, and critical entries alone go up."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import Above, AtMost
from fedpfl.ground.tree import Masked
from fedpfl.methods.fedcac import FedCAC
from fedpfl.methods.shared.method import Phase


@dataclass(frozen=True)
class FedPURIN(FedCAC):
    """FedPURIN (Xie, He and Shi 2025, arXiv:2510.16065): FedCAC with sparse uploads theta_i m_i.

    Means include the zeros: an entry that is critical for c of K clients shrinks to c / K of their
    mean for everybody else, and to zero if it is for nobody. What comes down is sparse too: the
    reply's entries that are not zero. Defaults of the paper's main table (beta for FMNIST and
    CIFAR10). The authors' code keeps gradients in half precision, which enlarges the cut-off and
    what it saves; here float32.

    tau, beta, cutoff: as FedCAC's; tau is above 0.
    score: s = |g theta|, theta after training, g = the last minibatch's `gradient` or the `delta`
    theta - theta_start.
    hessian: s = |-g theta + (g theta)^2 / 2|.
    include_norm: score and share weights and biases of BatchNorm; otherwise they never leave the
    client.
    judge: the model evaluated after training: `sparse` theta m (the authors' code, so their tables)
    or `dense` theta.
    """

    tau: Annotated[float, Above(0), AtMost(1)] = 0.5
    score: Literal["gradient", "delta"] = "gradient"
    hessian: bool = False
    include_norm: bool = False
    judge: Literal["sparse", "dense"] = "sparse"

    def _shared(self, params, parts):
        return params if self.include_norm else tree.drop(params, parts.batch_norm)

    def prepare(self, server, client):
        """Make room for a gradient."""
        return (
            {**client, "gradient": tree.full_like(client["own"], 0.0)}
            if self.score == "gradient"
            else client
        )

    def download(self, server, client):
        """Return which entries of the reply are not zero, but for a lone client's critical ones,
        and where they are.
        """
        reply = tree.where(client["mask"], client["own"], server["model"])
        return Masked(
            reply, tree.map(lambda leaf, kept: (leaf != 0) & ~kept, reply, self._alone(client))
        )

    def phases(self, server, client, params, epochs):
        """Train everything; the last gradient matters, before the last step."""
        return [Phase(epochs, after_gradient=self._remember if self.score == "gradient" else None)]

    @staticmethod
    def _remember(server, client, params, grads, batch, loss, aux):
        return {**client, "gradient": tree.select(grads, client["own"])}

    def _scores(self, client, start, end):
        """Return the loss's change if an entry were zero, to first or second order."""
        slope = client["gradient"] if self.score == "gradient" else tree.map(torch.sub, end, start)
        product = tree.map(torch.mul, slope, end)
        return tree.map(
            lambda leaf: (leaf.square() / 2 - leaf if self.hessian else leaf).abs(), product
        )

    def finish(self, server, client, start, params):
        """Return the critical entries and where they are."""
        upload, kept = super().finish(server, client, start, params)
        sent = Masked(upload["model"], upload["mask"])
        return {"model": sent}, {**kept, "model": self._judged(params, upload["mask"])}

    def evaluated(self, server, client, params):
        """Return the trained model, or what is critical of it; before training all scores are zero
        and all stays.
        """
        if self.judge == "dense":
            return params
        return self._judged(params, self._critical(client, self._begin(server, client), params))

    def _judged(self, params, mask):
        """Return the model that `judge` says, with zeros where a shared tensor is not critical."""
        return (
            params
            if self.judge == "dense"
            else {**params, **tree.apply_mask(tree.select(params, mask), mask)}
        )
