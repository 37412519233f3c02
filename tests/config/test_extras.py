"""Without the package of an extra, one line says what to install."""

import re
import sys
from pathlib import Path

import pytest

from fedpfl.data.datasets import load_samples
from fedpfl.record.loggers import make_loggers
from tests.conftest import read_cases
from tests.data.promises import one_line

USES = {
    "data": lambda: load_samples("hf", "unused", path="unused"),
    **{name: lambda name=name: make_loggers({name: {}}) for name in ("tensorboard", "mlflow")},
    "wandb": lambda: make_loggers({"wandb": {}}),
}
ABSENT = """
data | datasets | pip install -e '.[hf]'
wandb | wandb | logger=wandb needs the package wandb: pip install wandb
tensorboard | tensorboard | logger=tensorboard needs the package tensorboard: pip install tensorboard, or another
mlflow | mlflow | logger=mlflow needs the package mlflow: pip install mlflow, or another logger
"""
"""What needs packages | which | what is said."""


@pytest.mark.parametrize(("use", "names", "line"), read_cases(ABSENT, " | "))
def test_what_is_absent_is_named(use, names, line, monkeypatch):
    for name in names.split():
        monkeypatch.setitem(sys.modules, name, None)
    assert line in one_line(USES[use])


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_folder_of_its_name_is_no_package(name, monkeypatch, tmp_path):
    """Python would take it for one."""
    (tmp_path / name).mkdir()
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert f"needs the package {name}" in one_line(USES[name])


def test_no_text_installs_this_project_by_its_name():
    """No package index has it: its extras are installed from a checkout."""
    root = Path(__file__).parents[2]
    texts = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/*")]
    for folder in ("fedpfl", "conf", "hydra_plugins"):
        texts += [path for path in (root / folder).rglob("*") if path.suffix in (".py", ".yaml")]
    texts.remove(root / "fedpfl" / "ground" / "errors.py")  # which words it
    named = re.compile(r"pip install [^`\n]*(?<![-./\w])fedpfl\b(?!\.)|[\"']fedpfl\[")
    assert not [path for path in texts if path.is_file() and named.search(path.read_text("utf8"))]
