"""Own data by every door: names, spelling, pictures, texts, parts and advice, as users write them."""

import unicodedata
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from fedpfl.config.dealing import deal_data, share_nothing
from fedpfl.config.plan import check_config
from fedpfl.data import datasets, partition
from fedpfl.data.datasets import memory
from fedpfl.data.datasets.shared.texts import find_class
from fedpfl.data.datasets.shared.words import encode_texts
from tests.command import compose_once, format_override
from tests.data.promises import build, one_line

ROWS = 12
NUMBERS = np.random.default_rng(0).normal(size=ROWS)


def load_frames(frames: dict, **options):
    held = memory.hold_data(frames if len(frames) > 1 else frames["a"])
    return datasets.load_samples("memory", Path("unused"), digest=held.digest, **options)


def load_files(frames: dict, folder: Path, suffix: str = ".csv", **options):
    folder.mkdir(exist_ok=True)
    for name, frame in frames.items():
        file = folder / f"{name}{suffix}"
        if suffix == ".xlsx":
            frame.to_excel(file, index=False)
        elif suffix == ".parquet":
            frame.to_parquet(file, index=False)
        else:
            frame.to_csv(file, index=False, sep="\t" if ".tsv" in suffix.lower() else ",")
    return datasets.load_samples("sites", Path("unused"), path=folder, **options)


def make_frame(**columns) -> pd.DataFrame:
    frame = pd.DataFrame({"a": NUMBERS})
    for name, values in columns.items():
        frame[name] = [values[row % len(values)] for row in range(ROWS)]
    return frame


# ---- A class is its name


@pytest.mark.parametrize(
    "labels", [("1", "2", "3", "4"), tuple(map(str, range(12))), ("5", "7", "10")]
)
def test_only_keeps_the_classes_that_it_names(labels):
    load = partial(load_frames, {"a": make_frame(y=labels)}, label="y")
    assert load().class_names == labels
    assert load(only=(int(labels[1]), labels[2])).class_names == labels[1:3]
    assert "dataset.only must be" in one_line(lambda: load(only=(99,)))


def test_a_class_without_a_name_goes_by_its_number():
    digits = datasets.load_samples("digits", Path("unused"), only=(3, 5, 7))
    assert digits.class_names == ("3", "5", "7")
    assert find_class(digits.class_names, 3, 5, "attack.target") == 1
    assert datasets.load_samples("digits", Path("unused"), only=(0, 1)).class_names == ()
    # Where names are no numbers, a number is a place.
    assert find_class(("cat", "dog"), 2, 1, "key") == find_class(("cat", "dog"), 2, "dog", "key")
    assert "below 3" in one_line(lambda: find_class((), 3, 3, "key"))


def test_an_attack_names_classes(tmp_path):
    for name in "ab":
        make_frame(y=["1", "2", "3", "4"]).to_csv(tmp_path / f"{name}.csv", index=False)
    words = ["dataset=sites", format_override("dataset.path", tmp_path), "dataset.label=y"]
    words += ["model=mlp", "method=fedavg", "attack=label_flip", "attack.clients=[0]"]
    run = build(*words, "attack.source=1", "attack.target=2")
    assert (run.adversary.attack.source, run.adversary.attack.target) == (0, 1)
    assert "attack.source must be one of 1, 2, 3, 4, got '0'" in one_line(
        lambda: build(*words, "attack.source=0", "attack.target=2")
    )


# ---- One spelling


NFD = unicodedata.normalize("NFD", "bénigne")


@pytest.mark.parametrize(
    ("written", "names"),
    [
        ([["bénigne", "x"], [NFD, "x"]], ("bénigne", "x")),
        ([["a", "b "], ["a", " b"]], ("a", "b")),
        ([["heart  attack", "none"], ["heart attack", "none"]], ("heart attack", "none")),
        ([["10", "010", "020"], ["10", "010", "020"]], ("010", "10", "020")),
        ([["None", "NA"], ["None", "NA"]], ("NA", "None")),
        ([["no", "yes"], ["No", "yes"]], "'No' is 'no' at a"),
        ([["+1", "-1"], ["1", "-1"]], "'1' is '+1' at a"),
        ([["pre-op", "x"], ["pre\u2013op", "x"]], "'pre\u2013op' is 'pre-op' at a"),
        ([["01", "02"], ["1", "2"]], "'1' is '01' at a"),
        ([["no", "yes"], ["0", "1"]], "labels are texts, and those of"),
        ([["Straße", "x"], ["STRASSE", "x"]], "'STRASSE' is 'Straße' at"),
    ],
)
@pytest.mark.parametrize("door", ["files", "by"])
def test_labels_have_one_spelling(door, written, names, tmp_path):
    frames = {name: make_frame(y=own) for name, own in zip("ab", written, strict=True)}

    def load():
        if door == "files":
            return load_files(frames, tmp_path, label="y")
        one = pd.concat([frame.assign(site=name) for name, frame in frames.items()])
        return load_frames({"a": one}, label="y", by="site")

    if isinstance(names, tuple):
        assert load().class_names == names
    else:
        assert names.replace(" at a", "") in one_line(load)


