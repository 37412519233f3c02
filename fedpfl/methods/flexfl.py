"""FlexFL: levels of sub-models whose layers are cut by how often their neurons are silent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl import tree
from fedpfl.errors import FedpflError
from fedpfl.methods import neurons
from fedpfl.methods.base import Batch, mean_cross_entropy
from fedpfl.methods.neurons import Rounding
from fedpfl.methods.submodel import Assign, Cut, aside, padded
from fedpfl.models import Bound, Parts
from fedpfl.models.wiring import Wiring
from fedpfl.tree import Agreed, Tree


@dataclass(frozen=True)
class FlexFL(Cut):
    """FlexFL (Chen et al., IEEE TCAD 2024, arXiv:2407.12729).

    Each round the server draws a level for each client, and sends the first neurons of each hidden layer that belong to
    it; a device that cannot hold so many cuts what it receives down to the largest level that it can. Means are by
    samples and entry.

    levels: shares q of the network's scalars, ascending. Of the group l of neurons a level has the share
        clip(100 s_l / gamma, 0.01, 1) with the smallest whole gamma that makes it q within `tolerance`, or else with
        the gamma that comes nearest; q = 1 is everything.
        s_l = 1 - APoZ_l log P_l / log max P, with P_l the scalars of the group's layers.
    apoz: APoZ_l, the average share of zeros behind the ReLU of each group, from input to output; empty: 0 for all,
        hence equal shares, which takes no data. Measured on test data, as by the authors, it would be a leak.
    devices: how many can hold no more than each level (weak, medium, strong); assign: `blocks`, in order, or `random`.
    gamma, temperature: weight and T of self-distillation: a client at level k = 0, 1, ... adds gamma / k times the sum
        over the lower levels j < k of T^2 KL(f_j || f_k) at temperature T, averaged over classes too as in the authors'
        code. f_j is the level's part of the model as it is being trained, a teacher without gradient.
    Teachers leave the statistics of BatchNorm alone. Clients are judged by the network that they trained last, before
    by the initial model's part that their device can hold. The authors' two levels between the three, which devices may
    cut down to but no one is sent, and the fluctuation of what a device can hold are not here.
    """

    levels: tuple[float, ...] = (0.25, 0.5, 1.0)
    apoz: tuple[float, ...] = ()
    tolerance: float = 0.05
    rounding: Rounding = "floor"
    devices: tuple[float, ...] = (4, 3, 3)
    assign: Assign = "blocks"
    gamma: float = 10.0
    temperature: float = 3.0

    def __post_init__(self) -> None:
        ascending = all(low < high for low, high in pairwise(self.levels))
        self.check(len(self.levels) > 0 and ascending, "levels", "one or more, ascending")
        self.check(all(0 < level <= 1 for level in self.levels), "levels", "above 0 and at most 1")
        self.check(all(0 <= share <= 1 for share in self.apoz), "apoz", "between 0 and 1")
        self.check(0 <= self.tolerance < 1, "tolerance", "at least 0 and below 1")
        self.check(self.rounding in ("floor", "ceil", "round"), "rounding", "floor, ceil or round")
        self.check(len(self.devices) == len(self.levels), "devices", "as many numbers as levels")
        possible = all(0 <= count < math.inf for count in self.devices) and sum(self.devices) > 0
        self.check(possible, "devices", "0 or more, and not all 0")
        self.check(self.assign in ("blocks", "random"), "assign", "blocks or random")
        self.check(0 <= self.gamma < math.inf, "gamma", "0 or more")
        self.check(0 < self.temperature < math.inf, "temperature", "a positive number")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """Each level's neurons at the server; what the client's device can hold, and the level of its model."""
        server, mine = super().init(params, parts)
        plan = server["plan"]
        chosen = [self._active(plan, params, parts.wiring, level) for level in self.levels]
        most = torch.full_like(plan["group"][0], len(self.levels) - 1)
        return {**server, "levels": torch.stack(chosen)}, {**mine, "device": most, "level": most}

    def endow(self, generator: torch.Generator, clients: int) -> dict[str, Tree]:
        """What devices can hold."""
        shares = torch.tensor(self.devices, dtype=torch.float64)
        if self.assign == "random":
            device = torch.multinomial(shares, clients, replacement=True, generator=generator)
        else:
            ends = (shares / shares.sum()).cumsum(0)[:-1]
            place = torch.arange(clients, dtype=torch.float64) / clients
            device = (ends <= place[:, None] + neurons.SLACK).sum(1)
        return {"device": device, "level": device}

    def draw(self, generator: torch.Generator, server: Tree) -> dict[str, Tree]:
        """The level that is sent."""
        return {"sent": torch.randint(len(self.levels), (), generator=generator)}

    def active(self, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """The neurons of the client's level."""
        return server["levels"].index_select(0, mine["level"].view(1))[0]

    def prepare(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """The level that is sent, or the largest that the device can hold."""
        return super().prepare(server, {**mine, "level": torch.minimum(mine["sent"], mine["device"])})

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """All entries of the level that is sent."""
        sent = self.active(server, {"level": mine["sent"]})
        return Agreed(server["model"], neurons.entries(server["plan"], sent, server["model"]))

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy and self-distillation."""
        logits = net(params, batch.x)
        loss = mean_cross_entropy(logits, batch)
        if not self.gamma:
            return loss
        level, weight = mine["level"], torch.ones_like(logits[:, 0]) if batch.weight is None else batch.weight
        student = (logits / self.temperature).log_softmax(1)
        for lower in range(len(self.levels) - 1):
            inside = neurons.entries(server["plan"], server["levels"][lower], params)
            with torch.no_grad():
                teacher = (aside(net, padded(params, inside), batch.x) / self.temperature).softmax(1)
            apart = F.kl_div(student, teacher, reduction="none").mean(1)
            share = torch.where(lower < level, self.gamma / level.clamp(min=1), 0.0)
            loss = loss + share * self.temperature**2 * (apart * weight).sum() / weight.sum()
        return loss

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The trained entries go up."""
        kept = {name: value for name, value in mine.items() if name != "sent"}
        return super().finish(server, kept, start, end)

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """Its last model; of the initial one its part."""
        return padded(mine["model"], neurons.entries(server["plan"], self.active(server, mine), mine["model"]))

    def _active(self, plan: Tree, params: Tree, wiring: Wiring, level: float) -> Tensor:
        """The first neurons of each group, as many as `level` has."""
        if level == 1:
            return torch.ones(len(plan["group"]) + 1, dtype=torch.bool, device=plan["group"].device)
        sizes = torch.tensor(list(wiring.widths.values()))
        worth = self._worth(params, wiring)
        total, best, count = tree.size(params), math.inf, sizes
        for gamma in range(1, int(10000 * max(worth)) + 2):  # with this last one all shares are the least
            shares = torch.tensor([min(max(100 * own / gamma, 0.01), 1.0) for own in worth], dtype=torch.float64)
            kept = neurons.kept({"width": sizes}, shares, self.rounding)
            apart = _scalars(params, wiring, kept.tolist()) / total - level
            if abs(apart) < best:
                best, count = abs(apart), kept
            if apart <= self.tolerance:
                break
        inside = plan["place"] < count.to(plan["group"].device)[plan["group"]]
        return torch.cat([inside, torch.ones_like(inside[:1])])

    def _worth(self, params: Tree, wiring: Wiring) -> list[float]:
        """What each group is worth keeping, s_l."""
        groups = list(wiring.widths)
        if self.apoz and len(self.apoz) != len(groups):
            raise FedpflError(f"method.apoz has {len(self.apoz)} numbers for {len(groups)} groups of neurons")
        scalars = dict.fromkeys(groups, 0)
        for name, leaf in params.items():
            axis = wiring.axes[name][0]
            group = axis.group if axis else name.rpartition(".")[0]  # an embedding's are along its last axis
            if group in scalars:
                scalars[group] += leaf.numel()
        largest = math.log(max(scalars.values()))
        zeros = self.apoz or [0.0] * len(groups)
        return [1 - share * math.log(scalars[group]) / largest for group, share in zip(groups, zeros, strict=True)]


def _scalars(params: Tree, wiring: Wiring, kept: list[int]) -> int:
    """Of a network with so many neurons in each group."""
    count = dict(zip(wiring.widths, kept, strict=True))
    total = 0
    for name, leaf in params.items():
        shape = list(leaf.shape)
        for place, axis in enumerate(wiring.axes[name]):
            if axis is not None:
                shape[place] = count[axis.group] * axis.block
        total += math.prod(shape)
    return total
