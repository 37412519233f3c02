"""What a backend does for the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.engine.sgd import Local, Tuning
from fedpfl.engine.state import State
from fedpfl.methods import Method
from fedpfl.traffic import Traffic
from fedpfl.tree import Tree


@dataclass(frozen=True)
class Engine:
    """How the arithmetic is done; never what is computed, beyond rounding.

    backend: loop (one client after another in worker threads), batched (the cohort as one program), auto (by device).
    workers: threads of the loop backend; 0 is one per core.
    precision: fp32, tf32 (CUDA only) or bf16 (autocast).
    width: clients that the batched backend trains at once; 0 is the whole cohort.
    """

    backend: Literal["auto", "loop", "batched"] = "auto"
    workers: int = 0
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    width: int = 0

    def __post_init__(self) -> None:
        for field in ("workers", "width"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be 0 or more, got {getattr(self, field)}")


class Tally(NamedTuple):
    """Test results per client, `[clients]`: correct predictions, summed cross-entropy, test samples."""

    correct: Tensor
    loss: Tensor
    total: Tensor


class Participation(NamedTuple):
    """What a cohort brings back; everything stacked in the order of the cohort, `[cohort, ...]`."""

    uploads: Tree
    mine: dict[str, Tree]
    buffers: dict[str, Tree]
    before: Tally
    after: Tally
    down: Traffic
    up: Traffic
    measures: dict[str, Tensor]
    loss: Tensor
    """Mean training loss per client over all its steps (0 if it made none)."""


class Backend(Protocol):
    """Runs one-client answers of a Method over many clients."""

    def participate(
        self, method: Method, federation: Federation, state: State, cohort: list[int], local: Local, draws: Draws
    ) -> Participation:
        """Prepare, train and finish the cohort, judging each client before and after. Changes nothing in `state`."""

    def evaluate(
        self,
        method: Method,
        federation: Federation,
        state: State,
        clients: list[int],
        tuning: Tuning | None = None,
    ) -> Tally:
        """Judge personal models on the clients' own test samples, fine-tuned copies if asked. Changes nothing."""
