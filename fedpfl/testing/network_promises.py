"""Promises of every network, tried on a tiny federation; each raises Unkept where it is broken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl import models
from fedpfl.data.federation import Federation
from fedpfl.engine import Engine, Local, Outcome, State, make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import gather_data, make_shard
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.ground.tree import Tree
from fedpfl.methods import METHODS
from fedpfl.models import Net
from fedpfl.models.shapes import sample_kind
from fedpfl.models.traits import made_up_samples
from fedpfl.testing.promises import Promise, Trial, Unkept, promise_in, repeats_elsewhere
from fedpfl.testing.toy import (
    CPU,
    PlaySettings,
    copy_state,
    digest_leaves,
    play_rounds,
    require_close,
    require_equal,
)

CLASSES = 5
LOCAL = Local(epochs=1, batch_size=8, lr=0.02, momentum=0.5)
LOOP = Engine("loop", workers=2)


class TokenShape(tuple):
    """The shape of samples that are token ids."""

    kind = "token ids"


SHAPES = [(1, 8, 8), (3, 32, 32), (1, 28, 28), (3, 224, 224), TokenShape((16,)), (16,), (3, 32)]
"""Shapes of samples that a network is tried with, in this order, until it takes one."""

NETWORK_PROMISES: list[Promise] = []
network_promise = promise_in(NETWORK_PROMISES)


@dataclass(frozen=True)
class Samples:
    """Numbers of samples on which a network is tried.

    Attributes:
        train: Of each client: the last minibatches are short.
        test: Of each client.
        classes: Of all samples.
    """

    train: tuple[int, ...] = (21, 7, 12, 3)
    test: tuple[int, ...] = (6, 2, 3, 0)
    classes: int = CLASSES


USUAL_SAMPLES = Samples()


class NetworkTrial(Trial):
    """A network on a tiny federation of samples that it takes; states are computed once.

    Args:
        name: The network's name in MODELS.
        shape: Of a sample; None: the first of SHAPES that the network takes.
        head: The name of its head, if it cannot be found.
        options: The network's own options.
        samples: How many there are.
        net: The network, if it is built already.
        seed: That of its build.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...] | None = None,
        *,
        head: str | None = None,
        options: Values = MappingProxyType({}),
        samples: Samples = USUAL_SAMPLES,
        net: Net | None = None,
        seed: int = 1,
    ):
        self.seed = seed
        self.method = METHODS["fedavg"]()
        self.samples = samples
        self.clients = list(range(len(samples.train)))
        self._build: Callable[..., Net] = partial(models.build_network, name, head=head, **options)
        self._make: Callable[..., nn.Module] = partial(models.make_module, name, **options)
        self._built_net = net
        self._shapes = SHAPES if shape is None else [shape]

    def build(self) -> Net:
        """Return the network, built anew. Raises FedpflError."""
        return self._build(self.shape, self.samples.classes, self.seed)

    def make_plain_module(self, seed: int) -> nn.Module:
        """Return the module for plain PyTorch, from a separate build."""
        return self._make(self.shape, self.samples.classes, seed)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the samples; the last one where the network takes none."""
        for shape in self._shapes[:-1]:
            with suppress(FedpflError):
                self._build(shape, self.samples.classes, 1)
                return shape
        return self._shapes[-1]

    @cached_property
    def plain_module(self) -> nn.Module:
        """Return one module for plain PyTorch."""
        return self.make_plain_module(self.seed)

    @cached_property
    def net(self) -> Net:
        """Return the given network, or a new one, with the values that its seed gives."""
        if self._built_net is None:
            return self.build()
        # Attributes stay as they are: they, too, may be drawn from the seed.
        module = self._built_net.copy_module().to(CPU)
        copy_values(_read_values(self.plain_module), module)
        return self._built_net.with_module(module)

    @cached_property
    def federation(self) -> Federation:
        """Return clients of unequal sizes with random samples."""
        return make_federation(self.shape, self.samples)

    def play(
        self, engine: Engine, rounds: int, state: State | None = None, net: Net | None = None
    ) -> tuple[State, Outcome]:
        """Return the state after so many more rounds of all clients, and the last outcome."""
        states, outcomes = play_rounds(
            self.method,
            net or self.net,
            self.federation,
            [self.clients] * rounds,
            PlaySettings(engine, LOCAL),
            state=state,
        )
        return states[-1], outcomes[-1]

    @cached_property
    def first_round(self) -> tuple[State, Outcome]:
        """Return the state after a round on the loop backend, and its outcome; never changed."""
        return self.play(LOOP, 1)

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return digests of one round by name.

        Args:
            is_elsewhere: Whether the network is first called on other samples, so that memories
                of its calls show.
        """
        if is_elsewhere:
            self.make_plain_module(seed=2)(made_up_samples(self.shape, 3))
        state, outcome = self.first_round
        return digest_leaves({"values": state, "loss": outcome.loss, "evaluation": outcome.after})


