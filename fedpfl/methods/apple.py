"""APPLE: each client learns how much of every client's core model belongs into its own model."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import Above, AtLeast
from fedpfl.ground.tree import Agreed, Known, Tree
from fedpfl.methods.shared.method import Method, Turn, flag


@dataclass(frozen=True)
class APPLE(Method):
    """APPLE (Luo and Wu, IJCAI 2022, arXiv:2110.08394): adaptive personalised cross-silo federated
    learning.

    Client i keeps a core model w_i and numbers p_i, its directed relationships to all K clients,
    without constraint. Its model is v_i = sum_j p_ij w_j. It is sent the other cores, which hold
    still while it trains w_i and p_i on CE(v_i) + lambda(r) mu / 2 |p_i - p0|^2, p0_j = n_j / n,
    and sends w_i up. p_i begins as p0, which the server learns of once, before the first round.
    With g the gradient at v_i, w_i moves along p_ii g, and p_ij along <g, w_j>. After r rounds
    lambda is (cos(pi r / L) + 1) / 2 (`cosine`) or 0.001^(r / L) (`exponential`), and 0 from L on,
    L being the share `until` of the run's rounds.

    rate: step size of p_i over that of w_i, which is local.lr (the official code: 0.001 / 0.01, and
        local.momentum=0.9; its penalty lacks the 1/2, so that its mu of 0.1 is 0.2 here). Weight
        decay pulls p_i to where the round began. Cross-silo: the paper has all clients take part
        (participation=1), and each receives K - 1 models; cores of clients that are not drawn are
        mixed as they are. The official limit on downloads is not offered. All cores begin as the
        network's initial model, those of the official code as different ones, whose mean is a
        shrunken network. v_i moves by p_ii^2 of a step: tune local.lr. Clients are evaluated by v_i
        with the latest cores, newcomers by p0. PFLlib uploads v_i in place of w_i, a client sees
        the cores of those that trained before it in the same round, <g, w_j> is a mean of means,
        and p_i = 1 / K never moves. BatchNorm statistics stay with the client.
    """

    rate: Annotated[float, AtLeast(0)] = 0.1
    mu: Annotated[float, AtLeast(0)] = 0.2
    schedule: Literal["exponential", "cosine"] = "exponential"
    until: Annotated[float, Above(0)] = 0.1

    server_sees = "each upload"

    def init(self, params, parts):
        """Begin with equal cores, and with equal shares, until the clients' numbers of samples are
        known.
        """
        clients, some = max(1, parts.clients), tree.leaves(params)[0]
        shares, played = (
            some.new_full((clients,), 1 / clients),
            some.new_zeros((), dtype=torch.int64),
        )
        known = {
            "counted": flag(params),
            "played": played,
            "end": some.new_full((), self.until * parts.rounds),
        }
        cores = tree.map(lambda leaf: leaf.expand(clients, *leaf.shape), params)
        return {"cores": cores, "shares": shares, **known}, {"p": shares}

    def buffers(self):
        """Keep BatchNorm statistics with the client."""
        return {"main": "local"}

    def turns(self, played, cohort, clients, generator):
        """Count all clients' samples before the first round."""
        counting = (
            [] if played else [Turn(list(range(clients)), survey=self._counted, trains=False)]
        )
        return [*counting, Turn(cohort)]

    def _counted(self, server, clients, uploads):
        shares = uploads["samples"] / uploads["samples"].sum()
        return {**server, "shares": shares, "counted": ~server["counted"]}, clients

    def before_training(self, server, client, net, shard):
        """Return the number of training samples."""
        return {"samples": torch.full((), float(len(shard.data.y)), device=shard.data.y.device)}

    def prepare(self, server, client):
        """Begin with p0."""
        return {**client, "p": torch.where(client["participated"], client["p"], server["shares"])}

    def download(self, server, client):
        """Return the other clients' cores, but not for the counting; its own core and p0 the client
        has.
        """
        numbers = torch.arange(len(client["p"]) - 1, device=client["p"].device)
        numbers = numbers + (numbers >= client["number"])
        others = tree.map(lambda leaf: leaf.index_select(0, numbers), server["cores"])
        own = tree.map(
            lambda leaf: leaf.index_select(0, client["number"].view(1)).squeeze(0), server["cores"]
        )
        return {
            "others": _unless_counting(server, others),
            "own": Known(own),
            "p0": Known(server["shares"]),
        }

    def start(self, received, client):
        """Return the client's core, and how far p_i has come since the round began, in steps of
        local.lr.
        """
        return {"core": received["own"], "moved": torch.zeros_like(client["p"])}

    def loss(self, server, client, net, params, batch):
        """Add the penalty to the cross-entropy of v_i."""
        r, end = server["played"], server["end"]
        falling = (
            (torch.cos(torch.pi * r / end) + 1) / 2
            if self.schedule == "cosine"
            else 0.001 ** (r / end)
        )
        apart = (self._p(client, params) - server["shares"]).square().sum()
        penalty = torch.where(r < end, falling, 0.0) * self.mu / 2 * apart
        return batch.cross_entropy(net(self.evaluated(server, client, params), batch.x)) + penalty

    def _p(self, client: Tree, params: Tree) -> Tensor:
        """Return p_i: a step of local.lr on `moved` is one of rate * local.lr on it, momentum and
        all.
        """
        return client["p"] + self.rate**0.5 * params["moved"]

    def evaluated(self, server, client, params):
        """Return v_i, with the trained core for the client's own."""
        p = self._p(client, params)
        own = torch.arange(len(p), device=p.device) == client["number"]
        mine, theirs = torch.where(own, p, 0.0).sum(), torch.where(own, 0.0, p)
        return tree.map(
            lambda w, all: mine * w + torch.tensordot(theirs, all, 1),
            params["core"],
            server["cores"],
        )

    def finish(self, server, client, start, params):
        """Send the core up, or the number of samples; keep p_i."""
        upload = {"core": _unless_counting(server, params["core"]), "samples": client["samples"]}
        return upload, {"p": self._p(client, params)}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Store the cores; nothing is averaged."""
        places, new = clients["number"], uploads["core"].values
        cores = tree.map(lambda leaf, own: leaf.index_copy(0, places, own), server["cores"], new)
        return {**server, "cores": cores, "played": server["played"] + 1}, clients

    def personal(self, server, client):
        """Return v_i of the latest cores."""
        p = self.prepare(server, client)["p"]
        return tree.map(lambda all: torch.tensordot(p, all, 1), server["cores"])


def _unless_counting(server: Tree, sent: Tree) -> Agreed:
    """Return what is sent in a round, but not where the server asks for numbers of samples alone."""
    return Agreed(sent, tree.map(lambda leaf: server["counted"].expand(leaf.shape), sent))
