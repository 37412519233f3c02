"""What every registered method keeps to. A new method is tested here the moment it is registered.

What `fedpfl check` asks of anybody's method is in fedpfl/engine/contract.py; here is what concerns the package's own,
and what a method cannot break. `make test` asks each of a part of the methods, `make test-all` of all in all
settings (`every_method`).
"""

import copy
import dataclasses
from contextlib import nullcontext
from functools import cache
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
import yaml

from fedpfl.engine import Clock, Engine, Stopping, Tuning, begin, contract, make, pick, play, timed
from fedpfl.engine.backend import EvalCall, TrainCall, met
from fedpfl.engine.contract import PROMISES, one_step, poisoned
from fedpfl.engine.keys import Draws, generator
from fedpfl.engine.participation import One
from fedpfl.engine.shard import training_shard
from fedpfl.engine.toy import COHORTS, EVERYONE, TEST, TRAIN, Trial, Unkept, small
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.traffic import count
from fedpfl.ground.tree import Agreed, Masked
from fedpfl.methods import METHODS, FedOBP, Method, Turn
from fedpfl.system import Device, System
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
    every_method,
    federate,
    flatten,
    product,
    rounds,
    row,
    sampled,
    tiny,
)

cases = every_method()
backends = every_method(*BACKENDS)
runs = every_method(*BACKENDS, also=ENGINES[2:])


@pytest.fixture
def net(request):
    """The network on which the test's method is tried."""
    given = getattr(request.node, "callspec", None)
    return trial(build(given.params["name"], given.params["values"])).net() if given else tiny()


@pytest.fixture(scope="module")
def federation():
    return small()


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
def trial(method: Method) -> Trial:
    """Shared by the tests."""
    return Trial(method)


def played(method: Method, backend: str, norm: bool = False):
    return trial(method).played(backend, norm)


def plan(method: Method, net, state, number: int):
    """The phases of a client's training in the next round."""
    client = trial(method).entered(net, state, number)
    return method.phases(state.server, client, method._begin(state.server, client), 3)


# Promises


@pytest.mark.parametrize(
    ("promise", "name", "values", "backend"),
    [
        pytest.param(promise, *(*case.values, None)[:3], id=f"{promise.check.__name__}-{case.id}", marks=case.marks)
        for promise in PROMISES
        for case in product(__name__, promise.engines, ENGINES[2:] if promise.engines and promise.binding else ())
    ],
)
def test_a_method_keeps_its_promises(promise, name, values, backend):
    method = build(name, values)
    if promise.check is contract.bf16_is_near and getattr(method, "judge", None) == "sparse":
        pytest.skip("what is evaluated is cut at a threshold")
    if promise.check is contract.statistics_are_mixed and name in ("fedalt", "fedamp"):
        pytest.skip("statistics stay with the client, as its docstring says")
    promise.check(trial(method), *([backend] if backend else []))


# Over adapters


@cache
def over_adapters(method: Method) -> Trial:
    """A method that wants none itself, where the head and low-rank additions train."""
    return Trial(method, pairs=1)


CUTTING = {
    *("fedmp", "fedrolex", "fedspu", "fjord", "flexfl", "heterofl", "hermes", "prunefl", "random_dropout", "subflot"),
}
FIRST = [
    next(case for case in CASES if case.values[0] == name)
    for name in METHODS
    if not (name in CUTTING or METHODS[name].pairs)
]


@pytest.mark.parametrize(
    ("promise", "name", "values"),
    [
        pytest.param(
            promise,
            *case.values,
            id=f"{promise.check.__name__}-{case.id}",
            marks=[] if promise.check is contract.backends_agree and place % 8 == 0 else [pytest.mark.full],
        )
        for promise in PROMISES
        for place, case in enumerate(FIRST)
    ],
)
def test_a_method_keeps_its_promises_over_adapters(promise, name, values):
    if promise.check is contract.statistics_are_mixed and name == "fedamp":
        pytest.skip("statistics stay with the client, as its docstring says")
    for backend in promise.engines or [None]:
        promise.check(over_adapters(build(name, values)), *([backend] if backend else []))


