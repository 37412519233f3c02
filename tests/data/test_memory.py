"""Samples in memory are a data set: `fedpfl.run(data=...)`."""

import gc

import numpy as np
import pandas as pd
import pytest
import torch

import fedpfl
from fedpfl.data import datasets
from fedpfl.data.datasets import memory
from tests.command import TINY
from tests.data.promises import one_line

WORDS = (*(word for word in TINY if not word.startswith(("clients=", "rounds="))), "method=fedavg")


@pytest.fixture
def digits():
    """The images and labels of digits."""
    samples = datasets.load_samples("digits", "unused")
    return samples.x.numpy(), samples.y.numpy()


def run(*words, rounds=1, **keys):
    return fedpfl.run(*WORDS, *words, rounds=rounds, progress=False, **keys)


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    """Run in an empty folder."""
    monkeypatch.chdir(tmp_path)


def test_digits_in_memory_are_digits(digits, tmp_path):
    """The numbers of a run are those of the named data set, in whatever form it is given."""
    x, y = digits
    reference = run("dataset=digits", clients=4)
    expected = reference.rounds.drop(columns=["seconds", "eval_seconds"])
    scaling = {key: reference.config["dataset"][key] for key in ("mean", "std")}
    trained = run(data=[x[:, 0], y], clients=4, dataset=scaling)  # without the channel's axis
    pd.testing.assert_frame_equal(trained.rounds[expected.columns], expected)
    forms = ((x, y), (torch.tensor(x), torch.tensor(y)), torch.utils.data.StackDataset(x, y))
    assert len({memory.hold_data(data).digest for data in forms}) == 1


def test_numbers_may_be_python_objects():
    forms = ((X, Y), (X.astype(object), Y.astype(object)), ([*X], [*map(int, Y)]))
    assert len({memory.hold_data(data).digest for data in forms}) == 1
    objects = memory.hold_data(FRAME.astype({"a": object}))
    assert objects.digest == memory.hold_data(FRAME).digest


def test_clients_are_those_of_the_data(digits):
    x, y = digits
    names = np.array(["b", "a"])[np.arange(len(y)) % 2]
    by_group = run(data=(x, y, names))
    assert by_group.config["partition"]["name"] == "groups"
    assert list(by_group.clients.index) == ["a", "b"]
    types = {"b": np.uint64, "a": np.int64}  # whose common type is a float
    parts = {name: (x[names == name], y[names == name].astype(types[name])) for name in types}
    by_name = run(data=parts)
    assert list(by_name.clients.index) == ["b", "a"]  # as the dict has them
    assert by_name.clients.loc["a", "train"] == by_group.clients.loc["a", "train"]


def test_frames_are_tables_and_texts_are_classes():
    table = pd.DataFrame(
        {"age": range(80), "ward": ["x", "y"] * 40, "site": ["u"] * 40 + ["v"] * 40}
    )
    table["state"] = ["ill", "well", "well", "well"] * 20
    keys = {"dataset": {"label": "state", "by": "site", "categories": ["ward"]}}
    trained = run(data=table, **keys)
    assert trained.classes == ("ill", "well")
    assert list(trained.clients.index) == ["u", "v"]
    assert trained.summary["input"]["shape"] == [3]
    frames = {name: part.drop(columns="site") for name, part in table.groupby("site")}
    separate = run(data=frames, dataset={"label": "state", "categories": ["ward"]})
    assert separate.clients.equals(trained.clients)


def test_a_run_goes_on_with_its_own_data_alone(digits):
    x, y = digits
    first = next(iter(fedpfl.rounds(*WORDS, rounds=2, data=(x, y), directory="run", clients=4)))
    assert first.row["round"] == 1
    with pytest.raises(fedpfl.FedpflError, match=r"dataset\.digest .* there, .* here"):
        run(data=(x[::-1], y[::-1]), directory="run", clients=4, rounds=2)
    assert run(data=(x, y), directory="run", clients=4, rounds=2).status == "finished"
    # Names of clients are part of the data.
    named, renamed = (memory.hold_data({name: (x, y), "b": (x, y)}) for name in "ac")
    assert named.digest != renamed.digest
    # A cycle would hold the samples of the run above until garbage is collected.
    gc.collect()
    with pytest.raises(fedpfl.FedpflError, match=r"fedpfl\.load\(DIR, data=\.\.\.\)"):
        fedpfl.load("run").personal(0)
    assert fedpfl.load("run", data=(x, y)).predict(0, x[:2]).shape == (2, 10)


X, Y = np.zeros((40, 4), np.float32), np.arange(40) % 2
FRAME = pd.DataFrame({"a": [1.0, 2.0], "y": ["u", "v"]})
WRONG = {
    "no form": (3, {}, "data must be (x, y)"),
    "lengths": ((X, Y[1:]), {}, "data: x has 40 samples, and y has 39"),
    "groups twice": ({"a": (X, Y, Y)}, {}, "data['a'] has groups, and is one client"),
    "other labels": (
        {"a": (X, Y), "b": (X, np.where(Y, "u", "v"))},
        {},
        "data['b']: labels are texts",
    ),
    "frame and array": (
        {"a": (X, Y), "b": FRAME},
        {"label": "y"},
        "data['b'] is a table, and not all are; give all",
    ),
    "label of arrays": ((X, Y), {"label": "y"}, "are for tables, and data is none"),
    "absent label": (FRAME, {"label": "z"}, "data has no column 'z'; it has a, y"),
    "two data sets": ((X, Y), {"": "digits"}, "dataset=digits and data=... are two"),
    "a bad item": (
        torch.utils.data.StackDataset([X[0], X[:2]], [0, 1]),
        {},
        "data cannot be read as a torch Dataset",
    ),
    "items of names": (torch.utils.data.StackDataset(x=X, y=Y), {}, "item 0 is a dict"),
    "names alike": ({1: (X, Y), "1": (X, Y)}, {}, "client '1' needs a printable name"),
    "sparse": ((torch.tensor(X).to_sparse(), Y), {}, "data: x is a tensor that NumPy cannot hold"),
    "hidden": ((np.ma.masked_equal(X, 0), Y), {}, "data: x has no value in sample 0; fill it in"),
    "no label": ((X, ["u", None, *"vw" * 19]), {}, "data: y has no value in sample 1"),
    "texts and numbers": ((X, [1, "1"] * 20), {}, "y holds values of int and str; give"),
    "nobody's": ((X, Y, [*"uvw", np.nan, *"xy" * 18]), {}, "groups has no value in sample 3"),
    "lists": (FRAME.assign(b=[[1], [2]]), {"label": "y"}, "column 'b' holds more than one value"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_with_data_is_one_line(fault, tmp_path):
    data, options, line = WRONG[fault]
    keys = {"dataset": options.get("", options)} if options else {}
    assert line in one_line(lambda: run(data=data, **keys))
    assert not list(tmp_path.iterdir())


def test_predictions_are_of_samples_as_the_data_alone(tmp_path):
    trained = run(data=(X, Y), clients=1)
    for samples, line in (
        (np.ma.masked_equal(X, 0), "the array of samples has no value in sample 0"),
        (X + np.nan, "samples hold values that are not finite"),
        (X.astype(str), "samples must be float32 [samples, 4] as those of data set memory"),
        (None, "got object []"),
    ):
        assert line in one_line(lambda samples=samples: trained.predict(0, samples))
    expected = trained.predict(0, X)
    for samples in (torch.tensor(X, requires_grad=True), X.tolist(), X[::-1]):
        assert torch.equal(trained.predict(0, samples), expected)
