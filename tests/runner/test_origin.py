"""Initial weights: a run is not tested on samples that its initial weights saw, unless it says so."""

import json
import shutil

import pytest
import torch

import fedpfl
from fedpfl.ground.errors import FedpflError
from fedpfl.report.load import runs
from fedpfl.report.tables import accuracy_table
from tests.command import format_override, run_command
from tests.conftest import assert_same
from tests.data.promises import build

WORDS = (
    *("dataset=digits", "clients=6", "participation=0.5", "rounds=1", "model=mlp"),
    "model.hidden=[8]",
)
TRAIN = (*WORDS, "local.epochs=1", "eval.every=1", "method=fedavg")
TRAINED = r"was trained on [\d,]+ of the [\d,]+ samples that are tested or held out here"
PRIVATE = ("privacy=client", "privacy.noise=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, and one of another seed that began with it."""
    folder = tmp_path_factory.mktemp("origin")
    assert run_command(*TRAIN, "hydra.run.dir=first", cwd=folder).code == 0
    words = ("seed=7", format_override("model.weights", folder / "first"), "model.overlap=true")
    chained = run_command(*TRAIN, *words, "hydra.run.dir=chained", cwd=folder)
    assert chained.code == 0, chained.err
    assert "accuracies flatter (model.overlap=true)" in chained.err
    torch.save(fedpfl.load(folder / "first").global_model(), folder / "saved.pt")
    return folder


def began(place, weights, *words):
    """The run that these words make, built and not played."""
    given = format_override("model.weights", place / weights)
    return build(*WORDS, "method=fedavg", given, *words)


@pytest.mark.parametrize("word", ["seed=7", "validation=0.2", "unseen=0.4"])
def test_weights_of_a_run_that_saw_what_is_tested_are_refused(place, word):
    with pytest.raises(FedpflError, match=TRAINED):
        began(place, "first", word)
    assert "was trained on" in began(place, "first", word, "model.overlap=true").origin.caveat


def test_weights_of_the_same_split_are_taken_as_they_are(place):
    same = began(place, "first")
    assert same.origin.caveat == ""
    assert "none of its training samples is tested" in same.origin.line
    assert_same(same.net.params, fedpfl.load(place / "first").global_model())
    with pytest.raises(FedpflError, match=r"model\.weights: .*size mismatch for hidden\.0\.weight"):
        began(place, "first", "model.hidden=[9]")


def test_what_is_not_known_is_told(place):
    """Of a file, of a run on other samples, and of a run whose own weights saw test samples."""
    for weights, word in (("saved.pt", "seed=7"), ("first", "dataset.only=[3,1,4]")):
        run = began(place, weights, word)
        assert "may be among its training samples" in run.origin.caveat
        assert run.origin.caveat in run.origin.line
    assert "was trained on" in began(place, "chained", "seed=7").origin.caveat


def test_summary_and_tables_say_it(place):
    line = json.loads((place / "chained/summary.json").read_text())["caveat"]
    assert line.split(" was trained on ")[0] == f"{place}/first"
    notes = " ".join(accuracy_table(runs(place / "chained", place / "first")).notes)
    assert f"Initial weights: {line}; so of: FedAvg" in notes


def test_a_damaged_partition_is_one_line(place):
    shutil.copytree(place / "first", place / "broken")
    (place / "broken/partition.npz").write_bytes(b"")
    with pytest.raises(FedpflError, match=r"partition.npz is not as the run wrote it"):
        began(place, "broken")


def test_a_private_run_begins_with_public_weights_alone(place):
    public = "privacy.public_weights=true"
    for weights, words in (("saved.pt", ()), ("first", ()), ("first", (public,))):
        with pytest.raises(FedpflError, match=r"may give away samples of these clients"):
            began(place, weights, *PRIVATE, *words)
    given = format_override("model.weights", place / "saved.pt")
    result = run_command(*TRAIN, given, public, *PRIVATE, "hydra.run.dir=public", cwd=place)
    assert result.code == 0, result.err
    promise = json.loads((place / "public/summary.json").read_text())["privacy"]
    assert f"nor is what {place}/saved.pt gives away, the weights that it starts from" in promise