@pytest.mark.parametrize("name", METHODS)
def test_only_methods_that_cut_neurons_refuse_a_network_of_which_parts_are_frozen(name):
    told = r"a network of which parts are frozen has no sub-models; set adapter=none$"
    for case in (case for case in CASES if case.values[0] == name):
        method = build(*case.values)
        with pytest.raises(FedpflError, match=told) if name in CUTTING else nullcontext():
            begin(method, tiny(pairs=method.pairs or 1), len(EVERYONE), CPU)


# Backends


@runs
def test_beside_other_runs_a_run_is_the_same(name, values, backend, net, federation):
    """Calls answered together with another seed's and with FedAvg's are what they are alone."""
    method, other, tuning = build(name, values), federate(TRAIN, TEST, seed=2), Tuning(LOCAL, Draws(0, "finetune", 2))
    other = dataclasses.replace(other, x=federation.x, y=federation.y)  # another partition of the same images
    runner, calls = make(as_engine(backend), net, CPU), []
    runs = [(method, federation, [0, 2, 5]), (method, other, [1, 3, 4]), (METHODS["fedavg"](), federation, [0, 3])]
    for seed, (own, fed, cohort) in enumerate(runs):
        known = own.pairs == method.pairs  # on this network
        state = (played(own, backend) if known else rounds(own, net, fed, COHORTS, engine=backend))[0][1 + seed % 2]
        calls.append(TrainCall(own, fed, state, cohort, LOCAL, Draws(seed, "train", 2)))
        calls.append(EvalCall(own, fed, state, cohort[1:], tuning))
    calls = [met(call) for call in calls]
    for together, call in zip(runner.run(calls), calls, strict=True):
        assert not isinstance(together, Exception), together
        alone = runner.run([call])[0]
        if backend.startswith("loop"):
            assert_same(together, alone)
        elif backend == "batched":
            assert_close(together, alone, atol=2e-5, rtol=1e-4)
        else:
            losses = [own["test"].loss if isinstance(own, dict) else own.loss for own in (together, alone)]
            assert_close(*losses, atol=0.02, rtol=0.02)


# Clients are kept apart


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


@every_method()
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
        plain, without = trial(method).result(backend, 0)
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


TRAINED = (
    *("fedselect", "pspfl", "seqfededt", "fedcac", "fedpurin", "pfedsd", "fedspu", "fjord", "hermes", "fedmp"),
    *("prunefl", "heterofl", "fedrolex", "flexfl", "subflot", "fedamp", "fedfomo"),
)
ANEW = ("fedala", "pfedfda", "pfedme", "random_dropout")  # find their model by draws of the evaluation's own


@backends
def test_the_cohort_is_evaluated_by_what_it_starts_from_and_ends_with(name, values, backend, net, federation):
    """`before` is what evaluation said of these clients; where it is by TRAINED models, `after` is what it will say."""
    method, runner = build(name, values), make(Engine(backend), net, CPU)
    states, outcomes = played(method, backend)
    trained = name in TRAINED or getattr(method, "judge", None) == "stored"
    for t, cohort in enumerate(COHORTS):
        before, after = (runner.evaluate(method, federation, state, cohort) for state in states[t : t + 2])
        assert outcomes[t].before.total.tolist() == outcomes[t].after.total.tolist() == [TEST[i] for i in cohort]
        if name not in ANEW and not trained and getattr(method, "order", None) != "sequential":
            assert outcomes[t].before.correct.tolist() == before.correct.tolist()
        if trained or name == "local_only":
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
    for key in ("defaults", "groups", "title"):  # of configuration groups, and of tables
        values.pop(key, None)
    fields = {f.name: f.default for f in dataclasses.fields(METHODS[name]) if f.name != "statistics"}  # in train.yaml
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
        if get_origin(hint) is Literal and field != "statistics"
    ],
)
def test_a_choice_that_there_is_not_is_refused(name, field, allowed):
    with pytest.raises(ValueError, match=f"^{field} must be .*, got 'nonsense'") as told:
        METHODS[name](**{**SETTINGS.get(name, [{}])[0], field: "nonsense"})
    assert all(str(choice) in str(told.value) for choice in allowed)


