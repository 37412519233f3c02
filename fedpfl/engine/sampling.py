"""Find out before round 1 what protecting single samples asks of a run: steps, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fedpfl.data.federation import Federation
from fedpfl.engine.backends.backend import Engine
from fedpfl.engine.backends.loop import LoopBackend
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.state import make_initial_state
from fedpfl.engine.training.jobs import TrainJob
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.minibatches import find_poisson_steps
from fedpfl.engine.training.participation import find_train_job
from fedpfl.engine.training.train_plan import FineTuning, with_epoch_numbers
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import Method
from fedpfl.models import Net
from fedpfl.models.vectorized import find_obstacle, mixes_samples
from fedpfl.privacy import SampleProtection, Secret, Steps

ClientSteps = tuple[tuple[Steps, ...], ...]


class SamplingRehearsal:
    """Try one client's participation and fine-tuning with its samples protected.

    Args:
        method: Of the run.
        net: The network.
        federation: The clients that take part.
        clip: The longest gradient of a sample, perhaps infinite.
    """

    def __init__(self, method: Method, net: Net, federation: Federation, clip: float):
        require_protectable_network(net)
        self._method = method
        self._net = net.copy()
        self._federation = federation
        clients = federation.clients
        # The largest client: one of too few samples takes no step.
        self._client = int(federation.train_sizes.argmax())
        protection = SampleProtection(clip, [1.0] * clients, Secret.of_seed(0))
        self._draws = Draws(0, "rehearsal", 1, protection)
        device = federation.x.device
        self._state = make_initial_state(method, net, clients, device)
        self._backend = LoopBackend(self._net, device, Engine(workers=1))

    def plan_training(self, local: Local) -> ClientSteps:
        """Return the steps of a participation, by client. Raises FedpflError for one refused."""
        call = TrainCall(
            method=self._method,
            federation=self._federation,
            state=self._state,
            clients=[self._client],
            local=local,
            draws=self._draws,
        )
        return self._rehearse(call, replace(call, local=_one_step(local)))

    def plan_tuning(self, make_tuning: Callable[[Draws], FineTuning]) -> ClientSteps:
        """Return the steps of one fine-tuning, by client. Raises FedpflError for one refused."""
        tuning = make_tuning(self._draws)
        call = EvalCall(
            method=self._method,
            federation=self._federation,
            state=self._state,
            clients=[self._client],
            tuning=tuning,
            before_evaluation=tuning,
        )
        return self._rehearse(
            call, replace(call, tuning=tuning._replace(local=_one_step(tuning.local)))
        )

    def _rehearse(self, call: Any, short_call: Any) -> ClientSteps:
        """Return the steps of a call by client, after its shortest form has run."""
        job = find_train_job(call, self._client, self._net)
        # One step is enough to show whether gradients by sample can be had.
        self._backend.run_one(short_call)
        return self._count_steps(job)

    def _count_steps(self, job: TrainJob) -> ClientSteps:
        """Return the steps that a job's phases take, by client."""
        local = job.plan.local
        by_client = []
        for samples in self._federation.train_sizes.tolist():
            planned = []
            for phase, epochs in with_epoch_numbers(job.plan.phases):
                batch_size = local.for_phase(phase).batch_size
                steps = find_poisson_steps(batch_size, samples, local.steps)
                planned.append(Steps(steps.rate, len(epochs) * steps.number))
            by_client.append(tuple(planned))
        return tuple(by_client)


def _one_step(local: Local) -> Local:
    return replace(local, epochs=None, steps=1)


def require_protectable_network(net: Net) -> None:
    """Raise FedpflError for a network in which samples of a minibatch are not apart."""
    reason = ""
    if net.buffers:
        reason = "it keeps statistics of samples in buffers, as BatchNorm does"
    elif obstacle := find_obstacle(net):
        reason = f"its gradients by sample cannot be vectorised: {obstacle}"
    elif mixes_samples(net):
        reason = "it mixes the samples of a minibatch"
    if reason:
        raise FedpflError(f"privacy=sample and model={net.name}: {reason}; choose another network")
