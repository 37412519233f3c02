"""The tiny federation on which methods are tried, and comparisons of what came of it.

loop = batched: from one common state each round, 2e-6 absolute and 1e-4 relative (scores such as
Fisher's are squares of gradients); everything within one backend, precision and width is bit for
bit.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from fedpfl.engine.calls import Counts, EvalCall, Participation, TrainCall, with_before_turn
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.participation import OneClient
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method
from fedpfl.models import ADAPTERS, Net
from fedpfl.models.norm import BatchNorm2d
from fedpfl.testing.promises import Unkept

CPU = torch.device("cpu")
CLASSES = 5
BACKENDS = ("loop", "batched")
LOCAL = Local(epochs=2, batch_size=32, lr=0.05, momentum=0.7, weight_decay=1e-4)
LOOP = Engine("loop", workers=2)

# Ragged on purpose: one sample, clients of one batch, a remainder of one sample, none to test.
TRAIN, TEST = (40, 7, 33, 2, 65, 1), (12, 3, 9, 0, 14, 1)
COHORTS = [[0, 2, 3, 5], [0, 1, 4, 5]]
EVERYONE = list(range(6))
AGREE = {"atol": 2e-6, "rtol": 1e-4}


# ---- the tiny federation


class Tiny(nn.Module):
    """549 parameters for [1, 8, 8]; smooth, so that no kink amplifies rounding. `norm` adds
    BatchNorm.
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
    """Return a Tiny network; the same for the same seed. pairs: low-rank ones in each layer but the
    head, if any.
    """
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
    g = torch.Generator().manual_seed(seed)
    total = sum(train) + sum(test)
    y = torch.empty(total, dtype=torch.int64)
    own_train, own_test, at = [], [], 0
    for n_train, n_test in zip(train, test, strict=True):
        share = torch.rand(CLASSES, generator=g) ** 3 + 0.01
        n = n_train + n_test
        y[at : at + n] = torch.multinomial(share, max(n, 1), replacement=True, generator=g)[:n]
        index = torch.arange(at, at + n)
        own_train.append(index[:n_train])
        own_test.append(index[n_train:])
        at += n
    pattern = torch.rand(CLASSES, 1, 8, 8, generator=g)
    x = 0.5 * pattern[y] + 0.5 * torch.rand(total, 1, 8, 8, generator=g)
    return Federation(
        "toy",
        (255 * x).to(torch.uint8),
        y,
        CLASSES,
        (0.4,),
        (0.3,),
        train=tuple(own_train),
        test=tuple(own_test),
    )


@cache
def tiny_federation() -> Federation:
    """Return the federation on which methods are tried; what it holds out are its test samples once
    more.
    """
    federation = federate(TRAIN, TEST)
    return dataclasses.replace(federation, validation=federation.test)


def as_engine(name: Engine | str) -> Engine:
    """Return the Engine of `loop`, `batched-bf16`, ..., or an Engine as it is."""
    if isinstance(name, Engine):
        return name
    backend, _, precision = name.partition("-")
    return Engine(backend, precision=precision or "fp32")  # type: ignore[arg-type]


def play_rounds(  # noqa: PLR0913 - what one step needs
    method: Method,
    net: Net,
    federation: Federation,
    cohorts: list[list[int]],
    *,
    engine: Engine | str = LOOP,
    local: Local = LOCAL,
    seed: int = 0,
    stopping: Stopping | None = None,
) -> tuple[list[State], list[Outcome]]:
    """Return copies of the states before round 1 and after every round, and the outcomes."""
    backend = make_backend(as_engine(engine), net, CPU)
    state = make_initial_state(
        method, net, federation.clients, CPU, seed=seed, stopping=stopping is not None
    )
    states, outcomes = [copy.deepcopy(state)], []
    for planned in cohorts:
        cohort = pick_cohort(state, planned, seed)
        if not cohort:
            break
        state, outcome = play_round(
            RoundSetup(backend, method, federation, local, seed, stopping=stopping), state, cohort
        )
        states.append(copy.deepcopy(state))
        outcomes.append(outcome)
    return states, outcomes