@cache
def make_federation(shape: tuple[int, ...], samples: Samples = USUAL_SAMPLES) -> Federation:
    """Make clients of unequal sizes; their samples, numbers or token ids, tell their classes."""
    generator = torch.Generator().manual_seed(5)
    total = sum(samples.train) + sum(samples.test)
    y = torch.randint(samples.classes, (total,), generator=generator)
    if sample_kind(shape) == "token ids":
        x = torch.randint(2, (total, *shape), generator=generator, dtype=torch.int32)
    else:
        patterns = torch.randn((samples.classes, *shape), generator=generator)
        x = patterns[y] + 0.5 * torch.randn((total, *shape), generator=generator)
    indices = torch.arange(total).split([*samples.train, *samples.test])
    clients = len(samples.train)
    return Federation(
        "made up",
        x,
        y,
        samples.classes,
        (),
        (),
        train=indices[:clients],
        test=indices[clients:],
    )


@network_promise("it answers samples with logits, and can be trained", "")
def can_be_built(trial: NetworkTrial) -> None:
    """It is refused where a run could not keep clients apart."""
    try:
        _ = trial.net
    except FedpflError as error:
        raise Unkept(str(error)) from None


@network_promise(
    "a round on loop equals a plain PyTorch loop",
    "perhaps a step depends on more than parameters, buffers and samples: on an attribute, a list,"
    " a hook of __init__, a clock or a file. Keep such values in buffers (register_buffer) of a"
    " fixed form, read parameters from their layers, and draw in __init__ from torch's, NumPy's or"
    " Python's global generator",
    for_runs="always",
)
def equals_plain_loop(trial: NetworkTrial) -> None:
    """Training and evaluation give the values of torch's own SGD, dropout's draws included."""
    # ---- Step 1: the engine's round, from the same values.
    module = trial.plain_module
    initial_values = {name: leaf.clone() for name, leaf in _read_values(module).items()}
    net_values = {**trial.net.params, **trial.net.buffers, **trial.net.fixed}
    require_equal("built again", net_values, initial_values)
    state, outcome = trial.first_round

    # ---- Step 2: each client in plain PyTorch, the last one first.
    trained: dict[int, Tree] = {}
    for client in reversed(trial.clients):
        copy_values(initial_values, module)
        trained[client], loss, counts = train_plainly(trial, module, client)
        label = f"training loss of client {client}"
        require_close(label, loss, outcome.loss[client], atol=1e-5, rtol=1e-4)
        label = f"evaluation of client {client} after training"
        engine_counts = {name: getattr(outcome.after, name)[client] for name in counts}
        require_close(label, counts, engine_counts, atol=1e-4, rtol=1e-3)

    # ---- Step 3: the average of their models.
    sizes = trial.samples.train
    weights = torch.tensor(sizes) / sum(sizes)

    def average(leaves: list[Tensor]) -> Tensor:
        if not leaves[0].is_floating_point():
            return torch.stack(leaves).amax(0)
        return sum(weight * leaf for weight, leaf in zip(weights, leaves, strict=True))

    model = tree.combine(average, [trained[client] for client in trial.clients])
    require_close("the averaged model", model["params"], state.server, 1e-5, 1e-4)
    if model["buffers"]:
        server_buffers = state.server_buffers["main"]
        require_close("the averaged buffers", model["buffers"], server_buffers, 1e-5, 1e-4)


def train_plainly(trial: NetworkTrial, module: nn.Module, client: int) -> tuple[Tree, Tensor, Tree]:
    """Train a module on one client's samples in plain PyTorch.

    Returns:
        Its parameters and buffers, the mean loss, and its counts on test samples.
    """
    # ---- Step 1: torch's own optimizer.
    federation = trial.federation
    draws = Draws(0, "train", 1)
    optimizer = torch.optim.SGD(
        [leaf for leaf in module.parameters() if leaf.requires_grad],
        lr=LOCAL.lr,
        momentum=LOCAL.momentum,
    )
    shard = make_shard(federation, client, LOCAL.batch_size, draws)
    (phase,) = trial.method.phases({}, {}, trial.net.params, 1)
    losses = []

    # ---- Step 2: an epoch between two evaluations, by the client's draws from the engine.
    with seeded_by_key(*draws.hook_key(client)):
        # The evaluation before may draw, and is of a copy, as it moves no buffer.
        stray_module = trial.net.copy_module()
        copy_values(_read_values(module), stray_module)
        evaluate_plainly(stray_module, federation, client)
        module.train()
        for batch in shard.batches(phase.stream, 0):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(batch.x.clone()).float(), batch.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        values = {name: leaf.clone() for name, leaf in _read_values(module).items()}
        counts = evaluate_plainly(module, federation, client)
    params = tree.select(values, trial.net.params)
    buffers = tree.select(values, trial.net.buffers)
    return {"params": params, "buffers": buffers}, torch.stack(losses).mean(), counts


