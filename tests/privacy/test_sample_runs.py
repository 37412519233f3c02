"""Runs that hide single samples as a user meets them: what they say and refuse."""

import json

import pytest

from fedpfl.report.load import runs
from fedpfl.report.tables import accuracy_table
from tests.command import assert_refused, play_run, read_table
from tests.conftest import keep_quick, read_cases

pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")

SMALL = (
    *("dataset=digits", "clients=6", "participation=0.5", "rounds=3", "eval.every=1", "model=mlp"),
    *("model.hidden=[8]", "local.epochs=1", "checkpoint.seconds=0", "method=fedper"),
    "privacy=sample",
)
NOISED = ("privacy.noise=2", "privacy.clip=0.5")
LINES = """
privacy.noise=null | privacy.epsilon must be given, or else noise
privacy.clip=null | privacy.clip must be a number where there is noise
privacy.noise=0.01 | protects nobody
privacy.noise=null privacy.epsilon=1e-9 privacy.delta=1e-9 | out of reach by any noise
privacy.delta=0.05 | privacy.delta must be below 1 / samples
method=fedas | looks at samples outside its training steps
method=scaffold | looks at gradients
model=resnet8 model.norm=batch | statistics of samples in buffers
stopping.early=true | privacy=sample: stopping.early would tell
system=simulated | privacy=sample keeps no account of clients that drop out
validation=0.2 | use validation=0
unseen=0.4 eval.finetune_epochs=1 | no account of newcomers that are fine-tuned
"""
"""Words | what is said."""


@pytest.mark.parametrize(("text", "told"), keep_quick(read_cases(LINES, " | "), 4))
def test_a_bad_configuration_is_one_line(text, told, tmp_path):
    words = text.split()
    keys = {word.partition("=")[0] for word in words}
    small = [word for word in SMALL if not ("model" in keys and word.startswith("model."))]
    more = [word for word in NOISED if word.partition("=")[0] not in keys]
    assert_refused(tmp_path / "run", told, *small, *more, *words)


def play(folder, *words):
    """Play a run of these words; return its rows, without times, and what it says."""
    said = play_run(folder, *SMALL, *words)
    return read_table(folder / "rounds.csv"), said


def test_a_run_says_what_each_client_gives_away(tmp_path):
    tuned = ("eval.finetune_epochs=1", "eval.finetune_every=3", "privacy.epsilon=5", "clients=3")
    found, said = play(tmp_path / "run", *tuned)
    promise = json.loads((tmp_path / "run/summary.json").read_text())["privacy"]
    assert "each client's models are (5, " in promise
    assert promise in " ".join(said.split())
    assert any(promise in note for note in accuracy_table(runs(tmp_path / "run")).notes)
    assert all(row["train_loss"] == "" and row["accuracy"] for row in found)
    assert "clipped_share" not in found[0]
    assert found[-1]["ft_accuracy"]
    clients = read_table(tmp_path / "run/clients.csv")
    epsilons = [float(row["epsilon"]) for row in clients]
    assert max(epsilons) == float(found[-1]["epsilon"])
    assert all(4.9 < epsilon <= 5 for epsilon in epsilons)  # all are fine-tuned in the end
