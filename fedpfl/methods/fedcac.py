"""FedCAC: critical entries are averaged over clients with similar critical entries."""

from dataclasses import dataclass
from typing import Literal

from fedpfl.ground import tree
from fedpfl.ground.ranges import Count, NonNegative, Proportion
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.critical import collaboration_mask, mask_overlaps, select_highest
from fedpfl.methods.shared.method import Method, flag


@dataclass(frozen=True)
class FedCAC(Method):
    """FedCAC (Wu et al., ICCV 2023, arXiv:2309.11103).

    After training, the entries of a tensor with the highest scores |(theta - theta_start) theta|
    are critical: the mask m_i of the client, which goes up with the whole model, a bit per entry.
    O_ij = 1 - |m_i - m_j| / (2 |m_i|) says how alike two clients are (0 where m_i is empty). In
    round t client i collaborates with those j for whom O_ij reaches O_avg + t / beta (O_max -
    O_avg), mean and maximum over all ordered pairs; after round beta, with no client, unless all
    overlaps are equal. Its next critical entries are the plain mean over itself and its
    collaborators, the rest come from the server's mean by samples. With a part of the clients in
    a round, the pairs are those of its cohort, and a client that returns takes the latest mean
    where it is not critical. A client is evaluated by its model right after local training; one
    that was never sampled, by the initial model.

    tau: share of the critical entries, floor(tau n) of the n of a tensor; 0 is FedAvg.
    beta: the round until which there are collaborators.
    cutoff: scores up to it are as good as zero: not critical, as long as the tensor has higher
        ones; -1: off. The code has a second constant (1e-20) beside it, with which masks can exceed
        tau; here it is the same. Defaults of the paper for CIFAR10. BatchNorm statistics stay with
        the client.
    """

    tau: Proportion = 0.5
    beta: Count = 100
    cutoff: NonNegative | Literal[-1] = 1e-10

    def buffers(self):
        """Keep the statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Make nothing critical."""
        shared = self._shared(params, parts)
        zero = flag(params).long()
        client = {
            "model": params,
            "own": shared,
            "mask": tree.full_like(shared, False),
            "partners": zero,
        }
        return {"model": shared, "round": zero}, client

    def _shared(self, params, parts):
        """Return the tensors that travel and are scored."""
        return params

    def download(self, server, client):
        """Return everything; without collaborators, the entries that were not critical."""
        # Both sides have the mask from the last upload, so that none travels.
        return Agreed(
            server["model"],
            tree.invert(self._uncovered(client)),
        )

    def _uncovered(self, client):
        """Select the critical entries of a client without collaborators.

        Its own values stand there, and nothing comes down.
        """
        is_alone = client["partners"] == 0
        return tree.map(lambda leaf: leaf & is_alone, client["mask"])

    def start(self, received, client):
        """Return the collaborators' mean where the client was critical, the server's elsewhere.

        What does not travel is the client's own.
        """
        shared = tree.where(client["mask"], client["own"], received)
        return {**client["model"], **shared}

    def finish(self, server, client, start, params):
        """Return the shared tensors and their critical entries."""
        mask = self._critical_mask(client, start, params)
        shared = tree.select(params, mask)
        upload = {"model": shared, "mask": mask}
        return upload, {**client, "model": params, "own": shared, "mask": mask}

    def _critical_mask(self, client, start, params):
        """Select the entries of each shared tensor with the highest scores."""
        names = client["mask"]
        before = tree.select(start, names)
        after = tree.select(params, names)
        scores = self._scores(client, before, after)
        return tree.map(
            lambda leaf: select_highest(leaf, self.tau, self.cutoff),
            scores,
        )

    def _scores(self, client: dict[str, Tree], start: Tree, params: Tree) -> Tree:
        """Score each entry: |(theta - theta_start) theta|."""
        return tree.map(
            lambda before, after: ((after - before) * after).abs(),
            start,
            params,
        )

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average over everybody, and for each client over itself and its collaborators."""
        models = tree.unmask_received(uploads["model"])
        played = server["round"] + 1

        # ---- Who collaborates with whom: O_ij above the round's threshold.
        overlap = mask_overlaps(clients["mask"])
        collaborates = collaboration_mask(overlap, int(played), self.beta)
        members = collaborates.sum(1)

        # ---- The server's mean by samples, and each client's plain mean over its members.
        # No row is empty: a client always belongs to its group.
        shares = collaborates / members.unsqueeze(1)
        means = tree.stack([tree.mean(models, share) for share in shares])
        server = {"model": tree.mean(models, weight), "round": played}
        return server, {**clients, "own": means, "partners": members - 1}

    def personal(self, server, client):
        """Return the model as it was after the client's last training."""
        return client["model"]

    def masks(self, server, client):
        """Return the critical entries."""
        return client["mask"]

    def metrics(self, server, client):
        """Return the share of critical entries and the number of collaborators.

        Both are those after the last participation.
        """
        return {
            "critical_share": tree.ravel(client["mask"]).double().mean(),
            "collaborators": client["partners"],
        }
