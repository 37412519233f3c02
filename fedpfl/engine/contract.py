"""What every method keeps to, as functions that try it on a tiny federation and raise Unkept where it does not.

loop = batched: from one common state each round, 2e-6 absolute and 1e-4 relative (scores such as Fisher's are squares
of gradients); bf16 is within 0.02 and 5 % of fp32; everything within one backend, precision and width is bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.data.federation import Federation
from fedpfl.engine import Engine, Local, Outcome, State, Stopping, Tuning, begin, make, pick, play
from fedpfl.engine.keys import Draws
from fedpfl.engine.ranks import frames
from fedpfl.engine.shard import training_shard
from fedpfl.ground import tree
from fedpfl.ground.errors import Broken, reason
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Method
from fedpfl.models import Net
from fedpfl.models.norm import BatchNorm2d

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


class Unkept(AssertionError):
    """A method does not keep to its contract; the message says what differs, and by how much."""


class Promise(NamedTuple):
    """Hold something that methods keep to: in words, how it is tried, and what mends a method that does not.

    check: `check(trial)`, or `check(trial, engine)` for each of `engines`. binding: whether all methods must.
    """

    words: str
    mend: str
    check: Callable[..., None]
    engines: tuple[str, ...] = ()
    binding: bool = True


PROMISES: list[Promise] = []


def promise(words: str, mend: str, engines: tuple[str, ...] = (), binding: bool = True) -> Callable[[Any], Any]:
    """Add what the function below tries to PROMISES."""

    def keep(check: Callable[..., None]) -> Callable[..., None]:
        PROMISES.append(Promise(words, mend, check, engines, binding))
        return check

    return keep


# ---- the tiny federation


class Tiny(nn.Module):
    """549 parameters for [1, 8, 8]; smooth, so that no kink amplifies rounding. `norm` adds BatchNorm."""

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


def tiny(norm: bool = False, seed: int = 1) -> Net:
    """Return a Tiny network; the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(Tiny(norm))


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
        "toy", (255 * x).to(torch.uint8), y, CLASSES, (0.4,), (0.3,), train=tuple(own_train), test=tuple(own_test)
    )


@cache
def small() -> Federation:
    """Return the federation on which methods are tried; what it holds out are its test samples once more."""
    federation = federate(TRAIN, TEST)
    return dataclasses.replace(federation, validation=federation.test)


def as_engine(name: Engine | str) -> Engine:
    """Return the Engine of `loop`, `batched-bf16`, ..., or an Engine as it is."""
    if isinstance(name, Engine):
        return name
    backend, _, precision = name.partition("-")
    return Engine(backend, precision=precision or "fp32")  # type: ignore[arg-type]


