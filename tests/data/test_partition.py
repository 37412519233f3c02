"""Partitions: published counts on the real data, properties that hold for any arguments, schemes that
know groups and the original test part, every error, the validation split.
"""

import copy
import pickle
from collections.abc import Iterable

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpfl.data import fingerprint, partition
from fedpfl.data.datasets import Samples
from fedpfl.data.federation import build_federation
from fedpfl.data.heterogeneity import measure_heterogeneity
from fedpfl.data.partition import SCHEMES, SUPPLIED_ARGUMENTS, Partition, deal_samples
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.minibatches import SampleSource, plan_steps
from fedpfl.ground.checks import checked_arguments
from fedpfl.methods import Phase
from tests.conftest import make_federation, read_cases
from tests.data.promises import one_line
from tests.data.test_datasets import load_downloaded

Y = np.random.default_rng(0).integers(0, 10, 2_000)  # ten classes, unequal sizes


def owned(parts: Partition) -> list[np.ndarray]:
    return [np.concatenate(pair) for pair in zip(parts.train, parts.test, strict=True)]


def sizes(parts: Partition) -> np.ndarray:
    return np.array([len(indices) for indices in owned(parts)])


def count_labels(parts: Iterable[np.ndarray], y: np.ndarray = Y, classes: int = 10) -> np.ndarray:
    """Return how many samples of each class the clients hold, `[clients, classes]`."""
    return np.stack([np.bincount(y[indices], minlength=classes) for indices in parts])


def check(
    parts: Partition,
    clients: int,
    samples: int = len(Y),
    cover: bool = True,
    test_fraction: float | None = 0.25,
) -> None:
    """Disjoint, in range, split by the rule, at least one training sample each; with `cover` every
    sample is dealt.
    """
    assert len(parts.train) == len(parts.test) == clients
    everything = np.concatenate([*parts.train, *parts.test])
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < samples
    assert not cover or len(everything) == samples
    for train, test in zip(parts.train, parts.test, strict=True):
        assert train.dtype == test.dtype == np.int64
        assert len(train) >= 1
        if test_fraction is not None:
            assert len(test) == int(test_fraction * (len(train) + len(test)))


# The published split


@pytest.mark.parametrize(
    ("alpha", "attempts", "train", "test", "least", "most"),
    [(0.1, 4, 52_537, 17_463, 39, 2_534), (0.5, 1, 52_538, 17_462, 98, 1_085)],
)
def test_published_counts_on_fashionmnist(alpha, attempts, train, test, least, most):
    fmnist = load_downloaded("fmnist", "FashionMNIST")
    parts = partition.published(fmnist.y, 100, 42, alpha=alpha)
    federation = build_federation(fmnist, parts)
    assert parts.attempts == attempts
    assert int(federation.train_sizes.sum()) == train
    assert int(federation.test_sizes.sum()) == test
    assert int(federation.train_sizes.min()) == least
    assert int(federation.train_sizes.max()) == most
    check(parts, 100, 70_000)


def test_published_follows_a_plain_transcription_of_the_rule():
    """The rule as protocol and public code state it, with lists, sharing nothing with the
    implementation.
    """
    clients, alpha, least, seed = 20, 0.3, 35, 7
    stream = np.random.RandomState(seed)
    idx = [np.where(label == Y)[0] for label in range(10)]
    attempts, stats = 0, [[]]
    while min(len(s) for s in stats) < least:
        attempts += 1
        stats = [[] for _ in range(clients)]
        for c in range(10):
            stream.shuffle(idx[c])
            d = stream.dirichlet(np.repeat(alpha, clients))
            cuts = (np.cumsum(d) * len(idx[c])).astype(int)[:-1]
            for k, piece in enumerate(np.split(idx[c], cuts)):
                stats[k] += piece.tolist()
    parts = partition.published(Y, clients, seed, alpha=alpha, min_samples=least)
    assert parts.attempts == attempts > 1
    for k in range(clients):
        mine = np.array(stats[k])
        stream.shuffle(mine)
        cut = int(0.25 * len(mine))
        assert np.array_equal(parts.test[k], mine[:cut])
        assert np.array_equal(parts.train[k], mine[cut:])


# Properties


