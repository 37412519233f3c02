"""The loop backend: one client after another, on worker threads with one intra-op thread each.

On a CPU small batches gain more from two clients side by side than from two threads inside an
operator, and oversubscription cannot happen. Convolutions run channels-last. Each client is
computed by one thread with one fixed order of operations, so the number of workers does not change
a bit of the result.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.engine.backends.backend import Backend, Engine, reproducible_arithmetic
from fedpfl.engine.backends.ranks import available_cores
from fedpfl.engine.calls import Answer, Call, Counts, TrainCall, estimate_work
from fedpfl.engine.keys import generator, track_global_draws
from fedpfl.engine.training.cutting import cut_job
from fedpfl.engine.training.evaluation import ForwardPass, evaluate_client, has_equal_rows
from fedpfl.engine.training.features import ClientSplit, FeatureStore, make_feature_store
from fedpfl.engine.training.forms import AnswerForms, require_equal_forms
from fedpfl.engine.training.frozen import FrozenBody, find_frozen_body
from fedpfl.engine.training.jobs import EvalJob, TrainJob, TrainResult
from fedpfl.engine.training.local import Local
from fedpfl.engine.training.minibatches import StepPlan, plan_steps
from fedpfl.engine.training.participation import OneClient, run_evaluation, run_participation
from fedpfl.engine.training.protected import explaining_failure, sum_clipped_gradients
from fedpfl.engine.training.pure_steps import (
    PureStep,
    PureSteps,
    StepState,
    has_pure_calls,
    is_of_package,
    is_pure,
)
from fedpfl.engine.training.scripts import StepScripts
from fedpfl.engine.training.sgd import (
    Moments,
    as_float_mask,
    complete_gradients,
    initial_moments,
    masked_moments,
    optimizer_step_,
)
from fedpfl.engine.training.shard import gather_data
from fedpfl.engine.training.shared_model import SharedModel, find_shared_model
from fedpfl.engine.training.train_plan import (
    TrainableLeaves,
    clients_without_trainable_entries,
    find_trainable_leaves,
    streams_with_differing_masks,
    with_epoch_numbers,
)
from fedpfl.ground import tree
from fedpfl.ground.errors import as_exception
from fedpfl.ground.seeding import seeded_by_key
from fedpfl.ground.tree import Tree
from fedpfl.methods import Batch, Data, Phase
from fedpfl.models import Bound, Net

LEAST_CUT = 250_000
"""Entries from which on a part takes less time without a script than the whole with one."""

MOST_PLANNED = 4096
"""Samples that are dealt to steps at once, if an epoch has no more."""


class LoopBackend(Backend):
    """One client after another; a pool of threads on a CPU."""

    name = "loop"

    def __init__(self, net: Net, device: torch.device, engine: Engine):
        # ---- Step 1: threads of one core each, with the same arithmetic.
        workers = 1 if device.type == "cuda" else engine.workers or available_cores()
        if device.type == "cpu":
            torch.set_num_threads(1)
            keep_freed_memory()
        self.engine = engine
        self.net = net
        self._device = device
        self._local = threading.local()
        self._autocast = partial(
            torch.autocast, device.type, torch.bfloat16, engine.precision == "bf16"
        )
        self._arithmetic = partial(reproducible_arithmetic, device, engine.precision)

        # ---- Step 2: what saves steps their time: features of a frozen body, and scripts.
        self._feature_store = make_feature_store(net, device)
        # On a GPU Python is ahead of the kernels; autocast is a state of a thread.
        self._scripts: StepScripts | None = None
        if device.type == "cpu" and engine.precision == "fp32":
            self._scripts = StepScripts()
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

        # ---- Step 3: do clients go side by side?
        # A network that draws from torch's generator alone has one for each client, so that they
        # go side by side.
        traits = net.traits
        has_generator_per_client = (
            traits.draws <= {"torch"} and not traits.recomputes and device.type == "cpu"
        )
        # Where somebody draws from the process's generators, the one client that is computed holds
        # this lock.
        self._client_lock: threading.Lock | None = None
        if traits.draws and not has_generator_per_client:
            self._client_lock = threading.Lock()

    @cached_property
    def _has_equal_rows(self) -> bool:
        """Return whether evaluation of several clients together changes no bit on this CPU."""
        return self._device.type != "cpu" or has_equal_rows(self.net)

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend. All calls share the pool, which takes the largest clients first.

        So its threads end together.
        """
        if self._feature_store:
            self._feature_store.folder = calls[0].state.rows.folder
        with self._arithmetic():
            if self._client_lock is None:
                with seeded_by_key("loop") as drawn_from:
                    results = self._run_calls(calls)
                    if not drawn_from():
                        return results
                del results
                self._client_lock = threading.Lock()
            return self._run_calls(calls)

    def _run_calls(self, calls: Sequence[Call]) -> list[Answer]:
        """Run all clients of all calls in the pool, and stack each call's results."""
        # ---- Step 1: the pool is given all clients, those with most work first. Clients that are
        # evaluated by one model go together.
        pending_calls = []
        for call in calls:
            is_joinable = self._client_lock is None and self._has_equal_rows
            shared = find_shared_model(call, self.net) if is_joinable else None
            pending_calls.append(_PendingCall(call, shared))
        tasks = [task for pending in pending_calls for task in self._list_tasks(pending)]
        for task in sorted(tasks, key=lambda task: -task.work):
            task.pending.futures[task.key] = self._pool.submit(task.run)

        # ---- Step 2: results are stacked; an error is the answer of its own call.
        try:
            return [pending.wait() for pending in pending_calls]
        except BaseException:  # Ctrl-C: all end within a step
            for pending in pending_calls:
                pending.cancel()
            raise

    def _list_tasks(self, pending: _PendingCall) -> list[_Task]:
        """Return what the pool is given for a call: its clients, and passes of several."""
        run_client = self._run_client if self._client_lock is None else self._run_client_alone
        call = pending.call
        tasks: list[_Task] = []
        for client in pending.separate_clients:
            row = OneClient(client, pending.shared_models, pending.answer_forms)
            run = partial(run_client, call, row, pending.stop)
            tasks.append(_Task(estimate_work(call, client), pending, client, run))
        for number, forward_pass in enumerate(pending.passes):
            work = sum(forward_pass.client_sizes) / 3
            run = partial(self._run_pass, pending, forward_pass)
            tasks.append(_Task(work, pending, pass_key(number), run))
        return tasks

    def _run_pass(self, pending: _PendingCall, forward_pass: ForwardPass) -> Counts:
        """Evaluate the clients of a pass together."""
        if pending.stop.is_set():
            raise CancelledError
        assert pending.shared
        return pending.shared.evaluate_pass(
            self._thread_net(), forward_pass, self._autocast, self._feature_store
        )

    def _run_client_alone(self, call: Call, row: OneClient, stop: threading.Event) -> Any:
        """Run one client at a time, the process's generators seeded for it.

        So neither the order nor the cohort matters to what is drawn.
        """
        assert self._client_lock
        client = row.clients[0]
        key = call.draws.hook_key(client)
        draws = track_global_draws(call.method, key, self.net.traits.draws)
        with self._client_lock, draws:
            # What clients share is drawn anew by each.
            unshared_row = OneClient(client, answer_forms=row.answer_forms)
            return self._run_client(call, unshared_row, stop)

    def _thread_net(self) -> Net:
        """Return this thread's copy of the network."""
        if not hasattr(self._local, "net"):
            self._local.net = self.net.copy()
        return self._local.net

    def _run_client(self, call: Call, row: OneClient, stop: threading.Event) -> Any:
        """Take one client through a call, each of its jobs at once."""
        net = self._thread_net()
        net.generator = None
        if net.traits.draws and self._client_lock is None:
            net.generator = generator(*call.draws.hook_key(row.clients[0]))
        jobs: Generator[TrainJob | EvalJob, Any, Any]
        if isinstance(call, TrainCall):
            jobs = run_participation(call, row, net, self._autocast)
        else:
            jobs = run_evaluation(call, row, net, self._autocast)
        result: Counts | TrainResult | None = None
        while True:
            try:
                job = jobs.send(result)
            except StopIteration as stop_iteration:
                return stop_iteration.value
            if isinstance(job, EvalJob):
                result = evaluate_client(net, job, self._autocast, self._feature_store)
            else:
                result = self._train(net, job, stop)

    def _train(self, net: Net, job: TrainJob, stop: threading.Event) -> TrainResult:
        """Take all steps of a job, phase by phase."""
        cut = None if self._is_faster_whole(net, job) else cut_job(net, job)
        if cut:
            job = cut.job
        training = _ClientTraining(
            net=net,
            job=job,
            autocast=self._autocast,
            stop=stop,
            store=self._feature_store,
            scripts=self._scripts,
        )
        for phase, epochs in with_epoch_numbers(job.plan.phases):
            # Without an entry that moves there is no step, not even one of weight decay.
            is_idle = clients_without_trainable_entries(phase)
            if is_idle is None or not bool(is_idle):
                training.train_phase(phase, epochs)
        result = training.make_result()
        return cut.put_back(result) if cut else result

    def _is_faster_whole(self, net: Net, job: TrainJob) -> bool:
        """Return whether steps of the whole network go by scripts, those of a part not."""
        # Whether a hook is checked has no part in it, as the first ones in a process are.
        is_small = sum(leaf.numel() for leaf in net.params.values()) < LEAST_CUT
        has_scripts = bool(self._scripts) and has_pure_calls(net) and is_of_package(job.method)
        return is_small and has_scripts and not job.is_plain


