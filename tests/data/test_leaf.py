"""LEAF's files: FEMNIST and Shakespeare as its scripts write them, their natural clients."""

import json
import random
import string

import numpy as np
import pytest
import torch

from fedpfl.data.datasets import load_samples, shakespeare
from tests.command import format_override
from tests.conftest import read_cases
from tests.data.promises import assert_promises, build, one_line
from tests.data.test_datasets import write

WRITERS = {
    "f1": {"f0001_41": (6, 3), "f0000_14": (5, 2)},
    "f2": {"f0002_07": (4, 1)},
}  # by file: samples of both parts
ROLES = {
    "f1": {"HAMLET_HAMLET": (6, 3), "HAMLET_CLAUDIUS": (5, 2)},
    "f2": {"KING_LEAR_FOOL": (4, 1)},
}
LINE = "To be, or not to be: that is the question;\n"


def images(samples: int, seed: str) -> tuple[dict, np.ndarray]:
    """Of a user, as LEAF has them, whatever it rounds to, and as they are to be read."""
    draw = np.random.default_rng(sum(seed.encode()))
    pixels = draw.integers(0, 256, (samples, 784), dtype=np.uint8)
    held = {"x": (pixels / 255).round(4).tolist(), "y": [61 - n for n in range(samples)]}
    return held, pixels.reshape(-1, 1, 28, 28)


def texts(samples: int, seed: str) -> tuple[dict, np.ndarray]:
    """Windows of 80 letters of a line that spaces come before, as LEAF cuts them, and its first
    letter.
    """
    line, places = " " * 79 + "\n" + LINE, range(len(LINE))
    starts = random.Random(seed).sample(places, samples)
    x = [line[start : start + 80] for start in starts]
    held = {"x": x, "y": [line[start + 80] for start in starts]}
    return held, np.array([[*map(shakespeare.LETTERS.find, own)] for own in x])


SETS = {"femnist": (WRITERS, images), "shakespeare": (ROLES, texts)}


def written(
    name: str, folders: tuple[str, ...] = ("train", "test")
) -> tuple[dict[str, str], list, list]:
    """LEAF's files below its folder `data`, and whose samples are to be read, in order."""
    users, make = SETS[name]
    files, expected, owners = {}, [], []
    for part, folder in enumerate(folders):
        for file, own in users.items():
            held, counts = {}, []
            for user, sizes in own.items():
                counts.append(sizes[part])
                held[user], x = make(sizes[part], user + folder)
                expected.append(x)
                owners += [user] * sizes[part]
            # by_sample leaves users of one sample in user_data, but not in users
            body = {"users": [*own], "num_samples": counts, "hierarchies": [""] * len(own)}
            body["user_data"] = {**held, "too few": {"x": [], "y": []}}
            files[f"{name}/data/{folder}/all_data_{file}_niid_0_keep_0_{folder}_9.json"] = (
                json.dumps(body)
            )
    return files, expected, owners


@pytest.mark.parametrize("name", SETS)
def test_both_parts(tmp_path, name):
    classes = {"femnist": 62, "shakespeare": 80}[name]
    files, expected, owners = written(name)
    write(tmp_path, files)
    got = load_samples(name, tmp_path, classes=classes)
    assert got.x.dtype == (torch.uint8 if name == "femnist" else torch.int32)
    assert np.array_equal(got.x, np.concatenate(expected))
    assert [got.group_names[place] for place in got.groups] == owners
    assert list(got.group_names) == sorted(set(owners))
    assert got.test_from == 15
    if name == "femnist":
        assert got.y.tolist() == [61 - n for size in (6, 5, 4, 3, 2, 1) for n in range(size)]
    else:
        first = json.loads(files["shakespeare/data/train/all_data_f1_niid_0_keep_0_train_9.json"])
        letters = first["user_data"]["HAMLET_HAMLET"]["y"]
        assert [shakespeare.LETTERS[place] for place in got.y[:6]] == letters
        assert (got.mean, got.std) == ((), ())
    assert_promises(name, tmp_path, "has_all_classes", classes=classes)


def test_all_data_have_no_test_part(tmp_path):
    files, expected, owners = written("femnist", ("all_data",))
    write(tmp_path, {file.replace("/data/", "/"): data for file, data in files.items()})
    got = load_samples("femnist", tmp_path, classes=62)
    assert np.array_equal(got.x, np.concatenate(expected))
    assert [got.group_names[place] for place in got.groups] == owners
    assert got.test_from is None
    assert not (tmp_path / "femnist/data").exists()


