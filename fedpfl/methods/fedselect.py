"""FedSelect: parameters that move most become personal, more of them every round."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Count, Positive, Proportion
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.by_mask import PersonalByMask
from fedpfl.methods.shared.method import Phase, equal_shares, flag, send_if
from fedpfl.models import Parts

BY_MOVEMENT = ("most", "least", "random")


@dataclass(frozen=True)
class FedSelect(PersonalByMask):
    """FedSelect (Tamirisa et al., CVPR 2024, arXiv:2404.02478).

    A client has a mask m of personal entries, at first empty. Each local epoch is two passes over
    the data, one that moves the personal entries and one that moves the shared ones. Then, in every
    tensor with a personal share below alpha, the share p of the shared entries that moved most
    becomes personal. The server averages entry by entry over those who shared it, by the masks from
    before and with equal weights; an entry that has just become personal starts from this average.
    A client is evaluated by its model right after local training; one that was never sampled, by
    the initial model.

    p: share of a tensor's shared entries that become personal together (the official code's
    default).
    alpha: personal share from which on a tensor's mask stays as it is. The paper's best for CIFAR10
        and OfficeHome; 0.5 for CIFAR10-C and Mini-ImageNet; the official code's default is 0.8.
    delta: how far an entry moved: since the start of the `round` (the paper), or, in each
        `every`-th participation but the first alone, since the last `window` began (the official
        code; its clients all take part in all rounds; the first window begins with the initial
        model).
    clamp: never select beyond alpha; else the last selection overshoots it.
    strict: select where the share is below alpha (the paper), else also where it equals alpha (the
    official code).
    scope: entries are ranked within each `tensor` (the official code) or `all` together, with one
        share (Algorithm 3 of the paper). Of either only the weights of linear, convolutional and normalising layers can be
        personal, biases never.
    personalise: which entries of those: the ones that moved `most`, `least`, or `random` ones; or
        else a layer, by number from the input or by name, which is all personal from the first
        round on (ablations).
    lr_v, lr_u: step sizes for personal and shared entries; None: that of `local`.
    BatchNorm statistics stay with the client.
    """

    mixes_samples = ""

    p: Proportion = 0.25
    alpha: Proportion = 0.3
    delta: Literal["round", "window"] = "round"
    every: Count = 3
    clamp: bool = False
    strict: bool = True
    scope: Literal["tensor", "all"] = "tensor"
    personalise: int | str = "most"
    lr_v: Positive | None = None
    lr_u: Positive | None = None

    _key: ClassVar[str] = "own"

    def buffers(self):
        """Keep the statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Make nothing personal, or a layer.

        The mask has the names of the tensors in which something can be personal.
        """
        candidates = tree.select(params, self._candidates(parts))
        is_layer = self.personalise not in BY_MOVEMENT
        client = {
            "model": params,
            "own": candidates,
            "mask": tree.full_like(candidates, is_layer),
        }
        if self.delta == "window":
            client |= {"reference": candidates, "played": flag(params).long()}
        return params, client

    def sample(self, server, generator):
        """Return random scores, where the choice is random."""
        if self.personalise != "random":
            return {}

        def draw(leaf: Tensor) -> Tensor:
            return torch.rand(leaf.shape, generator=generator)

        return {"chance": tree.map(draw, server)}

    def download(self, server, client):
        """Return the shared entries; the server knows the mask."""
        return Agreed(server, _shared_mask(server, client["mask"]))

    def phases(self, server, client, params, epochs):
        """Pass twice over each epoch: for the personal entries, then for the shared ones.

        The shared ones train on FedAvg's batches.
        """
        mask = client["mask"]
        personal = {}
        shared = {}
        for name in params:
            if name in mask:
                personal[name] = mask[name]
                shared[name] = ~mask[name]
            else:  # a tensor in which nothing can be personal
                personal[name] = False
                shared[name] = True
        personal_sgd = {} if self.lr_v is None else {"lr": self.lr_v}
        shared_sgd = {} if self.lr_u is None else {"lr": self.lr_u}
        epoch = [
            Phase(1, personal, stream="personal", sgd=personal_sgd),
            Phase(1, shared, sgd=shared_sgd),
        ]
        return epoch * epochs

    def finish(self, server, client, start, params):
        """Return the entries shared so far and, if it is another, the next mask."""
        mask = client["mask"]
        candidates = tree.select(params, mask)
        next_client = {"model": params, "own": candidates}

        # ---- The next mask: some of the entries that moved most become personal.
        if self.delta == "round":
            scores = self._scores(
                tree.select(start, mask),
                candidates,
                client,
            )
            next_client["mask"] = self._extend_mask(mask, scores)
        else:
            played = client["played"]
            is_due = (played > 0) & (played % self.every == 0)
            scores = self._scores(client["reference"], candidates, client)
            larger_mask = self._extend_mask(mask, scores)
            next_client["mask"] = tree.where(is_due, larger_mask, mask)
            next_client["reference"] = tree.where(is_due, candidates, client["reference"])
            next_client["played"] = played + 1

        # ---- Uploads: by the mask from before, as the server averages.
        # A mask travels only where it has changed.
        difference = tree.map(torch.logical_xor, mask, next_client["mask"])
        has_changed = tree.ravel(difference).any()
        upload = {
            "model": Agreed(params, _shared_mask(params, mask)),
            "mask": send_if(has_changed, next_client["mask"]),
        }
        return upload, next_client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average each entry over those who share it, with equal weights; else it stays."""
        trained, shared = uploads["model"]
        server = tree.masked_mean(server, trained, shared, equal_shares(weight))
        # ---- What clients shared in this round is the mean, also where it is personal from now on.
        names = clients["own"]
        was_shared = tree.select(shared, names)
        mean = tree.select(server, names)
        candidates = tree.where(
            was_shared,
            mean,
            tree.select(trained, names),
        )
        return server, {**clients, "own": candidates}

    def personal(self, server, client):
        """Return the model as it was after the client's last training."""
        return client["model"]

    def _candidates(self, parts: Parts) -> list[str]:
        """Name the tensors that can have personal entries.

        Raises:
            FedpflError: where `personalise` names no choice and no layer of the network.
        """
        layers = parts.layers
        choice = self.personalise
        if choice in BY_MOVEMENT:
            return [name for layer in layers for name in layer if name.endswith("weight")]
        if isinstance(choice, int):
            if not -len(layers) <= choice < len(layers):
                raise FedpflError(
                    f"method.personalise: the network has layers 0 to {len(layers) - 1}, "
                    f"got {choice}"
                )
            _ = parts.head  # raises where the layers' order is not clear
            return [*layers[choice]]
        for layer in layers:
            module_names = {name.rpartition(".")[0] for name in layer}
            if choice in layer or choice in module_names:
                return [*layer]
        layer_names = [layer[0].rpartition(".")[0] for layer in layers]
        choices = ", ".join((*BY_MOVEMENT, *layer_names))
        raise FedpflError(
            f"method.personalise must be one of {choices}, or a layer's number, got {choice}"
        )

    def _scores(self, before, after, client):
        """Return the scores; the largest are selected."""
        if self.personalise == "random":
            return tree.select(client["chance"], after)
        distance = tree.map(
            lambda old, new: (new - old).abs(),
            before,
            after,
        )
        if self.personalise == "most":
            return distance
        return tree.map(torch.neg, distance)

    def _extend_mask(self, mask: Tree, scores: Tree) -> Tree:
        """Return the mask with more personal entries, within each tensor or of all together."""
        if self.personalise not in BY_MOVEMENT:
            return mask
        if self.scope == "tensor":
            return tree.map(self._add_largest, mask, scores)
        flat_mask = self._add_largest(tree.ravel(mask), tree.ravel(scores))
        return tree.unravel(flat_mask, mask)

    def _add_largest(self, mask: Tensor, scores: Tensor) -> Tensor:
        """Add to `mask` the largest `scores` outside it.

        Their number is the official one, also with ties.
        """
        # ---- How many: the share p of the shared entries, below a personal share of alpha.
        size = mask.numel()
        personal_count = mask.sum()
        shared_count = size - personal_count
        new_count = shared_count - torch.round((1 - self.p) * shared_count.double())
        if self.clamp:
            # Without the summand an alpha * size of 2.999... would be 2.
            room = math.floor(self.alpha * size + 1e-9) - personal_count
            new_count = torch.minimum(new_count, room).clamp(min=0)
        personal_share = personal_count.double() / size
        if self.strict:
            is_below = personal_share < self.alpha
        else:
            is_below = personal_share <= self.alpha
        new_count = torch.where(is_below, new_count, 0)

        # ---- Which ones: by rank, as a number that differs by client cannot be a slice's.
        candidates = torch.where(mask, -torch.inf, scores).flatten()
        order = candidates.argsort(descending=True, stable=True)
        is_selected = torch.arange(size, device=mask.device) < new_count
        selected = torch.zeros_like(is_selected).scatter(0, order, is_selected)
        return mask | selected.view(mask.shape)


def _shared_mask(like: Tree, mask: Tree) -> Tree:
    """Return a bool for each entry of `like`: it is shared.

    They are those outside the mask, and all of a tensor without one.
    """
    return {
        name: ~mask[name] if name in mask else torch.ones_like(leaf, dtype=torch.bool)
        for name, leaf in like.items()
    }