class _PendingCall:
    """Hold a call while the pool computes its clients.

    Attributes:
        call: The call.
        shared: Those clients that are evaluated by one model.
        separate_clients: The others.
        passes: Of `shared`.
        stop: Once it is set, clients end within a step, or are not begun.
        shared_models: As in OneClient, as are `answer_forms`.
        futures: By client, and by `pass_key`.
    """

    def __init__(self, call: Call, shared: SharedModel | None):
        self.call = call
        self.shared = shared
        self.separate_clients = shared.other_clients if shared else call.clients
        self.passes = shared.passes if shared else []
        self.stop = threading.Event()
        self.shared_models: dict[str, Any] = {}
        self.answer_forms: AnswerForms = {}
        self.futures: dict[int, Future] = {}

    def wait(self) -> Answer:
        """Return the call's answer; an error is one."""
        try:
            return self._join_results()
        except (Exception, SystemExit) as error:
            self.cancel()
            return as_exception(error)

    def cancel(self) -> None:
        """Give up what has not ended."""
        self.stop.set()
        for future in self.futures.values():
            future.cancel()

    def _join_results(self) -> Answer:
        """Return the results of all clients, stacked in the order of the call."""
        results = [self.futures[client].result() for client in self.separate_clients]
        for hook, forms in self.answer_forms.items():
            require_equal_forms(hook, forms)
        if self.shared is None:
            return tree.stack(results)
        counts = [self.futures[pass_key(number)].result() for number in range(len(self.passes))]
        return self.shared.make_answer(counts, tree.stack(results) if results else None)


