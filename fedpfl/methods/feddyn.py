"""FedDyn: linear and quadratic terms move clients' optima to the server's."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative
from fedpfl.methods.shared.method import Method, equal_shares


@dataclass(frozen=True)
class FedDyn(Method):
    """FedDyn (Acar et al., ICLR 2021, arXiv:2111.04263, Algorithm 1).

    Written with lam_i = -g_i / alpha, which needs no division. A client minimises CE(x) + alpha
    <lam_i, x> + alpha/2 |x - th|^2 from th, the model received, up to th_i; then lam_i <- lam_i
    + th_i - th. With M the mean of ALL clients' lam_i (-h / alpha), th <- mean(th_i) + M, the
    mean over the cohort and uniform. lam_i stays on the client, M is kept from the uploads
    alone.

    alpha: 0.1, 0.01 and 0.001 in the paper. local.lr * alpha below 2, or steps diverge.
    judge: the model to evaluate clients with: th (`cloud`, Algorithm 1's), the mean of the last
        `cohort`'s models, or of `all` clients' last ones, initial before the first, which the
        authors' code plots. Fine-tuning starts there.

    The authors' code also scales alpha_i by the mean number of samples over the client's (not
    here), clips gradients at norm 10 but for weight decay's and alpha x's share (local.clip=10, of
    everything), and draws clients by coins. FL-bench leaves alpha/2 |x|^2 out, which is FedDyn
    under a NEGATIVE weight decay alpha, and weights uploads by samples; before 2025 it also read
    duals at other clients' places. PFLlib's quadratic term is not squared, a pull of one length at
    any distance, with alpha = 1. Tables made with either are of another algorithm.
    """

    mixes_samples = ""

    alpha: NonNegative = 0.01
    judge: Literal["cloud", "cohort", "all"] = "cloud"

    @property
    def server_sees(self) -> str:  # type: ignore[override]
        """Return a mean, unless the server knows all clients' last models."""
        return "client states" if self.judge == "all" else "mean of uploads"

    def init(self, params, parts):
        """Set all duals lam_i to zero."""
        dual = tree.full_like(params, 0.0)
        server = {
            "model": params,
            "dual": dual,
            "clients": tree.leaves(params)[0].new_full((), parts.clients),
        }
        client = {"dual": dual}
        # A model more at the server and in each checkpoint, so only where it is asked for.
        if self.judge != "cloud":
            server["judged"] = params
        if self.judge == "all":
            client["last"] = params
        return server, client

    def download(self, server, client):
        """Return the global model."""
        return server["model"]

    def loss(self, server, client, net, params, batch):
        """Return CE(x) + alpha/2 |x - th|^2 + alpha <lam_i, x>."""
        loss = super().loss(server, client, net, params, batch)
        # No product with 0: alpha = 0 costs no pass over the entries.
        if not self.alpha:
            return loss
        products = tree.map(
            lambda x, dual: (dual * x).sum(),
            params,
            client["dual"],
        )
        linear = sum(tree.leaves(products))
        quadratic = tree.squared_distance(params, server["model"])
        return loss + self.alpha / 2 * quadratic + self.alpha * linear

    def finish(self, server, client, start, params):
        """Send the model up; lam_i <- lam_i + th_i - th."""
        dual = tree.map(
            lambda dual, th, th_i: dual + (th_i - th),
            client["dual"],
            start,
            params,
        )
        return params, {**client, "dual": dual}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Set th <- mean(th_i) + M, M being the mean of all clients' duals."""
        # Algorithm 1 divides by the cohort's size, not by the clients' numbers of samples.
        uniform = equal_shares(weight)
        mean = tree.mean(uploads, uniform)
        # If the cohort's mean moved by a step, a mean over ALL clients moves by this part.
        part = len(weight) / server["clients"]

        def move_mean(total_mean, before, after):
            return total_mean + part * (after - before)

        # ---- M moves with the cohort's lam_i, each by th_i - th.
        dual = tree.map(move_mean, server["dual"], server["model"], mean)
        updated = {
            **server,
            "model": tree.map(torch.add, mean, dual),
            "dual": dual,
        }

        # ---- The model that clients are evaluated by, unless it is th.
        if self.judge == "cohort":
            updated["judged"] = mean
        if self.judge == "all":
            last_mean = tree.mean(clients["last"], uniform)
            updated["judged"] = tree.map(
                move_mean,
                server["judged"],
                last_mean,
                mean,
            )
            clients = {**clients, "last": uploads}
        return updated, clients

    def personal(self, server, client):
        """Return the model that `judge` names."""
        return server["model"] if self.judge == "cloud" else server["judged"]
