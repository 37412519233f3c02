"""Find out, before anything is sent, whether a method reads more than what travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedpfl.config.run import Run
from fedpfl.engine import (
    Engine,
    FineTuning,
    RoundSetup,
    State,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods import SEES
from fedpfl.remote.node import Node, NodeSettings
from fedpfl.remote.schedule import Schedule
from fedpfl.remote.server import FederateSettings, Grid, RemoteBackend


class InProcessGrid(Grid):
    """Hold nodes in this process."""

    def __init__(self, node_by_id: dict[int, Node]):
        self.node_by_id = node_by_id

    def node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return [*self.node_by_id]

    def send_and_receive(
        self, messages: Sequence[tuple[int, bytes]], timeout: float
    ) -> list[bytes | str | None]:
        """Return the answer to each (node, message); a node always answers."""
        return [self.node_by_id[node].answer_message(message) for node, message in messages]


def find_unsent_needs(run: Run) -> str:
    """Return why a method needs more than what travels, "" if it does not.

    Two clients play two rounds of one step each, once with their states at nodes and once in one
    place. Without such needs, both have the same numbers.
    """
    method_name = type(run.method).__name__
    if run.method.server_sees == SEES[-1]:
        return f"the server of {method_name} looks at clients' states"

    # ---- A federation of the two clients with the most samples, in one place and at a node
    largest_clients = run.federation.train_sizes.argsort(descending=True)[:2].tolist()
    federation = run.federation.select_clients(sorted(largest_clients))
    clients = [*range(federation.clients)]
    one_step = replace(run.local, epochs=None, steps=1)
    backend = make_backend(Engine("loop"), run.net, run.device)
    initial_state = make_initial_state(
        run.method, run.net, len(clients), run.device, stopping=run.stopping.early
    )
    setup = RoundSetup(backend, run.method, federation, one_step, 0, stopping=run.stopping)
    node = Node(
        schedule=Schedule(setup, rounds=2),
        compatibility_key={},
        settings=NodeSettings(clients),
    )
    remote = RemoteBackend(
        net=run.net,
        engine=backend.engine,
        grid=InProcessGrid({0: node}),
        compatibility_key={},
        initial_state=initial_state,
        settings=FederateSettings(minimum=len(clients)),
        disclosure="",
    )

    # ---- The method fails at a missing entry, or its numbers differ
    try:
        in_one_place = _play_two_rounds(setup, initial_state)
        if not all(leaf.isfinite().all() for leaf in tree.leaves(in_one_place)):
            # Nothing can be compared; the run itself says that it diverges.
            return ""
        setup = replace(setup, backend=remote)
        at_nodes = _play_two_rounds(setup, remote.select_local_state(initial_state))
    except KeyError as entry:
        return f"{method_name} asks at the server for {entry} of clients' states"
    except FedpflError as fault:
        return str(fault)
    for (path, leaf), expected in zip(tree.items(at_nodes), tree.leaves(in_one_place), strict=True):
        if not torch.equal(leaf, expected):
            return f"{method_name} goes by more than is sent: {path} would be another"
    return ""


def _play_two_rounds(setup: RoundSetup, state: State) -> Tree:
    """Play two rounds and an evaluation; return all results as one tree."""
    clients = [*range(setup.federation.clients)]
    outcomes = []
    for _ in range(2):
        state, outcome = play_round(setup, state, clients)
        outcomes.append(outcome)
    adaptation = FineTuning(setup.local, Draws(setup.seed, "adapt", state.round))
    # Each alone, as a node evaluates them: together they may round in another way.
    counts = {
        str(client): setup.backend.evaluate_splits(
            EvalCall(setup.method, setup.federation, state, [client], None, adaptation)
        )
        for client in clients
    }
    by_round = {
        str(index): {"after": outcome.after, "loss": outcome.loss}
        for index, outcome in enumerate(outcomes)
    }
    return {
        "server": state.server,
        "buffers": state.server_buffers,
        "judged": counts,
        "own": by_round,
    }
