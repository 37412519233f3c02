"""What every registered method keeps to: one test a method, on one trial, that tells every promise
it breaks.

A new method is tested here the moment it is registered. What `fedpfl check` asks of anybody's
method is in fedpfl/testing/method_promises.py; what concerns the package's own alone, and what no method
can break, is added here. `make test` asks each method in its first setting, each promise on one of
its engines (`list_engines`); promises that play rounds once more (`ROUNDS_AGAIN`) it asks of
ASKED_AGAIN, and that backends agree in evaluation also of who has hooks of its own there.
`make test-all` asks every method for everything, in all settings on all engines.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
import yaml

from fedpfl.engine import (
    Engine,
    FineTuning,
    make_backend,
    make_initial_state,
)
from fedpfl.engine.calls import EvalCall, TrainCall, with_before_turn
from fedpfl.engine.keys import Draws, generator
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, SEES, Method, Turn
from fedpfl.models import Net
from fedpfl.testing import method_promises as contract
from fedpfl.testing.method_promises import METHOD_PROMISES
from fedpfl.testing.promises import Promise, promise_in
from fedpfl.testing.toy import COHORTS, EVERYONE, TEST, TRAIN, MethodTrial, tiny_federation
from tests.conftest import (
    BACKENDS,
    CASES,
    CPU,
    CUTS_NEURONS,
    ENGINES,
    HEAD,
    LOCAL,
    ROOT,
    SETTINGS,
    as_engine,
    assert_close,
    assert_same,
    build_method,
    client_row,
    differing,
    find_eval_job,
    make_federation,
    read_cases,
    record_rounds,
    tiny,
)
from tests.engine.server_view import find_server_view
from tests.methods.expectations import EXPECTED, NEVER_TRAINED, over_the_cohort

LOW_PRECISION = ENGINES[2:]
ANOTHER_SEED = dataclasses.replace(
    make_federation(TRAIN, TEST, seed=2), x=tiny_federation().x, y=tiny_federation().y
)
"""Another partition of the same images."""

KEEPS_STATISTICS = ("fedalt", "fedamp")
"""Leave BatchNorm statistics with the client where they mix models, as their docstrings say."""

SEES_LATER = {
    **dict.fromkeys(("cfl", "fedgen", "fedavg_by_kind"), "each upload"),
    "fedcac": "client states",
}
"""What a server sees that shows in more than two rounds of a few clients alone, or among kinds."""


# Which promises a method is asked for


@dataclasses.dataclass(frozen=True, eq=False)
class NamedTrial:
    """Hold a method's name in the registry beside the trial on which it is asked."""

    name: str
    trial: MethodTrial

    @property
    def method(self) -> Method:
        return self.trial.method

    @property
    def has_first_setting(self) -> bool:
        return self.method == build_method(self.name)


HOUSE_PROMISES: list[Promise] = []
house_promise = partial(promise_in(HOUSE_PROMISES), advice="")
"""Their functions are given a NamedTrial, and an engine if there are any. Binding ones are kept in
bf16, too.
"""

OF_COHORTS = {"changes_only_the_cohorts_rows", "evaluates_the_cohort_before_and_after"}
"""Promises about a cohort's single clients, which a method that pools samples has none of."""


def is_exempt(promise: Promise, name: str, method: Method) -> bool:
    """Tell whether a promise is of plugins alone, or the method's nature takes it out of one."""
    if promise.for_runs or (method.pools_samples and promise.check.__name__ in OF_COHORTS):
        return True
    if promise.check is contract.bf16_is_near:
        return getattr(method, "judge", None) == "sparse"  # what is evaluated is cut at a threshold
    return promise.check is contract.statistics_are_mixed and name in KEEPS_STATISTICS


def list_engines(
    promise: Promise, name: str, is_quick: bool, low_precision: bool
) -> Sequence[str | None]:
    """List the engines to ask on; `make test` asks on one of them.

    It is loop, but for one method: that the batched one agrees is a promise of each.
    """
    if not promise.engines:
        return [None]
    if is_quick:
        return promise.engines[-1:] if name == ASKED_AGAIN[0] else promise.engines[:1]
    return [*promise.engines, *(LOW_PRECISION if low_precision and promise.binding else ())]


ROUNDS_AGAIN = {
    *("draws_from_what_is_given", "evaluates_the_cohort_before_and_after"),
    *("backends_agree_in_evaluation", "bf16_is_near", "changes_only_the_cohorts_rows"),
    *("clients_are_apart", "is_the_same_beside_other_runs", "runs_repeat", "statistics_are_mixed"),
}
"""Promises, by the name of what tries them, that play rounds or evaluate once more."""
ASKED_AGAIN = ("fedobp", "scaffold")
"""Entries that stay, and states on both sides."""


