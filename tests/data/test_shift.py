"""Shifts against plain loops: images, labels, clusters and worlds; groups that never take part."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from scipy.spatial.transform import Rotation

from fedpfl.data import Shift, ShiftedClients, find_clients_of_groups, shift, thin_classes
from fedpfl.data.datasets.shared.samples import Samples
from fedpfl.data.federation import find_absent_classes
from fedpfl.data.partition import Partition
from fedpfl.data.shift import (
    draw_levels,
    draw_permutations,
    flip_labels,
    shift_federation,
    shift_images,
)
from tests.conftest import CLASSES, assert_same, hold_out_quarter, make_federation
from tests.data.promises import one_line

SEED = 7
IMAGES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 6, 6), dtype=np.uint8))


def by_hand(name, image, amount, rng):
    """One image `[channels, height, width]`, values from 0 to 1, not yet cut."""
    if name == "rotation":  # other angles: test_augment.py
        return np.rot90(image, round(amount / 90), (1, 2))
    if name == "blur":
        return gaussian_filter(image, (0, amount, amount), mode="nearest")
    if name == "contrast":
        mean = image.mean((1, 2), keepdims=True)
        return mean + (1 - amount) * (image - mean)
    if name == "noise":
        return image + rng.normal(size=image.shape) * amount
    turn = Rotation.from_rotvec(np.ones(3) / math.sqrt(3) * math.radians(amount))
    return turn.apply(image.reshape(3, -1).T).T.reshape(image.shape)


@pytest.mark.parametrize(
    ("name", "amount"),
    [("rotation", 120), ("noise", 0.3), ("blur", 0.8), ("contrast", 0.6), ("colour", 200)],
)
def test_images_are_shifted_as_by_hand(monkeypatch, name, amount):
    monkeypatch.setattr(shift, "IMAGES_PER_CHUNK", 1)
    level = 0.75
    found = shift_images(IMAGES, Shift(**{name: amount}), level, np.random.default_rng(1))
    rng = np.random.default_rng(1)
    expected = [by_hand(name, image.numpy() / 255, level * amount, rng) for image in IMAGES]
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found, (np.clip(expected, 0, 1) * 255).round())


# ---- Clusters and worlds


def test_clusters_are_equal_spread_evenly_and_drawn_anew():
    rotation = Shift(rotation=360, clusters=4, at=(2, 5))
    levels = draw_levels(rotation, 12, SEED, 0)
    assert Counter(levels.tolist()) == dict.fromkeys([0.0, 0.25, 0.5, 0.75], 3)
    later = draw_levels(rotation, 12, SEED, 1)
    pairs = {*zip(levels.tolist(), later.tolist(), strict=True)}
    assert len(pairs) == 4  # the same clusters, with other levels
    assert not {*later.tolist()} & {*levels.tolist()}
    assert draw_levels(rotation, 12, SEED + 1, 0).tolist() != levels.tolist()
    dealt = draw_levels(replace(rotation, drift="deal"), 12, SEED, 1)
    assert sorted(dealt) == sorted(levels)
    assert dealt.tolist() != levels.tolist()


def test_a_client_by_itself_is_a_function_of_its_number_alone():
    noise = Shift(noise=0.3, by="client", at=(3,))
    levels = draw_levels(noise, 9, SEED, 0)
    assert len({*levels}) == 9
    assert draw_levels(noise, 5, SEED, 0).tolist() == levels[:5].tolist()
    assert not {*draw_levels(noise, 9, SEED, 1)} & {*levels}


@pytest.mark.parametrize("clusters", [4, 5, 7])
def test_clusters_agree_on_no_class_as_far_as_there_are_classes(clusters):
    names = draw_permutations(Shift(label_permutation=True, clusters=clusters), 14, 5, SEED, 0)
    assert all(sorted(row) == [0, 1, 2, 3, 4] for row in names.tolist())
    different = {tuple(row) for row in names.tolist()}
    assert len(different) >= 5 if clusters > 5 else len(different) == clusters
    if clusters <= 5:
        assert all(len({row[label] for row in different}) == clusters for label in range(5))


def test_the_schedule():
    drift = Shift(rotation=90, at=(20, 40), recover=True)
    rounds = (1, 20, 21, 40, 41, 99)
    assert [drift.find_world(number) for number in rounds] == [0, 0, 1, 1, 0, 0]
    assert [drift.find_start(number) for number in rounds] == [None, None, 20, 20, 40, 40]
    assert replace(drift, recover=False).find_world(41) == 2


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_a_share_of_the_labels_is_wrong(kind):
    labels = torch.arange(20_000) % 5
    noise = Shift(label_noise=0.3, label_noise_kind=kind)
    wrong = flip_labels(labels, noise, 5, np.random.default_rng(0))
    steps = Counter(((wrong - labels) % 5).tolist())
    expected = {0: 0.7, **({1: 0.3} if kind == "pair" else dict.fromkeys(range(1, 5), 0.075))}
    assert steps.keys() == expected.keys()
    for step, share in expected.items():
        assert steps[step] / 20_000 == pytest.approx(share, abs=0.01)


def test_a_long_tail_keeps_the_share_of_each_class():
    labels = np.repeat(np.arange(3), 40)
    rows = np.random.default_rng(0).permutation(120)
    split = Partition((rows[:50], rows[50:100]), (rows[100:], rows[:0]))
    thinned = thin_classes(split, labels, Shift(imbalance=16), SEED)
    before = np.bincount(labels[rows[:100]])
    kept = np.concatenate(thinned.train)
    assert np.bincount(labels[kept]).tolist() == (before / (1, 4, 16)).round().tolist()
    assert thinned.test is split.test
    for own, whole in zip(thinned.train, split.train, strict=True):
        assert [row for row in whole if row in {*own.tolist()}] == own.tolist()


def samples_of(federation, split, client):
    indices = getattr(federation, split)[client]
    return federation.x[indices], federation.y[indices]


def test_each_client_has_its_samples_shifted_by_level_and_names_of_classes():
    federation = hold_out_quarter(make_federation())
    # Two clients share samples, which each has otherwise.
    federation = replace(federation, test=(federation.test[1], *federation.test[1:]))
    absent = find_absent_classes(federation.y, CLASSES, federation.train)
    federation = replace(federation, excluded_classes=absent)
    both = Shift(rotation=360, label_permutation=True)
    levels = draw_levels(both, federation.clients, SEED, 1)
    names = draw_permutations(both, federation.clients, CLASSES, SEED, 1)
    found = shift_federation(federation, both, SEED, 1)
    before = shift_federation(federation, replace(both, test="before"), SEED, 1)
    for client in range(federation.clients):
        for split in ("train", "validation", "test"):
            x, y = samples_of(federation, split, client)
            rng = np.random.default_rng(0)
            turned = shift_images(x, both, levels[client], rng)
            called = torch.from_numpy(names[client])[y]
            assert_same(samples_of(found, split, client), (turned, called))
            if split == "test":
                assert_same(samples_of(before, split, client), (x, y))
        renamed = absent[client][names[client].argsort()]
        assert found.excluded_classes[client].tolist() == renamed.tolist()


def test_labels_are_wrong_in_training_alone_and_the_same_in_all_worlds():
    federation = hold_out_quarter(make_federation())
    wrong = Shift(label_noise=0.4, rotation=90, at=(1,))
    worlds = [shift_federation(federation, wrong, SEED, world) for world in (0, 1)]
    for split, changes in {"train": True, "validation": False, "test": False}.items():
        before, first, second = (
            torch.cat([samples_of(one, split, client)[1] for client in range(one.clients)])
            for one in (federation, *worlds)
        )
        assert_same(first, second)
        assert torch.equal(before, first) != changes


def test_newcomers_shift_too_and_a_world_that_comes_again_is_the_same():
    federation = make_federation()
    shifted = ShiftedClients(federation, [2, 5], Shift(noise=0.3, by="client", at=(1,)), SEED)
    first = shifted.in_world(0)
    assert shifted.in_world(0) is first
    assert not torch.equal(shifted.in_world(1)[0].x, first[0].x)
    again = shifted.in_world(0)
    assert_same(again[0].x, first[0].x)
    members, newcomers = first
    assert newcomers.partition_numbers == (2, 5)
    level = draw_levels(Shift(noise=0.3, by="client"), 10, SEED, 0)[5]
    rest = samples_of(newcomers, "train", 1)[0].float() - samples_of(federation, "train", 5)[0]
    assert 0 < rest.std() < 2 * 255 * 0.3 * level
    assert members.clients == 8


# ---- Groups that never take part

NAMES = ("art", "photo", "sketch")
GROUPS = np.repeat(np.arange(3), 8)
APART = Partition(
    tuple(np.arange(start, start + 6) for start in (0, 8, 16)),
    tuple(np.arange(start + 6, start + 8) for start in (0, 8, 16)),
    client_names=("art", "photo", "sketch"),
)
MIXED = Partition((np.array([0, 9]), np.array([1, 2])), (np.array([3]), np.array([17])))


def find_newcomers(names, partition=APART, groups=GROUPS, group_names=NAMES):
    held = None if groups is None else torch.from_numpy(groups)
    x, y = torch.zeros(24, 1), torch.zeros(24, dtype=torch.int64)
    samples = Samples("own", x, y, 2, (), (), groups=held, group_names=group_names)
    return find_clients_of_groups(samples, partition, names)


def test_groups_never_take_part_by_name():
    assert find_newcomers(["sketch", "art"]) == [0, 2]
    assert find_newcomers(["photo"], groups=None, group_names=()) == [1]  # by the clients' names
    # Others than who has the group's name may hold its samples.
    art, photo, _ = APART.train
    names, train = ("art", "photo", "studio"), (art[:3], photo, art[3:])
    shared = replace(APART, train=train, test=(art[:0],) * 3, client_names=names)
    assert find_newcomers(["art"], shared) == [0, 2]
    assert find_newcomers(["u"], replace(MIXED, client_names=("u", "v"))) == [0]


@pytest.mark.parametrize(
    ("names", "changes", "line"),
    [
        (["sketches"], {}, "unseen_groups must be one of art, photo, sketch, got"),
        (["art", "photo", "sketch"], {}, "leaves 3 of 3 clients out"),
        (["art"], {"partition": MIXED}, "client 0 holds samples of photo too"),
    ],
)
def test_names_that_are_no_groups_are_a_line(names, changes, line):
    assert line in one_line(lambda: find_newcomers(names, **changes))
