"""Promises of every method, tried on a tiny federation; each raises Unkept where it is broken."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

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
from fedpfl.engine.calls import EvalCall, TrainCall, with_before_turn
from fedpfl.engine.keys import Draws, find_global_draws
from fedpfl.engine.training.clients import OneClient
from fedpfl.engine.training.jobs import EvalJob
from fedpfl.engine.training.participation import Autocast, run_evaluation
from fedpfl.engine.training.shard import make_shard
from fedpfl.engine.training.train_plan import with_epoch_numbers
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method
from fedpfl.models import Net
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

PADDING_TOLERANCE = {"atol": 1e-5, "rtol": 1e-3}
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
    states, _ = trial.play_cohorts(engine)
    trees = [trial.train_second_cohort(engine).client_states, *states]
    for path, leaf in flatten(trees).items():
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
    final_state = trial.play_cohorts(engine)[0][-1]
    make_backend(as_engine(engine), trial.net(), CPU).evaluate(
        EvalCall(trial.method, tiny_federation(), final_state, EVERYONE)
    )
    if names := find_global_draws(trial.method):
        raise Unkept(f"draws from the generators of the process, of {', '.join(names)}")


@promise(
    "a run is the same bit for bit again, however often it is evaluated", STATEFUL, engines=BACKENDS
)
def runs_repeat(trial: MethodTrial, engine: str) -> None:
    """Evaluations before each round change nothing that follows."""
    method = trial.method
    federation = tiny_federation()
    backend = make_backend(as_engine(engine), trial.net(), CPU)
    state = make_initial_state(method, trial.net(), federation.clients, CPU)
    setup = RoundSetup(backend, method, federation, LOCAL, 0)
    for t, cohort in enumerate(COHORTS):
        # Plain and fine-tuned evaluation run different hooks.
        for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", state.round))):
            backend.evaluate(EvalCall(method, federation, state, EVERYONE, tuning))
        state, outcome = play_round(setup, state, cohort)
        expected_state, expected = trial.result(engine, t)
        require_equal(
            f"round {t + 1} again",
            {"state": state, "loss": outcome.loss, "after": outcome.after},
            {"state": expected_state, "loss": expected.loss, "after": expected.after},
        )


promise(
    "two rounds are the same in another process, where clients take turns",
    STATEFUL,
    slow=True,
    for_runs="always",
)(repeats_elsewhere)


@promise(
    "participation and evaluation change no state, and an evaluation repeats itself",
    STATEFUL,
    engines=BACKENDS,
)
def asking_changes_nothing(trial: MethodTrial, engine: str) -> None:
    """The engine keeps what comes back, or does not; the network stays as it is."""
    method = trial.method
    net = trial.net(norm=True)
    states, _ = trial.play_cohorts(engine, norm=True)
    # Copies, as a hook might change tensors in place.
    middle_state = copy.deepcopy(states[1])
    final_state = copy.deepcopy(states[-1])
    backend = make_backend(as_engine(engine), net, CPU)
    settings = PlaySettings(engine=engine)
    participate(method, net, tiny_federation(), middle_state, COHORTS[1], settings)
    for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", 2))):
        call = EvalCall(method, tiny_federation(), final_state, EVERYONE, tuning)
        counts = backend.evaluate(call)
        require_equal("evaluated again", counts, backend.evaluate(call))
    require_equal("the state of a round", middle_state, states[1])
    require_equal("the state of a round", final_state, states[-1])
    fresh_net = trial.net(norm=True)
    require_equal(
        "the network",
        net.params | net.buffers,
        fresh_net.params | fresh_net.buffers,
    )


@promise("both backends agree", PADDED)
def backends_agree(trial: MethodTrial) -> None:
    """A round on the batched backend is that on the loop backend."""
    for t in range(len(COHORTS)):
        batched = trial.replay_round("batched", t)
        require_rounds_agree(
            f"after round {t + 1}",
            trial.result("loop", t),
            batched,
            **AGREE,
        )


@promise("both backends agree with batch normalisation", PADDED)
def backends_agree_with_norm(trial: MethodTrial) -> None:
    """Short last batches are padded on the batched backend; the running statistics agree too."""
    for t in range(len(COHORTS)):
        loop = trial.result("loop", t, norm=True)
        batched = trial.replay_round("batched", t, norm=True)
        require_rounds_agree(f"after round {t + 1}", loop, batched, atol=1e-5, rtol=1e-3)


@promise("both backends agree in evaluating all clients", PADDED)
def backends_agree_in_evaluation(trial: MethodTrial) -> None:
    """Personal models, and copies fine-tuned, have the same test results."""
    for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", 2))):
        loop, batched = (trial.evaluate_everyone(name, tuning) for name in BACKENDS)
        label = "after fine-tuning" if tuning else "evaluated"
        require_equal(
            f"{label}, correct predictions",
            [loop.correct, loop.total],
            [batched.correct, batched.total],
        )
        require_close(f"{label}, test loss", loop.loss, batched.loss, 1e-4, 1e-4)
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
    require_close(label, together, tree.concatenate_trees(alone), **PADDING_TOLERANCE)


@promise("how many clients train at once does not matter (engine.width)", STATEFUL)
def width_does_not_matter(trial: MethodTrial) -> None:
    """Slices of the cohort give the answers of the whole, within rounding."""
    # Slices of one client, and slices with a shorter last one.
    for width in (1, 3):
        sliced = trial.replay_round(Engine("batched", width=width), 1, of="batched")
        require_rounds_agree(
            f"{width} at a time",
            trial.result("batched", 1),
            sliced,
            **AGREE,
        )


@promise("the number of workers does not change a bit", STATEFUL)
def workers_do_not_matter(trial: MethodTrial) -> None:
    """Nor does the order in which they come to the clients."""
    for workers in (1, 3):
        state, _ = trial.replay_round(Engine("loop", workers=workers), 1)
        require_equal(
            f"with {workers} workers",
            state,
            trial.result("loop", 1)[0],
        )


@promise("what a client brings back does not depend on its cohort", STATEFUL)
def clients_are_apart(trial: MethodTrial) -> None:
    """Bit for bit on the loop backend, within rounding on the batched one."""
    for engine in BACKENDS:
        state = trial.play_cohorts(engine)[0][1]
        together = trial.train_part(engine, state, EVERYONE, EVERYONE)
        for client in (0, 1, 2):
            alone = trial.train_part(engine, state, [client], EVERYONE)
            a = tree.take(together, client)
            b = tree.take(alone, 0)
            label = f"what client {client} brings back alone"
            if engine == "loop":
                require_equal(label, a, b)
                continue
            # Matrix products change width, and a sample at the border its class.
            a = a._replace(before={}, after={})
            b = b._replace(before={}, after={})
            require_close(label, a, b, **AGREE)


@promise(
    "training sees of the server what download sends",
    "`loss` or a Phase's function uses entries of the server's state that `download` does not send;"
    " send them, or keep them in the client's state",
)
def sees_what_was_sent(trial: MethodTrial) -> None:
    """With nan in the rest of the server's state, nothing changes."""
    method = trial.method
    net = trial.net()
    initial_state, *states = trial.play_cohorts("loop")[0]

    # ---- Each client's first steps after each round, by the true and by the poisoned server.
    for state in states:
        for number in EVERYONE:
            client = trial.prepare_client(net, state, number)
            poisoned_server = poison_unsent(method, initial_state.server, state.server, client)
            start = method._begin(state.server, client)
            shard = make_shard(
                tiny_federation(),
                number,
                LOCAL.batch_size,
                Draws(0, "train", 1),
            )
            for phase, _ in with_epoch_numbers(method.phases(state.server, client, start, 2)):
                steps = [
                    take_first_step(
                        method,
                        phase,
                        StepArguments(server, client, net.bind(state.buffers(number), True), start),
                        shard,
                    )
                    for server in (poisoned_server, state.server)
                ]
                label = f"a step of client {number} without what is not sent"
                require_equal(label, steps[0], steps[1])


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
    """Personal models after a round are within 0.02 and 5 % of each other."""
    method = trial.method
    net = trial.net()
    settings = PlaySettings(engine=f"{engine}-bf16")
    bf16_states, _ = play_rounds(
        method,
        net,
        tiny_federation(),
        COHORTS[:1],
        settings,
    )
    bf16_state = bf16_states[-1]
    fp32_state = trial.play_cohorts(engine)[0][1]
    fp32_leaves = flatten(fp32_state)
    for path, leaf in flatten(bf16_state).items():
        if leaf.dtype != fp32_leaves[path].dtype:
            raise Unkept(f"{path} is {leaf.dtype} in bf16")
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    bf16_models = [personal_model(method, net, bf16_state, client, autocast) for client in EVERYONE]
    fp32_models = [personal_model(method, net, fp32_state, client) for client in EVERYONE]
    require_close("personal models", bf16_models, fp32_models, atol=0.02, rtol=0.05)