def pass_key(number: int) -> int:
    """Return the key of a forward pass beside the numbers of clients."""
    return -1 - number


class _Task(NamedTuple):
    """Hold a part of a call that one thread computes.

    Attributes:
        work: How long it takes, in training samples.
        pending: The call.
        key: Of the result.
        run: Computes it.
    """

    work: float
    pending: _PendingCall
    key: int
    run: Callable[[], Any]


class _ClientTraining:
    """Hold a client's trained tree, state and buffers on the way through its phases."""

    def __init__(
        self,
        net: Net,
        job: TrainJob,
        autocast: Callable[[], AbstractContextManager],
        stop: threading.Event,
        store: FeatureStore | None,
        scripts: StepScripts | None,
    ):
        self._net = net
        self._job = job
        self._autocast = autocast
        self._stop = stop
        self._scripts = scripts
        ((federation, client),) = job.rows
        self._split = ClientSplit(federation, "train", client)
        self._data = gather_data(federation, self._split.sample_indices)
        self._feature_store = store
        self._params = tree.map(working_copy, job.start)
        self._client = job.client
        self._buffers = job.buffers
        self._moments = initial_moments(job.plan, self._params)
        self._streams_with_differing_masks = streams_with_differing_masks(job.plan.phases)
        # On the device: to read a loss at every step would make the host wait for the GPU.
        zeros = torch.zeros(3, device=self._data.y.device)
        self._sums = dict(zip(("loss", "sample_loss", "samples"), zeros.unbind(), strict=True))
        self._step_count = 0
        self._records: list[Tree] = []

    def train_phase(self, phase: Phase, epochs: range) -> None:
        """Take the steps of a phase."""
        # ---- Step 1: which leaves move, and where in them
        job = self._job
        local = job.plan.local.for_phase(phase)
        leaves = tree.leaves(self._params)
        trainable = find_trainable_leaves(phase, self._params)
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i in trainable.indices)
        trainable_leaves = [leaves[i] for i in trainable.indices]
        moments = self._moments[phase.stream].of(trainable.indices)
        float_masks = [
            None if mask is None else as_float_mask(mask, leaf)
            for mask, leaf in zip(trainable.masks, trainable_leaves, strict=True)
        ]
        masking: AbstractContextManager = nullcontext()
        if phase.stream in self._streams_with_differing_masks:
            masking = masked_moments(moments, trainable.masks, local)

        body = self._find_frozen_body(phase, trainable)
        pure_step = self._find_pure_step(phase, trainable, local, body, (moments, float_masks))

        # ---- Step 2: the steps
        with masking:
            if pure_step:
                self._take_pure_steps(pure_step, epochs)
                return
            for number, batches in enumerate(
                _training_batches(job, self._data, phase, epochs, local)
            ):
                if self._stop.is_set():
                    raise CancelledError
                bound = self._bind_network(body, batches[0])
                if phase.step and not job.draws[0].protection:
                    loss = self._phase_step(phase, bound, batches)
                else:
                    loss, grads = self._find_gradient(
                        phase=phase,
                        bound=bound,
                        batch=batches[0],
                        trainable=trainable,
                        local=local,
                        step=(f"{phase.stream} {epochs.start}", number),
                    )
                    with torch.no_grad():
                        optimizer_step_(trainable_leaves, moments, grads, float_masks, local)
                self._buffers = bound.buffers
                self._add_loss(loss, len(batches[0].y))

    def _find_gradient(
        self,
        phase: Phase,
        bound: Bound,
        batch: Batch,
        trainable: TrainableLeaves,
        local: Local,
        step: tuple[str, int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return a minibatch's loss and gradient, protected where samples are.

        `step` is the phase and the number of the step in it, by which noise is drawn.
        """
        if self._job.draws[0].protection:
            return self._compute_protected_gradient(phase, trainable, batch, local, step)
        leaves = tree.leaves(self._params)
        return self._compute_gradient(phase, bound, batch, leaves, trainable.indices)

    def _find_pure_step(
        self,
        phase: Phase,
        trainable: TrainableLeaves,
        local: Local,
        body: FrozenBody | None,
        optimizer_state: tuple[Moments, list[Tensor | None]],
    ) -> PureStep | None:
        """Return a phase's step, if tensors alone decide it.

        `optimizer_state` is the moments of the leaves that move, and their masks.
        """
        job = self._job
        if not self._scripts or not is_pure(self._net, job, phase, trainable, local):
            return None
        samples = self._data._asdict()
        if body:
            features = body.compute_features(self._net.bind(self._buffers, training=True))
            if features is None:
                return None
            samples["features"] = features
        moments, masks = optimizer_state
        positions = trainable.indices
        pairs = zip(positions, masks, strict=True)
        state = StepState(
            params=self._params,
            velocity=dict(zip(positions, moments.mean, strict=True)),
            masks={i: mask for i, mask in pairs if mask is not None},
            server={} if job.is_plain else job.server,
            client={} if job.is_plain else self._client,
            samples=samples,
            sums=self._sums,
        )
        return PureStep(
            net=self._net, job=job, phase=phase, indices=positions, local=local, state=state
        )

    def _take_pure_steps(self, step: PureStep, epochs: range) -> None:
        """Take a phase's pure steps."""
        assert self._scripts
        if step.phase.after_gradient:
            # Steps change the client's state, which is not theirs.
            self._client = tree.map(torch.clone, self._client)
            step = replace(step, state=step.state._replace(client=self._client))
        steps = PureSteps(step, self._scripts, self._stop)
        for plan in _step_plans(self._job, step.phase, epochs, step.local):
            self._step_count += steps.take_epochs(plan)
        self._records += steps.records

    def _find_frozen_body(self, phase: Phase, trainable: TrainableLeaves) -> FrozenBody | None:
        """Return the body if the head alone moves in a phase."""
        # Samples that look new each time have no features to keep.
        if phase.step or self._job.rows[0].federation.augment:
            return None
        if self._feature_store:
            with self._autocast():
                body = self._feature_store.find_body(self._net, [self._split], self._data)
            if body:
                return body
        return find_frozen_body(
            self._net, self._params, trainable.indices, self._buffers, self._data
        )

    def _bind_network(self, body: FrozenBody | None, batch: Batch) -> Bound:
        """Return the network for a step."""
        bound = self._net.bind(self._buffers, training=True)
        return body.bind_batch(bound, batch) if body else bound

    def make_result(self) -> TrainResult:
        """Return what the phases have made of the client."""
        sums = self._sums
        loss = sums["loss"] / max(1, self._step_count)
        records: Tree = {}
        if self._records:
            records = tree.concatenate_trees(self._records)
        return TrainResult(
            params=tree.map(detached_copy, self._params),
            client=self._client,
            buffers=self._buffers,
            loss=loss,
            sample_loss=sums["sample_loss"] / sums["samples"].clamp(min=1),
            has_stepped=torch.full_like(loss, self._step_count > 0, dtype=torch.bool),
            records=[records],
        )

    def _phase_step(self, phase: Phase, bound: Bound, batches: list[Batch]) -> Tensor:
        """Take a step by `Phase.step`; return the loss."""
        assert phase.step is not None
        batch = tuple(batches) if len(batches) > 1 else batches[0]
        with torch.no_grad(), self._autocast():
            self._params, loss = phase.step(
                self._job.server, self._client, bound, self._params, batch
            )
        return loss.detach()

    def _compute_gradient(
        self, phase: Phase, bound: Bound, batch: Batch, leaves: list[Tensor], indices: list[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and its gradient at the leaves `indices`.

        `Phase.after_gradient` sees both first.
        """
        # ---- Step 1: the loss, and what a method's loss leaves beside it
        server = self._job.server
        objective = phase.loss or self._job.plan.loss
        with self._autocast():
            loss = objective(server, self._client, bound, self._params, batch)
        record: Tree = {}
        if isinstance(loss, tuple):
            loss, record = loss
        record = tree.map(Tensor.detach, record)
        if record and self._job.wants_records:
            self._records.append(record)

        # ---- Step 2: the gradient
        grads = self._differentiate(loss, [leaves[i] for i in indices])
        loss = loss.detach()
        if phase.after_gradient:
            params = tree.map(Tensor.detach, self._params)
            all_grads = complete_gradients(grads, leaves, indices)
            with torch.no_grad():
                gradient = tree.rebuild(self._params, all_grads)
                self._client = phase.after_gradient(
                    server, self._client, params, gradient, batch, loss, record
                )
        return loss, grads

    def _compute_protected_gradient(
        self,
        phase: Phase,
        trainable: TrainableLeaves,
        batch: Batch,
        local: Local,
        step: tuple[str, int],
    ) -> tuple[Tensor, list[Tensor]]:
        """Return 0 in place of a loss, and a gradient that hides single samples.

        Args:
            phase: Of training.
            trainable: The leaves that move.
            batch: A Poisson minibatch, perhaps of nobody.
            local: How the client trains.
            step: The phase and the number of the step in it, by which noise is drawn.
        """
        # ---- Step 1: the loss as a function of the leaves that move.
        ((_, client),) = self._job.rows
        (draws,) = self._job.draws
        protection = draws.protection
        assert protection
        server = self._job.server
        objective = phase.loss or self._job.plan.loss
        leaves = [leaf.detach() for leaf in tree.leaves(self._params)]
        values = [leaves[i] for i in trainable.indices]

        def compute_loss(values: list[Tensor], sample: Batch) -> Any:
            replaced = dict(zip(trainable.indices, values, strict=True))
            params = tree.rebuild(
                self._params, [replaced.get(i, leaf) for i, leaf in enumerate(leaves)]
            )
            bound = self._net.bind(self._buffers, training=True)
            return objective(server, self._client, bound, params, sample)

        # ---- Step 2: its gradient, clipped sample by sample.
        # A minibatch of nobody is a step of noise alone: to skip it would tell who was drawn.
        sums = [torch.zeros_like(leaf) for leaf in values]
        if len(batch.x):
            with self._autocast(), explaining_failure():
                sums = sum_clipped_gradients(
                    compute_loss, values, trainable.masks, batch, protection.clip
                )

        # ---- Step 3: noise, and the mean over as many samples as a minibatch has on average.
        # How many were drawn is a secret, too.
        expected = min(local.batch_size, len(self._data.y))
        key = draws.purpose, draws.round, *step
        grads = []
        for i, gradient in zip(trainable.indices, sums, strict=True):
            noise = protection.draw_noise(gradient, client, (*key, i))
            grads.append((gradient + noise) / expected)
        return torch.zeros((), device=batch.x.device), grads

    def _differentiate(self, loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        """Return the gradient of the loss at some leaves of the trained tree."""
        if not self._net.traits.recomputes:
            return list(torch.autograd.grad(loss, leaves, materialize_grads=True))
        # Reentrant checkpointing adds up its gradients in the leaves, and gives `autograd.grad`
        # none.
        for leaf in leaves:
            leaf.grad = None
        loss.backward()
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    def _add_loss(self, loss: Tensor, samples: int) -> None:
        """Add a step's loss to the sums that mean losses are made of."""
        self._step_count += 1
        self._sums["loss"] += loss
        if self._job.plan.by_sample:
            self._sums["sample_loss"] += loss * samples
            self._sums["samples"] += samples


def _step_plans(job: TrainJob, phase: Phase, epochs: range, local: Local) -> Iterator[StepPlan]:
    """Yield a client's steps, those of as many epochs as may be held at once."""
    ((federation, client),) = job.rows
    (draws,) = job.draws
    samples = max(1, len(federation.train[client]))
    count = max(1, MOST_PLANNED // samples)
    for start in range(epochs.start, epochs.stop, count):
        yield plan_steps(
            phase=phase,
            epochs=range(start, min(start + count, epochs.stop)),
            batch_size=local.batch_size,
            draws=draws,
            federation=federation,
            client=client,
            fixed=local.steps,
            randoms=job.randoms,
        )


def _training_batches(
    job: TrainJob, data: Data, phase: Phase, epochs: range, local: Local
) -> Iterator[list[Batch]]:
    """Yield the minibatches of each step of a client whose training data are `data`."""
    federation = job.rows[0].federation
    device = data.y.device
    for plan in _step_plans(job, phase, epochs, local):
        # Padding is -1. All sizes at once, as each reading of a tensor costs more than a small
        # step.
        batch_sizes = (plan.positions >= 0).sum(-1).tolist()
        steps = zip(plan.positions, plan.views, plan.random, batch_sizes, strict=True)
        for step_positions, step_views, step_random, step_sizes in steps:
            batches = []
            minibatches = zip(step_positions, step_views, step_random, step_sizes, strict=True)
            for positions, views, random, size in minibatches:
                batch = data.rows(tree.send(positions[:size], device))
                batch = batch._replace(random=tree.send(random[:size], device))
                if federation.augment:
                    x = federation.apply_augmentation(
                        batch.x,
                        tree.send(views[:size], device),
                    )
                    batch = batch._replace(x=x.contiguous(memory_format=torch.channels_last))
                batches.append(batch)
            yield batches


def keep_freed_memory() -> None:
    """Have glibc keep freed memory, as the next step asks for the same sizes.

    Fresh pages cost up to a fifth of a step. Does nothing with another C library.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    # Memory of earlier runs in this process: thousands of runs would fill it with gaps.
    libc.malloc_trim(0)
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # malloc.h
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_threshold, 2**31 - 1)
    # A thread's heap, which glibc would otherwise give back as a whole.
    libc.mallopt(top_pad, 64 * 2**20)


def working_copy(leaf: Tensor) -> Tensor:
    """Return a leaf to train, four axes channels last, as convolutions like them."""
    layout = torch.channels_last if leaf.dim() == 4 else torch.contiguous_format
    return leaf.detach().clone(memory_format=layout)


def detached_copy(leaf: Tensor) -> Tensor:
    """Return a trained leaf laid out as one never trained.

    An axis of one entry is contiguous at any stride, and a convolution chooses its kernel, hence
    last bits, by strides.
    """
    return leaf.detach().contiguous().flatten().view(leaf.shape)
