"""FLOCO: a simplex of heads over one body; each client gets a region of it."""

from dataclasses import dataclass

import torch

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Count, NonNegative, WholeNumber
from fedpfl.ground.tree import Masked
from fedpfl.methods.shared.method import Method, Turn, flag
from fedpfl.methods.shared.simplex import (
    client_centres,
    draw_endpoint,
    params_at,
    project_to_simplex,
)


@dataclass(frozen=True)
class Floco(Method):
    """FLOCO (Grinwald, Wiesner and Nakajima, NeurIPS 2024, arXiv:2403.03333).

    The classifier's weight is W(alpha) = sum_j alpha_j V_j of endpoints V_j, alpha in the simplex;
    body and bias are
    common. Every training step draws alpha: uniformly, until after `tau` rounds all clients train
    once for nothing but the directions their endpoints take. The first principal components of
    these, projected on the simplex, are the clients' centres beta_i, and from then on alpha =
    beta_i + r u, r uniform in [0, rho), |u|_1 = 1. Clients are evaluated at beta_i, before the
    projection at the simplex' centre.

    endpoints: M; with one it is FedAvg. tau: as FedOBP's experiments have it; the authors take half
    of the rounds.
    rho: radius of a client's region. stay_inside: alpha is projected back on the simplex, which
    beta_i + r u may leave. V_1 is the network's own head, where the official code redraws it too;
    the rest are Xavier normal, as there. Fewer clients than endpoints leave the missing
    components zero. Signs of components: the loading of largest magnitude is positive.
    """

    endpoints: Count = 10
    tau: WholeNumber = 10
    rho: NonNegative = 0.1
    stay_inside: bool = False

    @property
    def randoms(self):
        """Draw a direction and a radius for each step."""
        return self.endpoints + 1

    def init(self, params, parts):
        """Draw the endpoints, under their weight's name; put beta at the centre."""
        name = parts.head_weight
        head_weight = params[name]
        endpoints = [head_weight]  # V_1 is the network's own head
        for number in range(1, self.endpoints):
            endpoints.append(draw_endpoint(head_weight, parts.seed, number))
        server = {
            "shared": tree.drop(params, [name]),
            "endpoints": {name: torch.stack(endpoints)},
        }
        centre = head_weight.new_full((self.endpoints,), 1 / self.endpoints)
        return server, {"beta": centre, "projected": flag(params)}

    def turns(self, played, cohort, clients, generator):
        """Survey all clients once, before the round after `tau`.

        A single endpoint has no regions.
        """
        if played != self.tau or self.endpoints == 1:
            return [Turn(cohort)]
        everyone = list(range(clients))
        return [Turn(everyone, survey=self._assign_centres), Turn(cohort)]

    def _assign_centres(self, server, clients, uploads):
        """Give every client its centre; nothing else changes."""
        endpoints = [tree.as_matrix(leaf) for leaf in uploads["endpoints"].values()]
        points = torch.cat(endpoints, 1).double()
        if not points.isfinite().all():
            raise FedpflError(
                "training diverged: FLOCO's projection got numbers that are not finite; "
                "lower local.lr"
            )
        beta = client_centres(points, self.endpoints).to(clients["beta"])
        projected = torch.ones_like(clients["projected"])
        return server, {**clients, "beta": beta, "projected": projected}

    def download(self, server, client):
        """Return the simplex and, once there is one, the client's centre."""
        has_centre = client["projected"].expand_as(client["beta"])
        centre = Masked({"beta": client["beta"]}, {"beta": has_centre})
        return {"model": server, "beta": centre}

    def start(self, received, client):
        """Return the simplex."""
        return received["model"]

    def loss(self, server, client, net, params, batch):
        """Return the cross-entropy at a random point alpha."""
        alpha = self._point(batch, client)
        return batch.loss(net(params_at(params, alpha), batch.x))

    def _point(self, batch, client):
        """Return the step's alpha `[endpoints]`."""
        # One point a step: its numbers are those of its first sample.
        random = batch.random[0]
        numbers = random[: self.endpoints]
        radius = self.rho * random[self.endpoints]
        tiny = torch.finfo(numbers.dtype).tiny  # numbers may be 0, a sum of them must not be

        # ---- Before the projection: uniform on the simplex, by normalised exponentials.
        exponentials = -torch.log1p(-numbers).clamp(max=-tiny)
        uniform = exponentials / exponentials.sum()

        # ---- After it: beta_i + r u, |u|_1 = 1.
        direction = 2 * numbers - 1
        length = direction.abs().sum().clamp(min=tiny)
        nearby = client["beta"] + radius * direction / length
        if self.stay_inside:
            nearby = project_to_simplex(nearby)
        return torch.where(client["projected"], nearby, uniform)

    def evaluated(self, server, client, params):
        """Return the client's own point of the simplex."""
        return params_at(params, client["beta"])
