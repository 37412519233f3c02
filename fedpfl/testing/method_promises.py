"""What every method keeps to, as functions that try it on a tiny federation and raise Unkept where
it does not.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    State,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.backends.ranks import find_blamed_hook
from fedpfl.engine.calls import EvalCall, TrainCall, with_before_turn
from fedpfl.engine.keys import Draws, find_global_draws, generator
from fedpfl.engine.training.jobs import EvalJob
from fedpfl.engine.training.participation import Autocast, OneClient, run_evaluation
from fedpfl.engine.training.sgd import with_epoch_numbers
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import FACTS, SEES, Method, Turn
from fedpfl.models import Net
from fedpfl.testing.promises import Promise, Unkept, describe_error, promise_in
from fedpfl.testing.toy import (
    AGREE,
    BACKENDS,
    COHORTS,
    CPU,
    EVERYONE,
    LOCAL,
    NUDGES,
    TEST,
    MethodTrial,
    Nudged,
    as_engine,
    flatten,
    participate,
    play_rounds,
    require_close,
    require_equal,
    require_rounds_agree,
    tiny_federation,
)

METHOD_PROMISES: list[Promise] = []
promise = promise_in(METHOD_PROMISES)

STATEFUL = (
    "perhaps something outlives a hook's call: a list, a counter or a cache on the class or in the"
    " module; keep it in the client's state. Or something draws from a generator of its own that"
    " nobody seeds"
)
PADDED = (
    "perhaps `loss`, `predict` or a Phase's function mixes the samples of a batch: short batches"
    " are padded on the batched backend, so use batch.mean, batch.sum and batch.cross_entropy"
)
AMPLIFIED = (
    "perhaps rounding alone: on samples that are 2e-7 of themselves larger the loop backend differs"
    " from itself as much. What divides by small gradients (a step or server of the method's own"
    " with Adam) amplifies it, and so does a cut at a threshold. Try plain SGD, or no cut, in its"
    " place: backends then agree, unless short batches are averaged otherwise than by batch.mean,"
    " batch.sum and batch.cross_entropy"
)


@promise("hooks answer in the right form and change no argument", "", engines=BACKENDS)
def keeps_form(trial: MethodTrial, engine: str) -> None:
    """Client states have the structure, shapes and dtypes they began with, and numbers stay finite."""
    states, _ = trial.played(engine)  # which raises MethodError where an answer has another form
    for path, leaf in flatten([trial.brought(engine).client_states, *states]).items():
        if leaf.requires_grad:
            raise Unkept(f"{path} requires gradients; detach what is kept")
        if leaf.is_floating_point() and not leaf.isfinite().all():
            raise Unkept(f"{path} is not finite")


@promise(
    "nothing is stored on the method",
    "hyperparameters alone are fields; what a round finds out goes into the client's or the"
    " server's state",
)
def is_frozen(trial: MethodTrial) -> None:
    """A method is a frozen, hashable dataclass of hyperparameters, also after two rounds."""
    method = trial.method
    trial.played("loop")
    names = [own.name for own in dataclasses.fields(method)]
    if more := sorted(vars(method).keys() - set(names)):
        raise Unkept(f"`self.{more[0]}` was set")
    again = type(method)(
        **{own.name: getattr(method, own.name) for own in dataclasses.fields(method) if own.init}
    )
    if again != method or hash(again) != hash(method):
        raise Unkept(
            "two methods of equal hyperparameters are not equal, or not hashable; use"
            " @dataclass(frozen=True)"
        )


@promise(
    "no hook draws global random numbers",
    "draw in `sample`, or in `turns` or `init_clients`, which are given a generator too",
    engines=BACKENDS,
)
def draws_from_what_is_given(trial: MethodTrial, engine: str) -> None:
    """Neither torch's, nor NumPy's, nor Python's."""
    end = trial.played(engine)[0][-1]
    make_backend(as_engine(engine), trial.net(), CPU).evaluate(
        EvalCall(trial.method, tiny_federation(), end, EVERYONE)
    )
    if names := find_global_draws(trial.method):
        raise Unkept(f"draws from the generators of the process, of {', '.join(names)}")


