"""Damaged and hostile data files: each is read as if it were whole, or is one line; quickly, in
little memory.

Formats with checksums (npz, gz, png, md5 lists) must never give other numbers. Those without (plain
idx, wav, mat, text) cannot tell a changed number from the right one, but must give samples of the
same form, or the line.
"""

import gzip
import io
import os
import pickle
import struct
import time
import tracemalloc
import urllib.request
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.lib import format as npy
from scipy.io import savemat

from fedpfl.data import partition, state_dict
from fedpfl.data.datasets import (
    DATA_SETS,
    Raw,
    Samples,
    ag_news,
    digit5,
    har,
    load_samples,
    office_home,
    pacs,
)
from fedpfl.ground import vision
from fedpfl.ground.errors import FedpflError
from tests.command import TINY, run_command
from tests.data.test_datasets import idx, md5, pack, write
from tests.data.test_formats import FOLDER, clip_files, mini_files, picture
from tests.data.test_leaf import written
from tests.data.test_partition_file import flat

TRIED = 20  # damaged files per format
SECONDS = 1.0  # of this process, for each
BYTES = 32 * 2**20  # of memory, for each


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def kinds(samples: int, classes: int = 3) -> np.ndarray:
    return np.arange(samples) % classes


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def offline(url, *args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", offline)


# Whole files, small


class World(NamedTuple):
    """The files of a data set, which of them are damaged, how it is read, and whether damage can be
    told.
    """

    files: dict[str, bytes | str]
    victims: list[str]
    read: Callable[[Path], object]
    checked: bool = True
    tried: int = TRIED


def own(compressed: bool) -> World:
    data = io.BytesIO()
    people = np.array(["zoe", "ann", "bob"])[kinds(12)]
    arrays = {"x": image(12, 1, 8, 8), "y": kinds(12), "groups": people, "test_from": np.int64(9)}
    (np.savez_compressed if compressed else np.savez)(data, **arrays)
    return World(
        {"own.npz": data.getvalue()},
        ["own.npz"],
        lambda root: load_samples("npz", root, path=root / "own.npz"),
    )


def gzipped(patch: pytest.MonkeyPatch) -> World:
    """EMNIST's files, which have no md5 list; the last four bytes of each are checksum and length."""
    arrays = {
        "train-images-idx3": (6, 4, 5),
        "train-labels-idx1": (6,),
        "test-images-idx3": (3, 4, 5),
    }
    files = {
        name: idx(image(*shape) % 3)
        for name, shape in (arrays | {"test-labels-idx1": (3,)}).items()
    }
    packed = {
        f"EMNIST/raw/gzip/emnist-byclass-{n}-ubyte.gz": gzip.compress(d, mtime=0)
        for n, d in files.items()
    }
    return World(packed, list(packed), lambda root: load_samples("emnist", root, classes=3))


def plain(patch: pytest.MonkeyPatch) -> World:
    arrays = {
        "train-images-idx3": (6, 4, 5),
        "train-labels-idx1": (6,),
        "t10k-images-idx3": (3, 4, 5),
    }
    files = {
        name: idx(image(*shape) % 3)
        for name, shape in (arrays | {"t10k-labels-idx1": (3,)}).items()
    }
    placed = {f"MNIST/raw/{name}-ubyte": data for name, data in files.items()}
    return World(
        placed, list(placed), lambda root: load_samples("mnist", root, classes=3), checked=False
    )


def cifar(patch: pytest.MonkeyPatch) -> World:
    """By md5 alone: what is another file than the published one is never unpickled."""
    kind, files = vision.load_torchvision().CIFAR10, {}
    for attribute in ("train_list", "test_list"):
        lists = []
        for name, _ in getattr(kind, attribute):
            data = pickle.dumps({"data": image(4, 3072), "labels": kinds(4).tolist()}, protocol=2)
            files[f"{kind.base_folder}/{name}"] = data
            lists.append([name, md5(data)])
        patch.setattr(kind, attribute, lists)
    meta = pickle.dumps({kind.meta["key"]: list("abc")}, protocol=2)
    files[f"{kind.base_folder}/{kind.meta['filename']}"] = meta
    patch.setattr(kind, "meta", kind.meta | {"md5": md5(meta)})
    return World(files, list(files), lambda root: load_samples("cifar10", root))


def packed_cifar(patch: pytest.MonkeyPatch) -> World:
    world = cifar(patch)
    kind = vision.load_torchvision().CIFAR10
    archive = pack(world.files)
    patch.setattr(kind, "tgz_md5", md5(archive))
    patch.setattr(os, "access", lambda *_: False)  # else the folder, once unpacked, would be read
    return World({kind.filename: archive}, [kind.filename], world.read)


def png(patch: pytest.MonkeyPatch) -> World:
    domains = ("art_painting", "cartoon", "photo", "sketch")
    patch.setattr(pacs, "SIZES", dict.fromkeys(domains, 2))
    names = [f"PACS/{domain}/{kind}/1.png" for domain in domains for kind in ("dog", "house")]
    # smooth, so that the bytes that decide the form are as many as those of the pixels
    ramp = np.add.outer(np.arange(16), np.arange(16)).astype(np.uint8)[..., None].repeat(3, 2) * 4
    files: dict[str, bytes | str] = {name: _png(ramp + number) for number, name in enumerate(names)}
    return World(files, names, lambda root: load_samples("pacs", root, size=16))


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()


def jpeg(patch: pytest.MonkeyPatch) -> World:
    domains = ("Art", "Clipart", "Product", "Real World")
    patch.setattr(office_home, "SIZES", dict.fromkeys(domains, 1))
    names = [f"OfficeHome/{domain}/Bike/1.jpg" for domain in domains]
    files: dict[str, bytes | str] = {
        name: picture(seed, (16, 16), "JPEG") for seed, name in enumerate(names)
    }
    return World(
        files,
        names,
        lambda root: load_samples("office_home", root, size=16, classes=65),
        checked=False,
    )


def lists(patch: pytest.MonkeyPatch) -> World:
    files = {f"mini-imagenet/{name}": data for name, data in mini_files(patch).items()}
    victims = [name for name in files if name.endswith(".csv")]
    read = lambda root: load_samples("mini_imagenet", root, size=8)  # noqa: E731
    return World(files, victims, read, checked=False)


def clips(patch: pytest.MonkeyPatch) -> World:
    files = {f"{FOLDER}/{name}": data for name, data in clip_files(patch).items()}
    read = lambda root: load_samples("speech_commands", root)  # noqa: E731
    return World(files, list(files), read, checked=False)


def activities(patch: pytest.MonkeyPatch) -> World:
    patch.setattr(har, "SIZES", {"train": 4, "test": 3})
    files: dict[str, bytes | str] = {}
    rng = np.random.default_rng(0)
    for part, windows in har.SIZES.items():
        rows = (
            " ".join(f"{value: .4e}" for value in row) for row in rng.normal(size=(windows, 561))
        )
        files[f"UCI HAR Dataset/{part}/X_{part}.txt"] = "\n".join(rows) + "\n"
        for name in ("y", "subject"):
            files[f"UCI HAR Dataset/{part}/{name}_{part}.txt"] = "".join(
                f"{n % 6 + 1}\n" for n in range(windows)
            )
    return World(
        files,
        list(files),
        lambda root: load_samples("har", root, form="features", classes=6),
        checked=False,
        tried=15,
    )


def digits(patch: pytest.MonkeyPatch) -> World:
    patch.setattr(digit5, "SIZES", dict.fromkeys(digit5.SIZES, (2, 2)))
    labels = {"label_train": np.eye(10)[[1, 2]], "label_test": np.eye(10)[[3, 4]]}
    cells = np.empty((2, 2), object)
    for part in (0, 1):
        cells[part, 0], cells[part, 1] = image(2, 1, 28, 28) / 255, np.array([[2], [5]], np.uint8)
    columns = {"train_label": np.array([[4], [0]]), "test_label": np.array([[6], [0]])}
    arrays: dict[str, dict] = {
        "mnist_data": {"train_32": image(2, 32, 32), "test_32": image(2, 32, 32), **labels},
        "mnistm_with_label": {"train": image(2, 28, 28, 3), "test": image(2, 28, 28, 3), **labels},
        "svhn_train_32x32": {"X": image(32, 32, 3, 2), "y": np.array([[10], [1]], np.uint8)},
        "svhn_test_32x32": {"X": image(32, 32, 3, 2), "y": np.array([[10], [2]], np.uint8)},
        "syn_number": {
            "train_data": image(2, 32, 32, 3),
            "test_data": image(2, 32, 32, 3),
            **columns,
        },
        "usps_28x28": {"dataset": cells},
    }
    files: dict[str, bytes | str] = {}
    for name, own in arrays.items():
        data = io.BytesIO()
        savemat(data, own)
        files[f"Digit-Five/{name}.mat"] = data.getvalue()
    return World(files, list(files), lambda root: load_samples("digit5", root), checked=False)


def texts(patch: pytest.MonkeyPatch) -> World:
    """With whatever md5: how the table is read, should another one be published."""
    rows = "".join(
        f'"{kind % 4 + 1}","Title {kind}","Some words, ""quoted"" \\and more"\n'
        for kind in range(8)
    )
    files: dict[str, bytes | str] = {"ag_news_csv/train.csv": rows, "ag_news_csv/test.csv": rows}
    patch.setattr(ag_news, "fetch_file", lambda source, name, *_: source.folder / name)
    return World(
        files,
        list(files),
        lambda root: load_samples("ag_news", root, length=8, classes=4),
        checked=False,
    )


def leaf(name: str, classes: int) -> World:
    files: dict[str, bytes | str] = {**written(name)[0]}
    return World(
        files, list(files), lambda root: load_samples(name, root, classes=classes), checked=False
    )


def parts(patch: pytest.MonkeyPatch) -> World:
    data, y = io.BytesIO(), kinds(40)
    flat(partition.iid(y, 5, 0), data)
    return World(
        {"partition.npz": data.getvalue()},
        ["partition.npz"],
        lambda root: partition.file(y, 5, 0, path=root / "partition.npz"),
    )


def values(patch: pytest.MonkeyPatch) -> World:
    data = io.BytesIO()
    torch.save(
        {"fc.weight": torch.arange(1200.0).view(40, 30), "fc.bias": torch.arange(40.0)}, data
    )
    return World(
        {"net.pt": data.getvalue()},
        ["net.pt"],
        lambda root: state_dict.read_state_dict(root / "net.pt"),
    )


WORLDS: dict[str, Callable[[pytest.MonkeyPatch], World]] = {
    "npz": lambda patch: own(False),
    "npz compressed": lambda patch: own(True),
    "idx.gz": gzipped,
    "idx": plain,
    "cifar": cifar,
    "cifar packed": packed_cifar,
    "png": png,
    "jpeg": jpeg,
    "lists": lists,
    "wav": clips,
    "text": activities,
    "csv": texts,
    "mat": digits,
    "json of images": lambda patch: leaf("femnist", 62),
    "json of texts": lambda patch: leaf("shakespeare", 80),
    "partition": parts,
    "weights": values,
}


# Damage


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """One fault, as a bad disk or a broken transfer makes it; half of them near the ends, where
    headers are.
    """
    ends = rng.random() < 0.5
    near = int(rng.integers(min(len(data), 200)))
    at = (
        (near if rng.random() < 0.5 else len(data) - 1 - near)
        if ends
        else int(rng.integers(len(data)))
    )
    bad = bytearray(data)
    match int(rng.integers(6)):
        case 0:
            bad[at] ^= 1 << int(rng.integers(8))
        case 1:
            bad[at] = int(rng.integers(256))
        case 2:
            number = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
            bad[at : at + 4] = struct.pack(rng.choice(["<I", ">I"]), number)[: len(bad) - at]
        case 3:
            del bad[at:]
        case 4:
            del bad[at : at + int(rng.integers(1, 40))]
        case _:
            bad[at:at] = rng.bytes(int(rng.integers(1, 40)))
    return bytes(bad)


def same(a: object, b: object) -> bool:
    """Whether two things that were read hold the same numbers."""
    if isinstance(a, torch.Tensor | np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else a == b


def form(samples: Samples) -> tuple:
    """But for the number of samples, which in a table is the number of lines."""
    return samples.x.shape[1:], samples.x.dtype, samples.y.shape[1:], samples.y.dtype


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


@pytest.mark.parametrize(
    "name", [name for name in WORLDS if name != "mat"]
)  # some damage crashes SciPy itself
def test_damaged_files(tmp_path, monkeypatch, name):
    world = WORLDS[name](monkeypatch)
    monkeypatch.setattr("fedpfl.data.datasets.shared.source._write_cache", lambda *_: None)
    write(
        tmp_path,
        {
            file: data.encode() if isinstance(data, str) else data
            for file, data in world.files.items()
        },
    )
    whole, before = world.read(tmp_path), sorted(tmp_path.rglob("*"))
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    named = 0
    for number in range(world.tried):
        victim = tmp_path / world.victims[number % len(world.victims)]
        data = victim.read_bytes()
        victim.write_bytes(damaged(data, rng))
        found = attempt(lambda: world.read(tmp_path))
        if isinstance(found, str):
            named += victim.name in found
            assert victim.name in found or str(victim.parent) in found or str(tmp_path) in found
        elif world.checked:
            assert same(found, whole), f"{victim}, damage {number}"
        else:
            assert form(found) == form(whole)
            assert len(found.y) == len(found.x)
            assert (
                len(found.x) == len(whole.x) or name == "csv"
            )  # whose number of lines only the md5 tells
            assert torch.isfinite(found.x.float()).all()
            assert int(found.y.max()) < found.classes
        victim.write_bytes(data)
    assert named > world.tried / 4
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind
    assert same(world.read(tmp_path), whole)


def test_a_damaged_cache_is_made_again(tmp_path, monkeypatch):
    world = png(monkeypatch)
    write(tmp_path, world.files)
    whole = world.read(tmp_path)
    (cache,) = (tmp_path / "cache").iterdir()
    data, rng = cache.read_bytes(), np.random.default_rng(0)
    for _ in range(TRIED):
        cache.write_bytes(damaged(data, rng))
        assert same(attempt(lambda: world.read(tmp_path)), whole)


# Archives that claim what is not so


class Trap:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def header(text: str, version: int = 1) -> bytes:
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return npy.MAGIC_PREFIX + bytes([version, 0]) + size + text.encode()


def array(shape: str, data: bytes = b"", kind: str = "|u1", version: int = 1) -> bytes:
    return (
        header(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n", version)
        + data
    )


def archive(path: Path, kind: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    whole = {"x": array("(4, 8, 8)", bytes(256)), "y": array("(4,)", bytes(4))}
    with zipfile.ZipFile(path, "w", kind) as zipped:
        for name, data in (whole | members).items():
            zipped.writestr(f"{name}.npy", data)
    return path


CLAIMS = {
    "negative": array("(-4, 8, 8)", bytes(256)),
    "twice negative": array("(-4, -64)", bytes(256)),
    "no numbers": array("('4', 8, 8)", bytes(256)),
    "wide texts": array("(4,)", bytes(16), "<U1000000000"),
    "nested without end": array("(" * 5_000 + ")" * 5_000, bytes(256)),
    "not a literal": header("__import__('os').mkdir('trap')" + " " * 40),
    "of an unknown type": array("(4, 8, 8)", bytes(256), "|q9"),
    "a long header": header("{" + " " * 2**20, 2),
    "a header that is not all there": npy.MAGIC_PREFIX + b"\x02\x00\xff\xff\xff\xff{",
}


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_arrays_that_claim_what_is_not_so(tmp_path, claim, kind):
    path = archive(tmp_path / "own.npz", kind, x=CLAIMS[claim])
    said = attempt(lambda: load_samples("npz", tmp_path, path=path))
    assert f"{path} cannot be read as an .npz archive of plain arrays (" in said
    assert said.endswith("; save it with np.savez(path, x=x, y=y)")


def test_objects_are_never_unpickled(tmp_path):
    for key in ("x", "y", "groups"):
        path = archive(
            tmp_path / "own.npz",
            **{key: array("(4,)", pickle.dumps(Trap(tmp_path / "trap")), "|O")},
        )
        said = attempt(lambda p=path: load_samples("npz", tmp_path, path=p))
        assert "(an array has Python objects in it, where numbers belong)" in said
    path.write_bytes(pickle.dumps(Trap(tmp_path / "trap")))
    assert "cannot be read as an .npz archive" in attempt(
        lambda: load_samples("npz", tmp_path, path=path)
    )
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (8, b"\x01", "is encrypted"),
        (8, b"\x40", "strong encryption"),
        (10, b"\x63", "compression method is not supported"),
        (6, b"\xff", "zip file version"),
        (
            32,
            b"\x3b",
            "its table of contents is damaged",
        ),  # a comment as long as the next entry, which would be gone
    ],
)
def test_tables_of_contents(tmp_path, at, value, message):
    path = archive(tmp_path / "own.npz", test_from=array("()", struct.pack("<q", 3), "<i8"))
    data = path.read_bytes()
    at += data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)  # of y
    path.write_bytes(data[:at] + value + data[at + 1 :])
    assert message in attempt(lambda: load_samples("npz", tmp_path, path=path))


def test_an_array_whose_name_is_damaged_is_not_taken_for_absent(tmp_path):
    path = archive(tmp_path / "own.npz", test_from=array("()", struct.pack("<q", 3), "<i8"))
    data = path.read_bytes()
    at = data.rindex(b"test_from.npy")
    path.write_bytes(data[:at] + b"tast_from.npy" + data[at + 13 :])
    assert "(its part tast_from.npy is damaged)" in attempt(
        lambda: load_samples("npz", tmp_path, path=path)
    )


def test_names_that_no_terminal_shows(tmp_path):
    with zipfile.ZipFile(tmp_path / "own.npz", "w") as zipped:
        for number in range(500):
            zipped.writestr(f"a\n\x1b[31m{number}.npy", array("(4,)", bytes(4)))
    said = attempt(lambda: load_samples("npz", tmp_path, path=tmp_path / "own.npz"))
    assert "own.npz has no array 'x', only a\\n\\x1b[31m0, a\\n\\x1b[31m1, " in said
    assert said.isprintable()


def test_what_else_is_in_the_archive_is_left_alone(tmp_path):
    path = archive(tmp_path / "own.npz", notes=b"no array", other=CLAIMS["negative"])
    assert len(load_samples("npz", tmp_path, path=path, classes=2).y) == 4


# IDX files that claim what is not so


def shaped(*axes: int) -> bytes:
    return bytes([0, 0, 8, len(axes)]) + struct.pack(f">{len(axes)}i", *axes)


BAD_IDX = [
    *(shaped(-6, 4, 5) + bytes(120), shaped(-6, -4, 5) + bytes(120), shaped(-1, 4, 5) + bytes(120)),
    *(shaped(*[2**31 - 1] * 255), shaped(*[1] * 255) + bytes(1), shaped() + bytes(9)),
    *(shaped(2**31 - 1, 2**31 - 1) + bytes(9), shaped(65536, 65535) + bytes(9)),
    *(shaped(6, 4, 6) + bytes(120), shaped(6, 4, 5) + bytes(121), shaped(6, 4, 5)[:9]),
    b"\0\0\x0d\3" + shaped(6, 4, 5)[4:] + bytes(480),
]


@pytest.mark.parametrize("bad", BAD_IDX, ids=range(12))
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_that_claim_what_is_not_so(tmp_path, monkeypatch, bad, packed):
    world = (gzipped if packed else plain)(monkeypatch)
    victim = world.victims[0]
    write(tmp_path, world.files | {victim: gzip.compress(bad) if packed else bad})
    assert f"{victim} is corrupt: " in attempt(lambda: world.read(tmp_path))


@pytest.mark.parametrize("world", [gzipped, plain])
def test_images_and_labels_of_other_numbers(tmp_path, monkeypatch, world):
    """Also where they are as many in all: the labels would be those of other images."""
    whole = world(monkeypatch)
    train, test = (name for name in whole.victims if "labels" in name)
    pack_ = gzip.compress if world is gzipped else bytes
    write(tmp_path, whole.files | {train: pack_(idx(kinds(5))), test: pack_(idx(kinds(4)))})
    assert "part 1 of 2 has 6 samples, but 5 labels" in attempt(lambda: whole.read(tmp_path))


# Files that are none


@pytest.mark.parametrize(
    "name",
    [
        *("npz", "idx", "png", "lists", "wav", "text", "mat", "json of texts", "partition"),
        *("weights", "cifar"),
    ],
)
def test_pipes_are_not_waited_for(tmp_path, monkeypatch, name):
    world = WORLDS[name](monkeypatch)
    write(
        tmp_path,
        {
            file: data.encode() if isinstance(data, str) else data
            for file, data in world.files.items()
        },
    )
    for victim in world.victims:
        data = (tmp_path / victim).read_bytes()
        (tmp_path / victim).unlink()
        os.mkfifo(tmp_path / victim)
        said = attempt(lambda: world.read(tmp_path))
        assert isinstance(said, str)
        assert Path(victim).name in said or str(tmp_path) in said
        (tmp_path / victim).unlink()
        (tmp_path / victim).write_bytes(data)


def test_what_the_system_refuses_is_not_called_corrupt(tmp_path, monkeypatch):
    path = archive(tmp_path / "own.npz")

    def refuse(self, *args):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    said = attempt(lambda: load_samples("npz", tmp_path, path=path))
    assert said == f"{path} cannot be read: Permission denied; mend that and start again"


@pytest.mark.parametrize(("at", "bit"), [(49, 1), (52, 0)])
def test_damage_of_a_png_that_pillow_overlooks(tmp_path, monkeypatch, at, bit):
    """It stops at the last pixel, before the checksum that tells."""
    world = png(monkeypatch)
    data = bytearray(world.files[world.victims[0]])
    data[at] ^= 1 << bit
    write(tmp_path, world.files | {world.victims[0]: bytes(data)})
    assert f"{world.victims[0]} is not as published: broken PNG file" in attempt(
        lambda: world.read(tmp_path)
    )


# Readers


def loop(source):
    return loop(source)


READERS = {
    "absent key": (lambda source: {}["arr_0"], "KeyError: 'arr_0'"),
    "nothing": (lambda source: None, "AttributeError: 'NoneType' object has no attribute 'x'"),
    "lists": (
        lambda source: Raw([1, 2], [0, 1]),
        "AttributeError: 'list' object has no attribute 'ndim'",
    ),
    "division": (lambda source: 1 / 0, "ZeroDivisionError: division by zero"),
    "recursion": (loop, "maximum recursion depth exceeded"),
    "lines": (lambda source: np.zeros(3).reshape("a\nb"), "TypeError: "),
    "no message": (
        lambda source: (_ for _ in ()).throw(MemoryError),
        "MemoryError; put good copies",
    ),
}


@pytest.mark.parametrize("case", READERS)
def test_mistakes_of_a_readers_author(tmp_path, monkeypatch, case):
    read, message = READERS[case]
    monkeypatch.setattr(read, "__qualname__", "read_mine")
    monkeypatch.setitem(DATA_SETS, "mine", read)
    said = attempt(lambda: load_samples("mine", tmp_path))
    assert said.startswith(f"data set mine in {tmp_path} cannot be read: ")
    assert message in said
    assert "mend its reader read_mine (hydra.verbose=true tells where it failed)" in said


def test_on_the_command_line(tmp_path):
    path = archive(tmp_path / "own.npz", x=CLAIMS["negative"])
    result = run_command(*TINY, "dataset=npz", "dataset.path=own.npz", cwd=tmp_path)
    assert result.code == 2
    assert [line.split(" (")[0] for line in result.complaints] == [
        "fedpfl: own.npz cannot be read as an .npz archive of plain arrays"
    ]
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == [path]
