"""A run with a network of a user's own is repeated and resumed bit for bit."""

import pytest

import fedpfl
from fedpfl.config import plugins
from fedpfl.runner import timing
from tests.command import TINY_TASK, format_override, read_checkpoint, read_table
from tests.conftest import ROOT, assert_same, keep_quick

WORDS = (
    *TINY_TASK,
    format_override("plugins", [ROOT / "tests/networks.py"]),
    "rounds=3",
    "participation=1.0",
    "method=fedavg",
)
STATEFUL = ("dropped", "noisy_by_numpy", "counter_assigned", "frozen_average")


@pytest.fixture(autouse=True)
def forgotten():
    """Leave the choices as they were."""
    yield
    plugins.load_plugins([])


def play(path, *words):
    """Return the rounds and notes of a run."""
    rounds = list(fedpfl.rounds(*WORDS, *words, directory=path))
    return rounds, [note for round in rounds for note in round.notes]


@pytest.mark.parametrize("model", keep_quick(STATEFUL))
def test_a_run_repeats_and_goes_on_bit_for_bit(model, tmp_path, monkeypatch):
    """Whether its time was foretold, by steps of a copy, or not."""
    monkeypatch.setattr(timing, "is_worth_timing", lambda *_: True)
    _, notes = play(tmp_path / "whole", f"model={model}", "engine.workers=3")
    assert not [note for note in notes if "draws" in note]  # nobody blames the method
    monkeypatch.setattr(timing, "is_worth_timing", lambda *_: False)
    left = next(fedpfl.rounds(*WORDS, f"model={model}", directory=tmp_path / "left"))
    assert left.row["round"] == 1
    play(tmp_path / "left", f"model={model}", "engine.workers=1")
    assert read_table(tmp_path / "left/rounds.csv") == read_table(tmp_path / "whole/rounds.csv")
    assert_same(read_checkpoint(tmp_path / "left"), read_checkpoint(tmp_path / "whole"))


def test_what_a_network_is_is_told(tmp_path, capfd):
    """Its head, and that the loss takes logits where it answers probabilities."""
    told = {}
    for model in ("softmaxed", "head_first"):
        fedpfl.run(*WORDS, f"model={model}", "rounds=1", directory=tmp_path / model)
        told[model] = capfd.readouterr().err
    header = "model       head_first: 9,550 parameters, 130 of them the head (out)"
    assert header in told["head_first"]
    note = "it ends in a softmax, and the loss takes logits"
    assert [note in text for text in told.values()] == [True, False]
