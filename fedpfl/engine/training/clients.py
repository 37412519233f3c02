"""Hooks of one client, applied to a single client or to many stacked ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine.calls import Call
from fedpfl.engine.training.forms import describe_form_change
from fedpfl.engine.training.train_plan import TrainPlan
from fedpfl.engine.training.vectorize import Hook, vmap_clients
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import FACTS


class OneClient:
    """Apply hooks to a single client, with trees as hooks see them.

    Attributes:
        clients: The client's number, in a list.
    """

    def __init__(self, client: int):
        self.clients = [client]

    def states(self, call: Call) -> Entries:
        """Return the client's state, under the server's overlay."""
        client = self.clients[0]
        overlay = tree.take(call.overlay or {}, call.clients.index(client))
        return apply_overlay(call.state.client(client), overlay)

    def each(self, hook: Hook, *trees: Any) -> Any:
        """Apply a pure hook."""
        return hook(*trees)

    def one_by_one(self, hook: Hook, *trees: Any, records: Sequence[Tree] | None = None) -> Any:
        """Apply `hook(client number, ...)`, which may branch on values.

        Args:
            hook: Takes a client's number, its trees, and its entry of `records` if given.
            trees: The client's.
            records: Those of the losses, one entry per client.
        """
        client = self.clients[0]
        return tree.mark_real(hook(client, *trees, *(records or ())))

    def plan(self, make_plan: Callable[..., TrainPlan], *trees: Any) -> TrainPlan:
        """Return the plan of training, in which masks belong to the client."""
        return make_plan(*trees)


class ManyClients(OneClient):
    """Apply hooks to several clients, with stacked trees, `[clients, ...]`."""

    def __init__(self, clients: list[int]):
        super().__init__(clients[0])
        self.clients = clients

    def states(self, call: Call) -> Entries:
        """Return copies of the clients' states, under the server's overlay."""
        positions = torch.tensor([call.clients.index(client) for client in self.clients])

        def take_rows(leaf: Tensor) -> Tensor:
            is_expanded = leaf.dim() and not leaf.stride(0)
            if is_expanded:  # one value for all clients stays one in memory
                return leaf[: len(positions)]
            return leaf[tree.send(positions, leaf.device)]

        overlay = tree.map(take_rows, call.overlay or {})
        return apply_overlay(call.state.client(self.clients), overlay)

    def each(self, hook: Hook, *trees: Any) -> Any:
        """Apply a pure hook to all clients together."""
        return vmap_clients(hook, *trees, count=len(self.clients))

    def one_by_one(self, hook: Hook, *trees: Any, records: Sequence[Tree] | None = None) -> Any:
        """Apply a hook client by client and stack the answers, Ragged ones padded."""
        overlays = []
        for row, client in enumerate(self.clients):
            arguments = [tree.take(stacked, row) for stacked in trees]
            if records is not None:
                arguments.append(records[row])
            overlays.append(tree.mark_real(hook(client, *arguments)))
        try:
            return tree.stack_padded(overlays)
        except (KeyError, RuntimeError) as error:
            raise MethodError(
                f"{hook.__name__} answers with other forms for other clients ({error}); answer all"
                " alike, and where their first axis differs by tree.Ragged(values)"
                " (docs/design.md#a-method)"
            ) from error

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


def apply_overlay(client: Entries, overlay: Entries) -> Entries:
    """Return a state with an overlay.

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
