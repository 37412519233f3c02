"""Methods whose clients keep some layers to themselves: LG-FedAvg, FedRep, FedBN. FedPer has a file of its own."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedpfl.methods.base import Batch, Method, Phase, top
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class Partial(Method, ABC):
    """A client's model is its own entries over the server's. A client never sampled has the initial ones."""

    @abstractmethod
    def own(self, parts: Parts) -> tuple[str, ...]:
        """Names of the parameters that never leave a client."""

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """The server knows the shared entries alone."""
        own = {name: params[name] for name in self.own(parts)}
        return _without(params, own), {"own": own}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The latest shared entries beside the client's own."""
        return {**server, **mine["own"]}

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The shared entries go up, the own ones stay."""
        return _without(end, mine["own"]), {"own": {name: end[name] for name in mine["own"]}}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """As at the start of a round."""
        return self.start(server, mine)


@dataclass(frozen=True)
class LGFedAvg(Partial):
    """LG-FedAvg: local representations under a global top (Liang et al., arXiv:2001.01523).

    layers: how many are shared.
    variant: `paper`: the top ones; `as_published`: the lowest ones (of one layer conv1), as in FL-bench, from which
        FedOBP's tables were made.
    BatchNorm statistics stay with the client.
    """

    layers: int = 1
    variant: Literal["paper", "as_published"] = "paper"

    buffers: ClassVar[dict[str, str]] = {"main": "local"}

    def __post_init__(self) -> None:
        self.check(self.layers >= 0, "layers", "0 or more")
        self.check(self.variant in ("paper", "as_published"), "variant", "paper or as_published")

    def own(self, parts: Parts) -> tuple[str, ...]:
        """All layers but the shared ones."""
        upper = top(parts, self.layers)
        if self.variant == "as_published":
            return top(parts, len(parts.layers) - self.layers)
        return tuple(name for layer in parts.layers for name in layer if name not in upper)


@dataclass(frozen=True)
class FedRep(Partial):
    """FedRep: the personal head is trained first, then the shared body under it (Collins et al., ICML 2021).

    body_epochs: E_b, the last of the local epochs. head_epochs: E_h; None: the epochs that are left (FL-bench: 4 + 1).
    In the head phase the body's BatchNorm layers use their statistics and do not move them.
    """

    body_epochs: int = 1
    head_epochs: int | None = None

    def __post_init__(self) -> None:
        self.check(self.body_epochs >= 0, "body_epochs", "0 or more")
        self.check(self.head_epochs is None or self.head_epochs >= 0, "head_epochs", "0 or more, or null")

    def own(self, parts: Parts) -> tuple[str, ...]:
        """The head."""
        return parts.head

    def phases(self, server: Tree, mine: dict[str, Tree], params: Tree, epochs: int) -> list[Phase]:
        """Head, then body; what does not move is left out of differentiation."""
        head = {name: name in mine["own"] for name in params}
        first = max(0, epochs - self.body_epochs) if self.head_epochs is None else self.head_epochs
        body = {name: not own for name, own in head.items()}
        return [Phase(first, head, loss=self.head_loss), Phase(self.body_epochs, body)]

    def head_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy on the frozen body's features."""
        return self.loss(net.still(), params, batch, server, mine)

    def tune(self, params: Tree, parts: Parts, epochs: int) -> list[Phase]:
        """The head alone, as the authors retrain heads in their last round."""
        return [Phase(epochs, {name: name in parts.head for name in params})]


@dataclass(frozen=True)
class FedBN(Partial):
    """FedBN: BatchNorm layers stay local, with their statistics (Li et al., ICLR 2021, arXiv:2102.07623).

    Selected by module type; LayerNorm and GroupNorm are shared. Without BatchNorm it is FedAvg.
    """

    buffers: ClassVar[dict[str, str]] = {"main": "local"}

    def own(self, parts: Parts) -> tuple[str, ...]:
        """Scale and shift of every BatchNorm layer."""
        return parts.batch_norm


def _without(params: Tree, names: Tree) -> Tree:
    return {name: value for name, value in params.items() if name not in names}
