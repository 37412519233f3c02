"""The questions that a federated method answers. The answers given here are FedAvg's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedpfl import tree
from fedpfl.errors import FedpflError
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


class Batch(NamedTuple):
    """One minibatch of one client: `x` `[batch, *shape]` (images: channels, height, width), `y` `[batch]`.

    `weight` `[batch]` is 0 for padding and 1 for samples; None means that there is no padding.
    `random`: the step's random numbers `[Method.randoms]`, uniform in [0, 1); None or empty where none are asked for.
    """

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    random: Tensor | None = None


class Data(NamedTuple):
    """Some samples of one client, images `[samples, channels, height, width]` or others, and labels `[samples]`."""

    x: Tensor
    y: Tensor

    def rows(self, rows: Tensor) -> Batch:
        """Samples `rows`, in memory channels last if the images are."""
        x = self.x.permute(0, 2, 3, 1)[rows].permute(0, 3, 1, 2) if self.x.dim() == 4 else self.x[rows]
        return Batch(x, self.y[rows])

    def chunks(self, size: int = 256) -> Iterator[Batch]:
        """All samples in order, in batches of bounded size."""
        for x, y in zip(self.x.split(size), self.y.split(size), strict=True):
            yield Batch(x, y)


class Shard(NamedTuple):
    """A client's training data. `order(stream, epoch)` is a permutation of it, the one that local training draws."""

    data: Data
    batch_size: int
    order: Callable[[str, int], Tensor]

    def features(self, net: Bound, params: Tree) -> Tensor:
        """The head's inputs for all samples, `[samples, features]`, without gradients; `net` as it is bound."""
        with torch.no_grad():
            return torch.cat([net.features(params, batch.x)[1] for batch in self.data.chunks()])

    def batches(self, stream: str, epoch: int, share: float = 1.0) -> Iterator[Batch]:
        """Minibatches of an epoch's first `share` of samples; a last partial one is kept, a lone sample not."""
        order = self.order(stream, epoch)
        for rows in order[: int(share * len(order))].split(self.batch_size):
            if len(rows) > 1:
                yield self.data.rows(rows.to(self.data.y.device))


class Phase(NamedTuple):
    """A stretch of local training.

    mask: which entries of the trained tree move: None for all, or a tree of bools (a bool may stand for a whole
        subtree) and of element-wise bool tensors. What does not move is exempt from momentum and weight decay too.
    stream: minibatch order is a pure function of (seed, round, client, stream, epoch); epochs count up per stream,
        so that phases of equal streams continue each other and those of different streams do not.
    loss: replaces the method's loss during this phase.
    lr, momentum: replace the configured ones during this phase.
    skip: a client's flag (0-dimensional): it leaves the phase out, statistics and loss included.
    """

    epochs: int
    mask: Tree | None = None
    stream: str = "main"
    loss: Callable[..., Any] | None = None
    lr: float | None = None
    momentum: float | None = None
    skip: Tensor | None = None


def side_by_side(
    epochs: int, own: int, global_loss: Callable[..., Any], personal_loss: Callable[..., Any]
) -> list[Phase]:
    """For trained trees `{"w": ..., "v": ...}`: both together for as long as both train, then the one with more epochs.

    epochs: of the global model w; own: of the private one v.
    """
    return [
        Phase(min(epochs, own)),
        Phase(epochs - own, {"w": True, "v": False}, loss=global_loss),
        Phase(own - epochs, {"w": False, "v": True}, loss=personal_loss),
    ]


