"""Sites of a user's own: archives, tables and folders of images; what is wrong is one line."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedpfl.config.run import Run
from fedpfl.data import datasets
from fedpfl.data.fingerprint import fingerprint
from tests.command import format_override
from tests.conftest import read_cases
from tests.data.promises import build, one_line


def load(folder: Path, **options):
    return datasets.load_samples("sites", Path("unused"), path=folder, **options)


def write_archive(path: Path, samples: int = 6, shape=(1, 5, 5), dtype=np.uint8, **arrays) -> None:
    rng = np.random.default_rng(len(path.stem))
    x = (255 * rng.random((samples, *shape))).astype(dtype)
    np.savez(path, **{"x": x, "y": np.arange(samples) % 3, **arrays})


def write_table(path: Path, **columns) -> None:
    usual = {"age": [1, 2, 3, 4], "dose": [0.5, 1.5, 2.5, 3.5], "ward": list("abab")}
    pd.DataFrame({**usual, "sick": ["no", "yes", "no", "yes"], **columns}).to_csv(path, index=False)


def write_images(folder: Path, classes=("cat", "dog"), count: int = 3) -> None:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for place in range(count):
            pixels = np.full((9, 7, 3), 40 * number + place, np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{place}.png")


def test_test_parts_come_after_all_training_parts(tmp_path):
    write_archive(tmp_path / "a.npz", 4, test_from=3, y=np.array([10, 20, 10, 20]))
    write_archive(tmp_path / "b.npz", 5, test_from=2, y=np.array([20, 30, 10, 10, 30]))
    samples = load(tmp_path)
    assert (samples.group_names, samples.test_from) == (("a", "b"), 5)
    assert samples.groups.tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 1]
    assert samples.class_names == ("10", "20", "30")
    assert samples.y.tolist() == [0, 1, 0, 1, 2, 1, 0, 0, 2]


def test_tables_have_numbers_and_categories_with_one_meaning_at_all_sites(tmp_path):
    write_table(tmp_path / "a.csv", ward=list("aacc"))
    write_table(tmp_path / "b.csv", ward=list("bbbb"), sick=["maybe", "no", "no", "yes"])
    samples = load(tmp_path, **TABLE)
    assert samples.class_names == ("maybe", "no", "yes")
    assert samples.y.tolist() == [1, 2, 1, 2, 0, 1, 1, 2]
    assert samples.feature_names == ("age", "dose", "ward=a", "ward=b", "ward=c")
    assert samples.x[0].tolist() == [1, 0.5, 1, 0, 0]
    assert samples.x[2].tolist() == [3, 2.5, 0, 0, 1]
    assert samples.x[4].tolist() == [1, 0.5, 0, 1, 0]


def test_a_category_is_one_however_a_table_holds_it(tmp_path):
    """A number is one value; a code is the text that a table has, though all be digits at one."""
    for one, other, held in (
        ([1, 2, 1, 2], [1.0, 2.5, 2.0, 1.0], [0, 1, 0, 1, 0, 2, 1, 0]),
        (["01", "02", "01", "02"], ["01", "0A", "02", "01"], [0, 1, 0, 1, 0, 2, 1, 0]),
    ):
        write_table(tmp_path / "a.csv", ward=one)
        write_table(tmp_path / "b.csv", ward=other)
        samples = load(tmp_path, **TABLE)
        assert samples.x[:, 2:].tolist() == np.eye(3)[held].tolist()


def test_folders_of_class_folders_are_images(tmp_path):
    write_images(tmp_path / "north", ("cat", "dog"))
    write_images(tmp_path / "south", ("dog", "emu"), count=2)
    samples = load(tmp_path, size=8)
    assert samples.class_names == ("cat", "dog", "emu")
    assert samples.x.shape == (10, 3, 8, 8)
    assert samples.y.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert samples.groups.tolist() == [0] * 6 + [1] * 4


def two_archives(folder: Path, **second) -> None:
    write_archive(folder / "a.npz")
    write_archive(folder / "b.npz", **second)


def two_tables(folder: Path, **second) -> None:
    write_table(folder / "a.csv")
    write_table(folder / "b.csv", **second)


def spoil_image(folder: Path, kind: str) -> None:
    write_images(folder / "north")
    image = folder / "north" / "cat" / "1.png"
    if kind == "cut":
        image.write_bytes(image.read_bytes()[:40])
    elif kind == "deep":
        Image.fromarray(np.full((9, 7), 3000, np.uint16)).save(image)
    else:
        pages = [Image.new("L", (9, 7), colour) for colour in (0, 255)]
        pages[0].save(image.with_suffix(".tif"), save_all=True, append_images=pages[1:])


TABLE = {"label": "sick", "categories": ("ward",)}
FAULTS = """
no folder | f.rmdir() | {} | is no folder; give one in which every entry is
empty | None | {} | is empty; every entry of it is to be a site
stray file | (two_archives(f), (f / "notes.txt").write_text("x")) | {} | notes.txt is no site
mixed kinds | (two_archives(f), write_table(f / "c.csv")) | TABLE | c.csv is a table, and not all are; give all one kind
another shape | two_archives(f, shape=(1, 6, 5)) | {} | b.npz: samples are uint8 [1, 6, 5]
no sample | two_archives(f, x=np.zeros((0, 5)), y=np.zeros(0, int)) | {} | b.npz has no sample; leave it out
no label given | two_tables(f) | {"categories": ("ward",)} | dataset.label must name the column of the labels, such as age, dose
another column | two_tables(f, blood=[1, 2, 3, 4]) | TABLE | b.csv differs from a.csv in columns blood
a value is missing | two_tables(f, dose=[1, None, 2, 3]) | TABLE | b.csv: column 'dose' has no value in row 2
a text among numbers | two_tables(f, dose=[1, 2, "?", 3]) | TABLE | b.csv: column 'dose' holds '?' in row 3, no number
too large for float32 | two_tables(f, dose=[1, 2, 1e+300, 3]) | TABLE | b.csv: column 'dose': a number in row 3 is not
empty table | (f / "a.csv").write_text("age,sick\\n") | TABLE | a.csv has no row
table options | two_archives(f) | {"label": "sick"} | are for tables, and a.npz is none
row numbers | (write_table(f / "a.csv"), pd.read_csv(f / "a.csv").to_csv(f / "a.csv")) | TABLE | a.csv: column 1 has no name
more cells than names | (f / "a.csv").write_text("age,sick\\n1,no,7\\n2,yes,8\\n") | {"label": "sick"} | a.csv: a row has more cells
another spelling of a category | two_tables(f, ward=list("Ab") * 2) | TABLE | b.csv: ward 'A' is 'a' at a.csv; write it alike
an image of 16 bits | spoil_image(f, "deep") | {} | 1.png cannot be read as an image: mode I;16 has more than 8 bits
an image of two pages | spoil_image(f, "pages") | {} | 1.tif cannot be read as an image: it has 2 pages
a category that is the label | two_tables(f) | {**TABLE, "categories": ("sick",)} | dataset.categories has sick, which is no feature
labels in words | two_tables(f) | {**TABLE, "task": "regression"} | holds 'no' in row 1, no number; labels of this task are numbers
a column twice | (f / "a.csv").write_text("age,age,sick\\n1,2,no\\n") | {"label": "sick"} | a.csv has column 'age' twice
a cut image | spoil_image(f, "cut") | {} | 1.png cannot be read as an image:
"""
"""Name | what is done in the folder `f` | options | what is said."""


@pytest.mark.parametrize(("fault", "action", "options", "text"), read_cases(FAULTS, " | "))
def test_what_is_wrong_with_a_site_is_one_line_that_names_it(
    fault, action, options, text, tmp_path
):
    (tmp_path / "sites").mkdir()
    eval(action, {**globals(), "f": tmp_path / "sites"})
    assert text in one_line(lambda: load(tmp_path / "sites", **eval(options)))


def test_a_folder_of_sites_is_a_federation(tmp_path):
    """A client is a site; all are split, or tested on their own test parts."""
    for kind in ("tables", "archives"):
        (tmp_path / kind).mkdir()
    for name in ("b", "a", "c"):
        write_table(tmp_path / "tables" / f"{name}.csv")
        write_archive(tmp_path / "archives" / f"{name}.npz", 12, test_from=9)

    def build_sites(kind: str, *words: str) -> Run:
        place = format_override("dataset.path", tmp_path / kind)
        return build("dataset=sites", place, "model=mlp", *words)

    run = build_sites("tables", "dataset.label=sick", "dataset.categories=[ward]")
    assert run.config["partition"]["test_fraction"] == 0.25
    assert run.federation.client_names == ("a", "b", "c")
    assert run.federation.train_sizes.tolist() == [3, 3, 3]
    assert sorted(torch.cat(build_sites("archives").federation.test).tolist()) == list(
        range(27, 36)
    )
    told = one_line(lambda: build("dataset=sites"))
    assert told == "dataset.path has no value; set it with dataset.path=..."


def test_names_of_classes_leave_the_fingerprints_of_data_without_them():
    samples = datasets.load_samples("digits", Path("unused"))
    named = replace(samples, class_names=tuple("abcdefghij"))
    assert fingerprint(replace(samples, class_names=())) == fingerprint(samples)
    assert fingerprint(named) != fingerprint(samples)
