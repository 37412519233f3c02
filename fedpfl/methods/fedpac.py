"""FedPAC: features are aligned to common class prototypes, and each client's head is a mixture of all heads."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Batch, Method, Phase, Shard, mean_cross_entropy
from fedpfl.models import Bound, Parts
from fedpfl.tree import Masked, Tree

LEAST = 1e-3  # shares below this are dropped from a mixture


@dataclass(frozen=True)
class FedPAC(Method):
    """FedPAC (Xu, Tong and Huang, ICLR 2023, arXiv:2306.11867), as its official code does it.

    A client trains its head alone, then the body under it on CE + lam * mean squared distance of the features from
    the prototypes of their classes: the global ones, or, for a class without one, the client's own before training. In
    the first round there are none, and nothing is aligned. The server averages bodies, averages prototypes by class
    counts, and gives each client of the cohort the mixture of the cohort's heads whose estimated error (bias from
    the class means H and p, plus variance v) is least.

    lam: weight of the alignment. head_epochs: of the head alone; body_epochs: of the body; None: local.epochs.
    head_lr: step size of the head; None: local.lr.
    combine: whether heads are mixed; without it each client keeps its own.
    keep_prototypes: whether a class that no client of a cohort has keeps its prototype; else it has none until it
        is seen again.
    A client that was never sampled has the initial head. A mixture is found among the cohort, so it ages until the
    client is sampled again. The authors train all of 20 clients each round.
    """

    lam: float = 1.0
    head_epochs: int = 1
    body_epochs: int | None = None
    head_lr: float | None = 0.1
    combine: bool = True
    keep_prototypes: bool = False

    def __post_init__(self) -> None:
        self.check(self.lam >= 0, "lam", "0 or more")
        self.check(self.head_epochs >= 0, "head_epochs", "0 or more")
        self.check(self.body_epochs is None or self.body_epochs >= 0, "body_epochs", "0 or more, or null")
        self.check(self.head_lr is None or 0 < self.head_lr < math.inf, "head_lr", "a positive number, or null")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """No prototypes yet."""
        weight = params[parts.head[0]]
        prototypes = {"mean": torch.zeros_like(weight), "seen": weight.new_zeros(len(weight), dtype=torch.bool)}
        body = {name: params[name] for name in parts.body}
        return {"body": body, "prototypes": prototypes}, {"head": {name: params[name] for name in parts.head}}

    def survey(self, net: Bound, shard: Shard, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """Class means of the features under the received body, and what they say of a head's error."""
        z = shard.features(net.still(), self.start(server, mine)).double()
        classes = len(server["prototypes"]["seen"])
        counts = torch.bincount(shard.data.y, minlength=classes)
        mean = _class_sums(z, shard.data.y, classes) / counts.clamp(min=1)[:, None]
        square = _class_sums(z.square().sum(1, keepdim=True), shard.data.y, classes)[:, 0] / counts.clamp(min=1)
        share = counts / counts.sum().clamp(min=1)
        variance = (share * square - share.square() * mean.square().sum(1)).sum() / counts.sum().clamp(min=1)
        statistics = {"H": share[:, None] * mean, "v": variance.clamp(min=0)}
        return {"own": mean.float(), "statistics": tree.map(lambda leaf: leaf.float(), statistics)}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The latest body under the client's head."""
        return {**server["body"], **mine["head"]}

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """Body, head, and the prototypes that there are."""
        seen = server["prototypes"]["seen"][:, None].expand_as(server["prototypes"]["mean"])
        prototypes = Masked({"mean": server["prototypes"]["mean"]}, {"mean": seen})
        return {"model": self.start(server, mine), "prototypes": prototypes}

    def phases(self, server: Tree, mine: dict[str, Tree], params: Tree, epochs: int) -> list[Phase]:
        """Head, then body; what does not move is left out of differentiation."""
        head = {name: name in mine["head"] for name in params}
        body = {name: not own for name, own in head.items()}
        last = epochs if self.body_epochs is None else self.body_epochs
        return [Phase(self.head_epochs, head, loss=self.head_loss, lr=self.head_lr), Phase(last, body)]

    def head_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy on the frozen body's features, whose statistics do not move."""
        return mean_cross_entropy(net.still()(params, batch.x), batch)

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy and alignment."""
        if not self.lam:
            return mean_cross_entropy(net(params, batch.x), batch)
        logits, z = net.features(params, batch.x)
        known = server["prototypes"]
        targets = torch.where(known["seen"][:, None], known["mean"], mine["own"])[batch.y]
        distances = (z - targets).square().mean(1)
        weight = torch.ones_like(distances) if batch.weight is None else batch.weight
        aligned = (distances * weight).sum() / weight.sum()
        return mean_cross_entropy(logits, batch) + self.lam * torch.where(known["seen"].any(), aligned, 0.0)

    def summarize(self, net: Bound, end: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """Class sums of the features under the trained body, and class counts."""
        _, z = net.features(end, batch.x)
        weight = torch.ones_like(z[:, 0]) if batch.weight is None else batch.weight
        classes = torch.arange(len(mine["own"]), device=z.device)
        member = (batch.y[:, None] == classes) * weight[:, None]
        return {"sums": member.T @ z.float(), "counts": member.sum(0)}

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Model, prototypes and statistics go up; the head is kept, until the server's reply."""
        counts, head = mine["summary"]["counts"], {name: end[name] for name in mine["head"]}
        upload = {
            "body": {name: end[name] for name in server["body"]},
            "head": head,
            "mean": mine["summary"]["sums"] / counts.clamp(min=1)[:, None],
            "counts": counts,
            **mine["statistics"],
        }
        return upload, {"head": head}

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """Bodies by samples, prototypes by class counts."""
        counts = uploads["counts"]
        total = counts.sum(0)
        mean = (counts[:, :, None] * uploads["mean"]).sum(0) / total.clamp(min=1)[:, None]
        seen, old = total > 0, server["prototypes"]
        if self.keep_prototypes:
            mean, seen = torch.where(seen[:, None], mean, old["mean"]), seen | old["seen"]
        return {"body": tree.mean(uploads["body"], weight), "prototypes": {"mean": mean, "seen": seen}}

    def settle(self, server: Tree, uploads: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """Each client's mixture of the heads (eq. 8 of the paper)."""
        if not self.combine:
            return mine
        shares = mixtures(uploads["H"].double().cpu(), uploads["v"].double().cpu())
        return {"head": tree.map(lambda heads: torch.tensordot(shares.to(heads), heads, 1), uploads["head"])}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """As at the start of a round."""
        return self.start(server, mine)


def mixtures(means: Tensor, variance: Tensor) -> Tensor:
    """Row i: the shares `[clients]` of all heads in client i's.

    means: H, `[clients, classes, features]`. variance: v, `[clients]`.
    """
    rows = []
    for own in means:
        apart = (own - means).flatten(1)
        shares = least(torch.diag(variance) + apart @ apart.T)
        shares = torch.where(shares < LEAST, 0, shares)
        rows.append(shares / shares.sum())
    return torch.stack(rows)


def least(quadratic: Tensor) -> Tensor:
    """The shares a `[n]` >= 0 with sum 1 that minimise a^T Q a, for Q positive semidefinite, float64, on the CPU.

    With Q = R^T R the least squares problem |R y - R^-T 1| over y >= 0 has the same optimality conditions, up to a
    factor; so a = y / sum(y).
    """
    from scipy import optimize  # takes a while to import

    scale = quadratic.diagonal().amax()
    ones = torch.ones(len(quadratic), 1, dtype=quadratic.dtype)
    if not 0 < scale < math.inf:  # no error at all, or training that diverged, which is reported elsewhere
        return ones[:, 0] / len(ones)
    ridge = 1e-12 * torch.eye(len(quadratic), dtype=quadratic.dtype)
    upper = torch.linalg.cholesky(quadratic / scale + ridge).T
    target = torch.linalg.solve_triangular(upper.T, ones, upper=False)[:, 0]
    answer = torch.from_numpy(optimize.nnls(upper.numpy(), target.numpy())[0])
    return answer / answer.sum()


def _class_sums(rows: Tensor, y: Tensor, classes: int) -> Tensor:
    """Sums of `rows` `[samples, n]` by label, `[classes, n]`."""
    return rows.new_zeros(classes, rows.shape[1]).index_add_(0, y, rows)
