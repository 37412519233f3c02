"""FlexFL: levels of sub-models, cut by how often neurons are silent."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from fedpfl.ground import tree
from fedpfl.ground.ranges import (
    NonNegative,
    Positive,
    PositiveProportion,
    Proportion,
    ProportionBelowOne,
)
from fedpfl.ground.tree import Agreed
from fedpfl.methods.shared import levels, neurons
from fedpfl.methods.shared.method import pick_row
from fedpfl.methods.shared.neurons import Rounding
from fedpfl.methods.shared.submodel import Assignment, PartialModel


@dataclass(frozen=True)
class FlexFL(PartialModel):
    """FlexFL (Chen et al., IEEE TCAD 2024, arXiv:2407.12729).

    Each round the server draws a level for each client, and sends the first neurons of each hidden
    layer that belong to it; a device that cannot hold so many cuts its download to the
    largest level that it can. Means are by samples and entry.

    levels: shares q of the network's scalars, ascending. A level has the share clip(100 s_l /
        gamma, 0.01, 1) of the neurons in group l, with the smallest whole gamma that makes it q
        within `tolerance`, or else with the gamma that comes nearest; q = 1 is everything. s_l = 1
        - APoZ_l log P_l / log max P, where P_l counts the scalars of the group's layers.
    apoz: APoZ_l, the average share of zeros behind the ReLU of each group, from input to output;
        empty: 0 for all, hence equal shares, which takes no data. The authors measure it on test
        data, which would be a leak.
    devices: how many can hold no more than each level (weak, medium, strong); assign: `blocks`, in
    order, or `random`.
    gamma, temperature: weight and T of self-distillation: a client at level k = 0, 1, ... adds
        gamma / k times the sum over the lower levels j < k of T^2 KL(f_j || f_k) at temperature T,
        averaged over classes too as in the authors' code. f_j is the level's part of the model as
        it is being trained, a teacher without gradient. Teachers leave the statistics of BatchNorm
        alone. Clients are evaluated with the network that they trained last, before that with the
        part of the initial model that their device can hold. Two things of the authors' are not
        here: the two levels between the three, which devices may cut down to but no one is sent,
        and the fluctuation of a device's capacity.
    """

    mixes_samples = ""

    levels: tuple[PositiveProportion, ...] = (0.25, 0.5, 1.0)
    apoz: tuple[Proportion, ...] = ()
    tolerance: ProportionBelowOne = 0.05
    rounding: Rounding = "floor"
    devices: tuple[NonNegative, ...] = (4, 3, 3)
    assign: Assignment = "blocks"
    gamma: NonNegative = 10.0
    temperature: Positive = 3.0

    server_sees = "each upload"

    @property
    def needs_classes(self) -> str:  # type: ignore[override]
        """Return why labels must be classes, "" where they need not."""
        return "it distils probabilities of classes; use method.gamma=0" if self.gamma else ""

    def __post_init__(self):
        super().__post_init__()
        is_ascending = all(low < high for low, high in pairwise(self.levels))
        self.check(
            len(self.levels) > 0 and is_ascending,
            "levels",
            "one or more, ascending",
        )
        self.check(
            len(self.devices) == len(self.levels),
            "devices",
            "as many numbers as levels",
        )
        self.check(sum(self.devices) > 0, "devices", "0 or more, and not all 0")

    def init(self, params, parts):
        """Add each level's neurons, the capacity of the client's device, and its model's level."""
        server, client = super().init(params, parts)
        plan = server["plan"]
        wiring = parts.wiring
        worths = levels.group_worths(params, wiring, self.apoz)
        active = []
        for level in self.levels:
            counts = levels.level_neuron_counts(
                params=params,
                wiring=wiring,
                level=level,
                worths=worths,
                tolerance=self.tolerance,
                rounding=self.rounding,
            )
            active.append(neurons.first_neurons(plan, counts.to(plan["group"].device)))
        # `init_clients` replaces both: it knows how many clients there are.
        highest = torch.full_like(plan["group"][0], len(self.levels) - 1)
        server = {**server, "levels": torch.stack(active)}
        return server, {**client, "device": highest, "level": highest}

    def init_clients(self, clients, generator):
        """Return the highest level that each client's device can hold."""
        shares = torch.tensor(self.devices, dtype=torch.float64)
        if self.assign == "random":
            device = torch.multinomial(shares, clients, replacement=True, generator=generator)
        else:
            # In order: client i of K has the level with i / K in its stretch of the shares.
            boundaries = (shares / shares.sum()).cumsum(0)[:-1]
            position = torch.arange(clients, dtype=torch.float64) / clients
            device = (boundaries <= position[:, None] + neurons.SLACK).sum(1)
        return {"device": device, "level": device}

    def sample(self, server, generator):
        """Draw the level that the client is sent."""
        return {"sent": torch.randint(len(self.levels), (), generator=generator)}

    def _active(self, server, client):
        """Return the neurons of the client's level."""
        return pick_row(server["levels"], client["level"])

    def prepare(self, server, client):
        """Settle on the level that is sent, or the largest that the device can hold."""
        level = torch.minimum(client["sent"], client["device"])
        return super().prepare(server, {**client, "level": level})

    def download(self, server, client):
        """Send all entries of the level that was drawn."""
        active = self._active(server, {"level": client["sent"]})
        mask = neurons.entry_masks(server["plan"], active, server["model"])
        return Agreed(server["model"], mask)

    def start(self, received, client):
        """Return the part of the received model that the device can hold."""
        return tree.apply_mask(received, client["mask"])

    def loss(self, server, client, net, params, batch):
        """Return the cross-entropy with self-distillation from the lower levels."""
        # ---- Step 1: cross-entropy.
        logits = net(params, batch.x)
        loss = batch.loss(logits)
        if not self.gamma:
            return loss

        # ---- Step 2: distillation from each lower level.
        level = client["level"]
        student = (logits / self.temperature).log_softmax(1)
        # All lower levels are computed for everybody, as hooks may not branch on a client's level.
        for lower in range(len(self.levels) - 1):
            mask = neurons.entry_masks(
                server["plan"],
                server["levels"][lower],
                params,
            )
            with torch.no_grad():
                lower_logits = net.aside(
                    tree.apply_mask(params, mask),
                    batch.x,
                )
                teacher = (lower_logits / self.temperature).softmax(1)
            divergence = F.kl_div(student, teacher, reduction="none").mean(1)
            # gamma / k for the levels below the client's k, else 0
            weight = torch.where(
                lower < level,
                self.gamma / level.clamp(min=1),
                0.0,
            )
            loss = loss + weight * self.temperature**2 * batch.sum(divergence) / batch.samples.sum()
        return loss
