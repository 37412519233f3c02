"""`parametrize_with_promises` in an author's own pytest: right code passes, planted faults fail."""

import re
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
from _pytest.pytester import SysModulesSnapshot

from fedpfl.config import plugins
from fedpfl.testing import parametrize_with_promises
from tests.conftest import ROOT

pytest_plugins = ["pytester"]

PLUGIN = """
import numpy as np
from torch import nn
from fedpfl.data.datasets import Raw
from fedpfl.data.partition import Partition
from fedpfl.methods import FedAvg


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


def drawn(y, clients, seed):
    parts = np.array_split(np.random.default_rng().permutation(len(y)), clients)
    return Partition(tuple(part[len(part) // 2 :] for part in parts), tuple(part[: len(part) // 2] for part in parts))
"""

TESTS = """
from fedpfl.testing import parametrize_with_promises as ask
from mine import Unseeded, Wrong, drawn, unseeded
"""
for argument in ("method=Wrong", "model=Unseeded", "dataset=unseeded", "partition=drawn"):
    kind = argument.partition("=")[0]
    TESTS += f"@ask({argument})\ndef test_{kind}(check):\n    check()\n"

PLANTED = {
    "method": "both backends agree",
    "model": "a round on loop equals a plain PyTorch loop",
    "dataset": "is the same bit for bit when it is read again",
    "partition": "deals the same for the same seed",
}


@pytest.fixture(scope="module", autouse=True)
def kept_modules() -> Iterator[None]:
    """Have pytester forget an author's modules alone: Hydra's and torch's are not loaded twice."""

    def forget_authors_modules(snapshot: SysModulesSnapshot) -> None:
        for name in ("mine", "test_mine"):
            sys.modules.pop(name, None)

    with mock.patch.object(SysModulesSnapshot, "restore", forget_authors_modules):
        yield


@pytest.fixture
def author(pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    """The folder of an author with a pytest of its own, in this process."""
    yield pytester
    plugins.load_plugins([])


def run_pytest(author: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    author.makepyfile(test_mine=text)
    return author.runpytest_inprocess("-rfs", "-p", "no:cacheprovider", *options)


def test_an_authors_tests_find_planted_faults(author):
    author.makepyfile(mine=PLUGIN)
    author.syspathinsert()
    items = [f"test_mine.py::test_{kind}[{promise}]" for kind, promise in PLANTED.items()]
    result = run_pytest(author, TESTS, *items)
    failed = [line for line in result.outlines if line.startswith("FAILED")]
    assert [line.partition(" - ")[0] for line in failed] == [f"FAILED {item}" for item in items]
    result.stdout.fnmatch_lines("*fedpfl.testing.promises.Unkept*")


def test_the_documented_tests_run(author):
    blocks = re.findall("```python\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "parametrize_with_promises" in block]
    (author.path / "docs").symlink_to(ROOT / "docs")
    author.syspathinsert()
    result = run_pytest(author, text, "-k", "stored or seed")
    assert result.ret == 0, result.outlines
    assert result.parseoutcomes()["passed"] > 1


def test_one_kind_is_given():
    with pytest.raises(TypeError, match="give one of method, model, dataset and partition"):
        parametrize_with_promises()
    with pytest.raises(TypeError, match="give one of"):
        parametrize_with_promises(method="fedavg", model="cnn")
