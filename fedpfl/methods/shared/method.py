"""The contract of a federated method: hooks in the order of a round, with FedAvg's answers.

Arguments come in one order: the server's side (`server`, or the part that is `received`), the client's
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
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.batch import Batch, Shard
from fedpfl.models import Bound, Parts


class Phase(NamedTuple):
    """A stretch of local training.

    Attributes:
        mask: which entries of the trained tree move: None for all, or a tree of bools (a bool may
            stand for a whole subtree) and of element-wise bool tensors. What does not move is
            exempt from momentum and weight decay too. A phase in which nothing of a client moves is
            left out, its losses and statistics included.
        stream: phases of one stream continue each other, across other phases between them: epochs count
            up, minibatch order being a pure function of (seed, round, client, stream, epoch), and
            the optimiser's moments go on. Another stream begins with initial moments.
        loss: takes the place of `Method.loss`. Either may answer `(loss, tree of [batch, ...])`:
            the tree is kept for `after_gradient` and, over all steps, for
            `Method.after_training`.
        step: `step(server, client, net, params, batch) -> params, loss` takes the place of an SGD
            step on a loss; gradients by `net.gradient`.
        after_gradient: `after_gradient(server, client, params, grads, batch, loss, aux) -> client`,
            before the step is made; aux is {} where the loss left nothing.
        batches: minibatches that a step takes; with more than one `step` is given a tuple of so
            many, and the rest of an epoch is skipped.
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
"""What the engine lays over a client's state, as entries that no method keeps."""

SEES = ("mean of uploads", "each upload", "client states")
"""What a server may need to see of its clients, the least first; each includes the ones before."""

OBJECTIVE = {"phases", "loss", "predict"}
"""The hooks that decide what is minimised."""

SERVED = {"turns", "before_turn", "download", "aggregate"}
"""The hooks that answer for the server, beside a Turn's survey."""


class Turn(NamedTuple):
    """Clients that train side by side.

    Attributes:
        clients: their numbers.
        survey: `survey(server, clients, uploads) -> server, clients` takes the place of
            `Method.aggregate`, with the states that the clients had before, stacked; nothing else
            of such a turn is kept, it is no participation, and its batch orders are its own.
        trains: whether they train, in a survey; statistics or prototypes may need no step.
    """

    clients: list[int]
    survey: Callable[..., tuple[Tree, dict[str, Tree]]] | None = None
    trains: bool = True


