"""FedPURIN: FedCAC with other scores, and critical entries alone go up."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import PositiveProportion
from fedpfl.ground.tree import Masked
from fedpfl.methods.fedcac import FedCAC
from fedpfl.methods.shared.method import Phase


@dataclass(frozen=True)
class FedPURIN(FedCAC):
    """FedPURIN (Xie, He and Shi 2025, arXiv:2510.16065): FedCAC with sparse uploads theta_i m_i.

    Means include the zeros: an entry that is critical for c of K clients shrinks to c / K of their
    mean for all other clients, and to zero if it is for none. The download is sparse too: the
    reply's entries that are not zero. Defaults of the paper's main table (beta for FMNIST and
    CIFAR10). The authors' code keeps gradients in half precision, which enlarges the cut-off and
    what it saves; here float32.

    tau, beta, cutoff: as FedCAC's; tau is above 0.
    score: s = |g theta|, theta after training, g = the last minibatch's `gradient` or the `delta`
    theta - theta_start.
    hessian: s = |-g theta + (g theta)^2 / 2|.
    include_norm: score and share weights and biases of BatchNorm; else they never leave the
    client.
    judge: the model evaluated after training: `sparse` theta m (the authors' code, so their tables)
    or `dense` theta.
    """

    tau: PositiveProportion = 0.5
    score: Literal["gradient", "delta"] = "gradient"
    hessian: bool = False
    include_norm: bool = False
    judge: Literal["sparse", "dense"] = "sparse"

    def _shared(self, params, parts):
        """Return the tensors that travel and are scored: BatchNorm's only if `include_norm`."""
        return params if self.include_norm else tree.drop(params, parts.batch_norm)

    def prepare(self, server, client):
        """Make room for a gradient."""
        if self.score != "gradient":
            return client
        return {**client, "gradient": tree.full_like(client["own"], 0.0)}

    def download(self, server, client):
        """Return the reply's entries that are not zero, and where they are.

        The critical ones of a client without collaborators do not come down.
        """
        reply = tree.where(client["mask"], client["own"], server["model"])
        mask = tree.map(
            lambda leaf, uncovered: (leaf != 0) & ~uncovered, reply, self._uncovered(client)
        )
        return Masked(reply, mask)

    def phases(self, server, client, params, epochs):
        """Train everything; the last gradient matters, before the last step."""
        after_gradient = self._remember_gradient if self.score == "gradient" else None
        return [Phase(epochs, after_gradient=after_gradient)]

    @staticmethod
    def _remember_gradient(server, client, params, grads, batch, loss, aux):
        """Keep the last gradient."""
        return {**client, "gradient": tree.select(grads, client["own"])}

    def _scores(self, client, start, params):
        """Return the loss's change if an entry were zero, to first or second order."""
        if self.score == "gradient":
            slope = client["gradient"]
        else:
            slope = tree.map(torch.sub, params, start)
        product = tree.map(torch.mul, slope, params)  # g theta
        if self.hessian:
            return tree.map(
                lambda leaf: (leaf.square() / 2 - leaf).abs(),
                product,
            )
        return tree.map(torch.abs, product)

    def finish(self, server, client, start, params):
        """Return the critical entries and where they are."""
        upload, client = super().finish(server, client, start, params)
        critical = Masked(upload["model"], upload["mask"])
        return {"model": critical}, {**client, "model": self._judged(params, upload["mask"])}

    def evaluated(self, server, client, params):
        """Return the trained model, or its critical entries.

        Before training all scores are zero and all stays.
        """
        if self.judge == "dense":
            return params
        start = self._begin(server, client)
        return self._judged(params, self._critical_mask(client, start, params))

    def _judged(self, params, mask):
        """Return the model that `judge` says, with zeros where a shared tensor is not critical."""
        if self.judge == "dense":
            return params
        sparse = tree.apply_mask(tree.select(params, mask), mask)
        return {**params, **sparse}
