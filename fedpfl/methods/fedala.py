"""FedALA: each client learns, entry by entry, how much of the global model's top layers to take."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from fedpfl.ground import tree
from fedpfl.ground.ranges import (
    Count,
    NonNegative,
    PositiveProportion,
    WholeNumber,
)
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.by_name import top_layer_names
from fedpfl.methods.shared.method import Method, flag


@dataclass(frozen=True)
class FedALA(Method):
    """FedALA (Zhang et al., AAAI 2023, arXiv:2212.01197): adaptive local aggregation.

    A client starts from theta_g in its lower layers and from theta_i + A (theta_g - theta_i) in its
    top ones, theta_i being its last model. Before, with all else fixed, A is learned on a part of
    its data, minibatch by minibatch: A <- clip(A - eta G (theta_g - theta_i), 0, 1), G the gradient
    at the merged model. The first time this goes on until the loss of an epoch's last minibatch
    settles; later for one epoch. A is kept. Clients are evaluated by such a model too; this
    change of A is forgotten.

    layers: how many are treated, counted from the output (the paper's p). share: of the training
    samples; a random part
        of them, new each time, in one order. eta: step size of A.
    threshold, window: the first time ends when the standard deviation of the last `window` losses
        is below `threshold`, after window + 1 epochs at least and max_epochs at most (the
        references have no limit). A client that never trained takes the global model. A is learned
        with BatchNorm in evaluation mode. In FL-bench the clients of a worker share a model and A.
    """

    layers: WholeNumber = 1
    share: PositiveProportion = 0.8
    eta: NonNegative = 1.0
    threshold: NonNegative = 0.1
    window: Count = 10
    max_epochs: Count = 100

    def init(self, params, parts):
        """Keep a client's own top layers alone; begin with all of the global ones."""
        top_layers = tree.select(params, top_layer_names(parts, self.layers))
        weights = tree.full_like(top_layers, 1.0)
        return params, {"top": top_layers, "weights": weights, "settled": flag(params)}

    def before_training(self, server, client, net, shard):
        """Return the weights A as learned from here."""
        weights = client["weights"]
        batches = list(shard.batches("weights", 0, self.share))
        # No step size, no treated layer, or no minibatch: there is nothing to learn.
        can_learn = self.eta and weights and batches
        if not (can_learn and bool(client["participated"])):
            return tree.select(client, ("weights", "settled"))
        still = net.still()
        # Each epoch meets the same minibatches: what does not depend on A is computed once.
        objectives = [self._objective(server, client, still, batch) for batch in batches]
        global_top = tree.select(server, weights)
        losses = list[float]()
        while len(losses) < self.max_epochs:
            # ---- An epoch: A <- clip(A - eta G (theta_g - theta_i), 0, 1) on each minibatch.
            for objective in objectives:
                model = merge_models(weights, client["top"], server)
                slope, loss = grad_and_value(objective)(model)
                weights = tree.map(
                    self._update_weight,
                    weights,
                    slope,
                    client["top"],
                    global_top,
                )
            # The loss of the last minibatch, as in the references.
            losses.append(float(loss))

            # ---- The first time ends when the losses settle, later ones after one epoch.
            recent = torch.tensor(losses[-self.window :], dtype=torch.float64)
            is_steady = bool(recent.std(correction=0) < self.threshold)
            if bool(client["settled"]) or (len(losses) > self.window and is_steady):
                break
            if not math.isfinite(losses[-1]):  # it will not settle; training tells that it diverged
                break
        return {"weights": weights, "settled": torch.ones_like(client["settled"])}

    # The same for the latest global model.
    before_evaluation = before_training

    def start(self, received, client):
        """Return the merged model; a client that never trained takes the global one."""
        merged = merge_models(client["weights"], client["top"], received)
        global_top = tree.select(received, merged)
        top_layers = tree.where(client["participated"], merged, global_top)
        return {**received, **top_layers}

    def finish(self, server, client, start, params):
        """Send everything up; keep weights and top layers."""
        return params, {**client, "top": tree.select(params, client["top"])}

    def metrics(self, server, client):
        """Return the mean weight of the global model."""
        if not client["weights"]:
            return {}
        return {"global_share": tree.ravel(client["weights"]).mean()}

    def _update_weight(
        self, weight: Tensor, slope: Tensor, local: Tensor, shared: Tensor
    ) -> Tensor:
        """Return clip(A - eta G (theta_g - theta_i), 0, 1)."""
        return (weight - self.eta * slope * (shared - local)).clamp(0, 1)

    def _objective(self, server, client, net, batch):
        """Return the loss on a minibatch as a function of the top layers."""
        parts = net.net.parts
        if parts.linear_weight and parts.is_linear_end and tuple(client["top"]) == parts.head:
            with torch.no_grad():
                _, z = net.features(server, batch.x)  # below the head nothing changes

            def head_loss(head):
                return batch.loss(F.linear(z, *head.values()).float())

            return head_loss

        def network_loss(top_layers):
            return batch.loss(net({**server, **top_layers}, batch.x))

        return network_loss


def merge_models(weights: Tree, local: Tree, server: Tree) -> Tree:
    """Return theta_i + A (theta_g - theta_i) for the entries that have a weight A.

    It is exactly theta_g for 1 and exactly theta_i for 0.
    """

    def merge(weight: Tensor, local: Tensor, shared: Tensor) -> Tensor:
        return torch.where(
            weight == 0,
            local,
            shared - (shared - local) * (1 - weight),
        )

    return tree.map(merge, weights, local, tree.select(server, weights))
