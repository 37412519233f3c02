"""The CUDA path on a pretended GPU (`tests/pretend`), in a process of its own: it has to be there
before torch is.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT

CHECKS = "tests/pretend/checks.py"


@pytest.mark.full
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler to pretend a GPU with")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch is made for real GPUs")
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([CHECKS, "-m", "full or not full"], id="all methods"),
        pytest.param(["-m", "cuda"], id="all tests that need CUDA"),
    ],
)
def test_on_a_pretended_gpu(chosen):
    command = [
        *(sys.executable, "-m", "pytest", "-p", "tests.pretend", "-p", "no:cacheprovider"),
        "--tb=short",
        *chosen,
    ]
    own = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    result = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout
