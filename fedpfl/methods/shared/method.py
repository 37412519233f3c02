"""The contract of a federated method: hooks in the order of a round. The answers given here are
FedAvg's.

Arguments come in one order: the server's side (`server`, or what is `received` of it), the client's
(`client`, `clients`), the net, trees (`params`, `start`, `uploads`), data (`batch`, `shard`,
`aux`), and then the rest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from fedpfl.ground import tree
from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError, did_you_mean
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.batch import Batch, Shard
from fedpfl.models import Bound, Parts


class Phase(NamedTuple):
    """Describe a stretch of local training.

    mask: which entries of the trained tree move: None for all, or a tree of bools (a bool may stand
        for a whole subtree) and of element-wise bool tensors. What does not move is exempt from
        momentum and weight decay too. A phase in which nothing of a client moves is left out, its
        losses and statistics included.
    stream: phases of one stream continue each other, whatever lies between them: epochs count up,
        minibatch order being a pure function of (seed, round, client, stream, epoch), and the
        optimiser's moments go on. Another stream begins with moments at rest.
    loss: takes the place of `Method.loss`. Either may answer `(loss, tree of [batch, ...])`: what
        is beside the loss is kept for `after_gradient` and, over all steps, for
        `Method.after_training`.
    step: `step(server, client, net, params, batch) -> params, loss` takes the place of an SGD step
        on a loss; gradients by `net.gradient`.
    after_gradient: `after_gradient(server, client, params, grads, batch, loss, aux) -> client`,
        before the step is made; aux is {} where the loss left nothing.
    batches: minibatches that a step takes; with more than one `step` is given a tuple of so many,
        and what is left of an epoch is skipped.
    sgd: values that take the place of those of `local`, such as `{"lr": 0.1, "momentum": 0.0}`.
    """

    epochs: int
    mask: Tree | None = None
    stream: str = "main"
    loss: Callable[..., Any] | None = None
    step: Callable[..., tuple[Tree, Tensor]] | None = None
    after_gradient: Callable[..., dict[str, Tree]] | None = None
    batches: int = 1
    sgd: Mapping[str, float] = {}


STORED = ("participated", "trained")
FACTS = (*STORED, "number", "newcomer", "statistics")
"""What the engine says of a client, as entries of its state that no method keeps."""

SEES = ("mean of uploads", "each upload", "client states")
"""What a method's server needs to see of its clients, the least first; each needs what stands
before it, too.
"""

SERVED = {"turns", "before_turn", "download", "aggregate"}
"""The hooks that answer for the server, beside a Turn's survey."""

ORDER = {
    "loss": ("server", "client", "net", "params", "batch"),
    "step": ("server", "client", "net", "params", "batch"),
    "after_gradient": ("server", "client", "params", "grads", "batch", "loss", "aux"),
    "survey": ("server", "clients", "uploads"),
}
"""The arguments of a Phase's functions and a Turn's."""


class Turn(NamedTuple):
    """Name clients that train side by side.

    survey: `survey(server, clients, uploads) -> server, clients` takes the place of
        `Method.aggregate`, with the states that the clients had before, stacked; nothing else of
        such a turn is kept, it is no participation, and its batch orders are its own.
    trains: whether they train, in a survey; statistics or prototypes may need no step.
    """

    clients: list[int]
    survey: Callable[..., tuple[Tree, dict[str, Tree]]] | None = None
    trains: bool = True


