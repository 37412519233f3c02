"""Folders that PFLlib's and FL-bench's generators write: to the sample, on their very clients."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from fedpfl.config.run import Run
from fedpfl.data.pickles import PlainUnpickler
from tests.data.promises import build, one_line
from tests.data.test_datasets import idx

RANDOM = np.random.default_rng(0)
SIZES = ((5, 2), (3, 4), (7, 1))
"""Training and test samples of each client."""


def draw(samples: int) -> dict[str, np.ndarray]:
    x = RANDOM.normal(size=(samples, 1, 8, 8)).astype(np.float32)
    return {"x": x, "y": RANDOM.integers(0, 3, samples)}


def write_pfllib(folder: Path) -> list[list[dict[str, np.ndarray]]]:
    """A pickled dict in each file, as `save_file` of dataset_utils.py writes it."""
    clients = []
    for client, sizes in enumerate(SIZES):
        clients.append([draw(samples) for samples in sizes])
        for split, samples in zip(("train", "test"), clients[-1], strict=True):
            (folder / split).mkdir(parents=True, exist_ok=True)
            with (folder / split / f"{client}.npz").open("wb") as file:
                np.savez_compressed(file, data=samples)
    (folder / "config.json").write_text(json.dumps({"num_clients": len(SIZES), "alpha": 0.1}))
    return clients


def write_flbench(folder: Path, **arguments: object) -> list[dict[str, np.ndarray]]:
    folder.mkdir(exist_ok=True)
    numbers = RANDOM.permutation(24).reshape(3, 8)
    indices = [{"train": own[:5], "val": own[5:6], "test": own[6:]} for own in numbers]
    everybody = {"train": [0, 1, 2], "val": [0, 1, 2], "test": [0, 1, 2], "total": 3}
    partition = {"separation": everybody, "data_indices": indices}
    (folder / "partition.pkl").write_bytes(pickle.dumps(partition))
    (folder / "args.json").write_text(json.dumps({"client_num": 3, "split": "sample"} | arguments))
    return indices


def build_from(name: str, folder: Path) -> Run:
    return build(f"dataset={name}", f"dataset.path='{folder}'", "model=mlp")


def test_pfllibs_clients_have_its_samples(tmp_path):
    clients = write_pfllib(tmp_path)
    federation = build_from("pfllib", tmp_path).federation
    for client, splits in enumerate(clients):
        own = (federation.train[client], federation.test[client])
        for numbers, samples in zip(own, splits, strict=True):
            numbers = numbers.sort().values
            assert np.array_equal(federation.normalize(federation.x[numbers]), samples["x"])
            assert np.array_equal(federation.y[numbers], samples["y"])


@pytest.mark.parametrize("name", ["synthetic", "mnist"])
def test_flbenchs_clients_have_its_samples(tmp_path, name):
    """Of arrays, and of files that it left to torchvision, training part first."""
    folder = tmp_path / name
    x = RANDOM.integers(0, 256, (24, 8, 8), np.uint8)
    y = RANDOM.permutation(24).astype(np.uint8) % 3
    indices = write_flbench(folder)
    if name == "synthetic":
        np.save(folder / "data.npy", x)
        np.save(folder / "targets.npy", y)
    else:
        (folder / "MNIST/raw").mkdir(parents=True)
        for part, rows in (("train", slice(16)), ("t10k", slice(16, None))):
            (folder / f"MNIST/raw/{part}-images-idx3-ubyte").write_bytes(idx(x[rows]))
            (folder / f"MNIST/raw/{part}-labels-idx1-ubyte").write_bytes(idx(y[rows]))
    federation = build_from("flbench", folder).federation
    assert np.array_equal(federation.x[:, 0], x)
    assert np.array_equal(federation.y, y)
    for client, splits in enumerate(indices):
        own = (federation.train, federation.validation, federation.test)
        for numbers, theirs in zip(own, splits.values(), strict=True):
            assert np.array_equal(numbers[client], theirs)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("print('run')",)


class FalseDtype:
    """A type of objects whose state denies it: arrays of it would take bytes for addresses."""

    def __reduce__(self) -> tuple[object, ...]:
        return np.dtype, ("O", False, True), (3, "|", None, None, None, -1, -1, 0)


def test_nothing_but_arrays_is_made_of_their_pickles(tmp_path, capsys):
    write_pfllib(tmp_path / "own")
    with (tmp_path / "own/test/1.npz").open("wb") as file:
        np.savez(file, data={"x": Evil(), "y": np.arange(3)})
    told = one_line(lambda: build_from("pfllib", tmp_path / "own"))
    assert "own/test/1.npz" in told
    assert "it wants builtins.eval, which could run code" in told
    write_flbench(tmp_path / "mnist")
    (tmp_path / "mnist/partition.pkl").write_bytes(pickle.dumps([Evil()]))
    np.save(tmp_path / "mnist/data.npy", np.zeros((24, 8, 8), np.uint8))
    np.save(tmp_path / "mnist/targets.npy", np.arange(24) % 2)
    told = one_line(lambda: build_from("flbench", tmp_path / "mnist"))
    assert "partition.pkl cannot be read" in told
    assert "it wants builtins.eval" in told
    assert "run" not in capsys.readouterr().out
    (tmp_path / "type.pkl").write_bytes(pickle.dumps(FalseDtype()))
    with (tmp_path / "type.pkl").open("rb") as file:
        assert PlainUnpickler(file).load().hasobject
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        values = {"a": np.arange(6).reshape(2, 3).T, "b": [np.float32(0.5), np.array([True])]}
        (tmp_path / "all.pkl").write_bytes(pickle.dumps(values, protocol))
        with (tmp_path / "all.pkl").open("rb") as file:
            assert repr(PlainUnpickler(file).load()) == repr(values)


@pytest.mark.parametrize(
    ("name", "folder", "message"),
    [
        ("pfllib", "empty", "has no train/0.npz"),
        ("flbench", "empty", "has no data.npy, and is none of mnist, fmnist"),
        ("flbench", "cifar100", "has labels of 20 superclasses"),
    ],
)
def test_other_folders_are_refused_in_one_line(tmp_path, name, folder, message):
    write_flbench(tmp_path / folder, super_class=True)
    (tmp_path / folder / "config.json").write_text('{"num_clients": 3}')
    assert message in one_line(lambda: build_from(name, tmp_path / folder))
