"""CIFAR-10-C, from the published arrays."""

import tarfile

import numpy as np
import pytest
import torch

from fedpfl.data.datasets import cifar10_c, load_samples
from tests.data.promises import assert_read
from tests.data.test_datasets import md5

RNG = np.random.default_rng(0)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Seven images at five severities, some corruptions; the sums are those of these files."""
    monkeypatch.setattr(cifar10_c, "IMAGES_PER_SEVERITY", 7)
    root = tmp_path / "CIFAR-10-C"
    root.mkdir()
    labels = np.tile(np.arange(7, dtype=np.uint8), 5)
    arrays = {"labels": labels} | {
        name: RNG.integers(0, 256, (35, 32, 32, 3), dtype=np.uint8)
        for name in cifar10_c.MAIN_CORRUPTIONS
    }
    for name, array in arrays.items():
        np.save(root / f"{name}.npy", array)
    digests = {name: md5((root / f"{name}.npy").read_bytes()) for name in arrays}
    monkeypatch.setattr(cifar10_c, "LABELS_MD5", digests["labels"])
    monkeypatch.setattr(cifar10_c, "MD5", digests)
    return root, arrays


def test_published_files(tmp_path, published, monkeypatch):
    root, arrays = published
    two = {"corruptions": ("fog", "snow"), "severity": 2}
    x = np.concatenate([arrays[name][7:14] for name in ("fog", "snow")]).transpose(0, 3, 1, 2)
    groups = ["fog"] * 7 + ["snow"] * 7
    got = assert_read("cifar10_c", tmp_path, x, [*range(7)] * 2, groups=groups, **two)
    whole = load_samples("cifar10_c", tmp_path, severity=None)
    assert len(whole.y) == 15 * 35
    assert whole.group_names == cifar10_c.MAIN_CORRUPTIONS
    assert np.array_equal(whole.x[35:70], arrays["shot_noise"].transpose(0, 3, 1, 2))
    assert whole.groups[35:70].tolist() == [1] * 35
    assert whole.y[35:70].tolist() == [*range(7)] * 5
    with tarfile.open(tmp_path / "CIFAR-10-C.tar", "w") as tar:
        tar.add(root, "CIFAR-10-C")
    monkeypatch.setattr(cifar10_c, "TAR_MD5", md5((tmp_path / "CIFAR-10-C.tar").read_bytes()))
    root.rename(tmp_path / "elsewhere")
    assert torch.equal(load_samples("cifar10_c", tmp_path, **two).x, got.x)


def test_each_image_once(tmp_path, published):
    _, arrays = published
    once = {"once": True, "classes": 7}
    got = load_samples("cifar10_c", tmp_path, corruptions=("fog", "snow"), severity=2, **once)
    assert got.x.shape == (7, 3, 32, 32)
    assert got.groups.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert got.y.tolist() == [0, 2, 4, 6, 1, 3, 5]
    assert np.array_equal(got.x[4:], arrays["snow"][[8, 10, 12]].transpose(0, 3, 1, 2))
    every = load_samples("cifar10_c", tmp_path, corruptions=("fog",), severity=None, **once)
    assert every.y.tolist() == [0, 5, 1, 6, 2, 3, 4]
