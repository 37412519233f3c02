"""FD: clients exchange what their networks say on average of each class."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative
from fedpfl.methods.local_only import LocalOnly
from fedpfl.methods.shared.method import flag
from fedpfl.methods.shared.prototypes import average_by_class, flags_of_present, mask_absent


@dataclass(frozen=True)
class FD(LocalOnly):
    """FD, federated distillation (Jeong et al., 2018, arXiv:1811.11479), without augmentation.

    A client trains its private network on CE + lam CE to T_y, its teacher's mean output for the
    class y of the sample; a class without a teacher adds nothing. During training it notes its own
    outputs, and sends their means by class. The teacher is the mean over all other clients that have the
    class, of the latest round in which a client had it. In the first round there are no teachers.

    lam: the paper's gamma, for which it gives no value (HtFLlib: 1).
    outputs: `probabilities` (the paper), or `logits` as they are (HtFLlib: the cross-entropy to
        them is no distance; a class without a teacher pulls to the own logits there).
    teacher: `others` (the paper), or `all` with the client itself (HtFLlib).
    """

    lam: NonNegative = 1.0
    outputs: Literal["probabilities", "logits"] = "probabilities"
    teacher: Literal["others", "all"] = "others"

    needs_classes = "it averages outputs by class"
    server_sees = "each upload"
    takes_kinds = True

    def init(self, params, parts):
        """Begin without teachers."""
        _, client = super().init(params, parts)
        zeros = params[parts.head_weight].new_zeros(parts.classes, parts.classes)
        never = flag(params).long()
        server = {"sum": zeros, "count": zeros[0], "heard": zeros[0].long(), "played": never}
        return server, {**client, "mean": zeros, "present": zeros[0] > 0, "heard": never}

    def prepare(self, server, client):
        """Lay the teacher's outputs over the client's state, and for which classes it has any."""
        # ---- The client's own upload is part of a sum if no client had the class since.
        is_own = client["present"] & (client["heard"] == server["heard"])
        if self.teacher == "all":
            is_own = torch.zeros_like(is_own)
        own = torch.where(is_own[:, None], client["mean"], 0.0)
        count = server["count"] - is_own.to(server["count"])
        teacher = (server["sum"] - own) / count.clamp(min=1)[:, None]
        return {**client, "teacher": teacher, "taught": count > 0}

    def start(self, received, client):
        """Return the client's network."""
        return client["model"]

    def loss(self, server, client, net, params, batch):
        """Return CE + lam CE(T_y), and beside it the outputs."""
        logits = net(params, batch.x)
        log_probabilities = logits.log_softmax(1)
        loss = batch.loss(logits)
        distillation = -(client["teacher"][batch.y] * log_probabilities).sum(1)
        distillation = torch.where(client["taught"][batch.y], distillation, 0.0)
        loss = loss + self.lam * batch.mean(distillation)
        outputs = logits if self.outputs == "logits" else log_probabilities.exp()
        return loss, {"outputs": outputs.detach(), "y": batch.y}

    def after_training(self, server, client, net, params, shard, aux):
        """Return the mean outputs of the client's classes, over all steps."""
        zeros = torch.zeros_like(server["sum"])
        outputs = aux["outputs"] if aux else zeros[:0]
        labels = aux["y"] if aux else shard.data.y[:0]
        return average_by_class(outputs, labels, zeros)

    def finish(self, server, client, start, params):
        """Send the mean outputs up; keep them, and the network."""
        now = server["played"] + 1
        return mask_absent(client), {**client, "model": params, "heard": now}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Add up the outputs of each class; an absent class keeps its sum."""
        is_present = flags_of_present(uploads)
        count = is_present.sum(0)
        sums = torch.where(is_present[:, :, None], uploads.values["mean"], 0.0).sum(0)
        played = server["played"] + 1
        new = {
            "sum": sums,
            "count": count.to(server["count"]),
            "heard": played.expand_as(count),
        }
        latest = tree.by_row(count > 0, new, tree.select(server, new))
        return {**latest, "played": played}, clients
