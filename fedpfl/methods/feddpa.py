"""FedDPA: entries of high Fisher information stay personal."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, Proportion
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared import fisher, importance
from fedpfl.methods.shared.batch import Batch
from fedpfl.methods.shared.by_mask import PersonalByMask
from fedpfl.methods.shared.method import Phase


@dataclass(frozen=True)
class FedDPA(PersonalByMask):
    """The dynamic personalization of FedDPA (Yang, Huang and Ye, NeurIPS 2023).

    Its noise is `privacy=client`. A client scores the entries of its last model by the mean squared
    gradient of log p over its samples, rescaled to [0, 1] within each tensor. Entries above the
    threshold come from that model, the rest from the global one.

    threshold: of the rescaled score (`rule=value`, as in the paper) or the quantile that lies below
        it in each tensor (`rule=quantile`, as in FedOBP's comparison: 0.4 keeps 60 % of every
        tensor, where `value` keeps very few).
    train: `two_phase` (the paper): the personal entries under a pull to the global model, then the
        shared ones, with a distance from it near `clip` (take privacy.clip: a sum over
        tensors is no less than the norm that is cut off there); `joint` (FedOBP's comparison):
        plain local training.
    lam1, lam2: weights of the two regularisers; both act on distances summed over tensors, not
    squared. Nothing is personal at a client that never trained. The paper uses Adam; here local
    training is what `local` says.
    """

    threshold: Proportion = 0.4
    rule: Literal["value", "quantile"] = "value"
    train: Literal["two_phase", "joint"] = "two_phase"
    lam1: NonNegative = 0.1
    lam2: NonNegative = 0.05
    clip: NonNegative = 0.5

    def init(self, params, parts):
        """Make nothing personal, by scores of zero."""
        return params, {"model": params, "score": tree.full_like(params, 0.0)}

    def prepare(self, server, client):
        """Choose the personal entries."""
        if self.rule == "value":
            scores = importance.rescale_scores(client["score"])
            mask = tree.map(lambda leaf: leaf > self.threshold, scores)
        else:
            # Rescaling a tensor cannot change which entries lie above its quantile.
            scores = client["score"]
            mask = tree.map(
                lambda s: importance.mask_above_quantile(s, self.threshold),
                scores,
            )
        return {**client, "mask": mask}

    def phases(self, server, client, params, epochs):
        """Train as `train` says; the second phase draws the batches that FedAvg would."""
        if self.train == "joint":
            return [Phase(epochs)]
        personal = client["mask"]
        return [
            Phase(epochs, personal, stream="personal", loss=self._personal_loss),
            Phase(epochs, tree.invert(personal), loss=self._shared_loss),
        ]

    def _personal_loss(self, server, client, net, params, batch):
        """Return CE + lam1 / 2 |theta - theta_g|, a pull to the global model."""
        loss = self.loss(server, client, net, params, batch)
        return loss + self.lam1 / 2 * _summed_distance(params, server)

    def _shared_loss(self, server, client, net, params, batch):
        """Return CE + lam2 / 2 ||theta - theta_g| - clip|: the distance stays near clip."""
        loss = self.loss(server, client, net, params, batch)
        excess = (_summed_distance(params, server) - self.clip).abs()
        return loss + self.lam2 / 2 * excess

    def after_training(self, server, client, net, params, shard, aux):
        """Return Fisher scores of the trained model.

        They serve until the client's next participation.
        """

        def logits(scored: Tree, batch: Batch) -> Tensor:
            return self.predict(net, scored, batch)

        return {"score": fisher.fisher_scores(net, logits, params, shard)}

    def finish(self, server, client, start, params):
        """Return all entries, and keep model and scores."""
        return params, {"model": params, "score": client["score"]}

    def metrics(self, server, client):
        """Count the personal entries."""
        return {"personal": tree.ravel(client["mask"]).sum()}


def _summed_distance(params: Tree, server: Tree) -> Tensor:
    """Sum |params - server| over tensors; where the two are equal its gradient is zero."""
    # No root of a sum of squares: its gradient at 0 is nan.
    norms = tree.map(
        lambda local, shared: torch.linalg.vector_norm(local - shared),
        params,
        server,
    )
    return torch.stack(tree.leaves(norms)).sum()