@dataclass(frozen=True)
class Method(Checked):
    """Answer what the engine asks in a round: fields are hyperparameters, hooks are pure functions
    of ONE client.

    Trees: `server` is what the server knows; `client` is a client's state, wherever it is stored
    (always a dict, of equal structure, shapes and dtypes from `init` on; entries that hooks lay
    over it beside those live for one round); `params` is what local training moves. The engine lays
    FACTS over a client's state: the bools `participated` (in an earlier round), `trained` (has made
    a step, be it in this round) and `newcomer`; its `number`, an int64 (none of the federation's,
    for a newcomer); and outside training `statistics`, BatchNorm's by model role.

    Nothing is stored on self, no hook changes its arguments, and no control flow depends on tensor
    values, as the engine vectorises the hooks over clients. Some hooks say that they are called
    client by client on every backend; these may branch, optimise and solve. Hooks are annotated
    here, and nowhere else.

    statistics: where BatchNorm's running ones live, `aggregate`d at the server or `local`: they
    never leave a client.
        None: as the method has it. Private models keep theirs in any case.
    """

    statistics: Literal["aggregate", "local"] | None = field(default=None, kw_only=True)

    own_steps: ClassVar[bool] = False
    """Whether `phases` has a `Phase.step`: the run's optimiser and schedule would have no part in
    it.
    """

    validates: ClassVar[bool] = False
    """Whether hooks look at `Shard.validation`: a run that holds no samples out is then refused."""

    pairs: ClassVar[int] = 0
    """How many low-rank pairs the method wants in an adapted layer (adapter=lora, adapter.pairs):
    other networks are
    then refused. 0: it takes any network."""

    server_sees: ClassVar[str] = SEES[0]
    """What the server needs to see of its clients, one of SEES; the most where a class answers
    itself a hook that the server is asked (SERVED), unless it says otherwise beside it.

    mean of uploads: it takes a cohort's uploads together at once, and whoever put their weighted
        mean in the place of each would change nothing; clients' states stay as they are. So uploads
        can be added up in secret.
    each upload: it looks at single ones. client states: at what clients keep, too. What the server
        drew or found out itself for a client (`sample`, `init_clients`, `before_turn`), and who
        took part, it knows.
    """

    def __post_init__(self) -> None:
        """Check what annotations say of the values, and that `buffers` does what `statistics` says."""
        super().__post_init__()
        where = sorted({*self.buffers().values()})
        self.check(
            self.statistics in (None, *where),
            "statistics",
            f"{' or '.join(where)} for {type(self).__name__}",
        )
        self.check(
            isinstance(self.randoms, int) and self.randoms >= 0,
            "randoms",
            "a whole number, 0 or more",
        )

    @property
    def randoms(self) -> int:
        """Return how many uniform numbers each sample is given, in `batch.random`."""
        return 0

    def __init_subclass__(cls) -> None:
        """Raise FedpflError for a public function that is no hook, or takes a hook's arguments in
        another order.
        """
        if "server_sees" not in vars(cls) and SERVED & vars(cls).keys():
            cls.server_sees = SEES[-1]
        for name, value in vars(cls).items():
            function = callable(value) or isinstance(value, classmethod | property)
            if not function or name.startswith("_"):
                continue
            if not hasattr(Method, name):
                raise FedpflError(
                    f"{cls.__name__}.{name} is no hook of a method{did_you_mean(name, hook_names())}; what is not begins with _"
                )
            if callable(value) and (
                fault := argument_order_fault(getattr(cls, name), getattr(Method, name))
            ):
                raise FedpflError(f"{cls.__name__}.{name} takes {fault}")

    # ---- before round 1

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """Return the server's and one client's state, from the common initial parameters.

        Only here a method sees which entries are head, body or normalisation, and keeps what it
        needs as keys.
        """
        return params, {}

    def init_clients(self, clients: int, generator: Generator) -> dict[str, Tree]:
        """Return in what clients differ from the beginning, stacked `[clients, ...]`, laid over
        `init`'s state.
        """
        return {}

    def buffers(self) -> dict[str, str]:
        """Return where BatchNorm statistics live, by model role: `aggregate`d at the server or
        `local`.
        """
        return {"main": self.statistics or "aggregate"}

    # ---- a round

    def turns(
        self, played: int, cohort: list[int], clients: int, generator: Generator
    ) -> list[Turn]:
        """Return who trains in the round that follows `played` rounds: one turn after another."""
        return [Turn(cohort)]

    def before_turn(
        self,
        server: Tree,
        clients: dict[str, Tree],
        read_states: Callable[[Sequence[int]], dict[str, Tree]],
        generator: Generator | None,
    ) -> dict[str, Tree]:
        """Return what the server finds out for a turn's clients, stacked `[cohort, ...]`, laid over
        their states.

        clients: their states. read_states: gives the states of any clients that take part, stacked, by
        their numbers, as they are now. It is also asked before all clients are evaluated, newcomers
        apart, and may branch on values. `statistics` are those that the clients begin with, as they
        are of `before_training` and `before_evaluation`; of `after_training` those that they end
        with.
        generator: the same for whatever cohort; to be drawn from for all clients. None before an
        evaluation.
        """
        return {}

    def sample(self, server: Tree, generator: Generator) -> dict[str, Tree]:
        """Return what the server draws at random for the client and round, laid over its state."""
        return {}

    def before_training(
        self, server: Tree, client: dict[str, Tree], net: Bound, shard: Shard
    ) -> dict[str, Tree]:
        """Return what the client finds out from its training data, laid over its state; of one form
        for all clients.

        Where the first axis differs from client to client mark it `tree.Ragged`. Called client by
        client. The net is in training mode (`net.still()` is not); its statistics are restored.
        """
        return {}

    def prepare(self, server: Tree, client: dict[str, Tree]) -> dict[str, Tree]:
        """Return the state as it enters the round: what later hooks share (scores, masks) is
        computed once, here.
        """
        return client

    def download(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Return what travels down; `tree.Masked` or `tree.Agreed` where only some entries do.

        Beside it, as `tree.Known`, what a client has without being sent it: it is not counted.
        """
        return server

    def start(self, received: Tree, client: dict[str, Tree]) -> Tree:
        """Return the tree that local training starts from, given what `download` sent: zeros where
        nothing was.
        """
        return received

    def phases(
        self, server: Tree, client: dict[str, Tree], params: Tree, epochs: int
    ) -> list[Phase]:
        """Return which entries move when. The number of phases and their epochs are the same for
        all clients.
        """
        return [Phase(epochs)]

    def loss(
        self, server: Tree, client: dict[str, Tree], net: Bound, params: Tree, batch: Batch
    ) -> Any:
        """Return what local training minimises on a batch. Of several models add the losses:
        gradients stay apart.

        Or return `(loss, tree of [batch, ...])`, as `Phase.loss`.
        """
        return batch.cross_entropy(self.predict(net, params, batch))

    def after_training(
        self,
        server: Tree,
        client: dict[str, Tree],
        net: Bound,
        params: Tree,
        shard: Shard,
        aux: Tree,
    ) -> dict[str, Tree]:
        """Return what the client finds out from its data with the trained `params`, laid over its
        state.

        Called client by client, the net in evaluation mode. aux: what the losses left beside them,
        of all steps in turn; {} if there was nothing.
        """
        return {}

    def updated_buffers(self, server: Tree, client: dict[str, Tree]) -> dict[str, Tree]:
        """Return, for roles of which not all statistics move, a tree of bools: which do, and are
        averaged over.
        """
        return {}

    def finish(
        self, server: Tree, client: dict[str, Tree], start: Tree, params: Tree
    ) -> tuple[Tree, dict[str, Tree]]:
        """Return what goes up after training, and the client's state; entries that are not init's
        are dropped.
        """
        return params, client

    def aggregate(
        self,
        server: Tree,
        clients: dict[str, Tree],
        net: Bound,
        uploads: Tree,
        weight: Tensor,
        generator: Generator,
    ) -> tuple[Tree, dict[str, Tree]]:
        """Return the new server's and the clients' states, from stacked uploads and states
        `[cohort, ...]`.

        The net is in evaluation mode, with the server's statistics from before the turn. weight:
        the clients' shares of the cohort's training samples, `[cohort]`, which sum to 1. generator:
        of the round, on the CPU; a round's turns draw from it one after another.
        """
        return tree.mean(uploads, weight), clients

    # ---- evaluation

    def evaluated(self, server: Tree, client: dict[str, Tree], params: Tree) -> Tree:
        """Return the part of a trained tree that is evaluated right before and after local
        training.
        """
        return params

    def before_evaluation(
        self, server: Tree, client: dict[str, Tree], net: Bound, shard: Shard
    ) -> dict[str, Tree]:
        """Return what is found out before `personal`, like `before_training`; part of the method,
        no fine-tuning.
        """
        return {}

    def personal(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Return the model by which a client is evaluated between rounds: by default what it would
        start from.
        """
        client = self.prepare(server, client)
        return self.evaluated(server, client, self._begin(server, client))

    def predict(self, net: Bound, params: Tree, batch: Batch) -> Tensor:
        """Return the logits `[batch, classes]` of an evaluated model; its evaluation shows no
        labels (`batch.y`).
        """
        return net(params, batch.x)

    def finetuning(self, params: Tree, parts: Parts, epochs: int) -> list[Phase]:
        """Return the phases in which an evaluated model is fine-tuned, by default on plain
        cross-entropy.
        """
        return [Phase(epochs)]

    def metrics(self, server: Tree, client: dict[str, Tree]) -> dict[str, Tensor]:
        """Return scalars of one client worth a column each, averaged over the cohort; sees the
        prepared state.
        """
        return {}

    def masks(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Return which entries are a client's own between rounds, a bool for each, for masks.json;
        {} without masks.

        Called client by client, once a run has ended.
        """
        return {}

    def _begin(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Return what `start` makes of what `download` sends."""
        return self.start(tree.unmask_received(self.download(server, client)), client)


def hook_names() -> list[str]:
    """Return the names of all hooks."""
    return [name for name, hook in vars(Method).items() if callable(hook) and name[0] != "_"]


def flag(like: Tree) -> Tensor:
    """Return a False of its own for a client's state, on the device of `like`."""
    return torch.zeros((), dtype=torch.bool, device=tree.leaves(like)[0].device)


def argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's arguments but for `self`."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


@functools.cache
def _hook_argument_names() -> set[str]:
    """Return the names of all hooks' arguments, and `x`, which `predict` was given where it is
    given a batch now.
    """
    return {name for hook in hook_names() for name in argument_names(getattr(Method, hook))} | {"x"}


def argument_order_fault(
    function: Callable[..., Any], like: Callable[..., Any] | Sequence[str]
) -> str:
    """Say what to change where a function takes the contract's arguments, which `like` has, in
    another order.

    Names of its own are free, so are `*args`; "" if nothing is to be changed.
    """
    right = argument_names(like) if callable(like) else list(like)
    kinds = {own.kind for own in inspect.signature(function).parameters.values()}
    given = argument_names(function)
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return ""
    strange = any(
        own != wanted and own in _hook_argument_names()
        for own, wanted in zip(given, right, strict=False)
    )
    if not strange and len(given) == len(right):
        return ""
    return f"({', '.join(given)}) where the contract has ({', '.join(right)}); change its arguments, and calls of it"
