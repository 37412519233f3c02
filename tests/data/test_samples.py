"""Samples that are no images: token ids and signals, groups, scaling; errors in arrays."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpfl.data import build_federation, fingerprint, partition
from fedpfl.data.datasets import Samples, load_samples
from fedpfl.data.datasets.shared.samples import measure_channels
from tests.conftest import CLASSES
from tests.data.promises import one_line

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 30, (120, 7)).astype(np.int32)
SIGNALS = (RNG.normal(size=(120, 3, 16)) * [[1.0], [5.0], [0.1]] + [[0.0], [3.0], [-7.0]]).astype(
    np.float32
)
FEATURES = RNG.normal(2, 3, size=(120, 11)).astype(np.float32)
IMAGES = (RNG.integers(0, 256, (120, 3, 4, 4)) // [[[1]], [[5]], [[9]]]).astype(np.uint8)
NEARLY = np.float32(
    [[1e5], [np.nextafter(np.float32(1e5), np.float32(2e5))]] * 60
)  # one value but for rounding
Y = np.arange(120) % CLASSES


def own(folder: Path, **arrays) -> Samples:
    np.savez(folder / "own.npz", **({"y": Y} | arrays))
    return load_samples("npz", folder, path=folder / "own.npz")


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_token_ids_are_never_scaled(tmp_path, kind):
    got = own(tmp_path, x=TOKENS.astype(kind))
    assert (got.x.dtype, got.x.tolist()) == (torch.int32, TOKENS.tolist())
    federation = build_federation(got, partition.iid(got.y.numpy(), 4, 0))
    assert (federation.mean, federation.shape, federation.shape.kind) == ((), (7,), "token ids")
    assert federation.normalize(federation.x) is federation.x


@pytest.mark.parametrize("x", [SIGNALS, FEATURES, IMAGES])
def test_samples_are_scaled_by_the_moments_of_what_is_trained_on(tmp_path, x):
    """Not of test samples, of what is held out, or of clients that never take part."""
    split, away = partition.iid(Y, 4, 0), [1, 3]
    got = own(tmp_path, x=x)
    federation = build_federation(got, split, validation=0.2, newcomers=away)
    assert federation.shape == x.shape[1:]
    assert federation.shape.kind == ("images" if x.dtype == np.uint8 else "signals")
    axes = (0, *range(2, x.ndim))
    trained = np.concatenate([federation.train[client] for client in (0, 2)])
    values = x[trained].astype(float) / (255 if x.dtype == np.uint8 else 1)
    np.testing.assert_allclose(federation.mean, values.mean(axes), rtol=1e-6)
    np.testing.assert_allclose(federation.std, values.std(axes), rtol=1e-6)
    before = federation.x.clone()
    scaled = federation.normalize(federation.x)
    np.testing.assert_allclose(scaled[trained].mean(axes), 0, atol=1e-5)
    np.testing.assert_allclose(scaled[trained].std(axes, correction=0), 1, rtol=1e-4)
    assert torch.equal(federation.x, before)
    assert torch.equal(torch.func.vmap(federation.normalize)(federation.x), scaled)
    other = x.copy()
    other[np.delete(np.arange(120), trained)] = 7
    other = build_federation(own(tmp_path, x=other), split, validation=0.2, newcomers=away)
    assert (other.mean, other.std) == (federation.mean, federation.std)
    mean, std = measure_channels(got.x, torch.arange(120))
    # Runs scaled by all samples are runs on other data.
    assert fingerprint(got) != fingerprint(replace(got, mean=mean, std=std))
    for part in federation.split_newcomers(away):
        assert (part.mean, part.std) == (federation.mean, federation.std)


@pytest.mark.parametrize(
    ("x", "least"),
    [
        (np.where(np.arange(11) == 4, NEARLY, FEATURES), 1.0),
        (np.full((120, 3, 4, 4), 7, np.uint8), 1 / 255),
    ],
)
def test_a_constant_feature_stays_finite(tmp_path, x, least):
    federation = build_federation(own(tmp_path, x=x), partition.iid(Y, 4, 0))
    assert min(federation.std) == federation.std[-1 if x.ndim == 4 else 4] == least


def test_scaling_may_be_given_or_left_out(tmp_path):
    def federate(x=FEATURES, **options):
        np.savez(tmp_path / "own.npz", x=x, y=Y)
        samples = load_samples("npz", tmp_path, path=tmp_path / "own.npz", **options)
        return build_federation(samples, partition.iid(Y, 4, 0))

    given = federate(mean=[1.0] * 11, std=[2.0] * 11)
    torch.testing.assert_close(given.normalize(given.x), (given.x - 1) / 2)
    half = federate(mean=[1.0] * 11)
    assert half.mean == (1.0,) * 11
    assert half.std != (1.0,) * 11
    bare = federate(normalize=False)
    assert (bare.mean, bare.std) == ((), ())
    assert torch.equal(bare.normalize(bare.x), torch.from_numpy(FEATURES))
    bare = federate(np.full((120, 2, 8, 8), 51, np.uint8), normalize=False)
    torch.testing.assert_close(bare.normalize(bare.x), torch.full((120, 2, 8, 8), 0.2))


def test_groups_and_the_test_part_of_an_archive(tmp_path):
    people = np.array(["zoe", "ann", "bob"])[np.arange(120) % 3]
    got = own(tmp_path, x=FEATURES, groups=people, test_from=90)
    assert got.group_names == ("ann", "bob", "zoe")
    assert [got.group_names[i] for i in got.groups[:4]] == ["zoe", "ann", "bob", "zoe"]
    assert got.test_from == 90
    numbered = own(tmp_path, x=FEATURES, groups=np.arange(120) % 3 * 10 + 7)
    assert numbered.group_names == ("7", "17", "27")
    plain = own(tmp_path, x=FEATURES)
    assert (plain.groups, plain.group_names, plain.test_from) == (None, (), None)


WIDE = FEATURES.astype(np.float64)
ARRAYS = [
    ({"y": None}, "has no array 'y', only x; save it with np.savez(path, x=x, y=y)"),
    (
        {"x": np.where(FEATURES > 2, 1e300, WIDE)},
        "a number in row 1 is not finite, or not as float32",
    ),
    ({"x": TOKENS - 1}, "must be from 0 to 2147483647, found -1 to 28; save a table"),
    ({"y": Y / 2}, "label 0.5 is no class"),
    ({"groups": np.arange(119)}, "x has 120 samples, and groups has 119"),
]


@pytest.mark.parametrize(("arrays", "message"), ARRAYS)
def test_errors_in_arrays(tmp_path, arrays, message):
    given = {"x": FEATURES, "y": Y, **arrays}
    kept = {name: array for name, array in given.items() if array is not None}
    np.savez(tmp_path / "own.npz", **kept)
    told = one_line(lambda: load_samples("npz", tmp_path, path=tmp_path / "own.npz"))
    assert message in told
    assert "own.npz" in told
