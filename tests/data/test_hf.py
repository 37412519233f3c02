"""Data sets of Hugging Face's library: saved folders; what is wrong is one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedpfl.data.datasets import load_samples
from fedpfl.data.datasets.shared import hub
from fedpfl.data.datasets.shared.source import WouldDownload, without_writing
from tests.command import format_override
from tests.conftest import read_cases
from tests.data.promises import assert_promises, build, one_line

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _without_bars():
    datasets.disable_progress_bars()


def load(folder: Path, **options):
    return load_samples("hf", Path("unused"), **{"path": folder, "label": "label", **options})


def save(path: Path, features: dict | None = None, **columns) -> Path:
    """A Dataset of these columns, or a DatasetDict of mappings of columns."""
    typed = datasets.Features(features) if features else None
    parts = columns if all(isinstance(own, dict) for own in columns.values()) else {"": columns}
    made = {name: datasets.Dataset.from_dict(own, features=typed) for name, own in parts.items()}
    (made[""] if "" in made else datasets.DatasetDict(made)).save_to_disk(path)
    return path


def save_digits(folder: Path, **splits) -> Path:
    """Images of digits; `splits` are ranges of their rows."""
    samples = load_samples("digits", Path("unused"))
    parts = {}
    for name, rows in splits.items():
        images = [Image.fromarray(samples.x[row, 0].numpy()) for row in rows]
        writers = [f"writer {row % 3}" for row in rows]
        parts[name] = {"image": images, "label": samples.y[rows].tolist(), "writer": writers}
    features = {**IMAGE, **LABEL, "writer": datasets.Value("string")}
    return save(folder, features, **parts)


def test_clients_are_the_values_of_a_column_and_tested_on_the_test_split(tmp_path):
    save_digits(tmp_path / "saved", test=range(300, 400), train=range(300))
    own = ["dataset=hf", format_override("dataset.path", tmp_path / "saved")]
    own += ["dataset.input=image", "dataset.label=label", "model=mlp"]
    run = build(*own, "dataset.by=writer")
    partition = run.config["partition"]
    assert (partition["name"], partition["test_fraction"]) == ("groups", None)
    assert sorted(torch.cat(run.federation.test).tolist()) == list(range(300, 400))
    assert run.federation.client_names == ("writer 0", "writer 1", "writer 2")
    one = build(*own, "dataset.by=writer", "dataset.split=train")
    assert one.config["partition"]["test_fraction"] == 0.25
    assert one_line(lambda: build(*own)) == (
        "dataset=hf takes its clients from the column dataset.by, which is null; name it, or "
        "choose how to deal samples, as with partition=dirichlet"
    )
    assert build(*own, "partition=iid").federation.clients == 100
    options = {"path": tmp_path / "saved", "input": "image", "label": "label", "by": "writer"}
    assert_promises("hf", tmp_path, **options)


def test_splits_are_joined_with_test_last(tmp_path):
    parts = {
        name: {"x": [[float(place)]] * 3, "label": [0, 1, 1]}
        for place, name in enumerate(("test", "train", "validation"))
    }
    save(tmp_path / "d", **parts)
    everything = load(tmp_path / "d", input="x")
    assert everything.x[:, 0].tolist() == [1] * 3 + [2] * 3 + [0] * 3
    assert everything.test_from == 6
    two = load(tmp_path / "d", input="x", split=("test", "validation"))
    assert (two.x[:, 0].tolist(), two.test_from) == ([2] * 3 + [0] * 3, 3)
    alone = load(tmp_path / "d", input="x", split="test")
    assert (len(alone.y), alone.test_from) == (3, None)
    assert len(load(tmp_path / "d/train", input="x").y) == 3


@pytest.mark.parametrize(
    ("feature", "values", "labels", "names"),
    [
        (datasets.Value("string"), ["cat", "ant", "cat"], [1, 0, 1], ("ant", "cat")),
        (datasets.Value("int64"), [5, 3, 5], [1, 0, 1], ("3", "5")),
        (datasets.Value("int8"), [1, 0, 1], [1, 0, 1], ()),
        (datasets.Value("float32"), [1.0, 0.0, 1.0], [1, 0, 1], ()),
        (datasets.Value("bool"), [True, False, True], [1, 0, 1], ("False", "True")),
        (datasets.ClassLabel(names=["z", "y", "x"]), [2, 0, 2], [1, 0, 1], ("z", "x")),
        (datasets.ClassLabel(names=["z ", "e\u0301", "y"]), [1, 0, 1], [1, 0, 1], ("z", "\u00e9")),
        (datasets.ClassLabel(names=["z", "y"]), [1, 0, 1], [1, 0, 1], ("z", "y")),
    ],
)
def test_labels_are_numbered_and_keep_their_names(tmp_path, feature, values, labels, names):
    features = {"x": datasets.Value("float32"), "label": feature}
    save(tmp_path / "d", features, x=[1.0, 2.0, 3.0], label=values)
    samples = load(tmp_path / "d", input="x")
    assert (samples.y.tolist(), samples.class_names) == (labels, names)
    save(tmp_path / "e", {**features, "o": feature}, x=[1.0, 2.0, 3.0], o=values, label=values)
    clients = load(tmp_path / "e", input="x", by="o")
    assert len(set(clients.group_names)) == 2
    first, second, third = clients.groups.tolist()
    assert first == third != second


def test_columns_keep_order_shape_and_type(tmp_path):
    save(tmp_path / "n", a=[1, 2], b=[0.5, 1.5], c=[True, False], label=[0, 1])
    numbers = load(tmp_path / "n", input=("b", "a", "c")).x
    assert numbers.tolist() == [[0.5, 1, 1], [1.5, 2, 0]]
    save(tmp_path / "w", a=[1, 2], ward=["x", "y"], code=[7, 7], label=[0, 1])
    wards = load(tmp_path / "w", input=("ward", "a", "code"), categories=("ward", "code"))
    assert wards.x.tolist() == [[1, 0, 1, 1], [0, 1, 2, 1]]
    assert wards.feature_names == ("ward=x", "ward=y", "a", "code=7")
    times = load(tmp_path / "w", input="a", label=("code", "label"), task="survival")
    assert times.y.tolist() == [[7, 0], [7, 1]]
    pixels = np.random.default_rng(0).integers(0, 256, (6, 1, 4, 5), dtype=np.uint8)
    signals = np.random.default_rng(1).normal(size=(6, 3, 7)).astype(np.float32)
    features = {
        "pixels": datasets.Array3D((1, 4, 5), "uint8"),
        "signals": datasets.List(datasets.List(datasets.Value("float32"))),
        "ids": datasets.List(datasets.Value("int64"), length=2),
        "label": datasets.Value("int64"),
    }
    ids = [[row, 2 * row] for row in range(6)]
    columns = {"pixels": pixels, "signals": signals.tolist(), "ids": ids, "label": [0, 1] * 3}
    made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    order = [4, 1, 5, 0]  # with an index, as `shuffle` and `filter` make one
    made.select(order).save_to_disk(tmp_path / "d", num_shards=2)
    assert np.array_equal(load(tmp_path / "d", input="pixels").x, pixels[order])
    assert np.array_equal(load(tmp_path / "d", input="signals").x, signals[order])
    tokens = load(tmp_path / "d", input="ids").x
    assert (tokens.tolist(), str(tokens.dtype)) == ([ids[row] for row in order], "torch.int32")


def test_texts_are_the_words_of_the_training_part(tmp_path):
    train = {"title": ["A b", "b."], "text": ["B", "c-c"], "label": ["x", "y"]}
    test = {"title": ["new b"], "text": ["c"], "label": ["x"]}
    save(tmp_path / "d", train=train, test=test)
    samples = load(tmp_path / "d", input=("title", "text"), length=4)
    b, c, a = 2, 3, 4
    assert samples.x.tolist() == [[a, b, b, 0], [b, c, c, 0], [1, b, c, 0]]
    assert load(tmp_path / "d", input="title", vocabulary=3, length=1).x.tolist() == [[1], [2], [1]]


@pytest.mark.parametrize(("modes", "channels"), [("1 LA", 1), ("L RGB", 3), ("RGBA P", 3)])
def test_images_of_any_mode_are_grey_or_of_three_channels(tmp_path, modes, channels):
    made = [Image.new(mode, (5, 4)) for mode in modes.split()]
    save(tmp_path / "d", {**IMAGE, **LABEL}, image=made, label=[0, 1])
    assert load(tmp_path / "d", input="image").x.shape == (2, channels, 4, 5)
    assert load(tmp_path / "d", input="image", size=3).x.shape == (2, channels, 3, 3)


IMAGE = {"image": datasets.Image()}
LABEL = {"label": datasets.Value("int64")}
FLOATS = {"x": [1.0, 2.0, 3.0], "label": [0, 1, 0]}
PART = {"x": [1.0, 2.0], "label": [0, 1]}
TWO = {"train": PART, "test": PART}
X = {"input": "x"}
LABELS = {"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["a", "b"])}
NAMED = {"features": LABELS, "train": PART}


def nested(*rows):
    return {"x": list(rows), "label": [0, 1, 0][: len(rows)]}


FAULTS = """
no such column | FLOATS | {"input": "y"} | d has no column 'y'; it has x, label
twice | FLOATS | {"input": ("x", "x")} | must name different columns
no split | FLOATS | {**X, "split": "train"} | d is one Dataset; leave dataset.split out
mixed | {**FLOATS, "t": list("abc")} | {"input": ("x", "t")} | 'x' holds numbers, 't' holds texts; dataset.input takes
texts of arrays | nested(["a"], ["b"]) | X | column 'x' holds no arrays of numbers
two spellings | {**FLOATS, "who": ["a", "B ", "b"]} | {**X, "by": "who"} | client 'b' is 'B' at d; write it alike
not in | FLOATS | {**X, "categories": ("label",)} | dataset.categories has label, which dataset.input has not
half | {**FLOATS, "label": [0, 0.5, 1]} | X | label 0.5 is no class
array label | {"x": [1.0, 2.0], "label": [[0], [1]]} | X | label holds values of ndarray; give numbers or texts
ragged | nested([1.0, 2.0], [1.0]) | X | 'x' holds no arrays of numbers of one shape
another split | TWO | {**X, "split": "trian"} | dataset.split must be one of train, test, got 'trian'; did you mean train?
no column in a split | {**TWO, "test": {"label": [0]}} | X | split test has no column 'x'
arrays | {"train": nested([1.0], [2.0]), "test": nested([1.0, 2.0])} | X | split test: samples are float32 [2]
no class | {**NAMED, "test": {**PART, "label": [1, -1]}} | X | split test: label has no value in row 2
"""
"""Name | columns, or those of splits | options | what is said."""


@pytest.mark.parametrize(("fault", "columns", "options", "text"), read_cases(FAULTS, " | "))
def test_what_is_wrong_with_columns_and_splits_is_one_line(fault, columns, options, text, tmp_path):
    save(tmp_path / "d", **eval(columns))
    assert text in one_line(lambda: load(tmp_path / "d", **eval(options)))


def test_a_path_that_is_none(tmp_path):
    save(tmp_path / "d", **FLOATS)
    (file,) = (tmp_path / "d").glob("*.arrow")
    file.write_bytes(b"broken")
    assert "d cannot be read as a folder of save" in one_line(
        lambda: load(tmp_path / "d", input="x")
    )
    assert "is no folder here; give one that" in one_line(lambda: load(tmp_path / "no", input="x"))


def test_names_on_the_hub(monkeypatch):
    asked = []

    def answer(name, subset):
        asked.append((name, subset))
        if name == "no/network":
            raise ConnectionError("Couldn't reach the hub\nat all")
        return datasets.DatasetDict(train=datasets.Dataset.from_dict(FLOATS))

    hub._load_from_hub.cache_clear()
    monkeypatch.setattr(datasets, "load_dataset", answer)
    assert len(load(Path("some/thing"), input="x", subset="small").y) == 3
    message = one_line(lambda: load(Path("no/network"), input="x"))
    assert "from the Hugging Face hub: Couldn't reach the hub at all" in message
    assert asked == [("some/thing", "small"), ("no/network", None)]  # each once
    message = one_line(lambda: load(Path("some/thing"), input="x", download=False))
    assert "with dataset.download=true" in message
    with without_writing(), pytest.raises(WouldDownload, match="would load some/thing from"):
        load(Path("some/thing"), input="x")
    hub._load_from_hub.cache_clear()


def save_tokenizer(folder: Path, **config) -> Path:
    """A tokenizer of words, with a token that begins each text."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra lm")
    words = ("[PAD]", "[CLS]", "[UNK]", "the", "cat", "dog", "sat")
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    begin = tokenizers.processors.TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 1)])
    tokenizer.post_processor = begin
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_texts_are_a_tokenizers_ids_and_the_next_ones_are_labels(tmp_path):
    texts = ["the cat sat", "dog", "the dog sat the cat"]
    path = save(tmp_path / "d", text=texts, label=["a", "b", "a"], who=["x", "y", "x"])
    own = {"path": path, "input": "text", "length": 5, "tokenizer": save_tokenizer(tmp_path / "t")}
    read = load_samples("hf", Path("unused"), label="label", by="who", **own)
    ids = [[1, 3, 4, 6, 0], [1, 5, 0, 0, 0], [1, 3, 5, 6, 3]]
    assert read.x.tolist() == ids
    assert (read.pad, read.classes, read.class_names) == (0, 2, ("a", "b"))
    lines = load_samples("hf", Path("unused"), task="next_token", by="who", **own)
    assert lines.y.tolist() == [[3, 4, 6, -1, -1], [5, -1, -1, -1, -1], [3, 5, 6, 3, -1]]
    assert (lines.classes, lines.group_names) == (7, ("x", "y"))
    # ---- The tokenizer's own token fills up; its model may have room for more ids.
    named = save_tokenizer(tmp_path / "named", pad_token="[UNK]")
    (named / "config.json").write_text('{"vocab_size": 9}')
    other = load_samples("hf", Path("unused"), task="next_token", **{**own, "tokenizer": named})
    assert (other.pad, other.classes, other.x[1].tolist()) == (2, 9, [1, 5, 2, 2, 2])
    for wrong, told in (
        ({"label": "label"}, "dataset.label has no use with task=next_token"),
        ({"tokenizer": None}, "task=next_token needs dataset.tokenizer"),
        ({"tokenizer": tmp_path}, "tokenizer.json cannot be read"),
    ):
        assert told in one_line(
            lambda wrong=wrong: load_samples(
                "hf", Path("unused"), task="next_token", **{**own, **wrong}
            )
        )