EVALUATION_HOOKS = ("before_evaluation", "evaluated", "finetuning", "predict")


def is_left_out(promise: Promise, name: str) -> bool:
    """Tell whether `make test` does not ask a promise of a method."""
    if promise.check.__name__ not in ROUNDS_AGAIN:
        return False
    hooks = [getattr(METHODS[name], hook) is getattr(Method, hook) for hook in EVALUATION_HOOKS]
    if promise.check is contract.backends_agree_in_evaluation and not all(hooks):
        return False
    return name not in ASKED_AGAIN


def ask_promises(
    named: NamedTrial,
    subtests: pytest.Subtests,
    is_quick: bool = False,
    low_precision: bool = False,
    promises: Sequence[Promise] = (),
) -> None:
    """Ask these promises; none: all, of which HOUSE_PROMISES is complete once this file is read."""
    for promise in promises or (*METHOD_PROMISES, *HOUSE_PROMISES):
        if is_exempt(promise, named.name, named.method):
            continue
        if is_quick and is_left_out(promise, named.name):
            continue
        subject = named if promise in HOUSE_PROMISES else named.trial
        for engine in list_engines(promise, named.name, is_quick, low_precision):
            with subtests.test(promise.title, engine=engine):
                promise.check(subject, *([engine] if engine else []))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_keeps_its_promises(name, subtests):
    ask_promises(NamedTrial(name, MethodTrial(build_method(name))), subtests, is_quick=True)


@pytest.mark.full
@pytest.mark.parametrize(("name", "values"), CASES)
def test_a_method_keeps_its_promises_in_every_setting_on_every_engine(name, values, subtests):
    named = NamedTrial(name, MethodTrial(METHODS[name](**values)))
    ask_promises(named, subtests, low_precision=named.has_first_setting)


# Over adapters: a method that wants none itself, where the head and low-rank additions train

OVER_ADAPTERS = [name for name in METHODS if name not in CUTS_NEURONS and not METHODS[name].pairs]


@pytest.mark.parametrize("name", ["fedavg", "fedobp", "ditto"])
def test_backends_agree_over_adapters(name):
    contract.backends_agree(MethodTrial(build_method(name), pairs=1))


@pytest.mark.full
@pytest.mark.parametrize("name", OVER_ADAPTERS)
def test_a_method_keeps_its_promises_over_adapters(name, subtests):
    trial = MethodTrial(build_method(name), pairs=1)
    ask_promises(NamedTrial(name, trial), subtests, promises=METHOD_PROMISES)


# What it is


@house_promise("its configuration file has exactly its hyperparameters")
def file_has_its_hyperparameters(named: NamedTrial) -> None:
    values = yaml.safe_load((ROOT / f"conf/method/{named.name}.yaml").read_text())
    assert values.pop("name") == named.name
    for key in ("defaults", "groups", "title"):  # of configuration groups, and of tables
        values.pop(key, None)
    fields = dataclasses.fields(METHODS[named.name])
    defaults = {field.name: field.default for field in fields}
    del defaults["statistics"]  # which is in train.yaml
    assert list(values) == list(defaults)
    for key, value in values.items():
        value = tuple(value) if isinstance(value, list) else value
        is_reference = str(value).startswith("${")  # which is looked up elsewhere
        if defaults[key] is not dataclasses.MISSING and not is_reference:
            told = f"{key}: the file says {value}, the dataclass {defaults[key]}"
            assert value == defaults[key], told


@house_promise("only methods that cut neurons refuse a network of which parts are frozen")
def refuses_frozen_networks_only_where_it_cuts(named: NamedTrial) -> None:
    refusal = r"a network of which parts are frozen has no sub-models; set adapter=none$"
    refused = pytest.raises(FedpflError, match=refusal)
    with refused if named.name in CUTS_NEURONS else nullcontext():
        net = MethodTrial(named.method, named.method.pairs or 1).net()
        make_initial_state(named.method, net, len(EVERYONE), CPU)