def participate(  # noqa: PLR0913 - what one step needs
    method: Method,
    net: Net,
    federation: Federation,
    state: State,
    cohort: list[int],
    *,
    engine: Engine | str = LOOP,
    local: Local = LOCAL,
    seed: int = 0,
    of: list[int] | None = None,
) -> Participation:
    """Return what the cohort brings back from the round after `state`, which is left as it is.

    of: the whole cohort, by which the server decides what it lays over clients' states.
    """
    whole, draws = of or cohort, Draws(seed, "train", state.round + 1)
    laid = with_before_turn(TrainCall(method, federation, state, whole, local, draws)).overlay
    rows = torch.tensor([whole.index(client) for client in cohort])
    given = (method, federation, state, cohort, local, draws)
    return make_backend(as_engine(engine), net, CPU).participate(
        TrainCall(*given, overlay=laid and tree.take(laid, rows))
    )


NUDGES = (2e-7, 4e-7, 6e-7)
"""By how much of themselves samples are changed: as sums in another order are."""


class MethodTrial:
    """A method on the tiny federation; runs that several promises look at are played once.

    pairs: low-rank ones in each layer of a network that is frozen else, which a method may also
    want itself.
    """

    def __init__(self, method: Method, pairs: int = 0):
        self.method, self._pairs = method, pairs or method.pairs
        self._played: dict[tuple[str, bool], tuple[list[State], list[Outcome]]] = {}
        self._brought: dict[str, Participation] = {}

    def net(self, norm: bool = False) -> Net:
        """Return the network that it is tried on."""
        return tiny(norm, pairs=self._pairs)

    def played(self, engine: str, norm: bool = False) -> tuple[list[State], list[Outcome]]:
        """Return states and outcomes of two rounds, which are not to be changed."""
        if (engine, norm) not in self._played:
            self._played[engine, norm] = play_rounds(
                self.method, self.net(norm), tiny_federation(), COHORTS, engine=engine
            )
        return self._played[engine, norm]

    def brought(self, engine: str) -> Participation:
        """Return what the cohort of that run's second round brings back, which is not to be
        changed.
        """
        if engine not in self._brought:
            state = self.played(engine)[0][1]
            self._brought[engine] = participate(
                self.method, self.net(), tiny_federation(), state, COHORTS[1], engine=engine
            )
        return self._brought[engine]

    def result(self, engine: str, t: int, norm: bool = False) -> tuple[State, Outcome]:
        """Return the state after round t + 1 of that run, and its outcome."""
        states, outcomes = self.played(engine, norm)
        return states[t + 1], outcomes[t]

    def replayed(
        self,
        engine: Engine | str,
        t: int,
        *,
        of: str = "loop",
        norm: bool = False,
        cohort: list[int] | None = None,
    ) -> tuple[State, Outcome]:
        """Play the round on another engine, from the state that the run on engine `of` has reached
        by then.
        """
        (runner, federation), state = (
            self._stage(engine, norm),
            copy.deepcopy(self.played(of, norm)[0][t]),
        )
        return play_round(
            RoundSetup(runner, self.method, federation, LOCAL, 0), state, cohort or COHORTS[t]
        )

    def judged(self, engine: str, tuning: FineTuning | None) -> Counts:
        """Evaluate everyone after two rounds on the loop backend."""
        runner, federation = self._stage(engine)
        return runner.evaluate(
            EvalCall(self.method, federation, self.played("loop")[0][-1], EVERYONE, tuning)
        )

    def _stage(self, engine: Engine | str, norm: bool = False) -> tuple[Backend, Federation]:
        return make_backend(as_engine(engine), self.net(norm), CPU), tiny_federation()

    def entered(self, net: Net, state: State, number: int) -> dict[str, Tree]:
        """Return a client's state after `prepare`, as it enters the next round."""
        method, draws = self.method, Draws(0, "train", state.round + 1)
        shard = make_shard(tiny_federation(), number, LOCAL.batch_size, draws)
        call = with_before_turn(TrainCall(method, tiny_federation(), state, [number], LOCAL, draws))
        client = OneClient(number).states(call) | method.sample(state.server, draws.server(number))
        bound = net.bind(state.buffers(number), training=True)
        found = method.before_training(state.server, client, bound, shard)
        return method.prepare(state.server, client | tree.mark_real(found))


