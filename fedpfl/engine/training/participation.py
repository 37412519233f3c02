"""A client's part in a round, and its evaluation, written once: generators that yield what to train
and to evaluate.

A backend runs them for one client (`One`) or for many stacked (`Many`), and answers each job as it
comes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.calls import AnyCall, Counts, EvalCall, Participation, TrainCall
from fedpfl.engine.training.hook_checks import (
    AnswerForms,
    answer_form,
    describe_form_change,
    require_equal_forms,
    with_hook_checks,
)
from fedpfl.engine.training.jobs import ClientRow, EvalJob, TrainJob, TrainResult
from fedpfl.engine.training.operations import FlopMeter, count_training_flops
from fedpfl.engine.training.sgd import TrainPlan, make_fine_tuning_plan, make_training_plan
from fedpfl.engine.training.shard import make_shard
from fedpfl.engine.training.vectorize import vmap_clients
from fedpfl.ground import traffic, tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.traffic import Traffic
from fedpfl.ground.tree import Tree
from fedpfl.methods import FACTS
from fedpfl.models import Net


class OneClient:
    """Apply hooks to a single client, whose trees are as hooks see them.

    found: the forms of what each client of the call has found out, by hook.
    """

    def __init__(
        self, client: int, common: dict[str, Any] | None = None, found: AnswerForms | None = None
    ):
        self.clients = [client]
        self._common = {} if common is None else common
        self.found: AnswerForms = {} if found is None else found

    def states(self, call: TrainCall | EvalCall) -> dict[str, Tree]:
        """Return the clients' states, with what the server laid over them."""
        laid = tree.take(call.overlay or {}, call.clients.index(self.clients[0]))
        return apply_overlay(call.state.client(self.clients[0]), laid)

    def each(self, hook: Callable[..., Any], *trees: Any) -> Any:
        """Apply a pure hook."""
        return hook(*trees)

    def personal(self, call: EvalCall, client: dict[str, Tree], found: bool) -> Tree:
        """Apply that hook: once for all clients of a call in the initial state, unless it asks for
        their numbers.
        """
        hook, state = partial(call.method.personal, call.state.server), call.state
        if found or not state.rows.is_initial(self.clients[0]):
            return hook(client)
        if "personal" not in self._common:
            try:
                self._common["personal"] = hook(tree.drop(client, ["number"]))
            except KeyError:
                self._common["personal"] = None
        return hook(client) if self._common["personal"] is None else self._common["personal"]

    def one_by_one(
        self, hook: Callable[..., Any], *trees: Any, kept: Sequence[Tree] | None = None
    ) -> Any:
        """Apply `hook(client number, ...)`, which may branch on values; `kept` has an entry per
        client.
        """
        return self._noted(hook, self.clients[0], hook(self.clients[0], *trees, *(kept or ())))

    def _noted(
        self, hook: Callable[..., Any], client: int, answer: dict[str, Tree]
    ) -> dict[str, Tree]:
        """Note the form of what a client has found out; return it with what is Ragged completed."""
        self.found.setdefault(hook.__name__, {})[client] = answer_form(answer)
        return tree.mark_real(answer)

    def plan(self, make: Callable[..., TrainPlan], *trees: Any) -> TrainPlan:
        """Return the clients' common plan, in which masks belong to a client."""
        return make(*trees)


class ManyClients(OneClient):
    """Apply hooks to several clients, whose trees are stacked, `[clients, ...]`."""

    def __init__(self, clients: list[int], found: AnswerForms | None = None):
        super().__init__(clients[0], found=found)
        self.clients = clients

    def states(self, call: TrainCall | EvalCall) -> dict[str, Tree]:
        """Return copies of the clients' rows, with what the server laid over them."""
        rows = torch.tensor([call.clients.index(client) for client in self.clients])

        def taken(leaf: Tensor) -> Tensor:  # what is one for all stays one
            return (
                leaf[: len(rows)]
                if leaf.dim() and not leaf.stride(0)
                else leaf[tree.send(rows, leaf.device)]
            )

        return apply_overlay(call.state.client(self.clients), tree.map(taken, call.overlay or {}))

    def each(self, hook: Callable[..., Any], *trees: Any) -> Any:
        """Vectorise it."""
        return vmap_clients(hook, *trees, count=len(self.clients))

    def personal(self, call: EvalCall, client: dict[str, Tree], found: bool) -> Tree:
        """Apply that hook to all."""
        return self.each(partial(call.method.personal, call.state.server), client)

    def one_by_one(
        self, hook: Callable[..., Any], *trees: Any, kept: Sequence[Tree] | None = None
    ) -> Any:
        """Call it client by client and stack the answers, what is Ragged padded."""
        answers = []
        for row, client in enumerate(self.clients):
            own = [tree.take(stacked, row) for stacked in trees] + (
                [kept[row]] if kept is not None else []
            )
            answers.append(self._noted(hook, client, hook(client, *own)))
        require_equal_forms(hook.__name__, self.found[hook.__name__])
        return tree.stack_padded(answers)

    def plan(self, make: Callable[..., TrainPlan], *trees: Any) -> TrainPlan:
        """Stack the masks; the rest is common."""
        common: list[TrainPlan] = []

        def masks(*parts: Any) -> list[Tensor]:
            plan = make(*parts)
            common.append(plan)
            leaves = [leaf for mask in once(plan).values() for leaf in tree.leaves(mask)]
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def once(
            plan: TrainPlan,
        ) -> dict[int, Tree]:  # masks that phases share are shared stacked too
            return {id(phase.mask): phase.mask for phase in plan.phases}

        values = iter(self.each(masks, *trees))
        fill = partial(tree.map, lambda leaf: next(values) if isinstance(leaf, Tensor) else leaf)
        filled = {key: fill(mask) for key, mask in once(common[0]).items()}
        phases = [phase._replace(mask=filled[id(phase.mask)]) for phase in common[0].phases]
        return replace(common[0], phases=phases)