@settings(max_examples=25)
@given(
    clients=st.integers(1, 200),
    alpha=st.sampled_from([1e-300, 1e-5, 0.01, 0.1, 1.0, 100.0, 1e6]),
    min_samples=st.integers(1, 2_000),
    seed=st.integers(0, 2**40),
    test_fraction=st.sampled_from([0.0, 0.25, 0.999]),
)
def test_dirichlet_always_ends(clients, alpha, min_samples, seed, test_fraction):
    min_samples = min(min_samples, len(Y) // clients)  # up to the hardest that is possible at all
    options = {"alpha": alpha, "min_samples": min_samples, "test_fraction": test_fraction}
    parts = partition.dirichlet(Y, clients, seed, **options)
    check(parts, clients, test_fraction=test_fraction)
    assert sizes(parts).min() >= min_samples


@settings(max_examples=25)
@given(
    clients=st.integers(1, 150), classes_per_client=st.integers(1, 10), seed=st.integers(0, 2**40)
)
def test_shards_hold_exactly_their_classes_in_equal_shards(clients, classes_per_client, seed):
    parts = partition.shards(Y, clients, seed, classes_per_client=classes_per_client)
    check(parts, clients, cover=clients * classes_per_client >= 10)
    counts = count_labels(owned(parts))
    assert ((counts > 0).sum(1) == classes_per_client).all()
    dealt = (counts > 0).sum(0)
    assert dealt.max() - dealt.min() <= 1
    for column, total in zip(counts.T, np.bincount(Y), strict=True):
        shard = column[column > 0]
        assert not len(shard) or (shard.sum() == total and shard.max() - shard.min() <= 1)


# Sizes, and classes cut by Dir(alpha)


quantity, extended_dirichlet = SCHEMES["quantity"], SCHEMES["extended_dirichlet"]


def test_sizes_follow_a_power_law():
    found = sizes(quantity(Y, 20, 3, sizes="power", spread=1.5, min_samples=5))
    weights = np.arange(1, 21) ** -1.5
    exact = 5 + (len(Y) - 5 * 20) * weights / weights.sum()
    assert np.abs(np.sort(found)[::-1] - exact).max() < 1
    assert found.sum() == len(Y)


def test_heterogeneity_by_hand():
    apart = measure_heterogeneity(np.array([[4, 0], [0, 4]]))
    assert (apart.label_skew, apart.size_gini) == (0.5, 0)
    alike = measure_heterogeneity(np.array([[1, 1], [1, 1], [0, 0]]))
    assert (alike.label_skew, alike.size_gini) == (0, 0)
    unequal = measure_heterogeneity(np.array([[1, 0], [3, 0], [8, 0]]))
    # The mean difference of pairs, (2 + 7 + 5) x 2 / 9, over twice the mean
    assert unequal.size_gini == pytest.approx(28 / 9 / 8)


# The federation


def small_images() -> Samples:
    x = torch.arange(12 * 3 * 2 * 2).remainder(256).to(torch.uint8).view(12, 3, 2, 2)
    return Samples("small", x, torch.arange(12) % 3, 4, (0.1, 0.2, 0.3), (0.5, 1.0, 2.0))


def test_federation():
    images = small_images()
    parts = partition.iid(images.y, 3, 0)
    federation = build_federation(images, parts)
    shape = federation.shape
    for copied in (shape, copy.deepcopy(shape), pickle.loads(pickle.dumps(shape))):
        assert (copied, copied.kind, copied.data_set) == ((3, 2, 2), "images", "small")
    assert federation.clients == 3
    assert federation.train_sizes.tolist() == [3, 3, 3]
    assert federation.test_sizes.tolist() == [1, 1, 1]
    counts = federation.label_counts()
    assert counts.shape == (3, 4)
    assert counts.dtype == torch.int64
    assert counts.sum(0).tolist() == [4, 4, 4, 0]
    assert np.array_equal(counts, count_labels(owned(parts), images.y.numpy(), classes=4))


@pytest.mark.parametrize(
    ("batch", "together", "idle"), [(2, 1, 2), (4, 2, 5), (3, 2, 4), (2, 100, 7)]
)
def test_clients_that_never_train(batch, together, idle):
    """Those for which not one step's minibatches of two samples or more can be made, as in
    training.
    """
    federation = make_federation((0, 1, 2, 3, 5, 9, 14), (0,) * 7)
    assert federation.count_untrainable(batch, together) == idle
    phase, draws = Phase(1, batches=together), Draws(0, "train", 1)
    sources = [SampleSource(federation, client, draws, batch) for client in range(7)]
    plans = [plan_steps(source, phase, range(1)) for source in sources]
    assert [len(plan.positions) for plan in plans].count(0) == idle


ONE = np.arange(4)
NONE, OWN = ONE[:0], "partition=own"
SO_MANY = f"as {OWN} deals to so many, got 2"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, f"{OWN} must answer with a fedpfl.data.partition.Partition, got NoneType"),
        (((ONE, ONE), (ONE + 4,)), f"clients must be 1, {SO_MANY}"),
        (((ONE, NONE), (NONE, NONE)), f"{OWN}: client 1 has no training samples; deal it some"),
        (((ONE, ONE + 4), (ONE + 7,) * 2), f"{OWN}: sample 7 is for training and for testing or"),
    ],
)
def test_what_a_scheme_of_ones_own_must_not_deal_is_one_line(answer, message):
    if answer is not None:
        train, test, validation = (*answer, ())[:3]
        answer = Partition(train, test, validation=validation)

    def own(y, clients, seed):
        return answer

    told = one_line(lambda: deal_samples(own, small_images(), 2, 0))
    assert told.startswith(message)


