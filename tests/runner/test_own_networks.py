"""A run with a network of a user's own is repeated and resumed bit for bit."""

import itertools

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
    for _ in itertools.islice(
        fedpfl.rounds(*WORDS, f"model={model}", directory=tmp_path / "left"), 1
    ):
        pass  # left after the first round
    play(tmp_path / "left", f"model={model}", "engine.workers=1")
    assert read_table(tmp_path / "left/rounds.csv") == read_table(tmp_path / "whole/rounds.csv")
    assert_same(read_checkpoint(tmp_path / "left"), read_checkpoint(tmp_path / "whole"))


def test_the_header_names_the_head(tmp_path, capfd):
    fedpfl.run(*WORDS, "model=head_first", "rounds=1", directory=tmp_path / "run")
    assert (
        "model       head_first: 9,550 parameters, 130 of them the head (out)"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(("model", "is_told"), [("softmaxed", True), ("head_first", False)])
def test_who_answers_probabilities_is_told_that_the_loss_takes_logits(
    model, is_told, tmp_path, capfd
):
    fedpfl.run(*WORDS, f"model={model}", "rounds=1", directory=tmp_path / "run")
    note = f"model={model}: it ends in a softmax, and the loss takes logits"
    assert (note in capfd.readouterr().err) == is_told
