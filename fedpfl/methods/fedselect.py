"""FedSelect: parameters that move most become personal, more of them every round."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, AtLeast, Between
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.by_mask import PersonalByMask
from fedpfl.methods.shared.method import Phase, flag
from fedpfl.models import Parts

BY_MOVEMENT = ("most", "least", "random")


@dataclass(frozen=True)
class FedSelect(PersonalByMask):
    """FedSelect (Tamirisa et al., CVPR 2024, arXiv:2404.02478).

    A client has a mask m of personal entries, at first empty. Each local epoch is two passes over
    the data, one that moves the personal entries and one that moves the shared ones. Then, in every
    tensor whose personal share is below alpha, the share p of the shared entries that moved most
    becomes personal. The server averages entry by entry over those who shared it, by the masks from
    before and with equal weights; an entry that has just become personal starts from this average.
    A client is evaluated by its model right after local training; one that was never sampled, by
    the initial model.

    p: share of a tensor's shared entries that become personal at once (the official code's
    default).
    alpha: personal share from which on a tensor's mask stays as it is. The paper's best for CIFAR10
        and OfficeHome; 0.5 for CIFAR10-C and Mini-ImageNet; the official code's default is 0.8.
    delta: how far an entry moved: since the start of the `round` (the paper), or, in each
        `every`-th participation but the first alone, since the last `window` began (the official
        code, whose clients all take part in all rounds; the first window begins with the initial
        model).
    clamp: never select beyond alpha; otherwise the last selection overshoots it.
    strict: select where the share is below alpha (the paper), else also where it equals alpha (the
    official code).
    scope: entries are ranked within each `tensor` (the official code) or `all` together, with one
        share. Of either only the weights of linear, convolutional and normalising layers can be
        personal, biases never.
    personalise: which entries of those: the ones that moved `most`, `least`, or `random` ones; or
        else a layer, by number from the input or by name, all of which is personal from the first
        round on (ablations).
    lr_v, lr_u: step sizes for personal and shared entries; None: that of `local`.
    BatchNorm statistics stay with the client.
    """

    p: Annotated[float, Between(0, 1)] = 0.25
    alpha: Annotated[float, Between(0, 1)] = 0.3
    delta: Literal["round", "window"] = "round"
    every: Annotated[int, AtLeast(1)] = 3
    clamp: bool = False
    strict: bool = True
    scope: Literal["tensor", "all"] = "tensor"
    personalise: int | str = "most"
    lr_v: Annotated[float, Above(0)] | None = None
    lr_u: Annotated[float, Above(0)] | None = None

    _key: ClassVar[str] = "own"

    def buffers(self):
        """Keep the statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Make nothing personal, or a layer; the mask has the names of the tensors in which
        something can be.
        """
        own = tree.select(params, self._candidates(parts))
        client = {
            "model": params,
            "own": own,
            "mask": tree.full_like(own, self.personalise not in BY_MOVEMENT),
        }
        if self.delta == "window":
            client |= {"reference": own, "played": flag(params).long()}
        return params, client

    def sample(self, server, generator):
        """Return random scores, where the choice is random."""
        if self.personalise != "random":
            return {}
        return {
            "chance": tree.map(lambda leaf: torch.rand(leaf.shape, generator=generator), server)
        }

    def download(self, server, client):
        """Return the shared entries; the server knows the mask."""
        return Agreed(server, _shared(server, client["mask"]))

    def phases(self, server, client, params, epochs):
        """Pass twice over each epoch: for the personal entries, and on FedAvg's batches for the
        shared ones.
        """
        mask = client["mask"]
        personal = {name: mask.get(name, False) for name in params}
        shared = {name: ~mask[name] if name in mask else True for name in params}
        lr_v, lr_u = ({} if lr is None else {"lr": lr} for lr in (self.lr_v, self.lr_u))
        return [Phase(1, personal, "personal", sgd=lr_v), Phase(1, shared, sgd=lr_u)] * epochs

    def finish(self, server, client, start, params):
        """Return the entries shared so far and, if it is another, the next mask."""
        mask = client["mask"]
        own = tree.select(params, mask)
        kept = {"model": params, "own": own}
        if self.delta == "round":
            kept["mask"] = self._grown(mask, self._scores(tree.select(start, mask), own, client))
        else:
            due = (client["played"] > 0) & (client["played"] % self.every == 0)
            grown = self._grown(mask, self._scores(client["reference"], own, client))
            kept |= {
                "mask": tree.where(due, grown, mask),
                "reference": tree.where(due, own, client["reference"]),
                "played": client["played"] + 1,
            }
        changed = tree.ravel(tree.map(torch.logical_xor, mask, kept["mask"])).any()
        news = Agreed(kept["mask"], tree.map(lambda leaf: changed.expand_as(leaf), mask))
        return {"model": Agreed(params, _shared(params, mask)), "mask": news}, kept

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average each entry over those who share it, with equal weights; what nobody shares stays.

        Clients take the mean of what they shared in this round, also where it will be personal from
        now on.
        """
        model, equal = uploads["model"], torch.full_like(weight, 1 / len(weight))
        server = tree.masked_mean(server, model.values, model.mask, equal)
        end, shared = (tree.select(part, clients["own"]) for part in model)
        return server, {
            **clients,
            "own": tree.where(shared, tree.select(server, clients["own"]), end),
        }

    def personal(self, server, client):
        """Return the model as it was after the client's last training."""
        return client["model"]

    def _candidates(self, parts: Parts) -> list[str]:
        """Name the tensors that can have personal entries."""
        layers, which = parts.layers, self.personalise
        if which in BY_MOVEMENT:
            return [name for layer in layers for name in layer if name.endswith("weight")]
        if isinstance(which, int):
            if not -len(layers) <= which < len(layers):
                raise FedpflError(
                    f"method.personalise: the network has layers 0 to {len(layers) - 1}, got {which}"
                )
            _ = parts.head  # raises where the layers' order is not clear
            return [*layers[which]]
        for layer in layers:
            if which in layer or which in {name.rpartition(".")[0] for name in layer}:
                return [*layer]
        known = ", ".join((*BY_MOVEMENT, *(layer[0].rpartition(".")[0] for layer in layers)))
        raise FedpflError(
            f"method.personalise must be one of {known}, or a layer's number, got {which}"
        )

    def _scores(self, before, after, client):
        """Return what is selected by, the largest first."""
        if self.personalise == "random":
            return tree.select(client["chance"], after)
        moved = tree.map(lambda old, new: (new - old).abs(), before, after)
        return moved if self.personalise == "most" else tree.map(torch.neg, moved)

    def _grown(self, mask: Tree, scores: Tree) -> Tree:
        if self.personalise not in BY_MOVEMENT:
            return mask
        if self.scope == "tensor":
            return tree.map(self._select, mask, scores)
        return tree.unravel(self._select(tree.ravel(mask), tree.ravel(scores)), mask)

    def _select(self, mask: Tensor, scores: Tensor) -> Tensor:
        """Add to `mask` the largest `scores` outside it: the official number of them, whatever ties
        there are.
        """
        size, count = mask.numel(), mask.sum()
        rest = size - count
        new = rest - torch.round((1 - self.p) * rest.double())
        if self.clamp:
            new = torch.minimum(new, math.floor(self.alpha * size + 1e-9) - count).clamp(min=0)
        share = count.double() / size
        new = torch.where(share < self.alpha if self.strict else share <= self.alpha, new, 0)
        order = (
            torch.where(mask, -torch.inf, scores).flatten().argsort(descending=True, stable=True)
        )
        first = torch.arange(size, device=mask.device) < new
        return mask | torch.zeros_like(first).scatter(0, order, first).view(mask.shape)


def _shared(like: Tree, mask: Tree) -> Tree:
    """Tell which entries of `like` are shared: those outside the mask, and all of a tensor without
    one.
    """
    return {
        name: ~mask[name] if name in mask else torch.ones_like(leaf, dtype=torch.bool)
        for name, leaf in like.items()
    }
