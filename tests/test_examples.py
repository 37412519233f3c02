"""Each script in examples/ runs, and prints what it promises."""

import runpy
import sys

import pytest

from tests.conftest import ROOT

EXAMPLES = ROOT / "examples"
PROMISED = {"hospitals": "", "your_data": "fedavg_ft"}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    runpy.run_path(str(path), run_name="__main__")
    assert PROMISED[path.stem] in capsys.readouterr().out
