"""What every registered method keeps to. A new method is tested here the moment it is registered.

loop = batched: from one common state each round, 2e-6 absolute and 1e-4 relative (scores such as Fisher's are squares
of gradients); bf16 is within 0.02 and 5 % of fp32; everything within one backend, precision and width is bit for bit.
"""

import copy
import dataclasses
from functools import cache, partial

import pytest
import torch
import yaml
from torch import Tensor

from fedpfl import tree
from fedpfl.engine import Engine, Tuning, begin, make, play
from fedpfl.engine.backend import Judging, Training
from fedpfl.engine.keys import Draws
from fedpfl.engine.shard import training_shard
from fedpfl.methods import METHODS, Batch, Method
from fedpfl.traffic import count
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

cases = pytest.mark.parametrize(("name", "values"), CASES)
FIRST = {case.values[0]: case for case in reversed(CASES)}


def run_on(*engines: str):
    """All settings of all methods on these engines; on the others each method in the first of its settings."""
    pairs = [(case, engine) for case in CASES for engine in ENGINES if engine in engines or case in FIRST.values()]
    parameters = [pytest.param(*case.values, engine, id=f"{case.id}-{engine}") for case, engine in pairs]
    return pytest.mark.parametrize(("name", "values", "backend"), parameters)


runs = run_on(*BACKENDS)


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


def lockstep(method, net, federation, *, engines=BACKENDS, cohorts=COHORTS):
    """Each round on every engine from the state that the first one reached."""
    state = begin(method, net, federation.clients, CPU)
    for cohort in cohorts:
        ends = []
        for engine in engines:
            ends.append(
                play(make(as_engine(engine), net, CPU), method, federation, copy.deepcopy(state), cohort, LOCAL, 0)
            )
        yield ends
        state = ends[0][0]


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
def test_loop_equals_batched(name, values, net, federation):
    for loop, batched in lockstep(build(name, values), net, federation):
        agree(loop, batched, **AGREE)


@cases
def test_loop_equals_batched_with_batch_normalisation(name, values, federation):
    """Short last batches are padded on the batched backend; the running statistics agree too."""
    for loop, batched in lockstep(build(name, values), tiny(norm=True), federation):
        agree(loop, batched, atol=1e-5, rtol=1e-3)


@run_on("batched")
def test_beside_other_runs_a_run_is_the_same(name, values, backend, net, federation):
    """Calls answered together with another seed's and with FedAvg's are what they are alone."""
    method, other, tuning = build(name, values), federate(TRAIN, TEST, seed=2), Tuning(LOCAL, Draws(0, "finetune", 2))
    other = dataclasses.replace(other, x=federation.x, y=federation.y)  # another partition of the same images
    runs = [(method, federation), (method, other), (METHODS["fedavg"](), federation)]
    runner = make(as_engine(backend), net, CPU)
    calls = []
    for seed, (own, fed) in enumerate(runs):
        state = trajectory(own, net, fed, COHORTS[:1], engine=backend, seed=seed)[-1]
        calls += [
            Training(own, fed, state, COHORTS[seed % 2], LOCAL, Draws(seed, "train", 2)),
            Judging(own, fed, state, EVERYONE, tuning),
        ]
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
def test_loop_equals_batched_in_judging_all_clients(name, values, net, federation):
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
def test_the_width_of_the_batched_backend_does_not_matter(name, values, net, federation):
    engines = [Engine("batched", width=width) for width in (0, 1, 3)]
    for whole, *others in lockstep(build(name, values), net, federation, engines=engines):
        for other in others:
            agree(whole, other, **AGREE)


@cases
def test_the_number_of_workers_does_not_change_a_bit(name, values, net, federation):
    method = build(name, values)
    expected, _ = played(method, "loop")
    for workers in (1, 3):
        assert_same(trajectory(method, net, federation, COHORTS, engine=Engine("loop", workers=workers)), expected)


