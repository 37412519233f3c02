"""kNN-Per: FedAvg's model, whose predictions each client mixes with those of its own nearest
training samples.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground.ranges import Above, AtLeast, Between
from fedpfl.ground.tree import Ragged, Tree
from fedpfl.methods.shared.batch import Shard
from fedpfl.methods.shared.by_name import train_only
from fedpfl.methods.shared.method import Method, Phase
from fedpfl.models import Bound

GRID = tuple(step / 10 for step in range(11))
LEAST = torch.finfo(torch.float32).tiny  # a probability whose logarithm is finite


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

    k: Annotated[int, AtLeast(1)] = 10
    lam: Annotated[float, Between(0, 1)] | None = 0.5
    scale: Annotated[float, Above(0)] = 1.0
    capacity: Annotated[int, AtLeast(0)] | None = None
    distance: Literal["squared", "euclidean"] = "squared"
    mix: Literal["probabilities", "logits"] = "probabilities"

    @property
    def validates(self) -> bool:  # type: ignore[override]
        """Whether each client tunes lam."""
        return self.lam is None

    def before_training(self, server, client, net, shard):
        """Lay samples by under the received model."""
        return self._memory(net.still(), server, shard)

    def loss(self, server, client, net, params, batch):
        """Return the cross-entropy of the model alone."""
        return batch.cross_entropy(net(params, batch.x))

    def after_training(self, server, client, net, params, shard, aux):
        """Lay samples by under the trained model."""
        return self._memory(net, params, shard)

    def before_evaluation(self, server, client, net, shard):
        """Lay samples by under the present model."""
        return self._memory(net.still(), server, shard)

    def _memory(self, net: Bound, params: Tree, shard: Shard) -> dict[str, Tree]:
        rows = shard.order("memory", 0)[: self.capacity].sort().values.to(shard.data.y.device)
        memory = {"z": shard.features(net, params)[rows], "y": shard.data.y[rows]}
        lam = self._tuned(net, params, memory, shard) if self.lam is None else self.lam
        return {
            "memory": Ragged(memory),
            "lam": torch.tensor(lam, dtype=torch.float32, device=rows.device),
        }

    def _tuned(self, net: Bound, params: Tree, memory: Tree, shard: Shard) -> float:
        judged = torch.zeros(len(GRID), 2, dtype=torch.float64, device=shard.data.y.device)
        real = torch.ones_like(memory["y"], dtype=torch.bool)
        with torch.no_grad():
            for batch in shard.validation.chunks():
                logits, z = net.features(params, batch.x)
                votes = self._votes(z, memory, real, logits.shape[1])
                for place, lam in enumerate(torch.tensor(GRID, device=z.device)):
                    mixed = self._mixed(logits, votes, lam)
                    loss = F.cross_entropy(mixed, batch.y, reduction="sum")
                    judged[place] += torch.stack([(mixed.argmax(1) == batch.y).sum(), -loss])
        return GRID[max(range(len(GRID)), key=lambda place: (*judged[place].tolist(), -place))]

    def evaluated(self, server, client, params):
        """Return the model beside the client's samples."""
        return {"model": params, "memory": client["memory"], "lam": client["lam"]}

    def predict(self, net, params, batch):
        """Return the logarithms of the mixed probabilities (or the mixed logits)."""
        logits, z = net.features(params["model"], batch.x)
        memory, real = params["memory"]
        votes = self._votes(z, memory, real, logits.shape[1])
        return self._mixed(logits, votes, torch.where(real.any(), params["lam"], 0.0))

    def _votes(self, z: Tensor, memory: Tree, real: Tensor, classes: int) -> Tensor:
        """Return p_knn `[batch, classes]`, in float64, which no autocast rounds."""
        keys, z = memory["z"].double(), z.double()
        apart = (z.square().sum(1, keepdim=True) - 2 * z @ keys.T + keys.square().sum(1)).clamp(
            min=0
        )
        apart = (
            apart / (self.scale * z.shape[1])
            if self.distance == "squared"
            else apart.sqrt() / self.scale
        )
        far = torch.finfo(apart.dtype).max
        apart, rows = torch.where(real, apart, far).topk(min(self.k, len(keys)), largest=False)
        shares = (-apart).softmax(1)  # which sets the least distance to 0: no underflow
        return (
            torch.zeros_like(z[:, :1]).expand(-1, classes).scatter_add(1, memory["y"][rows], shares)
        )

    def _mixed(self, logits: Tensor, votes: Tensor, lam: Tensor) -> Tensor:
        if self.mix == "logits":
            return (lam * votes + (1 - lam) * logits).float()
        mixed = (
            (lam * votes + (1 - lam) * logits.double().softmax(1)).clamp(min=LEAST).log().float()
        )
        return torch.where(
            lam > 0, mixed, logits
        )  # whose order a logarithm's rounding could change

    def finetuning(self, params, parts, epochs):
        """Move the head alone, by the cross-entropy of the model alone."""
        mask = {**train_only(params, []), "model": train_only(params["model"], parts.head)}
        return [Phase(epochs, mask, loss=self._model_loss)]

    def _model_loss(self, server, client, net, params, batch):
        return self.loss(server, client, net, params["model"], batch)
