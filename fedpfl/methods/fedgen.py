"""FedGen: a generator of features, taught by all heads, shows clients classes they lack."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F

from fedpfl.ground import tree
from fedpfl.ground.ranges import (
    AtLeast,
    Count,
    NonNegative,
    Positive,
    PositiveProportion,
    WholeNumber,
)
from fedpfl.ground.tree import Known
from fedpfl.methods.shared import features
from fedpfl.methods.shared.layers import seeded_generator
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class FedGen(Method):
    """FedGen (Zhu, Hong and Zhou, ICML 2021, arXiv:2105.10056), as in its official code.

    All clients share one global model. G makes features of a label and noise e. From the second
    round on a client adds to the cross-entropy of its samples (x, y) alpha CE(h(G(y')), y') +
    beta KL(softmax h(G(y)) || softmax h(f(x))), h being its head and h(G(y)) given: G is still,
    in evaluation mode, and y' are labels that clients have told of, as many as samples. alpha
    and beta shrink by `decay` a round, to 0.0001 at least. The server averages the models and
    teaches G by the heads h_i it received, in `steps` of Adam, each on `batch` of the cohort's
    labels: sum_i w_i(y) CE(h_i(G(y)), y), w_i(y) the client's share of the samples of class y,
    plus eta exp(-mean over pairs of (mean |G - G'| * mean (e - e')^2)).

    Values are the official ones for MNIST; decay is that of G's lr too. labels: y' from known ones
    in equal parts (`uniform`, the code) or by `frequency`, the paper's p(y), which counts a client
    as often as it took part.
    teacher: the code's loss, `weighted`, or the paper's, CE of the heads' `mean_logits`. For w the
    code counts a round's batches, plus 1, and gives each sample the mean w of its batch; here
    samples count, each by its own. FL-bench teaches G by the previous
    global head, and draws y' from the client's own labels; PFLlib begins in round 1. Sharing heads
    alone is not offered. Many tables were made with PFLlib's, which is near teacher=mean_logits
    alpha=1 beta=0 eta=0 decay=1 steps=1000 lr=0.005 noise=512 hidden=512 weight_decay=0.
    """

    alpha: NonNegative = 10.0
    beta: NonNegative = 10.0
    decay: PositiveProportion = 0.98
    eta: NonNegative = 1.0
    noise: Count = 32
    hidden: Count = 256
    lr: Positive = 3e-4
    weight_decay: NonNegative = 0.01
    steps: WholeNumber = 50
    batch: Annotated[int, AtLeast(2)] = 32
    teacher: Literal["weighted", "mean_logits"] = "weighted"
    labels: Literal["uniform", "frequency"] = "uniform"

    needs_classes = "its generator draws features of a class"
    server_sees = "each upload"

    @property
    def randoms(self) -> int:
        """Return the number of random numbers that a sample needs.

        They are noise for its own label and for another label, which the last number draws.
        """
        return 2 * self.noise + 1

    def init(self, params, parts):
        """Draw the generator; no label count has arrived yet."""
        parts.require_linear_end()
        head_weight = params[parts.head_weight]
        # From the run's seed alone, apart from all that rounds draw.
        random = seeded_generator(parts.seed)
        generator = features.init_generator(self.noise, self.hidden, head_weight, random)
        server = {
            "counts": head_weight.new_zeros(len(head_weight)),
            "rounds": head_weight.new_zeros(()),
            "body": tree.drop(params, parts.head),
            "head": tree.select(params, parts.head),
            "generator": generator,
            "adam": features.init_adam(generator["learned"]),
        }
        return server, {}

    def before_training(self, server, client, net, shard):
        """Count the samples of each class."""
        counts = torch.bincount(shard.data.y, minlength=len(server["counts"]))
        return {"counts": counts.float()}

    def download(self, server, client):
        """Return model, generator and how often labels were told of; everybody counts rounds."""
        return {
            **tree.drop(server, ("adam",)),
            "rounds": Known(server["rounds"]),
        }

    def start(self, received, client):
        """Return the global model."""
        return {**received["body"], **received["head"]}

    def loss(self, server, client, net, params, batch):
        """Add the generator's terms to the cross-entropy.

        Before the generator is taught itself, this counts with a weight of 0.
        """
        head = tree.select(params, server["head"])
        logits = net(params, batch.x)
        loss = batch.loss(logits)
        is_taught = server["rounds"] > 0
        fading = self.decay ** server["rounds"]
        with torch.autocast(logits.device.type, enabled=False):
            # ---- alpha CE(h(G(y')), y')
            if self.alpha:
                lesson = self._lesson_of_other_labels(server, head, batch)
                weight = (self.alpha * fading).clamp(min=1e-4)
                loss = loss + torch.where(is_taught, weight, 0.0) * lesson
            # ---- beta KL(softmax h(G(y)) || softmax h(f(x)))
            if self.beta:
                divergence = self._divergence_from_generator(server, head, batch, logits)
                weight = (self.beta * fading).clamp(min=1e-4)
                loss = loss + torch.where(is_taught, weight, 0.0) * divergence
        return loss

    def _lesson_of_other_labels(self, server, head, batch):
        """Return CE(h(G(y')), y'), y' being labels that clients have told of."""
        if self.labels == "frequency":
            shares = server["counts"]
        else:
            shares = (server["counts"] > 0).float()
        y = features.draw_labels(shares, batch.random[:, -1])
        noise = batch.random[:, self.noise : -1]
        z = features.generate_features(server["generator"], y, noise)
        return batch._replace(y=y).loss(F.linear(z, *head.values()))

    def _divergence_from_generator(self, server, head, batch, logits):
        """Return KL(softmax h(G(y)) || softmax h(f(x))), h(G(y)) being given."""
        noise = batch.random[:, : self.noise]
        z = features.generate_features(server["generator"], batch.y, noise)
        target = F.linear(z, *head.values()).detach().softmax(1)
        divergence = F.kl_div(logits.log_softmax(1), target, reduction="none")
        return batch.mean(divergence.sum(1))

    def finish(self, server, client, start, params):
        """Send the model and the counts up."""
        return {"model": params, "counts": client["counts"]}, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the models; teach the generator."""
        mean = tree.mean(uploads["model"], weight)
        counts = uploads["counts"]

        # ---- Teach G: each step of Adam on fresh labels and noise.
        heads = tree.select(uploads["model"], server["head"])
        cohort_labels = (counts.sum(0) > 0).float()
        lr = self.lr * self.decay ** server["rounds"]
        random = torch.rand(
            self.steps,
            self.batch,
            1 + self.noise,
            generator=generator,
        )
        learned = server["generator"]["learned"]
        statistics = server["generator"]["moved"]
        adam = server["adam"]
        for numbers in tree.send(random, counts.device):
            y = features.draw_labels(cohort_labels, numbers[:, 0])
            objective = partial(
                self._lesson,
                heads,
                counts,
                y,
                numbers[:, 1:],
            )
            grads, statistics = torch.func.grad(objective, has_aux=True)(learned, statistics)
            learned, adam = features.adam_step(
                learned,
                grads,
                adam,
                lr,
                self.weight_decay,
            )

        server = {
            "body": tree.select(mean, server["body"]),
            "head": tree.select(mean, server["head"]),
            "counts": server["counts"] + counts.sum(0),
            "rounds": server["rounds"] + 1,
            "adam": adam,
            "generator": {"learned": learned, "moved": statistics},
        }
        return server, clients

    def _lesson(self, heads, counts, y, noise, learned, statistics):
        """Return the generator's loss, and its BatchNorm statistics afterwards."""
        z, statistics = features.generate_in_training(learned, statistics, y, noise)

        # ---- What all clients' heads say of the features: `[clients, batch, classes]`.
        head_list = zip(*heads.values(), strict=True)
        logits = torch.stack([F.linear(z, *head) for head in head_list])
        if self.teacher == "mean_logits":
            lesson = F.cross_entropy(logits.mean(0), y)
        else:
            # sum_i w_i(y) CE(h_i(G(y)), y)
            shares = counts[:, y] / counts[:, y].sum(0)
            losses = F.cross_entropy(
                logits.transpose(1, 2), y.expand(shares.shape), reduction="none"
            )
            lesson = (shares * losses).sum(0).mean()
        return lesson + self.eta * features.diversity_loss(z, noise), statistics
