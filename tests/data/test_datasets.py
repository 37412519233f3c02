"""Images from tiny files made here, look-up order, download, read-only folders, every error's one
line.
"""

import dataclasses
import gzip
import hashlib
import inspect
import io
import os
import pickle
import re
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from scipy.io import savemat
from sklearn.datasets import load_digits

from fedpfl.data.datasets import DATA_SETS, emnist, fmnist, load_samples, medmnist, mnist
from fedpfl.data.datasets.shared.archive import MedMNIST
from fedpfl.data.datasets.shared.samples import Samples, select_classes
from fedpfl.ground import vision
from tests.conftest import DATA, ROOT, read_cases
from tests.data.promises import assert_promises, assert_read, one_line

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_warning():
    """Warnings of the libraries must not leak."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def images(samples: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 256, (samples, *shape), dtype=np.uint8)


def labels(samples: int, classes: int = 3) -> np.ndarray:
    return np.arange(samples) % classes


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + struct.pack(f">{array.ndim}i", *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def test_digits_needs_no_files(tmp_path):
    digits = load_samples("digits", tmp_path / "absent", download=False)
    assert digits.x.shape == (1797, 1, 28, 28)
    assert digits.classes == 10
    assert digits.test_from is None
    assert digits.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (int(digits.x.min()), int(digits.x.max())) == (0, 255)
    # Centres of the 28 pixels among those of the 8
    place = np.clip((np.arange(28) + 0.5) / 3.5 - 0.5, 0, 7)
    weight = np.maximum(0, 1 - abs(place[:, None] - np.arange(8)))  # bilinear
    expected = weight @ (load_digits().images * 255 / 16) @ weight.T
    assert abs(digits.x[:, 0].numpy() - expected).max() <= 0.5 + 1e-9
    assert_promises("digits", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def make_idx_arrays(test: str) -> dict[str, np.ndarray]:
    """Six images and three of a part of that name, by what their files' names begin with."""
    return {
        "train-images-idx3": images(6, 4, 5),
        "train-labels-idx1": labels(6),
        f"{test}-images-idx3": images(3, 4, 5),
        f"{test}-labels-idx1": labels(3),
    }


@pytest.fixture
def idx_files(monkeypatch):
    """The four files of one set, small, as bytes by name; the md5 table knows them."""
    arrays = make_idx_arrays("t10k")
    files = {f"{name}-ubyte.gz": gzip.compress(idx(own), mtime=0) for name, own in arrays.items()}
    for module in (mnist, fmnist):
        monkeypatch.setattr(module, "MD5", {file: md5(data) for file, data in files.items()})
    return arrays, files


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def corrupt(name: str, folder: Path) -> str:
    """Return which file is said to be corrupt, and why."""
    file, why = one_line(lambda: load_samples(name, folder)).split(" is corrupt: ")
    return f"{Path(file).name}: {why}"


@pytest.mark.parametrize(
    ("name", "folder", "packed"),
    [("mnist", "MNIST/raw", True), ("fmnist", "FashionMNIST/raw", False)],
)
def test_idx(tmp_path, idx_files, name, folder, packed):
    arrays, files = idx_files
    if not packed:
        files = {name.removesuffix(".gz"): gzip.decompress(data) for name, data in files.items()}
    write(tmp_path / folder, files)
    before = sorted(tmp_path.rglob("*"))
    x = np.concatenate([arrays["train-images-idx3"], arrays["t10k-images-idx3"]])
    assert_read(name, tmp_path, x[:, None], [0, 1, 2] * 3, 6)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is unpacked beside the files


