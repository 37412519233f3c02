"""FedProto: clients exchange the mean features of their classes, and no weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F

from fedpfl.ground.ranges import AtLeast
from fedpfl.ground.tree import Masked
from fedpfl.methods.local_only import LocalOnly
from fedpfl.methods.shared.by_name import train_only
from fedpfl.methods.shared.gaussian import class_means
from fedpfl.methods.shared.method import Phase


@dataclass(frozen=True)
class FedProto(LocalOnly):
    """FedProto (Tan et al., AAAI 2022, arXiv:2105.00243).

    Each client trains a whole model of its own on CE + lam * mean over samples and features of (z -
    P_y)^2, where z is the head's input and P_c the global prototype of class c; a class without one
    pulls nothing, but its samples count. It sends the mean z of each of its classes; the server
    averages these by class. In the first round there are no prototypes. A class that nobody in a
    cohort has keeps its prototype; the public codes drop it.

    lam: as in every public code of squares averaged over samples and features. The paper's is on
        distances between prototypes; on sums of squares it would be as many times weaker as there
        are features.
    prototypes: of features met in the `last_epoch` of training (official code) or in `all_epochs`
        (PFLlib, FL-bench), or by the `final` model in a pass of its own.
    weights: `uniform` over the clients that have the class (all codes) or by class `counts` (the
    paper).
    judge: by the `nearest` prototype of all (PFLlib), by the `nearest_own` one among the classes
        that the client trains on, an oracle of its labels (official code), or by the `head`
        (FL-bench). Without prototypes the head decides.
    """

    lam: Annotated[float, AtLeast(0)] = 1.0
    prototypes: Literal["last_epoch", "all_epochs", "final"] = "last_epoch"
    weights: Literal["uniform", "counts"] = "uniform"
    judge: Literal["nearest", "nearest_own", "head"] = "nearest"

    server_sees = "each upload"

    def init(self, params, parts):
        """Begin without prototypes; the model is the client's."""
        _, client = super().init(params, parts)
        mean = torch.zeros_like(params[parts.head_weight])
        return {"mean": mean, "seen": torch.zeros_like(mean[:, 0], dtype=torch.bool)}, client

    def before_training(self, server, client, net, shard):
        """Return which classes the client has."""
        if self.judge != "nearest_own":
            return {}
        return {"own": torch.bincount(shard.data.y, minlength=len(server["seen"])) > 0}

    def before_evaluation(self, server, client, net, shard):
        """Return which classes the client has."""
        return self.before_training(server, client, net, shard)

    def download(self, server, client):
        """Return the prototypes that there are."""
        return Masked(
            {"mean": server["mean"]}, {"mean": server["seen"][:, None].expand_as(server["mean"])}
        )

    def start(self, received, client):
        """Return the client's model."""
        return client["model"]

    def loss(self, server, client, net, params, batch):
        """Add the pull of the prototypes to the cross-entropy, and keep the features."""
        logits, z = net.features(params, batch.x)
        loss = batch.cross_entropy(logits)
        if self.lam:
            apart = (z - server["mean"][batch.y]).square().mean(1)
            loss = loss + self.lam * batch.mean(torch.where(server["seen"][batch.y], apart, 0.0))
        return loss, {"z": z.detach(), "y": batch.y}

    def after_training(self, server, client, net, params, shard, aux):
        """Return the client's prototypes, and the weights of those that there are."""
        own = shard.data.y
        if self.prototypes == "final":
            aux = {"z": shard.features(net, params), "y": own}
        epoch = len(own) - (
            len(own) % shard.batch_size == 1
        )  # what is met in one: a lone sample is not
        met = slice(-epoch, None) if self.prototypes == "last_epoch" else slice(None)
        z, y = (
            (aux["z"][met], aux["y"][met]) if aux else (server["mean"][:0], own[:0])
        )  # no step was made
        mean = class_means(z, y, torch.zeros_like(server["mean"]), min_samples=1)
        labels = own if self.weights == "counts" else torch.arange(len(mean), device=y.device)
        counts = torch.bincount(labels, minlength=len(mean)) * (
            torch.bincount(y, minlength=len(mean)) > 0
        )
        return {"mean": mean, "counts": counts}

    def finish(self, server, client, start, params):
        """Send the prototypes of the client's classes (and the counts) up; keep the model."""
        present = client["counts"] > 0
        sent, mask = {"mean": client["mean"]}, {"mean": present[:, None].expand_as(client["mean"])}
        if self.weights == "counts":
            sent, mask = {**sent, "counts": client["counts"]}, {**mask, "counts": present}
        return Masked(sent, mask), {"model": params}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average prototypes by class, over the clients that have it."""
        present = uploads.mask["mean"][:, :, 0]
        counts = uploads.values["counts"] * present if self.weights == "counts" else present
        shares = counts / counts.sum(0).clamp(min=1)
        mean, seen = (shares[:, :, None] * uploads.values["mean"]).sum(0), present.any(0)
        return {
            "mean": torch.where(seen[:, None], mean, server["mean"]),
            "seen": seen | server["seen"],
        }, clients

    def evaluated(self, server, client, params):
        """Return the model beside the prototypes that it is judged by."""
        seen = server["seen"] & client["own"] if "own" in client else server["seen"]
        return {"model": params, "mean": server["mean"], "seen": seen}

    def predict(self, net, params, batch):
        """Return the nearness to each prototype; a class without one is farther than all that have
        one.
        """
        logits, z = net.features(params["model"], batch.x)
        if self.judge == "head":
            return logits
        mean, seen = params["mean"].double(), params["seen"]  # which no autocast rounds
        # -|z - P_c|^2, but for |z|^2, which is the same for all classes
        near = F.linear(z.double(), 2 * mean, -mean.square().sum(1)).float()
        farthest = torch.where(seen, near, torch.inf).amin(1, keepdim=True)
        return torch.where(seen.any(), torch.where(seen, near, farthest - 1), logits)

    def finetuning(self, params, parts, epochs):
        """Move the model under prototypes that stay."""
        return [Phase(epochs, train_only(params, ["model"]))]
