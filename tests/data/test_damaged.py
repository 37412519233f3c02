"""Damaged and hostile data files of formats with checksums: each is read as if it were whole, or is
one line; quickly, in little memory.
"""

import io
import os
import pickle
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from fedpfl.data.datasets import load_samples, pacs
from fedpfl.data.datasets.shared import source
from fedpfl.data.fingerprint import fingerprint
from fedpfl.ground.errors import FedpflError
from tests.data.test_datasets import (
    idx,
    images,
    labels,
    make_emnist_files,
    make_idx_arrays,
    write,
)

TRIED = 20  # damaged files per format
SECONDS = 1.0  # of this process, for each
BYTES = 32 * 2**20  # of memory, for each


class World(NamedTuple):
    """The files of a data set, which are damaged in turn, and how it is read."""

    files: dict[str, bytes | str]
    read: Callable[[Path], object]


def own(patch: pytest.MonkeyPatch) -> World:
    data = io.BytesIO()
    people = np.array(["zoe", "ann", "bob"])[labels(12)]
    arrays = {"x": images(12, 1, 8, 8), "y": labels(12), "groups": people, "test_from": np.int64(9)}
    np.savez(data, **arrays)
    files = {"own.npz": data.getvalue()}
    return World(files, lambda root: load_samples("npz", root, path=root / "own.npz"))


def gzipped(patch: pytest.MonkeyPatch) -> World:
    """EMNIST's files, which have no md5 list; the last four bytes of each are checksum and length."""
    packed = {f"EMNIST/raw/{name}": data for name, data in make_emnist_files().items()}
    return World(packed, lambda root: load_samples("emnist", root, classes=3))


def plain(patch: pytest.MonkeyPatch) -> World:
    files = {f"MNIST/raw/{name}-ubyte": idx(own) for name, own in make_idx_arrays("t10k").items()}
    return World(files, lambda root: load_samples("mnist", root, classes=3))


def png(patch: pytest.MonkeyPatch) -> World:
    domains = ("art_painting", "cartoon", "photo", "sketch")
    patch.setattr(pacs, "SIZES", dict.fromkeys(domains, 2))
    names = [f"PACS/{domain}/{kind}/1.png" for domain in domains for kind in ("dog", "house")]
    # smooth, so that the bytes that decide the form are as many as those of the pixels
    ramp = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8)[..., None].repeat(3, 2) * 4
    files: dict[str, bytes | str] = {}
    for number, name in enumerate(names):
        data = io.BytesIO()
        Image.fromarray(ramp + number).save(data, "PNG")
        files[name] = data.getvalue()
    return World(files, lambda root: load_samples("pacs", root, size=16))


WORLDS = {"npz": own, "idx.gz": gzipped, "png": png}


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """One fault, as a bad disk or a broken transfer makes it; half of them near the ends, where
    headers are.
    """
    near = int(rng.integers(min(len(data), 200)))
    places = [
        near,
        len(data) - 1 - near,
        int(rng.integers(len(data))),
        int(rng.integers(len(data))),
    ]
    at = places[int(rng.integers(4))]
    bad = bytearray(data)
    match int(rng.integers(4)):
        case 0:
            bad[at] ^= 1 << int(rng.integers(8))
        case 1:
            del bad[at:]
        case 2:
            del bad[at : at + int(rng.integers(1, 40))]
        case _:
            bad[at:at] = rng.bytes(int(rng.integers(1, 40)))
    return bytes(bad)


def attempt(action: Callable[[], object]) -> object:
    """What it returns, or the one line of its FedpflError, within the limits of time and memory."""
    now = time.process_time()
    tracemalloc.start()
    try:
        found = action()
    except FedpflError as error:
        found = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - now < SECONDS
    assert peak < BYTES
    assert not isinstance(found, str) or ("\n" not in found and len(found) < 1_000)
    return found


@pytest.mark.parametrize("name", WORLDS)
@source.without_writing()
def test_damaged_files(tmp_path, monkeypatch, name):
    world = WORLDS[name](monkeypatch)
    write(tmp_path, world.files)
    whole, before = world.read(tmp_path), sorted(tmp_path.rglob("*"))
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    named, victims = 0, [*world.files]
    for number in range(TRIED):
        victim = tmp_path / victims[number % len(victims)]
        data = victim.read_bytes()
        victim.write_bytes(damaged(data, rng))
        found = attempt(lambda: world.read(tmp_path))
        if isinstance(found, str):
            named += victim.name in found
            assert victim.name in found or str(victim.parent) in found or str(tmp_path) in found
        else:
            assert fingerprint(found) == fingerprint(whole), f"{victim}, damage {number}"
        victim.write_bytes(data)
    assert named > TRIED / 4
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind


def test_a_damaged_cache_is_made_again(tmp_path, monkeypatch):
    world = png(monkeypatch)
    write(tmp_path, world.files)
    whole = world.read(tmp_path)
    (cache,) = (tmp_path / "cache").iterdir()
    data, rng = cache.read_bytes(), np.random.default_rng(0)
    for _ in range(TRIED // 2):
        cache.write_bytes(damaged(data, rng))
        assert fingerprint(attempt(lambda: world.read(tmp_path))) == fingerprint(whole)


class Trap:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def read_own(path: Path) -> object:
    return attempt(lambda: load_samples("npz", path.parent, path=path))


def test_objects_are_never_unpickled(tmp_path):
    path, trap = tmp_path / "own.npz", Trap(tmp_path / "trap")
    for key in ("x", "y", "groups"):
        arrays = {"x": images(4, 8, 8), "y": labels(4), key: np.array([trap] * 4)}
        np.savez(path, **arrays)
        assert "(an array has Python objects in it, where numbers belong)" in read_own(path)
    path.write_bytes(pickle.dumps(trap))
    assert "cannot be read as an .npz archive" in read_own(path)
    assert not (tmp_path / "trap").exists()


def test_images_and_labels_of_other_numbers(tmp_path, monkeypatch):
    """Also where they are as many in all: the labels would be those of other images."""
    whole = plain(monkeypatch)
    train, test = (name for name in whole.files if "labels" in name)
    write(tmp_path, whole.files | {train: idx(labels(5)), test: idx(labels(4))})
    assert "part 1 of 2 has 6 samples, but 5 labels" in attempt(lambda: whole.read(tmp_path))
