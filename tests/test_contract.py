"""What every registered method keeps to. A new method is tested here the moment it is registered.

loop = batched: from one common state each round, 2e-6 absolute and 1e-4 relative (scores such as Fisher's are squares
of gradients); bf16 is within 0.02 and 5 % of fp32; everything within one backend, precision and width is bit for bit.
`make test` asks each of every method in one setting, `make test-all` in all (`every_method`).
"""

import copy
import dataclasses
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml
from torch import Tensor

from fedpfl import tree
from fedpfl.engine import Engine, Stopping, Tuning, begin, make, pick, play
from fedpfl.engine.backend import EvalCall, TrainCall
from fedpfl.engine.keys import Draws, generator
from fedpfl.engine.shard import training_shard
from fedpfl.methods import METHODS, Batch, FedOBP, Method
from fedpfl.traffic import count
from fedpfl.tree import Agreed, Masked
from tests.conftest import (
    BACKENDS,
    CASES,
    CPU,
    ENGINES,
    LOCAL,
    ROOT,
    SETTINGS,
    as_engine,
    assert_close,
    assert_same,
    differing,
    every_method,
    federate,
    flatten,
    participate,
    rounds,
    row,
    tiny,
    trajectory,
)

TRAIN, TEST = (40, 7, 33, 2, 65, 1), (12, 3, 9, 0, 14, 1)
COHORTS = [[0, 2, 3, 5], [0, 1, 4, 5]]
EVERYONE = list(range(6))
AGREE = {"atol": 2e-6, "rtol": 1e-4}

cases = every_method()
backends = every_method(*BACKENDS)
runs = every_method(*BACKENDS, also=ENGINES[2:])


@pytest.fixture(scope="module")
def federation():
    return small()


@cache
def small():
    return federate(TRAIN, TEST)


