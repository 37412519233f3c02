"""`parametrize_with_promises` in an author's own pytest: right code passes, planted faults fail."""

import re
from collections.abc import Iterator

import pytest

from fedpfl.config import plugins
from fedpfl.testing import parametrize_with_promises
from tests.conftest import ROOT, read_cases

pytest_plugins = ["pytester"]

PLUGIN = """
import numpy as np
from torch import nn
from fedpfl.data.datasets import Raw
from fedpfl.data.partition import Partition
from fedpfl.methods import FedAvg


class Right(FedAvg):
    pass


class Wrong(FedAvg):
    def loss(self, server, client, net, params, batch):
        return batch.losses(net(params, batch.x)).mean()  # over padded samples too


class Small(nn.Sequential):
    def __init__(self, shape, classes, width=4):
        super().__init__(nn.Flatten(), nn.Linear(int(np.prod(shape)), classes))


class Unseeded(Small):
    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        nn.init.constant_(self[1].bias, np.random.default_rng().random())


def stripes(source, count=60):
    rng = np.random.default_rng(0)
    return Raw(rng.integers(0, 99, (count, 1, 8, 8)).astype(np.uint8), rng.integers(0, 3, count))


def unseeded(source):
    raw = stripes(source)
    return raw._replace(x=np.random.default_rng().integers(0, 99, (60, 1, 8, 8)).astype(np.uint8))


def equal(y, clients, seed):
    parts = np.array_split(np.random.default_rng(seed).permutation(len(y)), clients)
    return Partition(tuple(part[len(part) // 2 :] for part in parts), tuple(part[: len(part) // 2] for part in parts))


def drawn(y, clients, seed):
    return equal(y, clients, np.random.default_rng().integers(2**31))


METHODS = {"right": Right, "wrong": Wrong}
MODELS = {"small": Small, "unseeded": Unseeded}
DATASETS = {"lines": stripes, "noise": unseeded}
PARTITIONS = {"halves": equal, "drawn": drawn}
"""

ASKED = """
right_method => method="right", plugins=FILES
right_model => model="small", plugins=FILES
right_dataset => dataset=stripes
right_partition => partition=equal
wrong_method => method=Wrong
wrong_model => model=Unseeded
wrong_dataset => dataset=unseeded
wrong_partition => partition=drawn
"""
TESTS = """
from fedpfl.testing import parametrize_with_promises as ask
from mine import Unseeded, Wrong, drawn, equal, stripes, unseeded

FILES = ["mine.py"]
"""
for name, what in read_cases(ASKED):
    TESTS += f"@ask({what})\ndef test_{name}(check):\n    check()\n"

PLANTED = {
    "method": "both backends agree]",
    "model": "its calls leave nothing behind but in buffers]",
    "dataset": "the same bit for bit when it is read again]",
    "partition": "deals the same for the same seed]",
}


@pytest.fixture
def author(pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    """The folder of an author with a pytest of its own, in this process."""
    yield pytester
    plugins.load_plugins([])


def run_pytest(author: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    author.makepyfile(test_mine=text)
    return author.runpytest_inprocess("-rfs", "-p", "no:cacheprovider", *options)


def test_an_authors_tests_tell_right_from_wrong(author):
    author.makepyfile(mine=PLUGIN)
    author.syspathinsert()
    result = run_pytest(author, TESTS, "-k", "agree or leave or again or deals")
    failed = [line for line in result.outlines if line.startswith("FAILED")]
    assert not any("::test_right_" in line for line in failed), failed
    assert result.parseoutcomes()["passed"] > 3
    for kind, promise in PLANTED.items():
        assert any(f"::test_wrong_{kind}[" in line and promise in line for line in failed), failed
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
