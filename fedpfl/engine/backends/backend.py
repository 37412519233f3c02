"""A backend's interface: it answers calls, each about some clients of one run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedpfl.engine.calls import (
    Answer,
    Call,
    Counts,
    EvalCall,
    Participation,
    TrainCall,
    with_before_turn,
)
from fedpfl.engine.state import State
from fedpfl.engine.training.forms import require_unchanged, tensor_versions
from fedpfl.ground import tree
from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import WholeNumber
from fedpfl.models import Net


@dataclass(frozen=True)
class Engine(Checked):
    """Choose how arithmetic is done; results differ by rounding alone.

    Attributes:
        backend: loop (one client after another in worker threads), batched (the cohort as one
            program), or auto (by device).
        workers: Threads of the loop backend; 0 is one per core, or per core of this process's
            share under torchrun.
        precision: fp32, tf32 (CUDA only) or bf16 (autocast).
        graphs: Replay the batched backend's steps as CUDA graphs; without effect elsewhere.
        width: Clients that the batched backend trains together; 0: all.
        shortcuts: Repeat steps by scripts, train sub-models at their true size, compute features of
            frozen layers once, and evaluate clients with one model together.
    """

    backend: Literal["auto", "loop", "batched"] = "auto"
    workers: WholeNumber = 0
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    width: WholeNumber = 0
    graphs: bool = True
    shortcuts: bool = True


@contextmanager
def reproducible_arithmetic(device: torch.device, precision: str) -> Iterator[None]:
    """Hold a GPU to a precision and to deterministic kernels while a backend runs.

    The flags belong to the process, which may have other backends, and are put back afterwards.
    """
    if device.type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    # The older `allow_tf32` cannot be read where a process has set these.
    fp32_precision = "tf32" if precision == "tf32" else "ieee"
    # PyTorch lets convolutions use tf32 by default.
    flags: list[tuple[Any, str, Any]] = [
        (cudnn.conv, "fp32_precision", fp32_precision),  # type: ignore[attr-defined]
        (cudnn.rnn, "fp32_precision", fp32_precision),
        (torch.backends.cuda.matmul, "fp32_precision", fp32_precision),
        (cudnn, "deterministic", True),
        (cudnn, "benchmark", False),
    ]
    old_values = [getattr(module, name) for module, name, _ in flags]
    try:
        for module, name, value in flags:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(flags, old_values, strict=True):
            setattr(module, name, value)


class Backend(ABC):
    """Run one-client hooks of a Method over many clients.

    It changes nothing in a call's state.

    Attributes:
        engine: How it does so; a backend that runs out of memory may narrow its width.
        net: The network that it trains.
    """

    name: str
    engine: Engine
    net: Net

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer calls of one run or of several; an error is its call's own answer.

        A method that draws from the generators of the process makes the order of calls matter: they
        are answered again, and one by one from then on (`track_global_draws`).
        """

    def select_local_state(self, state: State) -> State:
        """Return the part of an initial state that is kept beside this backend."""
        return state

    def complete_initial_row(self, state: State) -> State:
        """Return the state with the whole row that a new client has."""
        return state

    def try_participation(self, call: TrainCall) -> Participation:
        """Answer a call of training for the form of its answer."""
        return self.run_one(call)

    def evaluate_splits(self, call: EvalCall) -> dict[str, Counts]:
        """Answer one call of evaluation, on the host."""
        return tree.fetch(self.run_one(call))

    def evaluate(self, call: EvalCall) -> Counts:
        """Return the answer to one call of evaluation for the test samples."""
        return self.evaluate_splits(call)["test"]

    def run_one(self, call: Any) -> Any:
        """Answer one call, or raise its error.

        Raises:
            MethodError: A hook changed the state in place.
        """
        state = call.state
        with reproducible_arithmetic(state.rows.device, self.engine.precision):
            # Ahead of dealing a call to workers or processes: the hook sees the whole cohort.
            call = with_before_turn(call)
        shown_trees = {
            "server": state.server,
            "buffers": state.server_buffers,
            "rows": dict(enumerate(state.rows.trees)),
        }
        # Hooks get the state itself, not a copy: a change in place would
        # reach the next round.
        old_versions = tensor_versions(shown_trees)
        answer = self.run([call])[0]
        if isinstance(answer, Exception):
            raise answer
        require_unchanged(shown_trees, old_versions, type(call.method).__name__)
        return answer
