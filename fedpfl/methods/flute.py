"""FLUTE: personal heads, which the server and a regulariser push towards neural collapse."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, WholeNumber
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.by_name import PersonalByName, train_only
from fedpfl.methods.shared.method import Phase


@dataclass(frozen=True)
class FLUTE(PersonalByName):
    """FLUTE (Liu, Shen and Yang, ICML 2024, arXiv:2406.04596), its version for deep networks.

    NC(W, u) = | W W^T / |W W^T|  -  (C - 1)^-1/2 (I - 1 1^T / C) u u^T |, Frobenius norms, the last
    product element by element; u marks the client's classes. A client trains its head on CE + l1 NC
    + l2 |W|^2, then everything on that + l3 |Z|^2, Z being the batch's features (summed over the
    batch). Bodies are averaged; on the uploaded heads the server makes one gradient step of length
    server_lr on their mean NC and gives each back to its client.

    rep_epochs: the last of the local epochs, which train everything. l1, l2, l3: of the official
        code, which was run with batches of 10 and 64 or 128 features; l3 is stronger with more of
        both.
    variant: `as_published`: FL-bench's, and so FedOBP's tables': features are detached, so the body
        stays at its initial values for ever. A client that was never sampled has the initial head.
        In the head phase the body's BatchNorm statistics stay.
    """

    l1: NonNegative = 0.25
    l2: NonNegative = 0.0025
    l3: NonNegative = 0.0005
    server_lr: NonNegative = 0.5
    rep_epochs: WholeNumber = 1
    variant: Literal["paper", "as_published"] = "paper"

    _key: ClassVar[str] = "head"

    needs_classes = "it looks at which classes a client has"

    def _personal(self, parts):
        """Return the head's entries, its weight first."""
        _ = parts.head_weight  # raises for a head that has none
        return parts.head

    def before_training(self, server, client, net, shard):
        """Return u, which classes there are."""
        classes = len(_head_weight(client["head"]))
        return {"present": torch.bincount(shard.data.y, minlength=classes) > 0}

    def download(self, server, client):
        """Return the body, and the head's weight, which the server has changed."""
        return {"body": server, "weight": _head_weight(client["head"])}

    def start(self, received, client):
        """Return the received body under the client's head."""
        return super().start(received["body"], client)

    def phases(self, server, client, params, epochs):
        """Train the head, then everything."""
        head = train_only(params, client["head"])
        # As published, features are detached: what trains here is the head alone, again.
        everything = head if self.variant == "as_published" else None
        rep_epochs = min(epochs, self.rep_epochs)
        return [
            Phase(epochs - rep_epochs, head, loss=self._head_loss),
            Phase(rep_epochs, everything),
        ]

    def loss(self, server, client, net, params, batch):
        """Return CE + l1 NC + l2 |W|^2 + l3 |Z|^2."""
        logits, z = net.features(params, batch.x)
        loss = batch.loss(logits) + self._regularisers(params, client)
        if not self.l3:
            return loss
        return loss + self.l3 * batch.sum(z.square().sum(1))

    def _head_loss(self, server, client, net, params, batch):
        """Return CE + l1 NC + l2 |W|^2, on the features of a frozen body."""
        loss = super()._head_loss(server, client, net, params, batch)
        return loss + self._regularisers(params, client)

    def _regularisers(self, params, client):
        """Return l1 NC(W, u) + l2 |W|^2."""
        weight = _head_weight(tree.select(params, client["head"]))
        total: Tensor | float = 0.0
        if self.l1:
            total = total + self.l1 * collapse_distance(weight, client["present"])
        if self.l2:
            total = total + self.l2 * weight.square().sum()
        return total

    def finish(self, server, client, start, params):
        """Send everything up; keep the head until the server's reply."""
        body, head = super().finish(server, client, start, params)
        return {"body": body, **head, "present": client["present"]}, head

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the bodies; make a step on the weight of each head.

        The head's bias is as it came.
        """
        head = uploads["head"]
        if self.server_lr:
            # ---- W_i <- W_i - server_lr * gradient of the mean NC
            weights = _head_weight(head)
            slopes = vmap(grad(collapse_distance))(weights, uploads["present"])
            # The step is on the mean NC over the cohort, hence the division.
            new_weights = weights - self.server_lr / len(weights) * slopes
            weight_name = next(iter(head))
            head = {**head, weight_name: new_weights}
        return tree.mean(uploads["body"], weight), {"head": head}


def collapse_distance(weight: Tensor, present: Tensor) -> Tensor:
    """Return NC(W, u), the distance from neural collapse.

    weight: the head's W, `[classes, features]`. present: the client's classes u, bool `[classes]`.
    """
    classes = len(weight)
    # ---- W W^T / |W W^T|
    with torch.autocast(weight.device.type, enabled=False):
        gram = weight @ weight.T
    scaled_gram = gram / _frobenius_norm(gram).clamp(min=1e-30)
    # ---- (C - 1)^-1/2 (I - 1 1^T / C) u u^T
    identity = torch.eye(classes, device=weight.device)
    target = (identity - 1 / classes) * (present[:, None] & present)
    return _frobenius_norm(scaled_gram - target / max(1, classes - 1) ** 0.5)


def _frobenius_norm(matrix: Tensor) -> Tensor:
    """Return the Frobenius norm; where it is zero, its gradient counts as zero."""
    # The root's slope at 0 is infinite, and times 0 that would be nan.
    square = matrix.square().sum()
    safe_square = torch.where(square > 0, square, 1.0)
    return torch.where(square > 0, safe_square.sqrt(), 0.0)


def _head_weight(head: Tree) -> Tensor:
    """Return the weight of a head, its first entry."""
    return next(iter(head.values()))