def test_download_of_what_is_absent(tmp_path, idx_files, monkeypatch):
    _, files = idx_files
    bad = write(tmp_path / "bad", dict.fromkeys(files, b"a login page")).as_uri() + "/"
    monkeypatch.setattr(mnist, "URLS", (bad,))
    assert "gave another file" in one_line(lambda: load_samples("mnist", tmp_path / "data"))
    assert list((tmp_path / "data/MNIST/raw").iterdir()) == []
    mirror = write(tmp_path / "mirror", files).as_uri() + "/"
    monkeypatch.setattr(mnist, "URLS", ("http://nowhere/", mirror))
    first = load_samples("mnist", tmp_path / "data")
    assert sorted(path.name for path in (tmp_path / "data/MNIST/raw").iterdir()) == sorted(files)
    monkeypatch.setattr(mnist, "URLS", ("http://nowhere/",))
    assert torch.equal(load_samples("mnist", tmp_path / "data").x, first.x)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in DATA_SETS
        if name not in ("digits", "npz", "sites", "memory", "hf", "pfllib", "flbench")
    ],
)
def test_absent_and_no_network(tmp_path, name):
    message = one_line(lambda: load_samples(name, tmp_path / "data"))
    shown = "pathmnist" if name == "medmnist" else name
    assert f"data set {shown} is not in data_dir={tmp_path / 'data'}" in message
    has_address = "no network" in message
    assert has_address or re.search("has no address to download from|is absent", message)
    message = one_line(lambda: load_samples(name, tmp_path / "data", download=False))
    assert ("dataset.download is false" in message) == has_address
    assert re.search(rf"\): put .+ there, or {shown}.npz with x and y", message)
    assert message.endswith("dataset=digits works offline")
    assert list(tmp_path.iterdir()) == []  # nothing left behind


def make_emnist_files(arrays: dict[str, np.ndarray] | None = None) -> dict[str, bytes]:
    return {
        f"gzip/emnist-byclass-{name}-ubyte.gz": gzip.compress(idx(array), mtime=0)
        for name, array in (arrays or make_idx_arrays("test")).items()
    }


def test_emnist_from_the_zip_and_unpacked(tmp_path, monkeypatch):
    arrays = make_idx_arrays("test")
    files, buffer = make_emnist_files(arrays), io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        zipped.writestr("gzip/emnist-mnist-test-labels-idx1-ubyte.gz", b"another split")
        for name, data in files.items():
            zipped.writestr(name, data)
    monkeypatch.setattr(emnist, "MD5", md5(buffer.getvalue()))
    write(tmp_path / "zip/EMNIST/raw", {"gzip.zip": buffer.getvalue()})
    write(tmp_path / "gz/EMNIST/raw", files)
    plain = {Path(name).stem: gzip.decompress(data) for name, data in files.items()}
    write(tmp_path / "plain/EMNIST/raw", plain)
    x = np.concatenate([arrays["train-images-idx3"], arrays["test-images-idx3"]])
    for form in ("zip", "gz", "plain"):
        assert_read("emnist", tmp_path / form, x[:, None], [0, 1, 2] * 3, 6)


@pytest.fixture(params=["cifar10", "cifar100"])
def cifar(request, monkeypatch):
    """Name, files by path below data_dir, and the arrays; torchvision's md5 lists know the small
    files.
    """
    kind = getattr(vision.load_torchvision(), request.param.upper())
    key = "labels" if request.param == "cifar10" else "fine_labels"
    xs, ys, files = [], [], {}
    lists: dict[str, list[list[str]]] = {}
    for attribute in ("train_list", "test_list"):
        lists[attribute] = []
        for name, _ in getattr(kind, attribute):
            x, y = images(4, 3, 32, 32), labels(4, 4)
            xs.append(x)
            ys.append(y)
            data = pickle.dumps({"data": x.reshape(4, -1), key: y.tolist()}, protocol=2)
            files[f"{kind.base_folder}/{name}"] = data
            lists[attribute].append([name, md5(data)])
    meta = pickle.dumps({kind.meta["key"]: list("abcd")}, protocol=2)
    files[f"{kind.base_folder}/{kind.meta['filename']}"] = meta
    for attribute, value in lists.items():
        monkeypatch.setattr(kind, attribute, value)
    monkeypatch.setattr(kind, "meta", kind.meta | {"md5": md5(meta)})
    return request.param, kind, files, np.concatenate(xs), np.concatenate(ys)