@promise(
    "a run is the same bit for bit again, however often it is evaluated", STATEFUL, engines=BACKENDS
)
def runs_repeat(trial: MethodTrial, engine: str) -> None:
    """Evaluations before each round change nothing that follows."""
    runner, state = (
        make_backend(as_engine(engine), trial.net(), CPU),
        make_initial_state(trial.method, trial.net(), tiny_federation().clients, CPU),
    )
    for t, cohort in enumerate(COHORTS):
        for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", state.round))):
            runner.evaluate(EvalCall(trial.method, tiny_federation(), state, EVERYONE, tuning))
        state, outcome = play_round(
            RoundSetup(runner, trial.method, tiny_federation(), LOCAL, 0), state, cohort
        )
        expected_state, expected = trial.result(engine, t)
        result = {"state": state, "loss": outcome.loss, "after": outcome.after}
        require_equal(
            f"round {t + 1} again",
            result,
            {"state": expected_state, "loss": expected.loss, "after": expected.after},
        )


@promise(
    "participation and evaluation change no state, and an evaluation repeats itself",
    STATEFUL,
    engines=BACKENDS,
)
def asking_changes_nothing(trial: MethodTrial, engine: str) -> None:
    """The engine keeps what comes back, or does not; the network stays as it is."""
    method, net = trial.method, trial.net(norm=True)
    middle, end = (copy.deepcopy(trial.played(engine, norm=True)[0][t]) for t in (1, -1))
    kept, runner = copy.deepcopy((middle, end)), make_backend(as_engine(engine), net, CPU)
    participate(method, net, tiny_federation(), middle, COHORTS[1], engine=engine)
    for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", 2))):
        once, twice = (
            runner.evaluate(EvalCall(method, tiny_federation(), end, EVERYONE, tuning))
            for _ in range(2)
        )
        require_equal("evaluated again", once, twice)
    require_equal("the state of a round", middle, kept[0])
    require_equal("the state of a round", end, kept[1])
    require_equal(
        "the network",
        net.params | net.buffers,
        trial.net(norm=True).params | trial.net(norm=True).buffers,
    )


@promise("both backends agree", PADDED)
def backends_agree(trial: MethodTrial) -> None:
    """A round on the batched backend is that on the loop backend."""
    for t in range(len(COHORTS)):
        require_rounds_agree(
            f"after round {t + 1}", trial.result("loop", t), trial.replayed("batched", t), **AGREE
        )


@promise("both backends agree with batch normalisation", PADDED)
def backends_agree_with_norm(trial: MethodTrial) -> None:
    """Short last batches are padded on the batched backend; the running statistics agree too."""
    for t in range(len(COHORTS)):
        one, other = trial.result("loop", t, norm=True), trial.replayed("batched", t, norm=True)
        require_rounds_agree(f"after round {t + 1}", one, other, atol=1e-5, rtol=1e-3)


@promise("both backends agree in evaluating all clients", PADDED)
def backends_agree_in_evaluation(trial: MethodTrial) -> None:
    """Personal models, and copies fine-tuned, have the same test results."""
    for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", 2))):
        loop, batched = (trial.judged(name, tuning) for name in BACKENDS)
        what = "after fine-tuning" if tuning else "evaluated"
        require_equal(
            f"{what}, correct predictions",
            [loop.correct, loop.total],
            [batched.correct, batched.total],
        )
        require_close(f"{what}, test loss", loop.loss, batched.loss, 1e-4, 1e-4)
        if loop.total.tolist() != list(TEST):
            raise Unkept(f"{what}: {loop.total.tolist()} test samples instead of {list(TEST)}")


@promise("how many clients train at once does not matter (engine.width)", STATEFUL)
def width_does_not_matter(trial: MethodTrial) -> None:
    """Slices of the cohort give what the whole does, within rounding."""
    for width in (1, 3):
        other = trial.replayed(Engine("batched", width=width), 1, of="batched")
        require_rounds_agree(f"{width} at a time", trial.result("batched", 1), other, **AGREE)


@promise("the number of workers does not change a bit", STATEFUL)
def workers_do_not_matter(trial: MethodTrial) -> None:
    """Nor does the order in which they come to the clients."""
    for workers in (1, 3):
        other = trial.replayed(Engine("loop", workers=workers), 1)[0]
        require_equal(f"with {workers} workers", other, trial.result("loop", 1)[0])


@promise("the order of the cohort does not matter", STATEFUL, engines=BACKENDS)
def order_does_not_matter(trial: MethodTrial, engine: str) -> None:
    """What clients bring back is the same, bit for bit."""
    straight, mixed = [0, 1, 4, 5], [1, 5, 4, 0]
    again = trial.replayed(engine, 1, of=engine, cohort=mixed)
    require_equal("in another order", again[0], trial.result(engine, 1)[0])
    require_equal("in another order, training loss", again[1].loss, trial.result(engine, 1)[1].loss)
    state, net = trial.played(engine)[0][1], trial.net()
    one, other = (
        participate(trial.method, net, tiny_federation(), state, cohort, engine=engine, of=straight)
        for cohort in (straight, mixed)
    )
    for place, client in enumerate(straight):
        what = f"what client {client} brings back in another order"
        require_equal(what, tree.take(one, place), tree.take(other, mixed.index(client)))