def _read_values(module: nn.Module) -> Tree:
    """Return the parameters and buffers of a module, detached."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: leaf.detach() for name, leaf in named}


def copy_values(values: Tree, module: nn.Module) -> None:
    """Copy values into a module of the same form. Raises Unkept for one of another form."""
    targets = _read_values(module)
    changed = {name for name, _ in tree.specs(values).items() ^ tree.specs(targets).items()}
    if changed:
        raise Unkept(f"{min(changed)} comes, goes or changes its form; make it in __init__")
    for name, leaf in targets.items():
        leaf.copy_(values[name])


def evaluate_plainly(module: nn.Module, federation: Federation, client: int) -> Tree:
    """Return the hits and the summed loss on all of a client's test samples."""
    data = gather_data(federation, federation.test[client])
    if not len(data.y):
        return {"correct": torch.tensor(0), "loss": torch.zeros(())}
    with torch.no_grad():
        logits = module.eval()(data.x.clone()).float()
    correct = (logits.argmax(1) == data.y).sum()
    return {"correct": correct, "loss": F.cross_entropy(logits, data.y, reduction="sum")}


network_promise(
    "its first round is the same in another process",
    "draw from torch's, NumPy's or Python's global generator, keep nothing in the module or on the"
    " class between calls, and sort the members of sets",
    slow=True,
    for_runs="always",
)(repeats_elsewhere)


@network_promise(
    "batched equals loop on clients of unequal sizes",
    "the network runs on engine=loop, which engine=auto takes for it",
    binding=False,
    for_runs="batched",
)
def batched_equals_loop(trial: NetworkTrial) -> None:
    """Or the batched backend refuses the network before the first round."""
    try:
        state, _ = trial.play(Engine("batched"), 1)
    except FedpflError as error:
        raise Unkept(str(error)) from None
    if trial.net.traits.draws:
        return  # other numbers on each backend
    loop_state, _ = trial.first_round
    require_close("server", state.server, loop_state.server, 2e-5, 1e-3)
    require_close("server_buffers", state.server_buffers, loop_state.server_buffers, 2e-5, 1e-3)


@network_promise(
    "clients are evaluated as by a plain PyTorch loop, which changes nothing",
    "perhaps forward changes something in evaluation, or its answers depend on more than"
    " parameters, buffers and samples",
)
def evaluates_as_plain_loop(trial: NetworkTrial) -> None:
    """Each on its own test samples, be they two or none."""
    net = trial.net
    state = trial.first_round[0]
    values = {**net.fixed, **state.server, **state.server_buffers.get("main", {})}
    state_before = copy_state(state)
    call = EvalCall(trial.method, trial.federation, state, trial.clients)
    backend = make_backend(LOOP, net, CPU)
    counts = backend.evaluate(call)
    require_equal("evaluated again", counts, backend.evaluate(call))
    require_equal("the state", state, state_before)
    for client in trial.clients:
        module = net.copy_module()
        copy_values(values, module)
        with seeded_by_key(*call.draws.hook_key(client)):
            expected = evaluate_plainly(module, trial.federation, client)
        client_counts = {name: getattr(counts, name)[client] for name in expected}
        require_close(f"client {client}", client_counts, expected, atol=1e-5, rtol=1e-4)


@network_promise(
    "a run goes on exactly from a saved state, with any number of workers",
    "perhaps something is kept outside of buffers",
)
def resumes_exactly(trial: NetworkTrial) -> None:
    """Two rounds are those of a network that is built anew in between."""
    uninterrupted = trial.play(LOOP, 2)
    workers = Engine("loop", workers=3)
    resumed = trial.play(workers, 1, trial.first_round[0], net=trial.build())
    require_equal("after a restart", resumed, uninterrupted)


@network_promise(
    "its head is found: the layer that answers the classes",
    "say which layer it is by model.head=NAME; methods that part head and body need it, others run",
    binding=False,
)
def head_is_found(trial: NetworkTrial) -> None:
    """Changing the head's values changes the logits, and no layer behind it does."""
    try:
        head = trial.net.parts.head
    except FedpflError as error:
        raise Unkept(str(error)) from None
    if not head:
        raise Unkept("it has no layer that trains")
