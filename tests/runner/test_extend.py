"""A run gone on with for more rounds is one of that length."""

import shutil

import pytest

from tests.command import (
    TINY,
    play_run,
    read_summary,
    rewrite_summary,
    run_command,
    snapshot,
)
from tests.conftest import keep_quick, read_cases
from tests.record.test_damage import assert_ends_as

COMMON = (
    *TINY,
    *("method=ditto", "local.decay=0.9", "eval.every=2"),
    *("eval.finetune_epochs=1", "eval.finetune_every=4", "validation=0.25", "unseen=0.25"),
)


OTHER = "extend: r3 holds no run of these settings"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of 2, 3 and 5 rounds."""
    root = tmp_path_factory.mktemp("runs")
    for rounds in (2, 3, 5):
        play_run(root / f"r{rounds}", *COMMON, f"rounds={rounds}")
    return root


@pytest.mark.parametrize("rounds", keep_quick([2, 3]))
def test_an_extended_run_is_one_of_that_length(runs, rounds):
    """Round 3 is evaluated for being the last one only, and round 2 fine-tuned for that."""
    own = f"from{rounds}"
    before = snapshot(runs / f"r{rounds}")
    result = run_command(*COMMON, "rounds=5", f"extend=r{rounds}", f"hydra.run.dir={own}", cwd=runs)
    assert result.code == 0, result.err
    assert f"round {rounds + 1}/5" in result.err
    assert f"round {rounds}/5" not in result.err
    assert snapshot(runs / f"r{rounds}") == before
    assert_ends_as(runs / own, runs / "r5")
    found, whole = read_summary(runs / own), read_summary(runs / "r5")
    for key in ("identity", "data", "rounds_played"):
        assert found[key] == whole[key]
    assert "round 5/5" not in play_run(runs / own, *COMMON, "rounds=5")  # whoever asks


REFUSED = f"""
extend=absent => absent holds no finished run; give the directory of one
extend=r3 local.lr=0.1 => {OTHER}, seed 42 and fewer rounds than 6
extend=r3 method=fedphp => not for method=fedphp, which depends on the number of rounds
extend=other => on other data
"""


def test_what_cannot_be_extended_is_one_line_and_leaves_nothing(runs):
    shutil.copytree(runs / "r3", runs / "other")
    rewrite_summary(runs / "other", data="other")
    for options, message in read_cases(REFUSED):
        words = ("rounds=6", *options.split(), "hydra.run.dir=refused")
        result = run_command(*COMMON, *words, cwd=runs)
        assert result.code == 2
        (line,) = result.complaints
        assert message in line
        assert not (runs / "refused").exists()
