"""IFCA: several models, of which each client trains and takes the one that fits its data best."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.by_name import top_layer_names
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class IFCA(Method):
    """IFCA (Ghosh et al., NeurIPS 2020, arXiv:2006.04088): iterative federated clustering, by model
    averaging.

    The server holds k models th_1..th_k. A client of the cohort receives all, takes the one of
    least mean cross-entropy on its training samples (s_i; of equals the first), trains it, and
    sends it up with s_i. The server sets th_j to the mean over the clients with s_i = j, by
    samples; a model that nobody took stays. For evaluation every client takes a model in the same
    way, by its training samples. With one cluster it is FedAvg.

    clusters: k. layers: how many, counted from the output, clusters have of their own; those below
        are averaged over the whole cohort (the paper's weight sharing). None: all. th_1 has the
        network's initial values. The other models begin with the same numbers, shuffled within each
        tensor: what the initialiser would draw, whatever it is. The official CIFAR10 code redraws
        until each model attracts many clients; without that one model may win all clients (the
        columns cluster_<j> have the shares).

    The official code departs from the paper: for MNIST and CIFAR10 a test client's model is chosen
    by its TEST loss, on CIFAR10 training clients choose by augmented images, and for FEMNIST the
    shared layers are pretrained and frozen. Here losses are those of samples without augmentation.
    The variant for the theory, which averages gradients over the whole cohort, is not offered.
    BatchNorm statistics belong to a model, as its parameters do, and are averaged with it; losses
    are those of evaluation mode, and one that is not finite never is the least.
    """

    clusters: Annotated[int, AtLeast(1)] = 2
    layers: Annotated[int, AtLeast(1)] | None = None

    server_sees = "each upload"

    def init(self, params, parts):
        """Shuffle the initial values for all models but the first."""
        names = params if self.layers is None else top_layer_names(parts, self.layers)
        first, shared = tree.select(params, names), tree.drop(params, names)
        models = tree.stack(
            [first, *(_shuffled(first, parts.seed, j) for j in range(1, self.clusters))]
        )
        statistics = tree.to(
            tree.repeat(parts.statistics, self.clusters), tree.leaves(params)[0].device
        )
        return {"shared": shared, "models": models, "statistics": statistics}, {}

    def buffers(self):
        """Move statistics with the models, by the method's own hands."""
        return {"main": "local"}

    def before_training(self, server, client, net, shard):
        """Return s_i, and the statistics of that model."""
        losses = []
        for j in range(self.clusters):
            still = net.still({"main": tree.take(server["statistics"], j)})
            model = self._model(server, torch.tensor(j))
            with torch.no_grad():
                sums = [
                    batch.losses(still(model, batch.x)).double().sum()
                    for batch in shard.data.chunks()
                ]
            losses.append(float(sum(sums)))
        chosen = min(
            range(self.clusters), key=lambda j: losses[j] if math.isfinite(losses[j]) else math.inf
        )
        statistics = {"main": tree.take(server["statistics"], chosen)}
        return {
            "cluster": torch.full((), chosen, device=shard.data.y.device),
            "statistics": statistics,
        }

    def before_evaluation(self, server, client, net, shard):
        """Do the same."""
        return self.before_training(server, client, net, shard)

    def start(self, received, client):
        """Return the model of the client's cluster."""
        return self._model(received, client["cluster"])

    def finish(self, server, client, start, params):
        """Send the model up, and a flag for each cluster."""
        member = torch.arange(self.clusters, device=client["cluster"].device) == client["cluster"]
        return {
            "model": params,
            "member": member,
            "statistics": client["statistics"]["main"],
        }, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average each cluster's models, and over all clients what is shared."""
        models, statistics = [], []
        for j, member in enumerate(uploads["member"].T):
            own, counts = (tree.take(server[part], j) for part in ("models", "statistics"))
            rows = member.nonzero()[:, 0]
            if len(rows):
                share = weight if member.all() else weight[rows] / weight[rows].sum()
                own = tree.mean(tree.take(tree.select(uploads["model"], own), rows), share)
                counts = tree.average_statistics(tree.take(uploads["statistics"], rows), share)
            models.append(own)
            statistics.append(counts)
        shared = (
            tree.mean(tree.select(uploads["model"], server["shared"]), weight)
            if server["shared"]
            else {}
        )
        return {
            "shared": shared,
            "models": tree.stack(models),
            "statistics": tree.stack(statistics),
        }, clients

    def metrics(self, server, client):
        """Return the share of the cohort in each cluster."""
        return {f"cluster_{j + 1}": (client["cluster"] == j).float() for j in range(self.clusters)}

    @staticmethod
    def _model(server: Tree, cluster: Tensor) -> Tree:
        """Return the network with a cluster's layers."""

        def pick(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, cluster.to(leaf.device).view(1)).squeeze(0)

        return {**server["shared"], **tree.map(pick, server["models"])}


def _shuffled(params: Tree, seed: int, number: int) -> Tree:
    """Return the entries of each tensor in another order, a function of seed and number."""
    generator = torch.Generator().manual_seed((1_000_003 * seed + number) % 2**63)

    def shuffle(leaf: Tensor) -> Tensor:
        order = torch.randperm(leaf.numel(), generator=generator)
        return leaf.reshape(-1)[order.to(leaf.device)].view_as(leaf)

    return tree.map(shuffle, params)
