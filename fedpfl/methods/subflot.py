"""SubFLOT: sub-models that the server cuts out and puts back by optimal transport of neurons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import (
    NonNegative,
    Proportion,
    ProportionBelowOne,
)
from fedpfl.ground.tree import Agreed
from fedpfl.methods.shared import neurons, transport
from fedpfl.methods.shared.method import flag
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
    global) over the clients with neurons that reach it; unreached entries keep their values.

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
        or the `first` ones of every layer, as if the client's neurons were forgotten;
        how the paper's ablation does it is not known. Steps need 2 lr lam rho < 1. BatchNorm
        statistics stay with the client's neurons and are not transported; the global model, which
        is never evaluated, has none. Clients are evaluated with their last trained model, before the
        first time with the initial model.
    """

    mixes_samples = ""

    rates: tuple[ProportionBelowOne, ...] = (0.0, 0.25, 0.5, 0.75)
    assign: Assignment = "random"
    alpha: Proportion = 0.5
    lam: NonNegative = 1.0
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
        server["writers"] = transport.writing_weights(params, parts)
        all_neurons = torch.ones_like(server["plan"]["group"], dtype=torch.bool)
        return server, {**client, "rate": flag(params).double(), "own": all_neurons}

    def init_clients(self, clients, generator):
        """Return the clients' rates."""
        return {"rate": assign_values(self.rates, self.assign, generator, clients)}

    def sample(self, server, generator):
        """Draw a lot for each neuron, for the first choice."""
        neuron_count = len(server["plan"]["group"])
        return {"lot": torch.rand(neuron_count, generator=generator)}

    def before_training(self, server, client, net, shard):
        """Return the client's neurons, and W~.

        The server works W~ out client by client; no data are looked at.
        """
        plan = server["plan"]
        model = server["model"]
        history = client["model"]  # H
        has_joined = bool(client["participated"])
        if has_joined:
            own_neurons = client["own"]
        else:
            own_neurons = self._initial_neurons(server, client)
        active = neurons.append_always_active(own_neurons)
        mask = neurons.entry_masks(plan, active, model)
        # What comes the first time, when there is no H.
        received = tree.apply_mask(model, mask)
        if has_joined:
            # ---- ALIGN(global -> H), or what takes its place in an ablation.
            if self.otp and self.alpha:
                small = transport.cut_dense(plan, active, history)
                aligned, _ = transport.align_neurons(
                    plan, server["writers"], source=model, target=small, mode=self.mode
                )
                received = transport.embed_dense(aligned, mask)
            elif self.positions == "first":
                leading = neurons.leading_neurons(plan, active)
                small = transport.cut_dense(plan, leading, model)
                received = transport.embed_dense(small, mask)

            # ---- W~ = alpha ALIGN(global -> H) + (1 - alpha) H
            received = tree.map(
                lambda h, g: torch.lerp(h, g, self.alpha),
                history,
                received,
            )
        return {"own": own_neurons, "received": received}

    def _initial_neurons(self, server, client):
        """Return the neurons that a client begins with."""
        plan = server["plan"]
        width = 1 - client["rate"]
        if self.initial == "prefix":
            active = neurons.prefix_neurons(plan, width, "round")
        else:
            active = neurons.top_neurons(plan, width, client["lot"], "round")
        return active[:-1]

    def _active(self, server, client):
        """Return the client's neurons."""
        return neurons.append_always_active(client["own"])

    def download(self, server, client):
        """Send the entries of W~ between the client's neurons."""
        return Agreed(client["received"], client["mask"])

    def loss(self, server, client, net, params, batch):
        """Return CE + lam rho |W - W~|^2: the pull is stronger for smaller networks."""
        loss = super().loss(server, client, net, params, batch)
        if not (self.sar and self.lam):
            return loss
        distance = tree.squared_distance(params, client["received"])
        return loss + self.lam * client["rate"].to(loss.dtype) * distance

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the clients' models, moved to the global model's neurons."""
        if not self.ota and self.positions == "own":
            return super().aggregate(server, clients, net, uploads, weight, generator)
        plan = server["plan"]
        model = server["model"]
        aligned_models = []
        covered_masks = []
        for row, own_neurons in enumerate(clients["own"]):
            active = neurons.append_always_active(own_neurons)
            trained = tree.take(uploads["model"].values, row)
            small = transport.cut_dense(plan, active, trained)
            # ---- ALIGN(W -> global), or the first neurons of every layer.
            if self.ota:
                aligned, covered = transport.align_neurons(
                    plan, server["writers"], source=small, target=model, mode=self.mode
                )
            else:
                leading = neurons.leading_neurons(plan, active)
                covered = neurons.entry_masks(plan, leading, model)
                aligned = transport.embed_dense(small, covered)
            aligned_models.append(aligned)
            covered_masks.append(covered)

        # ---- Entry by entry the mean over the clients with neurons that reach it.
        stacked_models = tree.stack(aligned_models)
        stacked_masks = tree.stack(covered_masks)
        mean = tree.masked_mean(model, stacked_models, stacked_masks, weight)
        return {**server, "model": mean}, clients
