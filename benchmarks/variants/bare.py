"""Run the bare kernels of the same rounds, arranged as the loop backend does: the floor."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.harness import CORES, LOCAL, Task
from fedpfl.data import Federation
from fedpfl.engine.backends import loop

EVALUATION_BATCH = 256
aten = torch.ops.aten


def run_bare(task: Task, precision: str) -> dict[str, float]:
    """Train and evaluate each client on a thread of its own, the largest first."""
    loop.keep_freed_memory()
    torch.set_num_threads(1)
    federation = task.federation()
    cohorts = task.cohorts()
    kernels: Kernels
    if task.model == "cnn4":
        kernels = HandWrittenCnn4(task, federation, precision)
    else:
        clients = [client for cohort in cohorts for client in cohort]
        kernels = TracedKernels(task, federation, precision, clients)

    def train(client: int) -> None:
        train_client(kernels, federation, client)

    with ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(train, cohorts[-1]))  # warm up
        start_time = time.perf_counter()
        for cohort in cohorts[: task.rounds]:
            largest_first = sorted(cohort, key=lambda client: -int(federation.train_sizes[client]))
            list(pool.map(train, largest_first))
        seconds = time.perf_counter() - start_time
    return {"seconds": seconds, "samples": task.sample_steps(federation)}


def train_client(kernels: Kernels, federation: Federation, client: int) -> None:
    """Train a client's epochs, and evaluate it before and after."""
    torch.set_grad_enabled(False)  # a setting of the thread
    x, y = _load_samples(federation, federation.train[client], kernels.dtype)
    test_x, test_y = _load_samples(federation, federation.test[client], kernels.dtype)
    params = [_clone_channels_last(param) for param in kernels.initial_params]
    velocity = [torch.zeros_like(param) for param in params]
    count_correct(kernels, params, test_x, test_y)
    for _ in range(LOCAL.epochs):
        for rows in torch.randperm(len(y)).split(LOCAL.batch_size):
            if len(rows) > 1:
                grads = kernels.gradient(params, x[rows].permute(0, 3, 1, 2), y[rows])
                torch._foreach_mul_(velocity, LOCAL.momentum)
                torch._foreach_add_(velocity, grads)
                torch._foreach_add_(params, velocity, alpha=-LOCAL.lr)
    count_correct(kernels, params, test_x, test_y)


