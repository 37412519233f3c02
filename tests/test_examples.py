"""Each script in examples/ runs, and prints what it promises."""

import re
import runpy
import sys

import pytest

from fedpfl.config import plugins
from tests.conftest import ROOT, keep_only

EXAMPLES = ROOT / "examples"
PROMISED = {
    "attack": "multi_krum",
    "callback": "finished after round",
    "first_run": "client 7 is right on",
    "hospitals": "",
    "language": "'task': ",
    "lora": "fedsa_lora with LoRA",
    "mixed": "client 1 is right on",
    "own_method": "\n          0.5 ",
    "own_network": "features.1.running_var",
    "private": "epsilon",
    "sweep": "\\begin{tabular}",
    "tuning": "method.layers",
    "wandb_offline": "wandb/offline-run-",
    "your_data": "fedavg_ft",
}
PATHS = sorted(EXAMPLES.glob("*.py"))
QUICK = {"hospitals"}
FEWER = {r"(rounds=|\"rounds\": )\d+": r"\g<1>2", r"(trials|seeds)=\d": r"\1=1"}


def test_an_example_is_short():
    assert {
        path.stem for path in PATHS if not 15 <= len(path.read_text().splitlines()) <= 40
    } == set()


@pytest.fixture(autouse=True)
def forgotten():
    """Leave the choices as they were."""
    yield
    plugins.load_plugins([])


@pytest.mark.parametrize(
    "full", [False, pytest.param(True, marks=pytest.mark.full)], ids=["small", "full"]
)
@pytest.mark.parametrize("name", keep_only([path.stem for path in PATHS], QUICK))
def test_an_example_runs(name, full, tmp_path, monkeypatch, capsys):
    """With few rounds, or as it stands."""
    if name == "language":
        pytest.importorskip("transformers", reason="needs the extras lm and hf")
        pytest.importorskip("datasets", reason="needs the extras lm and hf")
    text = (EXAMPLES / f"{name}.py").read_text()
    for pattern, shorter in {} if full else FEWER.items():
        text = re.sub(pattern, shorter, text)
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    runpy.run_path(f"{name}.py", run_name="__main__")
    assert PROMISED[name] in capsys.readouterr().out
