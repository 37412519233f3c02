"""GPFL: a valve makes global features, led by class embeddings, and personal ones."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.by_name import train_all_but
from fedpfl.methods.shared.method import Method, Phase

TINY = torch.finfo(torch.float32).tiny  # below a root: its slope at 0 is infinite


@dataclass(frozen=True)
class GPFL(Method):
    """GPFL (Zhang et al., ICCV 2023, arXiv:2308.10279).

    Server: body f, class embeddings E [classes, features], and a conditional valve V. V(z; u) =
    ReLU(z (gamma + 1) + beta), gamma and beta being LayerNorm(ReLU(A u + c)) of a condition u, each
    with separate A and c. Conditions are the mean g of the received E, and p_i, its mean by the
    frequencies of the client's labels; they and the received E are constants in training. A client
    trains all, and its own head h_i, on z_G = V(f(x); g) and z_P = V(f(x); p_i): CE(h_i(z_P), y) +
    CE(cos(z_G, E), y) + lam * distance of z_G to the received E_y + mu/2 |(E, V)|^2. f, E and V are
    averaged by samples, h_i stays; a client is judged by h_i(z_P).

    lam, mu: the paper's for CNNs; PFLlib's defaults are 1 and 0, with which the distance outweighs
        the rest. mu is the code's weight decay of E and V, written as a term of the loss.
    guidance: `frobenius`, the norm of the whole batch of differences (the code; it grows with the
        root of the batch size, 10 there), or `mean`, that of the samples' norms (the paper). The
        codes work p_i and g out from the E that a client had before it received the new one: from
        its own trained E, or an older global one, and zeros in the first round; they leave a
        partial last batch out of the frequencies.
    """

    lam: NonNegative = 0.01
    mu: NonNegative = 0.1
    guidance: Literal["frobenius", "mean"] = "frobenius"

    needs_classes = "it learns an embedding per class"

    def init(self, params, parts):
        """Draw E from N(0, 1), and V as torch initialises linear and normalising layers."""
        parts.require_linear_end()
        head = tree.select(params, parts.head)
        head_weight = head[parts.head_weight]
        classes, width = head_weight.shape
        generator = Generator().manual_seed(parts.seed)
        embeddings = torch.randn(classes, width, generator=generator).to(head_weight)
        valve = {}
        for part in ("gamma", "beta"):
            valve[part] = tree.as_type_of(_init_layer(width, generator), head_weight)
        server = {
            "body": tree.select(params, parts.body),
            "embeddings": embeddings,
            "valve": valve,
        }
        uniform = head_weight.new_full((classes,), 1 / classes)
        return server, {"head": head, "frequencies": uniform}

    def before_training(self, server, client, net, shard):
        """Return the frequencies of the client's labels."""
        counts = torch.bincount(shard.data.y, minlength=len(client["frequencies"]))
        frequencies = counts / max(1, len(shard.data.y))
        return {"frequencies": frequencies.to(client["frequencies"])}

    # A client that never trained has its frequencies, too.
    before_evaluation = before_training

    def start(self, received, client):
        """Return the received parts and the client's head, which all train."""
        return {**received, "head": client["head"]}

    def loss(self, server, client, net, params, batch):
        """Return CE(h_i(z_P), y) + CE(cos(z_G, E), y) + lam * distance + mu/2 |(E, V)|^2."""
        received = server["embeddings"]  # a constant in training, unlike params["embeddings"]
        valve = params["valve"]
        z = net.features({**params["body"], **params["head"]}, batch.x)[1]

        # ---- Personal features z_P = V(f(x); p_i)
        personal = _apply_valve(valve, z, client["frequencies"] @ received)
        logits = F.linear(personal, *params["head"].values()).float()

        # ---- Global features z_G = V(f(x); g), and their distance to the received E_y
        common = _apply_valve(valve, z, received.mean(0))
        cosines = F.normalize(common) @ F.normalize(params["embeddings"]).T
        squared = (common - received[batch.y]).square().sum(1)
        if self.guidance == "frobenius":
            distance = batch.sum(squared).clamp(min=TINY).sqrt()
        else:
            distance = batch.mean(squared.clamp(min=TINY).sqrt())

        # ---- mu/2 |(E, V)|^2, the code's weight decay
        decaying = tree.leaves(tree.select(params, ("embeddings", "valve")))
        decay = sum(leaf.square().sum() for leaf in decaying)
        loss = batch.loss(logits) + batch.loss(cosines)
        return loss + self.lam * distance + self.mu / 2 * decay

    def finish(self, server, client, start, params):
        """Send all but the head up."""
        upload = tree.select(params, server)
        return upload, {"head": params["head"], "frequencies": client["frequencies"]}

    def evaluated(self, server, client, params):
        """Return the parts that make personal features, and their condition p_i."""
        condition = client["frequencies"] @ server["embeddings"]
        return {**tree.select(params, ("body", "head", "valve")), "condition": condition}

    def predict(self, net, params, batch):
        """Return the head's logits of personal features."""
        z = net.features({**params["body"], **params["head"]}, batch.x)[1]
        personal = _apply_valve(params["valve"], z, params["condition"])
        return F.linear(personal, *params["head"].values()).float()

    def finetuning(self, params, parts, epochs):
        """Move everything but the condition."""
        return [Phase(epochs, train_all_but(params, ["condition"]))]


def _init_layer(width: int, generator: Generator) -> Tree:
    """Return the initial values of a linear and a normalising layer, as torch draws them."""

    def draw(*shape: int) -> Tensor:
        return (2 * torch.rand(shape, generator=generator) - 1) / width**0.5

    return {
        "weight": draw(width, width),
        "bias": draw(width),
        "scale": torch.ones(width),
        "shift": torch.zeros(width),
    }


def _apply_valve(valve: Tree, z: Tensor, condition: Tensor) -> Tensor:
    """Return V(z; condition) = ReLU(z (gamma + 1) + beta), `[batch, features]`."""
    gamma = _condition_layer(valve["gamma"], condition)
    beta = _condition_layer(valve["beta"], condition)
    return torch.relu(z * (gamma + 1) + beta)


def _condition_layer(layer: Tree, condition: Tensor) -> Tensor:
    """Return LayerNorm(ReLU(A u + c)) of a condition u, `[1, features]`."""
    # Not by F.linear: in bf16, on a CPU, products of one row are not the same bit for bit again.
    linear = (layer["weight"] * condition[None]).sum(1) + layer["bias"]
    return F.layer_norm(
        linear.relu()[None],
        linear.shape,
        layer["scale"],
        layer["shift"],
    )