def pack(files: dict[str, bytes | str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("writable", [True, False])
def test_cifar(tmp_path, cifar, monkeypatch, writable):
    """From its archive, which is unpacked beside it where that is allowed."""
    name, kind, files, x, y = cifar
    archive = pack(files)
    monkeypatch.setattr(kind, "tgz_md5", md5(archive))
    # The tests may run as root, who may write anywhere.
    monkeypatch.setattr(os, "access", lambda *_: writable)
    write(tmp_path, {kind.filename: archive})
    assert assert_read(name, tmp_path, x, y.tolist(), len(y) - 4).x.is_contiguous()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({kind.filename, kind.base_folder} if writable else {kind.filename})


def test_an_archive_writes_nothing_outside(tmp_path, cifar, monkeypatch):
    name, kind, files, _, _ = cifar
    archive = pack(files | {"../../outside": b"?"})
    monkeypatch.setattr(kind, "tgz_md5", md5(archive))
    root = write(tmp_path / "data", {kind.filename: archive})
    told = corrupt(name, root)
    assert told.startswith(f"{kind.filename}: '../../outside' would be extracted to ")
    assert not (tmp_path / "outside").exists()


def test_svhn(tmp_path, monkeypatch):
    kind = vision.load_torchvision().SVHN
    splits, parts = dict(kind.split_list), {}
    for split, samples in (("train", 7), ("test", 5)):
        x, y = images(samples, 32, 32, 3), np.array([10, 1, 2, 3, 10, 1, 2][:samples], np.uint8)
        file = tmp_path / f"{split}_32x32.mat"
        savemat(file, {"X": x.transpose(1, 2, 3, 0), "y": y[:, None]})
        splits[split] = ["http://nowhere", file.name, md5(file.read_bytes())]
        parts[split] = x
    monkeypatch.setattr(kind, "split_list", splits)
    x = np.concatenate([parts["train"], parts["test"]]).transpose(0, 3, 1, 2)
    # The digit 0, stored as 10, is class 0.
    assert_read("svhn", tmp_path, x, [*(0, 1, 2, 3, 0, 1, 2), *(0, 1, 2, 3, 0)], 7)


def medmnist_file(path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for part, samples in (("test", 4), ("val", 3), ("train", 6)):
        arrays[f"{part}_images"] = images(samples, 28, 28)
        arrays[f"{part}_labels"] = labels(samples)[:, None].astype(np.uint8)
    np.savez(path, **arrays)
    return arrays


def test_medmnist(tmp_path, monkeypatch):
    name = "organamnist"
    arrays = medmnist_file(tmp_path / f"{name}.npz")
    known = ("0" * 32, md5((tmp_path / f"{name}.npz").read_bytes()))
    monkeypatch.setitem(DATA_SETS, name, MedMNIST("http://nowhere", known))
    x = np.concatenate([arrays[f"{part}_images"] for part in ("train", "val", "test")])[:, None]
    y = [*(0, 1, 2, 0, 1, 2), *(0, 1, 2), *(0, 1, 2, 0)]
    assert_read(name, tmp_path, x, y, 9)
    got = assert_read("npz", tmp_path / "absent", x, y, 9, path=tmp_path / f"{name}.npz")
    monkeypatch.setitem(medmnist.MD5, name, known)
    assert torch.equal(load_samples("medmnist", tmp_path, subset=name).x, got.x)
    medmnist_file(tmp_path / f"{name}.npz")  # well-formed, yet not the official file
    told = corrupt(name, tmp_path)
    assert told.startswith(f"{name}.npz: md5 is ")
    assert all(digest in told for digest in known)


@pytest.mark.parametrize("shape", [(1, 28, 28), (28, 28), (32, 32, 3), (64, 64, 13)])
def test_own_array_shapes(tmp_path, shape):
    x = images(6, *shape)
    np.savez(tmp_path / "own.npz", x=x, y=labels(6)[:, None])
    got = load_samples("npz", tmp_path, path=tmp_path / "own.npz")
    first = x[:, None] if len(shape) == 2 else x.transpose(0, 3, 1, 2)
    assert np.array_equal(got.x, x if shape[0] == 1 else first)
    assert got.x.is_contiguous()
    assert got.classes == 3


def test_archive_comes_before_the_original_files(tmp_path, idx_files):
    write(tmp_path / "MNIST/raw", idx_files[1])
    np.savez(tmp_path / "mnist.npz", x=images(4, 28, 28), y=labels(4))
    assert len(load_samples("mnist", tmp_path).y) == 4
    np.savez(tmp_path / "other.npz", x=images(5, 28, 28), y=labels(5))
    assert len(load_samples("mnist", tmp_path, path=tmp_path / "other.npz").y) == 5


OPTIONS = """
classes=2 => labels must be from 0 to 1, found 0 to 2
mean=[0.5] * 3, std=[0.5] * 2 => dataset.std has 2 entries, but the samples have 3 channels
only=(0, 7) => dataset.only must be below 3, the number of classes, got 7
"""


@pytest.mark.parametrize(("options", "message"), read_cases(OPTIONS))
def test_errors_in_options(tmp_path, options, message):
    np.savez(tmp_path / "own.npz", x=images(6, 3, 8, 8), y=labels(6))
    given = {"name": "npz", "data_dir": tmp_path, "path": tmp_path / "own.npz"}
    assert message in one_line(lambda: load_samples(**(given | eval(f"dict({options})"))))


def test_classes_that_are_kept_are_numbered_anew(tmp_path):
    """With their samples, groups and test part, in the order in which they are named."""
    x, y = images(8, 4, 4), np.array([0, 1, 2, 3, 3, 2, 1, 0])
    np.savez(tmp_path / "own.npz", x=x, y=y)
    found = load_samples("npz", tmp_path, path=tmp_path / "own.npz", only=(3, 1))
    kept = [1, 3, 4, 6]
    assert (found.y.tolist(), found.classes) == ([1, 0, 0, 1], 2)
    assert torch.equal(found.x[:, 0], torch.from_numpy(x[kept]))
    groups = {"groups": torch.arange(4), "group_names": tuple("abcd")}
    samples = Samples("own", found.x, found.y, 2, None, None, **groups, test_from=2)
    part = select_classes(samples, (0,))
    assert (part.groups.tolist(), part.test_from, part.classes) == ([1, 2], 1, 1)
    assert select_classes(dataclasses.replace(samples, test_from=1), (0,)).test_from is None


def test_config_files():
    """One file per name, with the arguments of its reader; the published faulty constants only under
    their own names.
    """
    files = {
        path.stem: OmegaConf.to_container(OmegaConf.load(path))
        for path in (ROOT / "conf/dataset").glob("*.yaml")
    }
    published = {f"{name}_as_published" for name in ("organamnist", "organcmnist")}
    assert set(files) == {*DATA_SETS, *published}
    for stem, values in files.items():
        name = stem.removesuffix("_as_published")
        options = {
            key: list(p.default) if isinstance(p.default, tuple) else p.default
            for key, p in list(inspect.signature(DATA_SETS[name]).parameters.items())[1:]
            if key not in ("path", "task", "together")  # of all data sets, the run, the partition
        }
        shared = ("name", "mean", "std", "classes", "path", "download")
        assert {*shared} <= values.keys()
        rest = {key: value for key, value in values.items() if key not in shared}
        assert {**rest, "normalize": 1, "title": 1, "defaults": 1} == {
            **options,
            **dict.fromkeys(("normalize", "title", "defaults"), 1),
        }
        if stem not in published:
            assert all(0 < value < 1 for value in (values["mean"] or []) + (values["std"] or []))
            continue
        for key in ("mean", "std"):
            scaled = [value / 255 for value in values[key]]
            assert files[name][key] == pytest.approx(scaled, abs=1e-4)


def load_downloaded(name: str, folder: str) -> Samples:
    """Load a data set as it was downloaded, if it was."""
    if DATA is None or not (DATA / folder / "raw").is_dir():
        pytest.skip(f"FEDPFL_TEST_DATA names no folder with {folder}")
    return load_samples(name, DATA, download=False)
