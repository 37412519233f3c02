"""HeteroFL: narrow devices train the first neurons of each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground.tree import Tree
from fedpfl.methods.shared import neurons
from fedpfl.methods.shared.method import Phase, equal_shares, flag
from fedpfl.methods.shared.neurons import Rounding
from fedpfl.methods.shared.submodel import Submodel, Widths

RATES = (1.0, 0.5, 0.25, 0.125, 0.0625)  # a, b, c, d, e of the paper


@dataclass(frozen=True)
class HeteroFL(Submodel):
    """HeteroFL (Diao, Ding and Tarokh, ICLR 2021, arXiv:2010.01264).

    A client of width r trains the first ceil(r M) of the M neurons of each hidden layer; the server
    averages each entry over the clients that trained it.

    scaler: the output of a convolution with hidden outputs is divided by r in training (not in
    evaluation), before
        normalisation: here its weight and bias are. Under BatchNorm, as in the paper's networks,
        this amounts to a smaller eps. Without normalisation a narrow network is then evaluated
        unlike in training, which the paper never does; hence off by default.
    masked: logits of classes that the client's training data lack are 0 in its loss and in every
        evaluation, and its rows of the head for these classes are not averaged. The server is told
        the classes, a bit each.
    weighting: how clients count in the means: all equally (the paper) or by samples.
    dynamic: widths are drawn anew for each client and round, from `widths` uniformly (repeat one to
    make it likelier).
    Static BatchNorm: training uses statistics of the batch. In evaluation, the client's own running
    ones of its neurons take their place, collected without the scaler, as evaluation is; the paper
    passes all clients' data through the global model, but only to evaluate that model alone. The
    paper clips gradients: `local.clip=1`. Clients are evaluated with their last trained model, before
    that with the initial model's part for their width.
    """

    widths: Widths = RATES
    rounding: Rounding = "ceil"
    scaler: bool = False
    masked: bool = True
    weighting: Literal["equal", "samples"] = "equal"
    dynamic: bool = False

    server_sees = "each upload"

    @property
    def needs_classes(self) -> str:  # type: ignore[override]
        """Return why labels must be classes, "" where they need not."""
        return "it masks classes; use method.masked=false" if self.masked else ""

    def init(self, params, parts):
        """Add the names of scaled entries and of those with a row per class.

        The client has its classes besides.
        """
        server, client = super().init(params, parts)
        axes = parts.wiring.axes
        scaled_names = []
        for layer in parts.layers:
            weight_name = layer[0]
            is_convolution = params[weight_name].dim() > 2
            # Outputs without an axis of neurons are the classes, which are not scaled.
            if is_convolution and axes[weight_name][0] is not None:
                scaled_names += [name for name in layer if name not in parts.normalisation]
        # Only the names matter; trees want tensors as leaves.
        marker = torch.ones_like(server["plan"]["group"][0])
        server["scaled"] = dict.fromkeys(scaled_names, marker)
        server["classes"] = dict.fromkeys(parts.head, marker)
        if self.masked:
            head_weight = params[parts.head_weight]
            client["labels"] = ~flag(head_weight).repeat(len(head_weight))
        return server, client

    def sample(self, server, generator):
        """Draw a width for the round if widths are dynamic."""
        if not self.dynamic:
            return {}
        index = torch.randint(len(self.widths), (), generator=generator)
        return {"width": torch.tensor(self.widths, dtype=torch.float64)[index]}

    def before_training(self, server, client, net, shard):
        """Return the classes that the client has, if logits are masked."""
        if not self.masked:
            return {}
        counts = torch.bincount(shard.data.y, minlength=len(client["labels"]))
        return {"labels": counts > 0}

    # A client that has not trained yet has its classes, too.
    before_evaluation = before_training

    def _active(self, server, client):
        """Return the first neurons of each layer, as many as the client's width has."""
        return neurons.prefix_neurons(server["plan"], client["width"], self.rounding)

    def loss(self, server, client, net, params, batch):
        """Return the cross-entropy with scaled activations and masked logits."""
        if self.scaler:
            width = client["width"]
            scaled = dict(params)
            for name in server["scaled"]:
                scaled[name] = params[name] / width.to(params[name].dtype)
            logits = net.aside(scaled, batch.x)
            # Statistics are collected without the scaler, as evaluation is.
            if net.buffers.get("main"):
                with torch.no_grad():
                    net(params, batch.x)
        else:
            logits = net(params, batch.x)
        return batch.loss(self._mask_logits(logits, client))

    def finish(self, server, client, start, params):
        """Upload the trained entries, and which classes the client has."""
        upload, client = super().finish(server, client, start, params)
        if self.masked:
            upload = {**upload, "labels": client["labels"]}
        return upload, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average each class's rows of the head over the clients that have the class."""
        if self.weighting == "equal":
            weight = equal_shares(weight)
        uploaded = uploads["model"]
        if self.masked:
            labels = uploads["labels"]  # [clients, classes]
            mask = dict(uploaded.mask)
            # A row of the head counts where the client had the neurons and the class.
            for name in server["classes"]:
                trailing_axes = [1] * (mask[name].dim() - 2)
                has_class = labels.view(labels.shape + tuple(trailing_axes))
                mask[name] = mask[name] & has_class
            uploaded = uploaded._replace(mask=mask)
        return super().aggregate(server, clients, net, {"model": uploaded}, weight, generator)

    def evaluated(self, server, client, params):
        """Add the client's classes, which mask logits."""
        if not self.masked:
            return params
        return {"model": params, "labels": client["labels"]}

    def predict(self, net, params, batch):
        """Return masked logits, without the scaler."""
        if not self.masked:
            return net(params, batch.x)
        return self._mask_logits(net(params["model"], batch.x), params)

    def finetuning(self, params, parts, epochs):
        """Train the model, and leave the classes beside it alone."""
        mask = {"model": True, "labels": False} if self.masked else None
        return [Phase(epochs, mask)]

    def _mask_logits(self, logits: Tensor, client: Tree) -> Tensor:
        """Return the logits, with 0 for classes that the client lacks."""
        if not self.masked:
            return logits
        return torch.where(client["labels"], logits, 0.0)