def test_every_configuration_file_setting_and_expectation_belongs_to_a_method():
    """And the names in ROUNDS_AGAIN are promises'."""
    checks = {promise.check.__name__ for promise in [*METHOD_PROMISES, *HOUSE_PROMISES]}
    assert checks >= ROUNDS_AGAIN
    told = "a method has fedpfl/methods/NAME.py and conf/method/NAME.yaml"
    assert {path.stem for path in (ROOT / "conf/method").glob("*.yaml")} == set(METHODS), told
    assert set(SETTINGS) <= set(METHODS)
    assert set(EXPECTED) == set(METHODS), "tests/methods/expectations.py has a row for each method"


# Backends


@cache
def fedavg_states(engine: str, pairs: int, has_residue: bool) -> list[Any]:
    net = tiny(pairs=pairs, has_residue=has_residue)
    return record_rounds(METHODS["fedavg"](), net, tiny_federation(), COHORTS, engine=engine)[0]


def other_calls(named: NamedTrial, engine: str) -> list[TrainCall | EvalCall]:
    """Return calls of the method, of another seed's run and of FedAvg's, to train and to evaluate."""
    method, tuning = named.method, FineTuning(LOCAL, Draws(0, "finetune", 2))
    runs = [
        (method, tiny_federation(), [0, 2, 5]),
        (method, ANOTHER_SEED, [1, 3, 4]),
        (METHODS["fedavg"](), tiny_federation(), [0, 3]),
    ]
    calls: list[TrainCall | EvalCall] = []
    for seed, (other, federation, cohort) in enumerate(runs):
        own = named.trial.play_cohorts(engine)[0]
        of_fedavg = fedavg_states(engine, method.pairs, method.has_residue)
        states = own if other is method else of_fedavg
        state = states[1 + seed % 2]
        calls.append(TrainCall(other, federation, state, cohort, LOCAL, Draws(seed, "train", 2)))
        calls.append(EvalCall(other, federation, state, cohort[1:], tuning))
    return [with_before_turn(call) for call in calls]


@house_promise("beside other runs a run is the same", engines=BACKENDS)
def is_the_same_beside_other_runs(named: NamedTrial, engine: str) -> None:
    """Calls answered together with another seed's and with FedAvg's are what they are alone."""
    runner = make_backend(as_engine(engine), named.trial.net(), CPU)
    calls = other_calls(named, engine)
    for together, call in zip(runner.run(calls), calls, strict=True):
        assert not isinstance(together, Exception), together
        alone = runner.run([call])[0]
        if engine.startswith("loop"):
            assert_same(together, alone)
        elif engine == "batched":
            assert_close(together, alone, atol=2e-5, rtol=1e-4)
        else:
            pair = [own["test"] if isinstance(own, dict) else own for own in (together, alone)]
            assert_close(pair[0].loss, pair[1].loss, atol=0.02, rtol=0.02)


# Clients are kept apart


def drawn_turns(method: Method, played: int) -> list[Turn]:
    return method.turns(played, COHORTS[played], len(EVERYONE), generator(0, "turns", played + 1))


@house_promise("only the cohort's rows change, and are stored", engines=BACKENDS)
def changes_only_the_cohorts_rows(named: NamedTrial, engine: str) -> None:
    states, _ = named.trial.play_cohorts(engine, norm=True)
    took_part: set[int] = set()
    for played, cohort in enumerate(COHORTS):
        turns = drawn_turns(named.method, played)
        surveyed = {client for turn in turns if turn.survey for client in turn.clients}
        took_part |= {client for turn in turns for client in turn.clients}
        assert states[played + 1].rows.stored_clients == sorted(took_part)
        for client in set(EVERYONE) - set(cohort):
            parts = ["client_buffers"] if client in surveyed else ["client_buffers", "clients"]
            for part in parts:
                pair = (getattr(state, part) for state in states[played : played + 2])
                assert_same(*(client_row(own, client) for own in pair))


# Evaluation


@house_promise(
    "the cohort is evaluated by what it starts from and ends with", engines=BACKENDS, binding=False
)
def evaluates_the_cohort_before_and_after(named: NamedTrial, engine: str) -> None:
    """`before` is what evaluation said of these clients; of `trained` models `after` is what it
    will say.
    """
    method, judged = named.method, EXPECTED[named.name].judged_by(named.method)
    runner = make_backend(Engine(engine), named.trial.net(), CPU)
    states, outcomes = named.trial.play_cohorts(engine)
    for played, cohort in enumerate(COHORTS):
        test_samples = [TEST[client] for client in cohort]
        outcome = outcomes[played]
        before, after = (
            runner.evaluate(EvalCall(method, tiny_federation(), state, cohort))
            for state in states[played : played + 2]
        )
        assert outcome.before.total.tolist() == outcome.after.total.tolist() == test_samples
        if judged in ("latest", "kept") and getattr(method, "order", None) != "sequential":
            assert outcome.before.correct.tolist() == before.correct.tolist()
        if judged in ("trained", "kept"):
            assert outcome.after.correct.tolist() == after.correct.tolist()


