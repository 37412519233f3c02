"""FLOCO: a simplex of heads over one body; each client gets a region of it. FLOCO+ adds a private model."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.errors import FedpflError
from fedpfl.methods.base import Batch, Method, Phase, flag, mean_cross_entropy, side_by_side
from fedpfl.models import Bound, Parts
from fedpfl.tree import Masked, Tree

SCALES = (1e-4, 1.0, 1000)  # tried for z: from, to, how many
NEAREST = 1e-4  # distances below this count as this


@dataclass(frozen=True)
class Floco(Method):
    """FLOCO (Grinwald, Wiesner and Nakajima, NeurIPS 2024, arXiv:2403.03333).

    The classifier's weight is W(alpha) = sum_j alpha_j V_j of endpoints V_j, alpha in the simplex; body and bias are
    common. Every training step draws alpha: uniformly, until after `tau` rounds all clients train once for nothing but
    the directions their endpoints take. The first principal components of these, projected on the simplex, are the
    clients' centres beta_i, and from then on alpha = beta_i + r u, r uniform in [0, rho), |u|_1 = 1. Clients are judged
    at beta_i, before the projection at the simplex' centre.
    FLOCO+ (pers_epochs > 0) trains a private copy v of everything on CE(v) + lam/2 |v - received|^2 beside it, on the
    same batches and alphas, and judges by that.

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

    def __post_init__(self) -> None:
        self.check(self.endpoints >= 1, "endpoints", "1 or more")
        self.check(self.tau >= 0, "tau", "0 or more")
        self.check(self.rho >= 0, "rho", "0 or more")
        self.check(self.pers_epochs >= 0, "pers_epochs", "0 or more")
        self.check(self.lam >= 0, "lam", "0 or more")
        self.check(self.cold_start in ("initial", "global"), "cold_start", "initial or global")

    @property
    def buffers(self) -> dict[str, str]:  # type: ignore[override]
        """FLOCO+'s private model has statistics of its own."""
        return {"main": "aggregate", "v": "local"} if self.pers_epochs else {"main": "aggregate"}

    @property
    def judged_role(self) -> str:  # type: ignore[override]
        """Of the model that `judged` picks."""
        return "v" if self.pers_epochs else "main"

    @property
    def randoms(self) -> int:
        """A direction and a radius."""
        return self.endpoints + 1

    def gathers(self, played: int) -> bool:
        """Once; a single endpoint has no regions."""
        return played == self.tau and self.endpoints > 1

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """Endpoints under the name of the weight they replace; beta at the centre."""
        name = parts.head[0]
        weight = params[name]
        ends = [weight] + [_endpoint(weight, parts.seed, number) for number in range(1, self.endpoints)]
        shared = {other: value for other, value in params.items() if other != name}
        server = {"shared": shared, "endpoints": {name: torch.stack(ends)}}
        mine = {"beta": weight.new_full((self.endpoints,), 1 / self.endpoints), "projected": flag(params)}
        if self.pers_epochs:
            mine |= {"v": server, "trained": flag(params)}
        return server, mine

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The simplex; for FLOCO+ both models side by side."""
        return {"w": server, "v": self._private(server, mine)} if self.pers_epochs else server

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The simplex and, once there is one, the client's centre."""
        known = mine["projected"].expand_as(mine["beta"])
        return {"model": server, "beta": Masked({"beta": mine["beta"]}, {"beta": known})}

    def phases(self, server: Tree, mine: dict[str, Tree], params: Tree, epochs: int) -> list[Phase]:
        """FLOCO+: both together for as long as both train, then the one with more epochs alone."""
        if not self.pers_epochs:
            return [Phase(epochs)]
        return side_by_side(epochs, self.pers_epochs, self.global_loss, self.personal_loss)

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy at a random point; for FLOCO+ of both models at the same point."""
        if not self.pers_epochs:
            return self._cross_entropy(net, params, batch, mine, "main")
        own = self.personal_loss(net, params, batch, server, mine)
        return self.global_loss(net, params, batch, server, mine) + own

    def global_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """FLOCO's objective, within FLOCO+."""
        return self._cross_entropy(net, params["w"], batch, mine, "main")

    def personal_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """The private model's objective."""
        loss = self._cross_entropy(net, params["v"], batch, mine, "v")
        if self.lam:
            loss = loss + self.lam / 2 * tree.squared_distance(params["v"], server)
        return loss

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The simplex goes up, a private model stays."""
        if not self.pers_epochs:
            return end, mine
        return end["w"], {**mine, "v": end["v"], "trained": ~flag(end)}

    def judged(self, server: Tree, mine: dict[str, Tree], trained: Tree) -> Tree:
        """The client's own point of the simplex, of FLOCO+'s private one."""
        return at(trained["v"] if self.pers_epochs else trained, mine["beta"])

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """As judged, of the latest simplex."""
        return self.judged(server, mine, self.start(server, mine))

    def gather(self, server: Tree, uploads: Tree, mine: dict[str, Tree]) -> tuple[Tree, dict[str, Tree]]:
        """Centres for all clients; nothing else changes."""
        points = torch.cat([leaf.flatten(1) for leaf in uploads["endpoints"].values()], 1).double()
        if not points.isfinite().all():
            raise FedpflError("training diverged: FLOCO's projection got numbers that are not finite; lower local.lr")
        beta = centres(points, self.endpoints)
        return server, {**mine, "beta": beta.to(mine["beta"]), "projected": torch.ones_like(mine["projected"])}

    def _private(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        if self.cold_start == "initial":
            return mine["v"]
        return tree.where(mine["trained"], mine["v"], server)

    def _cross_entropy(self, net: Bound, params: Tree, batch: Batch, mine: dict[str, Tree], role: str) -> Tensor:
        return mean_cross_entropy(net(at(params, self.point(batch, mine)), batch.x, role), batch)

    def point(self, batch: Batch, mine: dict[str, Tree]) -> Tensor:
        """The step's alpha `[endpoints]`."""
        assert batch.random is not None
        numbers, radius = batch.random[: self.endpoints], self.rho * batch.random[self.endpoints]
        least = torch.finfo(numbers.dtype).tiny  # numbers may be 0, a sum of them must not be
        exponentials = -torch.log1p(-numbers).clamp(max=-least)
        anywhere = exponentials / exponentials.sum()
        direction = 2 * numbers - 1
        nearby = mine["beta"] + radius * direction / direction.abs().sum().clamp(min=least)
        if self.stay_inside:
            nearby = onto_simplex(nearby)
        return torch.where(mine["projected"], nearby, anywhere)


def at(params: Tree, alpha: Tensor) -> Tree:
    """The network's parameters at one point of the simplex."""
    heads = tree.map(lambda ends: (alpha.view(-1, 1, 1) * ends).sum(0), params["endpoints"])
    return {**params["shared"], **heads}


def centres(points: Tensor, count: int) -> Tensor:
    """Points `[clients, n]`, float64, as points of the simplex `[clients, count]` that lie apart.

    Of the scales z, the one at which the Riesz energy of the projected principal components is least.
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
    """The first principal components of points `[clients, n]`: scores `[clients, count]`, zero beyond their rank."""
    u, scale, axes = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    scores = u * scale * torch.where(largest < 0, -1.0, 1.0).squeeze(1).to(u)
    scores = scores[:, :count]
    return torch.cat([scores, scores.new_zeros(len(scores), count - scores.shape[1])], 1)


def onto_simplex(points: Tensor, total: Tensor | float = 1.0) -> Tensor:
    """The nearest points with no negative coordinate and the sum `total`, along the last axis."""
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
