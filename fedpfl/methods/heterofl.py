"""HeteroFL: narrow devices train the first neurons of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground.tree import Tree
from fedpfl.methods.shared import neurons
from fedpfl.methods.shared.method import Phase
from fedpfl.methods.shared.neurons import Rounding
from fedpfl.methods.shared.submodel import Submodel, Widths

RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # a, b, c, d, e of the paper


@dataclass(frozen=True)
class HeteroFL(Submodel):
    """HeteroFL (Diao, Ding and Tarokh, ICLR 2021, arXiv:2010.01264).

    A client of width r trains the first ceil(r M) of the M neurons of each hidden layer; the server
    averages each entry over the clients that trained it.

    scaler: what a convolution with hidden outputs gives is divided by r in training (not in
    evaluation), before
        normalisation: here its weight and bias are. Under BatchNorm, as in the paper's networks,
        this amounts to a smaller eps. Without normalisation a narrow network is then evaluated
        otherwise than it was trained, which the paper never does; hence off by default.
    masked: logits of classes that the client's training data lack are 0 in its loss and in every
        evaluation, and its rows of the head for these classes are not averaged. The server is told
        the classes, a bit each.
    weighting: how clients count in the means: all equally (the paper) or by samples.
    dynamic: widths are drawn anew for each client and round, from `widths` uniformly (repeat one to
    make it likelier).
    Static BatchNorm: training uses statistics of the batch. In evaluation, the client's own running
    ones of its neurons take their place, collected without the scaler, as evaluation is; the paper
    passes all clients' data through the global model, but only to evaluate that model alone. The
    paper clips gradients: `local.clip=1`. Clients are evaluated with what they trained last, before
    that with the initial model's part for their width.
    """

    widths: Widths = RATES
    rounding: Rounding = "ceil"
    scaler: bool = False
    masked: bool = True
    weighting: Literal["equal", "samples"] = "equal"
    dynamic: bool = False

    server_sees = "each upload"

    def init(self, params, parts):
        """Add the names of scaled entries and of those with a row per class, and the client's
        classes.
        """
        server, client = super().init(params, parts)
        own = torch.ones_like(server["plan"]["group"][0])
        axes = parts.wiring.axes
        convolutions = [
            name
            for layer in parts.layers
            for name in layer
            if params[layer[0]].dim() > 2
            and axes[layer[0]][0] is not None
            and name not in parts.normalisation
        ]
        server |= {
            "scaled": dict.fromkeys(convolutions, own),
            "classes": dict.fromkeys(parts.head, own),
        }
        if self.masked:
            head = params[parts.head_weight]
            client["labels"] = torch.ones(len(head), dtype=torch.bool, device=head.device)
        return server, client

    def sample(self, server, generator):
        """Draw a width for the round if widths are dynamic."""
        if not self.dynamic:
            return {}
        chosen = torch.randint(len(self.widths), (), generator=generator)
        return {"width": torch.tensor(self.widths, dtype=torch.float64)[chosen]}

    def before_training(self, server, client, net, shard):
        """Return the classes that the client has, if logits are masked."""
        return (
            {"labels": torch.bincount(shard.data.y, minlength=len(client["labels"])) > 0}
            if self.masked
            else {}
        )

    def _active(self, server, client):
        return neurons.prefix_neurons(server["plan"], client["width"], self.rounding)

    def loss(self, server, client, net, params, batch):
        """Return the cross-entropy with scaled activations and masked logits."""
        if self.scaler:
            width = client["width"]
            scaled = {
                name: leaf / width.to(leaf.dtype) if name in server["scaled"] else leaf
                for name, leaf in params.items()
            }
            logits = net.aside(scaled, batch.x)
            if net.buffers.get("main"):
                with torch.no_grad():  # moves statistics
                    net(params, batch.x)
        else:
            logits = net(params, batch.x)
        return batch.cross_entropy(self._masked(logits, client))

    def finish(self, server, client, start, params):
        """Upload the trained entries, and which classes the client has."""
        upload, client = super().finish(server, client, start, params)
        return {**upload, "labels": client["labels"]} if self.masked else upload, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average each class's rows of the head over the clients that have the class."""
        if self.weighting == "equal":
            weight = torch.full_like(weight, 1 / len(weight))
        sent = uploads["model"]
        if self.masked:
            mask, labels = dict(sent.mask), uploads["labels"]
            for name in server["classes"]:
                mask[name] = mask[name] & labels.view(*labels.shape, *[1] * (mask[name].dim() - 2))
            sent = sent._replace(mask=mask)
        return super().aggregate(server, clients, net, {"model": sent}, weight, generator)

    def evaluated(self, server, client, params):
        """Add the client's classes, by which logits are masked."""
        return {"model": params, "labels": client["labels"]} if self.masked else params

    def before_evaluation(self, server, client, net, shard):
        """Return the client's classes even if it has not trained yet."""
        return self.before_training(server, client, net, shard)

    def predict(self, net, params, batch):
        """Return masked logits, without the scaler."""
        return (
            self._masked(net(params["model"], batch.x), params)
            if self.masked
            else net(params, batch.x)
        )

    def finetuning(self, params, parts, epochs):
        """Train the model, and leave the classes beside it alone."""
        return [Phase(epochs, {"model": True, "labels": False} if self.masked else None)]

    def _masked(self, logits: Tensor, own: Tree) -> Tensor:
        return torch.where(own["labels"], logits, 0.0) if self.masked else logits
