"""Convolve many models' images, each with the model's own weight, by Triton kernels.

Each is a product of matrices, of which one has windows: what an entry of the weight meets at a
pixel of the output. Windows are gathered while they are multiplied, and never stored. Sums have a
fixed order and no atomics, so that the same tensors give the same bits.

TRITON_INTERPRET=1 runs this on a CPU. The interpreter of Triton 3.7 multiplies the bits of bf16 as
if they were whole numbers, and cuts off where it should round. There bf16 becomes fp32 before a
product, which is exact, and PyTorch rounds the result: a GPU alone tries `tl.dot` of bf16.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE, STEP = 128, 32
"""Rows of a tile of the result, and terms of a step of its sums."""
PROGRAMS = 512
"""So many share the gradient at weights of all models, on any GPU, as their number decides bits."""
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Shape(NamedTuple):
    """Hold the sizes of a convolution, `inputs` and `outputs` its channels."""

    batch: int
    inputs: int
    outputs: int
    size: int
    padding: int
    height: int
    width: int
    rows: int
    columns: int
    tile: int  # outputs of a tile
    precision: str


@triton.jit
def load_windows(images, pixels, entries, shape: tl.constexpr):
    """Load windows `[pixels, entries]` of images `[batch, inputs, height, width]`."""
    # Of a window the first entry, and of an entry its distance from there.
    sample = pixels // (shape.rows * shape.columns)
    top = pixels // shape.columns % shape.rows - shape.padding
    left = pixels % shape.columns - shape.padding
    channel = entries // (shape.size * shape.size)
    down, right = entries // shape.size % shape.size, entries % shape.size
    firsts = (sample * (shape.inputs * shape.height) + top) * shape.width + left
    distances = (channel * shape.height + down) * shape.width + right
    inside = (sample < shape.batch)[:, None] & (channel < shape.inputs)[None, :]
    if shape.padding > 0:
        row, column = top[:, None] + down[None, :], left[:, None] + right[None, :]
        inside &= (row >= 0) & (row < shape.height) & (column >= 0) & (column < shape.width)
    return tl.load(images + firsts[:, None] + distances[None, :], mask=inside, other=0)


@triton.jit
def find_output_places(pixels, outputs, shape: tl.constexpr):
    """Return where pixels of outputs are in `[batch, outputs, rows, columns]`, and which are."""
    area: tl.constexpr = shape.rows * shape.columns
    sample = pixels // area
    places = (sample * shape.outputs)[:, None] + outputs[None, :]
    inside = (sample < shape.batch)[:, None] & (outputs < shape.outputs)[None, :]
    return places * area + (pixels % area)[:, None], inside


@triton.jit
def add_product(total, left, right, shape: tl.constexpr):
    """Add a product to sums in fp32."""
    if IS_INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=shape.precision)


@triton.jit
def convolve_kernel(
    images, weights, results, shape: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    """Compute a tile of one model's output."""
    model = tl.program_id(0).to(tl.int64)
    pixels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    width: tl.constexpr = shape.tile
    outputs = tl.program_id(2) * width + tl.arange(0, width)
    count: tl.constexpr = shape.inputs * shape.size * shape.size
    images += model * (shape.batch * shape.inputs * shape.height * shape.width)
    weights += model * (shape.outputs * count)
    results += model * (shape.batch * shape.outputs * shape.rows * shape.columns)
    total = tl.full((TILE, width), 0, tl.float32)
    for start in range(0, count, STEP):
        entries = start + tl.arange(0, STEP)
        windows = load_windows(images, pixels, entries, shape)
        inside = (entries < count)[:, None] & (outputs < shape.outputs)[None, :]
        places = outputs[None, :] * count + entries[:, None]
        weight = tl.load(weights + places, mask=inside, other=0)
        total = add_product(total, windows, weight, shape)
    places, inside = find_output_places(pixels, outputs, shape)
    tl.store(results + places, total, mask=inside)


