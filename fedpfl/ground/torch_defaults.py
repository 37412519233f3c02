"""Torch's settings of the process and the thread, as they are before anybody sets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fedpfl.ground.errors import FedpflError

PLAIN = ("none", "ieee")
"""What `fp32_precision` says where float32 is computed as such."""


@contextmanager
def torch_defaults() -> Iterator[Callable[[], list[str]]]:
    """Compute as in a new process, and put back afterwards what was set before.

    Numbers are float32 and computed so, tensors are made on the CPU and gradients are recorded,
    whatever a notebook or a script has set, or a file sets meanwhile.

    Yields:
        A function that names what has been set meanwhile and would change what is computed.

    Raises:
        FedpflError: inside `with torch.device(...)`, which cannot be suspended.
    """
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    precisions = _read_lowered_precisions()
    try:
        # ---- Step 1: what holds for the process, or until it is set again.
        torch.set_default_dtype(torch.float32)
        for operations, _ in precisions:
            operations.fp32_precision = "ieee"
        # Each tensor that is made would ask for a device, were the CPU set by name.
        if device.type != "cpu":
            torch.set_default_device(None)
        if torch.get_default_device().type != "cpu":
            raise FedpflError(
                f"torch.device({str(device)!r}) is entered by `with`; leave it before runs, whose"
                " device is the key `device`"
            )

        # ---- Step 2: what is entered.
        with ExitStack() as modes:
            # It has gradients recorded, too, inside `torch.no_grad()`.
            modes.enter_context(torch.inference_mode(False))
            for device_type in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device_type):
                    modes.enter_context(torch.autocast(device_type, enabled=False))
            yield _list_changes
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(device if device.type != "cpu" else None)
        for operations, _ in _read_lowered_precisions():
            operations.fp32_precision = "none"
        for operations, precision in precisions:
            operations.fp32_precision = precision


def _read_lowered_precisions() -> list[tuple[Any, str]]:
    """Return the operations that compute float32 in bf16 or tf32, and in which.

    Convolutions of a GPU do so by torch's default; backends hold them to the run's precision.
    """
    backends: Any = torch.backends
    mkldnn = backends.mkldnn
    # Those first that others are set by.
    groups = (backends, mkldnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn, backends.cuda.matmul)
    precisions = [(operations, operations.fp32_precision) for operations in groups]
    return [(group, precision) for group, precision in precisions if precision not in PLAIN]


def _list_changes() -> list[str]:
    """Return what of torch is set otherwise than in a new process, in words."""
    changes = []
    if torch.get_default_dtype() != torch.float32:
        changes.append(f"the default dtype to {torch.get_default_dtype()}")
    if torch.get_default_device().type != "cpu":
        changes.append(f"the default device to {torch.get_default_device()}")
    if not torch.is_grad_enabled():
        changes.append("gradients off")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        changes.append("autocast on")
    return changes