def test_every_configuration_file_and_setting_belongs_to_a_method():
    assert {path.stem for path in (ROOT / "conf/method").glob("*.yaml")} == set(METHODS)
    assert set(SETTINGS) <= set(METHODS)


# The answers


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
    server, uploads, clients, draws = state.server, [], [], Draws(0, "train", 2)
    ask(method.before_turn, server, state.client(COHORTS[1]), state.others(), generator(0, "turn"))
    for number in COHORTS[1]:
        client = One(number).states(met(TrainCall(method, federation, state, [number], LOCAL, draws)))
        buffers = client["statistics"]
        shard = training_shard(federation, number, LOCAL.batch_size, draws)
        found = tree.completed(ask(method.before_evaluation, server, client, net.bind(buffers), shard))
        personal = ask(method.personal, server, client | found)
        client |= ask(method.sample, server, draws.server(number))
        client |= tree.completed(ask(method.before_training, server, client, net.bind(buffers, training=True), shard))
        client = ask(method.prepare, server, client)
        sent = ask(method.download, server, client)
        assert flatten(count(sent))
        start = ask(method.start, tree.received(sent), client)
        ask(method.metrics, server, client)
        masks = ask(method.masks, server, state.client(number))
        assert all((leaf.dtype, leaf.shape) == (torch.bool, net.params[name].shape) for name, leaf in masks.items())
        evaluated = ask(method.evaluated, server, client, start)
        assert flatten(evaluated).keys() == flatten(personal).keys()
        kept = {}
        for phase in ask(method.phases, server, client, start, 2):
            bound = net.bind(buffers, training=True)
            _, kept, client = one_step(method, phase, bound, shard, start, server, client, ask)
        ask(method.predict, net.bind(buffers), evaluated, next(shard.data.chunks()).unlabelled())
        ask(method.finetuning, evaluated, net.parts, 2)
        end = tree.map(lambda leaf: leaf + 0.01 * torch.ones_like(leaf), start)
        client |= tree.completed(ask(method.after_training, server, client, net.bind(buffers), end, shard, kept))
        ask(method.updated_buffers, server, client)
        upload, client = ask(method.finish, server, client, start, end)
        uploads.append(upload)
        clients.append({**state.facts(number), **tree.named(client, state.clients)})
    weight = torch.full((4,), 0.25)
    bound, random = net.bind(state.server_buffers), generator(0, "aggregate", 2)
    ask(method.aggregate, server, tree.stack(clients), bound, tree.stack(uploads), weight, random)
    assert weight.tolist() == [0.25] * 4
    for played_rounds in range(3):
        for turn in method.turns(played_rounds, COHORTS[1], len(EVERYONE), generator(0, "turns", 2)):
            if turn.survey:
                ask(turn.survey, server, tree.stack(clients), tree.stack(uploads))


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


def test_training_on_what_was_not_sent_is_found(net):
    @dataclasses.dataclass(frozen=True)
    class Leaky(FedOBP):
        def loss(self, server, client, net, params, batch):
            return super().loss(server, client, net, params, batch) + 0.1 * tree.squared_distance(params, server)

    first, _, state = played(method := Leaky(q=0.9), "loop")[0]
    client = trial(method).entered(net, state, 0)
    other = poisoned(method, first.server, state.server, client)
    assert int(tree.flat(other).isnan().sum()) == int(tree.flat(client["mask"]).sum()) > 0
    assert_same(method._begin(other, client), method._begin(state.server, client))
    with pytest.raises(Unkept, match="without what is not sent"):
        contract.sees_what_was_sent(trial(method))


