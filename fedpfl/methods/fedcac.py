"""FedCAC: the entries that changed most for their size are averaged over those clients alone that
are alike.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast, Between
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.critical import collaboration_mask, mask_overlaps, select_highest
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class FedCAC(Method):
    """FedCAC (Wu et al., ICCV 2023, arXiv:2309.11103).

    After training, the entries of a tensor with the highest scores |(theta - theta_start) theta|
    are critical: the mask m_i of the client, which goes up with the whole model, a bit per entry.
    O_ij = 1 - |m_i - m_j| / (2 |m_i|) says how alike two clients are (0 where m_i is empty). In
    round t client i collaborates with those j for whom O_ij reaches O_avg + t / beta (O_max -
    O_avg), mean and maximum over all ordered pairs; after round beta, with nobody, unless all
    overlaps are equal. Its next critical entries are the plain mean over itself and its
    collaborators, the others come from the server's mean by samples. With a part of the clients in
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

    tau: Annotated[float, Between(0, 1)] = 0.5
    beta: Annotated[int, AtLeast(1)] = 100
    cutoff: Annotated[float, AtLeast(0)] | Literal[-1] = 1e-10

    def buffers(self):
        """Keep the statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Make nothing critical."""
        shared, device = self._shared(params, parts), tree.leaves(params)[0].device
        zero = torch.zeros((), dtype=torch.int64, device=device)
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
        """Return everything; to a client without collaborators, what was not critical."""
        return Agreed(server["model"], tree.invert(self._alone(client)))

    def _alone(self, client):
        """Select the critical entries of a client without collaborators: its own values stand,
        nothing comes down.
        """
        return tree.map(lambda leaf: leaf & (client["partners"] == 0), client["mask"])

    def start(self, received, client):
        """Return the reply where the client was critical, the mean elsewhere; what does not travel
        is its own.
        """
        return {**client["model"], **tree.where(client["mask"], client["own"], received)}

    def finish(self, server, client, start, params):
        """Return the shared tensors and what is critical in them."""
        mask = self._critical(client, start, params)
        own = tree.select(params, mask)
        return {"model": own, "mask": mask}, {**client, "model": params, "own": own, "mask": mask}

    def _critical(self, client, start, end):
        names = client["mask"]
        scores = self._scores(client, tree.select(start, names), tree.select(end, names))
        return tree.map(lambda leaf: select_highest(leaf, self.tau, self.cutoff), scores)

    def _scores(self, client: dict[str, Tree], start: Tree, end: Tree) -> Tree:
        """Return how critical each entry is."""
        return tree.map(lambda old, new: ((new - old) * new).abs(), start, end)

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average over everybody, and for each client over itself and its collaborators."""
        models, played = tree.unmask_received(uploads["model"]), server["round"] + 1
        together = collaboration_mask(mask_overlaps(clients["mask"]), int(played), self.beta)
        members = together.sum(1)
        own = tree.stack([tree.mean(models, share) for share in together / members.unsqueeze(1)])
        server = {"model": tree.mean(models, weight), "round": played}
        return server, {**clients, "own": own, "partners": members - 1}

    def personal(self, server, client):
        """Return the model as it was after the client's last training."""
        return client["model"]

    def masks(self, server, client):
        """Return the critical entries."""
        return client["mask"]

    def metrics(self, server, client):
        """Return the share of critical entries and the number of collaborators after the last
        participation.
        """
        return {
            "critical_share": tree.ravel(client["mask"]).double().mean(),
            "collaborators": client["partners"],
        }
