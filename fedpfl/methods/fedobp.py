"""FedOBP: element-wise personalization by an Optimal-Brain-Damage score and a quantile threshold."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedpfl import tree
from fedpfl.methods.shared import fisher, importance
from fedpfl.methods.shared.by_mask import ByMask
from fedpfl.methods.shared.method import flag
from fedpfl.tree import Masked, Tree


@dataclass(frozen=True)
class FedOBP(ByMask):
    """FedOBP (Chen et al. 2026, arXiv:2604.16574, Algorithm 1).

    A client keeps the entries of its last trained model theta_i whose importance lies above the q-quantile and takes
    the others from the global model theta_g (eq. 9); it trains and uploads all of them, and all are averaged.
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
    score: Literal["obp", "obp_as_published", "gradient", "fisher", "fisher_batch"] = "obp"
    scope: Literal["all", "tensor"] = "all"
    classifier_only: bool = False
    ema: float = 0.0
    cold_start: Literal["paper", "global"] = "paper"

    def __post_init__(self):
        super().__post_init__()
        self.check(0 <= self.q <= 1, "q", "between 0 and 1")
        self.check(0 <= self.ema < 1, "ema", "at least 0 and below 1")

    def init(self, params, parts):
        """Let theta_g and theta_i start equal; of theta_i only what is scored is kept."""
        model = tree.named(params, parts.head) if self.classifier_only else params
        client: dict[str, Tree] = {"model": model, "trained": flag(params)}
        if self.score in ("gradient", "fisher", "fisher_batch"):
            client["score"] = tree.full_like(model, 0.0)
        if self.ema:
            client |= {"average": tree.full_like(model, 0.0), "averaged": flag(params)}
        return params, client

    def prepare(self, server, client):
        """Score the entries, average the scores over time, select the personal ones (eqs. 19, 7 and 8)."""
        score = self._score(server, client)
        if self.ema:
            blend = tree.map(lambda now, past: (1 - self.ema) * now + self.ema * past, score, client["average"])
            score = tree.where(client["averaged"], blend, score)
            client = {**client, "average": score, "averaged": ~flag(server)}
        if self.scope == "all":
            mask = importance.above_quantile(score, self.q, self.norm)
        else:  # normalising a tensor cannot change its own quantile's mask
            mask = tree.map(lambda leaf: importance.above_quantile(leaf, self.q), score)
        if self.cold_start == "global":
            mask = tree.map(lambda leaf: leaf & client["trained"], mask)
        return {**client, "mask": mask}

    def _score(self, server, client):
        model = client["model"]
        if self.score == "obp":
            return importance.obp(model, tree.named(server, model))
        if self.score == "obp_as_published":
            return importance.obp_as_published(model, tree.named(server, model))
        return client["score"]

    def download(self, server, client):
        """Return the shared entries; a Fisher score is the client's own business, so it needs the whole model."""
        if self.score in ("fisher", "fisher_batch"):
            return server
        shared = Masked(tree.named(server, client["mask"]), tree.invert(client["mask"]))
        return {"unscored": tree.without(server, client["mask"]), "scored": shared}

    def after_training(self, net, shard, params, kept, server, client):
        """Return Fisher scores at the new theta_i, which take one more pass over the client's data."""
        if self.score not in ("fisher", "fisher_batch"):
            return {}

        def logits(scored: Tree, x: Tensor) -> Tensor:
            return self.predict(net, {**params, **scored}, x)

        scored = tree.named(params, client["model"])
        return {"score": fisher.scores(net, logits, scored, shard, by_sample=self.score == "fisher")}

    def finish(self, server, client, start, end):
        """Return everything, personal entries too, and keep theta_i."""
        model = tree.named(end, client["model"])
        client = {**tree.without(client, ["mask"]), "model": model, "trained": ~flag(end)}
        if self.score == "gradient":
            client["score"] = importance.gradient(tree.named(start, model), model)
        return end, client

    def metrics(self, server, client):
        """Count the personal entries of each layer (the paper's Figure 6)."""
        return {f"personal/{name}": leaf.sum() for name, leaf in client["mask"].items()}
