"""APFL: a global model and a private one, mixed by a weight that each client learns."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast, Between
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.batch import Batch
from fedpfl.methods.shared.method import Method, Phase
from fedpfl.models import Bound


@dataclass(frozen=True)
class APFL(Method):
    """APFL (Deng, Kamani and Mahdavi 2020, arXiv:2003.13461): FedAvg's w, and v_i trained as a part
    of a mixture.

    On each batch w_i follows CE(f(w_i)) and v_i follows CE(mixture of v_i and w_i), with respect to
    v_i alone, so w_i's steps are FedAvg's. Both gradients are taken at the models as they are
    before that batch's steps (Algorithm 1). A client is evaluated by the mixture of v_i and the
    latest w.

    Once per participation, on its first batch and from the models it starts with, alpha moves along
    g = <v - w, alpha dL/dv + (1 - alpha) dL/dw>, L being the mixture's loss, both models
    differentiated (`output`), or <v - w, gradient at the mixed parameters> (`param`): alpha <-
    clip(alpha - alpha_lr (g + alpha_decay alpha), 0, 1). That batch itself is still trained with
    the old alpha.

    alpha: weight of the private model, at first or for ever; 0.5 as in FedOBP's comparison.
    adaptive: whether alpha moves.
    mixing: of logits (`output`, the authors' code) or of parameters (`param`, the paper), with v's
    statistics.
    alpha_lr: step size of alpha; the configuration gives the models' own.
    alpha_decay: pull of alpha to 0, in the authors' code only.
    cold_start: the alpha by which a client is evaluated until its first step: the `initial` one,
        with the initial v, as in the references, or 0, which is the `global` model. Training starts
        with the initial alpha and v either way.
    """

    alpha: Annotated[float, Between(0, 1)] = 0.5
    adaptive: bool = True
    mixing: Literal["output", "param"] = "output"
    alpha_lr: Annotated[float, AtLeast(0)] = 0.01
    alpha_decay: Annotated[float, AtLeast(0)] = 0.02
    cold_start: Literal["initial", "global"] = "initial"

    def init(self, params, parts):
        """Start both models from the same values."""
        alpha = tree.leaves(params)[0].new_full((), self.alpha)
        return params, {"v": params, "alpha": alpha}

    def buffers(self):
        """Keep the private model's statistics on the client."""
        return {"w": self.statistics or "aggregate", "v": "local"}

    def before_training(self, server, client, net, shard):
        """Return the alpha that holds from the second batch on."""
        alpha, batch = client["alpha"], next(shard.batches("main", 0), None)
        if batch is None or not self.adaptive:
            return {"next": alpha}
        models = {"w": server, "v": client["v"]}

        def objective(net: Bound, models: Tree, batch: Batch) -> Tensor:
            return batch.cross_entropy(self.predict(net, {**models, "alpha": alpha}, batch))

        def at_mixture(net: Bound, mixed: Tree, batch: Batch) -> Tensor:
            return batch.cross_entropy(net(mixed, batch.x, "v"))

        if self.mixing == "output":
            grads, _ = net.gradient(objective, models, batch)
            gradient = _mixed(alpha, grads["v"], grads["w"])
        else:
            gradient, _ = net.gradient(at_mixture, _mixed(alpha, models["v"], models["w"]), batch)
        products = tree.map(lambda v, w, g: ((v - w) * g).sum(), models["v"], models["w"], gradient)
        slope = torch.stack(tree.leaves(products)).sum()
        return {"next": (alpha - self.alpha_lr * (slope + self.alpha_decay * alpha)).clamp(0, 1)}

    def start(self, received, client):
        """Return both models side by side."""
        return {"w": received, "v": client["v"]}

    def phases(self, server, client, params, epochs):
        """Train both models; the first step ends the old alpha."""
        return [Phase(epochs, after_gradient=self._advance)]

    def loss(self, server, client, net, params, batch):
        """Add two objectives without a common variable: in the mixture w is given."""
        alpha, shared = client["alpha"], net(params["w"], batch.x, "w")
        if self.mixing == "output":
            mixture = alpha * net(params["v"], batch.x, "v") + (1 - alpha) * shared.detach()
        else:
            mixture = net(
                _mixed(alpha, params["v"], tree.map(Tensor.detach, params["w"])), batch.x, "v"
            )
        return batch.cross_entropy(shared) + batch.cross_entropy(mixture)

    def _advance(self, server, client, params, grads, batch, loss, aux):
        return {**client, "alpha": client["next"]}

    def finish(self, server, client, start, params):
        """Send the global model up, keep the private one and alpha."""
        return params["w"], {"v": params["v"], "alpha": client["alpha"]}

    def evaluated(self, server, client, params):
        """Return both models and the weight by which they are mixed."""
        alpha = client["alpha"]
        if self.cold_start == "global":
            alpha = torch.where(client["trained"], alpha, 0.0)
        return {"w": params["w"], "v": params["v"], "alpha": alpha}

    def predict(self, net, params, batch):
        """Return the mixture's logits."""
        alpha, x = params["alpha"], batch.x
        if self.mixing == "param":
            return net(_mixed(alpha, params["v"], params["w"]), x, "v")
        return alpha * net(params["v"], x, "v") + (1 - alpha) * net(params["w"], x, "w")

    def finetuning(self, params, parts, epochs):
        """Move both models; alpha holds still."""
        return [Phase(epochs, {"w": True, "v": True, "alpha": False})]

    def metrics(self, server, client):
        """Return the weight of the private model, as the client enters the round."""
        return {"alpha": client["alpha"]}


def _mixed(alpha: Tensor, own: Tree, shared: Tree) -> Tree:
    """Return the convex combination, in the memory layout of `own`, which a sum of one-channel
    tensors may lose.
    """
    return tree.map(lambda v, w: (alpha * v).add_((1 - alpha) * w), own, shared)
