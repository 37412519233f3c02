"""Where initial values are from: no run is tested on what they have seen unless it says so."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fedpfl
from fedpfl import export
from fedpfl.data.provenance import Provenance, hash_samples
from fedpfl.data.state_dict import read_weights
from fedpfl.ground.errors import FedpflError
from fedpfl.report.load import runs
from fedpfl.report.tables import accuracy_table
from tests.command import format_override, run_command
from tests.conftest import assert_same, keep_quick
from tests.data.promises import build

WORDS = (
    *("dataset=digits", "clients=6", "participation=0.5", "rounds=1", "model=mlp"),
    "model.hidden=[8]",
)
TRAIN = (*WORDS, "local.epochs=1", "eval.every=1", "method=fedavg")
TRAINED = r"was trained on [\d,]+ of the [\d,]+ samples that are tested or held out here"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run, one of another seed that began with it, and what can be made of the first."""
    folder = tmp_path_factory.mktemp("origin")
    assert run_command(*TRAIN, "hydra.run.dir=first", cwd=folder).code == 0
    words = ("seed=7", format_override("model.weights", folder / "first"), "model.overlap=true")
    chained = run_command(*TRAIN, *words, "hydra.run.dir=chained", cwd=folder)
    assert chained.code == 0, chained.err
    assert "weights     " in chained.err
    assert "accuracies flatter (model.overlap=true)" in chained.err
    assert export.main([str(folder / "first"), str(folder / "models")]) == 0
    model = fedpfl.load(folder / "first").global_model()
    torch.save(model, folder / "saved.pt")
    torch.save(dict(model), folder / "bare.pt")
    trained = read_weights(folder / "saved.pt").provenance
    save_file(dict(model), folder / "pretrained.safetensors", trained.to_header())
    save_file(dict(model), folder / "bare.safetensors")
    return folder


def began(place, weights, *words):
    """The run that these words make, built and not played."""
    given = format_override("model.weights", place / weights)
    return build(*WORDS, "method=fedavg", given, *words)


FIRST = ("first", "models/client3.pt", "saved.pt", "pretrained.safetensors")
OTHER = ("seed=7", "validation=0.2")


@pytest.mark.parametrize("weights", keep_quick(FIRST))
def test_weights_that_have_seen_what_is_tested_are_refused(place, weights):
    """Whatever they are kept in, and whatever makes the split another one."""
    for word in OTHER[1:] if weights == "first" else OTHER[:1]:
        with pytest.raises(FedpflError, match=TRAINED):
            began(place, weights, word)
        run = began(place, weights, word, "model.overlap=true")
        assert "was trained on" in run.origin.caveat
    same = began(place, weights)
    assert same.origin.caveat == ""
    if weights == "first":  # it begins where that run's server was
        assert_same(same.net.params, fedpfl.load(place / "first").global_model())
        with pytest.raises(FedpflError, match=r"is \[8, 784\], the network's is \[9, 784\]"):
            began(place, weights, "model.hidden=[9]")
    assert "none of which is tested or held out here" in same.origin.line


def test_samples_are_known_by_their_content(place):
    """Part of the classes, and another file in another order, are the same samples."""
    with pytest.raises(FedpflError, match=TRAINED):
        began(place, "first", "dataset.only=[3,1,4]", "seed=8")
    digits = began(place, "first").federation
    order = np.random.default_rng(0).permutation(len(digits.y))
    np.savez(place / "mine.npz", x=digits.x.numpy()[order], y=digits.y.numpy()[order])
    with pytest.raises(FedpflError, match=TRAINED):
        began(place, "first", "dataset=npz", format_override("dataset.path", place / "mine.npz"))
    np.savez(place / "other.npz", x=255 - digits.x.numpy(), y=digits.y.numpy())
    inverted = format_override("dataset.path", place / "other.npz")
    assert began(place, "first", "dataset=npz", inverted).origin.caveat == ""


def test_weights_are_traced_through_a_chain(place):
    """What began with weights knows their samples: its own seed tests what those saw."""
    with pytest.raises(FedpflError, match=TRAINED):
        began(place, "chained", "seed=7")
    torch.save(fedpfl.load(place / "chained").personal(2), place / "link.pt")
    with pytest.raises(FedpflError, match=TRAINED):
        began(place, "link.pt", "seed=7")
    words = (format_override("model.weights", place / "bare.pt"), "hydra.run.dir=onwards")
    assert run_command(*TRAIN, *words, cwd=place).code == 0
    line = f"what {place}/bare.pt was trained on is not recorded"
    assert line in began(place, "onwards").origin.caveat


