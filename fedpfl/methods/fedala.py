"""FedALA: each client learns, entry by entry, how much of the global model's top layers to take."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from fedpfl.ground import tree
from fedpfl.ground.ranges import Above, AtLeast, AtMost
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
    settles; later for one epoch. A is kept. Clients are evaluated by such a model too; what A
    becomes for that is forgotten.

    layers: how many are treated, counted from the output (the paper's p). share: of the training
    samples; a random part
        of them, new each time, in one order. eta: step size of A.
    threshold, window: the first time ends when the standard deviation of the last `window` losses
        is below `threshold`, after window + 1 epochs at least and max_epochs at most (the
        references have no limit). A client that never trained takes the global model. A is learned
        with BatchNorm in evaluation mode.
    """

    layers: Annotated[int, AtLeast(0)] = 1
    share: Annotated[float, Above(0), AtMost(1)] = 0.8
    eta: Annotated[float, AtLeast(0)] = 1.0
    threshold: Annotated[float, AtLeast(0)] = 0.1
    window: Annotated[int, AtLeast(1)] = 10
    max_epochs: Annotated[int, AtLeast(1)] = 100

    def init(self, params, parts):
        """Keep the top layers alone of a client's own model; begin with all of the global one."""
        own = tree.select(params, top_layer_names(parts, self.layers))
        weights = tree.full_like(own, 1.0)
        return params, {"top": own, "weights": weights, "settled": flag(params)}

    def before_training(self, server, client, net, shard):
        """Return the weights as learned from here."""
        still, batches = net.still(), list(shard.batches("weights", 0, self.share))
        if not (self.eta and client["weights"] and batches and bool(client["participated"])):
            return tree.select(client, ("weights", "settled"))
        objectives = [self._objective(server, client, still, batch) for batch in batches]
        weights, losses = client["weights"], list[float]()
        while len(losses) < self.max_epochs:
            for objective in objectives:
                slope, loss = grad_and_value(objective)(
                    merge_models(weights, client["top"], server)
                )
                weights = tree.map(
                    self._moved, weights, slope, client["top"], tree.select(server, weights)
                )
            losses.append(float(loss))
            spread = torch.tensor(losses[-self.window :], dtype=torch.float64).std(correction=0)
            if bool(client["settled"]) or (
                len(losses) > self.window and bool(spread < self.threshold)
            ):
                break
            if not math.isfinite(losses[-1]):  # it will not settle; training tells that it diverged
                break
        return {"weights": weights, "settled": torch.ones_like(client["settled"])}

    def before_evaluation(self, server, client, net, shard):
        """Do the same for the latest global model."""
        return self.before_training(server, client, net, shard)

    def start(self, received, client):
        """Return the merged model."""
        own = merge_models(client["weights"], client["top"], received)
        return {**received, **tree.where(client["participated"], own, tree.select(received, own))}

    def finish(self, server, client, start, params):
        """Send everything up; keep weights and top layers."""
        return params, {**client, "top": tree.select(params, client["top"])}

    def metrics(self, server, client):
        """Return the mean weight of the global model."""
        return {"global_share": tree.ravel(client["weights"]).mean()} if client["weights"] else {}

    def _moved(self, weight: Tensor, slope: Tensor, own: Tensor, shared: Tensor) -> Tensor:
        return (weight - self.eta * slope * (shared - own)).clamp(0, 1)

    def _objective(self, server, client, net, batch):
        """Return the loss on a minibatch as a function of the top layers."""
        if tuple(client["top"]) != net.net.parts.head:
            return lambda own: batch.cross_entropy(net({**server, **own}, batch.x))
        with torch.no_grad():
            _, z = net.features(server, batch.x)  # below the head nothing changes
        return lambda own: batch.cross_entropy(F.linear(z, *own.values()).float())


def merge_models(weights: Tree, own: Tree, server: Tree) -> Tree:
    """Return `own` + weights (server - own), exactly `server` for 1 and exactly `own` for 0."""

    def merge(weight: Tensor, own: Tensor, shared: Tensor) -> Tensor:
        return torch.where(weight == 0, own, shared - (shared - own) * (1 - weight))

    return tree.map(merge, weights, own, tree.select(server, weights))
