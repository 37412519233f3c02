"""pFedSD: clients that learn from their own last model."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedpfl.ground.ranges import NonNegative, Positive
from fedpfl.methods.shared.distillation import kl_divergence
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class PFedSD(Method):
    """pFedSD (Jin et al., IEEE TPDS 2023): FedAvg with a teacher v_i for each client, its last
    trained model.

    Each step minimises CE(theta) + lam tau^2 KL(softmax(v_i(x) / tau) || softmax(theta(x) / tau));
    the first time a client has no teacher. The teacher stays on the client (the authors' server
    stores it and sends it back), and means are by samples (theirs: equal). A client is evaluated by
    v_i, one that was never sampled by the initial model. BatchNorm statistics stay with the client.

    lam, tau: weight and temperature; defaults of FedPURIN's comparison (the authors' code: 1 and
    1).
    teacher: `eval`: with the statistics that the client's last training left; `train`: with those
        of the minibatch, as in the public codes.
    """

    mixes_samples = ""

    lam: NonNegative = 0.5
    tau: Positive = 3.0
    teacher: Literal["eval", "train"] = "eval"

    needs_classes = "it distils probabilities of classes"

    def init(self, params, parts):
        """Begin without a teacher."""
        return params, {"teacher": params}

    def buffers(self):
        """Keep statistics on the client."""
        return {"main": "local"}

    def before_training(self, server, client, net, shard):
        """Return the teacher's statistics."""
        return {"teacher_buffers": net.buffers["main"]}

    def loss(self, server, client, net, params, batch):
        """Return CE(theta) + lam tau^2 KL(softmax(v_i(x) / tau) || softmax(theta(x) / tau))."""
        logits = net(params, batch.x)
        loss = batch.loss(logits)
        if not self.lam:
            return loss
        if self.teacher == "eval":
            teacher = net.still({"main": client["teacher_buffers"]})
            teacher_logits = teacher(client["teacher"], batch.x)
        else:
            teacher_logits = net.aside(client["teacher"], batch.x)
        # Logits over tau have gradients smaller by tau^2, which the factor makes up for.
        divergence = batch.mean(kl_divergence(teacher_logits, logits, self.tau))
        distillation = self.lam * self.tau**2 * divergence
        return loss + torch.where(client["participated"], distillation, 0.0)

    def finish(self, server, client, start, params):
        """Send the model up, and keep it as the next teacher."""
        return params, {"teacher": params}

    def personal(self, server, client):
        """Return the model as it was after the client's last training."""
        return client["teacher"]