@triton.jit(do_not_specialize=["steps"])
def sum_kernel(
    images, upstream, parts, steps, shape: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    """Compute a tile of one model's gradient at its weight, from `steps` tiles of pixels."""
    model = tl.program_id(0).to(tl.int64)
    count: tl.constexpr = shape.inputs * shape.size * shape.size
    tiles: tl.constexpr = (count + TILE - 1) // TILE
    entries = tl.program_id(1) % tiles * TILE + tl.arange(0, TILE)
    width: tl.constexpr = shape.tile
    outputs = tl.program_id(1) // tiles * width + tl.arange(0, width)
    images += model * (shape.batch * shape.inputs * shape.height * shape.width)
    upstream += model * (shape.batch * shape.outputs * shape.rows * shape.columns)
    parts += (tl.program_id(2) * tl.num_programs(0) + model) * (shape.outputs * count)
    total = tl.full((TILE, width), 0, tl.float32)
    for step in range(steps):
        pixels = (tl.program_id(2) * steps + step) * STEP + tl.arange(0, STEP)
        windows = load_windows(images, pixels, entries, shape)
        places, inside = find_output_places(pixels, outputs, shape)
        gradient = tl.load(upstream + places, mask=inside, other=0)
        total = add_product(total, tl.trans(windows), gradient, shape)
    inside = (entries < count)[:, None] & (outputs < shape.outputs)[None, :]
    tl.store(parts + outputs[None, :] * count + entries[:, None], total, mask=inside)


class Convolution(torch.autograd.Function):
    """Convolve contiguous tensors with stride 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: int, warps: int) -> Tensor:
        """Return `[models, batch, outputs, rows, columns]`."""
        ctx.save_for_backward(x, weight)
        ctx.padding, ctx.warps = padding, warps
        return launch_convolution(x, weight, padding, warps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return both gradients: at images by a convolution with the weight turned round."""
        x, weight = ctx.saved_tensors
        upstream = upstream.contiguous()
        at_images = at_weight = None
        if ctx.needs_input_grad[0]:
            turned = weight.flip(-1, -2).transpose(1, 2).contiguous()
            padding = weight.shape[-1] - 1 - ctx.padding
            at_images = launch_convolution(upstream, turned, padding, ctx.warps)
        if ctx.needs_input_grad[1]:
            at_weight = launch_sum(x, upstream, weight.shape, ctx.padding, ctx.warps)
        return at_images, at_weight, None, None


def launch_convolution(x: Tensor, weight: Tensor, padding: int, warps: int) -> Tensor:
    """Return the convolution of contiguous tensors."""
    shape = describe_shape(x, weight.shape, padding)
    pixels = shape.batch * shape.rows * shape.columns
    size = len(x), shape.batch, shape.outputs, shape.rows, shape.columns
    results = x.new_empty(size, dtype=torch.float32 if IS_INTERPRETED else None)
    grid = len(x), triton.cdiv(pixels, TILE), triton.cdiv(shape.outputs, shape.tile)
    convolve_kernel[grid](x, weight, results, shape, TILE, STEP, num_warps=warps)
    return results.to(x.dtype)


def launch_sum(x: Tensor, upstream: Tensor, weight: torch.Size, padding: int, warps: int) -> Tensor:
    """Return the gradient at a weight of this size."""
    shape = describe_shape(x, weight, padding)
    entries = shape.inputs * shape.size * shape.size
    tiles = triton.cdiv(entries, TILE) * triton.cdiv(shape.outputs, shape.tile)
    all_steps = triton.cdiv(shape.batch * shape.rows * shape.columns, STEP)
    steps = triton.cdiv(all_steps, max(1, PROGRAMS // (len(x) * tiles)))
    grid = len(x), tiles, triton.cdiv(all_steps, steps)
    parts = x.new_empty((grid[2], *weight), dtype=torch.float32)
    sum_kernel[grid](x, upstream, parts, steps, shape, TILE, STEP, num_warps=warps)
    return parts.sum(0).to(x.dtype)


def describe_shape(x: Tensor, weight: torch.Size, padding: int) -> Shape:
    """Return the sizes of a convolution with a weight of this size."""
    _, batch, inputs, height, width = x.shape
    _, outputs, _, _, size = weight
    is_tf32 = torch.backends.cudnn.conv.fp32_precision == "tf32"
    return Shape(
        batch=batch,
        inputs=inputs,
        outputs=outputs,
        size=size,
        padding=padding,
        height=height,
        width=width,
        rows=height + 2 * padding - size + 1,
        columns=width + 2 * padding - size + 1,
        tile=min(64, max(16, triton.next_power_of_2(outputs))),
        precision="tf32" if is_tf32 else "ieee",
    )


def convolve(x: Tensor, weight: Tensor, padding: int = 0, warps: int = 8) -> Tensor:
    """Convolve images `[models, batch, inputs, height, width]` with a weight for each model."""
    return Convolution.apply(x.contiguous(), weight.contiguous(), padding, warps)
