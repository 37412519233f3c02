"""The tiny federation on which methods are tried, and comparisons of what came of it.

Backends agree from one common state each round within 2e-6 absolute and 1e-4 relative, as scores
such as Fisher's are squares of gradients. On one backend, precision and width all is bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedpfl.data.federation import Federation
from fedpfl.engine import (
    Backend,
    Engine,
    FineTuning,
    Local,
    Outcome,
    RoundSetup,
    State,
    Stopping,
    make_backend,
    make_initial_state,
    pick_cohort,
    play_round,
)
from fedpfl.engine.backends.loop import LoopBackend
from fedpfl.engine.backends.ranks import find_blamed_hook
from fedpfl.engine.calls import Call, Counts, EvalCall, Participation, TrainCall, with_before_turn
from fedpfl.engine.keys import Draws, find_global_draws
from fedpfl.engine.training.clients import OneClient
from fedpfl.engine.training.participation import run_participation
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method
from fedpfl.models import ADAPTERS, Net
from fedpfl.models.norm import BatchNorm2d
from fedpfl.testing.promises import Unkept, describe_error

CPU = torch.device("cpu")
CLASSES = 5
BACKENDS = ("loop", "batched")
LOCAL = Local(epochs=2, batch_size=32, lr=0.05, momentum=0.7, weight_decay=1e-4)
LOOP = Engine("loop", workers=2)

# Ragged on purpose: one sample, clients of one batch, a remainder of one sample, none to test.
TRAIN = (40, 7, 33, 2, 65, 1)
TEST = (12, 3, 9, 0, 14, 1)
COHORTS = [[0, 2, 3, 5], [0, 1, 4, 5]]
EVERYONE = list(range(6))
AGREE = {"atol": 2e-6, "rtol": 1e-4}


# ---- the tiny federation


class Tiny(nn.Module):
    """549 parameters for samples of [1, 8, 8].

    It is smooth, so that no kink amplifies rounding. `norm` adds BatchNorm.
    """

    def __init__(self, norm: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = BatchNorm2d(4) if norm else nn.Identity()
        self.fc = nn.Linear(36, 12)
        self.classifier = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.avg_pool2d(torch.tanh(self.norm(self.conv(x))), 2)
        return self.classifier(torch.tanh(self.fc(x.flatten(1))))


def tiny(norm: bool = False, seed: int = 1, pairs: int = 0) -> Net:
    """Return a Tiny network, the same for the same seed.

    Args:
        norm: whether it has BatchNorm.
        seed: of its initial values.
        pairs: low-rank ones in each layer but the head, if any.
    """
    # A module draws from the generator of the process, which stays as it was.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Tiny(norm)
    if pairs:
        ADAPTERS["lora"](
            module, "classifier", seed, rank=2, alpha=4.0, layers=("conv", "linear"), pairs=pairs
        )
    return Net(module, sample=(1, 8, 8), rounds=len(COHORTS))


def federate(train: tuple[int, ...], test: tuple[int, ...], seed: int = 0) -> Federation:
    """Make images of five noisy patterns, label-skewed over clients with so many samples."""
    # ---- Labels, client by client: each has its own shares of the classes.
    generator = torch.Generator().manual_seed(seed)
    total = sum(train) + sum(test)
    y = torch.empty(total, dtype=torch.int64)
    train_indices: list[Tensor] = []
    test_indices: list[Tensor] = []
    start = 0
    for train_size, test_size in zip(train, test, strict=True):
        # The cube makes some classes rare at a client; none is impossible.
        shares = torch.rand(CLASSES, generator=generator) ** 3 + 0.01
        size = train_size + test_size
        # A client without samples draws one label all the same, as if it had one.
        labels = torch.multinomial(
            shares,
            max(size, 1),
            replacement=True,
            generator=generator,
        )
        y[start : start + size] = labels[:size]
        indices = torch.arange(start, start + size)
        train_indices.append(indices[:train_size])
        test_indices.append(indices[train_size:])
        start += size

    # ---- Images: the pattern of the class, half hidden by noise.
    patterns = torch.rand(CLASSES, 1, 8, 8, generator=generator)
    x = 0.5 * patterns[y] + 0.5 * torch.rand(total, 1, 8, 8, generator=generator)
    return Federation(
        "toy",
        # Bytes, as images are stored, so that scaling is tried too.
        (255 * x).to(torch.uint8),
        y,
        CLASSES,
        (0.4,),
        (0.3,),
        train=tuple(train_indices),
        test=tuple(test_indices),
    )


@cache
def tiny_federation() -> Federation:
    """Return the federation on which methods are tried; validation samples are its test samples."""
    federation = federate(TRAIN, TEST)
    return dataclasses.replace(federation, validation=federation.test)


def as_engine(name: Engine | str) -> Engine:
    """Return the Engine of `loop`, `batched-bf16`, ..., or an Engine as it is."""
    if isinstance(name, Engine):
        return name
    backend, _, precision = name.partition("-")
    return Engine(backend, precision=precision or "fp32")  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class PlaySettings:
    """Hold the settings of training in a trial."""

    engine: Engine | str = LOOP
    local: Local = LOCAL
    seed: int = 0
    stopping: Stopping | None = None


def play_rounds(
    method: Method,
    net: Net,
    federation: Federation,
    cohorts: list[list[int]],
    settings: PlaySettings = PlaySettings(),
    backend: Backend | None = None,
) -> tuple[list[State], list[Outcome]]:
    """Play rounds of these cohorts.

    Args:
        method: To be played.
        net: Its network.
        federation: Its clients.
        cohorts: One for each round.
        settings: How clients train.
        backend: None: that of `settings.engine`.

    Returns:
        Copies of the states before round 1 and after every round, and the outcomes.
    """
    # ---- Step 1: the state before round 1.
    backend = backend or make_backend(as_engine(settings.engine), net, CPU)
    state = make_initial_state(
        method,
        net,
        federation.clients,
        CPU,
        seed=settings.seed,
        stopping=settings.stopping is not None,
    )
    setup = RoundSetup(
        backend, method, federation, settings.local, settings.seed, stopping=settings.stopping
    )

    # ---- Step 2: the rounds. Each overwrites the clients' rows of the state before, hence copies.
    states = [copy_state(state)]
    outcomes = []
    for planned_cohort in cohorts:
        cohort = pick_cohort(state, planned_cohort, settings.seed)
        if not cohort:
            break
        state, outcome = play_round(setup, state, cohort)
        states.append(copy_state(state))
        outcomes.append(outcome)
    return states, outcomes


def copy_state(state: State) -> State:
    """Return a copy that no later round changes."""
    # A tensor's own deep copy takes ten times as long as its clone.
    trees = [state.server, state.server_buffers, *state.rows.trees]
    clones = {id(leaf): leaf.clone() for part in trees for leaf in tree.leaves(part)}
    return copy.deepcopy(state, clones)


def participate(
    method: Method,
    net: Net,
    federation: Federation,
    state: State,
    cohort: list[int],
    settings: PlaySettings = PlaySettings(),
) -> Participation:
    """Play the clients' part of the next round; `state` stays as it is."""
    draws = Draws(settings.seed, "train", state.round + 1)
    call = TrainCall(method, federation, state, cohort, settings.local, draws)
    return make_backend(as_engine(settings.engine), net, CPU).run_one(with_before_turn(call))


