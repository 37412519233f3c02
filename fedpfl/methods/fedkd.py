"""FedKD: a common student and each client's teacher learn from each other; low ranks travel."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Proportion
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.common import CommonBeside
from fedpfl.methods.shared.distillation import kl_divergence
from fedpfl.methods.shared.layers import init_linear, seeded_generator
from fedpfl.methods.shared.method import flag


@dataclass(frozen=True)
class FedKD(CommonBeside):
    """FedKD (Wu et al., Nature Communications 13, 2022, arXiv:2108.13323).

    A client trains its private network f, the teacher, the common one g, the student, and a linear
    map W on CE(f) + CE(g) + (KL(f || g) + KL(g || f) + 2 MSE(z_f, W z_g)) / (CE(f) + CE(g)), z
    being a head's input; as in the official code and HtFLlib everything has its gradient, and KL
    is averaged over the classes too. Of each weight, as a matrix, the student's update goes up as
    its largest singular values and vectors: as few as have a share of the energy (sum of squares)
    above T, which rises from energy_start to energy_end over the run. The server averages updates
    and cuts the mean in the same way. Clients are evaluated by f.

    compress: `updates` (paper, official code), or `parameters` themselves (HtFLlib). Both codes
        drop a matrix that needs all its singular values, and weigh clients equally. Here the
        student comes down whole, as a client that was away has not followed its updates.
    """

    energy_start: Proportion = 0.95
    energy_end: Proportion = 0.98
    compress: Literal["updates", "parameters"] = "updates"

    needs_classes = "it distils probabilities of classes"
    server_sees = "each upload"
    takes_kinds = True

    _kept: ClassVar[tuple[str, ...]] = ("model", "map")

    def init(self, params, parts):
        """Count the rounds; T rises with them."""
        server, client = super().init(params, parts)
        played = flag(params).float()
        return {**server, "played": played, "rounds": played + max(1, parts.rounds)}, client

    def _make_own(self, params, parts):
        """Return the client's network and W, initialised as torch does."""
        _ = parts.head_weight  # raises for a head that has none
        weight = params[parts.head_weight]
        common_width = parts.common[parts.common_head[0]].shape[1]
        linear = init_linear(common_width, weight.shape[1], seeded_generator(parts.seed))
        return {"model": params, "map": tree.as_type_of(linear["weight"], weight)}

    def loss(self, server, client, net, params, batch):
        """Return both cross-entropies, and the distillation over their sum."""
        own, z = net.features(params["model"], batch.x)
        common, common_z = net.common.features(params["common"], batch.x)
        losses = batch.loss(own) + batch.loss(common)
        divergence = kl_divergence(common, own) + kl_divergence(own, common)
        distance = (z - F.linear(common_z, params["map"])).square().mean(1)
        distilled = divergence / own.shape[1] + 2 * distance
        return losses + batch.mean(distilled) / losses

    def after_training(self, server, client, net, params, shard, aux):
        """Return the student's update in factors, and which of them are needed."""
        update = tree.map(torch.sub, params["common"], self._base(server["common"]))
        return self._cut(server, update)

    def finish(self, server, client, start, params):
        """Send the factors up, keep teacher and W."""
        upload = Agreed(client["factors"], client["needed"])
        return upload, tree.drop(params, ("common",))

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the updates, cut the mean, and move the student by it."""
        common = server["common"]
        factors = tree.apply_mask(uploads.values, uploads.mask)
        mean = tree.mean(_multiply(factors, common), weight)
        cut = self._cut(server, mean)
        update = _multiply(tree.apply_mask(cut["factors"], cut["needed"]), common)
        common = tree.map(torch.add, self._base(common), update)
        return {**server, "common": common, "played": server["played"] + 1}, clients

    def evaluated(self, server, client, params):
        """Return the teacher."""
        return params["model"]

    def _base(self, common: Tree) -> Tree:
        """Return the parameters that updates are added to."""
        return common if self.compress == "updates" else tree.full_like(common, 0.0)

    def _cut(self, server: Tree, update: Tree) -> dict[str, Tree]:
        """Return the factors of an update, and bools: which of them travel."""
        share = (server["played"] / server["rounds"]).clamp(max=1)
        energy = self.energy_start + (self.energy_end - self.energy_start) * share
        factors = {name: _factorise(leaf) for name, leaf in update.items()}
        needed = {name: _choose(parts, energy) for name, parts in factors.items()}
        return {"factors": factors, "needed": needed}


def _factorise(update: Tensor) -> Tree:
    """Return the singular value decomposition of a weight's update; a vector stays whole."""
    if update.dim() < 2:
        return {"whole": update}
    left, values, right = torch.linalg.svd(tree.as_matrix(update), full_matrices=False)
    return {"left": left, "values": values, "right": right}


def _choose(factors: Tree, energy: Tensor) -> Tree:
    """Return bools for the factors: as many as have more than this share of the energy."""
    if "whole" in factors:
        return tree.full_like(factors, True)
    sums = factors["values"].double().square().cumsum(0)
    is_needed = torch.ones_like(sums, dtype=torch.bool)
    is_needed[1:] = sums[:-1] <= energy * sums[-1]
    return {
        "left": is_needed.expand_as(factors["left"]),
        "values": is_needed,
        "right": is_needed[:, None].expand_as(factors["right"]),
    }


def _multiply(factors: Tree, like: Tree) -> Tree:
    """Return the updates of factors, of one client or stacked, in the form of `like`."""
    updates = {}
    for name, parts in factors.items():
        if "whole" in parts:
            updates[name] = parts["whole"]
        else:
            matrix = parts["left"] * parts["values"][..., None, :] @ parts["right"]
            updates[name] = matrix.reshape(*matrix.shape[:-2], *like[name].shape)
    return updates
