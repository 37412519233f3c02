"""What each method promises besides its formula, asked of the rows of expectations.py."""

import ast
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import cache, partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from fedpfl.engine import Outcome, State, make_backend, make_initial_state
from fedpfl.engine.calls import Counts, EvalCall
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, Method
from fedpfl.testing.toy import COHORTS, MethodTrial, as_engine, tiny_federation
from tests.conftest import (
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    build_method,
    client_row,
    differing,
    keep_one_of_each,
    make_federation,
    read_cases,
    record_rounds,
    tiny,
)
from tests.methods.expectations import EXPECTED, LIMITS, NEVER_TRAINED, RANGES

SHORT = replace(LOCAL, epochs=1)
FEDERATIONS = {
    "ragged": (tiny_federation(), COHORTS),
    "equal": (make_federation((40,) * 3, (8,) * 3), [[0, 1, 2]] * 2),
    "single": (make_federation((65,), (10,)), [[0]] * 2),
}


@cache
def play_two_rounds(
    method: Method, pairs: int, clients: str, engine: str
) -> tuple[list[State], list[Outcome]]:
    """Return states and outcomes of two rounds with BatchNorm, which nobody changes."""
    federation, cohorts = FEDERATIONS[clients]
    net = tiny(norm=True, pairs=pairs, has_residue=method.has_residue)
    return record_rounds(method, net, federation, cohorts, engine=engine)


@cache
def evaluate_all(method: Method, pairs: int, clients: str, engine: str, played: int) -> Counts:
    """Evaluate every client after so many of these rounds."""
    federation, _ = FEDERATIONS[clients]
    state = play_two_rounds(method, pairs, clients, engine)[0][played]
    net = tiny(norm=True, pairs=pairs, has_residue=method.has_residue)
    runner = make_backend(as_engine(engine), net, CPU)
    return runner.evaluate(EvalCall(method, federation, state, list(range(federation.clients))))


def main_statistics(method: Method, state: State) -> Any:
    """Return BatchNorm statistics of the model that is shared, at the server or with the clients."""
    role = next(iter(method.buffers()))
    return state.server_buffers.get(role) or state.client_buffers[role]


def read_values(words: Iterable[str]) -> dict[str, Any]:
    """Return the values of words such as `alpha=1.0`."""
    pairs = (word.partition("=") for word in words)
    return {key: ast.literal_eval(value) for key, _, value in pairs}


def read_method(text: str) -> Method:
    name, *words = text.split()
    return build_method(name, **read_values(words))


def find_model(server: Any) -> dict[str, Any]:
    """Return the entries of the model that a server has."""
    if {"body", "head"} <= server.keys():
        return {**server["body"], **server["head"]}
    return server.get("model", server.get("body", server))


@pytest.mark.parametrize(
    ("method", "other"),
    keep_one_of_each(read_cases(LIMITS), kind_of=lambda case: case[0].split()[0]),
)
def test_at_its_limit_a_method_is_another(method: str, other: str, backend: str) -> None:
    method, (other, _, told) = read_method(method), other.partition(" | ")
    other, words = read_method(other), told.split()
    given = read_values(word for word in words if "=" in word)
    clients = next((word for word in words if word in FEDERATIONS), "ragged")
    is_whole = not {"cohort", "nobody", "first_round"} & {*words}
    states, outcomes = play_two_rounds(method, method.pairs, clients, backend)
    others, other_outcomes = play_two_rounds(other, method.pairs, clients, backend)
    assert differing(states[0], states[-1])
    atol = given.get("atol", given.get("batched_atol", 0.0) if backend == "batched" else 0.0)
    require_equal = partial(assert_close, atol=atol, rtol=0.0) if atol else assert_same

    for played in range(1, 2 if "first_round" in words else len(states)):
        state, other_state = states[played], others[played]
        pair = find_model(state.server), find_model(other_state.server)
        shapes = [
            {(name, getattr(leaf, "shape", ())) for name, leaf in own.items()} for own in pair
        ]
        names = [name for name, _ in set.intersection(*shapes)]
        assert names or is_whole or "cohort" in words
        require_equal(*(tree.select(own, names) for own in pair))
        if names and method.buffers() == other.buffers():
            require_equal(main_statistics(method, state), main_statistics(other, other_state))
        if is_whole:
            counts, other_counts = (
                evaluate_all(each, method.pairs, clients, backend, played)
                for each in (method, other)
            )
            require_equal(counts.correct, other_counts.correct)
            # Clients that share a model are counted in one pass, whose sums round in other places.
            assert_close(counts.loss, other_counts.loss, atol=max(atol, 1e-5))
        if is_whole or "cohort" in words:
            outcome, other_outcome = outcomes[played - 1], other_outcomes[played - 1]
            require_equal(
                (outcome.before, outcome.after), (other_outcome.before, other_outcome.after)
            )
        if "cohort" in words:
            require_equal(outcome.loss, other_outcome.loss)


@pytest.mark.parametrize("name", METHODS)
def test_statistics_stay_at_the_server_or_with_the_client(name):
    """At a client they are those of its own training alone; at the server they move with every
    round.
    """
    method, expected = build_method(name), EXPECTED[name].statistics
    place_of = dict.fromkeys(method.buffers(), expected) if isinstance(expected, str) else expected
    net = MethodTrial(method).net(norm=True)
    states = record_rounds(method, net, tiny_federation(), [[0, 2], [0]], local=SHORT)[0]
    for place in ("server", "client"):
        wanted = {role for role, where in place_of.items() if where == place}
        assert {*getattr(states[1], f"{place}_buffers")} == wanted
    initial = net.buffers
    for statistics in states[1].server_buffers.values():
        assert differing(statistics, initial)
    for role in states[1].client_buffers:
        first, last = (state.client_buffers[role] for state in states[1:])
        assert_same(client_row(first, NEVER_TRAINED), initial)
        assert differing(client_row(first, 0), client_row(first, 2))
        # Who did not train in the second round
        assert_same(client_row(first, 2), client_row(last, 2))
        assert differing(client_row(first, 0), client_row(last, 0))


REFUSED = [
    pytest.param(*place.split("."), value, message, id=f"{place}={value}")
    for message, value, places in read_cases(RANGES, " | ")
    for place in places.split()
]


def test_every_number_of_a_method_has_a_range():
    """What a range refuses, and how it says so, is for tests/config/test_config.py."""
    free = {"statistics", "personalise"}

    def find_bare(hint: Any) -> bool:
        if get_origin(hint) is Annotated:
            return False
        return hint in (int, float) or any(map(find_bare, get_args(hint)))

    for name, method in METHODS.items():
        hints = get_type_hints(method, include_extras=True)
        keys = {field.name for field in fields(method)} - free
        assert not [key for key in keys if find_bare(hints[key])], name


@pytest.mark.parametrize(("name", "key", "value", "message"), REFUSED)
def test_a_hyperparameter_out_of_range_is_refused(name, key, value, message):
    """By itself, or where the network of three layers is known."""
    with pytest.raises((ValueError, FedpflError), match=rf"^(method\.)?{key}:? {message}"):
        make_initial_state(build_method(name, **{key: ast.literal_eval(value)}), tiny(), 10, CPU)
