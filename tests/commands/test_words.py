"""Every word is understood or refused in one line; what nobody reads is no error."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

import fedpfl
from fedpfl import __main__ as fedpfl_command
from fedpfl import board, check, export, federate, tune
from fedpfl.config.overrides import quote_word
from fedpfl.ground.words import check_words
from fedpfl.report import __main__ as report
from fedpfl.runner import session
from tests.command import TINY, call_main, run_command, snapshot
from tests.conftest import ROOT, keep_quick, read_cases

COMMANDS = {
    **{"board": board.main, "check": check.main, "export": export.main, "federate": federate.main},
    **{"fedpfl": fedpfl_command.main, "report": report.main, "tune": tune.main},
}
REFUSED = r"""
# one dash, which Hydra and argparse would split or cut short
train -participation=1.0 => keys have no dash: participation=1.0
train --participation=1.0 => keys have no dash: participation=1.0
board suite=small -participation=1.0 => keys have no dash: participation=1.0
fedpfl -participation=1.0 => -participation=1.0 is no command
export a b --data x => did you mean --data-dir?
report tables --bogus => --bogus is no option; did you mean --out?; python -m fedpfl.report tables --help tells what it takes
# empty, without a value, of another command
fedpfl '' => an empty word is no command
train seed 3 => 'seed' cannot be read as key=value; write KEY=VALUE
federate seed => 'seed' cannot be read as key=value; write KEY=VALUE
board small => suite: one of
tune method=fedavg hydra.mode=RUN => hydra.mode=RUN: tune sweeps by itself
export --flower d --data-dir x method=fedavg => --data-dir is for a run's models
# texts
train name=ü => a text is quoted: "name='ü'"
train name=a,b => one text is quoted: "name='a,b'"
train seed=choice(1,2) => seed=choice(1,2) is a sweep, which needs -m
"""


def test_what_is_not_understood_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = []
    for line, says in filter(lambda case: isinstance(case, tuple), read_cases(REFUSED)):
        command, *words = shlex.split(line)
        if command == "train":
            result = run_command(*words, cwd=tmp_path)
        else:
            result = call_main(COMMANDS[command], *words)
        is_line = re.fullmatch(r"fedpfl: [^\n]+\n", result.err)
        if result.code != 2 or says not in result.err or not is_line:
            wrong.append((line, result))
    assert not wrong
    assert snapshot(tmp_path) == {}


def test_known_options_stand_anywhere_and_negative_numbers_are_values():
    words = ["seed=1", "-m", "--caption", "x", "-1", "b=2"]
    assert check_words(words, {"-m", "--caption"}) == words
    with pytest.raises(fedpfl.FedpflError, match="did you mean --caption"):
        check_words(["--captoin"], {"--caption"})


def test_a_text_that_is_quoted_as_told_is_taken_as_it_is(tmp_path: Path) -> None:
    """As a shell reads the words; `$` alone would be an interpolation of Hydra's."""
    texts = ["ü a=b", "a\\'b", "$HOME`x`", "[a #;!"]
    quoted = " ".join(quote_word("name", text) for text in texts)
    shell = ["bash", "-c", f"printf '%s\\n' {quoted}"]
    words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
    for word, text in zip(words, texts, strict=True):
        with mock.patch.object(session, "Session") as play:
            assert run_command(word, cwd=tmp_path).code == 0
        assert play.call_args.kwargs["plan"].settings.name == text


# Sweeps


ABSENT = """
seed=1,2 partition=file partition.path=x.json => partition.path: there is no file x.json
seed=1,2 hydra/launcher=lockstep dataset=npz dataset.path=x.npz => dataset.path=x.npz is no file
hydra/sweeper=optuna local.lr=0.1,0.2 validation=0.1 model.weights=x.pt => model.weights: there is no file
"""


@pytest.mark.parametrize(("words", "says"), keep_quick(read_cases(ABSENT)))
def test_what_all_runs_of_a_sweep_lack_is_told_once(words: str, says: str, tmp_path: Path) -> None:
    result = run_command("-m", *words.split(), cwd=tmp_path)
    assert result.code == 2
    assert re.fullmatch(rf"fedpfl: {says}[^\n]*\n", result.err), result.err
    assert snapshot(tmp_path) == {}


def test_data_that_one_of_several_lacks_are_told_before_the_first_run(tmp_path, monkeypatch):
    words = ("-m", *TINY, "dataset=digits,mnist", "dataset.download=false")
    result = run_command(*words, cwd=tmp_path)
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "data set mnist is not in data_dir=data" in result.err
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fedpfl.FedpflError, match="data set mnist is not in data_dir"):
        fedpfl.sweep(*TINY, "dataset.download=false", dataset=["digits", "mnist"])
    assert snapshot(tmp_path) == {}


def test_a_sweep_of_an_experiment_of_ones_own_is_not_dropped(tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    sweep = {"hydra": {"sweeper": {"params": {"seed": "1,2", "local.lr": 0.2}}}}
    text = f"# @package _global_\n{yaml.safe_dump(sweep, sort_keys=False)}"
    (tmp_path / "own/experiment/mine.yaml").write_text(text)
    words = ["--config-dir=own", "experiment=mine"]
    with mock.patch.object(session, "Session") as play:
        result = run_command(*words, cwd=tmp_path)
        assert result.code == 2
        about = "experiment=mine sweeps over seed, local.lr, and this is one run: add -m, or give"
        assert result.err == f"fedpfl: {about} one value of each: seed=... local.lr=...\n"
        play.assert_not_called()
        assert run_command(*words, "seed=3", "local.lr=1", cwd=tmp_path).err == ""


# Help


def test_a_reader_that_leaves_is_no_error():
    """As `| head -1` does."""
    line = f"{sys.executable} -m fedpfl --help | true; echo ${{PIPESTATUS[0]}}"
    told = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True)
    assert (told.stdout, told.stderr) == ("0\n", "")