def apply_overlay(client: dict[str, Tree], found: dict[str, Tree]) -> dict[str, Tree]:
    """Return a state with what was found; of the FACTS the statistics alone may be other ones, of
    the same form.
    """
    own = client["statistics"]
    if told := describe_form_change(new := found.get("statistics", own), own):
        raise MethodError(f"statistics were found in another form than the network's, {told}")
    return {**client, **found, **tree.select(client, FACTS), "statistics": new}


Autocast = Callable[[], AbstractContextManager]
_first: dict[
    tuple[Any, ...], int
] = {}  # the round in which a call of a kind was first answered here


def with_first_checks(call: AnyCall, net: Net) -> AnyCall:
    """Return the call with its method `asked`, unless this process has answered one of its kind in
    an earlier round.
    """
    method, federation, state = call.method, call.federation, call.state
    kind = type(method), type(call), isinstance(call, EvalCall) and call.tuning is None
    if state.round > _first.setdefault(kind, state.round):
        return call
    return replace(
        call, method=with_hook_checks(method, net, state.rows.initial["client"], federation.classes)
    )


def run_participation(
    call: TrainCall, rows: OneClient, net: Net, autocast: Autocast
) -> Generator[TrainJob | EvalJob, Any, Participation]:
    """Take clients through a round in the order of the Method's hooks."""
    call = with_first_checks(call, net)
    method, federation, state, local, draws = (
        call.method,
        call.federation,
        call.state,
        call.local,
        call.draws,
    )
    stopping, turn, counted = call.wants_stopping_loss, call.survey, call.flop_settings
    server, device = state.server, federation.x.device
    places, drawing = (
        [ClientRow(federation, number) for number in rows.clients],
        [draws] * len(rows.clients),
    )
    meters: dict[int, Any] = {
        number: FlopMeter() if counted else nullcontext() for number in rows.clients
    }

    def sample(number: int) -> dict[str, Tree]:
        return tree.map(
            lambda leaf: tree.send(leaf, device), method.sample(server, draws.server(number))
        )

    def begin(client: dict[str, Tree]) -> tuple[Tree, Traffic]:
        sent = method.download(server, client)
        return method.start(tree.unmask_received(sent), client), traffic.count_traffic(sent)

    def before_training(
        number: int, client: dict[str, Tree], buffers: dict[str, Tree]
    ) -> dict[str, Tree]:
        shard = make_shard(federation, number, local.batch_size, draws)
        with autocast(), meters[number]:
            return method.before_training(server, client, net.bind(buffers, training=True), shard)

    def planned(
        number: int, client: dict[str, Tree], start: Tree, buffers: dict[str, Tree]
    ) -> dict[str, Tree]:
        bound = net.bind(buffers, training=True)
        plans = [make_training_plan(method, own, server, client, start) for own in counted]
        found = [
            count_training_flops(method, bound, plan, server, client, start, federation, number)
            for plan in plans
        ]
        return {"operations": torch.tensor(found, dtype=torch.float64)}

    def metered(number: int) -> dict[str, Tree]:
        return {"operations": torch.tensor([meters[number].total], dtype=torch.float64)}

    def after_training(
        number: int, client: dict[str, Tree], buffers: dict[str, Tree], params: Tree, kept: Tree
    ) -> dict[str, Tree]:
        shard = make_shard(federation, number, local.batch_size, draws)
        with meters[number]:
            return method.after_training(server, client, net.bind(buffers), params, shard, kept)

    def finish(
        client: dict[str, Tree], start: Tree, end: Tree
    ) -> tuple[Tree, dict[str, Tree], Traffic]:
        upload, kept = method.finish(server, client, start, end)
        return (
            upload,
            tree.select(kept, state.rows.initial["client"]),
            traffic.count_traffic(upload),
        )

    evaluated = partial(method.evaluated, server)

    client = rows.states(call)
    client = apply_overlay(client, rows.one_by_one(sample))
    client = apply_overlay(client, rows.one_by_one(before_training, client, client["statistics"]))
    facts = tree.select(client, FACTS)  # which stay as they are, whatever hooks return
    buffers = facts["statistics"]
    client = {**rows.each(partial(method.prepare, server), client), **facts}
    start, down = rows.each(begin, client)
    metrics = rows.each(partial(method.metrics, server), client)
    none = torch.zeros_like(facts["number"], dtype=torch.float32)
    nobody = Counts(none, none, none)
    before = (
        nobody
        if turn
        else (yield EvalJob(method, places, drawing, rows.each(evaluated, client, start), buffers))
    )

    client = tree.drop(client, ["statistics"])
    plan = TrainPlan(method.loss, [], local)
    if turn is None or turn.trains:
        plan = rows.plan(partial(make_training_plan, method, local, server), client, start)
    plan = replace(plan, by_sample=stopping)
    spent = torch.zeros((*facts["number"].shape, 0), dtype=torch.float64)
    if counted:
        spent = rows.one_by_one(planned, client, start, buffers)["operations"]
    end: TrainResult = yield TrainJob(method, places, drawing, plan, start, server, client, buffers)
    facts |= {"trained": facts["trained"] | end.stepped, "statistics": end.buffers}
    client = {**end.client, **facts}
    updated = rows.each(partial(method.updated_buffers, server), client)
    moved = {
        role: tree.map(torch.where, own, end.buffers[role], buffers[role])
        for role, own in updated.items()
    }
    client["statistics"] = {**end.buffers, **moved}
    found = rows.one_by_one(after_training, client, client["statistics"], end.params, kept=end.kept)
    client = apply_overlay(client, found)
    params, buffers = rows.each(evaluated, client, end.params), client["statistics"]
    after = nobody if turn else (yield EvalJob(method, places, drawing, params, buffers))
    held_out = torch.zeros_like(after.loss)
    if stopping:
        held = after
        if federation.validation:
            held = yield EvalJob(method, places, drawing, params, buffers, "validation")
        held_out = held.loss / held.total.clamp(min=1)
    uploads, kept, up = rows.each(finish, client, start, end.params)
    if counted:
        spent = spent + rows.one_by_one(metered)["operations"]
    told = (
        before,
        after,
        down,
        up,
        metrics,
        end.loss,
        end.sample_loss,
        held_out,
        facts["number"],
        spent,
    )
    return Participation(uploads, kept, facts["trained"], buffers, updated, *told)


