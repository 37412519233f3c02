"""Trials of a search join no table, figure, page, rank or list unless somebody asks for them."""

import pytest

from fedpfl.report import groups, runs
from tests.report.test_report import amend, read_output, read_refusal, write_run


@pytest.fixture
def outputs(tmp_path):
    """Two final runs, and a trial that agrees but by seed."""
    for seed in (43, 44):
        write_run(tmp_path / "final" / "fedavg" / "k" / f"seed{seed}", seed=seed)
    trial = tmp_path / "trials" / "search-5ea2c4" / "fedavg" / "k" / "seed42"
    amend(write_run(trial, seed=42), search="5ea2c4")
    return tmp_path


def test_a_trial_is_no_seed_of_a_group(outputs):
    """Three seeds were shown where two are final."""
    for options, seeds in (({}, (43, 44)), ({"trials": True}, (42, 43, 44))):
        (group,) = groups(runs(outputs, **options))
        assert tuple(run.seed for run in group.runs) == seeds


def test_commands_leave_trials_out_and_say_so(outputs, capsys):
    """All commands read directories in one place."""
    out, err = read_output(capsys, "ls", "--format", "csv", outputs)
    assert ("seed42" in out, err) == (False, "left out 1 trial of searches; --trials shows them\n")
    out, err = read_output(capsys, "ls", "--format", "csv", outputs, "--trials")
    assert ("seed42" in out, err) == (True, "")
    told = "there are no runs but 1 trial of searches; --trials shows them"
    for name in ("tables", "figures", "html", "ls", "ranks", "clean"):
        line = read_refusal(capsys, name, outputs / "trials")
        assert line == f"{outputs / 'trials'}: {told}"
