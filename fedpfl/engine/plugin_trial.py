"""Try a plugin's method before the first round: its mistakes may change numbers in silence.

Networks of plugins are tried as they are built (`models/traits.py`); a method needs a state and
clients. Two rounds are played, and again by the code as another process would have it, the second
one first: both must give the same bits. For the batched backend each client is trained beside
others and alone.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.backends.backend import Backend, Engine
from fedpfl.engine.backends.distance import answer_distance
from fedpfl.engine.backends.loop import LoopBackend
from fedpfl.engine.backends.selection import make_backend
from fedpfl.engine.calls import Call, EvalCall, TrainCall, with_before_turn
from fedpfl.engine.keys import Draws, find_global_draws
from fedpfl.engine.round import RoundSetup, play_round
from fedpfl.engine.state import State, make_initial_state
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.participation import OneClient, run_participation
from fedpfl.engine.training.train_plan import FineTuning
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method
from fedpfl.models import Net
from fedpfl.models.vectorized import ConstantDraws

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)

SIZES = (8, 5, 6)  # samples of the clients: with batches of 8 two are padded, beside others
CUDA_TOLERANCE = 1e-4
"""How far a round may lie from itself on a GPU, where sums may come in another order."""
PADDING_TOLERANCE = 1e-3
"""How far clients beside others may lie from those alone, as `answer_distance` measures it."""
EPOCHS = 3  # steps, as each client has one minibatch: what is learnt shows in the second


class TurnsBackend(LoopBackend):
    """Take clients through training in turns, a job each.

    So may threads: what one client's hooks leave outside is then found by the next one's.
    """

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """See Backend. Calls of training alone; an error is raised."""
        return [self._train_in_turns(call) for call in calls if isinstance(call, TrainCall)]

    def _train_in_turns(self, call: TrainCall) -> Any:
        nets = {client: self.net.copy() for client in call.clients}
        jobs = {
            client: run_participation(call, OneClient(client), net, self._autocast)
            for client, net in nets.items()
        }
        replies: dict[int, Any] = dict.fromkeys(call.clients)
        results: dict[int, Any] = {}
        while len(results) < len(jobs):
            for client in [client for client in call.clients if client not in results]:
                try:
                    job = jobs[client].send(replies[client])
                except StopIteration as ending:
                    results[client] = ending.value
                    continue
                replies[client] = self._do_job(nets[client], job, threading.Event())
        return tree.stack([results[client] for client in call.clients])


@dataclass(frozen=True, eq=False)
class PluginTrial:
    """Hold what a method is tried with, which is the run's own.

    Attributes:
        twin: The same method, of code that was imported anew.
        local: How clients train; epochs and batches are made small.
    """

    method: Method
    twin: Method
    net: Net
    federation: Federation
    engine: Engine
    local: Local
    device: torch.device
    seed: int

    def find_hidden_state(self) -> str:
        """Return how something that outlives a hook's call shows, "" for nothing.

        Raises:
            MethodError: A hook breaks its rule.
        """
        if path := self._call_safely(self._resume_after_round):
            return f"a run that is resumed after its first round would have another {path}"
        if path := self._call_safely(self._take_turns):
            return f"clients side by side give other {path} than one after another"
        return ""

    def depends_on_padding(self) -> bool:
        """Tell whether clients train or answer otherwise where minibatches are padded."""
        with suppress(MethodError):  # the backend that comes to it says so, or is left out
            distance = self._call_safely(self._measure_padding)
            return distance is not None and distance > PADDING_TOLERANCE
        return False

    def _call_safely(self, measure: Callable[[Method], Answer]) -> Answer | None:
        """Return what is measured, None where the method fails: its first round says why."""
        # Copies: what hooks keep by mistake stays out of the run.
        method = copy.deepcopy(self.method)
        try:
            return measure(method)
        except MethodError:
            raise
        except Exception:
            log.debug("the trial of a plugin's method failed", exc_info=True)
            return None

    # ---- two rounds, and as after an interruption

    def _resume_after_round(self, method: Method) -> str:
        """Return what differs where the second round comes first, "" for nothing."""
        backend = self._make_backend("loop")
        twin = copy.deepcopy(self.twin)
        states = [self._make_state(method)]
        results = []
        for _ in range(2):
            # A round changes the state that it begins with.
            result, state = self._play_round(method, backend, copy.deepcopy(states[-1]))
            results.append(result)
            states.append(state)
        for position in (1, 0):
            result, _ = self._play_round(twin, backend, states[position])
            if path := self._find_difference(results[position], result):
                return path
        return ""

    def _find_difference(self, first_answers: Tree, second_answers: Tree) -> str:
        """Return the path of the first tensor that differs, "" for none."""
        tolerance = CUDA_TOLERANCE if self.device.type == "cuda" else 0.0
        pairs = zip(tree.items(first_answers), tree.items(second_answers), strict=True)
        for (path, first), (_, second) in pairs:
            if not _are_near(first, second, tolerance):
                return path
        return ""

    def _play_round(self, method: Method, backend: Backend, state: State) -> tuple[Tree, State]:
        """Return what a round and evaluations around it give, and the state afterwards."""
        federation, cohort = self._cut_federation()
        setup = RoundSetup(backend, method, federation, self._local, self.seed)
        first_evaluation = backend.evaluate(
            self._make_evaluation(method, federation, state, cohort)
        )
        state, outcome = play_round(setup, state, cohort)
        last_evaluation = backend.evaluate(self._make_evaluation(method, federation, state, cohort))
        answer = {
            "evaluation": {"before": first_evaluation.loss, "after": last_evaluation.loss},
            "training loss": outcome.loss,
            "server": state.server,
            "clients": state.client(cohort),
        }
        return answer, state

    # ---- side by side and one after another

    def _take_turns(self, method: Method) -> str:
        """Return what of clients differs whose hooks are called in turns."""
        # Whose draws come in the order of calls, clients go one after another anyway.
        if find_global_draws(method) or self.net.traits.draws:
            return ""
        call = self._make_training(method)
        one_by_one = self._make_backend("loop").run_one(call)
        engine = self._plain_engine("loop")
        in_turns = TurnsBackend(self.net.copy(), self.device, engine).run_one(call)
        return self._find_difference(one_by_one._asdict(), in_turns._asdict())

    # ---- beside others and alone

    def _measure_padding(self, method: Method) -> float:
        """Return how far clients that train together lie from each alone, who is not padded."""
        backend = self._make_backend("batched")
        call = self._make_training(method)
        singles = []
        for position, client in enumerate(call.clients):
            overlay = call.overlay
            if overlay is not None:
                overlay = tree.take(overlay, slice(position, position + 1))
            singles.append(replace(call, clients=[client], overlay=overlay))
        # What is drawn differs with the number of clients.
        with ConstantDraws():
            together = backend.run_one(call)
            alone = tree.concatenate_trees([backend.run_one(single) for single in singles])
        return answer_distance(together, alone)

    # ---- what both need

    @property
    def _local(self) -> Local:
        # Adam makes whole steps of gradients that are rounding alone.
        return replace(
            self.local, epochs=EPOCHS, steps=None, batch_size=max(SIZES), optimizer="sgd"
        )

    def _make_backend(self, name: Literal["loop", "batched"]) -> Backend:
        return make_backend(self._plain_engine(name), self.net.copy(), self.device)

    def _plain_engine(self, name: Literal["loop", "batched"]) -> Engine:
        return replace(
            self.engine, backend=name, workers=1, precision="fp32", width=0, graphs=False
        )

    def _make_state(self, method: Method) -> State:
        return make_initial_state(
            method, self.net, self.federation.clients, self.device, seed=self.seed
        )

    def _cut_federation(self) -> tuple[Federation, list[int]]:
        """Return the federation with few samples of its largest clients, and these clients."""
        largest = self.federation.train_sizes.argsort(descending=True)[: len(SIZES)].tolist()
        sizes = dict(zip(largest, SIZES, strict=False))

        def cut(split: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(own[: sizes.get(client, len(own))] for client, own in enumerate(split))

        federation = replace(
            self.federation,
            train=cut(self.federation.train),
            test=cut(self.federation.test),
            validation=cut(self.federation.validation),
        )
        return federation, sorted(largest)

    def _make_training(self, method: Method) -> TrainCall:
        federation, cohort = self._cut_federation()
        state = self._make_state(method)
        draws = Draws(self.seed, "train", 1)
        return with_before_turn(TrainCall(method, federation, state, cohort, self._local, draws))

    def _make_evaluation(
        self, method: Method, federation: Federation, state: State, cohort: list[int]
    ) -> EvalCall:
        adaptation = FineTuning(self._local, Draws(self.seed, "adapt", state.round))
        return EvalCall(method, federation, state, cohort, before_evaluation=adaptation)


def _are_near(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Tell whether two tensors have the same numbers, or nearly."""
    if not first.is_floating_point():
        return torch.equal(first, second)
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance, equal_nan=True)
