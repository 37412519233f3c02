"""SubFLOT: sub-models that the server cuts out and puts back by optimal transport of neurons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast, Below, Between
from fedpfl.ground.tree import Agreed
from fedpfl.methods.shared import neurons, transport
from fedpfl.methods.shared.submodel import Assignment, PartialModel, assign_values
from fedpfl.methods.shared.transport import MatchingMode


@dataclass(frozen=True)
class SubFLOT(PartialModel):
    """SubFLOT (Jiang, He, Chen and Sun, CVPR 2026, arXiv:2604.06631).

    A client of pruning rate rho has a network with (1 - rho) M of the M neurons of each hidden
    layer, halves rounded up, at least one. H is the one that it uploaded last. ALIGN(a -> b) gives
    a the neurons of b: layer by layer, with inputs moved as the layer before was, neurons are
    matched by the Euclidean distance of their weights and bias. otp (extraction): the client starts
    from W~ = alpha ALIGN(global -> H) + (1 - alpha) H. sar (training): SGD on the cross-entropy +
    lam rho |W - W~|^2. ota (aggregation): entry by entry the mean, by samples, of ALIGN(W ->
    global) over the clients whose neurons reach it; entries that none reaches keep their values.

    The paper has no public code. Our choices are the matching one to one, the bias among a neuron's
    features, that layers of one residual stream are matched at the first that writes to it, what
    becomes of entries without coverage,
    and the beginning: a client that comes for the first time has no H and gets the entries between
    some neurons of the global model.

    rates: the pruning rates. assign: drawn for each client, `random`, or as many clients of each in
    order, `blocks`.
    mode: how neurons are matched: `one` to one, or `balanced`, the paper's formula read literally,
        in which the neurons of the larger side mix in those of the smaller. Between equal widths
        both are the same permutation. Networks that descend from one initial model keep their
        neurons apart, so one to one mostly finds the client's own positions; balanced mixtures
        shrink weights.
    initial: which neurons a client begins with: a `random` choice or the first ones (`prefix`). Its
        network is kept at their positions of a full-sized one.
    otp, sar, ota: False leaves a part out (the paper's ablation).
    positions: what takes the place of a transport that is left out: the client's `own` positions,
        or the `first` ones of every layer, as if nobody remembered which neurons the client has;
        how the paper's ablation does it is not known. Steps need 2 lr lam rho < 1. BatchNorm
        statistics stay with the client's neurons and are not transported; the global model, which
        is never evaluated, has none. Clients are evaluated with what they trained last, before the
        first time with the initial model.
    """

    rates: tuple[Annotated[float, AtLeast(0), Below(1)], ...] = (0.0, 0.25, 0.5, 0.75)
    assign: Assignment = "random"
    alpha: Annotated[float, Between(0, 1)] = 0.5
    lam: Annotated[float, AtLeast(0)] = 1.0
    mode: MatchingMode = "one"
    initial: Literal["random", "prefix"] = "random"
    otp: bool = True
    sar: bool = True
    ota: bool = True
    positions: Literal["own", "first"] = "own"

    def __post_init__(self):
        super().__post_init__()
        self.check(len(self.rates) > 0, "rates", "at least one rate")

    def init(self, params, parts):
        """Give the client a rate and all neurons, not yet chosen."""
        server, client = super().init(params, parts)
        rate = torch.zeros((), dtype=torch.float64, device=tree.leaves(params)[0].device)
        own = torch.ones_like(server["plan"]["group"], dtype=torch.bool)
        server["writers"] = transport.writing_weights(params, parts)
        return server, {**client, "rate": rate, "own": own}

    def init_clients(self, clients, generator):
        """Return the clients' rates."""
        return {"rate": assign_values(self.rates, self.assign, generator, clients)}

    def sample(self, server, generator):
        """Draw a lot for each neuron, for the first choice."""
        return {"lot": torch.rand(len(server["plan"]["group"]), generator=generator)}

    def before_training(self, server, client, net, shard):
        """Return the client's neurons, and W~, which the server works out client by client; no data
        are looked at.
        """
        plan, model, history = server["plan"], server["model"], client["model"]
        joined = bool(client["participated"])
        own = client["own"] if joined else self._choice(server, client)
        active = neurons.append_always_active(own)
        mask = neurons.entry_masks(plan, active, model)
        received = tree.apply_mask(model, mask)
        if joined:
            if self.otp and self.alpha:
                small = transport.cut_dense(plan, active, history)
                found, _ = transport.align_neurons(plan, server["writers"], model, small, self.mode)
                received = transport.embed_dense(found, mask)
            elif self.positions == "first":
                received = transport.embed_dense(
                    transport.cut_dense(plan, neurons.leading_neurons(plan, active), model), mask
                )
            received = tree.map(
                lambda last, new: torch.lerp(last, new, self.alpha), history, received
            )
        return {"own": own, "received": received}

    def _choice(self, server, client):
        """Return the neurons that a client begins with."""
        plan, width = server["plan"], 1 - client["rate"]
        if self.initial == "prefix":
            return neurons.prefix_neurons(plan, width, "round")[:-1]
        return neurons.top_neurons(plan, width, client["lot"], "round")[:-1]

    def _active(self, server, client):
        return neurons.append_always_active(client["own"])

    def download(self, server, client):
        """Send W~, a dense network."""
        return Agreed(client["received"], client["mask"])

    def loss(self, server, client, net, params, batch):
        """Return the cross-entropy, and the pull to W~, which is stronger for smaller networks."""
        loss = super().loss(server, client, net, params, batch)
        if self.sar and self.lam:
            loss = loss + self.lam * client["rate"].to(loss.dtype) * tree.squared_distance(
                params, client["received"]
            )
        return loss

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average what has been moved to the global model's neurons."""
        if not self.ota and self.positions == "own":
            return super().aggregate(server, clients, net, uploads, weight, generator)
        plan, model, found = server["plan"], server["model"], []
        for row, own in enumerate(clients["own"]):
            active = neurons.append_always_active(own)
            small = transport.cut_dense(plan, active, tree.take(uploads["model"].values, row))
            if self.ota:
                found.append(
                    transport.align_neurons(plan, server["writers"], small, model, self.mode)
                )
            else:
                mask = neurons.entry_masks(plan, neurons.leading_neurons(plan, active), model)
                found.append((transport.embed_dense(small, mask), mask))
        aligned, covered = (tree.stack(side) for side in zip(*found, strict=True))
        return {**server, "model": tree.masked_mean(model, aligned, covered, weight)}, clients
