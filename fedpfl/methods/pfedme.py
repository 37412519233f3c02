"""pFedMe: private models that are proximal points of the global one."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Count, NonNegative, Positive
from fedpfl.methods.shared.method import Method, Phase, equal_shares


@dataclass(frozen=True)
class PFedMe(Method):
    """pFedMe (Dinh, Tran and Nguyen, NeurIPS 2020, arXiv:2006.08848): SGD on Moreau envelopes.

    On each minibatch, `inner_steps` times th <- th - inner_lr (g(th) + lam (th - w_i) + mu th), all
    on that minibatch, then w_i <- w_i - outer_lr lam (w_i - th). th starts the round at w and
    carries on from minibatch to minibatch; its last value is the client's model until it is sampled
    again. w <- (1 - beta) w + beta mean(w_i).

    Steps are these and nothing else: of `local`, lr, momentum and weight_decay matter to
    fine-tuning only. The paper trains all clients and averages some; here those that are sampled
    train, and models of other clients age. The inner problem is solved by a fixed number of steps, not
    to an accuracy. BatchNorm statistics are th's, move with every inner step, and are averaged at
    the server. Right before training a client is evaluated by w, where th starts.

    Defaults are the paper's; inner_lr is the one of its code for CIFAR10's CNN (0.09 for its other
    networks).

    lam: pull of th and w to each other. mu: decay of th, in the authors' code only. average:
    `uniform` or by `samples`.
    """

    own_steps: ClassVar[bool] = True

    lam: NonNegative = 15.0
    inner_steps: Count = 5
    inner_lr: Positive = 0.01
    outer_lr: Positive = 0.005
    beta: NonNegative = 1.0
    mu: NonNegative = 0.001
    average: Literal["uniform", "samples"] = "uniform"

    server_sees = "mean of uploads"

    def __post_init__(self):
        super().__post_init__()
        # From 2 on a step leads farther from its target than it began.
        bound = 2 / (self.lam or 1)
        for field in ("inner_lr", "outer_lr"):
            self.check(
                getattr(self, field) * self.lam < 2,
                field,
                f"below 2 / lam = {bound:.4g}, or it diverges; lower it or lam",
            )

    def init(self, params, parts):
        """Begin without private models."""
        return params, {"th": params}

    def start(self, received, client):
        """Begin both models at the global one; the stored model is for evaluation alone."""
        return {"w": received, "th": received}

    def phases(self, server, client, params, epochs):
        """Replace SGD's steps by pFedMe's."""
        return [Phase(epochs, step=self._step)]

    def _step(self, server, client, net, params, batch):
        """Move th near to the proximal point of w, then w to th.

        The loss is that of th before its first step.
        """
        objective = partial(self.loss, server, client)
        w = params["w"]
        th = params["th"]

        # ---- th <- th - inner_lr (g(th) + lam (th - w) + mu th), inner_steps times
        def inner_step(th: Tensor, w: Tensor, g: Tensor) -> Tensor:
            direction = (th - w).mul_(self.lam).add_(th, alpha=self.mu).add_(g)
            # In th's memory layout, as SGD would.
            return th.clone().add_(direction, alpha=-self.inner_lr)

        losses = []
        for _ in range(self.inner_steps):
            grads, loss = net.gradient(objective, th, batch)
            th = tree.map(inner_step, th, w, grads)
            losses.append(loss)

        # ---- w <- w - outer_lr lam (w - th)
        outer_size = -self.outer_lr * self.lam
        w = tree.map(
            lambda w, th: torch.add(w, w - th, alpha=outer_size),
            w,
            th,
        )
        return {"w": w, "th": th}, losses[0]

    def finish(self, server, client, start, params):
        """Send the copy of w up, keep th."""
        return params["w"], {"th": params["th"]}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Make a step of length `beta` towards the mean: w <- (1 - beta) w + beta mean(w_i)."""
        if self.average == "uniform":
            weight = equal_shares(weight)
        mean = tree.mean(uploads, weight)
        if self.beta == 1:
            return mean, clients
        model = tree.map(
            lambda w, new: (1 - self.beta) * w + self.beta * new,
            server,
            mean,
        )
        return model, clients

    def evaluated(self, server, client, params):
        """Return the private model."""
        return params["th"]

    def personal(self, server, client):
        """Return the private model as the client left it; before, the global one."""
        return tree.where(client["participated"], client["th"], server)
