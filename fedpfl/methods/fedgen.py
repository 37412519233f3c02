"""FedGen: a generator of features, taught by all clients' heads, shows each client the classes it
lacks.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F

from fedpfl.ground import tree
from fedpfl.ground.ranges import Above, AtLeast, AtMost
from fedpfl.ground.tree import Known
from fedpfl.methods.shared import features
from fedpfl.methods.shared.layers import seeded_generator
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class FedGen(Method):
    """FedGen (Zhu, Hong and Zhou, ICML 2021, arXiv:2105.10056), as its official code does it: one
    global model.

    G makes features of a label and noise e. From the second round on a client adds to the
    cross-entropy of its samples (x, y) alpha CE(h(G(y')), y') + beta KL(softmax h(G(y)) || softmax
    h(f(x))), h being its head and h(G(y)) given: G is still, in evaluation mode, and y' are labels
    that clients have told of, as many as samples. alpha and beta shrink by `decay` a round, to
    0.0001 at least. The server averages the models and teaches G by the heads h_i it received, in
    `steps` of Adam, each on `batch` of the cohort's labels: sum_i w_i(y) CE(h_i(G(y)), y), w_i(y)
    the client's share of the samples of class y, plus eta exp(-mean over pairs of (mean |G - G'| *
    mean (e - e')^2)).

    Values are the official ones for MNIST; decay is that of G's lr too. labels: y' from known ones
    in equal parts (`uniform`, the code) or by `frequency`, the paper's p(y), which counts a client
    as often as it took part.
    teacher: the code's loss, `weighted`, or the paper's, CE of the heads' `mean_logits`. For w the
    code counts a round's batches, plus 1; here samples count. FL-bench teaches G by the previous
    global head, and draws y' from the client's own labels; PFLlib begins in round 1. Sharing heads
    alone is not offered.
    """

    alpha: Annotated[float, AtLeast(0)] = 10.0
    beta: Annotated[float, AtLeast(0)] = 10.0
    decay: Annotated[float, Above(0), AtMost(1)] = 0.98
    eta: Annotated[float, AtLeast(0)] = 1.0
    noise: Annotated[int, AtLeast(1)] = 32
    hidden: Annotated[int, AtLeast(1)] = 256
    lr: Annotated[float, Above(0)] = 3e-4
    weight_decay: Annotated[float, AtLeast(0)] = 0.01
    steps: Annotated[int, AtLeast(0)] = 50
    batch: Annotated[int, AtLeast(2)] = 32
    teacher: Literal["weighted", "mean_logits"] = "weighted"
    labels: Literal["uniform", "frequency"] = "uniform"

    server_sees = "each upload"

    @property
    def randoms(self) -> int:
        """Return how many numbers a sample needs: noise for its own label and for another, which
        the last one draws.
        """
        return 2 * self.noise + 1

    def init(self, params, parts):
        """Draw the generator; nobody has told of labels yet."""
        weight = params[parts.head_weight]
        made = features.init_generator(
            self.noise, self.hidden, weight, seeded_generator(parts.seed)
        )
        told = {"counts": weight.new_zeros(len(weight)), "rounds": weight.new_zeros(())}
        told |= {"body": tree.drop(params, parts.head), "head": tree.select(params, parts.head)}
        return {**told, "generator": made, "adam": features.init_adam(made["learned"])}, {}

    def before_training(self, server, client, net, shard):
        """Count the samples of each class."""
        return {"counts": torch.bincount(shard.data.y, minlength=len(server["counts"])).float()}

    def download(self, server, client):
        """Return model, generator and how often labels were told of; everybody counts rounds."""
        return {**tree.drop(server, ("adam",)), "rounds": Known(server["rounds"])}

    def start(self, received, client):
        """Return the global model."""
        return {**received["body"], **received["head"]}

    def loss(self, server, client, net, params, batch):
        """Add what the generator teaches; before it is taught itself, with a weight of 0."""
        head, random, logits = (
            tree.select(params, server["head"]).values(),
            batch.random,
            net(params, batch.x),
        )
        loss, taught, faded = (
            batch.cross_entropy(logits),
            server["rounds"] > 0,
            self.decay ** server["rounds"],
        )
        with torch.autocast(logits.device.type, enabled=False):
            if self.alpha:
                shares = (
                    server["counts"]
                    if self.labels == "frequency"
                    else (server["counts"] > 0).float()
                )
                other = features.draw_labels(shares, random[:, -1])
                z = features.generate_features(
                    server["generator"], other, random[:, self.noise : -1]
                )
                lesson = batch._replace(y=other).cross_entropy(F.linear(z, *head))
                loss = (
                    loss + torch.where(taught, (self.alpha * faded).clamp(min=1e-4), 0.0) * lesson
                )
            if self.beta:
                z = features.generate_features(
                    server["generator"], batch.y, random[:, : self.noise]
                )
                target = F.linear(z, *head).detach().softmax(1)
                apart = batch.mean(F.kl_div(logits.log_softmax(1), target, reduction="none").sum(1))
                loss = loss + torch.where(taught, (self.beta * faded).clamp(min=1e-4), 0.0) * apart
        return loss

    def finish(self, server, client, start, params):
        """Send the model and the counts up."""
        return {"model": params, "counts": client["counts"]}, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the models; teach the generator."""
        model, counts = tree.mean(uploads["model"], weight), uploads["counts"]
        model = {name: tree.select(model, server[name]) for name in ("body", "head")}
        made, adam, lr = (
            server["generator"],
            server["adam"],
            self.lr * self.decay ** server["rounds"],
        )
        heads, known = tree.select(uploads["model"], server["head"]), (counts.sum(0) > 0).float()
        random = torch.rand(self.steps, self.batch, 1 + self.noise, generator=generator)
        for numbers in tree.send(random, counts.device):
            y, noise = features.draw_labels(known, numbers[:, 0]), numbers[:, 1:]
            slope = torch.func.grad(partial(self._lesson, heads, counts, y, noise), has_aux=True)
            grads, moved = slope(made["learned"], made["moved"])
            learned, adam = features.adam_step(made["learned"], grads, adam, lr, self.weight_decay)
            made = {"learned": learned, "moved": moved}
        told = {
            "counts": server["counts"] + counts.sum(0),
            "rounds": server["rounds"] + 1,
            "adam": adam,
        }
        return {**model, **told, "generator": made}, clients

    def _lesson(self, heads, counts, y, noise, learned, moved):
        """Return the generator's loss, and its statistics afterwards."""
        z, moved = features.generate_in_training(learned, moved, y, noise)
        logits = torch.stack([F.linear(z, *head) for head in zip(*heads.values(), strict=True)])
        if self.teacher == "mean_logits":
            return F.cross_entropy(logits.mean(0), y) + self.eta * features.diversity_loss(
                z, noise
            ), moved
        shares = counts[:, y] / counts[:, y].sum(0)
        loss = (
            shares
            * F.cross_entropy(logits.transpose(1, 2), y.expand(shares.shape), reduction="none")
        ).sum(0)
        return loss.mean() + self.eta * features.diversity_loss(z, noise), moved
