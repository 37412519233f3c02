"""Schemes that know groups and the original test part, every error, the validation split."""

import inspect
import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpfl.data import fingerprint, partition
from fedpfl.data.datasets import Samples
from fedpfl.data.federation import build_federation
from fedpfl.data.partition import SCHEMES, SUPPLIED_ARGUMENTS, Partition
from fedpfl.ground.checks import checked_arguments
from fedpfl.ground.errors import FedpflError
from tests.conftest import read_cases
from tests.data.promises import one_line
from tests.data.test_partition import sizes

Y = np.random.default_rng(0).integers(0, 10, 2_000)
GROUPS = np.random.default_rng(1).choice(5, 2_000, p=[0.1, 0.1, 0.2, 0.2, 0.4])
TEST_FROM = 1_500


def samples(**facts) -> Samples:
    x = torch.zeros(len(Y), 1, 4, 4, dtype=torch.uint8)
    return Samples("toy", x, torch.from_numpy(Y), 10, (0.0,), (1.0,), **facts)


def everything(parts: Partition) -> np.ndarray:
    return np.concatenate([*parts.train, *parts.test])


def check_disjoint(parts: Partition) -> None:
    assert len(np.unique(everything(parts))) == len(everything(parts))
    assert all(index.dtype == np.int64 for index in (*parts.train, *parts.test))
    assert all(len(index) for index in parts.train)


# Groups


