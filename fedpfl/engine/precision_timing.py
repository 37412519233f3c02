"""Whether bf16 is faster than fp32 on this CPU: one step each way is timed, nothing is decided."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from fedpfl.data.federation import Federation
from fedpfl.engine.backends.backend import Engine
from fedpfl.engine.training.client_training import working_copy
from fedpfl.engine.training.shard import gather_data
from fedpfl.ground import tree
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Data
from fedpfl.models import Net

BUDGET = 0.8  # seconds that it may take
TRIES = 10  # steps each way, of which the fastest counts
SAME = 1.1  # times the seconds, within which one way is as good as the other


@dataclass(frozen=True)
class PrecisionTimes:
    """Hold the seconds of a step, forward and backward on one client's batch, by precision."""

    samples: int
    bf16: float
    fp32: float

    @property
    def pays(self) -> bool:
        """Return whether bf16 is no slower than fp32."""
        return self.bf16 <= SAME * self.fp32

    def __str__(self) -> str:
        """Return it as a line."""
        if SAME * self.bf16 < self.fp32:
            verdict = "bf16 is faster"
        elif self.pays:
            verdict = "one is as fast as the other"
        else:
            verdict = "fp32 is faster"
        times = f"{1000 * self.bf16:.3g} ms in bf16, {1000 * self.fp32:.3g} ms in fp32"
        return f"a step of {self.samples} samples takes {times}: {verdict} here"


def time_precisions(
    engine: Engine, device: torch.device, net: Net, federation: Federation, batch_size: int
) -> PrecisionTimes | None:
    """Time a step in bf16 and fp32, for bf16 on a CPU.

    Where a step of `batch_size` samples would be slow fewer are taken, so that all ends within a
    second. Generators of the process are left as they were. What fails here fails again, with an
    explanation, in the first round.
    """
    if device.type != "cpu" or engine.precision != "bf16":
        return None
    client = int(federation.train_sizes.argmax())
    data = gather_data(federation, federation.train[client][:batch_size])
    start_time = time.perf_counter()
    samples = min(2, len(data.y))
    with seeded_by_key("pace"):
        try:
            net = net.copy()
            params = tree.map(working_copy, net.params)
            # The first step of a process takes longer, so it does not count.
            _time_step(net, params, data, samples)
            best = _time_step(net, params, data, samples)

            # ---- As many samples as the budget allows
            remaining = BUDGET - (time.perf_counter() - start_time)
            affordable = min(
                len(data.y),
                int(remaining / sum(best.values()) * samples),
            )
            if affordable > samples:
                samples = affordable
                best = _time_step(net, params, data, samples)

            # ---- The fastest of several tries
            tries = TRIES - 1
            while tries and time.perf_counter() - start_time < BUDGET / 2:
                again = _time_step(net, params, data, samples)
                best = {name: min(best[name], again[name]) for name in best}
                tries -= 1
        except Exception:
            return None
    return PrecisionTimes(samples, **best)


def _time_step(net: Net, params: Tree, data: Data, samples: int) -> dict[str, float]:
    """Return the seconds of a step with the first samples, by precision."""
    leaves = [leaf.requires_grad_() for leaf in tree.leaves(params)]
    seconds = {}
    for name in ("bf16", "fp32"):
        start_time = time.perf_counter()
        bound = net.bind({"main": net.buffers}, training=True)
        with torch.autocast("cpu", torch.bfloat16, name == "bf16"):
            logits = bound(params, data.x[:samples])
            loss = Batch(data.x[:samples], data.y[:samples]).loss(logits)
        net.differentiate_loss(loss, leaves)
        seconds[name] = time.perf_counter() - start_time
    return seconds