def test_the_alphabet():
    signs = ("\n !\"&'(),-.", string.digits, ":;>?", string.ascii_uppercase, "[]")
    assert "".join((*signs, string.ascii_lowercase, "}")) == shakespeare.LETTERS


def changed(part: str, user: str | None = None, **new: object):
    """What makes the first file of a part another one."""

    def change(files: dict[str, str], name: str) -> dict[str, str]:
        file = next(file for file in files if f"/{part}/" in file)
        body = json.loads(files[file])
        for key, value in new.items():
            own = body["user_data"][user] if user else body
            own[key] = value(own[key]) if callable(value) else value
        return files | {file: json.dumps(body)}

    return change


def first(value: object):
    return lambda x: [[value, *x[0][1:]], *x[1:]]


WHOLE = "is not as published: "
ERRORS = f"""
writer | x=first(1.01) | train_9.json {WHOLE}pixels are not from 0 to 1; put a good copy there
writer | x=first(float("nan")) | train_9.json {WHOLE}pixels are not from 0 to 1; put a good copy there
writer | x=first(0.5) | pixels are not multiples of 1/255
writer | x=lambda x: [x[0][:-1], *x[1:]] | {WHOLE}setting an a
writer | y=lambda y: [62, *y[1:]] | train_9.json {WHOLE}classes are not whole numbers from 0 to 61
writer | y=lambda y: [[n] for n in y] | train_9.json {WHOLE}classes are not whole numbers from 0 to 61
writer | y=lambda y: y[1:] | f0001_41 has 6 samples and 5 labels, expected 6 of both
file | num_samples=[5, 5] | f0001_41 has 6 samples and 6 labels, expected 5 of both
file | users=["f0001_41", "x"] | {WHOLE}KeyError: 'x'
file | users=["f0001_41", "a\\nb"] | a user's name is 'a\\nb'
file | users=["f0001_41", "b" * 10_000] | a user's name is 'bbbb
file | users=[], num_samples=[] | {WHOLE}it has no users
role | x=["é" * 80] * 3 | test_9.json {WHOLE}'é' is none of LEAF's 80
role | y=["a", "", "c"] | a text has 0 letters, expected 1
role | x=["a" * 79] * 3 | a text has 79 letters, expected 80
"""
"""What is changed | how | what is said."""
CHANGED = {
    "writer": ("femnist", "train", "f0001_41"),
    "file": ("femnist", "train", None),
    "role": ("shakespeare", "test", "HAMLET_HAMLET"),
}


@pytest.mark.parametrize(("what", "values", "message"), read_cases(ERRORS, " | "))
def test_errors(what, values, message, tmp_path):
    name, part, user = CHANGED[what]
    change = changed(part, user, **eval(f"dict({values})", {"first": first}))
    write(tmp_path, change(written(name)[0], name))
    assert message in one_line(lambda: load_samples(name, tmp_path))


def test_users_twice_and_folders_without_files(tmp_path):
    files, _, _ = written("femnist")
    one = next(iter(files))
    write(tmp_path, files | {one.replace("train_9", "train_8"): files[one]})
    said = one_line(lambda: load_samples("femnist", tmp_path))
    assert "train_9.json is not as published: it has user f0001_41, whom all_data_f1_" in said
    write(tmp_path / "other", {one: files[one]})
    said = one_line(lambda: load_samples("femnist", tmp_path / "other"))
    assert "femnist/data is not as published: there are .json files neither in train/ and" in said


def test_natural_clients(tmp_path):
    """Each is tested on its own part; there may be fewer than users, but not more."""
    write(tmp_path, written("femnist")[0])
    own = ("dataset=femnist", format_override("data_dir", tmp_path), "partition=natural")
    for words, train, test in (
        ("clients=3", [5, 6, 4], [2, 3, 1]),
        ("clients=2 partition.min_samples=7", [5, 6], [2, 3]),
        ("clients=3 partition.test_fraction=0.5", [4, 5, 3], [3, 4, 2]),
    ):
        federation = build(*own, "model=mlp", *words.split()).federation
        assert federation.train_sizes.tolist() == train
        assert federation.test_sizes.tolist() == test
    said = one_line(lambda: build(*own, "model=mlp", "clients=4"))
    assert "clients to be at most the 3 groups or a multiple of them, got 4; set clients=3" in said
