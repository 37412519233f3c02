"""FedPAC: features are aligned to class prototypes, and each head is a mixture of all heads."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, Positive, WholeNumber
from fedpfl.ground.tree import Masked
from fedpfl.methods.shared.by_name import PersonalByName, train_all_but, train_only
from fedpfl.methods.shared.gaussian import sum_rows_by_label
from fedpfl.methods.shared.method import Phase

MIN_SHARE = 1e-3  # shares below this are dropped from a mixture


@dataclass(frozen=True)
class FedPAC(PersonalByName):
    """FedPAC (Xu, Tong and Huang, ICLR 2023, arXiv:2306.11867), as its official code does it.

    A client trains its head alone, then the body under it on CE + lam * mean squared distance of
    the features from
    the prototypes of their classes: the global ones, or, for a class without one, the client's own
    before training. The first round has none, and nothing is aligned. The server averages
    bodies, averages prototypes by class counts, and gives each client of the cohort the mixture of
    the cohort's heads with the least estimated error (bias from the class means H and p, plus
    variance v).

    lam: weight of the alignment. head_epochs: of the head alone; body_epochs: of the body; None:
    local.epochs.
    head_lr: step size of the head; None: local.lr.
    combine: whether heads are mixed; without it each client keeps its own.
    keep_prototypes: whether a class that no client of a cohort has keeps its prototype; else it has
        none until it is seen again. A client that was never sampled has the initial head. A mixture
        is found among the cohort, so it ages until the client is sampled again. The authors train
        all of 20 clients each round.
    """

    lam: NonNegative = 1.0
    head_epochs: WholeNumber = 1
    body_epochs: WholeNumber | None = None
    head_lr: Positive | None = 0.1
    combine: bool = True
    keep_prototypes: bool = False

    _key: ClassVar[str] = "head"

    needs_classes = "it averages features by class"

    def init(self, params, parts):
        """Begin without prototypes."""
        body, client = super().init(params, parts)
        head_weight = params[parts.head_weight]
        prototypes = {
            "mean": torch.zeros_like(head_weight),
            "seen": head_weight.new_zeros(len(head_weight), dtype=torch.bool),  # which there are
        }
        return {"body": body, "prototypes": prototypes}, client

    def before_training(self, server, client, net, shard):
        """Return class means under the received body, and their terms of a head's error."""
        # ---- Class means under the received body.
        y = shard.data.y
        z = shard.features(net.still(), {**server["body"], **client["head"]}).double()
        classes = len(server["prototypes"]["seen"])
        counts = torch.bincount(y, minlength=classes)
        divisor = counts.clamp(min=1)
        mean = sum_rows_by_label(z, y, classes) / divisor[:, None]
        square_norms = z.square().sum(1, keepdim=True)
        mean_square = sum_rows_by_label(square_norms, y, classes)[:, 0] / divisor

        # ---- H = p_c E[z | c], and v, the variance of its estimate.
        samples = counts.sum().clamp(min=1)
        share = counts / samples
        total_variance = (share * mean_square - share.square() * mean.square().sum(1)).sum()
        variance = total_variance / samples
        statistics = {
            "own": mean,
            "counts": counts,
            "H": share[:, None] * mean,
            "v": variance.clamp(min=0),
        }
        return tree.map(Tensor.float, statistics)

    def download(self, server, client):
        """Return body, head, and the existing prototypes."""
        mean = server["prototypes"]["mean"]
        mask = server["prototypes"]["seen"][:, None].expand_as(mean)
        return {
            "model": {**server["body"], **client["head"]},
            "prototypes": Masked({"mean": mean}, {"mean": mask}),
        }

    def start(self, received, client):
        """Return the latest body under the client's head."""
        return received["model"]

    def phases(self, server, client, params, epochs):
        """Train the head, then the body."""
        head = train_only(params, client["head"])
        body = train_all_but(params, client["head"])
        head_sgd = {} if self.head_lr is None else {"lr": self.head_lr}
        body_epochs = epochs if self.body_epochs is None else self.body_epochs
        return [
            Phase(self.head_epochs, head, loss=self._head_loss, sgd=head_sgd),
            Phase(body_epochs, body),
        ]

    def loss(self, server, client, net, params, batch):
        """Return CE + lam * mean squared distance of features from their classes' prototypes."""
        logits, z = net.features(params, batch.x)
        loss = batch.loss(logits)
        if not self.lam:
            return loss
        has_prototype = server["prototypes"]["seen"]
        # A class without a global prototype has the client's own from before training.
        prototypes = torch.where(
            has_prototype[:, None], server["prototypes"]["mean"], client["own"]
        )
        distance = batch.mean((z - prototypes[batch.y]).square().mean(1))
        # The first round has none, and nothing is aligned.
        return loss + self.lam * torch.where(has_prototype.any(), distance, 0.0)

    def after_training(self, server, client, net, params, shard, aux):
        """Return class means of the features under the trained body."""
        counts = client["counts"]
        sums = []
        for batch in shard.data.chunks():
            _, z = net.features(params, batch.x)
            one_hot = F.one_hot(batch.y, len(counts)).to(z)
            sums.append(one_hot.T @ z)
        return {"mean": sum(sums) / counts.clamp(min=1)[:, None]}

    def finish(self, server, client, start, params):
        """Send model, prototypes and statistics up; keep the head until the server's reply."""
        body, head = super().finish(server, client, start, params)
        statistics = tree.select(client, ("mean", "counts", "H", "v"))
        return {"body": body, **head, **statistics}, head

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average bodies by samples and prototypes by class counts; mix heads (eq. 8)."""
        # ---- Prototypes: the mean of each class over the samples of all clients.
        counts = uploads["counts"]
        total = counts.sum(0)
        class_sums = (counts[:, :, None] * uploads["mean"]).sum(0)
        mean = class_sums / total.clamp(min=1)[:, None]
        has_prototype = total > 0
        if self.keep_prototypes:
            old = server["prototypes"]
            mean = torch.where(has_prototype[:, None], mean, old["mean"])
            has_prototype = has_prototype | old["seen"]
        server = {
            "body": tree.mean(uploads["body"], weight),
            "prototypes": {"mean": mean, "seen": has_prototype},
        }

        # ---- Heads: each client's is the mixture of least estimated error.
        if self.combine:
            means = uploads["H"].double().cpu()
            # Solved in float64 on the CPU; heads are mixed where and as they are.
            variance = uploads["v"].double().cpu()
            shares = mixture_shares(means, variance)

            def mix(heads: Tensor) -> Tensor:
                return torch.tensordot(shares.to(heads), heads, 1)

            clients = {"head": tree.map(mix, uploads["head"])}
        return server, clients


def mixture_shares(means: Tensor, variance: Tensor) -> Tensor:
    """Return in row i the shares `[clients]` of all heads in client i's.

    means: H, `[clients, classes, features]`. variance: v, `[clients]`.
    """
    rows = []
    for own_mean in means:
        # The error of a mixture a is a^T Q a: its variance, and its squared bias.
        bias = (own_mean - means).flatten(1)
        quadratic = torch.diag(variance) + bias @ bias.T
        shares = minimal_shares(quadratic)
        shares = torch.where(shares < MIN_SHARE, 0, shares)
        rows.append(shares / shares.sum())
    return torch.stack(rows)


def minimal_shares(quadratic: Tensor) -> Tensor:
    """Return the shares a `[n]` >= 0 with sum 1 that minimise a^T Q a.

    Q is positive semidefinite, float64, on the CPU. With Q = R^T R the least squares problem
    |R y - R^-T 1| over y >= 0 has the same optimality conditions, up to a factor; so a = y / sum(y).
    """
    from scipy import optimize  # takes a while to import

    # Beside a diagonal of at most 1 the ridge is small.
    scale = quadratic.diagonal().amax()
    ones = torch.ones(len(quadratic), 1, dtype=quadratic.dtype)
    # No error at all, or training that diverged, which is reported elsewhere.
    if not 0 < scale < math.inf:
        return ones[:, 0] / len(ones)
    ridge = 1e-12 * torch.eye(len(quadratic), dtype=quadratic.dtype)
    upper = torch.linalg.cholesky(quadratic / scale + ridge).T
    target = torch.linalg.solve_triangular(upper.T, ones, upper=False)[:, 0]
    solution, _ = optimize.nnls(upper.numpy(), target.numpy())
    shares = torch.from_numpy(solution)
    return shares / shares.sum()