class Nudged(MethodTrial):
    """A method where rounding alone tells both backends apart: the other one is loop, too, on
    samples `by` larger.
    """

    def __init__(self, method: Method, by: float):
        super().__init__(method)
        self._by = by

    def _stage(self, engine: Engine | str, norm: bool = False) -> tuple[Backend, Federation]:
        runner, federation = super()._stage("loop", norm)
        assert federation.std
        std = tuple(own / (1 + self._by) for own in federation.std)
        return runner, federation if engine == "loop" else dataclasses.replace(federation, std=std)


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
    if isinstance(tree, dict):
        return {
            k: leaf
            for key, part in tree.items()
            for k, leaf in flatten(part, f"{path}/{key}").items()
        }
    return {path: tree}


def differing(a: Any, b: Any) -> list[str]:
    """Return paths of leaves that are not bit-identical (dtype and shape included)."""
    a, b = flatten(a), flatten(b)
    if a.keys() != b.keys():
        raise Unkept(f"has other entries: {', '.join(sorted(set(a) ^ set(b)))}")
    return [
        k
        for k in a
        if a[k].dtype != b[k].dtype or a[k].shape != b[k].shape or not torch.equal(a[k], b[k])
    ]


def require_equal(what: str, a: Any, b: Any) -> None:
    """Raise Unkept where two trees are not equal bit for bit."""
    _none(what, differing(a, b), flatten(a), flatten(b))


def require_close(what: str, a: Any, b: Any, atol: float, rtol: float) -> None:
    """Raise Unkept where two trees are further apart than `atol + rtol * |b|`."""
    a, b = flatten(a), flatten(b)
    if a.keys() != b.keys():
        raise Unkept(f"{what}: other entries, {', '.join(sorted(set(a) ^ set(b)))}")
    _none(what, [k for k in a if not _near(a[k], b[k], atol, rtol)], a, b)


def _near(a: Tensor, b: Tensor, atol: float, rtol: float) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (
        torch.allclose(a, b, rtol, atol, equal_nan=True)
        if a.is_floating_point()
        else torch.equal(a, b)
    )


def _none(what: str, far: list[str], a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    if not far:
        return
    one, other = a[far[0]], b[far[0]]
    by = f"of shape {list(one.shape)} and {list(other.shape)}"
    if one.shape == other.shape:
        most = float((one.double() - other.double()).abs().max())
        by = f"up to {most:.2g} apart" if most == most else "not finite"
    name = far[0].strip("/").replace("/", ".")
    more = f"; {len(far)} entries differ" if far[1:] else ""
    raise Unkept(f"{what}: {name and name + ' '}{by}{more}")


def require_rounds_agree(
    what: str, one: tuple[State, Outcome], other: tuple[State, Outcome], atol: float, rtol: float
) -> None:
    """Raise Unkept where two results of a round disagree: trees and losses within tolerance, counts
    exactly.
    """
    require_close(what, one[0], other[0], atol, rtol)
    a, b = one[1], other[1]
    for name in ("before", "after"):
        judged, again = getattr(a, name), getattr(b, name)
        require_equal(
            f"{what}, evaluated {name} training",
            [judged.correct, judged.total],
            [again.correct, again.total],
        )
        require_close(f"{what}, loss {name} training", judged.loss, again.loss, 1e-4, 1e-4)
    require_close(f"{what}, training loss", a.loss, b.loss, 1e-5, 1e-4)
    require_equal(f"{what}, whether training is finite", a.finite, b.finite)
    if (a.traffic, a.state_is_finite) != (b.traffic, b.state_is_finite):
        raise Unkept(f"{what}: {a.traffic} and {b.traffic} travelled")
    metrics, others = (
        {name: torch.tensor(value) for name, value in own.metrics.items()} for own in (a, b)
    )
    require_close(f"{what}, metrics", metrics, others, 1e-6, 1e-4)
