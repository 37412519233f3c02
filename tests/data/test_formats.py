"""Texts, signals, sounds, folders of images from tiny files in the very same layout; cache; every
error's one line.
"""

import csv
import io
import wave
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fedpfl.data.datasets import (
    ag_news,
    camelyon17,
    cinic10,
    digit5,
    domainnet,
    fed_isic2019,
    har,
    heart_disease,
    load_samples,
    mini_imagenet,
    office_home,
    pacs,
    speech_commands,
    tiny_imagenet,
)
from fedpfl.data.datasets.shared import source
from fedpfl.data.fingerprint import fingerprint
from tests.conftest import read_cases
from tests.data.promises import assert_promises, assert_read, one_line
from tests.data.test_datasets import RNG, images, md5, pack, write


def refusal(name: str, folder: Path) -> str:
    return one_line(lambda: load_samples(name, folder))


def cached(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("*")) if (folder / "cache").is_dir() else []


COLUMNS = {f"Inertial Signals/{name}": 128 for name in har.SIGNALS} | {"X": 561}


@pytest.fixture
def activities(tmp_path, monkeypatch):
    """The files of 5 training and 3 test windows, with their numbers by part and name."""
    monkeypatch.setattr(har, "SIZES", {"train": 5, "test": 3})
    files, numbers = {}, {}
    for part, windows, persons in (("train", 5, [1, 1, 3, 3, 30]), ("test", 3, [2, 2, 4])):
        for name, columns in COLUMNS.items():
            table = RNG.normal(size=(windows, columns)).astype(np.float32)
            numbers[part, name] = table
            rows = ("  " + " ".join(f"{value: .7e}" for value in row) for row in table)
            files[f"{part}/{name}_{part}.txt"] = "\n".join(rows) + "\n"
        labels = np.arange(windows) + (1 if part == "train" else 4)
        files[f"{part}/y_{part}.txt"] = "".join(f"{label}\n" for label in labels)
        files[f"{part}/subject_{part}.txt"] = "".join(f"{person}\n" for person in persons)
    write(tmp_path / "UCI HAR Dataset", files)
    return files, numbers


def test_har(tmp_path, activities):
    _, numbers = activities
    parts = ("train", "test")
    x = [
        np.concatenate([numbers[part, f"Inertial Signals/{name}"] for part in parts])
        for name in har.SIGNALS
    ]
    facts = {
        "groups": ["1", "1", "3", "3", "30", "2", "2", "4"],
        "noted": ["has_all_classes"],
        "classes": 6,
    }
    y = [0, 1, 2, 3, 4, 3, 4, 5]
    assert_read("har", tmp_path, np.stack(x, 1), y, 5, **facts)
    assert_read("har", tmp_path, numbers["train", "X"], y, 5, **facts, form="features")


def test_ag_news(tmp_path, monkeypatch):
    rows = {
        "train": [
            (3, "Wall St. Bears", "Short-sellers, Wall Street's dwindling\\band of bears"),
            (1, 'A "quoted" title', "the band, the END"),
            (4, "Bears", "the the"),
        ],
        "test": [(2, "New words", "the bears " + "word " * 30)],
    }
    files = {}
    for part, own in rows.items():
        text = io.StringIO()
        csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(own)
        files[f"{part}.csv"] = text.getvalue().encode()
    monkeypatch.setattr(ag_news, "MD5", {part: md5(files[f"{part}.csv"]) for part in rows})
    folder = write(tmp_path / "ag_news_csv", files)
    # the 4 times; bears 3 times; twice each, by the alphabet, band and wall; then a, once
    the, bears, band, wall, a = range(2, 7)
    x = [
        [wall, 1, bears, 1, 1, wall, 1, 1],
        [a, 1, 1, the, band, the, 1, 0],
        [bears, the, the, 0, 0, 0, 0, 0],
        [1, 1, the, bears, 1, 1, 1, 1],
    ]
    facts = {"noted": ["has_all_classes"], "vocabulary": 7, "length": 8, "classes": 4}
    got = assert_read("ag_news", tmp_path, x, [2, 0, 3, 1], 3, **facts)
    assert (got.x.dtype, got.mean, got.std) == (torch.int32, (), ())
    (folder / "train.csv").write_bytes(b"another file")
    assert "train.csv is corrupt: md5 is" in refusal("ag_news", tmp_path)


