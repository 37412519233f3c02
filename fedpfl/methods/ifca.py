"""IFCA: several models; each client trains the one that fits its data best."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Count
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.by_name import top_layer_names
from fedpfl.methods.shared.method import Method, pick_row


@dataclass(frozen=True)
class IFCA(Method):
    """IFCA (Ghosh et al., NeurIPS 2020, arXiv:2006.04088): iterative federated clustering, by model
    averaging.

    The server holds k models th_1..th_k. A client of the cohort receives all, takes the one of
    least mean cross-entropy on its training samples (s_i; of equals the first), trains it, and
    sends it up with s_i. The server sets th_j to the mean over the clients with s_i = j, by
    samples; a model that no client took stays. For evaluation every client takes a model in the same
    way, by its training samples. With one cluster it is FedAvg.

    clusters: k. layers: how many, counted from the output, clusters have of their own; those below
        are averaged over the whole cohort (the paper's weight sharing). None: all. th_1 has the
        network's initial values. The other models begin with the same numbers, shuffled within each
        tensor: the initialiser's own draws. The official CIFAR10 code redraws
        until each model attracts many clients; without that one model may win all clients (the
        columns cluster_<j> have the shares).

    The official code departs from the paper: for MNIST and CIFAR10 a test client's model is chosen
    by its TEST loss, on CIFAR10 training clients choose by augmented images, and for FEMNIST the
    shared layers are pretrained and frozen. Here losses are those of samples without augmentation.
    The variant for the theory, which averages gradients over the whole cohort, is not offered.
    BatchNorm statistics belong to a model, as its parameters do, and are averaged with it; losses
    are those of evaluation mode, and one that is not finite never is the least.
    """

    clusters: Count = 2
    layers: Count | None = None

    server_sees = "each upload"

    def init(self, params, parts):
        """Shuffle the initial values for all models but the first."""
        names = params if self.layers is None else top_layer_names(parts, self.layers)
        initial_model = tree.select(params, names)
        models = [initial_model]
        for number in range(1, self.clusters):
            models.append(_shuffle_entries(initial_model, parts.seed, number))
        device = tree.leaves(params)[0].device
        server = {
            "shared": tree.drop(params, names),
            "models": tree.stack(models),
            "statistics": tree.to(tree.repeat(parts.statistics, self.clusters), device),
        }
        return server, {}

    def buffers(self):
        """Keep statistics out of the engine's average; they move with the clusters' models."""
        return {"main": "local"}

    def before_training(self, server, client, net, shard):
        """Return s_i, the number of the model of least loss, and that model's statistics."""
        losses = []
        for cluster in range(self.clusters):
            statistics = tree.take(server["statistics"], cluster)
            still = net.still({"main": statistics})
            loss = self._summed_loss(server, cluster, still, shard)
            losses.append(loss if math.isfinite(loss) else math.inf)
        best = losses.index(min(losses))  # of equals the first
        return {
            "cluster": torch.full((), best, device=shard.data.y.device),
            "statistics": {"main": tree.take(server["statistics"], best)},
        }

    # A client that is evaluated chooses by its training samples, too.
    before_evaluation = before_training

    def _summed_loss(self, server, cluster, net, shard):
        """Return the cross-entropy of a cluster's model, summed over the training samples."""
        model = {**server["shared"], **tree.take(server["models"], cluster)}
        sums = []
        with torch.no_grad():
            for batch in shard.data.chunks():
                logits = net(model, batch.x)
                sums.append(batch.losses(logits).double().sum())
        return float(sum(sums))

    def start(self, received, client):
        """Return the model of the client's cluster."""
        return {**received["shared"], **pick_row(received["models"], client["cluster"])}

    def finish(self, server, client, start, params):
        """Send the model up, and a flag for each cluster."""
        cluster = client["cluster"]
        is_member = torch.arange(self.clusters, device=cluster.device) == cluster
        upload = {
            "model": params,
            "member": is_member,
            "statistics": client["statistics"]["main"],
        }
        return upload, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average each cluster's models, and the shared entries over all clients."""
        models = []
        statistics = []
        for cluster, is_member in enumerate(uploads["member"].T):
            model = tree.take(server["models"], cluster)
            model_statistics = tree.take(server["statistics"], cluster)
            # ---- th_j: the mean over the clients with s_i = j. A model that no client took stays.
            rows = is_member.nonzero()[:, 0]
            if len(rows):
                # Over everybody the weights are as they are: dividing by their sum would round.
                share = weight
                if not is_member.all():
                    share = weight[rows] / weight[rows].sum()
                uploaded = tree.take(
                    tree.select(uploads["model"], model),
                    rows,
                )
                model = tree.mean(uploaded, share)
                uploaded_statistics = tree.take(uploads["statistics"], rows)
                model_statistics = tree.average_statistics(uploaded_statistics, share)
            models.append(model)
            statistics.append(model_statistics)

        # ---- Shared layers: the mean over the whole cohort.
        shared = {}
        if server["shared"]:
            shared = tree.mean(
                tree.select(uploads["model"], server["shared"]),
                weight,
            )
        server = {
            "shared": shared,
            "models": tree.stack(models),
            "statistics": tree.stack(statistics),
        }
        return server, clients

    def metrics(self, server, client):
        """Return the share of the cohort in each cluster."""
        shares = {}
        for number in range(self.clusters):
            shares[f"cluster_{number + 1}"] = (client["cluster"] == number).float()
        return shares


def _shuffle_entries(params: Tree, seed: int, number: int) -> Tree:
    """Return the entries of each tensor in another order, a function of seed and number."""
    generator = torch.Generator().manual_seed((1_000_003 * seed + number) % 2**63)

    def shuffle(leaf: Tensor) -> Tensor:
        order = torch.randperm(leaf.numel(), generator=generator)
        return leaf.reshape(-1)[order.to(leaf.device)].view_as(leaf)

    return tree.map(shuffle, params)
