"""Choosing a backend and a device."""

from __future__ import annotations

import torch

from fedpfl.engine.backends import ranks
from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.backends.batched import BatchedBackend
from fedpfl.engine.backends.loop import LoopBackend
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.seeding import seeded_process
from fedpfl.models import Net
from fedpfl.models.traits import SEED, made_up_samples
from fedpfl.models.vectorized import find_obstacle, require_vectorized

BACKENDS: dict[str, type[LoopBackend] | type[BatchedBackend]] = {
    "loop": LoopBackend,
    "batched": BatchedBackend,
}


def find_device(name: str) -> torch.device:
    """Return the device of this name.

    `auto` is CUDA if there is one, else the CPU.

    Under torchrun, `auto` and `cuda` give each process of a machine a GPU of its own.

    Raises:
        FedpflError: There is no such device.
    """
    # ---- Step 1: under torchrun each process has a GPU for itself.
    number, processes = ranks.local_rank_and_size()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name in ("auto", "cuda") and gpus and processes > 1:
        if processes > gpus:
            raise FedpflError(
                f"device={name}: {processes} processes on {gpus} GPUs; use --nproc_per_node={gpus}"
            )
        return torch.device("cuda", number)

    # ---- Step 2: alone, the first GPU, or the CPU.
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    # ---- Step 3: the device that is named.
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FedpflError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise FedpflError(
            f"device={name}: this machine has no such CUDA device; use device=cpu or device=auto"
        )
    if device.type == "cuda" and processes > 1:
        raise FedpflError(
            f"device={name}: {processes} processes cannot share a GPU; use device=auto"
        )
    if device.type not in ("cpu", "cuda"):
        raise FedpflError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    return device


def require_supported(engine: Engine, on: torch.device) -> None:
    """Raise FedpflError for a combination that cannot run."""
    if engine.precision == "tf32" and on.type != "cuda":
        raise FedpflError("engine.precision=tf32 needs a CUDA device; use fp32 or bf16 on a CPU")


def slowness_notices(engine: Engine, on: torch.device) -> list[str]:
    """Return a line for each choice that is far slower here than another one."""
    lines = []
    if on.type == "cpu" and engine.backend == "batched":
        lines.append(
            "slow: batched is for GPUs, and on a CPU mostly slower than loop; use"
            " engine.backend=auto"
        )
    return lines


def _require_mixed_precision(net: Net) -> None:
    """Raise FedpflError for a network that cannot compute partly in bf16."""
    # Networks of this package can, and tests may make one that knows no samples.
    if net.traits.trusted or not net.parts.sample:
        return
    module = net.copy_module()
    try:
        with seeded_process(SEED), torch.autocast("cpu", torch.bfloat16):
            module(made_up_samples(net.parts.sample, 3)).float().logsumexp(1).sum().backward()
    except Exception as error:
        raise FedpflError(
            f"model={net.name}: engine.precision=bf16, by which layers answer in bfloat16:"
            f" {error_text(error, with_class=True)[:200]}; use engine.precision=fp32"
        ) from None


def make_backend(engine: Engine, net: Net, on: torch.device) -> Backend:
    """Return the backend of a run.

    `auto` is batched on CUDA, but for networks that it cannot take, and loop on a CPU.

    Raises:
        FedpflError: The backend cannot take the network.
    """
    name = engine.backend
    if name == "auto":
        name = "batched" if on.type == "cuda" and not find_obstacle(net) else "loop"
    if name == "batched":
        require_vectorized(net)
    if engine.precision == "bf16":
        _require_mixed_precision(net)
    return BACKENDS[name](net, on, engine)
