"""FLOCO: a simplex of heads over one body; each client gets a region of it. FLOCO+ adds a private model."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Masked, Tree
from fedpfl.methods.shared.method import Method, Phase, Turn, flag
from fedpfl.methods.shared.private import side_by_side

SCALES = (1e-4, 1.0, 1000)  # tried for z: from, to, how many
NEAREST = 1e-4  # distances below this count as this


@dataclass(frozen=True)
class Floco(Method):
    """FLOCO (Grinwald, Wiesner and Nakajima, NeurIPS 2024, arXiv:2403.03333).

    The classifier's weight is W(alpha) = sum_j alpha_j V_j of endpoints V_j, alpha in the simplex; body and bias are
    common. Every training step draws alpha: uniformly, until after `tau` rounds all clients train once for nothing but
    the directions their endpoints take. The first principal components of these, projected on the simplex, are the
    clients' centres beta_i, and from then on alpha = beta_i + r u, r uniform in [0, rho), |u|_1 = 1. Clients are
    evaluated at beta_i, before the projection at the simplex' centre.
    FLOCO+ (pers_epochs > 0) trains a private copy v of everything on CE(v) + lam/2 |v - received|^2 beside it, on the
    same batches and alphas, and evaluates that.

    endpoints: M; with one it is FedAvg. tau: as FedOBP's experiments have it; the authors take half of the rounds.
    rho: radius of a client's region. stay_inside: alpha is projected back on the simplex, which beta_i + r u may leave.
    lam: pull of FLOCO+ (the official code scales the private model by it, not the difference).
    cold_start: FLOCO+'s private model of a client that was never sampled, as for Ditto.
    V_1 is the network's own head, where the official code redraws it too; the others are Xavier normal, as there.
    Fewer clients than endpoints leave the missing components zero. Signs of components: the loading of largest
    magnitude is positive.
    """

    endpoints: int = 10
    tau: int = 10
    rho: float = 0.1
    stay_inside: bool = False
    pers_epochs: int = 0
    lam: float = 1.0
    cold_start: Literal["initial", "global"] = "initial"

    def __post_init__(self):
        super().__post_init__()
        self.check(self.endpoints >= 1, "endpoints", "1 or more")
        for field in ("tau", "rho", "pers_epochs", "lam"):
            self.check(getattr(self, field) >= 0, field, "0 or more")

    def buffers(self):
        """Give FLOCO+'s private model statistics of its own."""
        return {**super().buffers(), **({"v": "local"} if self.pers_epochs else {})}

    def init(self, params, parts):
        """Put the endpoints under the name of the weight they replace, and beta at the centre."""
        name = parts.head[0]
        weight = params[name]
        ends = [weight] + [_endpoint(weight, parts.seed, number) for number in range(1, self.endpoints)]
        server = {"shared": tree.without(params, [name]), "endpoints": {name: torch.stack(ends)}}
        client = {"beta": weight.new_full((self.endpoints,), 1 / self.endpoints), "projected": flag(params)}
        if self.pers_epochs:
            client["v"] = server
        return server, client

    def turns(self, played, cohort, clients, generator):
        """Survey all clients once, before the round after `tau`; a single endpoint has no regions."""
        if played != self.tau or self.endpoints == 1:
            return [Turn(cohort)]
        return [Turn(list(range(clients)), survey=self._centres), Turn(cohort)]

    def download(self, server, client):
        """Return the simplex and, once there is one, the client's centre."""
        known = client["projected"].expand_as(client["beta"])
        return {"model": server, "beta": Masked({"beta": client["beta"]}, {"beta": known})}

    def start(self, received, client):
        """Return the simplex; for FLOCO+ both models side by side."""
        model = received["model"]
        if not self.pers_epochs:
            return model
        cold = self.cold_start == "global"
        return {"w": model, "v": tree.where(client["participated"], client["v"], model) if cold else client["v"]}

    def phases(self, server, client, params, epochs):
        """Draw a direction and a radius for each step; FLOCO+ trains both models side by side."""
        randoms = self.endpoints + 1
        if not self.pers_epochs:
            return [Phase(epochs, randoms=randoms)]
        return side_by_side(epochs, self.pers_epochs, self._global_loss, self._personal_loss, randoms)

    def loss(self, server, client, net, params, batch):
        """Return cross-entropy at a random point; for FLOCO+ of both models at the same point."""
        if not self.pers_epochs:
            return self._cross_entropy(net, params, batch, client, "main")
        own = self._personal_loss(server, client, net, params, batch)
        return self._global_loss(server, client, net, params, batch) + own

    def _global_loss(self, server, client, net, params, batch):
        return self._cross_entropy(net, params["w"], batch, client, "main")

    def _personal_loss(self, server, client, net, params, batch):
        loss = self._cross_entropy(net, params["v"], batch, client, "v")
        if self.lam:
            loss = loss + self.lam / 2 * tree.squared_distance(params["v"], server)
        return loss

    def finish(self, server, client, start, end):
        """Return the simplex; a private model stays."""
        if not self.pers_epochs:
            return end, client
        return end["w"], {**client, "v": end["v"]}

    def evaluated(self, server, client, params):
        """Return the client's own point of the simplex, of FLOCO+'s private one."""
        return at(params["v"] if self.pers_epochs else params, client["beta"])

    def predict(self, net, params, x):
        """Predict with the private model's statistics, where there is one."""
        return net(params, x, "v" if self.pers_epochs else "main")

    def _centres(self, server, clients, uploads):
        """Give every client its centre; nothing else changes."""
        points = torch.cat([leaf.flatten(1) for leaf in uploads["endpoints"].values()], 1).double()
        if not points.isfinite().all():
            raise FedpflError("training diverged: FLOCO's projection got numbers that are not finite; lower local.lr")
        beta = centres(points, self.endpoints).to(clients["beta"])
        return server, {**clients, "beta": beta, "projected": torch.ones_like(clients["projected"])}

    def _cross_entropy(self, net, params, batch, client, role):
        return batch.cross_entropy(net(at(params, self._point(batch, client)), batch.x, role))

    def _point(self, batch, client):
        """Return the step's alpha `[endpoints]`."""
        assert batch.random is not None
        numbers, radius = batch.random[: self.endpoints], self.rho * batch.random[self.endpoints]
        least = torch.finfo(numbers.dtype).tiny  # numbers may be 0, a sum of them must not be
        exponentials = -torch.log1p(-numbers).clamp(max=-least)
        anywhere = exponentials / exponentials.sum()
        direction = 2 * numbers - 1
        nearby = client["beta"] + radius * direction / direction.abs().sum().clamp(min=least)
        if self.stay_inside:
            nearby = onto_simplex(nearby)
        return torch.where(client["projected"], nearby, anywhere)


