"""FedDPA: entries of high Fisher information stay personal."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl import importance, tree
from fedpfl.methods import fisher
from fedpfl.methods.base import Batch, Method, Phase
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class FedDPA(Method):
    """The dynamic personalization of FedDPA (Yang, Huang and Ye, NeurIPS 2023), without its differential privacy.

    A client scores the entries of its last model by the mean squared gradient of log p over its samples, rescaled to
    [0, 1] within each tensor. Entries above the threshold come from that model, the others from the global one.

    threshold: of the rescaled score (`rule=value`, as in the paper) or the quantile that lies below it in each tensor
        (`rule=quantile`, as in FedOBP's comparison: 0.4 keeps 60 % of every tensor, where `value` keeps very few).
    train: `two_phase` (the paper): the personal entries under a pull to the global model, then the shared ones, whose
        distance from it is held near `clip`; `joint` (FedOBP's comparison): plain local training.
    lam1, lam2: weights of the two regularisers; both act on distances summed over tensors, not squared.
    Nothing is personal at a client that never trained. The paper uses Adam; here local training is what `local` says.
    """

    threshold: float = 0.4
    rule: Literal["value", "quantile"] = "value"
    train: Literal["two_phase", "joint"] = "two_phase"
    lam1: float = 0.1
    lam2: float = 0.05
    clip: float = 0.5

    def __post_init__(self) -> None:
        self.check(0 <= self.threshold <= 1, "threshold", "between 0 and 1")
        self.check(self.rule in ("value", "quantile"), "rule", "value or quantile")
        self.check(self.train in ("two_phase", "joint"), "train", "two_phase or joint")
        for field in ("lam1", "lam2", "clip"):
            self.check(getattr(self, field) >= 0, field, "0 or more")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """Without scores nothing is personal."""
        return params, {"model": params, "score": tree.full_like(params, 0.0)}

    def prepare(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """Choose the personal entries."""
        if self.rule == "value":
            scores = importance.normalize(mine["score"], "layer")
            mask = tree.map(lambda leaf: leaf > self.threshold, scores)
        else:  # which rescaling cannot change
            mask = tree.map(lambda leaf: importance.above_quantile(leaf, self.threshold), mine["score"])
        return {**mine, "mask": mask}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """Personal entries from the client's last model, the others from the global one."""
        return tree.where(mine["mask"], mine["model"], server)

    def phases(self, server: Tree, mine: dict[str, Tree], params: Tree, epochs: int) -> list[Phase]:
        """As `train` says; the second phase draws the batches that FedAvg would."""
        if self.train == "joint":
            return [Phase(epochs)]
        shared = tree.invert(mine["mask"])
        return [
            Phase(epochs, mine["mask"], "personal", self.personal_loss),
            Phase(epochs, shared, loss=self.shared_loss),
        ]

    def personal_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy and lam1 / 2 times the distance from the global model."""
        return self.loss(net, params, batch, server, mine) + self.lam1 / 2 * _distance(params, server)

    def shared_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy and lam2 / 2 times how far that distance is from `clip`."""
        loss = self.loss(net, params, batch, server, mine)
        return loss + self.lam2 / 2 * (_distance(params, server) - self.clip).abs()

    def summarize(self, net: Bound, end: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """Fisher scores of the trained model, which it keeps until its next participation."""
        return fisher.sums(net, lambda params, x: self.predict(net, params, x), end, batch)

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """All entries go up; model and scores are kept."""
        return end, {"model": end, "score": fisher.mean(mine["summary"])}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """What the next round would start from."""
        return self.start(server, self.prepare(server, mine))

    def measure(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tensor]:
        """Personal entries in all."""
        return {"personal": sum((leaf.sum() for leaf in tree.leaves(mine["mask"])), torch.tensor(0))}


def _distance(params: Tree, server: Tree) -> Tensor:
    """Sum over tensors of |params - server|; where the two are equal its gradient is taken as zero."""
    norms = tree.map(lambda own, shared: torch.linalg.vector_norm(own - shared), params, server)
    return torch.stack(tree.leaves(norms)).sum()
