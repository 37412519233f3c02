"""APFL: a global model and a private one, mixed by a weight that each client learns."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, Proportion
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.batch import Batch
from fedpfl.methods.shared.method import Method, Phase
from fedpfl.models import Bound


@dataclass(frozen=True)
class APFL(Method):
    """APFL (Deng, Kamani and Mahdavi 2020, arXiv:2003.13461).

    FedAvg's w, and v_i trained as a part of a mixture. On each batch w_i follows CE(f(w_i)) and v_i
    follows CE(mixture of v_i and w_i), with respect to v_i alone, so w_i's steps are FedAvg's.
    Both gradients are taken at the models as they are before that batch's steps (Algorithm 1).
    A client is evaluated by the mixture of v_i and the latest w.

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
    cold_start: the alpha that a client is evaluated with until its first step: the `initial` one,
        with the initial v, as in the references, or 0, which is the `global` model. Training starts
        with the initial alpha and v either way.

    FL-bench steps the global model twice. PFLlib trains v_i on its own loss, not the mixture's, and
    then keeps the mixture in its place.
    """

    alpha: Proportion = 0.5
    adaptive: bool = True
    mixing: Literal["output", "param"] = "output"
    alpha_lr: NonNegative = 0.01
    alpha_decay: NonNegative = 0.02
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
        alpha = client["alpha"]
        # The minibatch that training meets first: an epoch of a stream always has the same order.
        batch = next(shard.batches("main", 0), None)
        if batch is None or not self.adaptive:
            return {"next": alpha}
        w = server
        v = client["v"]

        # ---- The gradient of the mixture's loss L, at the models as they are before any step.
        def loss_of_models(net: Bound, models: Tree, batch: Batch) -> Tensor:
            return batch.loss(self.predict(net, {**models, "alpha": alpha}, batch))

        def loss_of_mixture(net: Bound, mixture: Tree, batch: Batch) -> Tensor:
            # The mixed model runs with v's statistics, as `predict` does.
            return batch.loss(net(mixture, batch.x, "v"))

        if self.mixing == "output":
            grads, _ = net.gradient(
                loss_of_models,
                {"w": w, "v": v},
                batch,
            )
            gradient = _mix_models(alpha, grads["v"], grads["w"])
        else:
            gradient, _ = net.gradient(
                loss_of_mixture,
                _mix_models(alpha, v, w),
                batch,
            )

        # ---- alpha <- clip(alpha - alpha_lr (<v - w, gradient> + alpha_decay alpha), 0, 1)
        products = tree.map(
            lambda v, w, g: ((v - w) * g).sum(),
            v,
            w,
            gradient,
        )
        slope = torch.stack(tree.leaves(products)).sum()  # <v - w, gradient>
        next_alpha = alpha - self.alpha_lr * (slope + self.alpha_decay * alpha)
        # One float64 leaf among float32 leaves would make it one of float64.
        return {"next": next_alpha.clamp(0, 1).to(alpha)}

    def start(self, received, client):
        """Return both models side by side."""
        return {"w": received, "v": client["v"]}

    def phases(self, server, client, params, epochs):
        """Train both models; the first step ends the old alpha."""
        return [Phase(epochs, after_gradient=self._advance_alpha)]

    def loss(self, server, client, net, params, batch):
        """Add two objectives without a common variable: in the mixture w is given."""
        alpha = client["alpha"]
        logits_w = net(params["w"], batch.x, "w")
        if self.mixing == "output":
            logits_v = net(params["v"], batch.x, "v")
            mixture = alpha * logits_v + (1 - alpha) * logits_w.detach()
        else:
            # w is given here: without detach the mixture's loss would move w off FedAvg's steps.
            w = tree.map(Tensor.detach, params["w"])
            mixture = net(_mix_models(alpha, params["v"], w), batch.x, "v")
        return batch.loss(logits_w) + batch.loss(mixture)

    @staticmethod
    def _advance_alpha(server, client, params, grads, batch, loss, aux):
        """Take the new alpha, from the second batch on."""
        return {**client, "alpha": client["next"]}

    def finish(self, server, client, start, params):
        """Send the global model up, keep the private one and alpha."""
        return params["w"], {"v": params["v"], "alpha": client["alpha"]}

    def evaluated(self, server, client, params):
        """Return both models and their mixing weight."""
        alpha = client["alpha"]
        if self.cold_start == "global":
            # A private model without a step knows nothing of the client; alpha = 0 leaves w.
            alpha = torch.where(client["trained"], alpha, 0.0)
        return {"w": params["w"], "v": params["v"], "alpha": alpha}

    def predict(self, net, params, batch):
        """Return the mixture's logits."""
        alpha = params["alpha"]
        if self.mixing == "param":
            return net(
                _mix_models(alpha, params["v"], params["w"]),
                batch.x,
                "v",
            )
        logits_v = net(params["v"], batch.x, "v")
        logits_w = net(params["w"], batch.x, "w")
        return alpha * logits_v + (1 - alpha) * logits_w

    def finetuning(self, params, parts, epochs):
        """Move both models; alpha holds still."""
        return [Phase(epochs, {"w": True, "v": True, "alpha": False})]

    def metrics(self, server, client):
        """Return the weight of the private model, as the client enters the round."""
        return {"alpha": client["alpha"]}


def _mix_models(alpha: Tensor, v: Tree, w: Tree) -> Tree:
    """Return alpha v + (1 - alpha) w, in the memory layout of v.

    A sum of one-channel tensors may lose that layout, so the second term is added in place.
    """
    return tree.map(lambda v, w: (alpha * v).add_((1 - alpha) * w), v, w)
