"""Clients that prune the network to the neurons that matter most to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import Positive, WholeNumber
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared import neurons
from fedpfl.methods.shared.method import send_if
from fedpfl.methods.shared.submodel import Submodel


@dataclass(frozen=True)
class PrunedSubmodel(Submodel, ABC):
    """A client ranks each layer's neurons once, and keeps the top share.

    At its first participation it receives the full model and ranks the neurons; the top share of
    its width is its sub-model. This is the version that FedSPU compares with.

    ranking_epochs, ranking_lr: plain SGD on a copy of the received model, which is then thrown
        away; this copy ranks the neurons (in PruneFL the gradients on the way do). 0 epochs: the
        received model itself does.
    first: the model that a client ranks and begins with: `initial`, as in that comparison, or the
        `current` global one.
    """

    ranking_epochs: WholeNumber = 1
    ranking_lr: Positive = 0.01
    first: Literal["initial", "current"] = "initial"

    @abstractmethod
    def _scores(self, model: Tree, gradients: Tree) -> Tree:
        """Weigh each entry.

        Args:
            model: the copy trained for ranking.
            gradients: the sum of its gradients on the way.
        """

    def init(self, params, parts):
        """Give the client all neurons, not yet ranked."""
        server, client = super().init(params, parts)
        all_neurons = torch.ones_like(server["plan"]["group"], dtype=torch.bool)
        return server, {**client, "own": all_neurons}

    def before_training(self, server, client, net, shard):
        """Return the client's neurons, which it ranks once."""
        if bool(client["participated"]):
            return {"own": client["own"]}
        model = client["model"] if self.first == "initial" else server["model"]
        objective = partial(self.loss, server, client)

        # ---- Train a copy for ranking.
        copy = tree.clone(model)
        total = tree.full_like(model, 0.0)
        for epoch in range(self.ranking_epochs):
            for batch in shard.batches("ranking", epoch):
                grads, _ = net.gradient(objective, copy, batch)
                copy = tree.map(
                    lambda leaf, grad: leaf - self.ranking_lr * grad,
                    copy,
                    grads,
                )
                total = tree.map(torch.add, total, grads)

        # ---- Keep the neurons with the largest incoming weights.
        score = neurons.sum_incoming(
            server["plan"],
            self._scores(copy, total),
        )
        active = neurons.top_neurons(
            server["plan"],
            client["width"],
            score,
            self.rounding,
        )
        return {"own": active[:-1]}

    def _active(self, server, client):
        """Return the neurons that the client has kept."""
        return neurons.append_always_active(client["own"])

    def download(self, server, client):
        """Send the full model once, then the client's part."""
        joins_now = ~client["participated"]
        mask = tree.map(lambda leaf: leaf | joins_now, client["mask"])
        return Agreed(server["model"], mask)

    def start(self, received, client):
        """Return the received model's entries between the client's neurons."""
        model = received
        if self.first == "initial":
            model = tree.where(client["participated"], model, client["model"])
        return tree.apply_mask(model, client["mask"])

    def finish(self, server, client, start, params):
        """Upload the client's part, and once which neurons it has."""
        # Once the server knows a client's neurons, they need not travel again.
        neurons_once = send_if(~client["participated"], client["own"])
        upload, client = super().finish(server, client, start, params)
        return {**upload, "own": neurons_once}, client
