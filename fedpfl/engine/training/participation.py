"""A client's part in a round, and its evaluation, written once for all backends.

Both are generators that yield what to train and to evaluate. A backend runs them for one client
(`OneClient`) or for many stacked ones (`ManyClients`), and sends the answer to each job back in.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.calls import (
    Call,
    Counts,
    EvalCall,
    Participation,
    TrainCall,
    with_before_turn,
)
from fedpfl.engine.training.clients import OneClient, apply_overlay
from fedpfl.engine.training.forms import persistent_entries
from fedpfl.engine.training.jobs import Autocast, ClientRow, EvalJob, TrainJob, TrainResult
from fedpfl.engine.training.operations import FlopMeter, count_training_flops
from fedpfl.engine.training.protected import require_protectable
from fedpfl.engine.training.shard import make_shard
from fedpfl.engine.training.train_plan import (
    FineTuning,
    TrainPlan,
    make_fine_tuning_plan,
    make_training_plan,
)
from fedpfl.ground import traffic, tree
from fedpfl.ground.records import Record
from fedpfl.ground.survival import Horizon
from fedpfl.ground.traffic import Traffic
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import FACTS
from fedpfl.models import Net

TrainJobs = Generator[TrainJob | EvalJob, Any, Participation]
EvalJobs = Generator[TrainJob | EvalJob, Any, Record]


def run_participation(
    call: TrainCall, clients: OneClient, net: Net, autocast: Autocast
) -> TrainJobs:
    """Take clients through a round, in the order of the Method's hooks."""
    hooks = _TrainingHooks(call, clients, net, autocast)

    # ---- Step 1: clients prepare, and the server sends them their start.
    client = hooks.prepare_clients()
    facts = tree.select(client, FACTS)  # no hook changes them
    buffers = facts["statistics"]
    before = _empty_counts(facts["number"])
    start, down = clients.each(hooks.receive, client)
    metrics = clients.each(hooks.metrics, client)

    # ---- Step 2: they are evaluated as they come. In a survey none is.
    if call.survey is None:
        before = yield hooks.make_eval_job(clients.each(hooks.evaluated, client, start), buffers)

    # ---- Step 3: they train.
    prepared = tree.drop(client, ["statistics"])
    trained: TrainResult = yield hooks.make_train_job(prepared, start, buffers)

    # ---- Step 4: they see what training has made of them.
    facts |= {"trained": facts["trained"] | trained.has_stepped, "statistics": trained.buffers}
    client, updated_buffers = hooks.update_buffers({**trained.client, **facts}, trained, buffers)
    client = hooks.overlay_after_training(client, trained)
    params = clients.each(hooks.evaluated, client, trained.params)

    # ---- Step 5: they are evaluated as they go, and for early stopping on validation samples.
    after, validation_loss = yield from hooks.evaluate_trained(client, params)

    # ---- Step 6: they send an upload, and keep a state.
    uploads, client_states, up = clients.each(hooks.finish, client, start, trained.params)
    return Participation(
        uploads=uploads,
        client_states=client_states,
        trained=facts["trained"],
        buffers=client["statistics"],
        updated_buffers=updated_buffers,
        before=before,
        after=after,
        down=down,
        up=up,
        metrics=metrics,
        loss=trained.loss,
        sample_loss=trained.sample_loss,
        validation_loss=validation_loss,
        client_ids=facts["number"],
        flops=hooks.count_flops(prepared, start, buffers),
    )


def run_evaluation(call: EvalCall, clients: OneClient, net: Net, autocast: Autocast) -> EvalJobs:
    """Evaluate clients' personal models, or copies fine-tuned on their training data."""
    rows = [ClientRow(call.federation, client_id) for client_id in clients.clients]
    draws = [call.draws] * len(rows)

    # ---- Step 1: each client's personal model
    client = clients.states(call)
    overlay = _overlay_before_evaluation(call, clients, client, net, autocast)
    client = apply_overlay(client, overlay)
    params = clients.each(partial(call.method.personal, call.state.server), client)
    buffers = client["statistics"]

    # ---- Step 2: fine-tuned, where that is asked for
    if call.tuning:
        client = tree.drop(client, ["statistics"])
        tuned: TrainResult = yield _make_tuning_job(
            call=call,
            tuning=call.tuning,
            clients=clients,
            client=client,
            params=params,
            buffers=buffers,
            net=net,
        )
        params, buffers = tuned.params, tuned.buffers

    # ---- Step 3: evaluated on each split
    job = EvalJob(
        method=call.method,
        rows=rows,
        draws=draws,
        params=params,
        buffers=buffers,
        metrics=call.measures,
    )
    job = yield from _find_hazard(call, job)
    counts: Record = {"test": (yield job)}
    if call.wants_models:
        counts["model"] = {"params": params, "buffers": buffers}
    if call.federation.validation:
        counts["validation"] = yield replace(job, split="validation")

    # ---- Step 4: and on the test samples of all clients
    if call.common_federation:
        columns = []
        for other in range(call.common_federation.clients):
            other_rows = [ClientRow(call.common_federation, other)] * len(rows)
            columns.append((yield replace(job, rows=other_rows, metrics=())))
        counts["common"] = tree.combine(partial(torch.stack, dim=-1), columns)
    return counts


