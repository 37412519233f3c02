"""CFL: clusters of clients, each with its model, split where their members want to go apart."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Count, NonNegative, Proportion, WholeNumber
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import Method, flag, pick_row


@dataclass(frozen=True)
class CFL(Method):
    """CFL (Sattler, Mueller and Samek, IEEE TNNLS 2021, arXiv:1910.01991).

    Recursive bipartition of the clients. All clients begin in one cluster c; its model th_c they
    train by FedAvg among themselves; d_i = th_i - th_c. Where |sum_i a_i d_i| < eps1 (a_i:
    shares of samples) but max_i |d_i| > eps2, c splits: into the two groups that minimise the largest
    cosine between members of different ones, alpha_cross, provided that gamma <
    sqrt((1 - alpha_cross) / 2). That is single linkage. Both groups begin with th_c, to which
    their own mean of d_i is added in the same round.

    eps1, eps2: lengths, which belong to a network, step size and number of epochs: eps1 a tenth or
        so of the largest early |d_i|, eps2 from eps1 to ten times it. eps1=0 is FedAvg. The column
        `clusters` tells whether any split.
    warmup: rounds before the first split. gamma: bound on the clients' relative gradient noise; 0
    in all public code.
    linkage: `single`, the paper's optimum, or `complete`, as in all public code.
    clusters: how many the server has room for; then none splits. One of two clients never does, as
    in all public code.

    A cluster splits only in rounds in which all its members train: cosines of updates from
    different models mean nothing. The official code uses updates again of clients that were not
    drawn, FL-bench splits those by ties. In the official code, FL-bench and the baseline of kNN-Per
    the second split takes places within a cluster for numbers of clients, so that some belong to
    two clusters and some to none; means are uniform; the official notebook judges each client by
    the best of its clusters' ancestors on its evaluation split. None of this is here. A newcomer is
    judged by the model as it was before the first split, the root of the paper's tree of models.
    BatchNorm statistics stay with the client, as in the official code, or (statistics=aggregate)
    are averaged over all clusters; cosines and lengths are those of parameters.
    """

    eps1: NonNegative = 0.4
    eps2: NonNegative = 1.6
    warmup: WholeNumber = 20
    gamma: Proportion = 0.0
    linkage: Literal["single", "complete"] = "single"
    clusters: Count = 8

    server_sees = "each upload"

    def init(self, params, parts):
        """Put all clients into cluster 0, and newcomers into one after the last.

        Newcomers stand last in `cluster_of`.
        """
        cluster_of = flag(params).long().repeat(parts.clients + 1)
        cluster_of[-1] = self.clusters
        server = {
            # Clusters to come have the initial model: the form of a state never changes.
            "models": tree.repeat(params, self.clusters + 1),
            "cluster_of": cluster_of,
            "count": torch.ones_like(cluster_of[0]),
            "played": torch.zeros_like(cluster_of[0]),
        }
        return server, {}

    def buffers(self):
        """Keep BatchNorm statistics with the client."""
        return {"main": self.statistics or "local"}

    def download(self, server, client):
        """Return the model of the client's cluster."""
        cluster_of = server["cluster_of"]
        number = client["number"].clamp(max=len(cluster_of) - 1)  # newcomers stand last
        return pick_row(server["models"], pick_row(cluster_of, number))

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average within clusters, those included that have just split off."""
        numbers = clients["number"]
        cluster_of = server["cluster_of"].clone()
        cluster_count = int(server["count"])
        played = int(server["played"])
        has_split = cluster_count > 1
        models = [tree.take(server["models"], cluster) for cluster in range(self.clusters + 1)]
        for cluster in range(cluster_count):
            rows = (cluster_of[numbers] == cluster).nonzero()[:, 0]
            if not len(rows):
                continue
            parent = models[cluster]
            if not has_split:
                # Newcomers are judged by the model from before the first split.
                models[-1] = _mean_of_rows(uploads, weight, rows)

            # ---- Split: only where all members trained, and while there is room.
            member_count = int((cluster_of[:-1] == cluster).sum())
            may_split = played >= self.warmup and cluster_count < self.clusters
            if len(rows) == member_count and may_split:
                leaves = self._leaving_members(
                    parent,
                    tree.take(uploads, rows),
                    weight[rows],
                )
                if leaves.any():
                    leaving_rows = rows[leaves]
                    models[cluster_count] = _mean_of_rows(uploads, weight, leaving_rows)
                    cluster_of[numbers[leaving_rows]] = cluster_count
                    rows = rows[~leaves]
                    cluster_count += 1

            # ---- Average over the members that stay.
            models[cluster] = _mean_of_rows(uploads, weight, rows)
        server = {
            "models": tree.stack(models),
            "cluster_of": cluster_of,
            "count": torch.full_like(cluster_of[0], cluster_count),
            "played": torch.full_like(cluster_of[0], played + 1),
        }
        return server, clients

    def _leaving_members(self, parent: Tree, models: Tree, weight: Tensor) -> Tensor:
        """Return the members that leave a cluster, bool `[members]`.

        None does where the cluster does not split.
        """
        # ---- Lengths of the changes d_i and of their mean, from their inner products.
        # Uncorrected float32 sums of squares would lose small angles between long changes.
        changes = tree.map(
            lambda leaf, old: tree.as_matrix(leaf - old).double(),
            models,
            parent,
        )
        products = sum(d @ d.T for d in tree.leaves(changes))
        share = (weight / weight.sum()).double()
        lengths = products.diagonal().sqrt()
        mean_length = (share @ products @ share).clamp(min=0).sqrt()  # |sum_i a_i d_i|

        # ---- Split only if the mean is short, and some change long.
        nobody = torch.zeros(
            len(lengths),
            dtype=torch.bool,
            device=lengths.device,
        )
        is_stationary = mean_length < self.eps1
        if len(lengths) <= 2 or not is_stationary or not lengths.max() > self.eps2:
            return nobody

        # ---- Bipartition; alpha_cross is the largest cosine between members of both groups.
        cosines = products / (lengths[:, None] * lengths).clamp(min=1e-12)
        leaves = bipartition_clients(cosines.cpu(), self.linkage).to(lengths.device)
        alpha_cross = cosines[leaves][:, ~leaves].max()
        bound = ((1 - alpha_cross) / 2).clamp(min=0).sqrt()
        return leaves if self.gamma < bound else nobody

    def metrics(self, server, client):
        """Return the number of clusters."""
        return {"clusters": server["count"].float()}


def bipartition_clients(cosines: Tensor, linkage: str) -> Tensor:
    """Split the rows of `cosines` `[n, n]` into two groups; True: the second.

    The answer is bool `[n]`; row 0 is in the first group.
    """
    from scipy.cluster import hierarchy  # takes a while to import

    rows, columns = torch.triu_indices(
        len(cosines),
        len(cosines),
        offset=1,
    )
    distances = (1 - cosines[rows, columns]).clamp(min=0)  # of each pair, as scipy wants them
    merges = hierarchy.linkage(distances.numpy(), linkage)
    labels = torch.from_numpy(hierarchy.cut_tree(merges, 2)[:, 0])
    return labels != labels[0]


def _mean_of_rows(models: Tree, weight: Tensor, rows: Tensor) -> Tree:
    """Return the mean over these rows."""
    if len(rows) == len(weight):
        share = weight  # as it is: dividing by its sum would round
    else:
        share = weight[rows] / weight[rows].sum()
    return tree.mean(tree.take(models, rows), share)