@settings(max_examples=20)
@given(
    each=st.integers(1, 20),
    seed=st.integers(0, 2**40),
    test_fraction=st.sampled_from([0.0, 0.25, 0.3]),
)
def test_every_client_is_of_one_group(each, seed, test_fraction):
    parts = partition.groups(Y, 5 * each, seed, groups=GROUPS, test_fraction=test_fraction)
    check_disjoint(parts)
    assert len(everything(parts)) == len(Y)
    for client, (train, test) in enumerate(zip(parts.train, parts.test, strict=True)):
        assert set(GROUPS[np.concatenate([train, test])]) == {client // each}
        assert len(test) == int(test_fraction * (len(train) + len(test)))
    assert (np.ptp(sizes(parts).reshape(5, each), axis=1) <= 1).all()


@pytest.mark.parametrize("clients", [3, 5, 15])
def test_natural_clients_are_tested_on_their_own_part_of_the_original_test_part(clients):
    parts = partition.groups(Y, clients, 3, groups=GROUPS, test_from=TEST_FROM, test_fraction=None)
    check_disjoint(parts)
    assert np.concatenate(parts.train).max() < TEST_FROM <= np.concatenate(parts.test).min()
    for train, test in zip(parts.train, parts.test, strict=True):
        assert len({*GROUPS[train], *GROUPS[test]}) == 1
        if clients <= 5:
            assert len(train) + len(test) == np.bincount(GROUPS)[GROUPS[train[0]]]
    assert clients < 5 or len(everything(parts)) == len(Y)


# Shards dealt at random


@settings(max_examples=20)
@given(
    clients=st.sampled_from([5, 10, 20, 50]),
    each=st.sampled_from([2, 4, 6]),
    seed=st.integers(0, 2**40),
)
def test_shuffled_shards_hold_the_same_classes_in_both_parts(clients, each, seed):
    parts = partition.shuffled_shards(
        Y, clients, seed, classes_per_client=each, test_from=TEST_FROM
    )
    check_disjoint(parts)
    assert len(everything(parts)) == len(Y)
    assert np.concatenate(parts.train).max() < TEST_FROM <= np.concatenate(parts.test).min()
    per_class = clients * each // 10
    shard = np.bincount(Y[:TEST_FROM]) // per_class  # or one more
    for train, test in zip(parts.train, parts.test, strict=True):
        counts = np.bincount(Y[train], minlength=10)
        assert (counts > 0).sum() <= each
        assert np.ceil(counts / (shard + 1)).sum() <= each <= (counts // shard).sum()
        assert set(Y[test]) <= set(Y[train])
        if np.bincount(Y[TEST_FROM:]).min() >= per_class:
            assert set(Y[test]) == set(Y[train])


# Fixed sizes by one draw of proportions


@settings(max_examples=20)
@given(
    alpha=st.sampled_from([0.5, 1.0, 100.0]),
    seed=st.integers(0, 2**40),
    test_from=st.sampled_from([None, TEST_FROM]),
)
def test_fixed_dirichlet_has_equal_sizes_and_proportions(alpha, seed, test_from):
    options = {"alpha": alpha, "train_samples": 50, "test_samples": 10}
    parts = partition.fixed_dirichlet(Y, 6, seed, test_from=test_from, **options)
    trained, tested = set(np.concatenate(parts.train)), set(np.concatenate(parts.test))
    assert not trained & tested
    if test_from:
        assert max(trained) < test_from <= min(tested)
    for train, test in zip(parts.train, parts.test, strict=True):
        assert (len(train), len(test)) == (50, 10)
        assert len(np.unique(train)) == 50
        assert len(np.unique(test)) == 10
        counts = np.bincount(Y[train], minlength=10)[:-1], np.bincount(Y[test], minlength=10)[:-1]
        # Both are rounded from the same q, and the largest class of each gives where nothing is
        # left for the last.
        off = abs(counts[0] / 5 - counts[1]) > 0.5 + 0.5 / 5 + 1e-9
        assert off.sum() <= 2


USUAL: dict[str, dict] = {
    "dirichlet": {"alpha": 0.1},
    "published": {"alpha": 1.0, "max_attempts": 20},
    "iid": {},
    "shards": {"classes_per_client": 2},
    "quantity": {},
    "extended_dirichlet": {"max_attempts": 20},
    "groups": {"groups": GROUPS},
    "shuffled_shards": {"classes_per_client": 2, "test_from": TEST_FROM},
    "fixed_dirichlet": {
        "alpha": 0.1,
        "test_from": TEST_FROM,
        "train_samples": 50,
        "test_samples": 10,
    },
    "file": {"path": "parts.json"},
    "flower": {},
}
ERRORS = f"""
dirichlet | alpha: 0 | partition.alpha must be above 0 and at most 1000000, got 0
dirichlet | alpha: "0.1" | partition.alpha must be a number, got '0.1'
dirichlet | alpha: 10000000.0 | partition.alpha must be above 0 and at most 1000000, got 10000000.0
iid | test_fraction: 1.0 | partition.test_fraction must be at least 0 and below 1, got 1.0
dirichlet | min_samples: 0 | partition.min_samples must be 1 or more, got 0
dirichlet | min_samples: 201 | need 2010 samples, the data set has 2000
published | max_attempts: 0 | partition.max_attempts must be 1 or more, got 0
published | {{clients: 100, alpha: 1.0e-12, max_attempts: 5}} | of clients=100 has partition.min_samples=10
dirichlet | samples_per_client: 0 | partition.samples_per_client must be 1 or more, or null, got 0
dirichlet | samples_per_client: 201 | partition.samples_per_client=201 need 2010 samples
shards | {{samples_per_client: 199, classes_per_client: 1}} | partition.samples_per_client=199 is more than
shards | classes_per_client: 11 | partition.classes_per_client must be at most the number of classes, 10
shards | clients: 2000 | lower clients or partition.classes_per_client
extended_dirichlet | classes_per_client: 11 | classes_per_client must be at most the number of classes, 10
extended_dirichlet | min_samples: 201 | with partition.min_samples=201 need 2010 samples
extended_dirichlet | {{alpha: 0.01, min_samples: 190, max_attempts: 5}} | found no split in 5 attempts
groups | groups: null | partition=groups needs a data set whose samples are from several domains or persons
groups | clients: 7 | clients to be at most the 5 groups or a multiple of them, got 7; set clients=5
groups | min_samples: 300 | groups of at least 300 samples or a multiple of them, got 10; set clients=
groups | min_samples: 3000 | no group has partition.min_samples=3000 samples; lower it
groups | {{clients: 5, samples_per_client: 400}} | too few for 1 clients of 400; lower clients
groups | {{group_names: [a, b, c, d, e], samples_per_client: 400}} | partition=groups: group a has
groups | test_fraction: null | tests clients on the data set's original test part, and this one has none; set part
shuffled_shards | test_from: null | splits the data set's original test part, and this one has none; set partition.test_f
shuffled_shards | clients: 7 | to be a multiple of the 10 classes, got 7 x 2; partition=shards takes any number
shuffled_shards | clients: 1000 | into 200 shards; lower clients or partition.classes_per_client
shuffled_shards | samples_per_client: 900 | partition.samples_per_client=900 is more than the
fixed_dirichlet | train_samples: {10**18} | partition.train_samples={10**18} is more than the 2000 samples of the data set
fixed_dirichlet | {{alpha: 0.001, train_samples: 500}} | a client is to have 500 samples of a class that has
fixed_dirichlet | {{alpha: 0.001, train_samples: 10, test_samples: 125}} | lower partition.test_samples, or raise partition.alpha
"""
"""Scheme | options, as YAML | what is said."""


def configured(name: str, options: dict) -> Partition:
    """Deal to ten clients as a configuration has it, whose options are checked before."""
    values = {"y": Y, "clients": 10, "seed": 0} | USUAL[name] | options
    given = {key: values.pop(key) for key in SUPPLIED_ARGUMENTS if key in values}
    chosen = checked_arguments(SCHEMES[name], values, "partition", SUPPLIED_ARGUMENTS)
    return SCHEMES[name](**given, **chosen)


@pytest.mark.parametrize(("name", "options", "message"), read_cases(ERRORS, " | "))
def test_errors(name, options, message):
    assert message in one_line(lambda: configured(name, yaml.safe_load(options)))


def test_a_group_whose_own_split_leaves_no_training_samples_is_named():
    persons = {"groups": np.repeat(range(5), 400), "group_names": tuple("abcde")}
    given = {"test_fraction": None, "test_from": 1_000}
    told = one_line(lambda: configured("groups", given | persons))
    assert "partition=groups: group d leaves client 6 no training samples, as the data" in told


# Anything that can be typed

EXTREMES = (
    *(0, -1, 1, 2, 10**6, 10**9, 2**63, 10**30, True, None, "a", [1]),
    *(5e-324, 1e-300, 0.9999999999999999, 1e6, 1e300, float("nan"), float("inf"), -float("inf")),
)


@pytest.mark.parametrize("name", SCHEMES)
def test_any_value_of_any_option_is_dealt_or_refused_at_once(name, tmp_path, monkeypatch):
    if name == "flower":
        pytest.importorskip("flwr_datasets.partitioner")
    monkeypatch.chdir(tmp_path)
    Path("parts.json").write_text(json.dumps(np.arange(len(Y)).reshape(10, -1).tolist()))
    for key in {*inspect.signature(SCHEMES[name]).parameters} - {*SUPPLIED_ARGUMENTS}:
        for value in EXTREMES:
            now = time.process_time()
            tracemalloc.start()
            try:
                parts = configured(name, {key: value})
                assert all(len(index) for index in parts.train)
            except FedpflError as error:
                assert key.split("_")[0] in str(error) or "clients" in str(error)  # noqa: PT017
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert time.process_time() - now < 2, (key, value)
            assert peak < 2**24, (key, value)


PINNED = {
    "dirichlet": "e111f011",
    "dirichlet samples_per_client": "1edbf174",
    "published": "5d00df1b",
    "iid": "659c8f1b",
    "shards": "db7e2a4f",
    "shards samples_per_client": "15a99ac3",
    "groups": "ed4d2fac",
    "groups samples_per_client": "5fb67c69",
    "groups test_from": "05b727c0",
    "shuffled_shards": "859eb8ac",
    "shuffled_shards samples_per_client": "2a3107fb",
    "fixed_dirichlet": "551474ff",
    "extended_dirichlet": "a3279943",
    "quantity": "03393cbc",
}
MORE = {"samples_per_client": 30, "test_from": TEST_FROM}


@pytest.mark.parametrize("words", PINNED)
def test_who_holds_what_is_as_in_every_run_so_far(words):
    name, *keys = words.split()
    options = USUAL[name] | {key: MORE[key] for key in keys}
    if "test_from" in keys:
        options |= {"test_fraction": None}
    parts = SCHEMES[name](Y, 10, 3, **options)
    assert fingerprint(*map(torch.from_numpy, (*parts.train, *parts.test)))[:8] == PINNED[words]


# Validation


def test_a_share_of_the_training_samples_is_held_out():
    own, parts = samples(), partition.dirichlet(Y, 20, 0, alpha=0.5)
    plain, held = build_federation(own, parts), build_federation(own, parts, 0.2, seed=3)
    assert plain.validation == ()
    assert plain.validation_or_test is plain.test
    assert held.validation_or_test is held.validation
    for client in range(20):
        whole, left, out = plain.train[client], held.train[client], held.validation[client]
        assert len(out) == int(0.2 * len(whole))
        assert {*out.tolist()} <= {*whole.tolist()}
        kept = [index for index in whole.tolist() if index not in {*out.tolist()}]
        assert left.tolist() == kept  # in its order
        assert torch.equal(plain.test[client], held.test[client])
    assert torch.equal(plain.label_counts(), held.label_counts())
    assert held.to("cpu").validation is held.validation
    again = build_federation(own, parts, 0.2, seed=3)
    other = build_federation(own, parts, 0.2, seed=4)
    assert all(map(torch.equal, held.validation, again.validation))
    assert not all(map(torch.equal, held.validation, other.validation))


def test_what_is_held_out_is_drawn_as_in_every_run_so_far():
    """Somebody with one sample keeps it."""
    parts = Partition((np.arange(10), np.arange(10, 11)), (np.arange(20, 21),) * 2)
    held = build_federation(samples(), parts, 0.3, seed=3)
    assert [own.tolist() for own in held.validation] == [[1, 2, 4], []]