@promise("what a client brings back does not depend on its cohort", STATEFUL)
def clients_are_apart(trial: MethodTrial) -> None:
    """Bit for bit on the loop backend, within rounding on the batched one, whose matrix products
    change width.
    """
    net = trial.net()
    for engine in BACKENDS:
        state = trial.played(engine)[0][1]
        together = participate(trial.method, net, tiny_federation(), state, EVERYONE, engine=engine)
        for client in (0, 1, 2):
            alone = participate(
                trial.method, net, tiny_federation(), state, [client], engine=engine, of=EVERYONE
            )
            a, b, what = (
                tree.take(together, client),
                tree.take(alone, 0),
                f"what client {client} brings back alone",
            )
            if engine == "loop":
                require_equal(what, a, b)
            else:
                require_close(
                    what, a._replace(before={}, after={}), b._replace(before={}, after={}), **AGREE
                )


@promise(
    "training sees of the server what download sends",
    "`loss` or a Phase's function uses entries of the server's state that `download` does not send;"
    " send them, or keep them in the client's state",
)
def sees_what_was_sent(trial: MethodTrial) -> None:
    """With nan in the rest of the server's state, nothing changes."""
    method, net = trial.method, trial.net()
    first, *states = trial.played("loop")[0]
    for state in states:
        for number in EVERYONE:
            client = trial.entered(net, state, number)
            other, start = (
                poison_unsent(method, first.server, state.server, client),
                method._begin(state.server, client),
            )
            shard = make_shard(tiny_federation(), number, LOCAL.batch_size, Draws(0, "train", 1))
            for phase, _ in with_epoch_numbers(method.phases(state.server, client, start, 2)):
                seen, known = (
                    take_first_step(
                        method,
                        phase,
                        net.bind(state.buffers(number), True),
                        shard,
                        start,
                        server,
                        client,
                    )
                    for server in (other, state.server)
                )
                require_equal(f"a step of client {number} without what is not sent", seen, known)


@promise(
    "the server sees no more than `server_sees` says",
    "set `server_sees` on the class to what it does see (fedpfl/methods/shared/method.py)",
)
def sees_what_it_says(trial: MethodTrial) -> None:
    """With clients' states spoilt, or the mean in the place of each upload, its hooks answer the
    same.
    """
    said, (seen, hook) = trial.method.server_sees, find_server_view(trial)
    if said not in SEES:
        raise Unkept(f"server_sees is {said!r}; it must be one of {', '.join(map(repr, SEES))}")
    if SEES.index(said) < SEES.index(seen):
        raise Unkept(f"server_sees is {said!r}, and {hook} goes by {seen}")


@promise(
    "what the server mixes before a turn it mixes with BatchNorm's statistics",
    "return the same mixture of `statistics`, or tell users that they stay as they are"
    " (docs/design.md#a-method)",
    binding=False,
)
def statistics_are_mixed(trial: MethodTrial) -> None:
    """Where `before_turn` returns entries of the network, it returns statistics too."""
    net, state = trial.net(norm=True), trial.played("loop", norm=True)[0][1]
    call = TrainCall(trial.method, tiny_federation(), state, EVERYONE, LOCAL, Draws(0, "train", 2))
    paths = [path for path, _ in tree.items(with_before_turn(call).overlay or {})]
    models, statistics = (
        [path for path in paths if f".{path}".endswith(tuple(f".{name}" for name in names))]
        for names in (net.params, net.buffers)
    )
    if models and not statistics:
        raise Unkept(f"before_turn returns {models[0]}, and no statistics")


@promise(
    "bf16 is near fp32",
    "training amplifies rounding; a model that is cut at a threshold does, and then use"
    " engine.precision=fp32",
    engines=BACKENDS,
    binding=False,
)
def bf16_is_near(trial: MethodTrial, engine: str) -> None:
    """Personal models after a round are within 0.02 and 5 % of each other."""
    method, net = trial.method, trial.net()
    state = play_rounds(method, net, tiny_federation(), COHORTS[:1], engine=f"{engine}-bf16")[0][-1]
    known = trial.played(engine)[0][1]
    own, exact = flatten(state), flatten(known)
    if wrong := [path for path in own if own[path].dtype != exact[path].dtype]:
        raise Unkept(f"{wrong[0]} is {own[wrong[0]].dtype} in bf16")
    bf16 = partial(torch.autocast, "cpu", torch.bfloat16)
    low = [personal_model(method, net, state, client, bf16) for client in EVERYONE]
    high = [personal_model(method, net, known, client) for client in EVERYONE]
    require_close("personal models", low, high, atol=0.02, rtol=0.05)


