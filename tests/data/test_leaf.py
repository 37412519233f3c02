"""LEAF's files: FEMNIST and Shakespeare as its scripts write them, their natural clients."""

import json
import random

import numpy as np
import pytest
import torch

from fedpfl.data.datasets import load_samples, shakespeare
from tests.conftest import read_cases
from tests.data.promises import assert_read, one_line
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
    if name == "femnist":
        y = [61 - n for size in (6, 5, 4, 3, 2, 1) for n in range(size)]
    else:
        users = [json.loads(data)["user_data"].values() for data in files.values()]
        y = [
            shakespeare.LETTERS.find(letter) for own in users for one in own for letter in one["y"]
        ]
    facts = {"groups": owners, "noted": ["has_all_classes"], "classes": classes}
    got = assert_read(name, tmp_path, np.concatenate(expected), y, 15, **facts)
    assert got.x.dtype == (torch.uint8 if name == "femnist" else torch.int32)
    assert list(got.group_names) == sorted(set(owners))


def test_all_data_have_no_test_part(tmp_path):
    files, expected, owners = written("femnist", ("all_data",))
    write(tmp_path, {file.replace("/data/", "/"): data for file, data in files.items()})
    facts = {"groups": owners, "noted": ["has_all_classes"], "classes": 62}
    y = [61 - n for size in (6, 5, 4) for n in range(size)]
    assert_read("femnist", tmp_path, np.concatenate(expected), y, **facts)


def first(value: object):
    return lambda x: [[value, *x[0][1:]], *x[1:]]


ERRORS = """
femnist | x=first(1.01) | train_9.json is not as published: pixels are not multiples of 1/255 from 0 to 1; put
femnist | y=lambda y: [62, *y[1:]] | labels must be from 0 to 61, found
shakespeare | x=["é" * 80] * 5 | train_9.json is not as published: a letter is none of LEAF's 80
"""
"""Data set | what is changed of a user | what is said."""


@pytest.mark.parametrize(("name", "values", "message"), read_cases(ERRORS, " | "))
def test_errors(name, values, message, tmp_path):
    files = written(name)[0]
    file = next(iter(files))
    body = json.loads(files[file])
    user = [*body["user_data"].values()][1 if name == "shakespeare" else 0]
    for key, value in eval(f"dict({values})", {"first": first}).items():
        user[key] = value(user[key]) if callable(value) else value
    write(tmp_path, files | {file: json.dumps(body)})
    classes = {"femnist": 62, "shakespeare": 80}[name]
    assert message in one_line(lambda: load_samples(name, tmp_path, classes=classes))