class ConstantDraws(TorchDispatchMode):
    """Make every random operation of torch in this thread return a constant."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return output
        if func.overloadpacket.__name__ == "randperm":
            # The order in which padding, which comes last, changes the first rows.
            return output.sort(descending=True).values
        if isinstance(output, Tensor):
            output.fill_(0.5 if output.is_floating_point() else 0)
        return output


class TurnsBackend(LoopBackend):
    """Take clients through training in turns, a job each, as threads may.

    So memories of one client's hooks meet those of the next.
    """

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """See Backend; errors of training are raised."""
        if not all(isinstance(call, TrainCall) for call in calls):
            return super().run(calls)
        return [self._train_in_turns(call) for call in calls if isinstance(call, TrainCall)]

    def _train_in_turns(self, call: TrainCall) -> Any:
        nets = {client: self.net.copy() for client in call.clients}
        jobs = {
            client: run_participation(call, OneClient(client), net, self._autocast)
            for client, net in nets.items()
        }
        replies: dict[int, Any] = dict.fromkeys(call.clients)
        results: dict[int, Any] = {}
        while len(results) < len(jobs):
            for client in [client for client in call.clients if client not in results]:
                try:
                    job = jobs[client].send(replies[client])
                except StopIteration as ending:
                    results[client] = ending.value
                    continue
                replies[client] = self._do_job(nets[client], job, threading.Event())
        return tree.stack([results[client] for client in call.clients])


class MethodTrial:
    """A method on the tiny federation; runs that several promises look at are played once.

    Args:
        method: To be tried.
        pairs: Low-rank ones in each layer of a network with a frozen rest, which a method may also
            want itself.
        ask_elsewhere: Returns the digests of another process.
    """

    def __init__(
        self,
        method: Method,
        pairs: int = 0,
        ask_elsewhere: Callable[[], dict[str, str]] | None = None,
    ):
        self.method = method
        self.ask_elsewhere = ask_elsewhere
        self._pairs = pairs or method.pairs
        self._runs: dict[tuple[str, bool], tuple[list[State], list[Outcome]]] = {}
        self._participations: dict[str, Participation] = {}

    def describe_error(self, error: BaseException) -> str:
        """Describe an error, with its hook and the line of the method's file."""
        method_class = type(self.method)
        hook, line = find_blamed_hook(error, method_class) or (method_class.__name__, "")
        line_text = f" ({line})" if line else ""
        return f"{hook} {describe_error(error)}{line_text}"

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return digests of two rounds and their evaluations by name.

        Args:
            is_elsewhere: Whether hooks are first asked about another model, and clients train in
                turns, so that memories of hooks show.
        """
        method = self.method
        net = self.net()
        backend = make_backend(LOOP, net, CPU)
        train_backend = backend
        if is_elsewhere:
            stray_net = tiny(seed=2, pairs=self._pairs)
            stray_states, _ = play_rounds(method, stray_net, tiny_federation(), COHORTS[1:])
            backend.evaluate(EvalCall(method, tiny_federation(), stray_states[-1], EVERYONE))
            # In turns, global draws would come in another order.
            if not find_global_draws(method):
                train_backend = TurnsBackend(net, CPU, LOOP)

        # Before the first round, too: a memory of later ones would be the same.
        evaluations = []
        states: list[State] = []
        for count in (0, len(COHORTS)):
            states, outcomes = play_rounds(
                method, net, tiny_federation(), COHORTS[:count], backend=train_backend
            )
            call = EvalCall(method, tiny_federation(), states[-1], EVERYONE)
            evaluations.append(backend.evaluate(call).loss)
        losses = [outcome.loss for outcome in outcomes]
        return digest_leaves({"evaluation": evaluations, "state": states, "loss": losses})

    def net(self, norm: bool = False) -> Net:
        """Return the network that it is tried on."""
        return tiny(norm, pairs=self._pairs)

    def play_cohorts(self, engine: str, norm: bool = False) -> tuple[list[State], list[Outcome]]:
        """Return states and outcomes of two rounds, which are not to be changed."""
        if (engine, norm) not in self._runs:
            self._runs[engine, norm] = play_rounds(
                self.method,
                self.net(norm),
                tiny_federation(),
                COHORTS,
                PlaySettings(engine=engine),
            )
        return self._runs[engine, norm]

    def train_second_cohort(self, engine: str) -> Participation:
        """Return uploads and states of that run's second round, which are not to be changed."""
        if engine not in self._participations:
            state = self.play_cohorts(engine)[0][1]
            self._participations[engine] = self.train_part(
                engine,
                state,
                COHORTS[1],
                COHORTS[1],
            )
        return self._participations[engine]

    def train_part(
        self, engine: str, state: State, clients: list[int], cohort: list[int]
    ) -> Participation:
        """Train some clients of a cohort, as if the rest trained elsewhere."""
        net = self.net()
        # The draws of the round that `play_round` would play.
        draws = Draws(0, "train", state.round + 1)
        call = TrainCall(
            self.method,
            tiny_federation(),
            state,
            cohort,
            LOCAL,
            draws,
        )
        overlay = with_before_turn(call).overlay
        if overlay:
            # The overlay is of the whole cohort: what `before_turn` finds out may depend on all of
            # it.
            rows = torch.tensor([cohort.index(client) for client in clients])
            overlay = tree.take(overlay, rows)
        backend = make_backend(as_engine(engine), net, CPU)
        return backend.run_one(dataclasses.replace(call, clients=clients, overlay=overlay))

    def result(self, engine: str, t: int, norm: bool = False) -> tuple[State, Outcome]:
        """Return the state after round t + 1 of that run, and its outcome."""
        states, outcomes = self.play_cohorts(engine, norm)
        return states[t + 1], outcomes[t]

    def replay_round(
        self,
        engine: Engine | str,
        t: int,
        *,
        of: str = "loop",
        norm: bool = False,
        cohort: list[int] | None = None,
    ) -> tuple[State, Outcome]:
        """Play round t + 1 from the state that the run on engine `of` has."""
        backend, federation = self._set_up(engine, norm)
        state = copy_state(self.play_cohorts(of, norm)[0][t])
        setup = RoundSetup(backend, self.method, federation, LOCAL, 0)
        return play_round(setup, state, cohort or COHORTS[t])

    def evaluate_everyone(self, engine: str, tuning: FineTuning | None) -> Counts:
        """Evaluate all clients after two rounds on the loop backend."""
        backend, federation = self._set_up(engine)
        state = self.play_cohorts("loop")[0][-1]
        return backend.evaluate(EvalCall(self.method, federation, state, EVERYONE, tuning))

    def _set_up(self, engine: Engine | str, norm: bool = False) -> tuple[Backend, Federation]:
        return make_backend(as_engine(engine), self.net(norm), CPU), tiny_federation()

    def prepare_client(self, net: Net, state: State, number: int) -> dict[str, Tree]:
        """Return a client's state after `prepare`, as it enters the next round."""
        method = self.method
        draws = Draws(0, "train", state.round + 1)
        shard = make_shard(tiny_federation(), number, LOCAL.batch_size, draws)
        call = with_before_turn(TrainCall(method, tiny_federation(), state, [number], LOCAL, draws))
        client = OneClient(number).states(call) | method.sample(state.server, draws.server(number))
        bound_net = net.bind(state.buffers(number), training=True)
        extra_entries = method.before_training(state.server, client, bound_net, shard)
        return method.prepare(state.server, client | tree.mark_real(extra_entries))