def sound(samples: np.ndarray, rate: int = 16_000) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return data.getvalue()


def tone(hertz: float, seconds: float = 1.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(16_000 * seconds)) / 16_000)


@pytest.fixture
def clips(monkeypatch):
    """Five clips of two words, by name below their folder."""
    monkeypatch.setattr(speech_commands, "FILES", 5)
    return {
        "yes/aa_nohash_0.wav": sound(tone(440)),
        "yes/bb_nohash_0.wav": sound(tone(440, 0.5)),
        "yes/bb_nohash_1.wav": sound(tone(3000)),
        "no/aa_nohash_0.wav": sound(tone(880)),
        "no/cc_nohash_3.wav": sound(tone(880)),
        "validation_list.txt": "yes/bb_nohash_0.wav\n",
        "testing_list.txt": "yes/bb_nohash_1.wav\nno/cc_nohash_3.wav\n",
        "_background_noise_/tap.wav": sound(tone(50, 60)),
        "README.md": "Data Set v0.02",
    }


FOLDER = "SpeechCommands/speech_commands_v0.02"


def test_speech(tmp_path, clips):
    write(tmp_path / FOLDER, clips)
    groups, none = ("aa", "aa", "bb", "cc", "bb"), np.empty((0, 1, 32, 32))
    # no, yes; training, validation, test
    got = assert_read("speech_commands", tmp_path, none, [0, 1, 1, 0, 1], 3, groups=groups)
    assert got.x.shape == (5, 1, 32, 32)


def test_log_mel_by_its_definition():
    clip = RNG.normal(size=16_000).astype(np.float32)
    filters = speech_commands.mel_filters()
    got = speech_commands.log_mel_spectrogram(clip, filters)
    padded = np.concatenate([clip[512:0:-1], clip, clip[-2:-514:-1]])
    for time in (0, 1, 17, 31):
        window = padded[512 * time : 512 * time + 1024] * np.hanning(1025)[:-1]
        expected = np.log(filters @ abs(np.fft.rfft(window)) ** 2 + 1e-6)
        np.testing.assert_allclose(got[:, time], expected, rtol=1e-4, atol=1e-4)
    assert filters.shape == (32, 513)
    # Neighbouring triangles add up to 1.
    np.testing.assert_allclose(filters[:, 20:440].sum(0), 1, atol=1e-9)


