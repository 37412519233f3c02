"""pFedFDA: one feature extractor, and a generative classifier fitted by each client."""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, AtLeast, Below, NonNegative
from fedpfl.ground.tree import Known
from fedpfl.methods.shared import gaussian
from fedpfl.methods.shared.by_name import train_only
from fedpfl.methods.shared.gaussian import pack_symmetric, unpack_symmetric
from fedpfl.methods.shared.method import Method, Phase


class Features(NamedTuple):
    """A client's features `z` `[samples, features]`, labels `y` and class shares `prior`."""

    z: Tensor
    y: Tensor
    prior: Tensor


@dataclass(frozen=True)
class PFedFDA(Method):
    """pFedFDA (McLaughlin and Su, NeurIPS 2024, arXiv:2411.00329, Algorithm 1).

    Features of class c are taken as Gaussian with mean mu_c and a covariance Sigma common to all
    classes, so the best
    head is linear discriminant analysis: W = Sigma^-1 mu, bias = -mu Sigma^-1 mu / 2 + log prior.
    Clients train the body under the global head with their own prior, estimate mu and Sigma from
    the features seen on the way, and mix them with the global ones by the two weights beta with the least
    cross-validated loss. They are evaluated, whether sampled or not, by such a head fitted
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
    cov_reg: NonNegative = 1.0
    variant: Literal["paper", "as_published"] = "paper"

    needs_classes = "it models features by class"
    server_sees = "mean of uploads"

    @property
    def _published(self) -> bool:
        """Whether this is what FL-bench ran: FedAvg, and another head for evaluation."""
        return self.variant == "as_published"

    @property
    def _travels(self) -> tuple[str, ...]:
        """Return the server's parts that go down and up."""
        return ("body", "head") if self._published else ("body", "mean", "cov")

    def init(self, params, parts):
        """Draw means uniformly from [0, 1); the covariance is the identity.

        The head is trained `as_published` only.
        """
        parts.require_linear_end()
        weight = params[parts.head_weight]
        if len(parts.head) != 2:
            raise FedpflError(
                "the method works out the weight and the bias of the head, and this network's "
                f"head, {parts.head_layer}, has no bias; give it one, or use another method"
            )
        generator = torch.Generator().manual_seed(parts.seed)
        server = {
            "body": tree.select(params, parts.body),
            "head": tree.select(params, parts.head),
            "mean": torch.rand(weight.shape, generator=generator).to(weight),
            "cov": pack_symmetric(torch.eye(weight.shape[1]).to(weight)),
        }
        return server, {"beta": torch.full((2,), 0.5, device=weight.device)}

    def before_training(self, server, client, net, shard):
        """Return the client's class frequencies."""
        return {"prior": self._class_prior(shard.data.y, server)}

    def download(self, server, client):
        """Return body and statistics (as published: body and head)."""
        download = tree.select(server, self._travels)
        if not self._published:
            # The head is worked out from the statistics; only the names of its entries matter.
            download["head"] = Known(server["head"])
        return download

    def start(self, received, client):
        """Return the body under the global head with the client's prior."""
        if self._published:
            head = received["head"]
        else:
            head = self._global_head(received, client["prior"])
        return {**received["body"], **head}

    def phases(self, server, client, params, epochs):
        """Train the body, and keep the features (as published: train everything)."""
        if self._published:
            return [Phase(epochs)]
        body = train_only(params, server["body"])
        return [Phase(epochs, body, loss=self._loss_and_features)]

    def _loss_and_features(self, server, client, net, params, batch):
        """Return the cross-entropy, and beside it the features that training goes through."""
        logits, features = net.features(params, batch.x)
        return batch.loss(logits), {"z": features.detach(), "y": batch.y}

    def after_training(self, server, client, net, params, shard, aux):
        """Return statistics of the features met in training, mixed with the global ones."""
        if not aux:  # no step was made
            return {"mean": server["mean"], "cov": server["cov"], "beta": client["beta"]}
        samples = Features(z=aux["z"], y=aux["y"], prior=client["prior"])
        mean, cov, beta = self._fit_statistics(
            samples,
            server,
            client["beta"],
            min_samples=1,
        )
        return {
            "mean": mean.to(server["mean"]),
            "cov": pack_symmetric(cov).to(server["cov"]),
            "beta": beta.float(),
        }

    def finish(self, server, client, start, params):
        """Return body and statistics (as published: body and head); the last beta stays."""
        trained = {part: tree.select(params, server[part]) for part in ("body", "head")}
        upload = tree.select({**client, **trained}, self._travels)
        return upload, {"beta": client["beta"]}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average bodies and statistics (as published: bodies and heads)."""
        return {**server, **tree.mean(uploads, weight)}, clients

    def before_evaluation(self, server, client, net, shard):
        """Return a head for the latest body, fitted to the client's training features."""
        z = shard.features(
            net.still(),
            {**server["body"], **server["head"]},
        )
        prior = self._class_prior(shard.data.y, server)
        samples = Features(z=z, y=shard.data.y, prior=prior)
        # Here a class of few samples has the global mean.
        min_samples = self.folds + 1
        mean, cov, _ = self._fit_statistics(
            samples,
            server,
            client["beta"],
            min_samples,
        )
        return {"head": self._lda_parameters(mean, cov, prior, server)}

    def personal(self, server, client):
        """Return the latest body under the fitted head.

        Where none was fitted, the head is the global one with a uniform prior.
        """
        head = client.get("head")
        if not head:
            classes = len(server["mean"])
            uniform = torch.full_like(server["mean"][:, 0], 1 / classes)
            head = self._global_head(server, uniform)
        return {**server["body"], **head}

    def _fit_statistics(self, samples, server, beta, min_samples):
        """Return means `[classes, features]`, covariance and beta for a client's features.

        Args:
            samples: the client's Features.
            server: the server state.
            beta: the weights where the search fails.
            min_samples: samples that a class needs for a separate mean.
        """
        # ---- Linear algebra is in float64.
        samples = samples._replace(z=samples.z.double(), prior=samples.prior.double())
        global_mean = server["mean"].double()
        global_cov = unpack_symmetric(server["cov"]).double()
        shared = (global_mean, global_cov)

        # ---- mu <- beta_1 local + (1 - beta_1) global, and Sigma with beta_2.
        beta = self._search_beta(samples, shared, beta.double())
        local_mean, local_cov = self._local_statistics(
            samples.z, samples.y, global_mean, min_samples
        )
        mean = beta[0] * local_mean + (1 - beta[0]) * global_mean
        cov = beta[1] * local_cov + (1 - beta[1]) * global_cov
        return mean, cov, beta

    def _search_beta(self, samples, shared, beta):
        """Return the weights `[2]` of local statistics with the least cross-validated loss.

        Where the search fails it is `beta`. Classes with fewer samples than folds are left out;
        without any class the weights are zero.
        """
        # ---- Folds: samples of each class are dealt in turn, so that all folds have all classes.
        z, y, prior = samples
        has_enough = torch.bincount(y, minlength=len(prior))[y] >= self.folds
        samples = Features(z=z[has_enough], y=y[has_enough], prior=prior)
        if not len(samples.y):
            return torch.zeros_like(beta)
        fold = gaussian.ranks_in_class(samples.y) % self.folds
        try:
            trials = [self._prepare_trial(samples, fold == k, shared) for k in range(self.folds)]
        except torch.linalg.LinAlgError:
            return beta

        # ---- The weights of least loss over all folds, each judged by the other folds' statistics.
        def total_loss(weights):
            # With single_beta one number is both weights.
            pair = weights.expand(2)
            return torch.stack([trial.loss(pair) for trial in trials]).sum()

        size = 1 if self.single_beta else 2
        best = gaussian.minimize_in_box(total_loss, size=size, like=samples.z)
        return beta if best is None else best.expand(2)

    def _prepare_trial(self, samples, is_validation, shared):
        """Return one fold of the cross-validation: statistics of the other folds, and its samples."""
        z, y, prior = samples
        global_mean, global_cov = shared
        local_mean, local_cov = self._local_statistics(
            z[~is_validation], y[~is_validation], global_mean, min_samples=1
        )
        return gaussian.MixtureTrial.prepare(
            local=(local_mean, gaussian.shrink_covariance(local_cov, self.eps)),
            shared=(global_mean, gaussian.shrink_covariance(global_cov, self.eps)),
            z=z[is_validation],
            y=y[is_validation],
            prior=prior,
        )

    def _local_statistics(self, z, y, fallback, min_samples):
        """Return class means and covariance of features; rare classes have the fallback's mean."""
        mean = gaussian.class_means(z, y, fallback, min_samples)
        cov = gaussian.estimate_covariance(z - mean[y], self.cov_reg)
        return mean, cov

    def _class_prior(self, y, server):
        """Return the frequencies of the classes among labels."""
        return gaussian.class_frequencies(y, len(server["mean"]), self.eps)

    def _global_head(self, server, prior):
        """Return the head of the global statistics under a prior."""
        mean = server["mean"].double()
        cov = unpack_symmetric(server["cov"]).double()
        return self._lda_parameters(mean, cov, prior, server)

    def _lda_parameters(self, mean, cov, prior, server):
        """Return weight and bias of discriminant analysis under the names of the head's entries."""
        weight_and_bias = gaussian.lda_head(mean, cov, prior, self.eps)
        head = {}
        for (name, leaf), value in zip(server["head"].items(), weight_and_bias, strict=True):
            head[name] = value.to(leaf)
        return head