# ---- comparisons


def state_trees(state: State) -> dict[str, Any]:
    """Return a state's trees by name."""
    parts = ("server", "clients", "server_buffers", "client_buffers", "stopping")
    return {part: getattr(state, part) for part in parts}


def flatten(tree: Any, path: str = "") -> dict[str, Tensor]:
    """Return leaves by path, for trees of dicts, named tuples and lists, and for states."""
    if isinstance(tree, State):
        tree = state_trees(tree)
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {path: tree}
    leaves: dict[str, Tensor] = {}
    for key, part in tree.items():
        leaves.update(flatten(part, f"{path}/{key}"))
    return leaves


def digest_leaves(values: Any) -> dict[str, str]:
    """Return digests of all leaves of trees and states by path, to the last bit."""
    leaves = flatten(values)
    return {
        path.strip("/").replace("/", "."): hashlib.blake2b(
            f"{leaf.dtype}{list(leaf.shape)}".encode()
            + leaf.detach().contiguous().numpy().tobytes(),
            digest_size=8,
        ).hexdigest()
        for path, leaf in leaves.items()
    }


def differing(a: Any, b: Any) -> list[str]:
    """Return paths of leaves that are not bit-identical (dtype and shape included)."""
    a, b = _flatten_alike(a, b, "has other entries:")
    return [path for path in a if not _is_equal(a[path], b[path])]