def find_train_job(call: Call, client_id: int, net: Net) -> TrainJob:
    """Return the training that a call comes to for a client, with all its phases."""
    run_call: Any = run_participation if isinstance(call, TrainCall) else run_evaluation
    jobs = run_call(with_before_turn(call), OneClient(client_id), net, nullcontext)
    return next(job for job in jobs if isinstance(job, TrainJob))


def _find_hazard(call: EvalCall, job: EvalJob) -> Generator[EvalJob, Counts, EvalJob]:
    """Return a job that judges survival by the hazard of the clients' training samples."""
    if call.horizon is None:
        return job
    horizon = Horizon(call.horizon)
    counts = yield replace(job, split="train", metrics=("hazard",), horizon=horizon)
    return replace(job, horizon=horizon._replace(hazard=counts.measures["hazard"]))


def _empty_counts(client_ids: Tensor) -> Counts:
    """Return the counts of clients that are not evaluated."""
    zeros = torch.zeros_like(client_ids, dtype=torch.float32)
    return Counts(correct=zeros, loss=zeros, total=zeros)


class _TrainingHooks:
    """Apply the hooks of one TrainCall to its clients.

    Methods that `each` applies take one client's trees; those that `one_by_one` applies take the
    client's number first, and may branch on values.
    """

    def __init__(self, call: TrainCall, clients: OneClient, net: Net, autocast: Autocast):
        self._call = call
        self._clients = clients
        self._net = net
        self._autocast = autocast
        self._method = call.method
        self._server = call.state.server
        self._rows = [ClientRow(call.federation, client_id) for client_id in clients.clients]
        self._draws = [call.draws] * len(self._rows)
        # What hooks compute themselves counts as training, too.
        self._meters: dict[int, Any] = {
            client_id: FlopMeter() if call.flop_settings else nullcontext()
            for client_id in clients.clients
        }
        self.metrics = partial(call.method.metrics, self._server)
        self.evaluated = partial(call.method.evaluated, self._server)

    # ---- before training

    def prepare_clients(self) -> Entries:
        """Return the clients' states as they are for this round."""
        clients = self._clients
        client = clients.states(self._call)
        client = apply_overlay(client, clients.one_by_one(self.sample))
        overlay = clients.one_by_one(self.before_training, client, client["statistics"])
        client = apply_overlay(client, overlay)
        facts = tree.select(client, FACTS)
        return {**clients.each(partial(self._method.prepare, self._server), client), **facts}

    def sample(self, client_id: int) -> Entries:
        """Return the server's draws for a client."""
        device = self._call.federation.x.device
        drawn = self._method.sample(
            self._server,
            self._call.draws.server(client_id),
        )
        return tree.map(lambda leaf: tree.send(leaf, device), drawn)

    def before_training(self, client_id: int, client: Entries, buffers: Entries) -> Entries:
        """Call `before_training`, which looks at a client's data."""
        bound = self._net.bind(buffers, training=True)
        with self._autocast(), self._meters[client_id]:
            return self._method.before_training(
                self._server, client, bound, self._make_shard(client_id)
            )

    def receive(self, client: Entries) -> tuple[Tree, Traffic]:
        """Return the tree that a client trains, and the traffic of its download."""
        sent = self._method.download(self._server, client)
        received = tree.unmask_received(sent)
        return self._method.start(received, client), traffic.count_traffic(sent)

    # ---- training

    def make_plan(self, client: Entries, start: Tree) -> TrainPlan:
        """Return the plan of training; a survey without training has no phase."""
        call = self._call
        if call.survey is None or call.survey.trains:
            make_plan = partial(make_training_plan, self._method, call.local, self._server)
            plan = self._clients.plan(make_plan, client, start)
        else:
            plan = TrainPlan(loss=self._method.loss, phases=[], local=call.local)
        if call.draws.protection:
            require_protectable(self._method, plan)
        return replace(plan, by_sample=call.wants_stopping_loss)

    def count_flops(self, client: Entries, start: Tree, buffers: Entries) -> Tensor:
        """Count the FLOPs of training by each of the call's settings, `[..., settings]`."""
        if not self._call.flop_settings:
            return torch.zeros((*client["number"].shape, 0), dtype=torch.float64)
        counted = self._clients.one_by_one(self.client_flops, client, start, buffers)
        return counted["flops"]

    def client_flops(
        self, client_id: int, client: Entries, start: Tree, buffers: Entries
    ) -> Entries:
        """Count the FLOPs of a client's steps by each setting, and those of its hooks."""
        counts = []
        for local in self._call.flop_settings:
            job = TrainJob(
                method=self._method,
                rows=[ClientRow(self._call.federation, client_id)],
                draws=self._draws[:1],
                plan=make_training_plan(self._method, local, self._server, client, start),
                start=start,
                server=self._server,
                client=client,
                buffers=buffers,
            )
            count = count_training_flops(self._net.bind(buffers, training=True), job)
            counts.append(count + self._meters[client_id].total)
        return {"flops": torch.tensor(counts, dtype=torch.float64)}

    # ---- after training

    def update_buffers(
        self, client: Entries, trained: TrainResult, old_buffers: Entries
    ) -> tuple[Entries, Entries]:
        """Return states with the statistics that the method lets move, and which these are."""
        hook = partial(self._method.updated_buffers, self._server)
        updated_buffers = self._clients.each(hook, client)
        statistics = dict(trained.buffers)
        for role, is_updated in updated_buffers.items():
            statistics[role] = tree.map(
                torch.where, is_updated, trained.buffers[role], old_buffers[role]
            )
        return {**client, "statistics": statistics}, updated_buffers

    def overlay_after_training(self, client: Entries, trained: TrainResult) -> Entries:
        """Return states with what clients find out from their trained models."""
        overlay = self._clients.one_by_one(
            self.after_training,
            client,
            client["statistics"],
            trained.params,
            records=trained.records,
        )
        return apply_overlay(client, overlay)

    def after_training(
        self,
        client_id: int,
        client: Entries,
        buffers: Entries,
        params: Tree,
        records: Tree,
    ) -> Entries:
        """Call `after_training`, which looks at a client's trained model."""
        bound = self._net.bind(buffers)
        with self._meters[client_id]:
            return self._method.after_training(
                self._server, client, bound, params, self._make_shard(client_id), records
            )

    def finish(self, client: Entries, start: Tree, params: Tree) -> tuple[Tree, Entries, Traffic]:
        """Return a client's upload, the state it keeps, and the upload's traffic."""
        upload, new_client = self._method.finish(self._server, client, start, params)
        client_state = persistent_entries(new_client, self._call.state.rows.initial["client"])
        return upload, client_state, traffic.count_traffic(upload)

    def evaluate_trained(
        self, client: Entries, params: Tree
    ) -> Generator[TrainJob | EvalJob, Any, tuple[Counts, Tensor]]:
        """Evaluate trained models; return counts and the loss that early stopping goes by."""
        call = self._call
        buffers = client["statistics"]
        after = _empty_counts(client["number"])
        if call.survey is None:
            after = yield self.make_eval_job(params, buffers)
        if not call.wants_stopping_loss:
            return after, torch.zeros_like(after.loss)
        counts = after
        if call.federation.validation:
            counts = yield self.make_eval_job(params, buffers, split="validation")
        return after, counts.loss / counts.total.clamp(min=1)

    # ---- jobs

    def make_eval_job(self, params: Tree, buffers: Entries, split: str = "test") -> EvalJob:
        """Return the job of evaluating these models on a split of the clients' own samples."""
        return EvalJob(
            method=self._method,
            rows=self._rows,
            draws=self._draws,
            params=params,
            buffers=buffers,
            split=split,
        )

    def make_train_job(self, client: Entries, start: Tree, buffers: Entries) -> TrainJob:
        """Make the job of training these trees on the clients' training data."""
        return TrainJob(
            method=self._method,
            rows=self._rows,
            draws=self._draws,
            plan=self.make_plan(client, start),
            start=start,
            server=self._server,
            client=client,
            buffers=buffers,
        )

    def _make_shard(self, client_id: int) -> Any:
        """Return a client's training data in the order of this round's minibatches."""
        call = self._call
        return make_shard(call.federation, client_id, call.local.batch_size, call.draws)


