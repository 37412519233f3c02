"""Every word is understood or refused in one line; what nobody reads is no error."""

import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import pytest

import fedpfl
from fedpfl import __main__ as fedpfl_command
from fedpfl import board, check, export, federate, tune
from fedpfl.config.overrides import quote_word
from fedpfl.report import __main__ as report
from fedpfl.runner import session
from tests.command import TINY, call_main, run_command, snapshot
from tests.conftest import read_cases

COMMANDS = {
    **{"board": board.main, "check": check.main, "export": export.main, "federate": federate.main},
    **{"fedpfl": fedpfl_command.main, "report": report.main, "tune": tune.main},
}
REFUSED = r"""
# one dash, which Hydra and argparse would split or cut short
train -participation=1.0 => keys have no dash: participation=1.0
fedpfl -participation=1.0 => -participation=1.0 is no command
export a b --data x => did you mean --data-dir?
report tables --bogus => --bogus is no option; did you mean --out?; python -m fedpfl.report tables --help tells what it takes
# empty, without a value, of another command
fedpfl '' => an empty word is no command
train seed 3 => 'seed' cannot be read as key=value; write KEY=VALUE
export --flower d --data-dir x method=fedavg => --data-dir is for a run's models
# texts
train name=ü => a text is quoted: "name='ü'"
train name=a,b => one text is quoted: "name='a,b'"
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


def test_data_that_one_of_several_lacks_are_told_before_the_first_run(tmp_path, monkeypatch):
    words = ("-m", *TINY, "dataset=digits,mnist", "dataset.download=false")
    result = run_command(*words, cwd=tmp_path)
    assert (result.code, len(result.err.splitlines())) == (2, 1)
    assert "data set mnist is not in data_dir=data" in result.err
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fedpfl.FedpflError, match="data set mnist is not in data_dir"):
        fedpfl.sweep(*TINY, "dataset.download=false", dataset=["digits", "mnist"])
    assert snapshot(tmp_path) == {}
