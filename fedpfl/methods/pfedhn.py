"""pFedHN: a hypernetwork at the server makes each client's model from its embedding."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import (
    Count,
    NonNegative,
    Positive,
    ProportionBelowOne,
    WholeNumber,
)
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.layers import init_linear, seeded_generator
from fedpfl.methods.shared.method import Method, Turn


@dataclass(frozen=True)
class PFedHN(Method):
    """pFedHN (Shamsian et al., ICML 2021, arXiv:2103.04628): theta_i = h(v_i; phi).

    h: a linear map of the embedding v_i and `depth` more, with ReLU between, then one to the
    entries of each tensor. A client trains theta_i and sends g = theta_i - theta~_i. The product of
    g with h's Jacobian is the gradient of phi and of the v_i; its norm is cut at `clip`, and
    torch's SGD makes a step. The paper writes g with the other sign, so that its rule would
    ascend; the code does as here. No client weighs more than another.

    variant: `pc` leaves the classifier out of h: it begins as the network's own and never leaves a
        client (the code has lr=0.05 there). FL-bench's h makes a classifier all the same, which
        weight decay moves.
    order: `parallel`, one step with the mean gradient of a cohort, all from the same
        phi, or `sequential`, a step after each client, the next one's model from the new phi
        (FL-bench; the paper trains one at a time).
    embedding: size of v_i; None: 1 + clients / 4. embedding_lr: None: lr. clip: 0: never. hidden:
    width of h.
    rows: whether a step moves the v_i of the clients `sampled` alone, as in the paper, or of `all`,
        by old momentum and weight decay, as in both codes. h's output has torch's initial scale,
        not a network's, so first rounds are slow. The server keeps 1 + hidden numbers for each of
        the model's, and as many momenta. Newcomers have the mean embedding; the paper would
        optimise theirs. It takes 5,000 steps of one client: give it more rounds than other methods.
    """

    variant: Literal["full", "pc"] = "full"
    order: Literal["parallel", "sequential"] = "parallel"
    embedding: Count | None = None
    hidden: Count = 100
    depth: WholeNumber = 3
    lr: Positive = 0.01
    embedding_lr: Positive | None = None
    momentum: ProportionBelowOne = 0.9
    weight_decay: NonNegative = 0.001
    clip: NonNegative = 50.0
    rows: Literal["sampled", "all"] = "sampled"

    server_sees = "each upload"

    def buffers(self):
        """Keep BatchNorm's statistics, which h cannot make, with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Draw embeddings and hypernetwork."""
        generator = seeded_generator(parts.seed)
        clients = max(1, parts.clients)
        private = tree.select(params, parts.head) if self.variant == "pc" else {}
        generated = tree.drop(params, private)

        # ---- The last layer of h has a linear map for each tensor that it makes.
        output_layers = {}
        for name, leaf in generated.items():
            output_layers[name] = init_linear(
                self.hidden,
                leaf.numel(),
                generator,
            )

        # ---- The embeddings v_i, and h's layers before the last.
        embedding_size = self.embedding or int(1 + clients / 4)
        embeddings = torch.randn(clients, embedding_size, generator=generator)
        widths = [embedding_size, *[self.hidden] * (1 + self.depth)]
        mlp = {}
        for number, (inputs, outputs) in enumerate(pairwise(widths)):
            mlp[str(number)] = init_linear(inputs, outputs, generator)

        weights = {}
        biases = {}
        for name, layer in output_layers.items():
            weights[name] = layer["weight"]
            biases[name] = layer["bias"].view(generated[name].shape)
        learned = {"v": embeddings, "mlp": mlp, "weight": weights, "bias": biases}
        learned = tree.as_type_of(learned, tree.leaves(params)[0])
        momentum = tree.full_like(learned, 0.0)
        return {"learned": learned, "momentum": momentum}, {"head": private}

    def turns(self, played, cohort, clients, generator):
        """Train one client after another, or the whole cohort together."""
        if self.order == "sequential":
            return [Turn([client]) for client in cohort]
        return [Turn(cohort)]

    def download(self, server, client):
        """Return the hypernetwork's model of the client; newcomers have the mean embedding."""
        embeddings = server["learned"]["v"]
        # A newcomer's number lies behind all embeddings; its row is replaced below.
        number = client["number"].clamp(max=len(embeddings) - 1)
        embedding = embeddings.index_select(0, number.view(1))
        embedding = torch.where(
            client["newcomer"],
            embeddings.mean(0, True),
            embedding,
        )
        return tree.take(_generate_models(server["learned"], embedding), 0)

    def start(self, received, client):
        """Return the received model beside the client's classifier, if that is private."""
        return {**received, **client["head"]}

    def finish(self, server, client, start, params):
        """Send the difference up, and keep the private classifier."""
        change = tree.map(
            torch.sub,
            tree.drop(start, client["head"]),
            params,
        )
        return change, {"head": tree.select(params, client["head"])}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Take a step of SGD along the clients' differences, through the hypernetwork."""
        learned = server["learned"]
        numbers = clients["number"]

        # ---- The gradient of <h(v_i; phi), g_i> is the product of g with h's Jacobian.
        def inner_product(learned: Tree) -> Tensor:
            models = _generate_models(learned, learned["v"][numbers])
            products = tree.map(
                lambda theta, g: (theta * g).sum(),
                models,
                uploads,
            )
            return sum(tree.leaves(products)) / len(numbers)

        grads = torch.func.grad(inner_product)(learned)
        if self.clip:
            # As torch's clip_grad_norm_.
            norm = sum(leaf.square().sum() for leaf in tree.leaves(grads)).sqrt()
            factor = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            grads = tree.map(lambda g: g * factor, grads)

        # ---- torch's SGD: weight decay in the gradient, then momentum.
        grads = tree.map(
            lambda g, p: g + self.weight_decay * p,
            grads,
            learned,
        )
        momentum = tree.map(
            lambda m, g: self.momentum * m + g,
            server["momentum"],
            grads,
        )
        updated = tree.map(lambda p, m: p - self.lr * m, learned, momentum)
        embedding_lr = self.embedding_lr or self.lr
        updated["v"] = learned["v"] - embedding_lr * momentum["v"]

        # ---- Embeddings of clients that were not sampled stay, their momenta too.
        if self.rows == "sampled":
            nobody = torch.zeros(
                len(learned["v"]),
                dtype=torch.bool,
                device=numbers.device,
            )
            is_sampled = nobody.index_fill(0, numbers, True)
            momentum["v"] = tree.by_row(is_sampled, momentum["v"], server["momentum"]["v"])
            updated["v"] = tree.by_row(is_sampled, updated["v"], learned["v"])
        return {"learned": updated, "momentum": momentum}, clients


def _generate_models(learned: Tree, v: Tensor) -> Tree:
    """Return the models that belong to embeddings `[clients, size]`, stacked."""
    first_layer, *other_layers = learned["mlp"].values()
    hidden = F.linear(v, **first_layer)
    for layer in other_layers:
        hidden = F.linear(hidden.relu(), **layer)

    def generate_leaf(weight: Tensor, bias: Tensor) -> Tensor:
        return (hidden @ weight.T).view(*hidden.shape[:-1], *bias.shape) + bias

    return tree.map(generate_leaf, learned["weight"], learned["bias"])
