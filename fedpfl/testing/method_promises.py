"""Promises of every method, tried on a tiny federation; each raises Unkept where it is broken."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch

from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.backends.loop import LoopBackend
from fedpfl.engine.calls import EvalCall, TrainCall, with_before_turn
from fedpfl.engine.keys import Draws, find_global_draws, generator
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import FACTS, Method
from fedpfl.testing.promises import (
    Promise,
    Unkept,
    promise_in,
    repeats_elsewhere,
)
from fedpfl.testing.toy import (
    AGREE,
    BACKENDS,
    COHORTS,
    CPU,
    EVERYONE,
    LOCAL,
    TEST,
    ConstantDraws,
    MethodTrial,
    PlaySettings,
    as_engine,
    differing,
    flatten,
    play_rounds,
    require_close,
    require_equal,
    tiny_federation,
)

METHOD_PROMISES: list[Promise] = []
promise = promise_in(METHOD_PROMISES)

LOOSELY = {"atol": 1e-5, "rtol": 1e-3}
"""Tolerances where BatchNorm divides by small deviations, or short minibatches are padded."""
STATEFUL = (
    "perhaps something outlives a hook's call: a list, a counter or a cache on the class or in the"
    " module; keep it in the client's state. Or something draws from an unseeded"
    " generator"
)
PADDED = (
    "perhaps `loss`, `predict` or a Phase's function mixes the samples of a batch: short batches"
    " are padded on the batched backend, so use batch.mean, batch.sum and batch.loss. Or rounding"
    " is amplified, by division by small gradients (Adam of the method's own) or a cut at a"
    " threshold: with plain SGD, or no cut, backends then agree"
)


@promise("hooks answer in the right form and change no argument", "", engines=BACKENDS)
def keeps_form(trial: MethodTrial, engine: str) -> None:
    """Client states keep their structure, shapes and dtypes, and numbers stay finite."""
    # Playing raises MethodError where an answer has another form.
    states = trial.play_cohorts(engine)[0]
    for played, cohort in enumerate(COHORTS):
        turns = trial.method.turns(played, cohort, len(EVERYONE), generator(0, "turns", played + 1))
        trained = sorted(client for turn in turns if not turn.survey for client in turn.clients)
        if len({*trained}) < len(trained):
            raise Unkept(f"turns returned {turns}; each client may train once")
    facts = sorted({*FACTS} & {*states[0].rows.initial["client"]})
    if facts:
        raise Unkept(
            f"init returned a client state with {facts[0]!r}, which the engine lays over it"
        )
    for path, leaf in flatten(states).items():
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
    trial.play_cohorts("loop")
    fields = dataclasses.fields(method)
    extra_names = sorted(vars(method).keys() - {field.name for field in fields})
    # A dataclass sets its fields alone; a hook has stored the rest.
    if extra_names:
        raise Unkept(f"`self.{extra_names[0]}` was set")
    values = {field.name: getattr(method, field.name) for field in fields if field.init}
    twin = type(method)(**values)
    if twin != method or hash(twin) != hash(method):
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
    # Training and evaluation draw in different hooks.
    trial.evaluate_everyone(engine, trial.play_cohorts(engine)[0][-1])
    if names := find_global_draws(trial.method):
        raise Unkept(f"draws from the generators of the process, of {', '.join(names)}")


@promise(
    "a run is the same bit for bit again, and evaluations repeat themselves and change nothing",
    STATEFUL,
    engines=BACKENDS,
)
def runs_repeat(trial: MethodTrial, engine: str) -> None:
    """Each state is evaluated twice before the next round."""
    method = trial.method
    federation = tiny_federation()
    net = trial.net(norm=True)
    backend = make_backend(as_engine(engine), net, CPU)
    state = make_initial_state(method, net, federation.clients, CPU)
    setup = RoundSetup(backend, method, federation, LOCAL, 0)
    for t, cohort in enumerate(COHORTS):
        # Plain and fine-tuned evaluation run different hooks.
        for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", state.round))):
            call = EvalCall(method, federation, state, EVERYONE, tuning)
            require_equal("evaluated again", backend.evaluate(call), backend.evaluate(call))
        state, outcome = play_round(setup, state, cohort)
        expected = trial.result(engine, t, norm=True)
        require_equal(
            f"round {t + 1} again",
            [state, outcome.loss, outcome.after],
            [expected[0], expected[1].loss, expected[1].after],
        )


promise(
    "two rounds are the same in another process, where clients take turns",
    STATEFUL,
    slow=True,
    for_runs="always",
)(repeats_elsewhere)


@promise("both backends agree", PADDED)
def backends_agree(trial: MethodTrial) -> None:
    """A round on the batched backend is that on the loop backend, with BatchNorm too."""
    for played, norm in ((0, False), (1, False), (1, True)):
        loop = trial.result("loop", played, norm)
        batched = trial.replay_round("batched", played, norm)
        label = "with BatchNorm, after round" if norm else "after round"
        require_close(f"{label} {played + 1}", loop, batched, **(LOOSELY if norm else AGREE))


@promise("both backends agree in evaluating all clients", PADDED)
def backends_agree_in_evaluation(trial: MethodTrial) -> None:
    """Personal models, and copies fine-tuned, have the same test results."""
    state = trial.play_cohorts("loop")[0][-1]
    for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", 2))):
        loop, batched = (trial.evaluate_everyone(name, state, tuning) for name in BACKENDS)
        label = "after fine-tuning" if tuning else "evaluated"
        require_close(label, loop, batched, 1e-4, 1e-4)
        if loop.total.tolist() != list(TEST):
            raise Unkept(f"{label}: {loop.total.tolist()} test samples instead of {list(TEST)}")


@promise(
    "a client beside others is one alone, on the batched backend",
    "use batch.loss, batch.mean and batch.sum in place of torch's, as shorter minibatches are padded",
    for_runs="batched",
)
def ignores_padding(trial: MethodTrial) -> None:
    """Alone a client's minibatch is not padded. Draws are constants, as they differ by cohort."""
    cohort = COHORTS[0]
    state = trial.play_cohorts("loop")[0][0]
    with ConstantDraws():
        together = trial.train_part("batched", state, cohort, cohort)
        alone = [trial.train_part("batched", state, [client], cohort) for client in cohort]
    label = "a client trains or answers otherwise beside others"
    require_close(label, together, tree.concatenate_trees(alone), **LOOSELY)


