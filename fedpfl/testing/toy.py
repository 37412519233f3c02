"""The tiny federation on which methods are tried, and comparisons of what came of it.

Backends agree from one common state each round within 2e-6 absolute and 1e-4 relative, as scores
such as Fisher's are squares of gradients. On one backend, precision and width all is bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedpfl.data.federation import Federation
from fedpfl.data.fingerprint import fingerprint
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
from fedpfl.engine.calls import (
    Call,
    Counts,
    EvalCall,
    Participation,
    TrainCall,
    select_clients,
    with_before_turn,
)
from fedpfl.engine.keys import Draws, find_global_draws
from fedpfl.engine.training.clients import OneClient
from fedpfl.engine.training.jobs import TrainJob
from fedpfl.engine.training.participation import find_train_job, run_participation
from fedpfl.ground import tree
from fedpfl.ground.records import Record
from fedpfl.methods import Method
from fedpfl.models import Net
from fedpfl.models.adapter import lora, lora_with_residue
from fedpfl.models.norm import BatchNorm2d
from fedpfl.testing.answers import with_checked_answers
from fedpfl.testing.promises import Trial, Unkept

CPU = torch.device("cpu")
CLASSES = 5
BACKENDS = ("loop", "batched")
LOCAL = Local(epochs=2, batch_size=32, lr=0.05, momentum=0.7, weight_decay=1e-4)
LOOP = Engine("loop", workers=2)

# Ragged on purpose: one sample, clients of one batch, a remainder of one sample, none to test.
TRAIN = (40, 7, 33, 2, 65, 1)
TEST = (12, 3, 9, 0, 14, 1)
COHORTS = [[0, 2, 3, 5], [0, 1, 4, 5]]
RANKS = (1, 2, 2, 1, 2, 2)
"""Of the clients' low-rank pairs, where a method takes ranks that differ."""
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


def tiny(norm: bool = False, seed: int = 1, pairs: int = 0, has_residue: bool = False) -> Net:
    """Return a Tiny network beside a smaller common one, the same for the same seed.

    Args:
        norm: whether it has BatchNorm.
        seed: of its initial values.
        pairs: low-rank ones in each layer but the head, if any.
        has_residue: whether these layers have a residue.
    """
    # A module draws from the generator of the process, which stays as it was.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = Tiny(norm)
        common = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    if pairs:
        adapt = lora_with_residue if has_residue else lora
        adapt(module, "classifier", seed, rank=2, alpha=4.0, layers=("conv", "linear"), pairs=pairs)
    return Net(module, common=Net(common), sample=(1, 8, 8), rounds=len(COHORTS))


