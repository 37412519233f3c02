"""Whether bf16 is faster than fp32 on this CPU: one step each way is timed, and nothing is decided."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fedpfl.data.federation import Federation
from fedpfl.engine.backends.backend import Engine
from fedpfl.engine.backends.loop import working_copy
from fedpfl.engine.keys import seeded_by_key
from fedpfl.engine.training.shard import gather_data
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import Data
from fedpfl.models import Net

BUDGET = 0.8  # seconds that it may take
TRIES = 10  # steps each way, of which the fastest counts
SAME = 1.1  # times the seconds, within which one way is as good as the other


class PrecisionTimes(NamedTuple):
    """Hold the seconds that a step of so many samples takes each way: forward and backward on one
    client's batch.
    """

    samples: int
    bf16: float
    fp32: float

    @property
    def pays(self) -> bool:
        """Tell whether bf16 is no slower than fp32."""
        return self.bf16 <= SAME * self.fp32

    def __str__(self) -> str:
        """Return it as a line."""
        faster = "bf16 is faster" if SAME * self.bf16 < self.fp32 else "one is as fast as the other"
        faster = faster if self.pays else "fp32 is faster"
        took = f"{1000 * self.bf16:.3g} ms in bf16, {1000 * self.fp32:.3g} ms in fp32"
        return f"a step of {self.samples} samples takes {took}: {faster} here"


def time_precisions(
    engine: Engine, on: torch.device, net: Net, federation: Federation, batch_size: int
) -> PrecisionTimes | None:
    """Time a step in bf16 and in fp32, for a run in bf16 on a CPU; None for others.

    Where a step of `batch_size` samples would be slow fewer are taken, so that all ends within a
    second. Generators of the process are left as they were. What fails here fails again, in words,
    in the first round.
    """
    if on.type != "cpu" or engine.precision != "bf16":
        return None
    client = int(federation.train_sizes.argmax())
    data = gather_data(federation, federation.train[client][:batch_size])
    began, few, tries = time.perf_counter(), min(2, len(data.y)), TRIES
    with seeded_by_key("pace"):
        try:
            net, params = net.copy(), tree.map(working_copy, net.params)
            _timed(net, params, data, few)  # the first step of a process takes longer
            samples, best = few, _timed(net, params, data, few)
            room = BUDGET - (time.perf_counter() - began)
            affordable = min(len(data.y), int(room / sum(best.values()) * few))
            if affordable > few:
                samples, best = affordable, _timed(net, params, data, affordable)
            while (tries := tries - 1) and time.perf_counter() - began < BUDGET / 2:
                again = _timed(net, params, data, samples)
                best = {way: min(best[way], again[way]) for way in best}
        except Exception:
            return None
    return PrecisionTimes(samples, **best)


def _timed(net: Net, params: Tree, data: Data, samples: int) -> dict[str, float]:
    """Return the seconds of a step each way, with the first of the samples."""
    seconds, leaves = {}, [leaf.requires_grad_() for leaf in tree.leaves(params)]
    for way in ("bf16", "fp32"):
        began, bound = time.perf_counter(), net.bind({"main": net.buffers}, training=True)
        with torch.autocast("cpu", torch.bfloat16, way == "bf16"):
            loss = F.cross_entropy(bound(params, data.x[:samples]), data.y[:samples])
        torch.autograd.grad(loss, leaves, allow_unused=True)
        seconds[way] = time.perf_counter() - began
    return seconds
