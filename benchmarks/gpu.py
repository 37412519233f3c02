"""What a GPU does in a round of training, beyond how long it takes.

    python -m benchmarks gpu waits|equal|profile|convolutions [--precision fp32|tf32|bf16]

`waits`: how often the host waits for the GPU in a round, and where. `equal`: whether two runs give
the same bits. `profile`: the kernels of a round that take longest. `convolutions`: microseconds of
the gradients of ten models' convolutions, side by side, in each form that PyTorch has for them and
by Triton kernels, with the largest error.
The network is cnn4 with ten clients a round and random 3x32x32 images; rounds are of FedOBP, with
CUDA graphs.
"""

from __future__ import annotations

import collections
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import harness
from benchmarks.harness import LOCAL, SEED, Task
from benchmarks.variants.fedpfl_backend import METHOD
from fedpfl import engine
from fedpfl.engine.backends.backend import reproducible_arithmetic
from fedpfl.engine.state import State
from fedpfl.ground import tree

WARM_ROUNDS = 3
LINES = 25  # of a profile
REPEATS = 15  # replays that a median is of
Form = Callable[[Tensor, Tensor], Tensor]
SHAPES = ((3, 32, 5, 32), (32, 64, 5, 14), (64, 64, 3, 16))
"""Input channels, output channels, rows of the kernel and of the image."""


class Rounds:
    """Play rounds of FedOBP with CUDA graphs, the first few unmeasured."""

    def __init__(self, precision: str):
        task = Task(side=32, rounds=WARM_ROUNDS + 1)
        device = torch.device("cuda")
        federation = task.federation().to(device)
        net = task.net(federation)
        settings = engine.Engine("batched", precision=precision)  # type: ignore[arg-type]
        backend = engine.make_backend(settings, net, device)
        self._setup = engine.RoundSetup(backend, METHOD, federation, LOCAL, SEED)
        self._cohorts = task.cohorts()
        self.state = engine.make_initial_state(METHOD, net, federation.clients, device)
        for number in range(WARM_ROUNDS):
            self.play(number)

    def play(self, number: int = WARM_ROUNDS) -> State:
        """Play a round of the cohort of that number; return the state after it."""
        self.state, _ = engine.play_round(self._setup, self.state, self._cohorts[number])
        torch.cuda.synchronize()
        return self.state


def print_waits(precision: str) -> None:
    """Print how often the host waits for the GPU in a round, and where."""
    rounds = Rounds(precision)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rounds.play()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = collections.Counter(f"{Path(one.filename).name}:{one.lineno}" for one in caught)
    print(f"waits of the host in a round: {lines.total()} {dict(lines)}")


def print_equality(precision: str) -> None:
    """Print whether two runs give the same bits."""
    ends = []
    for _ in range(2):
        state = Rounds(precision).state
        trees = [state.server, *state.rows.trees]
        ends.append([leaf for one in trees for leaf in tree.leaves(one)])
    is_same = all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    print(f"{precision}: two runs of {WARM_ROUNDS} rounds have the same bits: {is_same}")
    if not is_same:
        raise SystemExit(1)


def print_profile(precision: str) -> None:
    """Print the kernels of a round that take longest."""
    rounds = Rounds(precision)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        start_time = time.perf_counter()
        rounds.play()
        seconds = time.perf_counter() - start_time
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    launched = sum(event.count for event in events if event.self_device_time_total)
    print(f"{precision}: {seconds:.3f} s, in which {launched} kernels take {total / 1e6:.3f} s")
    for event in events[:LINES]:
        milliseconds = event.self_device_time_total / 1e3
        share = event.self_device_time_total / total
        print(f"{milliseconds:9.2f} ms {share:6.1%} {event.count:6d} times  {event.key[:120]}")


# ---- Convolutions: x [models, batch, in, rows, columns], weight [models, out, in, rows, columns]