def rounds(
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
    backend = make(as_engine(engine), net, CPU)
    state = begin(method, net, federation.clients, CPU, seed=seed, stopping=stopping is not None)
    states, outcomes = [copy.deepcopy(state)], []
    for planned in cohorts:
        cohort = pick(state, planned, seed)
        if not cohort:
            break
        state, outcome = play(backend, method, federation, state, cohort, local, seed, stopping)
        states.append(copy.deepcopy(state))
        outcomes.append(outcome)
    return states, outcomes


def participate(
    method: Method, net: Net, federation: Federation, state: State, cohort: list[int], **kwargs: Any
) -> Any:
    """Return what the cohort brings back from the round after `state`, which is left as it is."""
    engine, local, seed = kwargs.get("engine", LOOP), kwargs.get("local", LOCAL), kwargs.get("seed", 0)
    engine = as_engine(engine)
    draws = Draws(seed, "train", state.round + 1)
    return make(engine, net, CPU).participate(method, federation, state, cohort, local, draws)


def row(stacked: Any, client: int) -> Any:
    """Return one client's tree."""
    return {k: row(v, client) for k, v in stacked.items()} if isinstance(stacked, dict) else stacked[client]


class Trial:
    """A method on the tiny federation; runs that several promises look at are played once."""

    def __init__(self, method: Method):
        self.method = method
        self._played: dict[tuple[str, bool], tuple[list[State], list[Outcome]]] = {}

    def played(self, engine: str, norm: bool = False) -> tuple[list[State], list[Outcome]]:
        """Return states and outcomes of two rounds, which are not to be changed."""
        if (engine, norm) not in self._played:
            self._played[engine, norm] = rounds(self.method, tiny(norm), small(), COHORTS, engine=engine)
        return self._played[engine, norm]

    def result(self, engine: str, t: int, norm: bool = False) -> tuple[State, Outcome]:
        """Return the state after round t + 1 of that run, and its outcome."""
        states, outcomes = self.played(engine, norm)
        return states[t + 1], outcomes[t]

    def replayed(
        self, engine: Engine | str, t: int, *, of: str = "loop", norm: bool = False, cohort: list[int] | None = None
    ) -> tuple[State, Outcome]:
        """Play the round on another engine, from the state that the run on engine `of` has reached by then."""
        runner, state = make(as_engine(engine), tiny(norm), CPU), copy.deepcopy(self.played(of, norm)[0][t])
        return play(runner, self.method, small(), state, cohort or COHORTS[t], LOCAL, 0)

    def entered(self, net: Net, state: State, number: int) -> dict[str, Tree]:
        """Return a client's state after `prepare`, as it enters the next round."""
        method, draws = self.method, Draws(0, "train", state.round + 1)
        shard = training_shard(small(), number, LOCAL.batch_size, draws)
        client = state.client(number) | method.sample(state.server, draws.server(number))
        bound = net.bind(state.buffers(number), training=True)
        return method.prepare(state.server, client | method.before_training(state.server, client, bound, shard))


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
        return {k: leaf for key, part in tree.items() for k, leaf in flatten(part, f"{path}/{key}").items()}
    return {path: tree}


def differing(a: Any, b: Any) -> list[str]:
    """Return paths of leaves that are not bit-identical (dtype and shape included)."""
    a, b = flatten(a), flatten(b)
    if a.keys() != b.keys():
        raise Unkept(f"has other entries: {', '.join(sorted(set(a) ^ set(b)))}")
    return [k for k in a if a[k].dtype != b[k].dtype or a[k].shape != b[k].shape or not torch.equal(a[k], b[k])]


def same(what: str, a: Any, b: Any) -> None:
    """Raise Unkept where two trees are not equal bit for bit."""
    _none(what, differing(a, b), flatten(a), flatten(b))


def close(what: str, a: Any, b: Any, atol: float, rtol: float) -> None:
    """Raise Unkept where two trees are further apart than `atol + rtol * |b|`."""
    a, b = flatten(a), flatten(b)
    if a.keys() != b.keys():
        raise Unkept(f"{what}: other entries, {', '.join(sorted(set(a) ^ set(b)))}")
    _none(what, [k for k in a if not _near(a[k], b[k], atol, rtol)], a, b)


def _near(a: Tensor, b: Tensor, atol: float, rtol: float) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.allclose(a, b, rtol, atol, equal_nan=True) if a.is_floating_point() else torch.equal(a, b)


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


def agree(what: str, one: tuple[State, Outcome], other: tuple[State, Outcome], atol: float, rtol: float) -> None:
    """Raise Unkept where two results of a round disagree: trees and losses within tolerance, counts exactly."""
    close(what, one[0], other[0], atol, rtol)
    a, b = one[1], other[1]
    for name in ("before", "after"):
        judged, again = getattr(a, name), getattr(b, name)
        same(f"{what}, evaluated {name} training", [judged.correct, judged.total], [again.correct, again.total])
        close(f"{what}, loss {name} training", judged.loss, again.loss, 1e-4, 1e-4)
    close(f"{what}, training loss", a.loss, b.loss, 1e-5, 1e-4)
    same(f"{what}, whether training is finite", a.finite, b.finite)
    if (a.sent, a.sound) != (b.sent, b.sound):
        raise Unkept(f"{what}: {a.sent} and {b.sent} travelled")
    metrics, others = ({name: torch.tensor(value) for name, value in own.metrics.items()} for own in (a, b))
    close(f"{what}, metrics", metrics, others, 1e-6, 1e-4)


# ---- the promises


STATEFUL = (
    "perhaps something outlives a hook's call: a list, a counter or a cache on the class or in the module, or global "
    "random numbers (torch.rand); keep it in the client's state, and draw in `sample`"
)
PADDED = (
    "perhaps `loss`, `predict` or a Phase's function mixes the samples of a batch: short batches are padded on the "
    "batched backend, so use batch.mean, batch.sum and batch.cross_entropy"
)


@promise(
    "hooks answer in the right form and change no argument",
    "",
    engines=BACKENDS,
)
def keeps_form(trial: Trial, engine: str) -> None:
    """Client states have the structure, shapes and dtypes they began with, and numbers stay finite."""
    states, _ = trial.played(engine)  # which raises Broken where an answer has another form
    part = participate(trial.method, tiny(), small(), states[1], COHORTS[1], engine=engine)
    for path, leaf in flatten([part.clients, *states]).items():
        if leaf.requires_grad:
            raise Unkept(f"{path} requires gradients; detach what is kept")
        if leaf.is_floating_point() and not leaf.isfinite().all():
            raise Unkept(f"{path} is not finite")


@promise(
    "nothing is stored on the method",
    "hyperparameters alone are fields; what a round finds out goes into the client's or the server's state",
)
def is_frozen(trial: Trial) -> None:
    """A method is a frozen, hashable dataclass of hyperparameters, also after two rounds."""
    method = trial.method
    trial.played("loop")
    names = [own.name for own in dataclasses.fields(method)]
    if more := sorted(vars(method).keys() - set(names)):
        raise Unkept(f"`self.{more[0]}` was set")
    again = type(method)(**{own.name: getattr(method, own.name) for own in dataclasses.fields(method) if own.init})
    if again != method or hash(again) != hash(method):
        raise Unkept("two methods of equal hyperparameters are not equal, or not hashable; use @dataclass(frozen=True)")


@promise("a run is the same bit for bit again, however often it is evaluated", STATEFUL, engines=BACKENDS)
def runs_repeat(trial: Trial, engine: str) -> None:
    """Evaluations before each round change nothing that follows."""
    runner, state = make(as_engine(engine), tiny(), CPU), begin(trial.method, tiny(), small().clients, CPU)
    for t, cohort in enumerate(COHORTS):
        for tuning in (None, Tuning(LOCAL, Draws(0, "finetune", state.round))):
            runner.evaluate(trial.method, small(), state, EVERYONE, tuning)
        state, outcome = play(runner, trial.method, small(), state, cohort, LOCAL, 0)
        known, told = trial.result(engine, t)
        told_again = {"state": state, "loss": outcome.loss, "after": outcome.after}
        same(f"round {t + 1} again", told_again, {"state": known, "loss": told.loss, "after": told.after})


@promise("participation and evaluation change no state, and an evaluation repeats itself", STATEFUL, engines=BACKENDS)
def asking_changes_nothing(trial: Trial, engine: str) -> None:
    """The engine keeps what comes back, or does not; the network stays as it is."""
    method, net = trial.method, tiny(norm=True)
    middle, end = (copy.deepcopy(trial.played(engine, norm=True)[0][t]) for t in (1, -1))
    kept, runner = copy.deepcopy((middle, end)), make(as_engine(engine), net, CPU)
    participate(method, net, small(), middle, COHORTS[1], engine=engine)
    for tuning in (None, Tuning(LOCAL, Draws(0, "finetune", 2))):
        once, twice = (runner.evaluate(method, small(), end, EVERYONE, tuning) for _ in range(2))
        same("evaluated again", once, twice)
    same("the state of a round", middle, kept[0])
    same("the state of a round", end, kept[1])
    same("the network", net.params | net.buffers, tiny(norm=True).params | tiny(norm=True).buffers)


@promise("both backends agree", PADDED)
def backends_agree(trial: Trial) -> None:
    """A round on the batched backend is that on the loop backend."""
    for t in range(len(COHORTS)):
        agree(f"after round {t + 1}", trial.result("loop", t), trial.replayed("batched", t), **AGREE)


@promise("both backends agree with batch normalisation", PADDED)
def backends_agree_with_norm(trial: Trial) -> None:
    """Short last batches are padded on the batched backend; the running statistics agree too."""
    for t in range(len(COHORTS)):
        one, other = trial.result("loop", t, norm=True), trial.replayed("batched", t, norm=True)
        agree(f"after round {t + 1}", one, other, atol=1e-5, rtol=1e-3)


@promise("both backends agree in evaluating all clients", PADDED)
def backends_agree_in_evaluation(trial: Trial) -> None:
    """Personal models, and copies fine-tuned, have the same test results."""
    state, net = trial.played("loop")[0][-1], tiny()
    for tuning in (None, Tuning(LOCAL, Draws(0, "finetune", 2))):
        loop, batched = (
            make(Engine(name), net, CPU).evaluate(trial.method, small(), state, EVERYONE, tuning)  # type: ignore[arg-type]
            for name in BACKENDS
        )
        what = "after fine-tuning" if tuning else "evaluated"
        same(f"{what}, correct predictions", [loop.correct, loop.total], [batched.correct, batched.total])
        close(f"{what}, test loss", loop.loss, batched.loss, 1e-4, 1e-4)
        if loop.total.tolist() != list(TEST):
            raise Unkept(f"{what}: {loop.total.tolist()} test samples instead of {list(TEST)}")


@promise("how many clients train at once does not matter (engine.width)", STATEFUL)
def width_does_not_matter(trial: Trial) -> None:
    """Slices of the cohort give what the whole does, within rounding."""
    for width in (1, 3):
        other = trial.replayed(Engine("batched", width=width), 1, of="batched")
        agree(f"{width} at a time", trial.result("batched", 1), other, **AGREE)


@promise("the number of workers does not change a bit", STATEFUL)
def workers_do_not_matter(trial: Trial) -> None:
    """Nor does the order in which they come to the clients."""
    for workers in (1, 3):
        other = trial.replayed(Engine("loop", workers=workers), 1)[0]
        same(f"with {workers} workers", other, trial.result("loop", 1)[0])


@promise("the order of the cohort does not matter", STATEFUL, engines=BACKENDS)
def order_does_not_matter(trial: Trial, engine: str) -> None:
    """What clients bring back is the same, bit for bit."""
    straight, mixed = [0, 1, 4, 5], [1, 5, 4, 0]
    again = trial.replayed(engine, 1, of=engine, cohort=mixed)
    same("in another order", again[0], trial.result(engine, 1)[0])
    same("in another order, training loss", again[1].loss, trial.result(engine, 1)[1].loss)
    state, net = trial.played(engine)[0][1], tiny()
    one, other = (participate(trial.method, net, small(), state, c, engine=engine) for c in (straight, mixed))
    for place, client in enumerate(straight):
        what = f"what client {client} brings back in another order"
        same(what, tree.take(one, place), tree.take(other, mixed.index(client)))


@promise("what a client brings back does not depend on its cohort", STATEFUL)
def clients_are_apart(trial: Trial) -> None:
    """Bit for bit on the loop backend, within rounding on the batched one, whose matrix products change width."""
    net = tiny()
    for engine in BACKENDS:
        state = trial.played(engine)[0][1]
        together = participate(trial.method, net, small(), state, EVERYONE, engine=engine)
        for client in (0, 1, 2):
            alone = participate(trial.method, net, small(), state, [client], engine=engine)
            a, b, what = tree.take(together, client), tree.take(alone, 0), f"what client {client} brings back alone"
            if engine == "loop":
                same(what, a, b)
            else:
                close(what, a._replace(before={}, after={}), b._replace(before={}, after={}), **AGREE)


@promise(
    "training sees of the server what download sends",
    "`loss` or a Phase's function uses entries of the server's state that `download` does not send; send them, or keep "
    "them in the client's state",
)
def sees_what_was_sent(trial: Trial) -> None:
    """With nan in the rest of the server's state, nothing changes."""
    method, net = trial.method, tiny()
    first, *states = trial.played("loop")[0]
    for state in states:
        for number in EVERYONE:
            client = trial.entered(net, state, number)
            other, start = poisoned(method, first.server, state.server, client), method._begin(state.server, client)
            shard = training_shard(small(), number, LOCAL.batch_size, Draws(0, "train", 1))
            for phase in method.phases(state.server, client, start, 2):
                seen, known = (
                    one_step(method, phase, net.bind(state.buffers(number), True), shard, start, server, client)
                    for server in (other, state.server)
                )
                same(f"a step of client {number} without what is not sent", seen, known)


@promise(
    "bf16 is near fp32",
    "training amplifies rounding; a model that is cut at a threshold does, and then use engine.precision=fp32",
    engines=BACKENDS,
    binding=False,
)
def bf16_is_near(trial: Trial, engine: str) -> None:
    """Personal models after a round are within 0.02 and 5 % of each other."""
    method = trial.method
    state = rounds(method, tiny(), small(), COHORTS[:1], engine=f"{engine}-bf16")[0][-1]
    known = trial.played(engine)[0][1]
    own, exact = flatten(state), flatten(known)
    if wrong := [path for path in own if own[path].dtype != exact[path].dtype]:
        raise Unkept(f"{wrong[0]} is {own[wrong[0]].dtype} in bf16")
    low, high = ([method.personal(s.server, s.client(i)) for i in EVERYONE] for s in (state, known))
    close("personal models", low, high, atol=0.02, rtol=0.05)


def told(method: Method, server: Tree, client: dict[str, Tree]) -> list[Tensor]:
    """Return which entries of the server's state travel down to a client, by the gradient of what travels: by leaf."""
    leaves = [leaf.clone().requires_grad_(leaf.is_floating_point()) for leaf in tree.leaves(server)]
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    seen = tree.leaves(tree.received(method.download(tree.rebuild(server, leaves), client)))
    weights = torch.Generator().manual_seed(0)
    total = torch.zeros((), requires_grad=True)
    for leaf in seen:
        total = total + (leaf * (1 + torch.rand(leaf.shape, generator=weights))).sum()
    slopes = iter(torch.autograd.grad(total, floats, materialize_grads=True) if floats else [])
    return [next(slopes) != 0 if leaf.requires_grad else torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves]


def poisoned(method: Method, first: Tree, server: Tree, client: dict[str, Tree]) -> Tree:
    """Return the server's state with nan in every float that the client was not told.

    It knows from the beginning what is still as `init` made it, which is in `first`.
    """

    def poison(leaf: Tensor, old: Tensor, sent: Tensor) -> Tensor:
        known = not leaf.is_floating_point() or torch.equal(leaf, old)
        return leaf if known else torch.where(sent, leaf, torch.nan)

    return tree.map(poison, server, first, tree.rebuild(server, told(method, server, client)))


def one_step(
    method: Method,
    phase: Any,
    bound: Any,
    shard: Any,
    params: Tree,
    server: Tree,
    client: dict[str, Tree],
    ask: Callable[..., Any] = lambda hook, *given: hook(*given),
) -> tuple[Any, Tree, dict[str, Tree]]:
    """Return what a phase says of one batch of all samples: its loss (or step), what it keeps, the client's state."""
    batch = Batch(shard.data.x, shard.data.y, random=torch.full((phase.randoms,), 0.3))
    if phase.step:
        batches = (batch,) * phase.batches if phase.batches > 1 else batch
        return ask(phase.step, server, client, bound, params, batches), {}, client
    loss, kept = ask(phase.loss or method.loss, server, client, bound, params, batch), {}
    if phase.keeps:
        loss, kept = loss
    if phase.after_gradient:
        client = ask(phase.after_gradient, server, client, params, params, loss, batch)
    return loss, kept, client


# ---- all of them


def audit(method: Method, quick: bool = False) -> Iterator[tuple[Promise, list[str], str]]:
    """Try a method for each promise: give what is wrong, by engine, and what mends it, both empty where it is kept.

    quick: on one of the backends. Where the first is not kept, the rest is not tried; of promises about numbers, whose
    faults follow from each other, the first alone is told how to mend.
    """
    trial, told = Trial(method), set[str]()
    for promise in PROMISES:
        first, engines = promise is PROMISES[0], promise.engines or ("",)
        tried = engines if first or not quick else engines[-1:]
        faults = {engine: fault for engine in tried if (fault := _fault(trial, promise, engine))}
        alike = list(faults) == list(tried) and len(set(faults.values())) == 1
        found = [f"{'' if alike else engine + ': '}{fault}" for engine, fault in faults.items()]
        mend = ""
        if faults and first:
            mend = "the rest is tried once this is mended"
        elif faults and not (promise.mend in (PADDED, STATEFUL) and told & {PADDED, STATEFUL}):
            mend = f"-> {promise.mend}"
            told.add(promise.mend)
        yield promise, found[: 1 if alike else None], mend
        if faults and first:
            return


def _fault(trial: Trial, promise: Promise, engine: str) -> str:
    """Return what is wrong, "" if nothing is."""
    try:
        promise.check(trial, *([engine] if engine else []))
    except (Unkept, Broken) as fault:
        return str(fault)
    except Exception as error:
        files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in type(trial.method).__mro__}
        calls = [(hook, f" ({file}:{line})") for file, hook, line in frames(error) if file in files]
        (hook, _), (_, place) = (calls[0], calls[-1]) if calls else ((type(trial.method).__name__, ""), ("", ""))
        return f"{hook} raised {reason(error, kind=True)}{place}"
    return ""
