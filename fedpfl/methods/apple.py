"""APPLE: each client learns how much of every client's core model belongs into its own model."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, Positive
from fedpfl.ground.tree import Known, Tree
from fedpfl.methods.shared.method import Method, Turn, flag, pick_row, send_if


@dataclass(frozen=True)
class APPLE(Method):
    """APPLE (Luo and Wu, IJCAI 2022, arXiv:2110.08394), for cross-silo federated learning.

    Client i keeps a core model w_i and numbers p_i, its directed relationships to all K clients,
    without constraint. Its model is v_i = sum_j p_ij w_j. It is sent the other cores, which
    hold still while it trains w_i and p_i on CE(v_i) + lambda(r) mu / 2 |p_i - p0|^2, p0_j =
    n_j / n, and sends w_i up. p_i begins as p0, which the server learns of once, before the
    first round. With g the gradient at v_i, w_i moves along p_ii g, and p_ij along <g, w_j>.
    After r rounds lambda is (cos(pi r / L) + 1) / 2 (`cosine`) or 0.001^(r / L)
    (`exponential`), and 0 from L on, L being the share `until` of the run's rounds.

    rate: step size of p_i over that of w_i, which is local.lr (the official code: 0.001 / 0.01, and
        local.momentum=0.9; its penalty lacks the 1/2, so that its mu of 0.1 is 0.2 here). Weight
        decay pulls p_i to where the round began. Cross-silo: the paper has all clients take part
        (participation=1), and each receives K - 1 models; cores of clients that are not drawn are
        mixed as they are. The official limit on downloads is not offered. All cores begin as the
        network's initial model, those of the official code as different ones, with a mean that is a
        shrunken network. v_i moves by p_ii^2 of a step: tune local.lr. Clients are evaluated by v_i
        with the latest cores, newcomers by p0. PFLlib uploads v_i in place of w_i, a client sees
        the cores of those that trained before it in the same round, <g, w_j> is a mean of means,
        and p_i = 1 / K never moves. BatchNorm statistics stay with the client.
    """

    rate: NonNegative = 0.1
    mu: NonNegative = 0.2
    schedule: Literal["exponential", "cosine"] = "exponential"
    until: Positive = 0.1

    server_sees = "each upload"

    def init(self, params, parts):
        """Begin with equal cores, and equal shares until the numbers of samples are known."""
        clients = max(1, parts.clients)
        some_leaf = tree.leaves(params)[0]
        shares = some_leaf.new_full((clients,), 1 / clients)
        server = {
            # Views of one core, no K copies.
            "cores": tree.map(lambda leaf: leaf.expand(clients, *leaf.shape), params),
            "shares": shares,
            "counted": flag(params),
            "played": flag(params).long(),
            "end": some_leaf.new_full((), self.until * parts.rounds),
        }
        return server, {"p": shares}

    def buffers(self):
        """Keep BatchNorm statistics with the client."""
        return {"main": "local"}

    def turns(self, played, cohort, clients, generator):
        """Count all clients' samples before the first round."""
        if played:
            return [Turn(cohort)]
        everyone = list(range(clients))
        counting = Turn(everyone, survey=self._set_shares, trains=False)
        return [counting, Turn(cohort)]

    def _set_shares(self, server, clients, uploads):
        """Set p0_j = n_j / n, the clients' shares of all samples."""
        shares = uploads["samples"] / uploads["samples"].sum()
        shares = shares.to(server["shares"])
        return {**server, "shares": shares, "counted": ~server["counted"]}, clients

    def before_training(self, server, client, net, shard):
        """Return the number of training samples."""
        samples = float(len(shard.data.y))
        return {"samples": torch.full((), samples, device=shard.data.y.device)}

    def prepare(self, server, client):
        """Begin with p0 in the client's first participation."""
        p = torch.where(
            client["participated"],
            client["p"],
            server["shares"],
        )
        return {**client, "p": p}

    def download(self, server, client):
        """Return the other clients' cores, but not for the counting.

        Its own core and p0 the client has.
        """
        number = client["number"]
        # All numbers but the client's own: those from it on are one higher.
        other_numbers = torch.arange(len(client["p"]) - 1, device=client["p"].device)
        other_numbers = other_numbers + (other_numbers >= number)
        other_cores = tree.map(
            lambda leaf: leaf.index_select(0, other_numbers),
            server["cores"],
        )
        return {
            "others": send_if(server["counted"], other_cores),
            "own": Known(pick_row(server["cores"], number)),
            "p0": Known(server["shares"]),
        }

    def start(self, received, client):
        """Return the client's core, and how far p_i has moved, in steps of local.lr."""
        return {"core": received["own"], "moved": torch.zeros_like(client["p"])}

    def loss(self, server, client, net, params, batch):
        """Return CE(v_i) + lambda(r) mu / 2 |p_i - p0|^2."""
        logits = net(self.evaluated(server, client, params), batch.x)

        # ---- lambda(r), which is 0 from round L on
        r = server["played"]
        end = server["end"]  # L
        if self.schedule == "cosine":
            scheduled = (torch.cos(torch.pi * r / end) + 1) / 2
        else:
            scheduled = 0.001 ** (r / end)
        lambda_r = torch.where(r < end, scheduled, 0.0)

        # ---- lambda(r) mu / 2 |p_i - p0|^2
        distance = (self._relationships(client, params) - server["shares"]).square().sum()
        penalty = lambda_r * self.mu / 2 * distance
        return batch.loss(logits) + penalty

    def _relationships(self, client: Tree, params: Tree) -> Tensor:
        """Return p_i.

        The square root makes a step of local.lr on `moved` one of rate * local.lr on p_i: the
        gradient is scaled by it once, and the step once more.
        """
        return client["p"] + self.rate**0.5 * params["moved"]

    def evaluated(self, server, client, params):
        """Return v_i = sum_j p_ij w_j, with the trained core for the client's own."""
        p = self._relationships(client, params)
        # Masks in place of p[number], for the same reason.
        is_own = torch.arange(len(p), device=p.device) == client["number"]
        p_own = torch.where(is_own, p, 0.0).sum()
        p_others = torch.where(is_own, 0.0, p)

        def mix(core: Tensor, cores: Tensor) -> Tensor:
            return p_own.to(core) * core + torch.tensordot(p_others.to(cores), cores, 1)

        return tree.map(mix, params["core"], server["cores"])

    def finish(self, server, client, start, params):
        """Send the core up, or the number of samples; keep p_i."""
        upload = {
            "core": send_if(server["counted"], params["core"]),
            "samples": client["samples"],
        }
        return upload, {"p": self._relationships(client, params)}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Store the cores; nothing is averaged."""
        numbers = clients["number"]
        uploaded = uploads["core"].values
        cores = tree.map(
            lambda leaf, new: leaf.index_copy(0, numbers, new), server["cores"], uploaded
        )
        return {**server, "cores": cores, "played": server["played"] + 1}, clients

    def personal(self, server, client):
        """Return v_i of the latest cores."""
        p = self.prepare(server, client)["p"]
        return tree.map(
            lambda cores: torch.tensordot(p.to(cores), cores, 1),
            server["cores"],
        )
