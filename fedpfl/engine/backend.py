"""What a backend does for the engine."""

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
    """How the arithmetic is done; never what is computed, beyond rounding.

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
    touched: dict[str, Tree]
    """Which buffers of a role each client moved, where the method says so."""
    before: Tally
    after: Tally
    down: Traffic
    up: Traffic
    measures: dict[str, Tensor]
    loss: Tensor
    """Mean training loss per client over all its steps (0 if it made none)."""


class Training(NamedTuple):
    """A call: prepare, train and finish a cohort, judging each client before and after. Answered by a Participation."""

    method: Method
    federation: Federation
    state: State
    clients: list[int]
    local: Local
    draws: Draws


class Judging(NamedTuple):
    """A call: judge personal models on the clients' own test samples, fine-tuned copies if asked; gives a Tally."""

    method: Method
    federation: Federation
    state: State
    clients: list[int]
    tuning: Tuning | None = None
    adapting: Tuning | None = None
    """Batch size and draws for methods that `adapt`."""

    @property
    def adaptation(self) -> tuple[int, Draws]:
        """Batch size and draws; some fixed ones where nothing was said."""
        if self.adapting:
            return self.adapting.local.batch_size, self.adapting.draws
        return 32, Draws(0, "adapt", self.state.round)


Call = Training | Judging
Answer = Participation | Tally | Exception


class Backend(ABC):
    """Runs one-client answers of a Method over many clients. Changes nothing in a call's state."""

    name: str

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer calls, of one run or of several, side by side; what went wrong with one is its own answer."""

    def participate(
        self, method: Method, federation: Federation, state: State, cohort: list[int], local: Local, draws: Draws
    ) -> Participation:
        """The answer to one Training."""
        return self._one(Training(method, federation, state, cohort, local, draws))

    def evaluate(
        self,
        method: Method,
        federation: Federation,
        state: State,
        clients: list[int],
        tuning: Tuning | None = None,
        adapting: Tuning | None = None,
    ) -> Tally:
        """The answer to one Judging."""
        return self._one(Judging(method, federation, state, clients, tuning, adapting))

    def _one(self, call: Call) -> Any:
        before = _versions(call)
        answer = self.run([call])[0]
        if isinstance(answer, Exception):
            raise answer
        if changed := [name for name, version in _versions(call).items() if version != before.get(name)]:
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
        "mine": state.clients,
        "buffers": {"server": state.server_buffers, "clients": state.client_buffers},
    }
    return {name: leaf._version for name, leaf in tree.items(shown)}
