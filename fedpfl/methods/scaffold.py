"""SCAFFOLD: control variates against client drift."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Positive
from fedpfl.methods.shared.method import Method, Phase, equal_shares, flag


@dataclass(frozen=True)
class Scaffold(Method):
    """SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378), option II.

    Local steps follow g + c - c_i. The client's new control is the mean of its raw stochastic
    gradients g on the way, which is what option II's c_i - c + (x - y) / (T lr) comes to under
    plain SGD; taken directly it stays so with momentum. The paper has none: local.momentum=0.
    Averages are uniform over the cohort, without which c would not be the mean of the c_i.

    server_lr: eta_g.
    """

    server_lr: Positive = 1.0

    server_sees = "mean of uploads"

    def init(self, params, parts):
        """Set all controls to zero; keep K, how many clients there are in all."""
        zeros = tree.full_like(params, 0.0)
        client_count = flag(params).long() + parts.clients
        server = {"model": params, "control": zeros, "clients": client_count}
        return server, {"control": zeros}

    def prepare(self, server, client):
        """Make room for this round's sum of gradients, and their number."""
        zeros = tree.full_like(client["control"], 0.0)
        return {
            **client,
            "sum": zeros,
            "steps": tree.leaves(zeros)[0].new_zeros(()),
        }

    def download(self, server, client):
        """Send the model and its control."""
        return tree.select(server, ("model", "control"))

    def start(self, received, client):
        """Return the global model."""
        return received["model"]

    def phases(self, server, client, params, epochs):
        """Train everything, and add up the gradients on the way."""
        return [Phase(epochs, after_gradient=self._add_gradient)]

    def loss(self, server, client, net, params, batch):
        """Return cross-entropy and a linear term with the gradient c - c_i."""

        def linear_term(y: Tensor, c: Tensor, c_i: Tensor) -> Tensor:
            return ((c - c_i) * y).sum()

        terms = tree.map(
            linear_term,
            params,
            server["control"],
            client["control"],
        )
        correction = sum(tree.leaves(terms))
        return super().loss(server, client, net, params, batch) + correction

    @staticmethod
    def _add_gradient(server, client, params, grads, batch, loss, aux):
        """Add up the raw gradients, which are without the correction."""
        # The loss had the term c - c_i, so g is the rest without it.
        raw = tree.map(
            lambda g, c, c_i: g - (c - c_i),
            grads,
            server["control"],
            client["control"],
        )
        total = tree.map(torch.add, client["sum"], raw)
        return {**client, "sum": total, "steps": client["steps"] + 1}

    def finish(self, server, client, start, params):
        """Return the changes of model and control: dy = y - x and dc = c_i^+ - c_i.

        A client without a step keeps its control.
        """
        # ---- c_i^+: the mean of the raw gradients (option II)
        mean_gradient = tree.map(
            lambda total: total / client["steps"].clamp(min=1),
            client["sum"],
        )
        control = tree.where(
            client["steps"] > 0,
            mean_gradient,
            client["control"],
        )
        # ---- Send dy and dc, as Algorithm 1 does.
        changes = {
            "model": tree.map(torch.sub, params, start),
            "control": tree.map(torch.sub, control, client["control"]),
        }
        return changes, {"control": control}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Return x + eta_g mean(dy) and c + m / K mean(dc)."""
        mean = tree.mean(uploads, equal_shares(weight))
        model = tree.map(
            lambda x, dy: x + self.server_lr * dy,
            server["model"],
            mean["model"],
        )
        cohort_share = len(weight) / server["clients"]  # m / K, m being the cohort's size
        control = tree.map(
            lambda c, dc: c + cohort_share * dc,
            server["control"],
            mean["control"],
        )
        return {"model": model, "control": control, "clients": server["clients"]}, clients