@runs
def test_the_same_run_twice_is_the_same_bit_for_bit(name, values, backend, federation):
    method = build(name, values)
    again = trajectory(build(name, values), tiny(), federation, COHORTS, engine=backend)
    assert_same(again, played(method, backend)[0])


@runs
def test_the_order_of_the_cohort_does_not_matter(name, values, backend, net, federation):
    method = build(name, values)
    shuffled = [[5, 2, 0, 3], [1, 5, 4, 0]]
    assert_same(trajectory(method, net, federation, shuffled, engine=backend), played(method, backend)[0])
    state = played(method, backend)[0][1]
    straight, mixed = (
        participate(method, net, federation, state, c, engine=backend) for c in (COHORTS[1], shuffled[1])
    )
    for k, client in enumerate(COHORTS[1]):
        at = shuffled[1].index(client)
        pick = partial(tree.map, lambda leaf, i=k: leaf[i])
        assert_same(pick(straight), tree.map(lambda leaf, i=at: leaf[i], mixed))


@cases
@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_is_near_fp32(name, values, backend, net, federation):
    method = build(name, values)
    if getattr(method, "judge", None) == "sparse":
        pytest.skip("what is judged is cut at a threshold")
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
        parts = ["client_buffers"] if method.gathers(t) else ["clients", "client_buffers"]  # a gathering is for all
        for client in set(EVERYONE) - set(cohort):
            for part in parts:
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


@cases
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_that_diverges_is_told_and_nothing_is_raised(name, values, backend, net, federation):
    method = build(name, values)
    if method.step:
        pytest.skip("its steps have lengths of their own")
    local = dataclasses.replace(LOCAL, lr=1e30)
    outcome = rounds(method, net, federation, COHORTS[:1], engine=backend, local=local)[1][0]
    finite = dict(zip(COHORTS[0], outcome.finite.tolist(), strict=True))
    assert not finite[0]
    if not method.sequential:  # where a client may receive what an earlier one made
        assert finite[5]  # has one sample, and makes no step


# Evaluation


@runs
def test_evaluation_changes_no_state_and_repeats_itself(name, values, backend, federation):
    method, net = build(name, values), tiny(norm=True)
    state = copy.deepcopy(played(method, backend, norm=True)[0][-1])
    kept, judge = copy.deepcopy(state), make(as_engine(backend), net, CPU)
    for tuning in (None, Tuning(LOCAL, Draws(0, "finetune", 2))):
        once, twice = (judge.evaluate(method, federation, state, EVERYONE, tuning) for _ in range(2))
        assert_same(once, twice)
        assert_same(state, kept)
        assert_same(net.params, tiny(norm=True).params)


