"""The device and the backend of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from fedpfl.engine.backends import ranks
from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.backends.batched import BatchedBackend
from fedpfl.engine.backends.by_kind import make_by_kind
from fedpfl.engine.backends.loop import LoopBackend
from fedpfl.engine.calls import Answer, Call, TrainCall
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.records import Values
from fedpfl.models import Net
from fedpfl.models.vectorized import find_obstacle, require_vectorized

log = logging.getLogger(__name__)

BACKENDS: dict[str, type[LoopBackend] | type[BatchedBackend]] = {
    "loop": LoopBackend,
    "batched": BatchedBackend,
}


def find_device(name: str) -> torch.device:
    """Find the device of this name: `auto` is CUDA if there is one, else the CPU.

    Under torchrun, `auto` and `cuda` give each process of a machine its own GPU.

    Raises:
        FedpflError: There is no such device.
    """
    number, processes = ranks.local_rank_and_size()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and processes > 1 and name in ("auto", "cuda"):
        if processes > gpus:
            raise FedpflError(
                f"device={name}: {processes} processes on {gpus} GPUs; use --nproc_per_node={gpus}"
            )
        return torch.device("cuda", number)
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise FedpflError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if (device.index or 0) >= gpus:
        raise FedpflError(
            f"device={name}: this machine has no such CUDA device; use device=cpu or device=auto"
        )
    if processes > 1:
        raise FedpflError(
            f"device={name}: {processes} processes cannot share a GPU; use device=auto"
        )
    return device


def require_supported(engine: Engine, on: torch.device) -> None:
    """Raise FedpflError for a combination that cannot run."""
    if engine.precision == "tf32" and on.type != "cuda":
        raise FedpflError("engine.precision=tf32 needs a CUDA device; use fp32 or bf16 on a CPU")


def slowness_notices(engine: Engine, on: torch.device) -> list[str]:
    """Name a setting that is slow on this device."""
    if on.type != "cpu" or engine.backend != "batched":
        return []
    return [
        "slow: batched is for GPUs, and on a CPU mostly slower than loop; use engine.backend=auto"
    ]


def make_backend(engine: Engine, net: Net, on: torch.device) -> Backend:
    """Make the backend that a run's settings name.

    `auto` is batched on CUDA, but for networks that it cannot take, and loop on a CPU.

    Raises:
        FedpflError: The backend cannot take the network.
    """
    if len(net.nets) > 1:
        return make_by_kind(net, lambda kind: make_backend(engine, kind, on))
    name = engine.backend
    if name == "auto":
        name = "batched" if on.type == "cuda" and not find_obstacle(net) else "loop"
    if name == "batched":
        require_vectorized(net)
    return BACKENDS[name](net, on, engine)


def choose_backend(
    engine: Engine,
    net: Net,
    device: torch.device,
    recorded_engine: Values | None = None,
    distribute: Callable[[Backend], Backend] = lambda backend: backend,
) -> Backend:
    """Make the backend of a run, by what earlier parts of the run have recorded.

    Args:
        engine: The run's settings.
        net: The network.
        device: Where it is computed.
        recorded_engine: Settings that an earlier process of the run has kept.
        distribute: Spreads a backend over the processes of a run.
    """

    def make(engine: Engine) -> Backend:
        return make_by_kind(net, lambda kind: distribute(make_backend(engine, kind, device)))

    recorded_engine = recorded_engine or {}
    if engine.backend != "auto":
        # The recorded width is one that memory sufficed for.
        width = recorded_engine.get("width", 0)
        is_wider = not engine.width or engine.width > width
        if width and is_wider and recorded_engine.get("backend") == engine.backend:
            engine = replace(engine, width=int(width))
        return make(engine)
    if recorded_engine:
        return make(replace(engine, **recorded_engine))
    if device.type != "cuda":
        return make(engine)
    for kind in net.nets:
        obstacle = find_obstacle(kind)
        if obstacle:
            log.info(
                "engine: loop is taken; batched cannot vectorise model=%s over clients (%s)",
                kind.name,
                obstacle,
            )
            return make(replace(engine, backend="loop"))
    return FallbackBackend(replace(engine, backend="batched"), make)


class FallbackBackend(Backend):
    """Compute by one engine, or by loop if its first cohort fails.

    Later errors end the run, so that no run is computed in two ways.

    Args:
        engine: The engine to try.
        make: Builds an engine's backend.
    """

    def __init__(self, engine: Engine, make: Callable[[Engine], Backend]):
        self._make_loop = partial(make, replace(engine, backend="loop", graphs=False))
        self._is_settled = False
        self._use(make(engine))

    def _use(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.net = backend.net
        self.engine = backend.engine

    def leave_out_batched(self) -> None:
        """Compute by loop from now on."""
        self._is_settled = True
        self._use(self._make_loop())

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend."""
        results = self._backend.run(calls)
        self.engine = self._backend.engine  # it may have narrowed its width
        errors = [answer for answer in results if isinstance(answer, Exception)]
        if self._is_settled or not errors:
            self._is_settled |= any(map(_trains_clients, calls))
            return results
        log.warning("engine: loop is taken, as %s fails: %s", self.name, error_text(errors[0]))
        for error in errors:
            error.with_traceback(None)  # frames hold the failed backend's memory
        self.leave_out_batched()
        return self._backend.run(calls)


def _trains_clients(call: Call) -> bool:
    return isinstance(call, TrainCall) and (call.survey is None or call.survey.trains)
