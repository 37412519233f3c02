"""The benchmark runs, and its floor computes the gradient that it claims to."""

import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fedpfl import models
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from bench import bare, plain
from bench.task import Task

TASK = Task(samples=20_000, rounds=1)


@pytest.mark.parametrize("kernels", ["by hand", "traced"])
def test_bare_kernels_compute_autograds_gradient(kernels):
    fed = TASK.federation()
    own = bare.CNN4(fed, "fp32") if kernels == "by hand" else bare.Traced("cnn4", fed, "fp32", [0])
    n = min(32, int(fed.train_sizes[0]))
    x, y = fed.normalize(fed.x[:n]).contiguous(memory_format=torch.channels_last), fed.y[:n]
    net = models.build("cnn4", fed.shape, fed.classes, 42)
    params = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    wanted = torch.autograd.grad(F.cross_entropy(net.bind({}, training=True)(params, x), y), list(params.values()))
    with torch.no_grad():
        for grad, right in zip(own.gradient(own.initial, x, y), wanted, strict=True):
            torch.testing.assert_close(grad, right, atol=1e-6, rtol=1e-4)


def test_the_plain_network_is_cnn4():
    fed = TASK.federation()
    assert sum(p.numel() for p in plain.cnn4(fed).parameters()) == 582_026


def run(tmp_path, *arguments):
    out = tmp_path / "bench.json"
    command = [sys.executable, "scripts/benchmark.py", "--rounds=1", "--repeats=1", "--samples=20000", f"--out={out}"]
    result = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(out.read_text())


def test_the_table_and_its_json(tmp_path):
    variants = ("plain", "loop fp32", "loop@disk fp32", "bare fp32")
    printed, written = run(tmp_path, "--variants", *variants)
    assert [line.split("  ")[0] for line in printed.splitlines()[1:5]] == list(variants)
    assert set(written["results"]) == set(variants)
    (ours,) = written["results"]["loop fp32"]
    shares = [ours[f"share_{part}"] for part in ("train", "evaluate", "hooks", "log")]
    assert min(shares) > 0
    assert 0.5 < sum(shares) < 1.05
    assert ours["samples"] == written["results"]["plain"][0]["samples"]


@pytest.mark.parametrize("script", ["benchmark", "overhead"])
def test_without_the_data_it_says_so_in_one_line(tmp_path, script):
    command = [sys.executable, f"scripts/{script}.py", "--data", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert result.stderr.startswith(f"fedpfl: data set fmnist is not in data_dir={tmp_path}")
    assert result.stderr.count("\n") == 1
