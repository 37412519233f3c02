"""Trials of a search join no table, figure, page, rank or list unless somebody asks for them."""

import shutil

import pytest

from fedpfl.report import groups, runs
from fedpfl.report.__main__ import main
from tests.report.test_report import amend, read_refusal, write_run

SEARCH = {"search": "5ea2c4"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Two final runs of each method and partition, and a trial that agrees but by seed."""
    root = tmp_path_factory.mktemp("outputs")
    methods = {"fedavg": 80.0, "fedprox": 84.0, "local_only": 70.0}
    for alpha in (0.1, 0.5):
        for name, accuracy in methods.items():
            changes = {"method": {"name": name}, "partition": {"alpha": alpha}}
            for seed in (43, 44):
                place = root / "final" / f"a{alpha}" / name / "k" / f"seed{seed}"
                write_run(place, {2: accuracy, 4: accuracy + seed / 10}, seed=seed, **changes)
            trial = root / "trials" / "search-5ea2c4" / f"a{alpha}" / name / "k" / "seed42"
            amend(write_run(trial, {2: 1.0, 4: 1.0}, seed=42, **changes), **SEARCH)
    return root


def seeds(found) -> set[tuple[int, ...]]:
    return {tuple(run.seed for run in group.runs) for group in groups(found)}


def test_a_trial_is_no_seed_of_a_group_wherever_it_lies(outputs, tmp_path):
    """Three seeds were shown where two are final."""
    assert seeds(runs(outputs)) == {(43, 44)}
    assert seeds(runs(outputs, trials=True)) == {(42, 43, 44)}
    moved = tmp_path / "digits" / "moved"
    shutil.copytree(outputs / "final", tmp_path / "digits" / "all")
    shutil.copytree(outputs / "trials" / "search-5ea2c4", moved)
    assert seeds(runs(tmp_path)) == {(43, 44)}


@pytest.mark.parametrize("words", ["tables --format csv", "ls --format csv"])
def test_commands_leave_trials_out_and_say_so(words, outputs, capsys):
    """All commands read directories in one place."""
    texts = {}
    for option in ("", "--trials"):
        assert main([*words.split(), str(outputs), *option.split()]) == 0
        texts[option], err = capsys.readouterr()
        assert ("left out 6 trials of searches; --trials shows them" in err) == (not option)
    assert texts[""] != texts["--trials"]
    assert "seed42" not in texts[""]


def test_a_folder_of_trials_alone_is_one_line(outputs, capsys):
    told = "there are no runs but 6 trials of searches; --trials shows them"
    for name in ("tables", "figures", "html", "ls", "ranks", "clean"):
        line = read_refusal(capsys, name, outputs / "trials")
        assert line == f"{outputs / 'trials'}: {told}"
