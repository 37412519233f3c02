"""FedALA: each client learns, entry by entry, how much of the global model's top layers to take."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

from fedpfl import tree
from fedpfl.methods.base import Batch, Method, Shard, flag, mean_cross_entropy, top
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class FedALA(Method):
    """FedALA (Zhang et al., AAAI 2023, arXiv:2212.01197): adaptive local aggregation.

    A client starts from theta_g in its lower layers and from theta_i + A (theta_g - theta_i) in its top ones, theta_i
    being its last model. Before, with all else fixed, A is learned on a part of its data, minibatch by minibatch:
    A <- clip(A - eta G (theta_g - theta_i), 0, 1), G the gradient at the merged model. The first time this goes on
    until the loss of an epoch's last minibatch settles; later for one epoch. A is kept. Clients are judged by such a
    model too; what A becomes for that is forgotten.

    layers: how many are treated, counted from the output (the paper's p). share: of the training samples; a random part
        of them, new each time, in one order. eta: step size of A.
    threshold, window: the first time ends when the standard deviation of the last `window` losses is below
        `threshold`, after window + 1 epochs at least and max_epochs at most (the references have no limit).
    A client that never trained takes the global model. A is learned with BatchNorm in evaluation mode.
    """

    layers: int = 1
    share: float = 0.8
    eta: float = 1.0
    threshold: float = 0.1
    window: int = 10
    max_epochs: int = 100

    def __post_init__(self) -> None:
        self.check(self.layers >= 0, "layers", "0 or more")
        self.check(0 < self.share <= 1, "share", "above 0 and at most 1")
        self.check(0 <= self.eta < math.inf, "eta", "0 or more")
        self.check(self.threshold >= 0, "threshold", "0 or more")
        self.check(self.window >= 1, "window", "1 or more")
        self.check(self.max_epochs >= 1, "max_epochs", "1 or more")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """All of the global model; of its own a client keeps the top layers alone."""
        own = {name: params[name] for name in top(parts, self.layers)}
        return params, {
            "top": own,
            "weights": tree.full_like(own, 1.0),
            "trained": flag(params),
            "settled": flag(params),
        }

    def survey(self, net: Bound, shard: Shard, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """The weights as learned from here."""
        still, batches = net.still(), list(shard.batches("weights", 0, self.share))
        if not (self.eta and mine["weights"] and batches and bool(mine["trained"])):
            return {name: mine[name] for name in ("weights", "settled")}
        objectives = [self._objective(still, batch, server, mine) for batch in batches]
        weights, losses = mine["weights"], list[float]()
        while len(losses) < self.max_epochs:
            for objective in objectives:
                slope, loss = grad_and_value(objective)(merged(weights, mine["top"], server))
                weights = tree.map(self._moved, weights, slope, mine["top"], _like(server, weights))
            losses.append(float(loss))
            spread = torch.tensor(losses[-self.window :], dtype=torch.float64).std(correction=0)
            if bool(mine["settled"]) or (len(losses) > self.window and bool(spread < self.threshold)):
                break
            if not math.isfinite(losses[-1]):  # it will not settle; training tells that it diverged
                break
        return {"weights": weights, "settled": torch.ones_like(mine["settled"])}

    def adapt(self, net: Bound, shard: Shard, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """The same, for the latest global model."""
        return self.survey(net, shard, server, mine)

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The merged model."""
        top = merged(mine["weights"], mine["top"], server)
        return {**server, **tree.where(mine["trained"], top, _like(server, top))}

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Everything goes up; weights and top layers are kept."""
        return end, {**mine, "top": _like(end, mine["top"]), "trained": ~flag(end)}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The merged model."""
        return self.start(server, mine)

    def measure(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tensor]:
        """The mean weight of the global model."""
        if not mine["weights"]:
            return {}
        return {"global_share": tree.flat(mine["weights"]).mean()}

    def _moved(self, weight: Tensor, slope: Tensor, own: Tensor, shared: Tensor) -> Tensor:
        return (weight - self.eta * slope * (shared - own)).clamp(0, 1)

    def _objective(self, net: Bound, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Callable[[Tree], Tensor]:
        """The loss on a minibatch as a function of the top layers."""
        if tuple(mine["top"]) != net.net.parts.head:
            return lambda top: mean_cross_entropy(net({**server, **top}, batch.x), batch)
        with torch.no_grad():
            _, z = net.features(server, batch.x)  # below the head nothing changes
        return lambda top: mean_cross_entropy(F.linear(z, *top.values()).float(), batch)


def merged(weights: Tree, own: Tree, server: Tree) -> Tree:
    """`own` + weights (server - own), exactly `server` for 1 and exactly `own` for 0."""

    def merge(weight: Tensor, mine: Tensor, shared: Tensor) -> Tensor:
        return torch.where(weight == 0, mine, shared - (shared - mine) * (1 - weight))

    return tree.map(merge, weights, own, _like(server, weights))


def _like(params: Tree, names: Tree) -> Tree:
    return {name: params[name] for name in names}
