"""Clients of a call that have one model in common: all their samples go through it together.

They are found by what `personal` may depend on. It is a pure function of server and client, so
that all clients have its one answer where it does not look at the client, and else those that are
all in the initial state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.calls import Call, Counts, EvalCall
from fedpfl.engine.training.evaluation import (
    ForwardPass,
    Model,
    evaluate_client,
    evaluate_clients,
)
from fedpfl.engine.training.jobs import Autocast, ClientRow, EvalJob, concatenate_rows
from fedpfl.engine.training.shortcuts import Shortcuts
from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods import LONGEST_CHUNK, Method
from fedpfl.models import Net

DEVICE_PASS = 2_048
"""Samples of a forward pass of several clients on a GPU."""


@dataclass(frozen=True)
class SharedModel:
    """Hold a model, and the clients of a call that are evaluated by it.

    Attributes:
        call: The call.
        clients: Two or more of the call's.
        model: Their model.
    """

    call: EvalCall
    clients: list[int]
    model: Model

    @cached_property
    def passes(self) -> list[ForwardPass]:
        """Return the forward passes of all splits and, if asked for, of everybody's samples."""
        call = self.call
        splits = ["test", "validation"] if call.federation.validation else ["test"]
        passes = []
        for split in splits:
            for clients in _cut_clients(call.federation, split, self.clients):
                passes.append(ForwardPass(call.federation, split, clients, call.measures))
        if call.common_federation:
            everybody = range(call.common_federation.clients)
            for clients in _cut_clients(call.common_federation, "test", everybody):
                passes.append(ForwardPass(call.common_federation, "test", clients, ()))
        return passes

    @cached_property
    def other_clients(self) -> list[int]:
        """Return the call's clients that have models of their own."""
        members = {*self.clients}
        return [client for client in self.call.clients if client not in members]

    def evaluate_pass(
        self,
        net: Net,
        forward_pass: ForwardPass,
        autocast: Autocast,
        shortcuts: Shortcuts,
    ) -> Counts:
        """Return the counts of the clients of a pass, `[clients]`."""
        if len(forward_pass.clients) > 1:
            return evaluate_clients(net, self.model, forward_pass, autocast, shortcuts)
        job = EvalJob(
            method=self.call.method,
            rows=[ClientRow(forward_pass.federation, forward_pass.clients[0])],
            draws=[self.call.draws],
            **self.model._asdict(),
            split=forward_pass.split,
            metrics=forward_pass.metrics,
        )
        return tree.stack([evaluate_client(net, job, autocast, shortcuts)])

    def make_answer(
        self, counts_of_passes: Sequence[Counts], other_answer: dict[str, Counts] | None
    ) -> dict[str, Counts]:
        """Return the call's answer.

        Args:
            counts_of_passes: Those of `passes`.
            other_answer: That of `other_clients`, stacked; None without any.
        """
        # ---- Step 1: the passes of each split, one after another
        counts_by_split: dict[str, list[Counts]] = {}
        for forward_pass, counts in zip(self.passes, counts_of_passes, strict=True):
            is_common = forward_pass.federation is self.call.common_federation
            split = "common" if is_common else forward_pass.split
            counts_by_split.setdefault(split, []).append(counts)
        answer = {split: concatenate_rows(parts) for split, parts in counts_by_split.items()}
        if "common" in answer:
            # Each has the same counts on everybody's samples.
            answer["common"] = tree.repeat(answer["common"], len(self.clients))

        # ---- Step 2: behind them the other clients, and all in the order of the call
        if other_answer is not None:
            answer = concatenate_rows([answer, other_answer])
        clients = [*self.clients, *self.other_clients]
        row_of = {client: row for row, client in enumerate(clients)}
        return tree.take(answer, torch.tensor([row_of[client] for client in self.call.clients]))


def find_shared_model(call: Call, net: Net) -> SharedModel | None:
    """Return the model that most clients of a call have in common, if any.

    An error here means None: it shows in a client's own evaluation.
    """
    if not isinstance(call, EvalCall) or not _has_plain_evaluation(call, net):
        return None
    rows = call.state.rows
    clients = call.clients
    unshown: list[str] = []
    try:
        if tree.leaves(rows.initial["buffers"]) or _looks_at_client(call.method, call.state.server):
            # Initial states are equal but for the client's number.
            unshown = ["number"]
            clients = [client for client in clients if rows.is_initial(client)]
        if len(clients) < 2:
            return None
        state = call.state.client(clients[0])
        params = call.method.personal(call.state.server, tree.drop(state, unshown))
    except (Exception, SystemExit):
        return None
    return SharedModel(call, clients, Model(params, state["statistics"]))


def _has_plain_evaluation(call: EvalCall, net: Net) -> bool:
    """Check that a client's counts follow from its model and samples alone.

    So they do where no hook but `personal` has a part in them, and the network takes each sample
    by itself, draws nothing and keeps its buffers.
    """
    method = type(call.method)
    is_method_plain = (
        method.predict is Method.predict and method.before_evaluation is Method.before_evaluation
    )
    # A user's network may look at anything.
    wants_more = call.wants_models or call.horizon is not None
    is_call_plain = not call.tuning and not call.overlay and not wants_more
    return is_method_plain and is_call_plain and net.traits.trusted


def _looks_at_client(method: Method, server: Tree) -> bool:
    """Check whether `personal` looks at the client's state."""
    try:
        params = method.personal(server, _Hidden())  # type: ignore[arg-type]
    except (Exception, _LookedAt):
        return True
    return not all(isinstance(leaf, Tensor) for leaf in tree.leaves(params))


class _LookedAt(BaseException):
    """Say that a hidden state was looked at; no hook's `except Exception` takes it."""


def _refuse_look(*_: Any) -> NoReturn:
    raise _LookedAt


class _Hidden:
    """Stand for a client's state; any use of it raises `_LookedAt`."""

    __getattribute__ = __getitem__ = __contains__ = _refuse_look
    __iter__ = __len__ = __bool__ = __eq__ = __or__ = __ror__ = _refuse_look
    __hash__ = None  # type: ignore[assignment]


def _cut_clients(federation: Federation, split: str, clients: Iterable[int]) -> list[list[int]]:
    """Return clients in groups that a pass takes, large ones alone."""
    samples = getattr(federation, split)
    capacity = LONGEST_CHUNK if federation.x.device.type == "cpu" else DEVICE_PASS
    groups: list[list[int]] = []
    room = 0
    for client in clients:
        count = samples[client].numel()
        if count > room or not groups:
            groups.append([])
            room = capacity
        groups[-1].append(client)
        room -= count
    return groups