# Groups and the original test part


GROUPS = np.random.default_rng(1).choice(5, 2_000, p=[0.1, 0.1, 0.2, 0.2, 0.4])
TEST_FROM = 1_500


def samples(**facts) -> Samples:
    x = torch.zeros(len(Y), 1, 4, 4, dtype=torch.uint8)
    return Samples("toy", x, torch.from_numpy(Y), 10, (0.0,), (1.0,), **facts)


def deal_sites(sites: dict[str, np.ndarray], seed: int, **options) -> dict[str, list]:
    """Deal sites, a number a row and two rows a patient; return each site's rows in its splits."""
    rows = torch.from_numpy(np.concatenate([*sites.values()]))
    numbers = torch.repeat_interleave(torch.tensor([*map(len, sites.values())]))
    facts = {"groups": numbers, "group_names": tuple(sites)}
    units = rows // 2 if options.pop("together") else None
    own = Samples("toy", rows[:, None].float(), rows % 2, 2, (), (), **facts, units=units)
    split = deal_samples(partition.groups, own, len(sites), seed, by_name=True, **options)
    held = build_federation(own, split, 0.2, seed)
    splits = (held.train, held.test, held.validation)
    return {
        name: [rows[part[client]].tolist() for part in splits]
        for client, name in enumerate(held.client_names)
    }


@pytest.mark.parametrize(("together", "kept"), [(False, None), (True, None), (False, 15)])
def test_no_other_site_moves_a_sites_samples(together, kept):
    """Met by hospitals: a sixth one dealt the test samples of all five anew."""
    options = {"together": together, "samples_per_client": kept}
    rng = np.random.default_rng(0)
    sites = {f"s{place}": 1000 * place + np.arange(20 + place) for place in range(30)}
    expected = deal_sites(sites, 0, **options)
    assert deal_sites(sites, 7, **options)["s3"] != expected["s3"]
    for _ in range(20):
        # Half leave or take another name, and all stand in another order.
        stay = rng.choice([*sites], 15, replace=False).tolist()
        renamed = {f"n{name}": rows for name, rows in sites.items() if rng.random() < 0.4}
        pool = {name: sites[name] for name in stay}
        pool |= {name: rows for name, rows in renamed.items() if name[1:] not in stay}
        dealt = deal_sites({name: pool[name] for name in rng.permutation([*pool])}, 0, **options)
        assert {name: dealt[name] for name in stay} == {name: expected[name] for name in stay}


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
}
ERRORS = """
dirichlet | min_samples: 201 | need 2010 samples, the data set has 2000
shards | classes_per_client: 11 | partition.classes_per_client must be at most the number of classes, 10
extended_dirichlet | {alpha: 0.01, min_samples: 190, max_attempts: 5} | found no split in 5 attempts
groups | groups: null | partition=groups needs a data set whose samples are from several domains or persons
groups | clients: 7 | clients to be at most the 5 groups or a multiple of them, got 7; set clients=5
groups | test_fraction: null | tests clients on the data set's original test part, and this one has none; set part
shuffled_shards | clients: 7 | to be a multiple of the 10 classes, got 7 x 2; partition=shards takes any number
fixed_dirichlet | {alpha: 0.001, train_samples: 500} | a client is to have 500 samples of a class that has
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

    # As in every run so far; a client with one sample keeps it.
    parts = Partition((np.arange(10), np.arange(10, 11)), (np.arange(20, 21),) * 2)
    held = build_federation(samples(), parts, 0.3, seed=3)
    assert [own.tolist() for own in held.validation] == [[1, 2, 4], []]