@pytest.mark.parametrize("values", [["B", "b"], ["north", "North "], ["Ä", "ä"], ["B", "B\u200b"]])
def test_clients_and_categories_have_one_spelling(values):
    frame = make_frame(site=values, y=["u", "v", "w"])
    for options in ({"by": "site"}, {"categories": ("site",)}):
        told = one_line(lambda own=options: load_frames({"a": frame}, label="y", **own))
        assert "write it alike" in told


# ---- Pictures are what viewers show


@pytest.mark.parametrize(
    "kind", ["turned", "mirrored", "transparent", "palette", "grey", "tiff", "bmp"]
)
def test_pictures_are_turned_and_lie_on_white(kind, tmp_path):
    pixels = np.full((8, 8, 3), 255, np.uint8)
    pixels[:4] = 0
    image, orientation, suffix = Image.fromarray(pixels), 1, "png"
    if kind in ("turned", "mirrored"):
        orientation = {"turned": 3, "mirrored": 4}[kind]
        image = image.rotate(180) if kind == "turned" else image.transpose(1)
    elif kind == "grey":
        image = Image.new("LA", (8, 8), (0, 0))
        image.paste((0, 255), (0, 0, 8, 4))
    elif kind in ("transparent", "palette"):
        image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
        image.paste((0, 0, 0, 255), (0, 0, 8, 4))
        image = image.quantize(4) if kind == "palette" else image
    else:
        suffix = kind
    exif = Image.Exif()
    exif[0x0112] = orientation
    for label in ("u", "v"):
        (tmp_path / "a" / label).mkdir(parents=True)
        options = {} if suffix == "bmp" else {"exif": exif}
        image.save(tmp_path / "a" / label / f"1.{suffix}", **options)
    samples = datasets.load_samples("sites", Path("unused"), path=tmp_path, size=8)
    assert samples.x[0, :, :4].max() == 0
    assert samples.x[0, :, 4:].min() == 255


# ---- Texts in any language


@pytest.mark.parametrize(
    ("good", "bad"),
    [("很好看", "很难看"), ("хорошо", "плохо"), ("été", "ete"), ("👍", "👎"), ("अच्छा", "बुरा")],
)
def test_texts_of_any_script_are_told_apart(good, bad):
    ids = encode_texts([good, bad, good], 3, 100, 8, "d")
    assert ids[0].tolist() == ids[2].tolist() != ids[1].tolist()
    assert (ids > 1).any(1).all()


def test_texts_without_a_word_are_counted(caplog):
    encode_texts(["word", "...", " "], 3, 100, 8, "d")
    assert "d: 2 of 3 texts have no word" in caplog.text
    assert "no text has a word" in one_line(lambda: encode_texts(["!", "?"], 2, 100, 8, "d"))
    assert encode_texts(["Don't stop-2"], 1, 100, 4, "d").tolist() == [[3, 5, 4, 2]]
    words = encode_texts(["\u0645\u064f\u062d", "\u05e9\u05b8\u05dd"], 2, 100, 4, "d")
    assert (words > 0).sum() == 2  # vowel signs of Arabic and Hebrew cut no word


# ---- What comes in the wrong container


class Jittered(list):
    """Items with a mirrored input, or another label, by chance."""

    def __getitem__(self, index):
        share, label_share = super().__getitem__(index)
        x = np.arange(4.0) + index
        label = index + (np.random.rand() < label_share)
        return x[::-1].copy() if np.random.rand() < share else x, label % 2


def test_random_transforms_are_refused():
    for shares, is_told in (((0, 0), False), ((0.2, 0), True), ((0, 0.5), True)):
        data = torch.utils.data.Subset(Jittered([shares] * 60), range(60))
        if is_told:
            assert "transform is random" in one_line(lambda own=data: memory.hold_data(own))
        else:
            memory.hold_data(data)


@pytest.mark.parametrize("names", [("train", "test"), ("Train", "val"), ("train_set", "testset")])
def test_parts_of_a_data_set_are_no_clients(names):
    frames = {name: make_frame(y=["u", "v"]) for name in names}
    part = {"a": make_frame(y=["u", "v"], part=names)}
    for load in (
        lambda: load_frames(part, label="y", by="part"),
        lambda: load_frames(frames, label="y"),
    ):
        assert "parts of a data set and no sites or clients" in one_line(load)


