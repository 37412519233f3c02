"""FedAS: the received body is aligned to the client's features; bodies count by Fisher traces."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import Positive, WholeNumber
from fedpfl.methods.shared.by_name import train_only
from fedpfl.methods.shared.gaussian import class_means
from fedpfl.methods.shared.method import Method, Phase


@dataclass(frozen=True)
class FedAS(Method):
    """FedAS (Yang, Huang and Ye, CVPR 2024).

    A client keeps its whole last model: body b_i and head h_i. Sampled again, it takes the mean
    features P_c of its classes under b_i and draws a copy of the received body towards them: SGD on
    the sum, over the classes c of a batch, of the mean of (f(x) - P_c)^2 over their samples and
    features. Then body and h_i train as usual. The body goes up with F_i, the sum over batches of
    the squared norm of the gradient of the mean cross-entropy on the true labels, under the trained
    model; bodies are averaged by F_i (by samples where all F_i are 0, or one is not finite).

    align_lr, align_epochs: of the alignment, which knows no momentum or weight decay, nor the
        schedule of local.lr (but takes local.optimizer and local.clip; the codes have plain SGD).
        Its batches are of local.batch_size, drawn anew; in the official code of 16, in a fixed
        order.
    first: the target of a client that was never sampled: nothing (`skip`), the features of
        the untrained model (`init`: the official code and PFLlib), or those of the received one
        (`global`: FL-bench).
    align: each of the `samples` to P_c (official code, PFLlib), or the batch's class `means`
    (FL-bench).
    weights: `fisher`, or `samples` (the official ablation; without alignment too it is FedPer).
    judge: by the `stored` model of the last training (official code), which is the initial one
        before it, or by the `received` body under h_i, without alignment, as FedPer is. BatchNorm's
        statistics stay with the client, as in the official code; prototypes, alignment and F_i use
        them as they are. The official code aligns the server's own body, so within a round each
        client receives what the clients before it have aligned; that is not offered. In FL-bench
        the head is averaged as well.
    """

    align_lr: Positive = 0.01
    align_epochs: WholeNumber = 1
    first: Literal["skip", "init", "global"] = "skip"
    align: Literal["samples", "means"] = "samples"
    weights: Literal["fisher", "samples"] = "fisher"
    judge: Literal["stored", "received"] = "stored"

    needs_classes = "it aligns features by class"

    @property
    def server_sees(self) -> str:  # type: ignore[override]
        """Return a mean, unless the server weighs bodies by F_i."""
        return "mean of uploads" if self.weights == "samples" else "each upload"

    def buffers(self):
        """Keep BatchNorm statistics on the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Give the body to the server, the model to the client."""
        return tree.select(params, parts.body), {"model": params}

    def before_training(self, server, client, net, shard):
        """Return P_c, the mean features of the client's classes under its last model."""
        if not self.align_epochs:
            return {}
        model = client["model"]
        if self.first == "global" and not client["participated"]:
            model = {**model, **server}  # the received body under the initial head
        z = shard.features(net.still(), model)
        no_features = z.new_zeros(net.net.parts.classes, z.shape[1])
        return {"prototypes": class_means(z, shard.data.y, no_features, min_samples=1)}

    def start(self, received, client):
        """Return the latest body under the client's head."""
        return {**client["model"], **received}

    def phases(self, server, client, params, epochs):
        """Align the body, then train everything."""
        body = train_only(params, server)
        # Else `before_training` has made prototypes for newcomers too.
        if self.first == "skip":
            # A client without a last model has nothing to align to: nothing of it moves.
            for name, is_body in body.items():
                body[name] = is_body and client["participated"].expand_as(params[name])
        plain_sgd = {"lr": self.align_lr, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
        align = Phase(
            self.align_epochs, body, stream="align", loss=self._alignment_loss, sgd=plain_sgd
        )
        return [align, Phase(epochs)]

    def _alignment_loss(self, server, client, net, params, batch):
        """Return the sum over a batch's classes c of the mean (f(x) - P_c)^2."""
        # A sum over samples, each divided by the number of its class, is a sum of class means.
        _, z = net.still().features(params, batch.x)
        same_class = (batch.y[:, None] == batch.y) * batch.samples
        count = same_class.sum(1).clamp(min=1)  # samples of each one's class; padding may have none
        if self.align == "means":
            z = same_class @ z / count[:, None]
        distance = (z - client["prototypes"][batch.y]).square().mean(1)
        return batch.sum(distance / count)

    def after_training(self, server, client, net, params, shard, aux):
        """Return F_i, the sum over batches of the gradient's squared norm."""
        if self.weights == "samples":
            return {}

        def loss(net, params, batch):
            return batch.loss(net(params, batch.x))

        squares = []
        for batch in shard.data.chunks(shard.batch_size):
            grads, _ = net.gradient(loss, params, batch)
            for leaf in tree.leaves(grads):
                squares.append(leaf.square().sum())
        return {"fisher": sum(squares)}

    def finish(self, server, client, start, params):
        """Send the body and F_i up; keep the model."""
        upload = {"body": tree.select(params, server)}
        if self.weights == "fisher":
            upload["fisher"] = client["fisher"]
        return upload, {"model": params}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average bodies by F_i, or by samples if these are of no use."""
        if self.weights == "fisher":
            total = uploads["fisher"].sum()
            # All are 0 where the loss is, and one is not finite where training diverged.
            is_usable = (total > 0) & total.isfinite()
            weight = torch.where(
                is_usable,
                (uploads["fisher"] / total).to(weight),
                weight,
            )
        return tree.mean(uploads["body"], weight), clients

    def personal(self, server, client):
        """Return the stored model, or the latest body under the client's head."""
        if self.judge == "stored":
            return client["model"]
        return super().personal(server, client)