def federate(train: tuple[int, ...], test: tuple[int, ...], seed: int = 0) -> Federation:
    """Make images of five noisy patterns, label-skewed over clients with so many samples."""
    # ---- Labels, client by client: each has its own shares of the classes.
    generator = torch.Generator().manual_seed(seed)
    labels: list[Tensor] = []
    for train_size, test_size in zip(train, test, strict=True):
        # The cube makes some classes rare at a client; none is impossible.
        shares = torch.rand(CLASSES, generator=generator) ** 3 + 0.01
        size = train_size + test_size
        # A client without samples draws one label all the same, as if it had one.
        drawn = torch.multinomial(shares, max(size, 1), replacement=True, generator=generator)
        labels.append(drawn[:size])
    y = torch.cat(labels)
    sizes = [size for pair in zip(train, test, strict=True) for size in pair]
    indices = torch.arange(len(y)).split(sizes)

    # ---- Images: the pattern of the class, half hidden by noise.
    patterns = torch.rand(CLASSES, 1, 8, 8, generator=generator)
    x = 0.5 * patterns[y] + 0.5 * torch.rand(len(y), 1, 8, 8, generator=generator)
    return Federation(
        "toy",
        # Bytes, as images are stored, so that scaling is tried too.
        (255 * x).to(torch.uint8),
        y,
        CLASSES,
        (0.4,),
        (0.3,),
        train=indices[::2],
        test=indices[1::2],
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
    *,
    backend: Backend | None = None,
    state: State | None = None,
) -> tuple[list[State], list[Outcome]]:
    """Play rounds of these cohorts.

    Args:
        method: To be played.
        net: Its network.
        federation: Its clients.
        cohorts: One for each round.
        settings: How clients train.
        backend: None: that of `settings.engine`.
        state: Where the rounds begin; None: before round 1.

    Returns:
        Copies of the states at the beginning and after every round, and the outcomes.
    """
    seed = settings.seed
    stopping = settings.stopping
    backend = backend or make_backend(as_engine(settings.engine), net, CPU)
    if state is None:
        state = make_initial_state(
            method, net, federation.clients, CPU, seed=seed, stopping=stopping is not None
        )
    else:
        state = copy_state(state)
    setup = RoundSetup(backend, method, federation, settings.local, seed, stopping=stopping)

    # A round overwrites the clients' rows of the state before, hence copies.
    states = [copy_state(state)]
    outcomes = []
    for planned_cohort in cohorts:
        cohort = pick_cohort(state, planned_cohort, seed)
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
    clients: list[int] | None = None,
) -> Participation:
    """Play the next round of a cohort's clients; `state` stays as it is."""
    draws = Draws(settings.seed, "train", state.round + 1)
    call = TrainCall(method, federation, state, cohort, settings.local, draws)
    call = with_before_turn(call)
    if clients is not None:
        call = select_clients(call, [cohort.index(client) for client in clients])
    return make_backend(as_engine(settings.engine), net, CPU).run_one(call)


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
    """Train clients in turns, so that one client's memories meet the next."""

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """See Backend; all calls are of training, and its errors are raised."""
        return [self._train_in_turns(call) for call in calls if isinstance(call, TrainCall)]

    def _train_in_turns(self, call: TrainCall) -> Any:
        waiting: deque[tuple[int, Net, Any, Any]] = deque()
        for client in call.clients:
            net = self.net.copy()
            jobs = run_participation(call, OneClient(client), net, self._autocast)
            waiting.append((client, net, jobs, None))
        results: dict[int, Any] = {}
        while waiting:
            client, net, jobs, reply = waiting.popleft()
            try:
                job = jobs.send(reply)
            except StopIteration as ending:
                results[client] = ending.value
            else:
                reply = self.do_job(net, job, threading.Event())
                waiting.append((client, net, jobs, reply))
        return tree.stack([results[client] for client in call.clients])


class MethodTrial(Trial):
    """A method on the tiny federation; runs that several promises look at are played once.

    Args:
        method: To be tried.
        pairs: Low-rank ones in each layer of a network with a frozen rest, which a method may also
            want itself.
    """

    def __init__(self, method: Method, pairs: int = 0):
        self.method = method
        self._pairs = pairs or method.pairs
        self._runs: dict[tuple[str, bool], tuple[list[State], list[Outcome]]] = {}

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
            stray_net = self.net(seed=2)
            stray_states, _ = play_rounds(method, stray_net, tiny_federation(), COHORTS[1:])
            backend.evaluate(EvalCall(method, tiny_federation(), stray_states[-1], EVERYONE))
            # In turns, global draws would come in another order.
            if not find_global_draws(method):
                train_backend = TurnsBackend(net, CPU, LOOP)

        # Before the first round, too: a memory of later ones would be the same.
        evaluations = []
        for cohorts in ([], COHORTS):
            states, outcomes = play_rounds(
                method, net, tiny_federation(), cohorts, backend=train_backend
            )
            call = EvalCall(method, tiny_federation(), states[-1], EVERYONE)
            evaluations.append(backend.evaluate(call).loss)
        losses = [outcome.loss for outcome in outcomes]
        return digest_leaves({"evaluation": evaluations, "state": states, "loss": losses})

    def net(self, norm: bool = False, seed: int = 1) -> Net:
        """Return the network that it is tried on."""
        net = tiny(norm, seed, self._pairs, self.method.has_residue)
        return net.with_facts(ranks=RANKS) if self.method.takes_ranks else net

    def play_cohorts(self, engine: str, norm: bool = False) -> tuple[list[State], list[Outcome]]:
        """Return states and outcomes of two rounds, which are not to be changed."""
        if (engine, norm) not in self._runs:
            self._runs[engine, norm] = self._play(engine, COHORTS, norm)
        return self._runs[engine, norm]

    def result(self, engine: str, t: int, norm: bool = False) -> tuple[State, Outcome]:
        """Return the state after round t + 1 of that run, and its outcome."""
        states, outcomes = self.play_cohorts(engine, norm)
        return states[t + 1], outcomes[t]

    def replay_round(
        self, engine: str, t: int, norm: bool = False, cohort: list[int] | None = None
    ) -> tuple[State, Outcome]:
        """Play round t + 1 from the loop backend's state."""
        state = self.play_cohorts("loop", norm)[0][t]
        states, outcomes = self._play(engine, [cohort or COHORTS[t]], norm, state)
        return states[-1], outcomes[-1]

    def _play(
        self, engine: str, cohorts: list[list[int]], norm: bool, state: State | None = None
    ) -> tuple[list[State], list[Outcome]]:
        settings = PlaySettings(engine=engine)
        net = self.net(norm)
        method = with_checked_answers(self.method)
        return play_rounds(method, net, tiny_federation(), cohorts, settings, state=state)

    def train_part(
        self, engine: Engine | str, state: State, clients: list[int], cohort: list[int]
    ) -> Participation:
        """Train some clients of a cohort, as if the rest trained elsewhere."""
        settings = PlaySettings(engine=engine)
        return participate(
            self.method, self.net(), tiny_federation(), state, cohort, settings, clients
        )

    def evaluate_everyone(
        self, engine: str, state: State, tuning: FineTuning | None = None
    ) -> Counts:
        """Evaluate all clients."""
        call = EvalCall(self.method, tiny_federation(), state, EVERYONE, tuning)
        return make_backend(as_engine(engine), self.net(), CPU).evaluate(call)

    def find_job(self, net: Net, state: State, number: int) -> TrainJob:
        """Return a client's first step in the round after a state."""
        draws = Draws(0, "train", state.round + 1)
        local = dataclasses.replace(LOCAL, epochs=None, steps=1)
        call = TrainCall(self.method, tiny_federation(), state, [number], local, draws)
        return find_train_job(call, number, net)