def personal_model(
    method: Method, net: Net, state: State, client: int, autocast: Autocast = nullcontext
) -> Tree:
    """Return the model by which a client is evaluated."""
    job = next(
        run_evaluation(
            with_before_turn(EvalCall(method, tiny_federation(), state, [client])),
            OneClient(client),
            net,
            autocast,
        )
    )
    assert isinstance(job, EvalJob)
    return job.params


def find_sent_entries(method: Method, server: Tree, client: dict[str, Tree]) -> list[Tensor]:
    """Return which entries of the server's state travel down to a client, by the gradient of what
    travels: by leaf.
    """
    leaves = [leaf.clone().requires_grad_(leaf.is_floating_point()) for leaf in tree.leaves(server)]
    floats = [leaf for leaf in leaves if leaf.requires_grad]
    seen = tree.leaves(tree.unmask_received(method.download(tree.rebuild(server, leaves), client)))
    weights = torch.Generator().manual_seed(0)
    total = torch.zeros((), requires_grad=True)
    for leaf in seen:
        total = total + (leaf * (1 + torch.rand(leaf.shape, generator=weights))).sum()
    slopes = iter(torch.autograd.grad(total, floats, materialize_grads=True) if floats else [])
    return [
        next(slopes) != 0 if leaf.requires_grad else torch.ones_like(leaf, dtype=torch.bool)
        for leaf in leaves
    ]


def poison_unsent(method: Method, first: Tree, server: Tree, client: dict[str, Tree]) -> Tree:
    """Return the server's state with nan in every float that the client was not told.

    It knows from the beginning what is still as `init` made it, which is in `first`.
    """

    def poison(leaf: Tensor, old: Tensor, sent: Tensor) -> Tensor:
        known = not leaf.is_floating_point() or torch.equal(leaf, old)
        return leaf if known else torch.where(sent, leaf, torch.nan)

    return tree.map(
        poison, server, first, tree.rebuild(server, find_sent_entries(method, server, client))
    )


def take_first_step(  # noqa: PLR0913 - what one step needs
    method: Method,
    phase: Any,
    bound: Any,
    shard: Any,
    params: Tree,
    server: Tree,
    client: dict[str, Tree],
    ask: Callable[..., Any] = lambda hook, *given: hook(*given),
) -> tuple[Any, Tree, dict[str, Tree]]:
    """Return what a phase says of its first step: the loss (or step), what it keeps, and the
    client's state.

    Nothing, and the state of before, where the client has too few samples for a step.
    """
    drawn = islice(shard.batches(phase.stream, 0), phase.batches)
    batches = tuple(
        own._replace(random=torch.full((len(own.y), method.randoms), 0.3)) for own in drawn
    )
    if len(batches) < phase.batches:
        return {}, {}, client
    batch = batches[0]
    if phase.step:
        given = batches if phase.batches > 1 else batch
        return ask(phase.step, server, client, bound, params, given), {}, client
    loss, kept = ask(phase.loss or method.loss, server, client, bound, params, batch), {}
    if isinstance(loss, tuple):
        loss, kept = loss
    if phase.after_gradient:
        client = ask(phase.after_gradient, server, client, params, params, batch, loss, kept)
    return loss, kept, client


# ---- what the server sees


@cache
def find_server_view(trial: MethodTrial) -> tuple[str, str]:
    """Return what the server of a method sees on the tiny federation, one of SEES, and which hook
    shows it.
    """
    mean, each, states = SEES
    if hook := _reads_states(trial):
        return states, hook
    hook = _reads_each(trial)
    return (each, hook) if hook else (mean, "")


def _reads_states(trial: MethodTrial) -> str:
    """Name the hook of the server's that answers something else where clients' states are spoilt;
    "" if none does.
    """
    method, state, cohort = trial.method, trial.played("loop")[0][1], COHORTS[1]
    stored, others, key = state.client(cohort), state.others(), (0, "train", 2, "before_turn")
    dealt = method.init_clients(len(EVERYONE), generator(0, "endow"))
    begun = {
        name
        for name, own in dealt.items()
        if _near(tree.take(own, torch.tensor(cohort)), stored[name])
    }
    known = {*FACTS, *begun} - {"statistics"}
    laid = method.before_turn(state.server, stored, others, generator(*key))

    def again() -> dict[str, Tree]:
        return method.before_turn(
            state.server,
            _spoilt(stored, known),
            lambda numbers: _spoilt(others(numbers), known),
            generator(*key),
        )

    if not _answers(laid, again):
        return "before_turn"
    for number in cohort:
        client = trial.entered(trial.net(), state, number)
        visible_entries = {
            *known,
            *laid,
            *method.sample(state.server, Draws(0, "train", 2).server(number)),
        }

        def sent(client: dict[str, Tree]) -> Tree:
            return method.download(state.server, method.prepare(state.server, client))

        if not _answers(sent(client), sent, _spoilt(client, visible_entries)):
            return "download"
    aggregate, clients, uploads = _aggregation(trial)
    if not _answers(
        aggregate(clients, uploads)[0], lambda: aggregate(_spoilt(clients, known), uploads)[0]
    ):
        return "aggregate"
    return ""


