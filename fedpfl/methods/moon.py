"""MOON: representations are drawn to the global model's, and away from the last local one's."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedpfl.ground.ranges import NonNegative, Positive
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class Moon(Method):
    """MOON (Li, He and Song, CVPR 2021, arXiv:2103.16257): FedAvg with mu l(x) added to
    the loss.

    l(x) = -log(exp(s_g) / (exp(s_g) + exp(s_p))), s_g = cos(z, z_g) / tau, s_p = cos(z, z_p) / tau:
    z is the head's input in the model that trains, z_g in the model received, z_p in the one that
    the client uploaded last; both are given, in evaluation mode, with BatchNorm statistics of their
    own. A client that never uploaded has no second term.

    mu: weight; the paper's best is 5 on CIFAR10, 1 on CIFAR100 and Tiny-ImageNet. tau: temperature.
    In the paper z is a projection of the features, on the way to the head: model=cnn4
    model.projection=256, which FedAvg beside it must have too. FL-bench and PFLlib have none.

    The authors' code agrees while all clients join; with fewer, it contrasts a client's first round
    with a network of fresh random values. PFLlib has mu = 0, which is FedAvg, and tau = 1; it
    contrasts first rounds with the initial model and keeps references in training mode, so that the
    global model's BatchNorm statistics move from client to client. So does FL-bench, which in
    parallel mode stores last models under wrong clients too. A pool of several last models is not
    here; the default of the authors' code is one.
    """

    mixes_samples = ""

    mu: NonNegative = 1.0
    tau: Positive = 0.5

    def init(self, params, parts):
        """Begin without a last model."""
        return params, {"last": params}

    def buffers(self):
        """Keep the last model's statistics on the client."""
        return {"main": self.statistics or "aggregate", "last": "local"}

    def before_training(self, server, client, net, shard):
        """Return both references' statistics."""
        # As they are now: training moves those of `main`.
        return {"references": net.buffers}

    def loss(self, server, client, net, params, batch):
        """Return CE + mu l(x)."""
        logits, z = net.features(params, batch.x)
        loss = batch.loss(logits)
        if not self.mu:
            return loss
        # ---- z_g and z_p, of models that hold still.
        still = net.still(client["references"])
        _, z_g = still.features(server, batch.x, "main")
        _, z_p = still.features(client["last"], batch.x, "last")
        near = F.cosine_similarity(z, z_g)
        far = F.cosine_similarity(z, z_p)
        # l = -log(exp(s_g) / (exp(s_g) + exp(s_p))) = softplus(s_p - s_g)
        contrast = batch.mean(F.softplus((far - near) / self.tau))
        return loss + torch.where(client["participated"], self.mu * contrast, 0.0)

    def after_training(self, server, client, net, params, shard, aux):
        """Return the statistics of the model that is the last one from now on."""
        return {"statistics": {**net.buffers, "last": net.buffers["main"]}}

    def finish(self, server, client, start, params):
        """Send the model up, and keep it as the last one."""
        return params, {"last": params}