def _overlay_before_evaluation(
    call: EvalCall,
    clients: OneClient,
    client: Entries,
    net: Net,
    autocast: Autocast,
) -> Entries:
    """Call `before_evaluation`, which looks at clients' training data."""
    batch_size = 32
    if call.before_evaluation:
        batch_size = call.before_evaluation.local.batch_size

    # Errors name this function, so it is called as the hook is.
    def before_evaluation(client_id: int, client: Entries, buffers: Entries) -> Entries:
        shard = make_shard(call.federation, client_id, batch_size, call.draws)
        bound = net.bind(buffers, training=True)
        with autocast():
            return call.method.before_evaluation(call.state.server, client, bound, shard)

    return clients.one_by_one(before_evaluation, client, client["statistics"])


def _make_tuning_job(
    call: EvalCall,
    tuning: FineTuning,
    clients: OneClient,
    client: Entries,
    params: Tree,
    buffers: Entries,
    net: Net,
) -> TrainJob:
    """Return the job of fine-tuning personal models."""
    make_plan = partial(make_fine_tuning_plan, call.method, tuning, net.parts)
    rows = [ClientRow(call.federation, client_id) for client_id in clients.clients]
    plan = clients.plan(make_plan, params)
    if tuning.draws.protection:
        require_protectable(call.method, plan)
    return TrainJob(
        method=call.method,
        rows=rows,
        draws=[tuning.draws] * len(rows),
        plan=plan,
        start=params,
        server=call.state.server,
        client=client,
        buffers=buffers,
    )
