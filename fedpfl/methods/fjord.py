"""FjORD: ordered dropout, in which narrow sub-models are the first neurons of wider ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fedpfl.ground import tree
from fedpfl.ground.ranges import Proportion
from fedpfl.methods.shared import neurons
from fedpfl.methods.shared.submodel import Submodel


@dataclass(frozen=True)
class FjORD(Submodel):
    """FjORD (Horvath et al., NeurIPS 2021, arXiv:2102.13451).

    ordered: True: the original, in which each step trains a width drawn uniformly from those of
    `widths` that the
        device can hold. False: the version that FedSPU compares with, in which a client always
        trains its own width.
    distill: weight a of distillation in the ordered version, 0 is off: a step minimises the
        cross-entropy of the client's widest model plus (1 - a) times that of the drawn one plus a
        times KL(widest || drawn), the widest not differentiated as a teacher (temperature 1).
        Clients are evaluated with the model of their own width from their last training, before
        that with the initial model's. With momentum, entries that a narrow step leaves out coast
        on.
    """

    ordered: bool = False
    distill: Proportion = 0.0

    @property
    def needs_classes(self) -> str:  # type: ignore[override]
        """Return why labels must be classes, "" where they need not."""
        return "it distils probabilities of classes; use method.distill=0" if self.distill else ""

    def __post_init__(self):
        super().__post_init__()
        self.check(
            self.ordered or self.distill == 0,
            "distill",
            "0 unless ordered",
        )

    @property
    def randoms(self):
        """Draw a number for the width of each step."""
        return 1 if self.ordered else 0

    def init(self, params, parts):
        """Give the ordered version its list of widths to draw from."""
        server, client = super().init(params, parts)
        if self.ordered:
            ascending = sorted(self.widths)
            device = client["width"].device
            server["widths"] = torch.tensor(
                ascending,
                dtype=torch.float64,
                device=device,
            )
        return server, client

    def _active(self, server, client):
        """Return the first neurons of each layer, as many as the client's width has."""
        return neurons.prefix_neurons(server["plan"], client["width"], self.rounding)

    def loss(self, server, client, net, params, batch):
        """Return the loss of the drawn width, with distillation together with the widest's."""
        if not self.ordered:
            return super().loss(server, client, net, params, batch)
        # A step has one width: the number of its first sample draws it.
        narrow_params = self._narrow_params(
            server,
            client,
            params,
            batch.random[0],
        )
        narrow = self.predict(net, narrow_params, batch)
        loss = batch.loss(narrow)
        if not self.distill:
            return loss
        wide = self.predict(net, params, batch)
        teacher = wide.detach().softmax(1)
        divergence = F.kl_div(narrow.log_softmax(1), teacher, reduction="none").sum(1)
        return batch.loss(wide) + (1 - self.distill) * loss + self.distill * batch.mean(divergence)

    def _narrow_params(self, server, client, params, random):
        """Return the sub-model of a width drawn uniformly from those that the device can hold."""
        widths = server["widths"]  # ascending, so the device can hold the first `width_count`
        width_count = (widths <= client["width"] + neurons.SLACK).sum()
        # Rounding may make random * count the count itself.
        index = (random * width_count).long().minimum(width_count - 1)
        width = widths.gather(0, index)[0]
        active = neurons.prefix_neurons(server["plan"], width, self.rounding)
        return tree.apply_mask(
            params,
            neurons.entry_masks(server["plan"], active, params),
        )
