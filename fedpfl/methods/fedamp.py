"""FedAMP and HeurFedAMP: each client is drawn to a mixture of those models that resemble its own."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Above, AtLeast, Between
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.pool import ModelPool

CHUNK = 16  # models that the server compares with the cohort's at once


@dataclass(frozen=True)
class FedAMP(ModelPool):
    """FedAMP (Huang et al., AAAI 2021, arXiv:2007.03797): attentive message passing between
    personal models w_i.

    Before client i trains, the server makes its cloud model u_i = sum_j xi_ij w_j from the latest
    models of the clients that have trained. The client then minimises CE(w) + lam / (2 alpha) |w -
    u_i|^2, starting from w_i; the result is w_i. In its first participation, w_i being the initial
    model, it minimises CE(w) alone. For j != i

        fedamp:      xi_ij = alpha exp(-|w_i - w_j|^2 / sigma) / sigma,
        heurfedamp:  xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i,
        w_h)),

    and the rest, xi_ii, is the client's own. Nothing but these three numbers matters:

    sigma: as above; of the order of squared distances, of cosines 25 or more. share: of others in
        u_i; for heurfedamp 1 - xi_ii, for fedamp alpha (K - 1) / sigma, the most it can be, of K
        clients, so that no xi is negative.
    pull: lam / alpha, the strength of the proximal term; with 0 and start_from=own it is
    Local-Only.
    start_from: what training starts from, w_i (`own`) or u_i (`cloud`). pool: whose models are
        mixed, of `all` that have trained, or of those of the `last_round`, as in PFLlib.

    The paper's alpha falls over the rounds, in its analysis; here it is constant, as in PFLlib.
    There is no code by the authors, and its settings are not at hand; the defaults are ours: set
    sigma by the distances that there are (the column others_share, the share of others in u_i, is
    near 0 where it is too small). In PFLlib since March 2023 the penalty is built from detached
    tensors and has no gradient: it is Local-Only, whatever its options say; from January 2022 until
    then, u_i had the last u_i in the place of w_i. Its sigma = alpha = 1 makes xi_ii negative among
    models that are alike. Fling's port is as the paper. Clients are evaluated by w_i, never by u_i.
    BatchNorm statistics stay with the client.
    """

    variant: Literal["fedamp", "heurfedamp"] = "fedamp"
    sigma: Annotated[float, Above(0)] = 10.0
    share: Annotated[float, Between(0, 1)] = 0.9
    pull: Annotated[float, AtLeast(0)] = 0.1
    start_from: Literal["own", "cloud"] = "own"
    pool: Literal["all", "last_round"] = "all"

    def before_turn(self, server, clients, read_states, generator):
        """Return the clients' cloud models, and the share of others in them."""
        if generator is None:  # clients are evaluated by their own models
            return {}
        own, numbers, pool = (
            clients["model"],
            clients["number"],
            [n for n, here in enumerate(server["pool"].tolist()) if here],
        )
        mixed = tree.map(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), own)
        total = torch.zeros_like(numbers, dtype=torch.float64)
        for place in range(0, len(pool), CHUNK):
            some = read_states(pool[place : place + CHUNK])
            models = some["model"]
            weight = torch.where(
                numbers[:, None] == some["number"], 0.0, self._attention(own, models)
            )
            total = total + weight.sum(1)
            add = lambda sum, leaf, weight=weight: sum + torch.tensordot(weight, leaf.double(), 1)  # noqa: E731
            mixed = tree.map(add, mixed, models)
        if self.variant == "fedamp":
            scale = torch.full_like(total, self.share / max(1, len(server["pool"]) - 1))
        else:
            scale = torch.where(total > 0, self.share / total, 0.0)

        def cloud(leaf: Tensor, sum: Tensor) -> Tensor:
            kept, taken = (
                part.view(-1, *[1] * (leaf.dim() - 1)) for part in (1 - scale * total, scale)
            )
            return (kept * leaf.double() + taken * sum).to(leaf)

        return {"cloud": tree.map(cloud, own, mixed), "others_share": (scale * total).float()}

    def _attention(self, own: Tree, models: Tree) -> Tensor:
        """Return how much each of `own` attends to each of `models`, from 0 to 1, `[cohort,
        models]`.
        """
        ours, theirs = (
            [leaf.flatten(1).double() for leaf in tree.leaves(part)] for part in (own, models)
        )
        product = sum(a @ b.T for a, b in zip(ours, theirs, strict=True))
        left, right = (sum(leaf.square().sum(1) for leaf in part) for part in (ours, theirs))
        if self.variant == "fedamp":
            return (-(left[:, None] + right - 2 * product).clamp(min=0) / self.sigma).exp()
        cosine = product / (left[:, None] * right).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        return (self.sigma * (cosine - 1)).exp()

    def download(self, server, client):
        """Return the cloud model, from the second participation on; nothing if it has no part in
        training.
        """
        if not self.pull and self.start_from == "own":
            return {}
        known = tree.map(lambda leaf: client["participated"].expand(leaf.shape), client["cloud"])
        return Agreed(client["cloud"], known)

    def start(self, received, client):
        """Return what `start_from` says."""
        own = client["model"]
        return (
            own if self.start_from == "own" else tree.where(client["participated"], received, own)
        )

    def loss(self, server, client, net, params, batch):
        """Add the proximal term to the cross-entropy."""
        loss = super().loss(server, client, net, params, batch)
        if not self.pull:
            return loss
        apart = tree.squared_distance(params, client["cloud"])
        return loss + self.pull / 2 * torch.where(client["participated"], apart, 0.0)

    def finish(self, server, client, start, params):
        """Send the model up, and keep it."""
        return params, {"model": params}

    def metrics(self, server, client):
        """Return the share of others in the cloud model."""
        return {"others_share": client["others_share"]}
