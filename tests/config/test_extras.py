"""Without the package of an extra, one line says what to install."""

import sys

import pytest

from fedpfl.data.datasets import load_samples
from fedpfl.models import build_network
from fedpfl.record.loggers import make_loggers
from tests.conftest import read_cases
from tests.data.promises import one_line

USES = {
    "data": lambda: load_samples("hf", "unused", path="unused"),
    "language": lambda: build_network("hf", (4,), 2, 0),
    "wandb": lambda: make_loggers({"wandb": {}}),
    "tensorboard": lambda: make_loggers({"tensorboard": {}}),
}
ABSENT = """
data | datasets | pip install -e '.[hf]'
language | transformers | model=hf needs the package transformers; pip install -e '.[lm]'
wandb | wandb | logger=wandb needs the package wandb: pip install wandb
tensorboard | tensorboard | logger=tensorboard needs the package tensorboard: pip install tensorboard, or another
"""
"""What needs packages | which | what is said."""


@pytest.mark.parametrize(("use", "names", "line"), read_cases(ABSENT, " | "))
def test_what_is_absent_is_named(use, names, line, monkeypatch):
    for name in names.split():
        monkeypatch.setitem(sys.modules, name, None)
    assert line in one_line(USES[use])
