"""FedOBP with an adaptive quantile: each client chooses its q by its validation samples."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Proportion
from fedpfl.ground.tree import Tree
from fedpfl.methods.fedobp import FedOBP
from fedpfl.methods.shared.batch import Data
from fedpfl.methods.shared.method import flag
from fedpfl.models import Bound


@dataclass(frozen=True)
class FedOBPAdaptive(FedOBP):
    """FedOBP with an adaptive quantile. Its authors leave that to future work; this one is ours.

    Each client that is about to train or to be evaluated chooses its q by its validation samples
    V_i:
    1. it receives the entries of theta_g that are not above the quantile of the largest q, and
       ranks these itself: those withheld rank above all of them, so it knows the entries above the
       quantile of every q;
    2. for each q it forms the model that it would start from, and counts the hits and adds up the
       cross-entropy of that model on V_i, without training and with BatchNorm's statistics as they
       are;
    3. it takes the q of most hits, of these that of least cross-entropy, of these the largest; so
       does who has no V_i;
    4. it starts from that model, and beside theta_i it sends a bit for each q but the least:
       whether it is its choice.

    So val_accuracy is too good to compare or to tune by. masks.json and mask() show the q of the
    last participation.

    q: the list, ascending. All else as FedOBP; a client has no score of entries that it lacks, so with
        the obp scores there is neither `ema` nor norm=layer.
    """

    q: tuple[Proportion, ...]  # type: ignore[assignment]

    validates: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        is_ascending = self.q == tuple(sorted({*self.q}))
        self.check(is_ascending and self.q != (), "q", "one or more, ascending")
        if len(self.q) > 1 and self.score.startswith("obp"):
            with_several = f"with several q and score={self.score}"
            self.check(not self.ema, "ema", f"0 {with_several}")
            self.check(self.norm != "layer", "norm", f"none or global {with_several}")

    def init(self, params, parts):
        """Begin with the largest q."""
        server, client = super().init(params, parts)
        return server, {**client, "q": flag(params).double() + self.q[-1]}

    def before_training(self, server, client, net, shard):
        """Return the q with most hits on the validation samples, for the present theta_g."""
        score = self._score(server, client)
        results = []
        for q in self.q:
            # ---- Steps 1 and 2: the model that the client would start from, tried on V_i.
            mask = self._mask_above(score, q, client)
            model = self.start({"whole": server, "shared": {}}, {**client, "mask": mask})
            results.append(self._hits_and_loss(net.still(), model, shard.validation))
        # ---- Step 3: most hits, then least cross-entropy, then the largest q.
        ranking = []
        for q, (hits, loss) in zip(self.q, torch.stack(results).tolist(), strict=True):
            ranking.append((hits, -loss, q))
        best_q = max(ranking)[-1]
        return {"q": torch.full_like(client["q"], best_q)}

    before_evaluation = before_training

    def _hits_and_loss(self, net: Bound, model: Tree, data: Data) -> Tensor:
        """Return hits and summed cross-entropy, `[2]`."""
        total = torch.zeros(2, dtype=torch.float64, device=data.y.device)
        with torch.no_grad():
            for batch in data.chunks():
                logits = self.predict(net, model, batch)
                hits = batch.find_hits(logits).sum()
                loss = batch.summed_loss(logits)
                total += torch.stack([hits, loss])
        return total

    def _masks(self, score, client):
        """Return the masks of the client's q and of the largest q.

        Entries above the largest q are withheld from every client.
        """
        masks = [self._mask_above(score, q, client) for q in self.q]
        withheld = masks[-1]
        mask = withheld
        # q is a tensor that differs by client: every mask is computed, and one of them taken.
        for q, candidate in zip(self.q[:-1], masks[:-1], strict=True):
            mask = tree.where(client["q"] == q, candidate, mask)
        return {"mask": mask, "withheld": withheld}

    def download(self, server, client):
        """Return the entries that any q shares."""
        return super().download(server, {**client, "mask": client["withheld"]})

    def finish(self, server, client, start, params):
        """Send the choice up too, a bit for each q but the least."""
        upload, client = super().finish(server, client, start, params)
        is_choice = torch.stack([client["q"] == q for q in self.q])
        return {"model": upload, "chosen": is_choice[1:]}, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the models."""
        return super().aggregate(server, clients, net, uploads["model"], weight, generator)

    def metrics(self, server, client):
        """Add the mean q, and the share of clients that chose each."""
        shares = {f"q_share/{q}": (client["q"] == q).float() for q in self.q}
        return {"q_mean": client["q"], **shares, **super().metrics(server, client)}
