"""FedOBP: element-wise personalization by an Optimal-Brain-Damage score and a quantile threshold."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl import importance, tree
from fedpfl.methods import fisher
from fedpfl.methods.base import Batch, Method, flag
from fedpfl.models import Bound, Parts
from fedpfl.tree import Masked, Tree

Score = Literal["obp", "obp_as_published", "gradient", "fisher", "fisher_batch"]


@dataclass(frozen=True)
class FedOBP(Method):
    """FedOBP (Chen et al. 2026, arXiv:2604.16574, Algorithm 1).

    A client keeps the entries of its last trained model theta_i whose importance lies above the q-quantile and takes
    the others from the global model theta_g; it trains and uploads all of them, and all are averaged.
    Departures from the paper's text: the mean's weights sum to 1 (eq. 11 divides by the cohort once more), and the
    quantile is the order statistic of rank floor(q (N - 1)), which gives the counts of Table II.

    q: quantile in [0, 1]; 1 is FedAvg, 0 keeps everything but the least important entries.
    norm: normalisation of the scores before the quantile: none, layer (per tensor) or global (same mask as none).
    score: obp = (theta_i - theta_g)^2 (eq. 19); obp_as_published = |(theta_i - theta_g) theta_i|, behind the authors'
        result files; gradient = |start - end| of the client's last training (eq. 5); fisher = mean over the client's
        training samples of the squared gradient of log p at theta_i; fisher_batch = square of the full-batch mean
        gradient (eq. 6 to the letter). The last three are zero, so nothing is personal, until the client has trained.
    scope: one quantile over `all` scored entries, or one per `tensor` (as in the published Fisher and gradient curves).
    classifier_only: only the classifier's entries can be personal; q then counts over these.
    ema: weight of the past in an exponential moving average of the scores, advanced once per participation; 0 is off.
    cold_start: a client that never trained compares the initial model with the global one (`paper`: the entries that
        moved furthest fall back to their initial values) or has no personal entries (`global`).
    """

    q: float
    norm: Literal["none", "layer", "global"] = "global"
    score: Score = "obp"
    scope: Literal["all", "tensor"] = "all"
    classifier_only: bool = False
    ema: float = 0.0
    cold_start: Literal["paper", "global"] = "paper"

    def __post_init__(self) -> None:
        self.check(0 <= self.q <= 1, "q", "between 0 and 1")
        self.check(self.norm in importance.NORMS, "norm", "none, layer or global")
        self.check(self.score in Score.__args__, "score", f"one of {', '.join(Score.__args__)}")  # type: ignore[attr-defined]
        self.check(self.scope in ("all", "tensor"), "scope", "all or tensor")
        self.check(0 <= self.ema < 1, "ema", "at least 0 and below 1")
        self.check(self.cold_start in ("paper", "global"), "cold_start", "paper or global")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """theta_g and theta_i start equal."""
        scored = {name: params[name] for name in (parts.head if self.classifier_only else params)}
        mine: dict[str, Tree] = {"model": scored, "trained": flag(params)}
        if self.score in ("gradient", "fisher", "fisher_batch"):
            mine["score"] = tree.full_like(scored, 0.0)
        if self.ema:
            mine |= {"average": tree.full_like(scored, 0.0), "averaged": flag(params)}
        return params, mine

    def prepare(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """Score, average over time, select (eqs. 7, 8 and 19)."""
        scores = self._scores(self._scored(server, mine), mine)
        if self.ema:
            past = mine["average"]
            blend = tree.map(lambda now, then: (1 - self.ema) * now + self.ema * then, scores, past)
            scores = tree.where(mine["averaged"], blend, scores)
            mine = {**mine, "average": scores, "averaged": ~flag(server)}
        if self.scope == "tensor":
            # Normalising a tensor cannot change its own quantile's mask.
            mask = tree.map(lambda leaf: importance.above_quantile(leaf, self.q), scores)
        else:
            mask = importance.above_quantile(scores, self.q, self.norm)
        if self.cold_start == "global":
            mask = tree.map(lambda leaf: leaf & mine["trained"], mask)
        return {**mine, "mask": mask}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """Personal entries from theta_i, the others from theta_g (eq. 9)."""
        return {**server, **tree.where(mine["mask"], mine["model"], self._scored(server, mine))}

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """Only shared entries go down; a Fisher score is the client's own business, so it needs the whole model."""
        if self.score in ("fisher", "fisher_batch"):
            return server
        rest = {name: value for name, value in server.items() if name not in mine["model"]}
        return {"unscored": rest, "scored": Masked(self._scored(server, mine), tree.invert(mine["mask"]))}

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Everything goes up, personal entries too; theta_i is kept."""
        kept = {**mine, "model": self._scored(end, mine), "trained": ~flag(end)}
        del kept["mask"]
        if self.score == "gradient":
            kept["score"] = importance.gradient(self._scored(start, mine), kept["model"])
        if self.score in ("fisher", "fisher_batch"):
            mean = fisher.mean(kept.pop("summary"))
            kept["score"] = tree.map(torch.square, mean) if self.score == "fisher_batch" else mean
        return end, kept

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """What the next round would start from."""
        return self.start(server, self.prepare(server, mine))

    def measure(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tensor]:
        """Personal entries per layer (the paper's Figure 6)."""
        return {f"personal/{name}": leaf.sum() for name, leaf in mine["mask"].items()}

    @property
    def summarize(self) -> Callable[..., Tree] | None:  # type: ignore[override]
        """Fisher scores need one more pass over the client's data."""
        return self._fisher if self.score in ("fisher", "fisher_batch") else None

    def _fisher(self, net: Bound, end: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tree:
        def logits(scored: Tree, x: Tensor) -> Tensor:
            return self.predict(net, {**end, **scored}, x)

        return fisher.sums(net, logits, self._scored(end, mine), batch, by_sample=self.score == "fisher")

    def _scores(self, shared: Tree, mine: dict[str, Tree]) -> Tree:
        if self.score == "obp":
            return importance.obp(mine["model"], shared)
        if self.score == "obp_as_published":
            return importance.obp_as_published(mine["model"], shared)
        return mine["score"]

    @staticmethod
    def _scored(params: Tree, mine: dict[str, Tree]) -> Tree:
        return {name: params[name] for name in mine["model"]}
