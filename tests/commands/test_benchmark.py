"""The benchmark runs, and its floor computes the gradient that it claims to."""

import importlib
import itertools
import json
import math
import sys
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks.__main__ import main
from benchmarks.gpu import FORMS, convolve_grouped, find_error
from benchmarks.harness import Task
from benchmarks.variants import bare
from fedpfl import models
from fedpfl.engine.backends.backend import reproducible_arithmetic
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


def test_a_form_that_is_wrong_and_one_of_changing_bits_show():
    x, weight = torch.randn(2, 3, 2, 6, 6), torch.randn(2, 4, 2, 3, 3)
    assert find_error(convolve_grouped, x, weight, "fp32") < 1e-6
    assert find_error(lambda x, w: convolve_grouped(x, w.flip(-1)), x, weight, "fp32") > 0.1
    numbers = itertools.count()
    changing = find_error(lambda x, w: convolve_grouped(x, w) + next(numbers), x, weight, "fp32")
    assert math.isnan(changing)


def load_kernels(interpret, monkeypatch):
    """Load the Triton kernels anew, for the interpreter ("1") or for a GPU ("0")."""
    reason = "needs triton 3.7, which PyTorch has with CUDA"
    pytest.importorskip("triton", minversion="3.7", reason=reason)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.delitem(sys.modules, "benchmarks.variants.triton_convolution", raising=False)
    return importlib.import_module("benchmarks.variants.triton_convolution")


@pytest.mark.parametrize(("dtype", "padding"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_triton_kernels_are_vmaps_with_both_gradients(dtype, padding, monkeypatch):
    """There are several tiles, steps and parts, none full, and not a number behind each tensor. Of
    bf16, sums in fp32 are rounded once.
    """
    kernels = load_kernels("1", monkeypatch)
    monkeypatch.setattr(kernels, "PROGRAMS", 16)
    ours = partial(kernels.convolve, padding=padding)
    right = torch.vmap(partial(F.conv2d, padding=padding))
    sizes = (3, 15, 9, 8), (70, 15, 3, 3), (3, 70, 7 + 2 * padding, 6 + 2 * padding)
    tensors = [torch.randn(3, *size).to(dtype) for size in sizes]
    for tensor in tensors:
        tensor[2] = torch.nan
    results = []
    for convolve, kind in ((ours, dtype), (right, torch.float64)):
        *leaves, upstream = (tensor.to(kind)[:2].requires_grad_() for tensor in tensors)
        out = convolve(*leaves)
        gradients = torch.autograd.grad(out, leaves, upstream.detach())
        results.append([one.to(dtype) for one in (out, *gradients)])
    torch.testing.assert_close(*results, atol=1e-4, rtol=torch.finfo(dtype).eps)
    if dtype == torch.bfloat16:
        for found, wanted in zip(*results, strict=True):
            assert (found == wanted).double().mean() > 0.999


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_triton_kernels_compile_for_a_gpu_that_is_not_there(precision, monkeypatch, tmp_path):
    """The interpreter takes what the compiler refuses. Without tf32, no tensor core multiplies."""
    kernels = load_kernels("0", monkeypatch)
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    device = Mock(get_current_device=lambda: 0)
    device.get_current_target.return_value = GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(driver, "_active", device)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.empty(2, 3, 32, 9, 8, dtype=torch.bfloat16 if precision == "bf16" else None)
    weight = torch.empty(2, 40, 32, 3, 3)
    with reproducible_arithmetic(torch.device("cuda"), precision):
        shape = kernels.describe_shape(x, weight.shape, padding=1)
    tiles = kernels.TILE, kernels.STEP
    for kernel, tensors in (
        (kernels.convolve_kernel, (x, weight.to(x.dtype), x)),
        (kernels.sum_kernel, (x, x, weight, 8)),
    ):
        compiled = kernel.warmup(*tensors, shape, *tiles, grid=(1, 1, 1), num_warps=8)
        assert ("wgmma" in compiled.asm["ptx"]) == (precision != "fp32")


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
