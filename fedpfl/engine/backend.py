"""What a backend does for the engine: it answers calls, each about some clients of one run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.keys import Draws, generator, watched
from fedpfl.engine.state import State
from fedpfl.engine.training.hook_checks import asked, unchanged, versions
from fedpfl.engine.training.sgd import Local, Tuning
from fedpfl.ground import tree
from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import AtLeast
from fedpfl.ground.traffic import Traffic
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method, Turn
from fedpfl.models import Net


@dataclass(frozen=True)
class Engine(Checked):
    """Say how the arithmetic is done; never what is computed, beyond rounding.

    backend: loop (one client after another in worker threads), batched (the cohort as one program),
    auto (by device).
    workers: threads of the loop backend; 0 is one per core, or per core of this process's share
    under torchrun.
    precision: fp32, tf32 (CUDA only) or bf16 (autocast).
    graphs: replay the batched backend's steps as CUDA graphs; without effect on a CPU.
    width: clients that the batched backend trains at once; 0 is all that there are to train.
    """

    backend: Literal["auto", "loop", "batched"] = "auto"
    workers: Annotated[int, AtLeast(0)] = 0
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    width: Annotated[int, AtLeast(0)] = 0
    graphs: bool = False


class Counts(NamedTuple):
    """Hold test results per client, `[clients]`: correct predictions, summed cross-entropy, test
    samples.

    more: the measures that were asked for, as shares; nan where one is undefined.
    """

    correct: Tensor
    loss: Tensor
    total: Tensor
    more: Mapping[str, Tensor] = {}


class Participation(NamedTuple):
    """Hold what a cohort brings back, stacked in the order of the cohort, `[cohort, ...]`.

    clients: in init's form. trained: whether a client has ever made a step.
    updated: which buffers of a role each client moved, where the method says so.
    loss, sample_loss: mean training loss per client over all its steps, and over all samples of
    these (0 without any).
    held_out: mean cross-entropy of the trained model on held-out samples; sample_loss and it are 0
    unless asked for.
    numbers: of the clients: those of the call but for who has not answered.
    operations: of each client's training by each of `TrainCall.counted`, float64 `[cohort,
    counted]`.
    """

    uploads: Tree
    clients: dict[str, Tree]
    trained: Tensor
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
    numbers: Tensor
    operations: Tensor


class TrainCall(NamedTuple):
    """Ask to prepare, train and finish a cohort, evaluating each client before and after. The
    answer: Participation.

    stopping: whether the losses by which clients stop are asked for.
    turn: of the round, where it is no plain one: in a survey nobody is evaluated, and perhaps
    nobody trains.
    laid: over the clients' states, stacked, in the order of `clients`; None before the server has
    been asked.
    counted: by which values of `local` the operations of training are counted, whether or not
    anybody trains.
    """

    method: Method
    federation: Federation
    state: State
    clients: list[int]
    local: Local
    draws: Draws
    stopping: bool = False
    turn: Turn | None = None
    laid: dict[str, Tree] | None = None
    counted: tuple[Local, ...] = ()


class EvalCall(NamedTuple):
    """Ask to evaluate personal models on the clients' own samples, fine-tuned copies if asked.

    The answer: Counts by split, `test` and, where the federation holds samples out, `validation`.
    before: batch size and draws for methods that look at training data in `before_evaluation`.
    laid: as in TrainCall.
    metrics: names of `measures.MEASURES` that are wanted of each client beside.
    common: whose clients' test samples each model is judged on too, `common` in the answer:
    `[clients, of common]`.
    """

    method: Method
    federation: Federation
    state: State
    clients: list[int]
    tuning: Tuning | None = None
    before: Tuning | None = None
    laid: dict[str, Tree] | None = None
    metrics: tuple[str, ...] = ()
    common: Federation | None = None

    @property
    def draws(self) -> Draws:
        """Return those of `before`."""
        return self.before.draws if self.before else Draws(0, "adapt", self.state.round)


Call = TrainCall | EvalCall
AnyCall = TypeVar("AnyCall", TrainCall, EvalCall)
Answer = Participation | dict[str, Counts] | Exception


@contextmanager
def arithmetic(device: torch.device, precision: str) -> Iterator[None]:
    """Hold a GPU to a precision and to kernels that give the same bits each time, while a backend
    runs.

    The flags belong to the process, which may have other backends. PyTorch's own let convolutions
    use tf32.
    """
    if device.type != "cuda":
        yield
        return
    cudnn, matmul, tf32 = torch.backends.cudnn, torch.backends.cuda.matmul, precision == "tf32"
    flags: list[tuple[Any, str, bool]] = [(cudnn, "allow_tf32", tf32), (matmul, "allow_tf32", tf32)]
    flags += [(cudnn, "deterministic", True), (cudnn, "benchmark", False)]
    before = [getattr(place, name) for place, name, _ in flags]
    try:
        for place, name, value in flags:
            setattr(place, name, value)
        yield
    finally:
        for (place, name, _), value in zip(flags, before, strict=True):
            setattr(place, name, value)


def work(call: Call, client: int) -> float:
    """Estimate how long a client takes, in training samples; evaluating one takes a third."""
    train, test = int(call.federation.train_sizes[client]), int(call.federation.test_sizes[client])
    local = (
        call.local if isinstance(call, TrainCall) else call.tuning.local if call.tuning else None
    )
    if local is None:
        return test / 3
    return (
        local.epochs * train if local.epochs else (local.steps or 0) * min(local.batch_size, train)
    ) + test / 3


def met(call: AnyCall) -> AnyCall:
    """Return the call with what the server finds out for its clients (`Method.before_turn`), if
    that is not yet there.

    Raises MethodError where the hook breaks its rule.
    """
    method, state, draws = call.method, call.state, call.draws
    if call.laid is not None or type(method).before_turn is Method.before_turn:
        return call
    key = draws.seed, draws.purpose, draws.round, "before_turn"
    with watched(method, *key, "process"), torch.no_grad():
        clients, hook = (
            state.client(call.clients),
            asked(method, None, state.rows.initial["client"]).before_turn,
        )
        draw = generator(*key) if isinstance(call, TrainCall) else None
        return call._replace(laid=hook(state.server, clients, state.others(), draw))


class Backend(ABC):
    """Run one-client hooks of a Method over many clients, and change nothing in a call's state.

    engine: how it does so; a backend that runs out of memory may narrow its width. net: the network
    that it trains.
    """

    name: str
    engine: Engine
    net: Net

    @abstractmethod
    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer calls, of one run or of several, side by side; what went wrong with one is its own
        answer.

        Where a method draws from the generators of the process, whose order is anybody's guess side
        by side, calls are answered again and from then on one after another (`watched`).
        """

    def begun(self, state: State) -> State:
        """Return a state before round 1 as far as it is kept beside this backend; by default it is
        all.
        """
        return state

    def participate(self, *about: Any, **more: Any) -> Participation:
        """Answer one TrainCall with these fields."""
        return self._one(TrainCall(*about, **more))

    def judge(self, *about: Any, **more: Any) -> dict[str, Counts]:
        """Answer one EvalCall with these fields, on the host."""
        return tree.fetch(self._one(EvalCall(*about, **more)))

    def evaluate(self, *about: Any, **more: Any) -> Counts:
        """Return what `judge` does, of the test samples."""
        return self.judge(*about, **more)["test"]

    def _one(self, call: Any) -> Any:
        state, call = call.state, met(call)
        shown = {
            "server": state.server,
            "buffers": state.server_buffers,
            "rows": dict(enumerate(state.rows.trees)),
        }
        before = versions(shown)
        answer = self.run([call])[0]
        if isinstance(answer, Exception):
            raise answer
        unchanged(shown, before, type(call.method).__name__)
        return answer
