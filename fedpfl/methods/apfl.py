"""APFL: a global model and a private one, mixed by a weight that each client learns."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Batch, Method, Phase, Shard, flag, mean_cross_entropy
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class APFL(Method):
    """APFL (Deng, Kamani and Mahdavi 2020, arXiv:2003.13461): FedAvg's w, and v_i trained as a part of a mixture.

    On each batch w_i follows CE(f(w_i)) and v_i follows CE(mixture of v_i and w_i), with respect to v_i alone, so w_i's
    steps are FedAvg's. Both gradients are taken at the models as they are before that batch's steps (Algorithm 1).
    A client is judged by the mixture of v_i and the latest w.

    Once per participation, on its first batch and from the models it starts with, alpha moves along
    g = <v - w, alpha dL/dv + (1 - alpha) dL/dw>, L being the mixture's loss, both models differentiated (`output`), or
    <v - w, gradient at the mixed parameters> (`param`): alpha <- clip(alpha - alpha_lr (g + alpha_decay alpha), 0, 1).
    That batch itself is still trained with the old alpha.

    alpha: weight of the private model, at first or for ever; 0.5 as in FedOBP's comparison.
    adaptive: whether alpha moves.
    mixing: of logits (`output`, the authors' code) or of parameters (`param`, the paper), with v's statistics.
    alpha_lr: step size of alpha; the configuration gives the models' own.
    alpha_decay: pull of alpha to 0, in the authors' code only.
    cold_start: the alpha by which a client is judged until its first step: the `initial` one, with the initial v, as in
        the references, or 0, which is the `global` model. Training starts with the initial alpha and v either way.
    """

    alpha: float = 0.5
    adaptive: bool = True
    mixing: Literal["output", "param"] = "output"
    alpha_lr: float = 0.01
    alpha_decay: float = 0.02
    cold_start: Literal["initial", "global"] = "initial"

    buffers: ClassVar[dict[str, str]] = {"w": "aggregate", "v": "local"}
    judged_role: ClassVar[str] = "v"

    def __post_init__(self) -> None:
        self.check(0 <= self.alpha <= 1, "alpha", "between 0 and 1")
        self.check(self.mixing in ("output", "param"), "mixing", "output or param")
        self.check(self.alpha_lr >= 0, "alpha_lr", "0 or more")
        self.check(self.alpha_decay >= 0, "alpha_decay", "0 or more")
        self.check(self.cold_start in ("initial", "global"), "cold_start", "initial or global")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """Everybody starts from the same model."""
        alpha = tree.leaves(params)[0].new_full((), self.alpha)
        return params, {"v": params, "alpha": alpha, "trained": flag(params)}

    def survey(self, net: Bound, shard: Shard, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """The alpha that holds from the second batch on."""
        alpha, batch = mine["alpha"], next(shard.batches("main", 0), None)
        if batch is None or not self.adaptive:
            return {"next": alpha}
        models = {"w": server, "v": mine["v"]}

        def objective(net: Bound, models: Tree) -> Tensor:
            return mean_cross_entropy(self.predict(net, {**models, "alpha": alpha}, batch.x), batch)

        def at_mixture(net: Bound, mixed: Tree) -> Tensor:
            return mean_cross_entropy(net(mixed, batch.x, "v"), batch)

        if self.mixing == "output":
            grads, _ = net.gradient(objective, models)
            gradient = _mixed(alpha, grads["v"], grads["w"])
        else:
            gradient, _ = net.gradient(at_mixture, _mixed(alpha, models["v"], models["w"]))
        products = tree.map(lambda v, w, g: ((v - w) * g).sum(), models["v"], models["w"], gradient)
        slope = torch.stack(tree.leaves(products)).sum()
        return {"next": (alpha - self.alpha_lr * (slope + self.alpha_decay * alpha)).clamp(0, 1)}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """Both models side by side."""
        return {"w": server, "v": mine["v"]}

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Two objectives without a common variable: to the mixture w is given."""
        alpha, shared = mine["alpha"], net(params["w"], batch.x, "w")
        if self.mixing == "output":
            mixture = alpha * net(params["v"], batch.x, "v") + (1 - alpha) * shared.detach()
        else:
            mixture = net(_mixed(alpha, params["v"], tree.map(Tensor.detach, params["w"])), batch.x, "v")
        return mean_cross_entropy(shared, batch) + mean_cross_entropy(mixture, batch)

    def observe(
        self, params: Tree, grads: Tree, loss: Tensor, batch: Batch, server: Tree, mine: dict[str, Tree]
    ) -> dict[str, Tree]:
        """From the first gradient on the new alpha holds, and the client has trained."""
        return {**mine, "alpha": mine["next"], "trained": torch.ones_like(mine["trained"])}

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The global model goes up, the private one and alpha stay."""
        return end["w"], {"v": end["v"], "alpha": mine["alpha"], "trained": mine["trained"]}

    def judged(self, server: Tree, mine: dict[str, Tree], trained: Tree) -> Tree:
        """Both models and the weight by which they are mixed."""
        alpha = mine["alpha"]
        if self.cold_start == "global":
            alpha = torch.where(mine["trained"], alpha, 0.0)
        return {"w": trained["w"], "v": trained["v"], "alpha": alpha}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The private model and the latest global one."""
        return self.judged(server, mine, self.start(server, mine))

    def predict(self, net: Bound, params: Tree, x: Tensor) -> Tensor:
        """The mixture."""
        alpha = params["alpha"]
        if self.mixing == "param":
            return net(_mixed(alpha, params["v"], params["w"]), x, "v")
        return alpha * net(params["v"], x, "v") + (1 - alpha) * net(params["w"], x, "w")

    def tune(self, params: Tree, parts: Parts, epochs: int) -> list[Phase]:
        """Both models; alpha holds still."""
        return [Phase(epochs, {"w": True, "v": True, "alpha": False})]

    def measure(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tensor]:
        """The weight of the private model, as the client enters the round."""
        return {"alpha": mine["alpha"]}


def _mixed(alpha: Tensor, own: Tree, shared: Tree) -> Tree:
    """The convex combination, in the memory layout of `own`, which a sum of tensors of one channel may lose."""
    return tree.map(lambda v, w: (alpha * v).add_((1 - alpha) * w), own, shared)
