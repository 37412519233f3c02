"""FedRoD: a generic head trained for all classes alike, and a personal one added to it."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Batch, Method, Shard, flag, mean_cross_entropy
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree

ABSENT = -1e9  # the log of no samples; infinity times the weight of a padded sample would be nan


@dataclass(frozen=True)
class FedRoD(Method):
    """FedRoD (Chen and Chao, ICLR 2022, arXiv:2107.00778), with a linear personal head.

    Body and generic head g follow the balanced softmax loss CE(g(z) + log n_i^gamma, y), n_i being the client's class
    counts; the personal head q_i follows CE(g(z) + q_i(z), y), in which z and g(z) are given. Both on the same batch,
    from one forward pass. Body and g are averaged; q_i never leaves. A client is judged by g(z) + q_i(z).

    gamma: 0 is FedAvg (for body and g), 1 the paper's.
    q_i starts as a copy of the initial g, as in the public codes; a client that never trained is judged by g alone. The
    paper's variant that generates q_i from class counts by a hypernetwork is not here.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        self.check(0 <= self.gamma < math.inf, "gamma", "0 or more")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """The personal head under the names of the generic one."""
        return params, {"q": {name: params[name] for name in parts.head}, "trained": flag(params)}

    def survey(self, net: Bound, shard: Shard, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """What the balanced softmax adds to the logits."""
        classes = len(next(iter(mine["q"].values())))
        counts = torch.bincount(shard.data.y, minlength=classes).float()
        return {"prior": torch.where(counts > 0, self.gamma * counts.clamp(min=1).log(), ABSENT)}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The global model and the personal head side by side."""
        return {"w": server, "q": mine["q"]}

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Two objectives without a common variable."""
        generic, z = net.features(params["w"], batch.x)
        balanced = generic + mine["prior"] if self.gamma else generic
        both = generic.detach() + self._extra(params["q"], z.detach())
        return mean_cross_entropy(balanced, batch) + mean_cross_entropy(both, batch)

    def observe(
        self, params: Tree, grads: Tree, loss: Tensor, batch: Batch, server: Tree, mine: dict[str, Tree]
    ) -> dict[str, Tree]:
        """From the first gradient on there is a personal head."""
        return {**mine, "trained": torch.ones_like(mine["trained"])}

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The global model goes up, the personal head stays."""
        return end["w"], {"q": end["q"], "trained": mine["trained"]}

    def judged(self, server: Tree, mine: dict[str, Tree], trained: Tree) -> Tree:
        """Both heads; until it is trained, the personal one counts as zero."""
        return {"w": trained["w"], "q": tree.map(lambda q: torch.where(mine["trained"], q, 0.0), trained["q"])}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """As judged, with the latest global model."""
        return self.judged(server, mine, self.start(server, mine))

    def predict(self, net: Bound, params: Tree, x: Tensor) -> Tensor:
        """The sum of both heads' logits."""
        generic, z = net.features(params["w"], x)
        return generic + self._extra(params["q"], z)

    @staticmethod
    def _extra(head: Tree, z: Tensor) -> Tensor:
        return F.linear(z, *head.values()).float()