def personal_model(
    method: Method, net: Net, state: State, client: int, autocast: Autocast = nullcontext
) -> Tree:
    """Return a client's model in evaluation."""
    call = with_before_turn(EvalCall(method, tiny_federation(), state, [client]))
    # The first job of an evaluation has the personal models.
    job = next(run_evaluation(call, OneClient(client), net, autocast))
    assert isinstance(job, EvalJob)
    return job.params


def find_sent_entries(method: Method, server: Tree, client: dict[str, Tree]) -> list[Tensor]:
    """Return flags of the entries of the server's state that travel down, by leaf.

    A weighted sum of what travels has a gradient by them; an integer counts as sent.
    """
    # Weights differ, so that entries do not cancel each other.
    leaves = [leaf.clone().requires_grad_(leaf.is_floating_point()) for leaf in tree.leaves(server)]
    float_leaves = [leaf for leaf in leaves if leaf.requires_grad]
    received = tree.unmask_received(method.download(tree.rebuild(server, leaves), client))
    weight_generator = torch.Generator().manual_seed(0)
    total = torch.zeros((), requires_grad=True)
    for leaf in tree.leaves(received):
        total = total + (leaf * (1 + torch.rand(leaf.shape, generator=weight_generator))).sum()
    gradients: list[Tensor] = []
    if float_leaves:
        gradients.extend(torch.autograd.grad(total, float_leaves, materialize_grads=True))
    flags = [torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves]
    gradient_of_next_float = iter(gradients)
    for index, leaf in enumerate(leaves):
        if leaf.requires_grad:
            # No gradient: nothing of the entry travelled.
            flags[index] = next(gradient_of_next_float) != 0
    return flags


