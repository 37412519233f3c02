"""The benchmark runs, and its floor computes the gradient that it claims to."""

import json

import pytest
import torch
import torch.nn.functional as F

from benchmarks.__main__ import main
from benchmarks.gpu import FORMS
from benchmarks.harness import Task
from benchmarks.variants import bare
from fedpfl import models
from tests.conftest import keep_quick

TASK = Task(samples=20_000, rounds=1)


@pytest.mark.parametrize("kernels", keep_quick([bare.HandWrittenCnn4, bare.TracedKernels]))
def test_bare_kernels_compute_autograds_gradient(kernels):
    fed = TASK.federation()
    more = ([0],) if kernels is bare.TracedKernels else ()
    own = kernels(TASK, fed, "fp32", *more)
    n = min(32, int(fed.train_sizes[0]))
    x, y = fed.normalize(fed.x[:n]).contiguous(memory_format=torch.channels_last), fed.y[:n]
    net = models.build_network("cnn4", fed.shape, fed.classes, 42)
    params = {name: p.clone().requires_grad_() for name, p in net.params.items()}
    loss = F.cross_entropy(net.bind({}, training=True)(params, x), y)
    wanted = torch.autograd.grad(loss, list(params.values()))
    with torch.no_grad():
        for grad, right in zip(own.gradient(own.initial_params, x, y), wanted, strict=True):
            torch.testing.assert_close(grad, right, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_convolutions_are_vmaps_with_both_gradients(form):
    x = torch.randn(3, 4, 2, 9, 9, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 5, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    results = []
    for convolve in (FORMS[form], torch.vmap(F.conv2d)):
        out = convolve(x, weight)
        results.append([out, *torch.autograd.grad(out.sin().sum(), [x, weight])])
    torch.testing.assert_close(*results)


def run_benchmark(name, *arguments):
    """Run `python -m benchmarks NAME` in this process; returns its exit status."""
    try:
        main([name, *arguments])
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.full
def test_the_table_and_its_json(tmp_path, capfd):
    variants, out = ("plain", "loop fp32"), tmp_path / "bench.json"
    small = ("--rounds=1", "--repeats=1", "--width=2", f"--samples={TASK.samples}", f"--out={out}")
    assert run_benchmark("speed", *small, "--variants", *variants) == 0
    lines = capfd.readouterr().out.splitlines()[2:4]
    assert [line.split(" | ")[2] for line in lines] == list(variants)
    written = json.loads(out.read_text())
    assert set(written["results"]) == set(variants)
    (ours,) = written["results"]["loop fp32"]
    shares = [ours[f"share_{part}"] for part in ("train", "evaluate", "hooks", "log")]
    assert 0.5 < sum(shares) < 1.05
    assert ours["samples"] == written["results"]["plain"][0]["samples"]