@dataclass(frozen=True)
class Method(Checked):
    """Answer the engine's questions in a round: hyperparameters are fields, questions are hooks.

    Hooks are pure functions of ONE client. Nothing is stored on self, no hook changes its
    arguments, and no control flow depends on tensor values, as the engine vectorises the hooks over
    clients. Some hooks say that they are called client by client on every backend; these may
    branch, optimise and solve. Hooks are annotated here, and nowhere else.

    Trees: `server` is the server state; `client` is a client's state, wherever it is stored
    (always a dict, of equal structure, shapes and dtypes from `init` on; entries that hooks lay
    over it beside those live for one round); `params` is what local training moves. The engine lays
    FACTS over a client's state: the bools `participated` (in an earlier round), `trained` (has made
    a step, be it in this round) and `newcomer`; its `number`, an int64 (none of the federation's,
    for a newcomer); and outside training `statistics`, BatchNorm's by model role.

    Attributes:
        statistics: where BatchNorm's running ones live, `aggregate`d at the server or `local`: they
            never leave a client. None: as the method has it. Private models keep theirs in any
            case.
    """

    statistics: Literal["aggregate", "local"] | None = field(default=None, kw_only=True)

    title: ClassVar[str] = ""
    """Name of a plugin's method in tables; a method of the house has it in its YAML file."""

    own_steps: ClassVar[bool] = False
    """Whether `phases` has a `Phase.step`: the run's optimiser and schedule then have no part."""

    needs_classes: ClassVar[str] = ""
    """Why labels must be classes, as a clause; other tasks are refused. Empty: any task will do."""

    validates: ClassVar[bool] = False
    """Whether hooks look at `Shard.validation`.

    A run without validation samples is then refused.
    """

    pairs: ClassVar[int] = 0
    """How many low-rank pairs the method wants in an adapted layer (adapter=lora, adapter.pairs).

    Other networks are then refused. 0: it takes any network.
    """

    takes_kinds: ClassVar[bool] = False
    """Whether clients may have networks of different kinds (model=mixed).

    `init` is then asked for each kind. The server's tree, uploads, metrics, and the entries of client
    states that the server's hooks read, have one form for all; these hooks see no others.
    """

    takes_ranks: ClassVar[bool] = False
    """Whether ranks of clients' low-rank pairs may differ (`Parts.ranks`).

    Such runs of other methods are refused.
    """

    has_residue: ClassVar[bool] = False
    """Whether adapted layers have `lora_residue` beside a pair, a matrix that is added to B A."""

    pools_samples: ClassVar[bool] = False
    """Whether one client trains in the cohort's place, on the samples of all clients.

    That is no federation, so that private runs and nodes refuse it.
    """

    server_sees: ClassVar[str] = SEES[0]
    """What the server needs to see of its clients, one of SEES.

    It is the most where a class answers itself a hook that the server is asked (SERVED), unless the
    class says otherwise.

    mean of uploads: it takes a cohort's uploads together at once, and whoever put their weighted
        mean in the place of each would change nothing; clients' states stay as they are. So uploads
        can be added up in secret.
    each upload: it looks at single ones.
    client states: it looks at what clients keep, too. What the server drew or found out itself for
        a client (`sample`, `init_clients`, `before_turn`), and who took part, it knows.
    """

    mixes_samples: ClassVar[str] = ""
    """Why a minibatch's loss is no mean over its samples, each alone, as a clause; "": it is one.

    Others are refused where each sample's gradient is clipped (privacy=sample). A class that
    answers itself what is minimised (OBJECTIVE) has to say so.
    """

    def __post_init__(self) -> None:
        """Check the values against their annotations, and `statistics` against `buffers`."""
        super().__post_init__()
        choices = sorted(set(self.buffers().values()))
        self.check(
            self.statistics in (None, *choices),
            "statistics",
            f"{' or '.join(choices)} for {type(self).__name__}",
        )
        self.check(
            isinstance(self.randoms, int) and self.randoms >= 0,
            "randoms",
            "a whole number, 0 or more",
        )

    @property
    def randoms(self) -> int:
        """Return the number of uniform numbers in `batch.random` for each sample."""
        return 0

    def __init_subclass__(cls) -> None:
        """Check that public functions are hooks and take their arguments in the contract's order.

        Raises:
            FedpflError: for one that is no hook, or has another order.
        """
        # A class that answers for the server is taken to see everything, unless it says less.
        if "server_sees" not in vars(cls) and SERVED & vars(cls).keys():
            cls.server_sees = SEES[-1]
        if "takes_kinds" not in vars(cls):
            cls.takes_kinds = False
        if "mixes_samples" not in vars(cls) and OBJECTIVE & vars(cls).keys():
            cls.mixes_samples = (
                'nobody has said that its loss is a mean over single samples (mixes_samples = "" in'
                " the class says so)"
            )
        # A misspelt hook would never be called, and the run would be another method's.
        for name, value in vars(cls).items():
            is_function = callable(value) or isinstance(value, classmethod | property)
            if not is_function or name.startswith("_"):
                continue
            if not hasattr(Method, name):
                if name in vars(cls).get("__annotations__", ()):
                    continue  # a field with a function as default
                raise FedpflError(
                    f"{cls.__name__}.{name} is no hook of a method{did_you_mean(name, hook_names())}; "
                    "what is not begins with _"
                )
            if callable(value):
                fault = _argument_order_fault(getattr(cls, name), getattr(Method, name))
                if fault:
                    raise FedpflError(f"{cls.__name__}.{name} takes {fault}")

    # ---- before round 1

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """Return the server's and one client's state, from the common initial parameters.

        Only here a method sees which entries are head, body or normalisation, and keeps the part it
        needs as keys.
        """
        return params, {}

    def init_clients(self, clients: int, generator: Generator) -> dict[str, Tree]:
        """Return initial entries that differ by client, stacked `[clients, ...]`.

        It is laid over the client state of `init`.
        """
        return {}

    def buffers(self) -> dict[str, str]:
        """Return for each model role where its BatchNorm statistics live.

        They are `aggregate`d at the server or `local`.
        """
        return {"main": self.statistics or "aggregate"}

    # ---- a round

    def turns(
        self, played: int, cohort: list[int], clients: int, generator: Generator
    ) -> list[Turn]:
        """Plan the turns of the round after `played` rounds, one after another."""
        return [Turn(cohort)]

    def before_turn(
        self,
        server: Tree,
        clients: dict[str, Tree],
        read_states: Callable[[Sequence[int]], dict[str, Tree]],
        generator: Generator | None,
    ) -> dict[str, Tree]:
        """Return entries that the server computes for a turn's clients, stacked `[cohort, ...]`.

        It is laid over their states. The hook is also asked before all clients are evaluated,
        newcomers apart, and may branch on values. `statistics` are those that the clients begin
        with, as they are of `before_training` and `before_evaluation`; of `after_training` those
        that they end with.

        Args:
            server: the server state.
            clients: the states of the turn's clients, stacked.
            read_states: gives the present states of any clients that take part, stacked, by their
                numbers.
            generator: the same for any cohort; to be drawn from for all clients. None before
                an evaluation.
        """
        return {}

    def sample(self, server: Tree, generator: Generator) -> dict[str, Tree]:
        """Draw the server's random entries for one client and round, laid over its state."""
        return {}

    def before_training(
        self, server: Tree, client: dict[str, Tree], net: Bound, shard: Shard
    ) -> dict[str, Tree]:
        """Compute entries from the client's training data, laid over its state.

        It has one form for all clients; where the first axis differs from client to client mark it
        `tree.Ragged`. Called client by client. The net is in training mode (`net.still()` is not);
        its statistics are restored.
        """
        return {}

    def prepare(self, server: Tree, client: dict[str, Tree]) -> dict[str, Tree]:
        """Return the client's state as it enters the round.

        What later hooks share (scores, masks) is computed once, here.
        """
        return client

    def download(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Return the download.

        It is `tree.Masked` or `tree.Agreed` where only some entries travel. Entries that
        a client has anyway stand beside as `tree.Known`, which is not counted.
        """
        return server

    def start(self, received: Tree, client: dict[str, Tree]) -> Tree:
        """Return the tree that local training starts from.

        `received` is what `download` sent, with zeros where nothing was.
        """
        return received

    def phases(
        self, server: Tree, client: dict[str, Tree], params: Tree, epochs: int
    ) -> list[Phase]:
        """Plan the phases of local training.

        The number of phases and their epochs are the same for all clients.
        """
        return [Phase(epochs)]

    def loss(
        self, server: Tree, client: dict[str, Tree], net: Bound, params: Tree, batch: Batch
    ) -> Any:
        """Return the loss that local training minimises on a batch.

        Of several models add the losses: their gradients do not mix. Or return `(loss, tree of
        [batch, ...])`, as `Phase.loss`.
        """
        return batch.loss(self.predict(net, params, batch))

    def after_training(
        self,
        server: Tree,
        client: dict[str, Tree],
        net: Bound,
        params: Tree,
        shard: Shard,
        aux: Tree,
    ) -> dict[str, Tree]:
        """Compute entries with the trained `params`, laid over the client's state.

        Called client by client, the net in evaluation mode. aux: the trees beside the losses,
        of all steps in turn; {} if there was nothing.
        """
        return {}

    def updated_buffers(self, server: Tree, client: dict[str, Tree]) -> dict[str, Tree]:
        """Return trees of bools for roles with statistics that do not all move.

        Only these are averaged over.
        """
        return {}

    def finish(
        self, server: Tree, client: dict[str, Tree], start: Tree, params: Tree
    ) -> tuple[Tree, dict[str, Tree]]:
        """Return the upload after training, and the client's new state.

        Entries of the state that are not `init`'s are dropped. start: what training started from.
        params: the trained ones.
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
        """Return the new states of the server and of the turn's clients.

        Args:
            server: the server state.
            clients: the clients' states, stacked `[cohort, ...]`.
            net: in evaluation mode, with the server's statistics from before the turn.
            uploads: what came up, stacked `[cohort, ...]`.
            weight: the clients' shares of the cohort's training samples, `[cohort]`, which sum
                to 1.
            generator: of the round, on the CPU; a round's turns draw from it one after another.
        """
        return tree.mean(uploads, weight), clients

    # ---- evaluation

    def evaluated(self, server: Tree, client: dict[str, Tree], params: Tree) -> Tree:
        """Return the part of a trained tree that is evaluated.

        It is asked right before and right after local training.
        """
        return params

    def before_evaluation(
        self, server: Tree, client: dict[str, Tree], net: Bound, shard: Shard
    ) -> dict[str, Tree]:
        """Compute entries before `personal`, like `before_training`.

        It is part of the method, no fine-tuning.
        """
        return {}

    def personal(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Return the model to evaluate a client with between rounds.

        By default the client's start of training.
        """
        client = self.prepare(server, client)
        start = self._begin(server, client)  # nothing is counted as traffic here
        return self.evaluated(server, client, start)

    def predict(self, net: Bound, params: Tree, batch: Batch) -> Tensor:
        """Return the logits `[batch, classes]` of an evaluated model.

        Evaluation shows no labels (`batch.y`).
        """
        return net(params, batch.x)

    def finetuning(self, params: Tree, parts: Parts, epochs: int) -> list[Phase]:
        """Return the phases in which an evaluated model is fine-tuned.

        By default they follow plain cross-entropy.
        """
        return [Phase(epochs)]

    def metrics(self, server: Tree, client: dict[str, Tree]) -> dict[str, Tensor]:
        """Return scalars of one client worth a column each, averaged over the cohort.

        The client's state is the prepared one.
        """
        return {}

    def masks(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Return a bool for each entry: it is personal between rounds.

        They are for masks.json; {} without masks. Called client by client, once a run has ended.
        """
        return {}

    def _begin(self, server: Tree, client: dict[str, Tree]) -> Tree:
        """Return `start` of the download."""
        received = tree.unmask_received(self.download(server, client))
        return self.start(received, client)


def hook_names() -> list[str]:
    """Return the names of all hooks."""
    return [name for name, hook in vars(Method).items() if callable(hook) and name[0] != "_"]


def flag(like: Tree) -> Tensor:
    """Return a False for a client's or the server's state, on the device of `like`.

    `flag(like).long()` is a counter at zero.
    """
    return tree.leaves(like)[0].new_zeros((), dtype=torch.bool)


def equal_shares(weight: Tensor) -> Tensor:
    """Return equal shares of a cohort, for means that do not weigh clients by samples."""
    return torch.full_like(weight, 1 / len(weight))


def send_if(condition: Tensor, values: Tree) -> Agreed:
    """Return values that travel if a condition holds, which both sides can tell."""
    return Agreed(values, tree.map(condition.expand_as, values))


def pick_row(stacked: Tree, number: Tensor) -> Tree:
    """Return row `number` of all leaves, for a number that differs by client."""
    # Not leaf[number], which looks at the value.
    index = number.view(1)
    return tree.map(lambda leaf: leaf.index_select(0, index).squeeze(0), stacked)


def argument_names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's arguments but for `self`."""
    return [name for name in inspect.signature(function).parameters if name != "self"]


@functools.cache
def _hook_argument_names() -> set[str]:
    """Return the names of all hooks' arguments.

    `x` is among them, which `predict` was given where it is given a batch now.
    """
    names = {"x"}
    for hook in hook_names():
        names.update(argument_names(getattr(Method, hook)))
    return names


def _argument_order_fault(function: Callable[..., Any], hook: Callable[..., Any]) -> str:
    """Describe the fix of a function that takes a hook's arguments in another order.

    Names that the contract does not have are free, and so are `*args`. "" if nothing is to be
    changed.
    """
    expected = argument_names(hook)
    actual = argument_names(function)
    if "*" in str(inspect.signature(function)):
        return ""
    is_misordered = any(
        name != expected_name and name in _hook_argument_names()
        for name, expected_name in zip(actual, expected, strict=False)
    )
    if not is_misordered and len(actual) == len(expected):
        return ""
    return (
        f"({', '.join(actual)}) where the contract has ({', '.join(expected)}); "
        "change its arguments, and calls of it"
    )