def _reads_each(trial: MethodTrial) -> str:
    """Name the hook of the server's that shows that a mean of uploads is not all it goes by; "" if
    none does.
    """
    turns = trial.method.turns
    for played, cohort in enumerate(COHORTS):
        if turns(played, cohort, len(EVERYONE), generator(0, "turns", played + 1)) != [
            Turn(cohort)
        ]:
            return "turns"
    aggregate, clients, uploads = _aggregation(trial)
    known = aggregate(clients, uploads)
    kept = {name: clients[name] for name in known[1]}

    def mean(leaf: Tensor) -> Tensor:
        return (
            (leaf.mean(0, keepdim=True) if leaf.is_floating_point() else leaf[:1])
            .expand_as(leaf)
            .clone()
        )

    same_clients = _near(known[1], kept)
    return (
        ""
        if same_clients and _answers(known, aggregate, clients, tree.map(mean, uploads))
        else "aggregate"
    )


def _aggregation(trial: MethodTrial) -> tuple[Callable[..., Any], dict[str, Tree], Tree]:
    """Return the second round's `aggregate` at equal weights, and the states and uploads that it is
    given.
    """
    state, part, cohort = trial.played("loop")[0][1], trial.brought("loop"), COHORTS[1]
    facts = {**state.facts(cohort), "trained": part.trained, "statistics": part.buffers}
    net, weight = (
        trial.net().bind(state.server_buffers),
        torch.full((len(cohort),), 1 / len(cohort)),
    )

    def aggregate(clients: dict[str, Tree], uploads: Tree) -> Any:
        random = generator(0, "aggregate", 2)
        return trial.method.aggregate(state.server, clients, net, uploads, weight, random)

    return aggregate, {**part.client_states, **facts}, part.uploads


def _spoilt(clients: dict[str, Tree], known: set[str]) -> dict[str, Tree]:
    """Return states with nan and other wrong values in all entries but those."""

    def spoil(leaf: Tensor) -> Tensor:
        return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else ~leaf

    return {name: own if name in known else tree.map(spoil, own) for name, own in clients.items()}


def _answers(known: Any, hook: Callable[..., Any], *given: Any) -> bool:
    """Tell whether a hook answers what is known, but for rounding."""
    try:
        return _near(known, hook(*given))
    except Exception:  # whatever wrong values lead to
        return False


def _near(known: Any, answer: Any) -> bool:
    try:
        require_close("", known, answer, atol=1e-6, rtol=1e-4)
    except Unkept:
        return False
    return True


# ---- what mends a broken promise


class MethodAdvice:
    """Describe a method's errors and say what mends its broken promises.

    Faults in promises about numbers follow from each other, so the first of them alone is told how
    to be mended.
    """

    def __init__(self, method: Method):
        self._method = method
        self._has_advised_on_numbers = False

    def describe_error(self, error: BaseException) -> str:
        """Return what was raised, in which hook and in which line of the method's file."""
        hook, line = find_blamed_hook(error, type(self._method)) or (
            type(self._method).__name__,
            "",
        )
        return f"{hook} {describe_error(error)}{line and f' ({line})'}"

    def advise(self, promise: Promise) -> str:
        """Return what mends a promise that is not kept, or "" if that has been said."""
        if promise.mend not in (PADDED, STATEFUL):
            return promise.mend
        if self._has_advised_on_numbers:
            return ""
        self._has_advised_on_numbers = True
        if promise.mend is PADDED and _amplified(self._method, promise):
            return AMPLIFIED
        return promise.mend


def _amplified(method: Method, promise: Promise) -> bool:
    """Tell whether backends would not agree either if rounding alone made them differ."""
    for nudge in NUDGES:
        try:
            promise.check(Nudged(method, nudge))
        except Unkept:
            return True
        except (Exception, SystemExit):
            continue
    return False