# ---- Rows of a patient stay together


def make_patients(folder: Path, rows: int = 240, patients: int = 40) -> Path:
    rng = np.random.default_rng(0)
    patient = rng.permutation(np.arange(rows) % patients)
    arrays = {"x": rng.normal(size=(rows, 3)), "y": rng.integers(0, 3, rows), "patient": patient}
    np.savez(folder / "own.npz", **arrays, groups=patient % 4)
    return folder / "own.npz"


PARTITIONS = """
iid validation=0.3
iid partition.samples_per_client=6
dirichlet partition.alpha=0.5
quantity partition.min_samples=2
extended_dirichlet partition.min_samples=1 partition.classes_per_client=2
shards partition.classes_per_client=2
shuffled_shards partition.classes_per_client=3 partition.test_fraction=0.3
fixed_dirichlet partition.train_samples=4 partition.test_samples=2 partition.alpha=100
groups validation=0.3
"""


@pytest.mark.parametrize("case", PARTITIONS.strip().splitlines())
def test_rows_of_a_patient_are_never_apart(case, tmp_path):
    scheme, *options = case.split()
    words = ["dataset=npz", format_override("dataset.path", make_patients(tmp_path))]
    words += ["clients=4", "model=mlp", "method=fedavg", f"partition={scheme}", *options]
    patient = np.load(tmp_path / "own.npz")["patient"]

    def find_leaks(*more: str) -> int:
        dealt = deal_data(check_config(compose_once(*words, *more)), share_nothing).federation
        train = {*patient[torch.cat(dealt.train)].tolist()}
        judged = torch.cat([*dealt.test, *dealt.validation])
        clients = [{*patient[own].tolist()} for own in dealt.train]
        apart = sum(map(len, clients)) - len(train) if scheme != "fixed_dirichlet" else 0
        return len(train & {*patient[judged].tolist()}) + apart

    assert find_leaks() > 0
    assert find_leaks("partition.together=patient") == 0


def test_patients_of_the_test_part_stay_there():
    rows = torch.arange(40)
    facts = {"test_from": 30, "units": rows // 3}
    samples = datasets.Samples("own", torch.zeros(40, 1), rows % 2, 2, (), (), **facts)
    dealt = partition.deal_samples(partition.shuffled_shards, samples, 2, 0, classes_per_client=1)
    assert np.concatenate(dealt.train).max() < 30 <= np.concatenate(dealt.test).min()


def test_what_cannot_be_kept_together_is_one_line(tmp_path):
    make_patients(tmp_path)
    own = {"name": "npz", "data_dir": tmp_path, "path": tmp_path / "own.npz"}
    assert "no array 'ward'" in one_line(lambda: datasets.load_samples(**own, together="ward"))
    told = one_line(lambda: datasets.load_samples("digits", tmp_path, together="patient"))
    assert "partition.together=patient: data set digits has no such column" in told
    frame = make_frame(y=["u", "v"], patient=["p", "q", "r"])
    samples = load_files({"a": frame, "b": frame}, tmp_path / "own", label="y", together="patient")
    assert samples.units.tolist() == [0, 1, 2] * 8
    assert samples.x.shape == (24, 1)


# ---- Advice quotes the cell


@pytest.mark.parametrize("cells", [["1", "2020-01-31", "2"], ["2020-01-31", "x"]])
def test_advice_quotes_the_cell(cells):
    frame = make_frame(b=cells, y=["u", "v"])
    told = one_line(lambda: load_frames({"a": frame}, label="y"))
    assert "data: column 'b' holds '2020-01-31' in row" in told
    assert "correct or empty it, name it in dataset.categories=[b], or leave it out" in told


# ---- Files of other programs


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".TSV.GZ", ".tsv", ".xlsx", ".parquet"])
def test_tables_of_all_kinds_are_one(suffix, tmp_path):
    pytest.importorskip({".xlsx": "openpyxl", ".parquet": "pyarrow"}.get(suffix, "pandas"))
    frames = {name: make_frame(ward=["01", "2"], y=["010", "NA"]) for name in "ab"}
    samples = load_files(frames, tmp_path, suffix, label="y", categories=("ward",))
    assert samples.group_names == ("a", "b")
    assert samples.class_names == ("010", "NA")
    assert samples.feature_names == ("a", "ward=01", "ward=2")
    np.testing.assert_array_equal(samples.x[:ROWS, 0], NUMBERS.astype(np.float32))
