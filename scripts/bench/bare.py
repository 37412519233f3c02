"""The floor: the kernels of the same rounds with no framework around, arranged as the loop backend
arranges them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from bench.task import CORES, LOCAL, Task
from fedpfl import models
from fedpfl.data import Federation
from fedpfl.engine.backends import loop

CHUNK = 256  # samples per forward pass when evaluating
aten = torch.ops.aten


def run(task: Task, precision: str) -> dict[str, float]:
    """Rounds of nothing but training and evaluation, each client on a thread of its own, largest
    first.
    """
    loop.keep_memory()
    torch.set_num_threads(1)
    fed, cohorts, samples = task.federation(), task.cohorts(), 0
    kernels = (
        CNN4(fed, precision)
        if task.model == "cnn4"
        else Traced(task.model, fed, precision, [c for own in cohorts for c in own])
    )
    with ThreadPoolExecutor(CORES, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(lambda client: train(kernels, fed, client), cohorts[-1]))  # warm up
        started = time.perf_counter()
        for cohort in cohorts[: task.rounds]:
            cohort = sorted(cohort, key=lambda client: -int(fed.train_sizes[client]))
            list(pool.map(lambda client: train(kernels, fed, client), cohort))
            samples += int(fed.train_sizes[cohort].sum()) * LOCAL.epochs
        return {"seconds": time.perf_counter() - started, "samples": samples}


def train(kernels: CNN4 | Traced, fed: Federation, client: int) -> None:
    """A client's epochs, evaluated before and after."""
    torch.set_grad_enabled(False)  # a setting of the thread
    (x, y), (tested, wanted) = (
        (fed.normalize(fed.x[own]).permute(0, 2, 3, 1).contiguous().to(kernels.dtype), fed.y[own])
        for own in (fed.train[client], fed.test[client])
    )
    params = [
        p.clone(memory_format=torch.channels_last if p.dim() == 4 else None)
        for p in kernels.initial
    ]
    velocity = [torch.zeros_like(p) for p in params]
    evaluate(kernels, params, tested, wanted)
    for _ in range(LOCAL.epochs):
        for rows in torch.randperm(len(y)).split(LOCAL.batch_size):
            if len(rows) > 1:
                grads = kernels.gradient(params, x[rows].permute(0, 3, 1, 2), y[rows])
                torch._foreach_mul_(velocity, LOCAL.momentum)
                torch._foreach_add_(velocity, grads)
                torch._foreach_add_(params, velocity, alpha=-LOCAL.lr)
    evaluate(kernels, params, tested, wanted)


def evaluate(kernels: CNN4 | Traced, params: list[Tensor], x: Tensor, y: Tensor) -> int:
    """How many predictions are right."""
    chunks = zip(x.permute(0, 3, 1, 2).split(CHUNK), y.split(CHUNK), strict=True)
    return sum(int((kernels.logits(params, part).argmax(1) == own).sum()) for part, own in chunks)


class CNN4:
    """cnn4's step by hand, the best known arrangement: no autograd, in-place ReLUs, images cast
    once.
    """

    def __init__(self, fed: Federation, precision: str):
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self.initial = list(
            models.build_network("cnn4", fed.shape, fed.classes, 42).params.values()
        )

    def logits(self, params: list[Tensor], x: Tensor) -> Tensor:
        """Of a batch `[batch, channels, height, width]`."""
        return self.forward([p.to(self.dtype) for p in params], x)[-1]

    @staticmethod
    def forward(params: list[Tensor], x: Tensor) -> list[Tensor]:
        """Everything that the backward pass needs, the logits last."""
        w1, b1, w2, b2, w3, b3, w4, b4 = params
        wide1 = F.conv2d(x, w1, b1)
        hidden1, at1 = aten.max_pool2d_with_indices(wide1, [2, 2], [2, 2])
        wide2 = F.conv2d(hidden1.relu_(), w2, b2)
        hidden2, at2 = aten.max_pool2d_with_indices(wide2, [2, 2], [2, 2])
        flat = hidden2.relu_().flatten(1)
        hidden3 = F.linear(flat, w3, b3).relu_()
        return [wide1, at1, hidden1, wide2, at2, hidden2, flat, hidden3, F.linear(hidden3, w4, b4)]

    def gradient(self, params: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        """Of the mean cross-entropy, in the order of the parameters."""
        dtype = self.dtype
        params = [p.to(dtype) for p in params]
        _, _, w2, _, w3, _, w4, _ = params
        wide1, at1, hidden1, wide2, at2, hidden2, flat, hidden3, logits = self.forward(params, x)
        error = logits.float().softmax(1)
        error[torch.arange(len(y)), y] -= 1
        error4 = (error / len(y)).to(dtype)
        error3 = aten.threshold_backward(error4 @ w4, hidden3, 0)
        back = aten.threshold_backward((error3 @ w3).view(hidden2.shape), hidden2, 0)
        pool = [[2, 2], [2, 2], [0, 0], [1, 1], False]
        back = aten.max_pool2d_with_indices_backward(back, wide2, *pool, at2)
        conv = [[1, 1], [0, 0], [1, 1], False, [0, 0], 1]
        back, w2, b2 = aten.convolution_backward(back, hidden1, w2, [64], *conv, [True, True, True])
        back = aten.threshold_backward(back, hidden1, 0)
        back = aten.max_pool2d_with_indices_backward(back, wide1, *pool, at1)
        _, w1, b1 = aten.convolution_backward(back, x, params[0], [32], *conv, [False, True, True])
        grads = [
            w1,
            b1,
            w2,
            b2,
            error3.t() @ flat,
            error3.sum(0),
            error4.t() @ hidden3,
            error4.sum(0),
        ]
        return [grad.float() for grad in grads]


class Traced:
    """Any model's step as the list of kernels that autograd would call, without autograd, modules
    or functional calls.

    A list serves one batch size; all sizes are traced before the clock starts.
    """

    def __init__(self, model: str, fed: Federation, precision: str, clients: list[int]):
        self.dtype = torch.float32  # the traced list casts by itself
        self.net, self.precision = (
            models.build_network(model, fed.shape, fed.classes, 42),
            precision,
        )
        self.initial = list(self.net.params.values())
        train, test = fed.train_sizes[clients].tolist(), fed.test_sizes[clients].tolist()
        batches = {min(n, LOCAL.batch_size) for n in train} | {n % LOCAL.batch_size for n in train}
        chunks = {min(n, CHUNK) for n in test} | {n % CHUNK for n in test}
        self.steps = {n: self.trace(fed, n, self._gradient) for n in batches if n > 1}
        self.forwards = {n: self.trace(fed, n, self._logits) for n in chunks if n > 0}

    def gradient(self, params: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        """Of the mean cross-entropy, in the order of the parameters."""
        return self.steps[len(y)](params, x, y)

    def logits(self, params: list[Tensor], x: Tensor) -> Tensor:
        """Of a batch."""
        return self.forwards[len(x)](params, x, x.new_zeros(len(x), dtype=torch.int64))

    def trace(self, fed: Federation, batch: int, what: Callable) -> torch.fx.GraphModule:
        """The kernels of `what` for batches of one size."""
        x = torch.zeros(batch, *fed.shape).contiguous(memory_format=torch.channels_last)
        params = [
            p.clone(memory_format=torch.channels_last if p.dim() == 4 else None)
            for p in self.initial
        ]
        y = torch.zeros(batch, dtype=torch.int64)
        graph = make_fx(lambda *arguments: what(*arguments))(
            [p.requires_grad_() for p in params], x, y
        )
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
