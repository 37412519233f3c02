"""Hooks of one client, applied to a single client or to many stacked ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.calls import Call, EvalCall
from fedpfl.engine.training.forms import (
    AnswerForms,
    answer_form,
    describe_form_change,
    require_equal_forms,
)
from fedpfl.engine.training.train_plan import TrainPlan
from fedpfl.engine.training.vectorize import vmap_clients
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Tree
from fedpfl.methods import FACTS


class OneClient:
    """Apply hooks to a single client, whose trees are as hooks see them.

    Attributes:
        clients: The client's number, in a list.
        answer_forms: The forms of what each client of the call has found out, by hook.
    """

    def __init__(
        self,
        client: int,
        shared_models: dict[str, Any] | None = None,
        answer_forms: AnswerForms | None = None,
    ):
        self.clients = [client]
        self._shared_models = {} if shared_models is None else shared_models
        self.answer_forms: AnswerForms = {} if answer_forms is None else answer_forms

    def states(self, call: Call) -> dict[str, Tree]:
        """Return the client's state, under the server's overlay."""
        client = self.clients[0]
        overlay = tree.take(call.overlay or {}, call.clients.index(client))
        return apply_overlay(call.state.client(client), overlay)

    def each(self, hook: Callable[..., Any], *trees: Any) -> Any:
        """Apply a pure hook."""
        return hook(*trees)

    def personal(self, call: EvalCall, client: dict[str, Tree], has_overlay: bool) -> Tree:
        """Return the personal model.

        It is computed once for all clients of a call in the initial state, unless the hook asks for
        a client's number.
        """
        hook = partial(call.method.personal, call.state.server)
        if has_overlay or not call.state.rows.is_initial(self.clients[0]):
            return hook(client)
        if "personal" not in self._shared_models:
            try:
                self._shared_models["personal"] = hook(tree.drop(client, ["number"]))
            except KeyError:
                # The hook asks for the number: models differ from client to client.
                self._shared_models["personal"] = None
        shared_model = self._shared_models["personal"]
        return hook(client) if shared_model is None else shared_model

    def one_by_one(
        self, hook: Callable[..., Any], *trees: Any, records: Sequence[Tree] | None = None
    ) -> Any:
        """Apply `hook(client number, ...)`, which may branch on values.

        Args:
            hook: Takes a client's number, its trees, and its entry of `records` if given.
            trees: The client's.
            records: What a client's losses left, one entry per client.
        """
        client = self.clients[0]
        return self._record_form(
            hook,
            client,
            hook(client, *trees, *(records or ())),
        )

    def _record_form(
        self, hook: Callable[..., Any], client: int, answer: dict[str, Tree]
    ) -> dict[str, Tree]:
        """Record the form of what a client found out; return it with Ragged values completed."""
        self.answer_forms.setdefault(hook.__name__, {})[client] = answer_form(answer)
        return tree.mark_real(answer)

    def plan(self, make_plan: Callable[..., TrainPlan], *trees: Any) -> TrainPlan:
        """Return the plan of training, in which masks belong to the client."""
        return make_plan(*trees)


class ManyClients(OneClient):
    """Apply hooks to several clients, whose trees are stacked, `[clients, ...]`."""

    def __init__(self, clients: list[int], answer_forms: AnswerForms | None = None):
        super().__init__(clients[0], answer_forms=answer_forms)
        self.clients = clients

    def states(self, call: Call) -> dict[str, Tree]:
        """Return copies of the clients' states, under the server's overlay."""
        positions = torch.tensor([call.clients.index(client) for client in self.clients])

        def take_rows(leaf: Tensor) -> Tensor:
            is_expanded = leaf.dim() and not leaf.stride(0)
            if is_expanded:  # one value for all clients stays one in memory
                return leaf[: len(positions)]
            return leaf[tree.send(positions, leaf.device)]

        overlay = tree.map(take_rows, call.overlay or {})
        return apply_overlay(call.state.client(self.clients), overlay)

    def each(self, hook: Callable[..., Any], *trees: Any) -> Any:
        """Apply a pure hook to all clients at once."""
        return vmap_clients(hook, *trees, count=len(self.clients))

    def personal(self, call: EvalCall, client: dict[str, Tree], has_overlay: bool) -> Tree:
        """Return the personal models."""
        personal = partial(call.method.personal, call.state.server)
        return self.each(personal, client)

    def one_by_one(
        self, hook: Callable[..., Any], *trees: Any, records: Sequence[Tree] | None = None
    ) -> Any:
        """Apply a hook client by client and stack the answers, Ragged ones padded."""
        answers = []
        for row, client in enumerate(self.clients):
            arguments = [tree.take(stacked, row) for stacked in trees]
            if records is not None:
                arguments.append(records[row])
            answers.append(self._record_form(hook, client, hook(client, *arguments)))
        require_equal_forms(hook.__name__, self.answer_forms[hook.__name__])
        return tree.stack_padded(answers)

    def plan(self, make_plan: Callable[..., TrainPlan], *trees: Any) -> TrainPlan:
        """Return the clients' common plan, in which masks are stacked."""
        plans: list[TrainPlan] = []

        # vmap stacks tensors alone: the masks come through it, the rest of a plan beside it.
        def tensor_masks(*parts: Any) -> list[Tensor]:
            plan = make_plan(*parts)
            plans.append(plan)
            leaves = [leaf for mask in _unique_masks(plan).values() for leaf in tree.leaves(mask)]
            return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        stacked_leaves = iter(self.each(tensor_masks, *trees))
        plan = plans[0]

        def stacked_leaf(leaf: Any) -> Any:
            return next(stacked_leaves) if isinstance(leaf, Tensor) else leaf

        stacked = {key: tree.map(stacked_leaf, mask) for key, mask in _unique_masks(plan).items()}
        phases = [phase._replace(mask=stacked[id(phase.mask)]) for phase in plan.phases]
        return replace(plan, phases=phases)


def _unique_masks(plan: TrainPlan) -> dict[int, Tree]:
    """Return the masks of a plan by identity: those that phases share stay shared."""
    return {id(phase.mask): phase.mask for phase in plan.phases}


def apply_overlay(client: dict[str, Tree], overlay: dict[str, Tree]) -> dict[str, Tree]:
    """Return a state with what was found out laid over it.

    Of the FACTS the statistics alone may be replaced.

    Raises:
        MethodError: By statistics of another form.
    """
    old_statistics = client["statistics"]
    statistics = overlay.get("statistics", old_statistics)
    change = describe_form_change(statistics, old_statistics)
    if change:
        raise MethodError(f"statistics were found in another form than the network's, {change}")
    return {**client, **overlay, **tree.select(client, FACTS), "statistics": statistics}