def test_a_file_that_says_nothing_is_told_of(place):
    run = began(place, "bare.safetensors", "seed=7")
    assert "is not recorded, perhaps on samples that are tested here" in run.origin.caveat
    assert run.origin.caveat in run.origin.line


def test_header_log_and_tables_say_it(place):
    line = json.loads((place / "chained/summary.json").read_text())["caveat"]
    assert line.split(" was trained on ")[0] == f"{place}/first"
    assert "accuracies flatter (model.overlap=true)" in (place / "chained/run.log").read_text()
    notes = " ".join(accuracy_table(runs(place / "chained", place / "first")).notes)
    assert f"Initial weights: {line}; so of: FedAvg" in notes
    assert "Initial weights" not in " ".join(accuracy_table(runs(place / "first")).notes)


def test_a_damaged_record_is_one_line(place):
    shutil.copytree(place / "first", place / "broken")
    content = (place / "broken/partition.npz").read_bytes()
    for damaged in (content[:-3], b"", content.replace(b"trained_on", b"trained_in")):
        (place / "broken/partition.npz").write_bytes(damaged)
        with pytest.raises(FedpflError, match=r"partition.npz is not as the run wrote it"):
            began(place, "broken")


def test_provenance_travels_with_files(tmp_path):
    x = torch.arange(60, dtype=torch.uint8).reshape(5, 1, 3, 4)
    trained = Provenance(unrecorded=("a\x1b", "b")).joined_with(hash_samples(x)[[3, 0, 3]])
    assert trained.are_seen(hash_samples(x)).tolist() == [True, False, False, True, False]
    assert trained.are_seen(hash_samples(x.float())).sum() == 0
    torch.save(trained.attach_to({"w": torch.ones(2)}), tmp_path / "a.pt")
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors", trained.to_header())
    np.savez(tmp_path / "a.npz", **trained.to_arrays())
    files = [read_weights(tmp_path / name).provenance for name in ("a.pt", "a.safetensors")]
    for copy in (*files, Provenance.from_arrays(np.load(tmp_path / "a.npz"))):
        assert copy.samples.tolist() == trained.samples.tolist()
        assert copy.unrecorded == trained.unrecorded


PRIVATE = ("privacy=client", "privacy.noise=2")


@pytest.mark.parametrize("weights", keep_quick(["chained", *FIRST]))
def test_a_private_run_does_not_begin_with_what_knows_its_clients(place, weights):
    for words in ((), ("seed=7", "model.overlap=true", "privacy.public_weights=true")):
        with pytest.raises(FedpflError, match=r"was trained on [\d,]+ samples of these clients"):
            began(place, weights, *PRIVATE, *words)


def test_nor_with_what_nobody_knows_unless_it_is_said_to_be_public(place):
    with pytest.raises(
        FedpflError, match=r"nobody knows whether .*bare.pt was trained on samples of these clients"
    ):
        began(place, "bare.pt", *PRIVATE)
    given = format_override("model.weights", place / "bare.pt")
    words = (given, "privacy.public_weights=true", *PRIVATE)
    result = run_command(*TRAIN, *words, "hydra.run.dir=public", cwd=place)
    assert result.code == 0, result.err
    promise = json.loads((place / "public/summary.json").read_text())["privacy"]
    assert f"nor is what {place}/bare.pt gives away, the weights that it starts from" in promise
    # A private run is no base for another on the same clients: their accounts would add up.
    with pytest.raises(FedpflError, match=r"samples of these clients"):
        began(place, "public", *PRIVATE, "privacy.public_weights=true")
    # Nor does what a private run gives away tell whose samples it has seen; its directory, which
    # stays, does.
    torch.save(fedpfl.load(place / "public").personal(0), place / "given.pt")
    assert not len(read_weights(place / "given.pt").provenance.samples)
    message = "nobody knows whether a model of a private run was trained on"
    with pytest.raises(FedpflError, match=message):
        began(place, "given.pt", *PRIVATE)
