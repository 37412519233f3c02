"""pFedFDA: a common feature extractor under a generative classifier that each client fits to its
own features.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import Above, AtLeast, Below
from fedpfl.ground.tree import Known
from fedpfl.methods.shared import gaussian
from fedpfl.methods.shared.gaussian import pack_symmetric, unpack_symmetric
from fedpfl.methods.shared.method import Method, Phase


@dataclass(frozen=True)
class PFedFDA(Method):
    """pFedFDA (McLaughlin and Su, NeurIPS 2024, arXiv:2411.00329, Algorithm 1).

    Features of class c are taken as Gaussian with mean mu_c and a covariance Sigma common to all
    classes, so the best
    head is linear discriminant analysis: W = Sigma^-1 mu, bias = -mu Sigma^-1 mu / 2 + log prior.
    Clients train the body under the global head with their own prior, estimate mu and Sigma from
    the features seen on the way, and mix them with the global ones by the two weights beta whose
    cross-validated loss is least. They are evaluated, whether sampled or not, by such a head fitted
    to the features of their training data.

    eps: shrinkage of Sigma towards a multiple of the identity, and added to the prior.
    folds: of the cross-validation. single_beta: one weight for both.
    cov_reg: multiple of the identity added to an estimated Sigma; 1 as in the official code, whose
        further 1e-4 in every entry is added too.
    variant: `as_published`: what FL-bench, and so FedOBP's tables, ran under this name: FedAvg, and
        for evaluation a head from statistics mixed with ones that stay at their random initial
        values. Linear algebra is in float64. All of this happens client by client.
    """

    eps: Annotated[float, Above(0), Below(1)] = 1e-4
    folds: Annotated[int, AtLeast(2)] = 2
    single_beta: bool = False
    cov_reg: Annotated[float, AtLeast(0)] = 1.0
    variant: Literal["paper", "as_published"] = "paper"

    server_sees = "mean of uploads"

    @property
    def _published(self) -> bool:
        return self.variant == "as_published"

    @property
    def _travels(self) -> tuple[str, ...]:
        return ("body", "head") if self._published else ("body", "mean", "cov")

    def init(self, params, parts):
        """Draw means uniformly from [0, 1); the covariance is the identity. The head is trained
        `as_published` only.
        """
        weight = params[parts.head_weight]
        generator = torch.Generator().manual_seed(parts.seed)
        server = {
            "body": tree.select(params, parts.body),
            "head": tree.select(params, parts.head),
            "mean": torch.rand(weight.shape, generator=generator).to(weight.device),
            "cov": pack_symmetric(torch.eye(weight.shape[1], device=weight.device)),
        }
        return server, {"beta": torch.full((2,), 0.5, device=weight.device)}

    def before_training(self, server, client, net, shard):
        """Return the client's class frequencies."""
        return {"prior": self._prior(shard.data.y, server)}

    def download(self, server, client):
        """Return body and statistics (as published: body and head)."""
        head = (
            {} if self._published else {"head": Known(server["head"])}
        )  # of which the names matter
        return {**tree.select(server, self._travels), **head}

    def start(self, received, client):
        """Return the body under the global head with the client's prior."""
        return {
            **received["body"],
            **(received["head"] if self._published else self._head(received, client["prior"])),
        }

    def phases(self, server, client, params, epochs):
        """Train the body, and keep the features (as published: train everything)."""
        if self._published:
            return [Phase(epochs)]
        body = {name: name in server["body"] for name in params}
        return [Phase(epochs, body, loss=self._loss_and_features)]

    def _loss_and_features(self, server, client, net, params, batch):
        logits, features = net.features(params, batch.x)
        return batch.cross_entropy(logits), {"z": features.detach(), "y": batch.y}

    def after_training(self, server, client, net, params, shard, aux):
        """Return statistics of the features that training went through, mixed with the global ones."""
        if not aux:  # no step was made
            return {"mean": server["mean"], "cov": server["cov"], "beta": client["beta"]}
        mean, cov, beta = self._fit(
            aux["z"], aux["y"], client["prior"], server, client["beta"], least=1
        )
        return {"mean": mean.float(), "cov": pack_symmetric(cov).float(), "beta": beta.float()}

    def finish(self, server, client, start, params):
        """Return body and statistics (as published: body and head); the last beta stays."""
        trained = {part: tree.select(params, server[part]) for part in ("body", "head")}
        return tree.select({**client, **trained}, self._travels), {"beta": client["beta"]}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average what came."""
        return {**server, **tree.mean(uploads, weight)}, clients

    def before_evaluation(self, server, client, net, shard):
        """Return a head for the latest body, fitted to the features of the client's training data."""
        z = shard.features(net.still(), {**server["body"], **server["head"]})
        prior = self._prior(shard.data.y, server)
        mean, cov, _ = self._fit(
            z, shard.data.y, prior, server, client["beta"], least=self.folds + 1
        )
        return {"head": self._named(gaussian.lda_head(mean, cov, prior, self.eps), server)}

    def personal(self, server, client):
        """Return the latest body under the fitted head; where none was fitted, the global one with
        a uniform prior.
        """
        head = client.get("head") or self._head(
            server, torch.full_like(server["mean"][:, 0], 1 / len(server["mean"]))
        )
        return {**server["body"], **head}

    def _fit(self, z, y, prior, server, beta, least):
        """Return means `[classes, features]`, covariance and beta for a client's features `z`
        `[samples, features]`.

        least: samples that a class needs for a mean of its own. beta: where the search fails.
        """
        z, mean, cov = z.double(), server["mean"].double(), unpack_symmetric(server["cov"]).double()
        beta = self._search(z, y, prior.double(), mean, cov, beta.double())
        local = self._statistics(z, y, mean, least)
        return (
            beta[0] * local[0] + (1 - beta[0]) * mean,
            beta[1] * local[1] + (1 - beta[1]) * cov,
            beta,
        )

    def _search(self, z, y, prior, mean, cov, beta):
        """Return the weights `[2]` of local means and covariance with the least cross-validated
        loss; else `beta`.

        Classes with fewer samples than folds are left out; without any class the weights are zero.
        """
        enough = torch.bincount(y, minlength=len(prior))[y] >= self.folds
        z, y = z[enough], y[enough]
        if not len(y):
            return torch.zeros_like(beta)
        fold = gaussian.ranks_in_class(y) % self.folds
        try:
            trials = [self._trial(z, y, fold == k, prior, mean, cov) for k in range(self.folds)]
        except torch.linalg.LinAlgError:
            return beta
        best = gaussian.minimize_in_box(
            lambda weights: torch.stack([trial.loss(weights.expand(2)) for trial in trials]).sum(),
            size=1 if self.single_beta else 2,
            like=z,
        )
        return beta if best is None else best.expand(2)

    def _trial(self, z, y, held, prior, mean, cov):
        own_mean, own_cov = self._statistics(z[~held], y[~held], mean, least=1)
        local, shared = (
            (own_mean, gaussian.shrink_covariance(own_cov, self.eps)),
            (mean, gaussian.shrink_covariance(cov, self.eps)),
        )
        return gaussian.MixtureTrial.of(local, shared, z[held], y[held], prior)

    def _statistics(self, z, y, otherwise, least):
        mean = gaussian.class_means(z, y, otherwise, least)
        return mean, gaussian.estimate_covariance(z - mean[y], self.cov_reg)

    def _prior(self, y, server):
        return gaussian.class_frequencies(y, len(server["mean"]), self.eps)

    def _head(self, server, prior):
        mean, cov = server["mean"].double(), unpack_symmetric(server["cov"]).double()
        return self._named(gaussian.lda_head(mean, cov, prior, self.eps), server)

    @staticmethod
    def _named(head, server):
        return {name: value.float() for name, value in zip(server["head"], head, strict=True)}
