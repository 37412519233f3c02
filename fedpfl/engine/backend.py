"""What a backend does for the engine: it answers calls, each about some clients of one run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fedpfl import tree
from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws
from fedpfl.engine.sgd import Local, Tuning
from fedpfl.engine.state import State
from fedpfl.errors import FedpflError
from fedpfl.methods import Method
from fedpfl.traffic import Traffic
from fedpfl.tree import Tree


@dataclass(frozen=True)
class Engine:
    """Say how the arithmetic is done; never what is computed, beyond rounding.

    backend: loop (one client after another in worker threads), batched (the cohort as one program), auto (by device).
    workers: threads of the loop backend; 0 is one per core.
    precision: fp32, tf32 (CUDA only) or bf16 (autocast).
    graphs: replay the batched backend's steps as CUDA graphs; without effect on a CPU.
    width: clients that the batched backend trains at once; 0 is all that there are to train.
    """

    backend: Literal["auto", "loop", "batched"] = "auto"
    workers: int = 0
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    width: int = 0
    graphs: bool = False

    def __post_init__(self) -> None:
        for field in ("workers", "width"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be 0 or more, got {getattr(self, field)}")


class Counts(NamedTuple):
    """Hold test results per client, `[clients]`: correct predictions, summed cross-entropy, test samples."""

    correct: Tensor
    loss: Tensor
    total: Tensor


class Participation(NamedTuple):
    """Hold what a cohort brings back, stacked in the order of the cohort, `[cohort, ...]`.

    updated: which buffers of a role each client moved, where the method says so.
    loss, sample_loss: mean training loss per client over all its steps, and over all samples of these (0 without any).
    held_out: mean cross-entropy of the trained model on held-out samples; sample_loss and it are 0 unless asked for.
    """

    uploads: Tree
    clients: dict[str, Tree]
    buffers: dict[str, Tree]
    updated: dict[str, Tree]
    before: Counts
    after: Counts
    down: Traffic
    up: Traffic
    metrics: dict[str, Tensor]
    loss: Tensor
    sample_loss: Tensor
    held_out: Tensor


class TrainCall(NamedTuple):
    """Ask to prepare, train and finish a cohort, evaluating each client before and after. The answer: Participation.

    stopping: whether the losses by which clients stop are asked for.
    """

    method: Method
    federation: Federation
    state: State
    clients: list[int]
    local: Local
    draws: Draws
    stopping: bool = False


class EvalCall(NamedTuple):
    """Ask to evaluate personal models on the clients' own test samples, fine-tuned copies if asked. The answer: Counts.

    before: batch size and draws for methods that look at training data in `before_evaluation`.
    """

    method: Method
    federation: Federation
    state: State
    clients: list[int]
    tuning: Tuning | None = None
    before: Tuning | None = None


Call = TrainCall | EvalCall
Answer = Participation | Counts | Exception


class Backend(ABC):
    """Run one-client hooks of a Method over many clients, and change nothing in a call's state."""

    name: str

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer calls, of one run or of several, side by side; what went wrong with one is its own answer."""

    def participate(self, *about: Any, **more: Any) -> Participation:
        """Answer one TrainCall with these fields."""
        return self._one(TrainCall(*about, **more))

    def evaluate(self, *about: Any, **more: Any) -> Counts:
        """Answer one EvalCall with these fields."""
        return self._one(EvalCall(*about, **more))

    def _one(self, call: Call) -> Any:
        versions = _versions(call)
        answer = self.run([call])[0]
        if isinstance(answer, Exception):
            raise answer
        if changed := [name for name, version in _versions(call).items() if version != versions.get(name)]:
            raise FedpflError(
                f"{type(call.method).__name__} changed its argument {changed[0]} in place; a method's hooks return "
                "new trees and leave their arguments as they are"
            )
        return answer


def _versions(call: Call) -> dict[str, int]:
    """Count the in-place changes of every tensor that a method is shown, by name."""
    state = call.state
    shown = {
        "server": state.server,
        "client": state.clients,
        "buffers": {"server": state.server_buffers, "clients": state.client_buffers},
    }
    return {name: leaf._version for name, leaf in tree.items(shown)}
