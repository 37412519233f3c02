"""Runs whose clients' samples shift: off, resumed, together with what else there is; findings."""

import numpy as np
import pytest

import fedpfl
from fedpfl.runner.evaluate import Evaluation, measure_recovery
from tests.command import (
    assert_refused,
    format_override,
    play_rows,
    read_checkpoint,
    read_table,
    wait_for,
)
from tests.conftest import assert_same, keep_quick, read_cases
from tests.data.promises import build
from tests.engine.test_ranks import torchrun
from tests.record.test_damage import interrupt

SMALL = (
    *("dataset=digits", "clients=8", "participation=0.5", "rounds=4", "eval.every=1"),
    *("model=mlp", "model.hidden=[8]", "local.epochs=1", "checkpoint.seconds=0"),
)
DRIFT = (
    *("method=ditto", "shift=rotation", "shift.label_permutation=true", "shift.label_noise=0.1"),
    *("shift.noise=0.1", "shift.at=[2,3]", "unseen=0.25", "validation=0.2"),
    "partition.samples_per_client=24",
)
LINES = """
shift.rotation=361 | shift.rotation must be between 0 and 360
shift=rotation shift.at=[4] | shift.at must be rounds before the last, 4
shift.at=[2] | shift.at must be [] where nothing moves
shift=label_permutation task=regression | shift.label_permutation=true
unseen_groups=[art] | unseen_groups names groups of samples, and data set digits has none
"""
"""Words | what is said."""


@pytest.mark.parametrize(("text", "message"), keep_quick(read_cases(LINES, " | "), 2))
def test_a_bad_configuration_is_one_line(text, message, tmp_path):
    assert_refused(tmp_path / "run", message, *SMALL, *text.split())


def play(folder, *words):
    """Play a small run of these words, and return its rows."""
    return play_rows(folder, *SMALL, *words)


@pytest.fixture(scope="module")
def drifted(tmp_path_factory):
    """A run over two drifts."""
    folder = tmp_path_factory.mktemp("drifted") / "run"
    play(folder, *DRIFT)
    return folder


def test_without_a_level_it_is_the_run_without(tmp_path):
    """Rows of one's own for each client change no bit."""
    words = ("validation=0.2", "unseen=0.25", "partition.samples_per_client=24", "rounds=2")
    plain = play(tmp_path / "plain", *words)
    assert play(tmp_path / "laid", *words, "shift.contrast=1e-9") == plain  # as good as no shift


HOSTILE = (
    *(*DRIFT, "shift.at=[2]", "attack=replacement", "attack.share=0.34", "attack.from_round=2"),
    "defence=median",
)


@pytest.mark.parametrize("ending", keep_quick(["stopped at 3", "stopped at 2", "extended"]))
def test_stopped_or_extended_across_a_drift_under_attack_it_is_the_whole_run(ending, tmp_path):
    whole = play(tmp_path / "whole", *HOSTILE)
    if ending == "extended":
        play(tmp_path / "short", *HOSTILE, "rounds=3")
        play(tmp_path / "run", *HOSTILE, format_override("extend", tmp_path / "short"))
    else:
        interrupt(tmp_path / "run", *SMALL, *HOSTILE, after=int(ending[-1]))
        play(tmp_path / "run", *HOSTILE)
    assert read_table(tmp_path / "run/rounds.csv") == whole
    checkpoints = [read_checkpoint(tmp_path / name) for name in ("run", "whole")]
    assert_same(*({key: one[key] for key in ("server", "rows")} for one in checkpoints))


@pytest.mark.parametrize(
    ("accuracies", "recovery"),
    [([80, 75.9, 76, 90], 10), ([80, 10, 20, 30], None), ([80, 80, 1, 1], 5), ([None] * 4, None)],
)
def test_recovery_is_the_first_evaluation_at_95_percent(accuracies, recovery):
    run = build(*SMALL, "rounds=30", "shift=blur", "shift.at=[5]")
    row = None
    for round_number, accuracy in zip((5, 10, 15, 20), accuracies, strict=True):
        evaluation = Evaluation({"accuracy": accuracy}, {}, [], [])
        columns = measure_recovery(run, round_number, evaluation, row)
        row = {"round": round_number, "accuracy": accuracy, **columns}
    assert row.get("recovery") == recovery
    assert row["since_shift"] == 15


def test_models_and_samples_of_a_finished_run_are_those_of_its_last_world(drifted):
    run = fedpfl.load(drifted)
    federation = build(*SMALL, *DRIFT).in_round(4).federation
    number = federation.partition_number(0)
    x, y = run.samples(number)
    assert_same((x, y), (federation.x[federation.test[0]], federation.y[federation.test[0]]))
    hits = (run.predict(number, x).argmax(1) == y).double().mean() * 100
    recorded = run.clients.set_index("client")["accuracy"][number]
    assert float(hits) == pytest.approx(recorded)


@pytest.mark.full
def test_two_processes_play_the_run_of_one(drifted, tmp_path):
    result = wait_for(torchrun(2, *SMALL, *DRIFT, "hydra.run.dir=run", cwd=tmp_path))
    assert result.code == 0, result.err
    assert read_table(tmp_path / "run" / "rounds.csv") == read_table(drifted / "rounds.csv")


COMBINATIONS = """
method=fedavg shift=noise shift.at=[1] unseen=0.25 validation=0.2 eval.finetune_epochs=1 eval.common=true => unseen_ft_accuracy
method=fedavg shift=label_permutation shift.at=[1] privacy=client privacy.noise=2 privacy.seed=1 => epsilon
method=ffa_lora adapter=lora adapter.layers=[linear] shift=contrast shift.at=[1] => before_shift
method=fedavg shift=rotation shift.at=[1] attack=backdoor attack.share=0.25 defence=median => asr
"""
"""Words => a column that has a number in the last row."""


@pytest.mark.parametrize(("text", "column"), keep_quick(read_cases(COMBINATIONS)))
def test_shifts_go_with_what_else_there_is(text, column, tmp_path):
    if "privacy" in text:
        pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")
    last = play(tmp_path / "run", "rounds=2", *text.split())[-1]
    assert float(last[column]) >= 0


def test_an_attack_poisons_the_samples_of_the_world():
    words = ("shift=rotation", "shift.at=[2]", "attack=label_flip", "attack.share=0.25")
    run = build(*SMALL, *words).in_round(3)
    assert run.adversary
    poisoned = run.adversary.poisoned
    honest = run.adversary.honest[0]
    assert_same(poisoned.x[poisoned.train[honest]], run.federation.x[run.federation.train[honest]])


def test_groups_never_take_part_in_a_run(tmp_path):
    """The newcomers are those of the group, by the names that the data set gives."""
    rng = np.random.default_rng(0)
    names = np.array(["art", "photo", "sketch"])
    x, path = rng.integers(0, 256, (90, 1, 8, 8), dtype=np.uint8), tmp_path / "own.npz"
    np.savez(path, x=x, y=np.arange(90) % 3, groups=np.repeat(names, 30))
    words = (
        *("dataset=npz", format_override("dataset.path", path), "partition=groups"),
        *("clients=6", "unseen_groups=[photo]", "rounds=1"),
    )
    last = play(tmp_path / "run", *words)[-1]
    assert float(last["unseen_accuracy"]) >= 0
    clients = read_table(tmp_path / "run/clients.csv")
    assert [(row["name"], row["unseen"]) for row in clients] == [
        (f"{name} ({number})", str(int(name == "photo"))) for name in names for number in (1, 2)
    ]
