"""kNN-Per: FedAvg's model, mixed with the votes of a client's nearest training samples."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground.ranges import Count, Positive, Proportion, WholeNumber
from fedpfl.ground.tree import Ragged, Tree
from fedpfl.methods.shared.batch import Shard
from fedpfl.methods.shared.by_name import train_only
from fedpfl.methods.shared.method import Method, Phase
from fedpfl.models import Bound

LAM_GRID = tuple(step / 10 for step in range(11))
TINY = torch.finfo(torch.float32).tiny  # a probability with a finite logarithm


@dataclass(frozen=True)
class KNNPer(Method):
    """kNN-Per (Marfoq, Neglia, Kameni and Vidal, ICML 2022, arXiv:2111.09360).

    Training is FedAvg's. To be judged, a client lays by the features z_j (the head's inputs) and
    labels of its training samples under the model. Of a sample with features z the k nearest vote,
    p_knn(c) = sum over those with y_j = c of u_j / sum u_j with u_j = exp(-distance); it is taken
    for the largest of lam p_knn + (1 - lam) softmax(logits).

    k: neighbours; all, where a client has fewer. capacity: a random choice of so many samples is
    laid by; null: all.
    lam: for all clients (FL-bench has 0.5); null: each takes from 0, 0.1, ..., 1 the one of most
        hits on its validation samples, of these that of least cross-entropy, of these the least; so
        does who has no such samples.
        The official code has none: its tables choose one lam (and capacity) by test accuracy, which
        is not offered.
    distance: `squared`, |z - z_j|^2 / (scale * features) (the official code), or `euclidean`, |z -
        z_j| / scale (the paper).
    mix: `probabilities` (the paper), or p_knn with raw `logits`, which the official scripts mix by
        accident, and FL-bench after them: neighbours then overturn small gaps only. Fine-tuning
        moves the head alone, under which the features that were laid by hold.
    """

    k: Count = 10
    lam: Proportion | None = 0.5
    scale: Positive = 1.0
    capacity: WholeNumber | None = None
    distance: Literal["squared", "euclidean"] = "squared"
    mix: Literal["probabilities", "logits"] = "probabilities"

    needs_classes = "neighbours vote for classes"

    @property
    def validates(self) -> bool:  # type: ignore[override]
        """Whether each client tunes lam."""
        return self.lam is None

    def before_training(self, server, client, net, shard):
        """Store the client's samples under the current model."""
        return self._memory(net.still(), server, shard)

    before_evaluation = before_training

    def loss(self, server, client, net, params, batch):
        """Return the cross-entropy of the model alone."""
        return batch.loss(net(params, batch.x))

    def after_training(self, server, client, net, params, shard, aux):
        """Store the client's samples under the trained model."""
        return self._memory(net, params, shard)

    def _memory(self, net: Bound, params: Tree, shard: Shard) -> dict[str, Tree]:
        """Return features and labels of the client's samples under a model, and its lam."""
        order = shard.order("memory", 0)
        rows = order[: self.capacity].sort().values.to(shard.data.y.device)
        memory = {"z": shard.features(net, params)[rows], "y": shard.data.y[rows]}
        lam = self._tune_lam(net, params, memory, shard) if self.lam is None else self.lam
        lam_tensor = torch.tensor(lam, dtype=torch.float32, device=rows.device)
        return {"memory": Ragged(memory), "lam": lam_tensor}

    def _tune_lam(self, net: Bound, params: Tree, memory: Tree, shard: Shard) -> float:
        """Return the lam of most hits on the validation samples.

        Of several it is the one of least cross-entropy, of these the least.
        """
        # ---- Step 1: hits and losses of each lam.
        # For each lam its hits, and the negative cross-entropy: more of either is better.
        results = torch.zeros(
            len(LAM_GRID),
            2,
            dtype=torch.float64,
            device=shard.data.y.device,
        )
        no_padding = torch.ones_like(memory["y"], dtype=torch.bool)
        with torch.no_grad():
            for batch in shard.validation.chunks():
                logits, z = net.features(params, batch.x)
                votes = self._neighbour_votes(
                    z,
                    memory,
                    no_padding,
                    logits.shape[1],
                )
                for row, lam in enumerate(torch.tensor(LAM_GRID, device=z.device)):
                    mixture = self._mix_votes(logits, votes, lam)
                    hits = (mixture.argmax(1) == batch.y).sum()
                    loss = F.cross_entropy(mixture, batch.y, reduction="sum")
                    results[row] += torch.stack([hits, -loss])

        # ---- Step 2: the best.
        scores = results.tolist()
        # Most hits first, then least cross-entropy, then the least lam.
        best = max(
            range(len(LAM_GRID)),
            key=lambda row: (scores[row], -row),
        )
        return LAM_GRID[best]

    def evaluated(self, server, client, params):
        """Return the model beside the client's samples."""
        return {"model": params, "memory": client["memory"], "lam": client["lam"]}

    def predict(self, net, params, batch):
        """Return the logarithms of the mixed probabilities (or the mixed logits)."""
        logits, z = net.features(params["model"], batch.x)
        memory, is_sample = params["memory"]  # `is_sample` is False for padding
        votes = self._neighbour_votes(
            z,
            memory,
            is_sample,
            logits.shape[1],
        )
        lam = torch.where(is_sample.any(), params["lam"], 0.0)  # without samples there is no vote
        return self._mix_votes(logits, votes, lam)

    def _neighbour_votes(self, z: Tensor, memory: Tree, is_sample: Tensor, classes: int) -> Tensor:
        """Return p_knn `[batch, classes]`, in float64, which no autocast rounds."""
        z = z.double()
        keys = memory["z"].double()
        # ---- Distances to all samples of the memory; padding is farthest.
        # |z - z_j|^2 = |z|^2 - 2 z z_j + |z_j|^2, which rounding may make negative
        z_square = z.square().sum(1, keepdim=True)
        squared = z_square - 2 * z @ keys.T + keys.square().sum(1)
        squared = squared.clamp(min=0)
        if self.distance == "squared":
            distance = squared / (self.scale * z.shape[1])
        else:
            distance = squared.sqrt() / self.scale
        distance = torch.where(
            is_sample,
            distance,
            torch.finfo(distance.dtype).max,
        )
        # ---- The k nearest vote with exp(-distance).
        nearest, rows = distance.topk(
            min(self.k, len(keys)),
            largest=False,
        )
        shares = (-nearest).softmax(1)  # which sets the least distance to 0: no underflow
        # A product, as `scatter_add` has no order of summands on a GPU.
        labels = torch.arange(classes, device=z.device)
        is_label = memory["y"][rows][:, :, None] == labels
        return (shares[:, None] @ is_label.to(shares.dtype))[:, 0]

    def _mix_votes(self, logits: Tensor, votes: Tensor, lam: Tensor) -> Tensor:
        """Return log(lam p_knn + (1 - lam) softmax(logits)), or the mixed logits."""
        if self.mix == "logits":
            return (lam * votes + (1 - lam) * logits).float()
        probabilities = lam * votes + (1 - lam) * logits.double().softmax(1)
        log_probabilities = probabilities.clamp(min=TINY).log().float()
        # Without votes logits are taken as they are: a logarithm's rounding could change the order.
        return torch.where(lam > 0, log_probabilities, logits)

    def finetuning(self, params, parts, epochs):
        """Move the head alone, by the cross-entropy of the model alone."""
        mask = {
            **train_only(params, []),
            "model": train_only(params["model"], parts.head),
        }
        return [Phase(epochs, mask, loss=self._model_loss)]

    def _model_loss(self, server, client, net, params, batch):
        """Return the cross-entropy of the model alone."""
        return self.loss(server, client, net, params["model"], batch)