def name_in(net: Net, path: str) -> str | None:
    """Return which parameter of the network stands at a path of a tree."""
    return next((name for name in net.params if path == name or path.endswith(f".{name}")), None)


@house_promise("who never trained is evaluated as is expected")
def evaluates_newcomers_as_expected(named: NamedTrial) -> None:
    """By the global model as it is now, the initial one, or the global body under the initial head."""
    if not named.has_first_setting:
        return
    for source, values in EXPECTED[named.name].first_time.items():
        method = build_method(named.name, **values)
        trial = named.trial if method == named.method else MethodTrial(method)
        net, state = trial.net(), trial.play_cohorts("loop")[0][1]
        at_server = [(name_in(net, path), leaf) for path, leaf in tree.items(state.server)]
        params = find_eval_job(method, net, tiny_federation(), state, NEVER_TRAINED).params
        for path, leaf in tree.items(params):
            parameter = name_in(net, path)
            if parameter is None:
                continue
            is_initial = source == "initial" or (source == "initial head" and parameter in HEAD)
            assert torch.equal(leaf, net.params[parameter]) == is_initial, (source, path)
            found = [value for name, value in at_server if name == parameter]
            assert is_initial or any(torch.equal(leaf, value) for value in found), (source, path)


# What travels, and what the server sees


@house_promise("as much travels as is counted by hand")
def sends_what_is_counted(named: NamedTrial) -> None:
    """In the first setting, which the counts are of."""
    if not named.has_first_setting:
        return
    expect, outcomes = EXPECTED[named.name], named.trial.play_cohorts("loop")[1]
    for way in ("down", "up"):
        scalars = expect.down if expect.up is None else getattr(expect, way)
        bits = getattr(expect, f"{way}_bits")
        if scalars is None:
            continue
        values = [getattr(outcome.traffic, f"values_{way}") for outcome in outcomes]
        all_bits = [getattr(outcome.traffic, f"bits_{way}") for outcome in outcomes]
        bits_beside = [total - 32 * value for total, value in zip(all_bits, values, strict=True)]
        assert values == over_the_cohort(scalars), way
        assert bits_beside == over_the_cohort(bits), way


@house_promise("what is a client's own changes whenever it trains, and never else")
def keeps_private_entries(named: NamedTrial) -> None:
    """In the first setting: by FedALT's other one clients draw their own factors as they begin."""
    if not named.has_first_setting:
        return
    states = named.trial.play_cohorts("loop")[0]
    for entry in EXPECTED[named.name].private.split():
        for played, cohort in enumerate(COHORTS):
            for client in EVERYONE:
                before, after = (own.client(client)[entry] for own in states[played : played + 2])
                has_trained = client in cohort and TRAIN[client] > 1
                assert bool(differing(before, after)) == has_trained, (entry, played, client)


@house_promise("the server sees what the method says, and no less")
def sees_no_less_than_it_says(named: NamedTrial) -> None:
    seen, _ = find_server_view(named.trial)
    assert named.method.server_sees in (seen, SEES_LATER.get(named.name))


SLY_HOOKS = """
before_turn | {"met": read_states([0])["own"]["fc.bias"][:1].expand(len(clients["number"]), -1)} | client states
aggregate | (server, {**clients, "own": tree.repeat(tree.mean(uploads, weight), len(weight))}) | each upload
turns | [Turn([client]) for client in cohort] | each upload
"""
"""Hook | what it returns, given the arguments of the contract | what it goes by."""


@pytest.mark.parametrize(("hook", "answer", "seen"), read_cases(SLY_HOOKS, " | "))
def test_a_server_that_sees_more_than_the_method_says_is_found(hook, answer, seen):
    arguments = ", ".join(inspect.signature(getattr(Method, hook)).parameters)
    hooks = {
        "server_sees": SEES[0],
        "init": lambda self, params, parts: (params, {"own": params}),
        "start": lambda self, received, client: client["own"],
        "finish": lambda self, server, client, start, end: (end, {"own": end}),
        hook: eval(f"lambda {arguments}: {answer}", {"Turn": Turn, "tree": tree}),
    }
    sly = dataclasses.dataclass(frozen=True)(type("Sly", (Method,), hooks))
    assert find_server_view(MethodTrial(sly())) == (seen, hook)
