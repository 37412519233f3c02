"""FedAMP and HeurFedAMP: each client is drawn to a mixture of models that resemble its own."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, Positive, Proportion
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import send_if
from fedpfl.methods.shared.pool import ModelPool, sum_models


@dataclass(frozen=True)
class FedAMP(ModelPool):
    """FedAMP (Huang et al., AAAI 2021, arXiv:2007.03797).

    Attentive message passing between personal models w_i. Before client i trains, the server makes
    its cloud model u_i = sum_j xi_ij w_j from the latest models of the clients that have
    trained. The client then minimises CE(w) + lam / (2 alpha) |w - u_i|^2, starting from w_i;
    the result is w_i. In its first participation, w_i being the initial model, it minimises
    CE(w) alone. For j != i

        fedamp:      xi_ij = alpha exp(-|w_i - w_j|^2 / sigma) / sigma,
        heurfedamp:  xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i,
        w_h)),

    and the rest, xi_ii, is the client's own. Nothing but these three numbers matters:

    sigma: as above; of the order of squared distances, of cosines 25 or more. share: of others in
        u_i; for heurfedamp 1 - xi_ii, for fedamp alpha (K - 1) / sigma, the most it can be, of K
        clients, so that no xi is negative.
    pull: lam / alpha, the strength of the proximal term; with 0 and start_from=own it is
    Local-Only.
    start_from: the start of training, w_i (`own`) or u_i (`cloud`). pool: the models that are
        mixed, of `all` that have trained, or of those of the `last_round`, as in PFLlib.

    The paper's alpha falls over the rounds, in its analysis; here it is constant, as in PFLlib.
    There is no code by the authors, and its settings are not at hand; the defaults are ours: set
    sigma by the distances that there are (the column others_share, the share of others in u_i, is
    near 0 where it is too small). In PFLlib since March 2023 the penalty is built from detached
    tensors and has no gradient: it is Local-Only, under all options; from January 2022 until
    then, u_i had the last u_i in the place of w_i. Its sigma = alpha = 1 makes xi_ii negative among
    models that are alike. Fling's port is as the paper. Clients are evaluated by w_i, never by u_i.
    BatchNorm statistics stay with the client.
    """

    mixes_samples = ""

    variant: Literal["fedamp", "heurfedamp"] = "fedamp"
    sigma: Positive = 10.0
    share: Proportion = 0.9
    pull: NonNegative = 0.1
    start_from: Literal["own", "cloud"] = "own"
    pool: Literal["all", "last_round"] = "all"

    def before_turn(self, server, clients, read_states, generator):
        """Return the clients' cloud models, and the share of other models in them."""
        if generator is None:  # clients are evaluated by their own models
            return {}
        models = clients["model"]

        # ---- Attention: the weighted sum of all other models, and of their weights.
        def weigh(states: Tree) -> Tensor:
            is_own = clients["number"][:, None] == states["number"]
            return torch.where(is_own, 0.0, self._attention(models, states["model"]))

        weighted_sum, total = sum_models(
            server["pool"], clients, read_states, weigh=weigh, names=models
        )

        # ---- The cloud model u_i = xi_ii w_i + sum_j xi_ij w_j.
        if self.variant == "fedamp":
            # alpha / sigma, with at most `share` for all other models.
            scale = torch.full_like(total, self.share / max(1, len(server["pool"]) - 1))
        else:
            scale = torch.where(total > 0, self.share / total, 0.0)
        others_share = scale * total

        def mix(leaf: Tensor, leaf_sum: Tensor) -> Tensor:
            shape = (-1, *[1] * (leaf.dim() - 1))
            own_weight = (1 - others_share).view(shape)
            mixture = own_weight * leaf.double() + scale.view(shape) * leaf_sum
            return mixture.to(leaf)

        return {
            "cloud": tree.map(mix, models, weighted_sum),
            "others_share": others_share.float(),
        }

    def _attention(self, models: Tree, pool_models: Tree) -> Tensor:
        """Compute how much each model attends to each of the pool, from 0 to 1.

        `[cohort, pool]`, in float64.
        """
        # ---- Inner products of all models of the cohort with all of the pool.
        ours: list[Any] = [tree.as_matrix(leaf).double() for leaf in tree.leaves(models)]
        theirs = [tree.as_matrix(leaf).double() for leaf in tree.leaves(pool_models)]
        # |w_i - w_j|^2 = |w_i|^2 + |w_j|^2 - 2 <w_i, w_j>, which stores no difference of a pair.
        product = sum(a @ b.T for a, b in zip(ours, theirs, strict=True))
        our_square = sum(leaf.square().sum(1) for leaf in ours)[:, None]
        their_square = sum(leaf.square().sum(1) for leaf in theirs)

        # ---- exp(-|w_i - w_j|^2 / sigma), or exp(sigma cos(w_i, w_j)) but for a common factor.
        if self.variant == "fedamp":
            distance = (our_square + their_square - 2 * product).clamp(min=0)
            return (-distance / self.sigma).exp()
        norms = (our_square * their_square).sqrt()
        # A model of zeros has no direction: its cosines are 0, not nan.
        cosine = product / norms.clamp(min=torch.finfo(torch.float64).tiny)
        return (self.sigma * (cosine - 1)).exp()  # - 1 cancels out, and keeps it from overflowing

    def download(self, server, client):
        """Return the cloud model, from the second participation on.

        Nothing comes down if it has no part in training.
        """
        if not self.pull and self.start_from == "own":
            return {}
        return send_if(client["participated"], client["cloud"])

    def start(self, received, client):
        """Return the client's own model w_i, or its cloud model u_i."""
        model = client["model"]
        if self.start_from == "own":
            return model
        return tree.where(client["participated"], received, model)

    def loss(self, server, client, net, params, batch):
        """Return CE(w) + pull / 2 |w - u_i|^2, in the first participation CE(w) alone."""
        loss = super().loss(server, client, net, params, batch)
        if not self.pull:
            return loss
        distance = tree.squared_distance(params, client["cloud"])
        return loss + self.pull / 2 * torch.where(client["participated"], distance, 0.0)

    def finish(self, server, client, start, params):
        """Send the model up, and keep it."""
        return params, {"model": params}

    def metrics(self, server, client):
        """Return the share of other models in the cloud model."""
        return {"others_share": client["others_share"]}
