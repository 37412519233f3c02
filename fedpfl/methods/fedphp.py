"""FedPHP: a private model that inherits from all of a client's local ones, and teaches the next."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Proportion
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import Method, flag


@dataclass(frozen=True)
class FedPHP(Method):
    """FedPHP (Li et al., ECML PKDD 2021), equations as in the authors' code (lxcnju/FedRepo).

    A client trains w from the global model on (1 - lam) CE(w) + lam R(q_i, w), its inherited
    private model q_i being given, in evaluation mode; then q_i <- mu q_i + (1 - mu) w, mu =
    momentum * min(1, s / max(1, int(C T))), s its earlier participations, C T their expected number
    in the run's T rounds. w goes up and is averaged. Clients are evaluated by q_i, those never
    sampled by the global model (theirs: not at all). q_i begins as the initial model, which teaches
    the first time; its BatchNorm statistics are mixed as its weights are.

    transfer: R. `kd`: cross-entropy of w's logits against softmax(q_i's / 4), one temperature, no
        factor. `mmd`: the maximum mean discrepancy of the head's inputs, 5 kernels around the
        batch's mean squared distance.
    lam: 0.1 or 0.05 in the authors' runs; 0 is FedAvg beside averages of its local models.
    momentum: its highest.
    participation: C; the configuration gives the run's.

    Not here: their clipping, and at least five batches a participation. PFLlib evaluates w, never
    q_i, right after training; its lamda = 1 leaves the labels out, its mu = 0 makes q_i the last w,
    mu grows with the round instead of s, and the kernels' fixed widths saturate. FL-bench has no
    FedPHP.
    """

    transfer: Literal["kd", "mmd"] = "kd"
    lam: Proportion = 0.1
    momentum: Proportion = 0.9
    participation: Proportion = 0.1

    server_sees = "mean of uploads"

    @property
    def needs_classes(self) -> str:  # type: ignore[override]
        """Return why labels must be classes, "" where they need not."""
        if self.transfer == "kd" and self.lam:
            return "it distils probabilities of classes; use method.transfer=mmd"
        return ""

    def init(self, params, parts):
        """Begin with the initial model as everybody's private one."""
        count = flag(params).float()
        # Without the summand int(0.29 * 100), of 28.999..., would be 28.
        expected = count + max(1, int(self.participation * parts.rounds + 1e-9))
        return {"model": params, "expected": expected}, {"hpm": params, "count": count}

    def buffers(self):
        """Keep the private model's statistics on the client."""
        return {"w": self.statistics or "aggregate", "q": "local"}

    def before_training(self, server, client, net, shard):
        """Return the teacher's statistics, and those of the client's evaluation."""
        evaluation = self.before_evaluation(server, client, net, shard)
        # q's own, which `evaluation` replaces for a client without a private model.
        return {"teacher": net.buffers["q"], **evaluation}

    def before_evaluation(self, server, client, net, shard):
        """Return the global model's statistics for a client without a private model."""
        private = tree.where(
            client["participated"],
            net.buffers["q"],
            net.buffers["w"],
        )
        return {"statistics": {**net.buffers, "q": private}}

    def prepare(self, server, client):
        """Return mu = momentum * min(1, s / max(1, int(C T)))."""
        share = (client["count"] / server["expected"]).clamp(max=1)
        # Not done until `after_training` says so: `evaluated` is asked before it and after.
        return {**client, "mu": self.momentum * share, "done": flag(client)}

    def download(self, server, client):
        """Return the global model."""
        return server["model"]

    def loss(self, server, client, net, params, batch):
        """Return (1 - lam) CE(w) + lam R(q_i, w)."""
        logits, z = net.features(params, batch.x, "w")
        loss = batch.loss(logits)
        if not self.lam:
            return loss

        # ---- The private model q_i teaches: R(q_i, w)
        teacher = net.still({"q": client["teacher"]})
        teacher_logits, teacher_z = teacher.features(
            client["hpm"],
            batch.x,
            "q",
        )
        if self.transfer == "kd":
            target = F.softmax(teacher_logits / 4, 1)
            transfer = batch.mean(-(target * F.log_softmax(logits, 1)).sum(1))
        else:
            transfer = squared_mmd(z, teacher_z, batch.samples)
        return (1 - self.lam) * loss + self.lam * transfer

    def after_training(self, server, client, net, params, shard, aux):
        """Mark training as done, and mix the private model's statistics as its weights."""
        inherited = _inherit(
            client["mu"],
            client["teacher"],
            net.buffers["w"],
        )
        return {"done": ~flag(params), "statistics": {**net.buffers, "q": inherited}}

    def evaluated(self, server, client, params):
        """Return the private model, after training the next one; without one, the global model."""
        before = tree.where(client["participated"], client["hpm"], params)
        after = _inherit(client["mu"], client["hpm"], params)
        return tree.where(client["done"], after, before)

    def finish(self, server, client, start, params):
        """Send the model up, and let the private one inherit from it."""
        private = self.evaluated(server, client, params)
        return params, {"hpm": private, "count": client["count"] + 1}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the models."""
        return {**server, "model": tree.mean(uploads, weight)}, clients

    def personal(self, server, client):
        """Return the private model; before the first, the global one."""
        return tree.where(
            client["participated"],
            client["hpm"],
            server["model"],
        )

    def predict(self, net, params, batch):
        """Use the private model's statistics."""
        return net(params, batch.x, "q")


def _inherit(mu: Tensor, old: Tree, new: Tree) -> Tree:
    """Return mu q + (1 - mu) w, with BatchNorm's counters of w."""

    def mix(q: Tensor, w: Tensor) -> Tensor:
        if not w.is_floating_point():
            return w
        return mu * q + (1 - mu) * w

    return tree.map(mix, old, new)


def squared_mmd(f: Tensor, g: Tensor, samples: Tensor) -> Tensor:
    """Return the squared maximum mean discrepancy of rows `f` and `g` `[batch, features]`.

    samples: 1 for samples and 0 for padding, `[batch]`.
    """
    # In float64, which no autocast rounds to bf16.
    rows = torch.cat([f, g]).double()
    weight = torch.cat([samples, samples]).double()
    n = weight.sum()

    # ---- Squared distances between all pairs of rows; rounding may make them negative.
    squares = rows.square().sum(1)
    distance = (squares[:, None] + squares - 2 * rows @ rows.T).clamp(min=0)

    # ---- Five kernels around the mean squared distance.
    pair_weight = weight[:, None] * weight
    # n^2 - n pairs: the distance of a row to itself is zero and does not count.
    width = (distance * pair_weight).sum().detach() / (n * n - n) + 1e-8
    kernel = sum(torch.exp(-distance / (width * factor)) for factor in (0.25, 0.5, 1, 2, 4))

    # ---- Mean kernel within f and within g, less twice that between them.
    sign = torch.cat([samples, -samples]).double() / (n / 2)
    return (kernel * sign[:, None] * sign).sum().float()