def convolve_grouped(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve as one grouped convolution, which is what vmap does."""
    models = len(x)
    joined = x.transpose(0, 1).flatten(1, 2)
    out = F.conv2d(joined, weight.flatten(0, 1), groups=models)
    return out.unflatten(1, (models, -1)).transpose(0, 1)


def convolve_channels_last(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve as one grouped convolution with channels last."""
    last = weight.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return convolve_grouped(x, last)


def convolve_by_products(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve by batched products with all windows of the images."""
    size = weight.shape[-1]
    windows = x.permute(0, 1, 3, 4, 2).contiguous().unfold(2, size, 1).unfold(3, size, 1)
    models, batch, rows, columns = windows.shape[:4]
    flat = windows.reshape(models, batch * rows * columns, -1)
    out = torch.bmm(flat, weight.flatten(2).transpose(1, 2))
    return out.view(models, batch, rows, columns, -1).permute(0, 1, 4, 2, 3)


def convolve_one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve model after model."""
    return torch.stack([F.conv2d(images, own) for images, own in zip(x, weight, strict=True)])


def convolve_by_triton(x: Tensor, weight: Tensor, warps: int) -> Tensor:
    """Convolve by kernels of this folder, which need triton."""
    from benchmarks.variants import triton_convolution

    return triton_convolution.convolve(x, weight, warps=warps)


FORMS: dict[str, Form] = {
    "grouped": convolve_grouped,
    "channels last": convolve_channels_last,
    "products": convolve_by_products,
    "one by one": convolve_one_by_one,
}


def print_convolutions(precision: str) -> None:
    """Print a table of the microseconds of each form, for ten models and for three."""
    rows, forms = [], {**FORMS}
    if find_spec("triton"):
        forms |= {f"triton, {k} warps": partial(convolve_by_triton, warps=k) for k in (8, 4)}
    for (inputs, outputs, size, side), models in product(SHAPES, (10, 3)):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        x = torch.randn(models, LOCAL.batch_size, inputs, side, side, device="cuda", dtype=dtype)
        weight = torch.randn(models, outputs, inputs, size, size, device="cuda", dtype=dtype)
        cells = [f"{inputs} to {outputs}, {size}x{size}, {side}x{side}", str(models)]
        for name, form in forms.items():
            try:
                error = find_error(form, x, weight, precision)
                microseconds = time_gradients(form, x, weight, precision)
                cells.append(f"{microseconds:.0f} ({error:.0e})")
            except Exception as error:  # one form costs no other its time
                print(f"{name}, {cells}: {error}")
                cells.append("failed")
        rows.append(cells)
    print(harness.format_table((f"convolution, {precision}", "models", *forms), rows))


def find_error(form: Form, x: Tensor, weight: Tensor, precision: str) -> float:
    """Return the largest error of an output and its gradients, relative to their largest value.

    It is nan where the same again has other bits.
    """
    upstream = torch.randn_like(form(x, weight))

    def differentiate(form: Form, dtype: torch.dtype) -> list[Tensor]:
        leaves = [one.detach().to(dtype).requires_grad_() for one in (x, weight)]
        out = form(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    right = differentiate(convolve_grouped, torch.float64)
    with reproducible_arithmetic(x.device, precision):
        found, again = (differentiate(form, x.dtype) for _ in range(2))
    if not all(map(torch.equal, found, again)):
        return float("nan")
    pairs = zip(found, right, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def time_gradients(form: Form, x: Tensor, weight: Tensor, precision: str) -> float:
    """Return the median microseconds of a convolution and its gradients, as a replayed graph."""
    # The gradient at images from the data set is never asked for.
    wanted = [weight, x] if x.shape[2] > 3 else [weight]
    for tensor in wanted:
        tensor.requires_grad_()
    with torch.no_grad():
        upstream = torch.randn_like(form(x, weight))

    def differentiate() -> None:
        torch.autograd.grad(form(x, weight), wanted, upstream)

    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with reproducible_arithmetic(x.device, precision):
        with torch.cuda.stream(stream):
            differentiate()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            differentiate()
    milliseconds = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return 1000 * statistics.median(milliseconds)


PARTS = {
    "waits": print_waits,
    "equal": print_equality,
    "profile": print_profile,
    "convolutions": print_convolutions,
}


def main(arguments: Sequence[str]) -> None:
    """Print the part that the first argument names."""
    parser = harness.make_parser("gpu", __doc__)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it measures a GPU; PyTorch finds no CUDA device here")
    PARTS[options.part](options.precision)