# ---- comparisons


def state_trees(state: State) -> Record:
    """Return a state's trees by name."""
    parts = ("server", "clients", "server_buffers", "client_buffers", "stopping")
    return {part: getattr(state, part) for part in parts}


def flatten(values: Any, path: str = "") -> dict[str, Tensor]:
    """Return leaves by path, for trees of dicts, named tuples and lists, states and outcomes."""
    if isinstance(values, State):
        values = state_trees(values)
    elif isinstance(values, Outcome):
        values = vars(values)
    elif hasattr(values, "_asdict"):
        values = values._asdict()
    elif isinstance(values, list | tuple):
        values = dict(enumerate(values))
    if not isinstance(values, dict):
        return {path: torch.as_tensor(values)}
    leaves: dict[str, Tensor] = {}
    for key, part in values.items():
        leaves.update(flatten(part, f"{path}/{key}"))
    return leaves


def dotted(path: str) -> str:
    """Write a path of `flatten` for messages."""
    return path.strip("/").replace("/", ".")


def digest_leaves(values: Any) -> dict[str, str]:
    """Return digests of all leaves by path, to the last bit."""
    return {dotted(path): fingerprint(leaf) for path, leaf in flatten(values).items()}


def differing(a: Any, b: Any, atol: float = 0.0, rtol: float = 0.0) -> list[str]:
    """Return paths of leaves with another dtype or shape, or further apart than the tolerance.

    Without a tolerance leaves are the same bit for bit.
    """
    a = flatten(a)
    b = flatten(b)
    if a.keys() != b.keys():
        raise Unkept(f"has other entries: {', '.join(sorted(a.keys() ^ b.keys()))}")
    return [path for path in a if not _is_near(a[path], b[path], atol, rtol)]


def _is_near(a: Tensor, b: Tensor, atol: float, rtol: float) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if atol + rtol == 0 or not a.is_floating_point():
        return torch.equal(a, b)
    # A nan in the same place is agreement; another promise refuses it.
    return torch.allclose(a, b, rtol, atol, equal_nan=True)


def require_equal(label: str, a: Any, b: Any) -> None:
    """Raise Unkept where two trees are not equal bit for bit."""
    require_close(label, a, b, 0.0, 0.0)


def require_close(label: str, a: Any, b: Any, atol: float, rtol: float) -> None:
    """Raise Unkept where two trees are further apart than `atol + rtol * |b|`."""
    paths = differing(a, b, atol, rtol)
    if not paths:
        return
    one = flatten(a)[paths[0]]
    other = flatten(b)[paths[0]]
    distance = f"of shapes {list(one.shape)} and {list(other.shape)}"
    if one.shape == other.shape:
        # In float64, where integers and bools have a difference too.
        distance = f"up to {(one.double() - other.double()).abs().max():.2g} apart"
    name = dotted(paths[0]) or "value"
    raise Unkept(f"{label}: {name} {distance}; {len(paths)} entries differ")