@promise(
    "what a client brings back depends neither on its cohort nor on the number of workers", STATEFUL
)
def clients_are_apart(trial: MethodTrial) -> None:
    """Bit for bit on the loop backend; other promises try the batched one."""
    state = trial.play_cohorts("loop")[0][1]
    together = trial.train_part(Engine("loop", workers=3), state, EVERYONE, EVERYONE)
    for client in (0, 1, 2):
        alone = trial.train_part(Engine("loop", workers=1), state, [client], EVERYONE)
        label = f"client {client} alone brings back"
        require_equal(label, tree.take(together, client), tree.take(alone, 0))


@promise(
    "training sees of the server what download sends",
    "`loss` or a Phase's function uses entries of the server's state that `download` does not send;"
    " send them, or keep them in the client's state",
)
def sees_what_was_sent(trial: MethodTrial) -> None:
    """A client's first step is the same with nan in all that was not sent."""
    net = trial.net()
    backend = LoopBackend(net, CPU, Engine(workers=1, shortcuts=False))
    initial, _, state = trial.play_cohorts("loop")[0]
    for number in EVERYONE:
        job = trial.find_job(net, state, number)
        client = {**job.client, "statistics": job.buffers}
        poisoned = poison_unsent(trial.method, initial.server, state.server, client)
        steps = []
        for server in (state.server, poisoned):
            stop = threading.Event()
            result: Any = backend.do_job(net, dataclasses.replace(job, server=server), stop)
            steps.append([result.params, result.client, result.loss])
        label = f"a step of client {number} without unsent entries"
        require_equal(label, steps[0], steps[1])


def poison_unsent(
    method: Method, initial_server: Tree, server: Tree, client: dict[str, Tree]
) -> Tree:
    """Return the server's state with nan in every float leaf that `download` does not send.

    A client knows leaves that are still as `init` made them.
    """
    received = method.download(server, client)
    leaves = tree.leaves(server)
    for index, initial_leaf in enumerate(tree.leaves(initial_server)):
        leaf = leaves[index]
        if not leaf.is_floating_point() or torch.equal(leaf, initial_leaf):
            continue
        poisoned = [*leaves[:index], torch.full_like(leaf, torch.nan), *leaves[index + 1 :]]
        answer = method.download(tree.rebuild(server, poisoned), client)
        if not differing(tree.unmask_received(received), tree.unmask_received(answer)):
            leaves = poisoned
    return tree.rebuild(server, leaves)


@promise(
    "what the server mixes before a turn it mixes with BatchNorm's statistics",
    "return the same mixture of `statistics`, or tell users that they stay as they are"
    " (docs/design.md#a-method)",
    binding=False,
)
def statistics_are_mixed(trial: MethodTrial) -> None:
    """Where `before_turn` returns entries of the network, it returns statistics too."""
    net = trial.net(norm=True)
    state = trial.play_cohorts("loop", norm=True)[0][1]
    call = TrainCall(
        trial.method,
        tiny_federation(),
        state,
        EVERYONE,
        LOCAL,
        Draws(0, "train", 2),
    )
    paths = [path for path, _ in tree.items(with_before_turn(call).overlay or {})]
    model_paths = _select_paths(paths, net.params)
    if model_paths and not _select_paths(paths, net.buffers):
        raise Unkept(f"before_turn returns {model_paths[0]}, and no statistics")


def _select_paths(paths: list[str], names: Tree) -> list[str]:
    """Return the paths that end with an entry's name."""
    endings = tuple(f".{name}" for name in names)
    return [path for path in paths if f".{path}".endswith(endings)]


@promise(
    "bf16 is near fp32",
    "training amplifies rounding; a model that is cut at a threshold does, and then use"
    " engine.precision=fp32",
    engines=BACKENDS,
    binding=False,
)
def bf16_is_near(trial: MethodTrial, engine: str) -> None:
    """Test losses after a round are within 1 % of each other."""
    precise = trial.play_cohorts(engine)[0][1]
    settings = PlaySettings(engine=f"{engine}-bf16")
    states, _ = play_rounds(trial.method, trial.net(), tiny_federation(), COHORTS[:1], settings)
    precise_leaves = flatten(precise)
    for path, leaf in flatten(states[-1]).items():
        if leaf.dtype != precise_leaves[path].dtype:
            raise Unkept(f"{path} is {leaf.dtype} in bf16")
    loss = trial.evaluate_everyone(f"{engine}-bf16", states[-1]).loss
    require_close("test loss", loss, trial.evaluate_everyone(engine, precise).loss, 0.01, 0.01)
