"""FedCP: a policy splits the features of each sample between a personal head and the global one."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.layers import init_linear, seeded_generator
from fedpfl.methods.shared.method import Method, Phase

KERNEL_WIDTHS = (10, 15, 20, 50)
BANK = 256  # rows of numbers; two make a sample's noise


@dataclass(frozen=True)
class FedCP(Method):
    """FedCP (Zhang et al., KDD 2023, arXiv:2307.01217).

    Of a sample's features h = f(x) and the client's context v, the row sum of its head's weight W_p
    at length 1, a policy network (linear, layer norm, ReLU) makes d pairs of numbers from h * v,
    and the softmax of each pair is (r, s). Logits are W_p (r * h) + b_p + W_g (s * h) + b_g; both
    biases count. A client trains f, the network and its head on cross-entropy + lam * MMD(h,
    f_ref(x)), the biased estimate over a batch's pairs, with the received body as f_ref, in
    evaluation mode; W_g and v hold still. Up go f, the network and the mean of both heads, and all
    three are averaged. A client is evaluated by the latest of them and its own head; one that never
    trained has the initial head.

    lam: the authors' script has 5, their parser 0, PFLlib 1.
    policy_noise: whether training adds Gumbel noise to the pairs (`train`, as in the published
        runs) or not (`off`). Evaluation never does; in both codes it does, so that their results
        are random. Both codes give a new body to all clients, but head and network to those of the
        finished round alone, which is the paper's at full participation only, and begin with a
        random context. Here who trains or is evaluated has all three.
    """

    mixes_samples = "its loss has the distance between means of features of a minibatch (MMD)"

    lam: NonNegative = 5.0
    policy_noise: Literal["train", "off"] = "train"

    randoms: ClassVar[int] = 2  # a sample chooses its noise by these

    def init(self, params, parts):
        """Begin with the network's head on both sides."""
        parts.require_linear_end()
        head = tree.select(params, parts.head)
        head_weight = params[parts.head_weight]
        d = head_weight.shape[1]
        # From the run's seed: the server and every client draw the same policy.
        policy = {
            **init_linear(d, 2 * d, seeded_generator(parts.seed)),
            "scale": torch.ones(2 * d),
            "shift": torch.zeros(2 * d),
        }
        server = {
            "body": tree.drop(params, parts.head),
            "policy": tree.as_type_of(policy, head_weight),
            "head": head,
        }
        return server, {"head": head}

    def sample(self, server, generator):
        """Draw a bank of uniform numbers for the samples."""
        if self.policy_noise == "off":
            return {}
        d = tree.leaves(server["head"])[0].shape[1]
        return {"bank": torch.rand(2, BANK, d, generator=generator)}

    def prepare(self, server, client):
        """Keep the received body's statistics."""
        # f_ref keeps the statistics as received; training moves those under `statistics`.
        return {**client, "still": client["statistics"]}

    def start(self, received, client):
        """Return the received body and policy beside the client's own head."""
        return {**received, "head": client["head"]}

    def loss(self, server, client, net, params, batch):
        """Return cross-entropy + lam * MMD(h, f_ref(x)), f_ref being the received body."""
        noise: Tensor | float = 0.0
        if self.policy_noise == "train":
            noise = self._gumbel_noise(client["bank"], batch.random)
        h = _body_features(net, params, batch.x)
        logits = _mixed_logits(
            h,
            params,
            client["head"],
            server["head"],
            noise,
        )
        loss = batch.loss(logits)
        if not self.lam:
            return loss

        # ---- MMD(h, f_ref(x)): the mean kernel within h and within f_ref(x), less twice between.
        with torch.no_grad():
            received = {**server, "head": client["head"]}
            reference = _body_features(
                net.still(client["still"]),
                received,
                batch.x,
            )
        kernel = (
            _kernel_matrix(h, h)
            + _kernel_matrix(reference, reference)
            - 2 * _kernel_matrix(h, reference)
        )
        # Padding has no weight on either axis: on the rows by `mean`, on the columns by the
        # product.
        mmd = batch.mean((kernel * batch.samples).sum(1) / batch.samples.sum())
        return loss + self.lam * mmd

    @staticmethod
    def _gumbel_noise(bank: Tensor, random: Tensor) -> Tensor:
        """Return the difference of two Gumbel numbers `[batch, features]`.

        It is independent for any two samples.
        """
        rows = (random * BANK).long()
        # The sum modulo 1 is uniform, and the logit of a uniform number is such a difference.
        uniform = (bank[0][rows[:, 0]] + bank[1][rows[:, 1]]).frac()
        return torch.logit(uniform, eps=1e-6)

    def finish(self, server, client, start, params):
        """Send body, policy and the mean of both heads up; keep the personal one."""
        mean_head = tree.map(
            lambda p, g: 0.5 * p + 0.5 * g,
            params["head"],
            server["head"],
        )
        return {**params, "head": mean_head}, {"head": params["head"]}

    def evaluated(self, server, client, params):
        """Add the global head to the trained entries."""
        return {**params, "shared": server["head"]}

    def predict(self, net, params, batch):
        """Return the logits by the policy without noise."""
        h = _body_features(net, params, batch.x)
        # Fine-tuning moves the head, but not the context that is made of it.
        context = tree.map(Tensor.detach, params["head"])
        return _mixed_logits(h, params, context, params["shared"])

    def finetuning(self, params, parts, epochs):
        """Move what training moves."""
        return [Phase(epochs, {"body": True, "policy": True, "head": True, "shared": False})]


def _body_features(net: Any, params: Tree, x: Tensor) -> Tensor:
    """Return the head's inputs `[batch, features]`."""
    return net.features({**params["body"], **params["head"]}, x)[1]


def _mixed_logits(
    h: Tensor, params: Tree, context: Tree, shared: Tree, noise: Tensor | float = 0.0
) -> Tensor:
    """Return W_p (r * h) + b_p + W_g (s * h) + b_g.

    Args:
        h: features `[batch, features]`.
        params: the policy and the personal head.
        context: the head; its row sum stands for the client.
        shared: the global head.
        noise: added to the difference of each pair.
    """
    policy = params["policy"]
    v = F.normalize(
        tree.leaves(context)[0].sum(0),
        dim=0,
    )  # the client's context
    with torch.autocast(h.device.type, enabled=False):
        hidden = F.linear(h * v, policy["weight"], policy["bias"])
        normalised = F.layer_norm(
            hidden,
            hidden.shape[1:],
            policy["scale"],
            policy["shift"],
        )
        pair_r, pair_s = normalised.relu().chunk(2, 1)
        r = torch.sigmoid(pair_r - pair_s + noise)  # the softmax of each pair
        personal_logits = F.linear(r * h, *params["head"].values())
        return personal_logits + F.linear((1 - r) * h, *shared.values())


def _kernel_matrix(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of Gaussian kernels of all pairs, `[batch, batch]`."""
    squared = (a[:, None] - b).square().sum(2)
    kernels = [torch.exp(-squared / (2 * width)) for width in KERNEL_WIDTHS]
    return torch.stack(kernels).sum(0)
