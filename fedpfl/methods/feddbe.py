"""FedDBE: FedAvg with clients that keep their representations' bias (Domain Bias Eliminator)."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, Proportion
from fedpfl.methods.shared.method import Method, Phase, Turn, flag, send_if


@dataclass(frozen=True)
class FedDBE(Method):
    """FedAvg with DBE (Zhang et al., NeurIPS 2023, arXiv:2311.14975), as in the authors' code.

    Clients minimise CE(head(z + u_i), y) + kappa/2 mean((s - zbar)^2): z is the head's input; u_i,
    from 0, a client's own, moves beside the model by plain SGD and never leaves; s <- (1 - rho) s +
    rho (the batch's mean z), from 0 in each participation, earlier batches' part given. A client is
    evaluated by head(z + u_i) of the latest model. Before round 1 all clients train once, without
    u_i and zbar, for nothing but s; zbar is its mean by samples.

    kappa, rho: `kl_weight` and `momentum` of the code's run on FashionMNIST with the four-layer
        CNN. PFLlib's default kappa = 0 leaves zbar out, as rho = 0 does: tables made so are of u_i
        alone.
    bias_lr: step size of u_i; the configuration gives the model's.
    mean: of s after that `training` (with rho = 1 each client's LAST minibatch, as in the code), or
        of z over the clients' `data` at the initial model, for which no client trains. Who makes no
        step has no part in the former.
    """

    kappa: NonNegative = 50.0
    rho: Proportion = 1.0
    bias_lr: NonNegative = 0.005
    mean: Literal["training", "data"] = "training"

    server_sees = "each upload"

    def init(self, params, parts):
        """Keep vectors of the head's width under the name of its weight."""
        parts.require_linear_end()
        zero = {parts.head_weight: torch.zeros_like(params[parts.head_weight][0])}
        server = {"model": params, "mean": zero, "known": flag(params)}
        return server, {"u": zero, "mean": zero}

    def turns(self, played, cohort, clients, generator):
        """Survey the means of all clients before the first round."""
        if played:
            return [Turn(cohort)]
        everyone = list(range(clients))
        survey = Turn(everyone, self._average_means, trains=self.mean == "training")
        return [survey, Turn(cohort)]

    def _average_means(self, server, clients, uploads):
        """Average the means by samples: zbar."""
        survey = uploads["found"].values
        samples = survey["samples"]
        # If no client made a step, all shares are 0, and so is zbar.
        shares = samples / samples.sum().clamp(min=1)
        zbar = tree.mean(survey["mean"], shares)
        clients = {**clients, "mean": tree.repeat(zbar, len(samples))}
        return {**server, "mean": zbar, "known": ~server["known"]}, clients

    def before_training(self, server, client, net, shard):
        """Begin the running mean s at zero.

        Before round 1 the client counts its samples, and with `mean=data` averages its features.
        """
        ((name, u),) = client["u"].items()
        mean = torch.zeros_like(u)
        if server["known"]:  # zbar: the survey is over
            samples = 0
        else:
            samples = len(shard.data.y)
        if self.mean == "data" and samples:
            mean = shard.features(net.still(), server["model"]).mean(0)
        elif samples == 1:
            samples = 0  # which makes no step
        return {"running": {name: mean}, "samples": u.new_full((), samples)}

    def download(self, server, client):
        """Return the model, and in a client's first participation the consensual mean zbar."""
        needs_mean = server["known"] & ~client["participated"]
        return {"model": server["model"], "mean": send_if(needs_mean, server["mean"])}

    def start(self, received, client):
        """Return the model, and probes for two gradients.

        Probes are zeros that stand where u_i's gradient and the batch's mean are to be read off.
        """
        zero = tree.full_like(client["u"], 0.0)
        return {"model": received["model"], "probe": {"u": zero, "mean": zero}}

    def phases(self, server, client, params, epochs):
        """Train the model; u_i and the running mean move beside it."""
        no_probe = tree.full_like(params["probe"], False)
        mask = {"model": True, "probe": no_probe}
        return [Phase(epochs, mask, after_gradient=self._advance)]

    def loss(self, server, client, net, params, batch):
        """Return CE(head(z + u_i), y) + kappa/2 mean((s - zbar)^2)."""
        model = params["model"]
        probe = params["probe"]
        logits, z = net.features(model, batch.x)

        # ---- CE(head(z + u_i), y)
        u = tree.map(torch.add, client["u"], probe["u"])
        loss = batch.loss(logits + _shift_logits(model, u))

        # ---- kappa/2 mean((s - zbar)^2), once zbar is known
        batch_mean = (z * batch.samples[:, None]).sum(0) / batch.samples.sum()
        for name, zbar in client["mean"].items():
            # The gradient of this product, which is zero, is the batch's mean.
            loss = loss + (probe["mean"][name] * batch_mean.detach()).sum()
            # s <- (1 - rho) s + rho (the batch's mean), earlier batches' part given
            s = (1 - self.rho) * client["running"][name] + self.rho * batch_mean
            regulariser = self.kappa / 2 * (s - zbar).square().mean()
            loss = loss + torch.where(server["known"], regulariser, 0.0)
        return loss

    def _advance(self, server, client, params, grads, batch, loss, aux):
        """Move u_i by its gradient and the running mean s by the batch's."""
        # Before zbar is known, the clients train for nothing but s.
        rate = torch.where(server["known"], self.bias_lr, 0.0)
        u = tree.map(
            lambda u, g: u - rate * g,
            client["u"],
            grads["probe"]["u"],
        )
        batch_mean = grads["probe"]["mean"]
        running = tree.map(
            lambda s, mean: (1 - self.rho) * s + self.rho * mean, client["running"], batch_mean
        )
        return {**client, "u": u, "running": running}

    def finish(self, server, client, start, params):
        """Send the model up, or before round 1 the mean; keep u_i."""
        survey = {"mean": client["running"], "samples": client["samples"]}
        upload = {
            "model": send_if(server["known"], params["model"]),
            "found": send_if(~server["known"], survey),
        }
        return upload, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the models."""
        model = tree.mean(uploads["model"].values, weight)
        return {**server, "model": model}, clients

    def evaluated(self, server, client, params):
        """Return the model and u_i."""
        return {"model": params["model"], "u": client["u"]}

    def predict(self, net, params, batch):
        """Return the logits of the shifted representations."""
        # head(z + u) = head(z) + W u for a linear head: the plain forward pass will do.
        return net(params["model"], batch.x) + _shift_logits(params["model"], params["u"])


def _shift_logits(model, u):
    """Return the term that u adds to a linear head's logits, `[classes]`."""
    return sum((model[name] * vector).sum(1) for name, vector in u.items())