@pytest.mark.parametrize(("name", "values"), sampled(CASES, 4))
def test_a_client_that_drops_out_leaves_no_trace(name, values):
    """A round in which a client is late is, bit for bit, one for which it was not drawn; only traffic tells."""
    method, cohort, lost = build(name, values), COHORTS[1], 4
    devices = [Device(*(3 * [1e-6] if client == lost else (1e9, 1e7, 1e7))) for client in EVERYONE]
    clock = Clock(System(deadline=1e6), devices, {})
    state, stage = copy.deepcopy(trial(method).played("loop")[0][1]), trial(method)._stage("loop")
    state, outcome, told = timed(clock, len(cohort), stage[0], method, stage[1], state, cohort, LOCAL, 0)
    drawn = [client for client in cohort if client != lost]
    plain, without = trial(method).replayed("loop", 1, cohort=drawn)
    assert_same(state, plain)
    assert_same([outcome.before, outcome.after, outcome.loss], [without.before, without.after, without.loss])
    assert (outcome.cohort, outcome.metrics, told["late"]) == (drawn, without.metrics, 1)
    assert all(own >= other for own, other in zip(outcome.sent, without.sent, strict=True))


# What the server sees

LATER = {  # sees more than two rounds of a few clients show: clusters that split, heads that are no sum
    "cfl": "each upload",
    "fedgen": "each upload",
    "fedcac": "client states",
}


@cases
def test_the_server_sees_what_the_method_says(name, values):
    method = build(name, values)
    seen, _ = contract.server_sees(trial(method))
    assert method.server_sees in (seen, LATER.get(name))


class Sly:
    """Has hooks that see too much, each by a name of its own."""

    @staticmethod
    def before_turn(self, server, clients, others, generator):
        return {"met": others([0])["own"]["fc.bias"][:1].expand(len(clients["number"]), -1)}

    @staticmethod
    def download(self, server, client):
        return Agreed(server, tree.map(lambda own: own > 0, client["own"]))

    @staticmethod
    def start(self, received, client):
        return client["own"]

    @staticmethod
    def aggregate(self, server, clients, net, uploads, weight, generator):
        return tree.mean(clients["own"], weight), clients

    @staticmethod
    def by_norm(self, server, clients, net, uploads, weight, generator):
        norms = torch.stack([tree.squared_distance(tree.take(uploads, row), server) for row in range(len(weight))])
        return tree.mean(uploads, norms / norms.sum()), clients

    @staticmethod
    def gives_back(self, server, clients, net, uploads, weight, generator):
        mean = tree.mean(uploads, weight)
        return mean, {**clients, "own": tree.repeat(mean, len(weight))}

    @staticmethod
    def turns(self, played, cohort, clients, generator):
        return [Turn([client]) for client in cohort]


@pytest.mark.parametrize(
    ("hook", "name", "seen"),
    [
        ("before_turn", "before_turn", "client states"),
        ("download", "download", "client states"),
        ("aggregate", "aggregate", "client states"),
        ("aggregate", "by_norm", "each upload"),
        ("aggregate", "gives_back", "each upload"),
        ("turns", "turns", "each upload"),
    ],
)
def test_a_server_that_sees_more_than_the_method_says_is_found(hook, name, seen):
    def init(self, params, parts):
        return params, {"own": params}

    def finish(self, server, client, start, end):
        return end, {"own": end}

    own = {"init": init, "finish": finish, hook: getattr(Sly, name)}
    if hook == "download":
        own["start"] = Sly.start
    honest = dataclasses.dataclass(frozen=True)(type("Honest", (Method,), own))()
    assert honest.server_sees == "client states"  # where it says nothing
    contract.sees_what_it_says(trial(honest))
    said = dataclasses.dataclass(frozen=True)(type("Lying", (Method,), {**own, "server_sees": "mean of uploads"}))()
    with pytest.raises(Unkept, match=f"{hook} goes by {seen}"):
        contract.sees_what_it_says(trial(said))