def run_evaluation(
    call: EvalCall, rows: OneClient, net: Net, autocast: Autocast
) -> Generator[TrainJob | EvalJob, Any, dict[str, Counts]]:
    """Evaluate clients' personal models, or copies fine-tuned on their training data."""
    call = with_first_checks(call, net)
    method, federation, state = call.method, call.federation, call.state
    tuning, before, metrics, common = (
        call.tuning,
        call.before_evaluation,
        call.measures,
        call.common_federation,
    )
    server, places = state.server, [ClientRow(federation, number) for number in rows.clients]
    draws, batch_size = call.draws, before.local.batch_size if before else 32

    def before_evaluation(
        number: int, client: dict[str, Tree], buffers: dict[str, Tree]
    ) -> dict[str, Tree]:
        shard = make_shard(federation, number, batch_size, draws)
        with autocast():
            return method.before_evaluation(server, client, net.bind(buffers, training=True), shard)

    client = rows.states(call)
    client = apply_overlay(
        client, found := rows.one_by_one(before_evaluation, client, client["statistics"])
    )
    params, buffers = rows.personal(call, client, bool(found or call.overlay)), client["statistics"]
    if tuning:
        client = tree.drop(client, ["statistics"])
        plan = rows.plan(partial(make_fine_tuning_plan, method, tuning, net.parts), params)
        end: TrainResult = yield TrainJob(
            method, places, [tuning.draws] * len(places), plan, params, server, client, buffers
        )
        params, buffers = end.params, end.buffers
    drawing = [draws] * len(places)
    counts = {"test": (yield EvalJob(method, places, drawing, params, buffers, metrics=metrics))}
    if federation.validation:
        counts["validation"] = yield EvalJob(
            method, places, drawing, params, buffers, "validation", metrics
        )
    if common:
        each = []
        for other in range(common.clients):
            each.append(
                (
                    yield EvalJob(
                        method, [ClientRow(common, other)] * len(places), drawing, params, buffers
                    )
                )
            )
        counts["common"] = tree.map(lambda *tallies: torch.stack(tallies, -1), *each)
    return counts
