"""`parametrize_with_promises` in an author's own pytest: right code passes, planted faults fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedpfl.testing import parametrize_with_promises
from tests.conftest import ROOT

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

TESTS = """
from fedpfl.testing import parametrize_with_promises
from mine import {object}


@parametrize_with_promises({kind}="{right}", plugins=["mine.py"])
def test_right(check):
    check()


@parametrize_with_promises({kind}="{wrong}", plugins=["mine.py"])
def test_wrong(check):
    check()


@parametrize_with_promises({kind}={object})
def test_object(check):
    check()
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Run test_mine.py in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-rfs", "-p", "no:cacheprovider", *options]
    command += ["-o", "addopts=", "test_mine.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "planted", "broken"),
    [
        ("method", "right", "wrong", "Wrong", "both backends agree]"),
        (
            "model",
            "small",
            "unseeded",
            "Unseeded",
            "its calls leave nothing behind but in buffers]",
        ),
        ("dataset", "lines", "noise", "unseeded", "the same bit for bit when it is read again]"),
        ("partition", "halves", "drawn", "drawn", "deals the same for the same seed]"),
    ],
)
def test_an_authors_tests_tell_right_from_wrong(kind, right, wrong, planted, broken, tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    text = TESTS.format(kind=kind, right=right, wrong=wrong, object=planted)
    (tmp_path / "test_mine.py").write_text(text)
    result = run_pytest(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert not any("::test_right[" in line for line in failed), result.stdout
    for test in ("test_wrong", "test_object"):
        assert any(f"::{test}[" in line and broken in line for line in failed), result.stdout
    assert "fedpfl.testing.promises.Unkept" in result.stdout


def test_the_documented_tests_run(tmp_path):
    blocks = re.findall("```python\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.DOTALL)
    (text,) = [block for block in blocks if "parametrize_with_promises" in block]
    (tmp_path / "test_mine.py").write_text(text)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    result = run_pytest(tmp_path, "-k", "equal or right_form")
    assert result.returncode == 0, result.stdout + result.stderr


def test_one_kind_is_given():
    with pytest.raises(TypeError, match="give one of method, model, dataset and partition"):
        parametrize_with_promises()
    with pytest.raises(TypeError, match="give one of"):
        parametrize_with_promises(method="fedavg", model="cnn")
