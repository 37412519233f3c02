"""`parametrize_with_promises` in an author's own pytest: right code passes, planted faults fail."""

import re

import numpy as np
import pytest
from torch import nn

from fedpfl.config import plugins
from fedpfl.data import datasets
from fedpfl.data.datasets import Raw
from fedpfl.data.partition import Partition
from fedpfl.methods import FedAvg
from fedpfl.models import MODELS
from fedpfl.testing import PromiseWarning, parametrize_with_promises
from fedpfl.testing.promises import Unkept
from tests.conftest import ROOT


class Wrong(FedAvg):
    def loss(self, server, client, net, params, batch):
        return batch.losses(net(params, batch.x)).mean()  # over padded samples too


class Unseeded(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))
        nn.init.constant_(self[1].bias, np.random.default_rng().random())


def unseeded(source):
    rng = np.random.default_rng()
    return Raw(rng.integers(0, 99, (60, 1, 8, 8)).astype(np.uint8), rng.integers(0, 3, 60))


def fixed(y, clients, seed, order=None):
    parts = np.array_split(np.arange(len(y)) if order is None else order, clients)
    return Partition(tuple(part[5:] for part in parts), tuple(part[:5] for part in parts))


def drawn(y, clients, seed):
    return fixed(y, clients, seed, np.random.default_rng().permutation(len(y)))


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """What is added for a test."""
    monkeypatch.setattr(datasets, "DATA_SETS", dict(datasets.DATA_SETS))
    yield
    MODELS.pop("Unseeded", None)
    plugins.load_plugins([])


def list_checks(mark):
    """Return pytest's items of a decorator by their names."""
    return {item.id: item.values[0] for item in mark.args[1]}


@pytest.mark.parametrize(
    ("choice", "title"),
    [
        ({"method": Wrong}, "both backends agree"),
        ({"model": Unseeded}, "a round on loop equals a plain PyTorch loop"),
        ({"dataset": unseeded}, "is the same bit for bit when it is read again"),
        ({"partition": drawn}, "deals the same for the same seed"),
    ],
)
def test_an_authors_tests_find_planted_faults(choice, title):
    with pytest.raises(Unkept, match=f"^{title}\n"):
        list_checks(parametrize_with_promises(**choice))[title]()


def test_what_may_be_on_purpose_is_a_warning():
    checks = list_checks(parametrize_with_promises(partition=fixed, clients=3))
    with pytest.warns(PromiseWarning, match="3 clients hold the same"):
        checks["deals differently for another seed"]()
    with pytest.raises(pytest.skip.Exception, match="another process needs the name"):
        checks["deals the same in another process"]()


def test_the_documented_tests_run(monkeypatch):
    blocks = re.findall("```python\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "parametrize_with_promises" in block]
    monkeypatch.chdir(ROOT)
    space = {}
    exec(text, space)
    (mark,) = space["test_halfway"].pytestmark
    list_checks(mark)["nothing is stored on the method"]()