def test_speech_from_the_archive_and_from_the_cache(tmp_path, clips, monkeypatch):
    data = pack({f"./{name}": content for name, content in clips.items()})
    monkeypatch.setattr(speech_commands, "MD5", md5(data))
    write(tmp_path, {"speech_commands_v0.02.tar.gz": data})
    with source.without_writing():  # as of a dry run
        first = load_samples("speech_commands", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["speech_commands_v0.02.tar.gz"]
    again = load_samples("speech_commands", tmp_path)
    assert (tmp_path / FOLDER / "yes").is_dir()
    assert torch.equal(first.x, again.x)
    assert len(cached(tmp_path)) == 1
    with monkeypatch.context() as patch:
        patch.setattr(speech_commands, "_read_clips", None)
        kept = load_samples("speech_commands", tmp_path)
    assert fingerprint(kept) == fingerprint(again)
    write(tmp_path / FOLDER, {"yes/aa_nohash_0.wav": sound(tone(1000))})
    assert not torch.equal(load_samples("speech_commands", tmp_path).x, again.x)


def picture(
    seed: int, size: tuple[int, int] = (8, 8), form: str = "PNG", mode: str = "RGB"
) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(data, form)
    return data.getvalue()


def pixels(data: bytes, size: int) -> np.ndarray:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


@pytest.fixture
def tiny(monkeypatch):
    """Two classes of two training images, three validation images; one is grey, as some are."""
    monkeypatch.setattr(tiny_imagenet, "SIZES", (4, 3))
    files: dict[str, bytes | str] = {"wnids.txt": "n02\nn01\n", "words.txt": "n01\tgoldfish\n"}
    for kind in ("n02", "n01"):
        for number in range(2):
            mode = "L" if (kind, number) == ("n01", 0) else "RGB"
            image = picture(len(files), (64, 64), "JPEG", mode)
            files[f"train/{kind}/images/{kind}_{number}.JPEG"] = image
        files[f"train/{kind}/{kind}_boxes.txt"] = "n02_0.JPEG\t0\t0\t1\t1\n"
    rows = []
    for number, kind in enumerate(("n02", "n01", "n02")):
        files[f"val/images/val_{number}.JPEG"] = picture(50 + number, (64, 64), "JPEG")
        rows.append(f"val_{number}.JPEG\t{kind}\t0\t32\t44\t62\n")
    files["val/val_annotations.txt"] = "".join(rows)
    files["test/images/test_0.JPEG"] = b"has no label"
    return files


def test_tiny_imagenet(tmp_path, tiny):
    write(tmp_path / "tiny-imagenet-200", tiny)
    names = [f"train/n0{1 + k}/images/n0{1 + k}_{n}.JPEG" for k in (0, 1) for n in (0, 1)]
    x = [
        pixels(tiny[name], 64) for name in (*names, *(f"val/images/val_{n}.JPEG" for n in range(3)))
    ]
    got = assert_read("tiny_imagenet", tmp_path, x, [0, 0, 1, 1, 1, 0, 1], 4)
    assert len(set(got.x[0, :, 5, 5].tolist())) == 1  # grey, in three channels
    small = load_samples("tiny_imagenet", tmp_path, size=16)
    assert np.array_equal(small.x[0], pixels(tiny[names[0]], 16))


@pytest.fixture
def cinic(monkeypatch):
    """Two images of each of the ten classes in every part."""
    monkeypatch.setattr(cinic10, "SIZE", 20)
    kinds = "abcdefghij"  # in the order of their names, as the published ones
    names = ("cifar10-train-{}.png", "n02119789_{}.png")
    parts = ("train", "valid", "test")
    places = [f"{part}/{kind}/{name}" for part in parts for kind in kinds for name in names]
    return {place.format(number): picture(number, (32, 32)) for number, place in enumerate(places)}


def test_cinic10(tmp_path, cinic, monkeypatch):
    write(tmp_path / "CINIC-10", cinic)
    x, y = [pixels(data, 32) for data in cinic.values()], [place // 2 for place in range(20)] * 3
    assert_read("cinic10", tmp_path, x, y, 40)  # after training and validation
    data = pack({f"./{name}": content for name, content in cinic.items()})
    monkeypatch.setattr(cinic10, "MD5", md5(data))
    assert_read("cinic10", write(tmp_path / "packed", {"CINIC-10.tar.gz": data}), x, y, 40)


@pytest.fixture
def mini(monkeypatch):
    """Lists of three parts and their images, by name below their folder."""
    monkeypatch.setattr(mini_imagenet, "SIZE", 6)
    files: dict[str, bytes | str] = {}
    for part, kinds in (("train", ["n5", "n1"]), ("val", ["n3"]), ("test", ["n2"])):
        rows = ["filename,label"]
        for kind in kinds:
            for number in range(2 if part == "train" else 1):
                name = f"{kind}{number:08}.jpg"
                files[f"images/{name}"] = picture(len(files), (12, 8), "JPEG")
                rows.append(f"{name},{kind}")
        files[f"{part}.csv"] = "\n".join(rows) + "\n"
    return files


def test_mini_imagenet(tmp_path, mini):
    write(tmp_path / "mini-imagenet", mini)
    x = [pixels(mini[f"images/{name}.jpg"], 84) for name in ("n500000000", "n500000001")]
    got = assert_read("mini_imagenet", tmp_path, x, [3, 3, 0, 0, 2, 1])
    assert got.x.shape == (6, 3, 84, 84)


DOMAINS = {
    "office_home": (
        office_home,
        "OfficeHomeDataset_10072016",
        ("Art", "Clipart", "Product", "Real World"),
    ),
    "pacs": (pacs, "PACS", ("art_painting", "cartoon", "photo", "sketch")),
}


@pytest.mark.parametrize("name", DOMAINS)
def test_domains(tmp_path, name, monkeypatch):
    module, base, domains = DOMAINS[name]
    assert tuple(module.SIZES) == domains
    monkeypatch.setattr(module, "SIZES", dict(zip(domains, (3, 2, 2, 2), strict=True)))
    files: dict[str, bytes | str] = {"README.txt": "no image"}
    for domain in domains:
        for kind in ("Alarm_Clock", "Bike"):
            files[f"{domain}/{kind}/00001.jpg"] = picture(len(files), (20, 10), "JPEG")
    files[f"{domains[0]}/Bike/00002.png"] = picture(99, (16, 16))
    write(tmp_path / base, files)
    got = load_samples(name, tmp_path, size=16)
    assert (got.group_names, got.test_from) == (domains, None)
    assert got.groups.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert got.y.tolist() == [0, 1, 1, 0, 1, 0, 1, 0, 1]
    assert_promises(name, tmp_path, size=16)
    for row, file in ((2, "Bike/00002.png"), (0, "Alarm_Clock/00001.jpg")):
        assert np.array_equal(got.x[row], pixels(files[f"{domains[0]}/{file}"], 16))
    if name == "office_home":
        (tmp_path / base / "Real World").rename(tmp_path / base / "RealWorld")
        assert torch.equal(load_samples(name, tmp_path, size=16).x, got.x)
    (tmp_path / base / domains[1] / "Bike/00001.jpg").unlink()
    assert f"{domains[1]} is not as published: 1 images, 2 are published" in refusal(name, tmp_path)


def test_domainnet(tmp_path, monkeypatch):
    domains = tuple(domainnet.SIZES)
    monkeypatch.setattr(domainnet, "SIZES", dict.fromkeys(domains, 3))
    files: dict[str, bytes | str] = {}
    for domain in domains:
        names = [f"{domain}/{kind}/{domain}_1.jpg" for kind in ("zebra", "ant", "bee")]
        files |= {name: picture(len(files) + place, (9, 12)) for place, name in enumerate(names)}
        files[f"{domain}_train.txt"] = f"{names[0]} 2\n{names[1]} 0\n"
        files[f"{domain}_test.txt"] = f"{names[2]} 1\n"
    write(tmp_path / "DomainNet", files)
    got = load_samples("domainnet", tmp_path, size=8)
    assert got.class_names == ("ant", "bee", "zebra")
    assert got.y.tolist() == [2, 0] * 6 + [1] * 6
    assert got.groups.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, *range(6)]
    assert (got.group_names, got.test_from) == (domains, 12)
    assert np.array_equal(got.x[3], pixels(files["infograph/ant/infograph_1.jpg"], 8))
    some = load_samples("domainnet", tmp_path, size=8, objects=("zebra", "bee"))
    assert (some.class_names, some.test_from, len(some.y)) == (("bee", "zebra"), 6, 12)
    assert torch.equal(some.x[0], got.x[0])
    assert_promises("domainnet", tmp_path, "has_all_classes", size=8)
    told = one_line(lambda: load_samples("domainnet", tmp_path, objects=("zebr",)))
    assert "dataset.objects must be some of" in told
    (tmp_path / "DomainNet/real_test.txt").write_text("")
    assert "real is not as published: 2 listed images" in refusal("domainnet", tmp_path)


def test_camelyon17(tmp_path, monkeypatch):
    monkeypatch.setattr(camelyon17, "SIZE", 4)
    rows, files = [",patient,node,x_coord,y_coord,tumor,slide,center,split"], {}
    for row, (patient, node, slide, center) in enumerate(
        [("004", 4, 0, 0), ("004", 4, 0, 0), ("017", 1, 5, 1), ("099", 2, 9, 4)]
    ):
        rows.append(f"{row},{patient},{node},{row},64,{row % 2},{slide},{center},0")
        folder = f"patient_{patient}_node_{node}"
        files[f"patches/{folder}/patch_{folder}_x_{row}_y_64.png"] = picture(row, (96, 96))
    write(tmp_path / "camelyon17_v1.0", {**files, "metadata.csv": "\n".join(rows)})
    got = load_samples("camelyon17", tmp_path, together="slide")
    assert got.x.shape == (4, 3, 32, 32)
    assert got.y.tolist() == [0, 1, 0, 1]
    assert [got.group_names[group] for group in got.groups] == ["0", "0", "1", "4"]
    assert got.units.tolist() == [0, 0, 1, 2]
    assert np.array_equal(got.x[2], pixels([*files.values()][2], 32))
    assert_promises("camelyon17", tmp_path)
    told = one_line(lambda: load_samples("camelyon17", tmp_path, together="ward"))
    assert "partition.together=ward: data set camelyon17 has no such column" in told


def test_fed_isic2019(tmp_path, monkeypatch):
    rows = ["image,MEL,NV,target,center,fold,fold2"]
    rows += ["a,0.0,1.0,1,0,train,train_0", "b,1.0,0.0,0,5,test,test_5", "c,0,0,7,5,train,train_5"]
    text = "\n".join(rows)
    monkeypatch.setattr(fed_isic2019, "MD5", md5(text.encode()))
    folder = "ISIC_2019_Training_Input_preprocessed"
    files = {f"{folder}/{name}.jpg": picture(ord(name), (30, 20), "JPEG") for name in "abc"}
    write(tmp_path / "fed_isic2019", {**files, "train_test_split": text})
    got = load_samples("fed_isic2019", tmp_path, size=16, classes=8)
    assert (got.y.tolist(), got.test_from) == ([1, 7, 0], 2)
    assert [got.group_names[group] for group in got.groups] == ["bcn", *["ham_vienna_dias"] * 2]
    assert got.class_names[7] == "SCC"
    assert np.array_equal(got.x[1], pixels(files[f"{folder}/c.jpg"], 16))
    assert_promises("fed_isic2019", tmp_path, "has_all_classes", size=16, classes=8)


def test_heart_disease(tmp_path, monkeypatch):
    """Rows as the clinics wrote them; an empty cell is ?, and so is a cholesterol of 0."""
    rows = {
        "cleveland": "63.0,1.0,1.0,145.0,233.0,1.0,2.0,150.0,0.0,2.3,3.0,0.0,6.0,0\n",
        "hungarian": "28,1,2,130,132,0,2,185,0,0,?,?,?,2\n",
        "switzerland": "32,1,1,95,0,?,0,127,0,.7,1,?,?,1\n",
        "va": "63,1,4,140,260,0,1,112,1,3,2,?,?,0\n",
    }
    monkeypatch.setattr(heart_disease, "MD5", {k: md5(v.encode()) for k, v in rows.items()})
    files = {f"processed.{clinic}.data": text for clinic, text in rows.items()}
    write(tmp_path / "heart_disease", files)
    got = load_samples("heart_disease", tmp_path)
    assert got.group_names == tuple(rows)
    assert got.y.tolist() == [0, 1, 1, 0]
    table = pd.DataFrame(got.x, columns=got.feature_names)
    assert table["chol"].isna().tolist() == [False, False, True, False]
    assert table["thal=6"].tolist() == [1, 0, 0, 0]
    assert table["oldpeak"].tolist() == pytest.approx([2.3, 0, 0.7, 3])
    assert got.missing == "mean"
    told = one_line(lambda: load_samples("heart_disease", tmp_path, missing="refuse"))
    assert "or set dataset.missing=mean" in told


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """The six .mat files with a few images each, and the images as they are to be read."""
    monkeypatch.setattr(digit5, "SIZES", dict.fromkeys(digit5.SIZES, (3, 2)))
    root = tmp_path / "Digit-Five"
    root.mkdir()

    one_hot = np.eye(10)[[7, 0, 3]], np.eye(10)[[1, 9]]
    mnist, mnist_m, syn = (
        [images(n, *shape) for n in (3, 2)] for shape in ((32, 32), (28, 28, 3), (32, 32, 3))
    )
    labels = {"label_train": one_hot[0], "label_test": one_hot[1]}
    savemat(
        root / "mnist_data.mat", {"train_32": mnist[0], "test_32": mnist[1].astype(float), **labels}
    )
    savemat(root / "mnistm_with_label.mat", {"train": mnist_m[0], "test": mnist_m[1], **labels})
    svhn = [images(32, 32, 3, n) for n in (3, 2)]
    for part, own, y in (("train", svhn[0], [[10], [1], [9]]), ("test", svhn[1], [[10], [2]])):
        savemat(root / f"svhn_{part}_32x32.mat", {"X": own, "y": np.array(y, np.uint8)})
    numbers = {"train_label": np.array([[4], [0], [5]]), "test_label": np.array([[6], [0]])}
    savemat(root / "syn_number.mat", {"train_data": syn[0], "test_data": syn[1], **numbers})
    usps = np.empty((2, 2), object)
    grey = [images(n, 1, 28, 28) for n in (3, 2)]
    for part, y in ((0, [[2], [0], [8]]), (1, [[2], [5]])):
        usps[part, 0], usps[part, 1] = grey[part] / 255, np.array(y, np.uint8)
    savemat(root / "usps_28x28.mat", {"dataset": usps})
    return root, {"mnist": mnist, "mnist_m": mnist_m, "svhn": svhn, "syn": syn, "usps": grey}


def test_digit5(tmp_path, digits):
    _, arrays = digits
    y = [*(7, 0, 3, 7, 0, 3, 0, 1, 9, 4, 0, 5, 2, 0, 8), *(1, 9, 1, 9, 0, 2, 6, 0, 2, 5)]
    groups = [name for samples in (3, 2) for name in arrays for _ in range(samples)]
    facts = {"groups": groups, "noted": ["has_all_classes"], "classes": 10}
    x = np.repeat(arrays["mnist"][0][:, None], 3, 1)
    got = assert_read("digit5", tmp_path, x, y, 15, **facts)
    assert got.x.shape == (25, 3, 32, 32)
    assert np.array_equal(got.x[15:17, 2], arrays["mnist"][1])
    assert np.array_equal(got.x[6:9], arrays["svhn"][0].transpose(3, 2, 0, 1))
    assert np.array_equal(got.x[9:12], arrays["syn"][0].transpose(0, 3, 1, 2))
    means = arrays["usps"][0].mean((1, 2, 3))
    assert abs(got.x[12:15].float().mean((1, 2, 3)).numpy() - means).max() < 3  # enlarged
    small = load_samples("digit5", tmp_path, size=28)
    assert np.array_equal(small.x[12:15, 0], arrays["usps"][0][:, 0])
    assert np.array_equal(small.x[3:6], arrays["mnist_m"][0].transpose(0, 3, 1, 2))


WRONG = {
    "": None,
    "four labels": "1\n2\n3\n4\n",
    "8 kHz": sound(tone(440), 8_000),
    "an absent clip": "yes/zz.wav",
    "half a picture": picture(0, (64, 64), "JPEG")[:900],
    "another class": "val_0.JPEG\tn09\n",
    "no head": "n3.jpg,n3\n",
    "no rows": "filename,label\n",
}
"""Contents of a file; None: there is none."""
LINES = """
har | train/y_train.txt | four labels | y_train.txt is not as published: it has [4, 1] numbers, expected [5, 1]
speech_commands | yes/aa_nohash_0.wav | 8 kHz | (1, 2, 8000), where (1, 2, 16000) are published
speech_commands | testing_list.txt | an absent clip | 6 clips and names of clips, 5 are published
tiny_imagenet | train/n01/images/n01_1.JPEG | half a picture | n01_1.JPEG is not as published: image
tiny_imagenet | val/val_annotations.txt | another class | val_annotations.txt is not as published:
mini_imagenet | val.csv | no head | val.csv is not as published: KeyError: 'filename'
mini_imagenet | val.csv | no rows | 5 images in its three lists, 6 are published
"""
"""Data set | file | what is in it | what is said."""
SETS = {
    "har": ("activities", "UCI HAR Dataset"),
    "speech_commands": ("clips", FOLDER),
    "tiny_imagenet": ("tiny", "tiny-imagenet-200"),
    "cinic10": ("cinic", "CINIC-10"),
    "mini_imagenet": ("mini", "mini-imagenet"),
}
"""By data set the fixture that has its files, and the folder where they belong."""


@pytest.mark.parametrize(("name", "file", "content", "message"), read_cases(LINES, " | "))
def test_a_file_that_is_not_as_published_is_one_line(
    name, file, content, message, tmp_path, request
):
    fixture, folder = SETS[name]
    files = request.getfixturevalue(fixture)
    files = {**(files[0] if name == "har" else files), file: WRONG[content]}
    (tmp_path / folder / file).unlink(missing_ok=True)
    write(tmp_path / folder, {key: data for key, data in files.items() if data is not None})
    told = refusal(name, tmp_path)
    assert message in told
    assert told.endswith("put a good copy there")
    assert not cached(tmp_path)
