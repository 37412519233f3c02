"""FedOBP: element-wise personalization by an Optimal-Brain-Damage score and a quantile."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Proportion, ProportionBelowOne
from fedpfl.ground.tree import Masked, Tree
from fedpfl.methods.shared import fisher, importance
from fedpfl.methods.shared.batch import Batch
from fedpfl.methods.shared.by_mask import PersonalByMask


@dataclass(frozen=True)
class FedOBP(PersonalByMask):
    """FedOBP (Chen et al. 2026, arXiv:2604.16574, Algorithm 1).

    A client that takes part
    1. scores each entry of theta_i, its last trained model, against the global model theta_g
       (eq. 19),
    2. takes the q-quantile of all scores (eq. 7),
    3. masks the entries above it (eq. 8): these it takes from theta_i, the rest from theta_g
       (eq. 9),
    4. trains all of them,
    5. uploads all of them, and the server takes the mean.

    Departures from the paper's text: the mean's weights sum to 1 (eq. 11 divides by the cohort once
    more), and the quantile is the order statistic of rank floor(q (N - 1)), which gives 15 of
    the 16 counts of Table II; the last (MEDMNISTA, Dir(0.1), printed 53) belongs to q = 0.99991.

    q: quantile in [0, 1]; 1 is FedAvg, 0 keeps everything but the least important entries.
    norm: normalisation of the scores before the quantile: none, layer (per tensor; a constant one
        scores zero, where the published code divides 0 by 0 and becomes Local-Only) or global (same
        mask as none).
    score: obp = (theta_i - theta_g)^2 (eq. 19); obp_as_published = |(theta_i - theta_g) theta_i|,
        behind the authors' result files (experiment=fedobp/as_published); gradient = |start - end|
        of the client's last training (eq. 5); fisher = mean over the client's training samples of
        the squared gradient of log p at theta_i; fisher_batch = square of the full-batch mean
        gradient (eq. 6 to the letter). The last three are zero until the client has trained.
    scope: one quantile over `all` scored entries, or one per `tensor` (as in the published Fisher
        and gradient curves).
    classifier_only: only the classifier's entries can be personal; q then counts over these.
    ema: weight of the past in an exponential moving average of the scores, advanced once per
        participation; 0 is off.
    cold_start: a client that never trained compares the initial model with the global one (`paper`:
        the entries that moved furthest fall back to their initial values) or has no personal
        entries (`global`). A score that comes from training leaves it no personal ones but with
        `initial`, which compares these models, too (near the first rounds of Figure 4's files).
    """

    q: Proportion
    norm: Literal["none", "layer", "global"] = "global"
    score: Literal["obp", "obp_as_published", "gradient", "fisher", "fisher_batch"] = "obp"
    scope: Literal["all", "tensor"] = "all"
    classifier_only: bool = False
    ema: ProportionBelowOne = 0.0
    cold_start: Literal["paper", "global", "initial"] = "paper"

    @property
    def server_sees(self) -> str:  # type: ignore[override]
        """Return a mean where clients score, by Fisher information.

        Else the server scores the clients' models.
        """
        return "mean of uploads" if self.score.startswith("fisher") else "client states"

    def init(self, params, parts):
        """Let theta_g and theta_i start equal.

        Of theta_i only scored entries are kept, beside scores that come from training.
        """
        theta_i = tree.select(params, parts.head) if self.classifier_only else params
        client = {"model": theta_i}
        # obp scores follow from the two models at any time; other scores come from training.
        if not self.score.startswith("obp"):
            client["score"] = tree.full_like(theta_i, 0.0)
        if self.ema > 0:
            client["average"] = tree.full_like(theta_i, 0.0)
        return params, client

    def prepare(self, server, client):
        """Steps 1 to 3: score, quantile, mask."""
        score = self._score(server, client)
        if self.ema:
            client = {**client, "average": score}
        return {**client, **self._masks(score, client)}

    def _score(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Step 1: return how important each entry of theta_i is (with `ema`: on average)."""
        theta_i = client["model"]
        theta_g = tree.select(server, theta_i)
        if self.score == "obp":
            score = importance.obp_score(theta_i, theta_g)
        elif self.score == "obp_as_published":
            score = importance.published_obp_score(theta_i, theta_g)
        else:
            score = client["score"]  # from the client's last training
            if self.cold_start == "initial":
                distance = importance.movement_score(theta_g, theta_i)
                score = tree.where(client["participated"], score, distance)
        if not self.ema:
            return score

        def average_over_time(current: Tensor, past: Tensor) -> Tensor:
            return (1 - self.ema) * current + self.ema * past

        average = tree.map(average_over_time, score, client["average"])
        # In a client's first participation there is nothing past.
        return tree.where(client["participated"], average, score)

    def _masks(self, score: Tree, client: dict[str, Tree]) -> dict[str, Tree]:
        """Return the mask of the personal entries."""
        return {"mask": self._mask_above(score, self.q, client)}

    def _mask_above(self, score: Tree, q: float, client: dict[str, Tree]) -> Tree:
        """Steps 2 and 3: return which entries lie above the q-quantile."""
        if self.scope == "all":
            mask = importance.mask_above_quantile(score, q, self.norm)
        else:  # normalising a tensor cannot change its own quantile's mask
            mask = tree.map(
                lambda leaf: importance.mask_above_quantile(leaf, q),
                score,
            )
        if self.cold_start == "global":
            mask = tree.map(
                lambda leaf: leaf & client["participated"],
                mask,
            )
        return mask

    def download(self, server, client):
        """Return the entries that are not personal."""
        # A Fisher score is known to the client alone, so the server has to send everything.
        if self.score.startswith("fisher"):
            return {"whole": server, "shared": {}}
        mask = client["mask"]
        shared = Masked(tree.select(server, mask), tree.invert(mask))
        return {"whole": tree.drop(server, mask), "shared": shared}

    def start(self, received, client):
        """Return the personal entries of theta_i within those of theta_g (eq. 9)."""
        theta_g = {**received["whole"], **received["shared"]}
        return super().start(theta_g, client)

    def after_training(self, server, client, net, params, shard, aux):
        """Return Fisher scores at the new theta_i, which take one more pass over the data."""
        if not self.score.startswith("fisher"):
            return {}

        def logits(scored: Tree, batch: Batch) -> Tensor:
            return self.predict(net, {**params, **scored}, batch)

        scored = tree.select(params, client["model"])
        by_sample = self.score == "fisher"
        return {"score": fisher.fisher_scores(net, logits, scored, shard, by_sample=by_sample)}

    def finish(self, server, client, start, params):
        """Step 5: send all entries up, personal ones too, and keep theta_i."""
        theta_i = tree.select(params, client["model"])
        client = {**client, "model": theta_i}
        if self.score == "gradient":
            client["score"] = importance.movement_score(
                tree.select(start, theta_i),
                theta_i,
            )
        return params, client

    def metrics(self, server, client):
        """Count the personal entries of each layer (the paper's Figure 6)."""
        return {f"personal/{name}": leaf.sum() for name, leaf in client["mask"].items()}