@runs
def test_evaluating_every_round_or_never_gives_the_same_trajectory(name, values, backend, net, federation):
    method = build(name, values)
    engine, state = make(as_engine(backend), net, CPU), begin(method, net, federation.clients, CPU)
    for t, cohort in enumerate(COHORTS, 1):
        for tuning in (None, Tuning(LOCAL, Draws(0, "finetune", state.round))):
            engine.evaluate(method, federation, state, EVERYONE, tuning)
        state, _ = play(engine, method, federation, state, cohort, LOCAL, 0)
        assert_same(state, played(method, backend)[0][t])


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
    fields = {f.name: f.default for f in dataclasses.fields(METHODS[name])}
    assert list(values) == list(fields)
    for key, value in values.items():  # references are looked up elsewhere
        value = tuple(value) if isinstance(value, list) else value
        if fields[key] is not dataclasses.MISSING and not str(value).startswith("${"):
            assert value == fields[key], f"{name}.{key}: the file says {value}, the dataclass {fields[key]}"


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
    kept = flatten(part.mine)
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

    def ask(question, *arguments):
        """Call with copies kept aside; objects that are not trees pass through."""
        kept = copy.deepcopy([a for a in arguments if isinstance(a, dict)])
        answer = question(*arguments)
        for before, after in zip(kept, (a for a in arguments if isinstance(a, dict)), strict=True):
            assert_same(before, after)
        return answer

    ask(method.init, net.params, net.parts)
    server, parts, minds = state.server, [], []
    for client in COHORTS[1]:
        mine = row(state.clients, client)
        buffers = dict.fromkeys(method.buffers, net.buffers)
        shard = training_shard(federation, client, LOCAL.batch_size, Draws(0, "train", 2))
        adapted = mine | (ask(method.adapt, net.bind(buffers), shard, server, mine) if method.adapt else {})
        personal = ask(method.personal, server, adapted)
        if method.draw:
            mine |= ask(method.draw, Draws(0, "train", 2).server(client), server)
        if method.survey:
            mine |= ask(method.survey, net.bind(buffers, training=True), shard, server, mine)
        mine = ask(method.prepare, server, mine)
        start = ask(method.start, server, mine)
        assert flatten(count(ask(method.send, server, mine)))
        ask(method.measure, server, mine)
        judged = ask(method.judged, server, mine, start)
        assert flatten(judged).keys() == flatten(personal).keys()
        x, y = shard.data
        batch = Batch(x, y, random=torch.rand(method.randoms))
        bound = net.bind(buffers, training=True)
        for phase in ask(method.phases, server, mine, start, 2):
            if method.step:
                ask(
                    method.step,
                    bound,
                    start,
                    (batch,) * method.together if method.together > 1 else batch,
                    server,
                    mine,
                )
                continue
            answer = ask(phase.loss or method.loss, bound, start, batch, server, mine)
            if method.digest:
                mine |= ask(method.digest, tree.map(Tensor.detach, answer[1]), server, mine)
        ask(method.predict, bound, judged, x)
        ask(method.tune, judged, net.parts, 2)
        end = tree.map(lambda leaf: leaf + 0.01 * torch.ones_like(leaf), start)
        if method.observe:
            mine = ask(method.observe, start, start, torch.ones(()), batch, server, mine)
        if method.summarize:
            summary = ask(method.summarize, net.bind(buffers), end, batch, server, mine)
            mine = {**mine, "summary": summary}
        if method.validate:
            mine = {**mine, "validation": ask(method.validate, net.bind(buffers), end, batch, server, mine)}
        if method.touched:
            ask(method.touched, server, mine)
        upload, mine = ask(method.finish, server, mine, start, end)
        parts.append(upload)
        minds.append(mine)
        if method.eligible:
            assert ask(method.eligible, server, mine).dtype == torch.bool
    uploads, weight = tree.stack(parts), torch.full((4,), 0.25)
    merged = ask(method.merge, server, uploads, weight)
    if method.settle:
        ask(method.settle, merged, uploads, tree.stack(minds))
    assert weight.tolist() == [0.25] * 4
    if method.gather:
        ask(method.gather, server, tree.stack(parts), tree.stack(minds))


@cases
def test_phases_are_the_same_for_all_clients(name, values, net):
    method = build(name, values)
    state = played(method, "loop")[0][-1]
    plans = set()
    for client in EVERYONE:
        mine = row(state.clients, client)
        if method.draw:
            mine |= method.draw(Draws(0, "train", 2).server(client), state.server)
        if method.survey:
            bound = net.bind(dict.fromkeys(method.buffers, net.buffers), training=True)
            shard = training_shard(small(), client, LOCAL.batch_size, Draws(0, "train", 2))
            mine |= method.survey(bound, shard, state.server, mine)
        mine = method.prepare(state.server, mine)
        phases = method.phases(state.server, mine, method.start(state.server, mine), 3)
        plans.add(tuple((phase.epochs, phase.stream) for phase in phases))
        assert sum(max(0, phase.epochs) for phase in phases) > 0
    assert len(plans) == 1