def mean_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy averaged over the real samples of the batch."""
    if batch.weight is None:
        return F.cross_entropy(logits, batch.y)
    losses = F.cross_entropy(logits, batch.y, reduction="none")
    return (losses * batch.weight).sum() / batch.weight.sum()


@dataclass(frozen=True)
class Method:
    """A federated method: its fields are its hyperparameters, its methods are pure functions of ONE client.

    Trees: `server` is what the server knows; `mine` is what belongs to the client, wherever it is stored (always a
    dict; equal structure, shapes and dtypes from `init` on); a *trained* tree is what local training moves. Nothing is
    ever stored on self, no answer changes its arguments, and no control flow depends on tensor values: the engine
    vectorises the answers over clients.
    """

    buffers: ClassVar[dict[str, str]] = {"main": "aggregate"}
    """Model roles and where their buffers (BatchNorm statistics) live: `aggregate`d at the server or `local`."""
    judged_role: ClassVar[str] = "main"
    """The role whose buffers go with the judged model."""
    mirrors: ClassVar[dict[str, str]] = {}
    """Further roles, whose buffers are in each participation those that another role starts it with; never stored."""
    sequential: ClassVar[bool] = False
    """True: the cohort takes turns, in an order drawn each round; each client starts from what the last one left."""

    vectorises: ClassVar[bool] = True
    """False: `prepare` is asked client by client even by the batched backend, and may branch on values."""
    together: ClassVar[int] = 1
    """Minibatches of one step: with more than one, `step` is given a tuple of so many Batches; what is left of an epoch
    is skipped."""

    # Optional questions; None means that the method has no use for them.
    endow: ClassVar[Callable[..., dict[str, Tree]] | None] = None
    """`endow(generator, clients) -> dict`, stacked `[clients, ...]`: in what clients differ from the beginning (what
    their devices can do), laid over `init`'s `mine`, which has the same keys."""
    eligible: ClassVar[Callable[..., Tensor] | None] = None
    """`eligible(server, mine) -> bool` (0-dimensional): whether the client may still be drawn. The run ends with the
    last one."""
    draw: ClassVar[Callable[..., dict[str, Tree]] | None] = None
    """`draw(generator, server) -> dict`: randomness drawn by the server for one client and round, laid over `mine`."""
    observe: ClassVar[Callable[..., dict[str, Tree]] | None] = None
    """`observe(params, grads, loss, batch, server, mine) -> mine`: after each gradient, before its step."""
    summarize: ClassVar[Callable[..., Tree] | None] = None
    """`summarize(net, end, batch, server, mine) -> tree`: summed over the client's training data after training, the
    net in evaluation mode, and handed to `finish` as `mine["summary"]`."""
    validate: ClassVar[Callable[..., Tree] | None] = None
    """`validate(net, end, batch, server, mine) -> tree`: like `summarize`, over the client's held-out samples (its test
    split where the run holds none out); handed to `finish` as `mine["validation"]`."""
    touched: ClassVar[Callable[..., dict[str, Tree]] | None] = None
    """`touched(server, mine) -> {role: tree}`, bools like a role's buffers: which of them this participation may move.
    A buffer at the server is averaged over those who moved it."""
    settle: ClassVar[Callable[..., dict[str, Tree]] | None] = None
    """`settle(server, uploads, mine) -> mine`: after the merge, over the stacked cohort; for replies by client."""
    survey: ClassVar[Callable[..., dict[str, Tree]] | None] = None
    """`survey(net, shard, server, mine) -> dict`: what a client finds out from its training data (a Shard) before
    `prepare`, laid over `mine`; one structure for all. Asked client by client on every backend: may branch on values,
    optimise, solve. The net is in training mode (`net.still()` is not); its statistics are restored."""
    adapt: ClassVar[Callable[..., dict[str, Tree]] | None] = None
    """`adapt(net, shard, server, mine) -> dict`: like `survey`, before `personal`; part of the method, not tuning."""
    digest: ClassVar[Callable[..., dict[str, Tree]] | None] = None
    """`digest(kept, server, mine) -> dict`: after training, client by client like `survey`, laid over `mine` before
    `finish`. `kept`: what `loss` returned beside the loss, as `(loss, tree of [batch, ...])`, of all steps in turn."""
    step: ClassVar[Callable[..., tuple[Tree, Tensor]] | None] = None
    """`step(net, params, batch, server, mine) -> params, loss`: a whole step of local training, for methods whose step
    is not SGD on a loss; `phases` then only says how many epochs of which stream. Gradients by `net.gradient`."""
    gather: ClassVar[Callable[..., tuple[Tree, dict[str, Tree]]] | None] = None
    """`gather(server, uploads, mine) -> server, mine`: before rounds that `gathers`, over all clients stacked, who
    trained once from the current state. `mine` is what they kept before; whatever they brought back is dropped."""

    @property
    def randoms(self) -> int:
        """Random numbers per step of local training."""
        return 0

    def gathers(self, played: int) -> bool:
        """Whether all clients train for `gather` before the round that follows `played` rounds."""
        return False

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """Server's and one client's tree before round 1, from the common initial parameters."""
        return params, {}

    def prepare(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """`mine` as it enters the round: whatever the later answers share (scores, masks) is computed once, here."""
        return mine

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The trained tree that local training starts from."""
        return server

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """What travels down (for the count only)."""
        return server

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """What local training minimises on one batch. Several models: add their losses, the gradients stay separate."""
        return mean_cross_entropy(self.predict(net, params, batch.x), batch)

    def phases(self, server: Tree, mine: dict[str, Tree], params: Tree, epochs: int) -> list[Phase]:
        """Which entries move when. The number of phases and their epochs are the same for all clients."""
        return [Phase(epochs)]

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """After training: what is uploaded, and `mine` as it is kept."""
        return end, mine

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """The new server tree from the stacked uploads and the clients' shares `weight` `[cohort]`, which sum to 1."""
        return tree.mean(uploads, weight)

    def judged(self, server: Tree, mine: dict[str, Tree], trained: Tree) -> Tree:
        """The part of a trained tree by which the client is judged right before and after local training."""
        return trained

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The model by which a client is judged between rounds."""
        return server

    def predict(self, net: Bound, params: Tree, x: Tensor) -> Tensor:
        """Logits `[batch, classes]` of a judged model."""
        return net(params, x, self.judged_role)

    def tune(self, params: Tree, parts: Parts, epochs: int) -> list[Phase]:
        """Phases of fine-tuning a judged model before it is tested (cross-entropy; all entries by default)."""
        return [Phase(epochs)]

    def measure(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tensor]:
        """Scalars of one client worth a column of their own; averaged over the cohort. Sees the prepared `mine`."""
        return {}

    def __init_subclass__(cls) -> None:
        """Raise FedpflError for a method of a name that is nearly a hook's: it would never be called."""
        hooks = [name for name in vars(Method) if not name.startswith("_")]
        for name, value in vars(cls).items():
            near = difflib.get_close_matches(name, hooks, 1, 0.8)
            if callable(value) and near and name not in hooks and not name.startswith("_"):
                raise FedpflError(f"{cls.__name__}.{name} is no hook of a method; did you mean {near[0]}?")

    def check(self, rule: bool, field: str, allowed: str) -> None:
        """Raise ValueError about a hyperparameter unless `rule` holds."""
        if not rule:
            raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)!r}")


def top(parts: Parts, layers: int) -> tuple[str, ...]:
    """Return the names in the last `layers` of a network. Raises FedpflError where it has fewer."""
    below = len(parts.layers) - layers
    if below < 0:
        raise FedpflError(f"method.layers must be at most {len(parts.layers)}, the network's layers, got {layers}")
    return tuple(name for layer in parts.layers[below:] for name in layer)


def flag(like: Tree) -> Tensor:
    """A False of its own for a client's tree, on the device of `like`."""
    return torch.zeros((), dtype=torch.bool, device=tree.leaves(like)[0].device)