def require_equal(label: str, a: Any, b: Any) -> None:
    """Raise Unkept where two trees are not equal bit for bit."""
    _require_none(label, differing(a, b), flatten(a), flatten(b))


def require_close(label: str, a: Any, b: Any, atol: float, rtol: float) -> None:
    """Raise Unkept where two trees are further apart than `atol + rtol * |b|`."""
    a, b = _flatten_alike(a, b, f"{label}: other entries,")
    far_paths = [path for path in a if not _is_near(a[path], b[path], atol, rtol)]
    _require_none(label, far_paths, a, b)


def _flatten_alike(a: Any, b: Any, fault: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Flatten two trees. Raises Unkept where one has entries that the other has not."""
    a = flatten(a)
    b = flatten(b)
    if a.keys() != b.keys():
        raise Unkept(f"{fault} {', '.join(sorted(set(a) ^ set(b)))}")
    return a, b


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def _is_near(a: Tensor, b: Tensor, atol: float, rtol: float) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point():
        # A nan in the same place is agreement; another promise refuses it.
        return torch.allclose(a, b, rtol, atol, equal_nan=True)
    return torch.equal(a, b)


def _require_none(
    label: str, far_paths: list[str], a: dict[str, Tensor], b: dict[str, Tensor]
) -> None:
    """Raise Unkept where leaves differ, and say of the first by how much."""
    if not far_paths:
        return
    path = far_paths[0]
    distance_text = f"of shape {list(a[path].shape)} and {list(b[path].shape)}"
    if a[path].shape == b[path].shape:
        # In float64, where integers and bools have a difference too.
        distance = float((a[path].double() - b[path].double()).abs().max())
        distance_text = "not finite" if math.isnan(distance) else f"up to {distance:.2g} apart"
    name = path.strip("/").replace("/", ".")
    name_text = f"{name} " if name else ""
    count_text = f"; {len(far_paths)} entries differ" if len(far_paths) > 1 else ""
    raise Unkept(f"{label}: {name_text}{distance_text}{count_text}")


def require_rounds_agree(
    label: str, a: tuple[State, Outcome], b: tuple[State, Outcome], atol: float, rtol: float
) -> None:
    """Raise Unkept where two results of a round disagree.

    Trees and losses agree within a tolerance, counts exactly.
    """
    # ---- Step 1: states, and how clients are evaluated in the round.
    require_close(label, a[0], b[0], atol, rtol)
    outcome = a[1]
    other_outcome = b[1]
    for time in ("before", "after"):
        # Counts are whole numbers and agree exactly; losses are sums in another order.
        counts = getattr(outcome, time)
        other_counts = getattr(other_outcome, time)
        require_equal(
            f"{label}, evaluated {time} training",
            [counts.correct, counts.total],
            [other_counts.correct, other_counts.total],
        )
        require_close(
            f"{label}, loss {time} training",
            counts.loss,
            other_counts.loss,
            1e-4,
            1e-4,
        )

    # ---- Step 2: what else came of the round.
    require_close(f"{label}, training loss", outcome.loss, other_outcome.loss, 1e-5, 1e-4)
    require_equal(f"{label}, whether training is finite", outcome.finite, other_outcome.finite)
    traffic = outcome.traffic
    other_traffic = other_outcome.traffic
    if traffic != other_traffic or outcome.state_is_finite != other_outcome.state_is_finite:
        raise Unkept(f"{label}: {traffic} and {other_traffic} travelled")
    metrics = {name: torch.tensor(value) for name, value in outcome.metrics.items()}
    other_metrics = {name: torch.tensor(value) for name, value in other_outcome.metrics.items()}
    require_close(f"{label}, metrics", metrics, other_metrics, 1e-6, 1e-4)
