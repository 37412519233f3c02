"""FedOBP: element-wise personalization by an Optimal-Brain-Damage score and a quantile threshold."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast, Below, Between
from fedpfl.ground.tree import Masked, Tree
from fedpfl.methods.shared import fisher, importance
from fedpfl.methods.shared.batch import Data, Shard
from fedpfl.methods.shared.by_mask import ByMask
from fedpfl.models import Bound

Share = Annotated[float, Between(0, 1)]


@dataclass(frozen=True)
class FedOBP(ByMask):
    """FedOBP (Chen et al. 2026, arXiv:2604.16574, Algorithm 1).

    A client keeps the entries of its last trained model theta_i whose importance lies above the q-quantile and takes
    the others from the global model theta_g (eq. 9); it trains and uploads all of them, and all are averaged.
    Departures from the paper's text: the mean's weights sum to 1 (eq. 11 divides by the cohort once more), and the
    quantile is the order statistic of rank floor(q (N - 1)), which gives the counts of Table II.

    With several q (the adaptive quantile that the authors leave to future work; the algorithm is ours), each client
    that is about to train or to be evaluated chooses one by its validation samples V_i:
    1. it receives the entries of theta_g that are not above the quantile of the largest q, and ranks these itself:
       those withheld rank above all of them, so it knows the entries above the quantile of every q;
    2. for each q it forms the model that it would start from, and counts the hits and adds up the cross-entropy of
       that model on V_i, without training and with BatchNorm's statistics as they are;
    3. it takes the q of most hits, of these that of least cross-entropy, of these the largest; so does who has no V_i;
    4. it starts from that model, and beside theta_i it sends a bit for each q but the least: whether it is its choice.

    q: quantile in [0, 1]; 1 is FedAvg, 0 keeps everything but the least important entries. Several: ascending.
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

    q: Share | tuple[Share, ...]
    norm: Literal["none", "layer", "global"] = "global"
    score: Literal["obp", "obp_as_published", "gradient", "fisher", "fisher_batch"] = "obp"
    scope: Literal["all", "tensor"] = "all"
    classifier_only: bool = False
    ema: Annotated[float, AtLeast(0), Below(1)] = 0.0
    cold_start: Literal["paper", "global"] = "paper"

    def __post_init__(self):
        super().__post_init__()
        self.check(self._list == tuple(sorted({*self._list})) != (), "q", "in ascending order, if it is a list")
        if len(self._list) > 1 and self.score.startswith("obp"):  # of what it lacks a client knows no score
            self.check(not self.ema, "ema", f"0 with several q and score={self.score}")
            self.check(self.norm != "layer", "norm", f"none or global with several q and score={self.score}")

    @property
    def _list(self) -> tuple[float, ...]:
        return self.q if isinstance(self.q, tuple) else (self.q,)

    @property
    def validates(self):
        """Tell whether clients choose their q."""
        return isinstance(self.q, tuple)

    def init(self, params, parts):
        """Let theta_g and theta_i start equal; of theta_i only what is scored is kept."""
        model = tree.named(params, parts.head) if self.classifier_only else params
        client: dict[str, Tree] = {"model": model}
        if self.score in ("gradient", "fisher", "fisher_batch"):
            client["score"] = tree.full_like(model, 0.0)
        if self.ema:
            client["average"] = tree.full_like(model, 0.0)
        if self.validates:
            client["q"] = torch.tensor(self._list[-1], dtype=torch.float64, device=tree.leaves(params)[0].device)
        return params, client

    def before_training(self, server, client, net, shard):
        """Choose q, if there are several."""
        return self._choice(server, client, net, shard)

    def before_evaluation(self, server, client, net, shard):
        """Choose q for the present theta_g."""
        return self._choice(server, client, net, shard)

    def _choice(self, server: Tree, client: dict[str, Tree], net: Bound, shard: Shard) -> dict[str, Tree]:
        if not self.validates:
            return {}
        score, _ = self._scored(server, client)
        judged = []
        for q in self._list:
            model = super().start(server, {**client, "mask": self._above(score, client, q)})
            judged.append(self._judged(net.still(), model, shard.held_out))
        best = max((hits, -loss, q) for (hits, loss), q in zip(torch.stack(judged).tolist(), self._list, strict=True))
        return {"q": torch.full_like(client["q"], best[-1])}

    def _judged(self, net: Bound, model: Tree, data: Data) -> Tensor:
        """Return hits and summed cross-entropy, `[2]`."""
        total = torch.zeros(2, dtype=torch.float64, device=data.y.device)
        with torch.no_grad():
            for x, y, *_ in data.chunks():
                logits = self.predict(net, model, x)
                total += torch.stack([(logits.argmax(1) == y).sum(), F.cross_entropy(logits, y, reduction="sum")])
        return total

    def prepare(self, server, client):
        """Score the entries, average the scores over time, select the personal ones (eqs. 19, 7 and 8)."""
        score, client = self._scored(server, client)
        *others, mask = (self._above(score, client, q) for q in self._list)
        if not self.validates:
            return {**client, "mask": mask}
        client = {**client, "withheld": mask}
        for q, other in zip(self._list[:-1], others, strict=True):
            mask = tree.where(client["q"] == q, other, mask)
        return {**client, "mask": mask}

    def _scored(self, server: Tree, client: dict[str, Tree]) -> tuple[Tree, dict[str, Tree]]:
        """Return the scores, and the client's state with their average over time."""
        score = self._score(server, client)
        if self.ema:
            blend = tree.map(lambda now, past: (1 - self.ema) * now + self.ema * past, score, client["average"])
            score = tree.where(client["participated"], blend, score)
            client = {**client, "average": score}
        return score, client

    def _above(self, score: Tree, client: dict[str, Tree], q: float) -> Tree:
        """Return the mask of the entries that q makes personal."""
        if self.scope == "all":
            mask = importance.above_quantile(score, q, self.norm)
        else:  # normalising a tensor cannot change its own quantile's mask
            mask = tree.map(lambda leaf: importance.above_quantile(leaf, q), score)
        if self.cold_start == "global":
            mask = tree.map(lambda leaf: leaf & client["participated"], mask)
        return mask

    def _score(self, server, client):
        model = client["model"]
        if self.score == "obp":
            return importance.obp(model, tree.named(server, model))
        if self.score == "obp_as_published":
            return importance.obp_as_published(model, tree.named(server, model))
        return client["score"]

    def download(self, server, client):
        """Return what any q shares; a Fisher score is the client's own business, so it needs the whole model."""
        if self.score in ("fisher", "fisher_batch"):
            return server
        withheld = client["withheld" if self.validates else "mask"]
        shared = Masked(tree.named(server, withheld), tree.invert(withheld))
        return {"unscored": tree.without(server, withheld), "scored": shared}

    def start(self, received, client):
        """Return the personal entries of theta_i among the others of theta_g."""
        whole = received if "scored" not in received else {**received["unscored"], **received["scored"]}
        return super().start(whole, client)

    def after_training(self, server, client, net, params, shard, kept):
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
        client = {**client, "model": model}
        if self.score == "gradient":
            client["score"] = importance.gradient(tree.named(start, model), model)
        if not self.validates:
            return end, client
        return {"model": end, "chosen": torch.stack([client["q"] == q for q in self._list])[1:]}, client

    def aggregate(self, server, clients, uploads, weight):
        """Average the models."""
        return super().aggregate(server, clients, uploads["model"] if self.validates else uploads, weight)

    def metrics(self, server, client):
        """Count the personal entries of each layer (the paper's Figure 6), and who chose which q."""
        counts = {f"personal/{name}": leaf.sum() for name, leaf in client["mask"].items()}
        if not self.validates:
            return counts
        return {"q_mean": client["q"], **{f"q_share/{q}": (client["q"] == q).float() for q in self._list}, **counts}
