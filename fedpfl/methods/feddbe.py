"""FedDBE: FedAvg whose clients keep the bias of their representations to themselves (Domain Bias
Eliminator).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast, Between
from fedpfl.ground.tree import Agreed
from fedpfl.methods.shared.method import Method, Phase, Turn, flag


@dataclass(frozen=True)
class FedDBE(Method):
    """FedAvg with DBE (Zhang et al., NeurIPS 2023, arXiv:2311.14975), as in the authors' code.

    Clients minimise CE(head(z + u_i), y) + kappa/2 mean((s - zbar)^2): z is the head's input; u_i,
    from 0, a client's own, moves beside the model by plain SGD and never leaves; s <- (1 - rho) s +
    rho (the batch's mean z), from 0 in each participation, earlier batches' part given. A client is
    evaluated by head(z + u_i) of the latest model. Before round 1 all clients train once, without
    u_i and zbar, for nothing but s, whose mean by samples zbar is.

    kappa, rho: `kl_weight` and `momentum` of the code's run on FashionMNIST with the four-layer
        CNN. PFLlib's default kappa = 0 leaves zbar out, as rho = 0 does: tables made so are of u_i
        alone.
    bias_lr: step size of u_i; the configuration gives the model's.
    mean: of s after that `training` (with rho = 1 each client's LAST minibatch, as in the code), or
        of z over the clients' `data` at the initial model, for which nobody trains. Who makes no
        step has no part in the former.
    """

    kappa: Annotated[float, AtLeast(0)] = 50.0
    rho: Annotated[float, Between(0, 1)] = 1.0
    bias_lr: Annotated[float, AtLeast(0)] = 0.005
    mean: Literal["training", "data"] = "training"

    server_sees = "each upload"

    def init(self, params, parts):
        """Keep vectors of the head's width under the name of its weight."""
        zero = {name: torch.zeros_like(params[name][0]) for name in [parts.head_weight]}
        return {"model": params, "mean": zero, "known": flag(params)}, {"u": zero, "mean": zero}

    def turns(self, played, cohort, clients, generator):
        """Ask all clients for their means first."""
        first = Turn(list(range(clients)), self._consensus, trains=self.mean == "training")
        return [Turn(cohort)] if played else [first, Turn(cohort)]

    def _consensus(self, server, clients, uploads):
        """Average the means by samples."""
        found, samples = uploads["found"].values["mean"], uploads["found"].values["samples"]
        mean = tree.mean(found, samples / samples.sum().clamp(min=1))
        clients = {**clients, "mean": tree.repeat(mean, len(samples))}
        return {**server, "mean": mean, "known": ~server["known"]}, clients

    def before_training(self, server, client, net, shard):
        """Begin the running mean at zero; before round 1 count samples, and find what `mean=data`
        wants.
        """
        ((name, u),) = client["u"].items()
        mean, samples = torch.zeros_like(u), 0 if server["known"] else len(shard.data.y)
        if self.mean == "data" and samples:
            mean = shard.features(net.still(), server["model"]).mean(0)
        elif samples == 1:
            samples = 0  # which makes no step
        return {"running": {name: mean}, "samples": u.new_full((), samples)}

    def download(self, server, client):
        """Return the model, and once the consensual mean."""
        return {
            "model": server["model"],
            "mean": _if(server["known"] & ~client["participated"], server["mean"]),
        }

    def start(self, received, client):
        """Return the model, and zeros that stand where u_i's gradient and the batch's mean are to
        be read off.
        """
        zero = tree.full_like(client["u"], 0.0)
        return {"model": received["model"], "probe": {"u": zero, "mean": zero}}

    def phases(self, server, client, params, epochs):
        """Train the model; u_i and the running mean move beside it."""
        still = tree.full_like(params["probe"], False)
        return [Phase(epochs, {"model": True, "probe": still}, after_gradient=self._advance)]

    def loss(self, server, client, net, params, batch):
        """Shift the representations by u_i, and regularise their mean."""
        model, probe = params["model"], params["probe"]
        logits, z = net.features(model, batch.x)
        loss = batch.cross_entropy(
            logits + _shift(model, tree.map(torch.add, client["u"], probe["u"]))
        )
        mean = (z * batch.samples[:, None]).sum(0) / batch.samples.sum()
        for name, zbar in client["mean"].items():
            loss = loss + (probe["mean"][name] * mean.detach()).sum()
            running = (1 - self.rho) * client["running"][name] + self.rho * mean
            loss = loss + torch.where(
                server["known"], self.kappa / 2 * (running - zbar).square().mean(), 0.0
            )
        return loss

    def _advance(self, server, client, params, grads, batch, loss, aux):
        """Move u_i by its gradient, once zbar is known, and the running mean by the batch's."""
        rate, slope = torch.where(server["known"], self.bias_lr, 0.0), grads["probe"]
        u = tree.map(lambda own, g: own - rate * g, client["u"], slope["u"])
        running = tree.map(
            lambda old, new: (1 - self.rho) * old + self.rho * new, client["running"], slope["mean"]
        )
        return {**client, "u": u, "running": running}

    def finish(self, server, client, start, params):
        """Send the model up, or before round 1 the mean; keep u_i."""
        found = {"mean": client["running"], "samples": client["samples"]}
        return {
            "model": _if(server["known"], params["model"]),
            "found": _if(~server["known"], found),
        }, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the models."""
        return {**server, "model": tree.mean(uploads["model"].values, weight)}, clients

    def evaluated(self, server, client, params):
        """Return the model and u_i."""
        return {"model": params["model"], "u": client["u"]}

    def predict(self, net, params, batch):
        """Return the logits of the shifted representations."""
        return net(params["model"], batch.x) + _shift(params["model"], params["u"])


def _shift(model, u):
    """Return what u adds to a linear head's logits, `[classes]`."""
    return sum((model[name] * own).sum(1) for name, own in u.items())


def _if(known, values):
    """Return what travels if both sides know so."""
    return Agreed(values, tree.map(lambda leaf: known.expand(leaf.shape), values))