def _load_samples(
    federation: Federation, indices: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return images `[samples, height, width, channels]` and classes."""
    x = federation.normalize(federation.x[indices]).permute(0, 2, 3, 1).contiguous().to(dtype)
    return x, federation.y[indices]


def _clone_channels_last(param: Tensor) -> Tensor:
    return param.clone(memory_format=torch.channels_last if param.dim() == 4 else None)


def count_correct(kernels: Kernels, params: list[Tensor], x: Tensor, y: Tensor) -> int:
    """Return how many predictions are right."""
    correct = 0
    batches = x.permute(0, 3, 1, 2).split(EVALUATION_BATCH)
    for batch, classes in zip(batches, y.split(EVALUATION_BATCH), strict=True):
        correct += int((kernels.logits(params, batch).argmax(1) == classes).sum())
    return correct


class HandWrittenCnn4:
    """Compute cnn4's step by hand: no autograd, in-place ReLUs, images cast once.

    It is the best known arrangement.
    """

    def __init__(self, task: Task, federation: Federation, precision: str):
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.initial_params = list(task.net(federation).params.values())

    def logits(self, params: list[Tensor], x: Tensor) -> Tensor:
        """Return the logits of a batch `[batch, channels, height, width]`."""
        return self.forward([param.to(self.dtype) for param in params], x)[-1]

    @staticmethod
    def forward(params: list[Tensor], x: Tensor) -> list[Tensor]:
        """Return everything that the backward pass needs, the logits last."""
        w1, b1, w2, b2, w3, b3, w4, b4 = params
        wide1 = F.conv2d(x, w1, b1)
        hidden1, at1 = aten.max_pool2d_with_indices(wide1, [2, 2], [2, 2])
        wide2 = F.conv2d(hidden1.relu_(), w2, b2)
        hidden2, at2 = aten.max_pool2d_with_indices(wide2, [2, 2], [2, 2])
        flat = hidden2.relu_().flatten(1)
        hidden3 = F.linear(flat, w3, b3).relu_()
        return [wide1, at1, hidden1, wide2, at2, hidden2, flat, hidden3, F.linear(hidden3, w4, b4)]

    def gradient(self, params: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the gradient of the mean cross-entropy, in the order of the parameters."""
        dtype = self.dtype
        params = [param.to(dtype) for param in params]
        w1, _, w2, _, w3, _, w4, _ = params
        wide1, at1, hidden1, wide2, at2, hidden2, flat, hidden3, logits = self.forward(params, x)
        error = logits.float().softmax(1)
        error[torch.arange(len(y)), y] -= 1
        error4 = (error / len(y)).to(dtype)
        error3 = aten.threshold_backward(error4 @ w4, hidden3, 0)
        back = aten.threshold_backward((error3 @ w3).view(hidden2.shape), hidden2, 0)
        pool = [[2, 2], [2, 2], [0, 0], [1, 1], False]
        back = aten.max_pool2d_with_indices_backward(back, wide2, *pool, at2)
        conv = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
        back, dw2, db2 = aten.convolution_backward(
            back, hidden1, w2, [64], *conv, [True, True, True]
        )
        back = aten.threshold_backward(back, hidden1, 0)
        back = aten.max_pool2d_with_indices_backward(back, wide1, *pool, at1)
        _, dw1, db1 = aten.convolution_backward(back, x, w1, [32], *conv, [False, True, True])
        grads = [dw1, db1, dw2, db2]
        grads += [error3.t() @ flat, error3.sum(0), error4.t() @ hidden3, error4.sum(0)]
        return [grad.float() for grad in grads]


class TracedKernels:
    """Run any model's step as the list of kernels that autograd would call.

    There are no autograd, modules or functional calls. A list serves one batch size; all sizes are
    traced before the clock starts.
    """

    def __init__(self, task: Task, federation: Federation, precision: str, clients: list[int]):
        self.dtype = torch.float32  # the traced list casts by itself
        self.net = task.net(federation)
        self.precision = precision
        self.initial_params = list(self.net.params.values())
        train_sizes = federation.train_sizes[clients].tolist()
        test_sizes = federation.test_sizes[clients].tolist()
        self._gradient_of_size = {
            size: self._trace(federation, size, self._gradient)
            for size in _batch_sizes(train_sizes, LOCAL.batch_size) - {0, 1}
        }
        self._logits_of_size = {
            size: self._trace(federation, size, self._logits)
            for size in _batch_sizes(test_sizes, EVALUATION_BATCH) - {0}
        }

    def gradient(self, params: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the gradient of the mean cross-entropy, in the order of the parameters."""
        return self._gradient_of_size[len(y)](params, x, y)

    def logits(self, params: list[Tensor], x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return self._logits_of_size[len(x)](params, x, x.new_zeros(len(x), dtype=torch.int64))

    def _trace(
        self, federation: Federation, batch_size: int, function: Callable
    ) -> torch.fx.GraphModule:
        """Return the kernels of a function for batches of one size."""
        x = torch.zeros(batch_size, *federation.shape)
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.zeros(batch_size, dtype=torch.int64)
        params = [_clone_channels_last(param).requires_grad_() for param in self.initial_params]
        graph = make_fx(lambda *arguments: function(*arguments))(params, x, y)
        for node in list(graph.graph.nodes):
            if node.target is aten.detach.default:
                node.replace_all_uses_with(node.args[0])
                graph.graph.erase_node(node)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph

    def _outputs(self, params: list[Tensor], x: Tensor, training: bool) -> Tensor:
        bound = self.net.bind({"main": self.net.buffers}, training=training)
        with torch.autocast("cpu", torch.bfloat16, self.precision == "bf16"):
            return bound(dict(zip(self.net.params, params, strict=True)), x)

    def _gradient(self, params: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(F.cross_entropy(self._outputs(params, x, True), y), params))

    def _logits(self, params: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        return self._outputs(params, x, False)


Kernels = HandWrittenCnn4 | TracedKernels


def _batch_sizes(sizes: list[int], batch_size: int) -> set[int]:
    """Return the sizes of all batches of clients: whole ones and last ones."""
    return {min(size, batch_size) for size in sizes} | {size % batch_size for size in sizes}
