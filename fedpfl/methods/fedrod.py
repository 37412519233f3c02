"""FedRoD: a generic head trained for all classes alike, and a personal one added to it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import Method

ABSENT = -1e9  # the log of no samples; infinity times the weight of a padded sample would be nan


@dataclass(frozen=True)
class FedRoD(Method):
    """FedRoD (Chen and Chao, ICLR 2022, arXiv:2107.00778), with a linear personal head.

    Body and generic head g follow the balanced softmax loss CE(g(z) + log n_i^gamma, y), n_i being
    the client's class counts; the personal head q_i follows CE(g(z) + q_i(z), y), in which z and
    g(z) are given. Both on the same batch, from one forward pass. Body and g are averaged; q_i
    never leaves. A client is evaluated by g(z) + q_i(z).

    gamma: 0 is FedAvg (for body and g), 1 the paper's. q_i starts as a copy of the initial g, as in
    the public codes; a client that never trained is evaluated by g alone. The paper's variant that
    generates q_i from class counts by a hypernetwork is not here. FL-bench predicts by q_i alone.
    """

    gamma: NonNegative = 1.0

    needs_classes = "its balanced softmax counts classes"

    def init(self, params, parts):
        """Keep the personal head under the names of the generic one."""
        parts.require_linear_end()
        return params, {"q": tree.select(params, parts.head)}

    def before_training(self, server, client, net, shard):
        """Return log n_i^gamma, which the balanced softmax adds to the logits."""
        classes = len(next(iter(client["q"].values())))
        counts = torch.bincount(shard.data.y, minlength=classes).float()
        log_prior = self.gamma * counts.clamp(min=1).log()
        return {"prior": torch.where(counts > 0, log_prior, ABSENT)}

    def start(self, received, client):
        """Return the global model and the personal head side by side."""
        return {"w": received, "q": client["q"]}

    def loss(self, server, client, net, params, batch):
        """Add two objectives without a common variable."""
        generic, z = net.features(params["w"], batch.x)
        # CE(g(z) + log n_i^gamma, y) for body and generic head
        balanced = generic
        if self.gamma:
            balanced = generic + client["prior"]
        # CE(g(z) + q_i(z), y) for the personal head, z and g(z) being given
        sum_of_heads = generic.detach() + _head_logits(params["q"], z.detach())
        return batch.loss(balanced) + batch.loss(sum_of_heads)

    def finish(self, server, client, start, params):
        """Send the global model up, keep the personal head."""
        return params["w"], {"q": params["q"]}

    def evaluated(self, server, client, params):
        """Return both heads; until it is trained, the personal one counts as zero."""
        personal = tree.map(
            lambda q: torch.where(client["trained"], q, 0.0),
            params["q"],
        )
        return {"w": params["w"], "q": personal}

    def predict(self, net, params, batch):
        """Return g(z) + q_i(z)."""
        generic, z = net.features(params["w"], batch.x)
        return generic + _head_logits(params["q"], z)


def _head_logits(head: Tree, z: Tensor) -> Tensor:
    """Return the logits of a linear head, in float32 under any autocast."""
    return F.linear(z, *head.values()).float()