def at(params: Tree, alpha: Tensor) -> Tree:
    """Return the network's parameters at one point of the simplex."""
    heads = tree.map(lambda ends: (alpha.view(-1, 1, 1) * ends).sum(0), params["endpoints"])
    return {**params["shared"], **heads}


def centres(points: Tensor, count: int) -> Tensor:
    """Turn points `[clients, n]`, float64, into points of the simplex `[clients, count]` that lie apart.

    They are the projected principal components, at that scale z at which their Riesz energy is least.
    """
    kappa, best, least = components(points, count), None, torch.inf
    clients = len(points)
    for scales in torch.linspace(*SCALES, dtype=points.dtype, device=points.device).split(1 + 2**21 // clients**2):
        beta = onto_simplex(kappa, scales.view(-1, 1, 1))
        beta = beta / beta.sum(-1, keepdim=True)
        distance = torch.cdist(beta, beta, compute_mode="donot_use_mm_for_euclid_dist").clamp(min=NEAREST)
        distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        energy = distance.pow(-2).sum((1, 2)).div(max(1, clients * (clients - 1))).log()
        place = int(energy.argmin())
        if best is None or float(energy[place]) < least:
            best, least = beta[place], float(energy[place])
    assert best is not None
    return best


def components(points: Tensor, count: int) -> Tensor:
    """Return the first principal components of points `[clients, n]`: `[clients, count]`, zero beyond their rank."""
    u, scale, axes = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    scores = u * scale * torch.where(largest < 0, -1.0, 1.0).squeeze(1).to(u)
    scores = scores[:, :count]
    return torch.cat([scores, scores.new_zeros(len(scores), count - scores.shape[1])], 1)


def onto_simplex(points: Tensor, total: Tensor | float = 1.0) -> Tensor:
    """Return the nearest points with no negative coordinate and the sum `total`, along the last axis."""
    points = points - points.amax(-1, keepdim=True)  # which changes nothing but the rounding
    falling = points.sort(-1, descending=True).values
    excess = falling.cumsum(-1) - total
    ranks = torch.arange(1, points.shape[-1] + 1, device=points.device)
    support = (falling - excess / ranks > 0).sum(-1, keepdim=True)
    return (points - excess.gather(-1, support - 1) / support).clamp(min=0)


def _endpoint(like: Tensor, seed: int, number: int) -> Tensor:
    # One generator per endpoint, whatever their number: the first ones of many are those of few.
    generator = torch.Generator().manual_seed((1_000_003 * seed + number) % 2**63)
    return torch.nn.init.xavier_normal_(torch.empty(like.shape), generator=generator).to(like)
