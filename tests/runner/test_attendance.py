"""A run in which nobody or almost nobody trains says so, and shows no accuracy of no model."""

import math

import pytest

import fedpfl
from fedpfl.record.columns import column_names, round_columns
from fedpfl.report import runs
from fedpfl.report.__main__ import main as report
from fedpfl.report.figures import accuracy_figure
from fedpfl.report.html import write_pages
from fedpfl.report.tables import accuracy_table
from fedpfl.runner import loop, trials
from tests.command import TINY, play_run, read_summary, read_table, rewrite_summary
from tests.conftest import keep_quick
from tests.record.test_damage import assert_ends_alike
from tests.report.test_report import add_columns, amend, write_run

WORDS = ("method=fedavg", *TINY, "clients=10", "rounds=4", "eval.finetune_epochs=1")
ACCURACIES = [name for name in column_names("test") if name in round_columns()]


UNTRAINED = [
    "system=simulated system.deadline=1e-6 validation=0.1 partition.samples_per_client=30",
    "system=simulated system.availability=1e-9",
    "partition.samples_per_client=2 partition.min_samples=2 partition.test_fraction=0.5",
]


@pytest.mark.parametrize("text", keep_quick(UNTRAINED))
def test_a_model_that_nobody_trained_is_no_result(text, tmp_path):
    words, run = text.split(), tmp_path / "run"
    lines = play_run(run, *WORDS, *words).splitlines()
    assert lines[-1].endswith("no client has made a step, so there is no accuracy")

    rows = read_table(run / "rounds.csv")
    assert len(rows) == 4
    untold = {*ACCURACIES, *loop.MODEL_COLUMNS} & rows[0].keys()
    assert untold > {"accuracy", "loss"}
    assert {row[name] for row in rows for name in untold} == {""}
    assert {row["accuracy"] for row in read_table(run / "clients.csv")} == {""}
    told = read_summary(run)
    assert (told["status"], told["trained"], told["clients"]) == ("finished", 0, 10)
    assert (told["best"], told["last"]) == ({}, {})
    assert "no client has made a step" in play_run(run, *WORDS, *words)  # it is finished already
    trial = trials.read_trial_result(run)  # of a search that does not fail by it
    assert (trial.lost, trial.value) == ("untrained", None)
    rewrite_summary(run, trained=1)
    with pytest.raises(fedpfl.FedpflError, match="no sample was held out"):
        trials.read_trial_result(run)


@pytest.mark.full
def test_an_accuracy_begins_with_the_first_step_whatever_interrupts_the_run(tmp_path):
    words = (*WORDS, "participation=0.1", "rounds=8", "seed=5")
    words += ("system=simulated", "system.dropout=0.8")
    lines = play_run(tmp_path / "whole", *words)
    rows = read_table(tmp_path / "whole/rounds.csv")
    trained = [row["participants"] != "0" for row in rows]
    first = trained.index(True)
    assert 0 < first < 7
    assert [bool(row["accuracy"]) for row in rows] == [False] * first + [True] * (8 - first)
    assert 0 < read_summary(tmp_path / "whole")["trained"] < 5
    assert "finished after round 8 in" in lines
    assert "no client has made a step, so" not in lines
    for stop in (first, first + 1):  # before anybody trained, and after
        part = tmp_path / f"part{stop}"
        for round in fedpfl.rounds(*words, directory=part):
            if round.row["round"] == stop:
                break
        play_run(part, *words)
        assert_ends_alike(part, tmp_path / "whole")
        assert read_summary(part)["trained"] == read_summary(tmp_path / "whole")["trained"]


# What is reported


@pytest.fixture
def mixed(tmp_path):
    """A good run of one method, an old run that nobody took part in, and one in which few did."""
    _, nobody, few = (
        write_run(tmp_path / name / "k" / "seed0", method={"name": name})
        for name in ("fedavg", "fedper", "ditto")
    )
    add_columns(nobody, participants=0)
    amend(add_columns(few, participants=[1, 0, 2, 1]), trained=40, clients=100)
    return tmp_path


def test_tables_lists_and_pages_say_who_did_not_train(mixed, capsys):
    nobody = "No accuracy, as no client has made a step: FedPer on FMNIST, Dir(0.1) (seed 0)."
    few = "Almost nobody trained: Ditto on FMNIST, Dir(0.1) (seed 0: 4 of 40 planned"
    made = accuracy_table(runs(mixed))
    assert made.notes[0] == nobody
    assert made.notes[1] == f"{few} participations took place)."
    assert not any("No evaluation to judge yet" in note for note in made.notes)
    accuracy = dict(zip(made.frame["method"], made.frame["accuracy"], strict=True))
    assert math.isnan(accuracy["FedPer"])
    assert (accuracy["FedAvg"], accuracy["Ditto"]) == (70.0, 70.0)
    for words in (["ls", str(mixed)], ["tables", str(mixed), "--format", "markdown"]):
        assert report(words) == 0
        assert "no client has made a step" in capsys.readouterr().out

    (page,) = write_pages([mixed], mixed / "pages")
    assert nobody in page.read_text()
    assert few in page.read_text()

    message = r"nothing to draw. No accuracy, as no client has made a step: FedPer"
    with pytest.raises(fedpfl.FedpflError, match=message):
        accuracy_figure(runs(mixed / "fedper"), mixed / "figure")