def poison_unsent(
    method: Method, initial_server: Tree, server: Tree, client: dict[str, Tree]
) -> Tree:
    """Return the server's state with nan in every float that the client was not sent.

    A client knows entries that are still as `init` made them.
    """

    def poison(leaf: Tensor, initial_leaf: Tensor, is_sent: Tensor) -> Tensor:
        if not leaf.is_floating_point() or torch.equal(leaf, initial_leaf):
            return leaf
        return torch.where(is_sent, leaf, torch.nan)

    flags = tree.rebuild(server, find_sent_entries(method, server, client))
    return tree.map(poison, server, initial_server, flags)


class StepArguments(NamedTuple):
    """Hold the arguments of a Phase's functions beside the batch, in their order."""

    server: Tree
    client: dict[str, Tree]
    net: Any
    params: Tree


def call_hook(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook; tests replace this function, to look at its answer."""
    return hook(*arguments)


def take_first_step(
    method: Method,
    phase: Any,
    arguments: StepArguments,
    shard: Any,
    call: Callable[..., Any] = call_hook,
) -> tuple[Any, Tree, dict[str, Tree]]:
    """Return a first step's loss (or step), its extra values and the client's state.

    Nothing, and the state of before, where the client has too few samples for a step.
    """
    # ---- The step's minibatches, with the same numbers for everybody.
    server, client, net, params = arguments
    batches = tuple(
        batch._replace(random=torch.full((len(batch.y), method.randoms), 0.3))
        for batch in islice(shard.batches(phase.stream, 0), phase.batches)
    )
    if len(batches) < phase.batches:
        return {}, {}, client

    # ---- A phase has its own step, or a loss and perhaps a hook after its gradient.
    batch = batches[0]
    if phase.step:
        step_batches = batches if phase.batches > 1 else batch
        return call(phase.step, server, client, net, params, step_batches), {}, client
    loss = call(
        phase.loss or method.loss,
        server,
        client,
        net,
        params,
        batch,
    )
    aux: Tree = {}
    if isinstance(loss, tuple):
        loss, aux = loss
    if phase.after_gradient:
        # The parameters stand in for their gradients, which have the same form.
        client = call(
            phase.after_gradient,
            server,
            client,
            params,
            params,
            batch,
            loss,
            aux,
        )
    return loss, aux, client
