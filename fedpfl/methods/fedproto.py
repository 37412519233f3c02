"""FedProto: clients exchange the mean features of their classes, and no weights."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from fedpfl.ground.ranges import NonNegative
from fedpfl.ground.tree import Masked
from fedpfl.methods.local_only import LocalOnly
from fedpfl.methods.shared.by_name import train_only
from fedpfl.methods.shared.gaussian import class_means
from fedpfl.methods.shared.method import Phase


@dataclass(frozen=True)
class FedProto(LocalOnly):
    """FedProto (Tan et al., AAAI 2022, arXiv:2105.00243).

    Each client trains its whole private model on CE + lam * mean over samples and features of (z -
    P_y)^2, where z is the head's input and P_c the global prototype of class c; a class without one
    pulls nothing, but its samples count. It sends the mean z of each of its classes; the server
    averages these by class. In the first round there are no prototypes. A class that no client of a
    cohort has keeps its prototype; the public codes drop it.

    lam: as in every public code of squares averaged over samples and features. The paper's is on
        distances between prototypes; on sums of squares it would be as many times weaker as there
        are features.
    prototypes: of features met in the `last_epoch` of training (official code) or in `all_epochs`
        (PFLlib, FL-bench), or by the `final` model in a separate pass.
    weights: `uniform` over the clients that have the class (all codes) or by class `counts` (the
    paper).
    judge: by the `nearest` prototype of all (PFLlib), by the `nearest_own` one among the classes
        that the client trains on, an oracle of its labels (official code), or by the `head`
        (FL-bench); numbers of different judges do not compare. Without prototypes the head decides.
    """

    lam: NonNegative = 1.0
    prototypes: Literal["last_epoch", "all_epochs", "final"] = "last_epoch"
    weights: Literal["uniform", "counts"] = "uniform"
    judge: Literal["nearest", "nearest_own", "head"] = "nearest"

    needs_classes = "it averages features by class"
    takes_kinds = True
    server_sees = "each upload"

    def init(self, params, parts):
        """Begin without prototypes; the model is the client's."""
        _, client = super().init(params, parts)
        mean = torch.zeros_like(params[parts.head_weight])
        has_prototype = torch.zeros_like(mean[:, 0], dtype=torch.bool)
        return {"mean": mean, "seen": has_prototype}, client

    def before_training(self, server, client, net, shard):
        """Return a bool for each class: the client has it."""
        if self.judge != "nearest_own":
            return {}
        counts = torch.bincount(shard.data.y, minlength=len(server["seen"]))
        return {"own": counts > 0}

    before_evaluation = before_training

    def download(self, server, client):
        """Return the existing prototypes."""
        mean = server["mean"]
        mask = server["seen"][:, None].expand_as(mean)
        return Masked({"mean": mean}, {"mean": mask})

    def start(self, received, client):
        """Return the client's model."""
        return client["model"]

    def loss(self, server, client, net, params, batch):
        """Return CE + lam * mean of (z - P_y)^2, and beside it the features."""
        logits, z = net.features(params, batch.x)
        loss = batch.loss(logits)
        if self.lam:
            distance = (z - server["mean"][batch.y]).square().mean(1)
            pull = torch.where(server["seen"][batch.y], distance, 0.0)
            loss = loss + self.lam * batch.mean(pull)
        return loss, {"z": z.detach(), "y": batch.y}

    def after_training(self, server, client, net, params, shard, aux):
        """Return the client's prototypes and their weights, 0 for classes that it lacks."""
        labels = shard.data.y
        classes = len(server["mean"])
        # ---- Step 1: the features that the prototypes are means of.
        if self.prototypes == "final":
            aux = {"z": shard.features(net, params), "y": labels}
        if aux:
            rows = slice(None)
            # Rows stand in the order of training, so the last epoch's are the last.
            if self.prototypes == "last_epoch":
                # A last minibatch of one sample is left out of training.
                has_lone_sample = len(labels) % shard.batch_size == 1
                rows = slice(-(len(labels) - has_lone_sample), None)
            z = aux["z"][rows]
            y = aux["y"][rows]
        else:  # no step was made
            z = server["mean"][:0]
            y = labels[:0]
        zeros = torch.zeros_like(server["mean"])
        mean = class_means(z, y, zeros, min_samples=1)

        # ---- Step 2: weights, 0 for classes without a prototype.
        if self.weights == "counts":
            counts = torch.bincount(labels, minlength=classes)
        else:
            # Every class counts once, however many samples it has.
            counts = torch.ones_like(mean[:, 0], dtype=torch.int64)
        counts = counts * (torch.bincount(y, minlength=classes) > 0)
        return {"mean": mean, "counts": counts}

    def finish(self, server, client, start, params):
        """Send the prototypes of the client's classes (and the counts) up; keep the model."""
        is_present = client["counts"] > 0
        upload = {"mean": client["mean"]}
        mask = {"mean": is_present[:, None].expand_as(client["mean"])}
        if self.weights == "counts":
            upload["counts"] = client["counts"]
            mask["counts"] = is_present
        return Masked(upload, mask), {"model": params}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average prototypes by class, over the clients that have it."""
        is_present = uploads.mask["mean"][:, :, 0]  # [clients, classes]
        counts = is_present
        if self.weights == "counts":
            counts = uploads.values["counts"] * is_present
        shares = counts / counts.sum(0).clamp(min=1)
        mean = (shares[:, :, None] * uploads.values["mean"]).sum(0)
        is_new = is_present.any(0)
        # A class that is absent from the cohort keeps its prototype.
        server = {
            "mean": torch.where(is_new[:, None], mean, server["mean"]),
            "seen": is_new | server["seen"],
        }
        return server, clients

    def evaluated(self, server, client, params):
        """Return the model beside the prototypes that it is judged by."""
        has_prototype = server["seen"]
        if "own" in client:  # judge=nearest_own
            has_prototype = has_prototype & client["own"]
        return {"model": params, "mean": server["mean"], "seen": has_prototype}

    def predict(self, net, params, batch):
        """Return the nearness to each prototype.

        A class without one is farther than all that have one.
        """
        logits, z = net.features(params["model"], batch.x)
        if self.judge == "head":
            return logits
        mean = params["mean"].double()  # which no autocast rounds
        has_prototype = params["seen"]
        # -|z - P_c|^2, but for |z|^2, which is the same for all classes
        nearness = F.linear(z.double(), 2 * mean, -mean.square().sum(1)).float()
        farthest = torch.where(has_prototype, nearness, torch.inf).amin(1, keepdim=True)
        # Not -inf: its cross-entropy would be infinite.
        nearness = torch.where(has_prototype, nearness, farthest - 1)
        # Without prototypes the head decides.
        return torch.where(has_prototype.any(), nearness, logits)

    def finetuning(self, params, parts, epochs):
        """Move the model under prototypes that stay."""
        return [Phase(epochs, train_only(params, ["model"]))]