def build(name: str, values: dict) -> Method:
    """The method; one with required hyperparameters must be listed in SETTINGS."""
    required = [
        f.name
        for f in dataclasses.fields(METHODS[name])
        if f.default is f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    assert not required, f"add {name} with values of {required} to SETTINGS in tests/conftest.py"
    return METHODS[name](**values)


@cache
def played(method: Method, backend: str, norm: bool = False):
    """States and outcomes of two rounds, shared by the tests: not to be changed."""
    return rounds(method, tiny(norm), small(), COHORTS, engine=backend)


def entered(method: Method, net, state, number: int):
    """A client's state after `prepare`, as it enters the next round."""
    draws = Draws(0, "train", state.round + 1)
    shard = training_shard(small(), number, LOCAL.batch_size, draws)
    client = row(state.clients, number) | method.sample(draws.server(number), state.server)
    bound = net.bind(state.buffers(number), training=True)
    return method.prepare(state.server, client | method.before_training(bound, shard, state.server, client))


def plan(method: Method, net, state, number: int):
    """The phases of a client's training in the next round."""
    client = entered(method, net, state, number)
    return method.phases(state.server, client, method.start(state.server, client), 3)


def one_step(method: Method, phase, bound, shard, params, server, client, ask=lambda hook, *given: hook(*given)):
    """What a phase says of one batch of all samples: its loss (or step), what it keeps, and the client's state."""
    batch = Batch(*shard.data, random=torch.full((phase.randoms,), 0.3))
    if phase.step:
        batches = (batch,) * phase.batches if phase.batches > 1 else batch
        return ask(phase.step, bound, params, batches, server, client), {}, client
    loss, kept = ask(phase.loss or method.loss, bound, params, batch, server, client), {}
    if phase.keeps:
        loss, kept = loss
    if phase.after_gradient:
        client = ask(phase.after_gradient, params, params, loss, batch, server, client)
    return loss, kept, client


def result(method: Method, backend: str, t: int, norm: bool = False):
    """The state after round t + 1 and its outcome, of the shared run."""
    states, outcomes = played(method, backend, norm)
    return states[t + 1], outcomes[t]


def replayed(method: Method, engine: Engine | str, t: int, *, of: str = "loop", norm: bool = False, cohort=None):
    """The same round on another engine, from the state that the shared run of backend `of` has reached by then."""
    runner, state = make(as_engine(engine), tiny(norm), CPU), copy.deepcopy(played(method, of, norm)[0][t])
    return play(runner, method, small(), state, cohort or COHORTS[t], LOCAL, 0)


def agree(one, other, **tolerance):
    """Two (state, outcome)s agree: trees and losses within tolerance, counts exactly."""
    assert_close(one[0], other[0], **tolerance)
    a, b = dataclasses.asdict(one[1]), dataclasses.asdict(other[1])
    for key in a:
        if key in ("before", "after"):
            assert a[key].correct.tolist() == b[key].correct.tolist()
            assert a[key].total.tolist() == b[key].total.tolist()
            assert_close(a[key].loss, b[key].loss, atol=1e-4, rtol=1e-4)
        elif key == "loss":
            assert_close(a[key], b[key], atol=1e-5, rtol=1e-4)
        elif key == "finite":
            assert a[key].tolist() == b[key].tolist()
        else:
            assert a[key] == b[key], key


# Backends


@cases
def test_loop_equals_batched(name, values):
    method = build(name, values)
    for t in range(len(COHORTS)):
        agree(result(method, "loop", t), replayed(method, "batched", t), **AGREE)


@cases
def test_loop_equals_batched_with_batch_normalisation(name, values):
    """Short last batches are padded on the batched backend; the running statistics agree too."""
    method = build(name, values)
    for t in range(len(COHORTS)):
        one, other = result(method, "loop", t, norm=True), replayed(method, "batched", t, norm=True)
        agree(one, other, atol=1e-5, rtol=1e-3)


@runs
def test_beside_other_runs_a_run_is_the_same(name, values, backend, net, federation):
    """Calls answered together with another seed's and with FedAvg's are what they are alone."""
    method, other, tuning = build(name, values), federate(TRAIN, TEST, seed=2), Tuning(LOCAL, Draws(0, "finetune", 2))
    other = dataclasses.replace(other, x=federation.x, y=federation.y)  # another partition of the same images
    runner, calls = make(as_engine(backend), net, CPU), []
    runs = [(method, federation, [0, 2, 5]), (method, other, [1, 3, 4]), (METHODS["fedavg"](), federation, [0, 3])]
    for seed, (own, fed, cohort) in enumerate(runs):
        state = played(own, backend)[0][1 + seed % 2]
        calls.append(TrainCall(own, fed, state, cohort, LOCAL, Draws(seed, "train", 2)))
        calls.append(EvalCall(own, fed, state, cohort[1:], tuning))
    for together, call in zip(runner.run(calls), calls, strict=True):
        assert not isinstance(together, Exception), together
        alone = runner.run([call])[0]
        if backend.startswith("loop"):
            assert_same(together, alone)
        elif backend == "batched":
            assert_close(together, alone, atol=2e-5, rtol=1e-4)
        else:
            assert_close(together.loss, alone.loss, atol=0.02, rtol=0.02)


@cases
def test_loop_equals_batched_in_evaluating_all_clients(name, values, net, federation):
    method = build(name, values)
    state = played(method, "loop")[0][-1]
    for tuning in (None, Tuning(LOCAL, Draws(0, "finetune", 2))):
        loop, batched = (
            make(Engine(b), net, CPU).evaluate(method, federation, state, EVERYONE, tuning) for b in BACKENDS
        )
        assert loop.correct.tolist() == batched.correct.tolist()
        assert loop.total.tolist() == batched.total.tolist() == list(TEST)
        assert_close(loop.loss, batched.loss, atol=1e-4, rtol=1e-4)


@cases
def test_the_width_of_the_batched_backend_does_not_matter(name, values):
    method = build(name, values)
    for width in (1, 3):
        other = replayed(method, Engine("batched", width=width), 1, of="batched")
        agree(result(method, "batched", 1), other, **AGREE)


@cases
def test_the_number_of_workers_does_not_change_a_bit(name, values):
    method = build(name, values)
    for workers in (1, 3):
        assert_same(replayed(method, Engine("loop", workers=workers), 1)[0], result(method, "loop", 1)[0])


@runs
def test_the_order_of_the_cohort_does_not_matter(name, values, backend, net, federation):
    method, (straight, mixed) = build(name, values), ([0, 1, 4, 5], [1, 5, 4, 0])
    again = replayed(method, backend, 1, of=backend, cohort=mixed)
    assert_same(again[0], result(method, backend, 1)[0])
    assert_same(again[1].loss, result(method, backend, 1)[1].loss)
    state = played(method, backend)[0][1]
    one, other = (participate(method, net, federation, state, c, engine=backend) for c in (straight, mixed))
    for k, client in enumerate(straight):
        assert_same(tree.take(one, k), tree.take(other, mixed.index(client)))


@backends
def test_bf16_is_near_fp32(name, values, backend, net, federation):
    method = build(name, values)
    if getattr(method, "judge", None) == "sparse":
        pytest.skip("what is evaluated is cut at a threshold")
    state = trajectory(method, net, federation, COHORTS[:1], engine=Engine(backend, precision="bf16"))[-1]
    expected = played(method, backend)[0][1]
    for path, leaf in flatten(state).items():
        assert leaf.dtype == flatten(expected)[path].dtype
    own, exact = (
        tree.stack([method.personal(s.server, row(s.clients, i)) for i in EVERYONE]) for s in (state, expected)
    )
    assert_close(own, exact, atol=0.02, rtol=0.05)


# Clients are kept apart


@cases
def test_what_a_client_brings_back_does_not_depend_on_its_cohort(name, values, net, federation):
    """Bit for bit on the loop backend, within rounding on the batched one, whose matrix products change width."""
    method = build(name, values)
    for backend in BACKENDS:
        state = played(method, backend)[0][1]
        together = participate(method, net, federation, state, EVERYONE, engine=backend)
        for client in (0, 1, 2):
            alone = participate(method, net, federation, state, [client], engine=backend)
            a, b = tree.take(together, client), tree.take(alone, 0)
            if backend == "loop":
                assert_same(a, b)
            else:
                assert_close(a._replace(before={}, after={}), b._replace(before={}, after={}), **AGREE)


@runs
def test_only_the_cohorts_rows_change(name, values, backend):
    method = build(name, values)
    states, _ = played(method, backend, norm=True)
    for t, cohort in enumerate(COHORTS):
        turns = method.turns(t, cohort, len(EVERYONE), generator(0, "turns", t + 1))
        surveyed = {client for turn in turns if turn.survey for client in turn.clients}
        for client in set(EVERYONE) - set(cohort):
            for part in ("client_buffers", *(() if client in surveyed else ("clients",))):
                assert_same(row(getattr(states[t], part), client), row(getattr(states[t + 1], part), client))


@runs
def test_participation_changes_no_state(name, values, backend, federation):
    method, net = build(name, values), tiny(norm=True)
    state = copy.deepcopy(played(method, backend, norm=True)[0][1])
    kept = copy.deepcopy(state)
    participate(method, net, federation, state, COHORTS[1], engine=backend)
    assert_same(state, kept)
    assert_same(net.params, tiny(norm=True).params)
    assert_same(net.buffers, tiny(norm=True).buffers)


@backends
def test_training_that_diverges_is_told_and_nothing_is_raised(name, values, backend, net, federation):
    method = build(name, values)
    if any(phase.step for phase in plan(method, net, begin(method, net, federation.clients, CPU), 0)):
        pytest.skip("its steps have lengths of their own")
    local = dataclasses.replace(LOCAL, lr=1e30)
    outcome = rounds(method, net, federation, COHORTS[:1], engine=backend, local=local)[1][0]
    finite = dict(zip(COHORTS[0], outcome.finite.tolist(), strict=True))
    assert not finite[0]
    turns = method.turns(0, COHORTS[0], len(EVERYONE), generator(0, "turns", 1))
    if len(turns) == 1:  # else a client may receive what an earlier one made
        assert finite[5]  # has one sample, and makes no step


# Early stopping


@cases
def test_with_any_method_clients_that_stop_are_not_drawn_again(name, values, net, federation):
    """A round is as it is without; each participation sends a bit more; the run ends when nobody is left."""
    method = build(name, values)
    kept = []
    for backend in BACKENDS:
        state = begin(method, net, len(EVERYONE), CPU, stopping=True)
        state.stopping["last"].fill_(-1.0)  # so that every loss is a rise
        cohort = pick(state, COHORTS[0], 0)
        assert cohort == COHORTS[0]
        runner = make(Engine(backend), net, CPU)
        state, outcome = play(runner, method, federation, state, cohort, LOCAL, 0, Stopping(early=True, lam=0.0))
        plain, without = result(method, backend, 0)
        assert_same(dataclasses.replace(state, stopping={}), plain)
        assert outcome.sent == without.sent._replace(bits_up=without.sent.bits_up + len(cohort))
        assert_same(state.stopping["last"][cohort], outcome.after.loss / outcome.after.total.clamp(min=1))
        assert state.stopping["stopped"].tolist() == [client in cohort for client in EVERYONE]
        cohort = pick(state, COHORTS[1], 0)
        assert cohort == [1, 4]
        state, _ = play(runner, method, federation, state, cohort, LOCAL, 0, Stopping(early=True, lam=1.0))
        assert pick(state, COHORTS[1], 0) == []
        kept.append(state.stopping)
    assert_close(*kept, atol=1e-4, rtol=1e-4)


# Evaluation


@runs
def test_evaluation_changes_no_state_and_repeats_itself(name, values, backend, federation):
    method, net = build(name, values), tiny(norm=True)
    state = copy.deepcopy(played(method, backend, norm=True)[0][-1])
    kept, runner = copy.deepcopy(state), make(as_engine(backend), net, CPU)
    for tuning in (None, Tuning(LOCAL, Draws(0, "finetune", 2))):
        once, twice = (runner.evaluate(method, federation, state, EVERYONE, tuning) for _ in range(2))
        assert_same(once, twice)
        assert_same(state, kept)
        assert_same(net.params, tiny(norm=True).params)


@runs
def test_a_run_is_the_same_bit_for_bit_again_and_however_often_it_is_evaluated(name, values, backend, federation):
    method, net = build(name, values), tiny()
    engine, state = make(as_engine(backend), net, CPU), begin(method, net, federation.clients, CPU)
    for t, cohort in enumerate(COHORTS):
        for tuning in (None, Tuning(LOCAL, Draws(0, "finetune", state.round))):
            engine.evaluate(method, federation, state, EVERYONE, tuning)
        state, outcome = play(engine, method, federation, state, cohort, LOCAL, 0)
        expected = result(method, backend, t)
        assert_same((state, outcome.loss, outcome.after), (expected[0], expected[1].loss, expected[1].after))


TRAINED = (
    *("fedselect", "pspfl", "seqfededt", "fedcac", "fedpurin", "pfedsd", "fedspu", "fjord", "hermes", "fedmp"),
    *("prunefl", "heterofl", "fedrolex", "flexfl", "subflot"),
)
ANEW = ("fedala", "pfedfda", "pfedme", "random_dropout")  # find their model by draws of the evaluation's own


@backends
def test_the_cohort_is_evaluated_by_what_it_starts_from_and_ends_with(name, values, backend, net, federation):
    """`before` is what evaluation said of these clients; where it is by TRAINED models, `after` is what it will say."""
    method, runner = build(name, values), make(Engine(backend), tiny(), CPU)
    states, outcomes = played(method, backend)
    for t, cohort in enumerate(COHORTS):
        before, after = (runner.evaluate(method, federation, state, cohort) for state in states[t : t + 2])
        assert outcomes[t].before.total.tolist() == outcomes[t].after.total.tolist() == [TEST[i] for i in cohort]
        if name not in (*ANEW, *TRAINED):
            assert outcomes[t].before.correct.tolist() == before.correct.tolist()
        if name in ("local_only", *TRAINED):
            assert outcomes[t].after.correct.tolist() == after.correct.tolist()


# The dataclass


@pytest.mark.parametrize(("name", "values"), CASES)
def test_a_method_is_a_frozen_hashable_dataclass(name, values):
    method, same = build(name, values), build(name, values)
    assert method == same
    assert hash(method) == hash(same)
    for field in [f.name for f in dataclasses.fields(method)] + ["anything"]:
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            setattr(method, field, 1)
    assert vars(method) == {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    assert type(method).__doc__


@pytest.mark.parametrize("name", METHODS)
def test_the_configuration_file_has_exactly_the_hyperparameters(name):
    values = yaml.safe_load((ROOT / f"conf/method/{name}.yaml").read_text())
    assert values.pop("name") == name
    for key in ("defaults", "groups"):  # of configuration groups
        values.pop(key, None)
    fields = {f.name: f.default for f in dataclasses.fields(METHODS[name])}
    assert list(values) == list(fields)
    for key, value in values.items():  # references are looked up elsewhere
        value = tuple(value) if isinstance(value, list) else value
        if fields[key] is not dataclasses.MISSING and not str(value).startswith("${"):
            assert value == fields[key], f"{name}.{key}: the file says {value}, the dataclass {fields[key]}"


@pytest.mark.parametrize(
    ("name", "field", "allowed"),
    [
        pytest.param(name, field, get_args(hint), id=f"{name}.{field}")
        for name, method in METHODS.items()
        for field, hint in get_type_hints(method).items()
        if get_origin(hint) is Literal
    ],
)
def test_a_choice_that_there_is_not_is_refused(name, field, allowed):
    with pytest.raises(ValueError, match=f"^{field} must be .*, got 'nonsense'$") as told:
        METHODS[name](**{**SETTINGS.get(name, [{}])[0], field: "nonsense"})
    assert all(str(choice) in str(told.value) for choice in allowed)


def test_every_configuration_file_and_setting_belongs_to_a_method():
    assert {path.stem for path in (ROOT / "conf/method").glob("*.yaml")} == set(METHODS)
    assert set(SETTINGS) <= set(METHODS)


# The answers


@runs
def test_what_a_client_keeps_has_the_structure_it_began_with(name, values, backend, net, federation):
    method = build(name, values)
    states, _ = played(method, backend)
    first = flatten(states[0].clients)
    part = participate(method, net, federation, states[1], COHORTS[1], engine=backend)
    kept = flatten(part.clients)
    assert list(kept) == list(first)
    for path, leaf in kept.items():
        assert (leaf.dtype, leaf.shape[1:]) == (first[path].dtype, first[path].shape[1:]), path
        assert not leaf.requires_grad
    for state in states:
        for path, leaf in flatten(state).items():
            assert leaf.device == CPU
            assert not leaf.requires_grad, path
            assert not leaf.is_floating_point() or leaf.isfinite().all(), path
    assert flatten(states[0].server).keys() == flatten(states[-1].server).keys()


@cases
def test_no_answer_changes_its_arguments(name, values, net, federation):
    method = build(name, values)
    state = copy.deepcopy(played(method, "loop")[0][1])

    def ask(hook, *arguments):
        """Call with copies kept aside; objects that are not trees pass through."""
        trees = [a for a in arguments if isinstance(a, dict | Masked | Agreed)]
        kept = copy.deepcopy(trees)
        answer = hook(*arguments)
        for before, after in zip(kept, trees, strict=True):
            assert_same(before, after)
        return answer

    ask(method.init, net.params, net.parts)
    server, uploads, clients = state.server, [], []
    for number in COHORTS[1]:
        client, buffers, draws = row(state.clients, number), state.buffers(number), Draws(0, "train", 2)
        shard = training_shard(federation, number, LOCAL.batch_size, draws)
        found = ask(method.before_evaluation, net.bind(buffers), shard, server, client)
        personal = ask(method.personal, server, client | found)
        client |= ask(method.sample, draws.server(number), server)
        client |= ask(method.before_training, net.bind(buffers, training=True), shard, server, client)
        client = ask(method.prepare, server, client)
        start = ask(method.start, server, client)
        assert flatten(count(ask(method.download, server, client)))
        ask(method.metrics, server, client)
        masks = ask(method.masks, server, row(state.clients, number))
        assert all((leaf.dtype, leaf.shape) == (torch.bool, net.params[name].shape) for name, leaf in masks.items())
        evaluated = ask(method.evaluated, server, client, start)
        assert flatten(evaluated).keys() == flatten(personal).keys()
        kept = {}
        for phase in ask(method.phases, server, client, start, 2):
            bound = net.bind(buffers, training=True)
            _, kept, client = one_step(method, phase, bound, shard, start, server, client, ask)
        ask(method.predict, net.bind(buffers), evaluated, shard.data.x)
        ask(method.finetuning, evaluated, net.parts, 2)
        end = tree.map(lambda leaf: leaf + 0.01 * torch.ones_like(leaf), start)
        client |= ask(method.after_training, net.bind(buffers), shard, end, kept, server, client)
        ask(method.updated_buffers, server, client)
        upload, client = ask(method.finish, server, client, start, end)
        uploads.append(upload)
        clients.append(client)
    weight = torch.full((4,), 0.25)
    ask(method.aggregate, server, tree.stack(uploads), tree.stack(clients), weight)
    assert weight.tolist() == [0.25] * 4
    for played_rounds in range(3):
        for turn in method.turns(played_rounds, COHORTS[1], len(EVERYONE), generator(0, "turns", 2)):
            if turn.survey:
                ask(turn.survey, server, tree.stack(uploads), tree.stack(clients))


@cases
def test_phases_are_the_same_for_all_clients(name, values, net):
    method = build(name, values)
    state = played(method, "loop")[0][-1]
    plans = set()
    for client in EVERYONE:
        phases = plan(method, net, state, client)
        plans.add(tuple((phase.epochs, phase.stream) for phase in phases))
        assert sum(max(0, phase.epochs) for phase in phases) > 0
    assert len(plans) == 1


# What travels


def told(method: Method, server, client) -> list[Tensor]:
    """Which entries of the server's state travel down to a client, by the gradient of what travels: bools, by leaf."""
    leaves = [leaf.clone().requires_grad_(leaf.is_floating_point()) for leaf in tree.leaves(server)]
    generator = torch.Generator().manual_seed(0)

    def total(sent) -> Tensor:
        if isinstance(sent, Masked | Agreed):
            pairs = zip(tree.leaves(sent.values), tree.leaves(sent.mask), strict=True)
            return sum(total(torch.where(mask, leaf, 0.0)) for leaf, mask in pairs if leaf.is_floating_point())
        if isinstance(sent, dict):
            return sum((total(part) for part in sent.values()), torch.zeros(()))
        return (sent * (1 + torch.rand(sent.shape, generator=generator))).sum()

    floats = [leaf for leaf in leaves if leaf.requires_grad]
    travelling = total(method.download(tree.rebuild(server, leaves), client))
    if not travelling.requires_grad:
        return [torch.zeros_like(leaf, dtype=torch.bool) for leaf in leaves]
    slopes = iter(torch.autograd.grad(travelling, floats, materialize_grads=True))
    return [next(slopes) != 0 if leaf.requires_grad else torch.ones_like(leaf, dtype=torch.bool) for leaf in leaves]


def poisoned(method: Method, first, server, client):
    """The server's state with nan in every float that the client was not told. It knows from the beginning what is
    still as `init` made it, which is in `first`.
    """

    def poison(leaf, old, sent):
        known = not leaf.is_floating_point() or torch.equal(leaf, old)
        return leaf if known else torch.where(sent, leaf, torch.nan)

    return tree.map(poison, server, first, tree.rebuild(server, told(method, server, client)))


@cases
def test_start_and_training_see_of_the_server_what_download_sends(name, values, net, federation):
    method = build(name, values)
    first, *states = played(method, "loop")[0]
    if len(method.turns(0, COHORTS[0], len(EVERYONE), generator(0, "turns", 1))) > 1:
        pytest.skip("its model comes from the client before, whose upload it was")
    for state in states:
        for number in EVERYONE:
            client = entered(method, net, state, number)
            other, start = poisoned(method, first.server, state.server, client), method.start(state.server, client)
            assert_same(method.start(other, client), start)
            shard = training_shard(federation, number, LOCAL.batch_size, Draws(0, "train", 1))
            for phase in method.phases(state.server, client, start, 2):
                seen, same = (
                    one_step(method, phase, net.bind(state.buffers(number), True), shard, start, server, client)
                    for server in (other, state.server)
                )
                assert_same(seen, same)


def test_a_start_from_what_was_not_sent_is_found(net):
    @dataclasses.dataclass(frozen=True)
    class Leaky(FedOBP):
        def start(self, server, client):
            return server

    first, _, state = played(method := Leaky(q=0.9), "loop")[0]
    client = entered(method, net, state, 0)
    other = poisoned(method, first.server, state.server, client)
    assert int(tree.flat(other).isnan().sum()) == int(tree.flat(client["mask"]).sum()) > 0
    assert differing(method.start(other, client), method.start(state.server, client))
