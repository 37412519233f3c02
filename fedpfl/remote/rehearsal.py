"""What a method asks for beyond what travels: found out by playing it both ways, before anything is
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedpfl.config.plan import Run
from fedpfl.engine import Backend, Engine, State, Tuning, begin, make, play
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods import SEES
from fedpfl.remote.node import Node
from fedpfl.remote.server import Federate, Grid, Remote


class Here(Grid):
    """Nodes in this process."""

    def __init__(self, nodes: dict[int, Node]):
        self.there = nodes

    def nodes(self) -> list[int]:
        """See Grid."""
        return [*self.there]

    def send(
        self, messages: Sequence[tuple[int, bytes]], timeout: float
    ) -> list[bytes | str | None]:
        """See Grid."""
        return [self.there[node].answer(message) for node, message in messages]


def needs(run: Run) -> str:
    """Say why a method cannot be played on what travels alone, "" where it can: its numbers are
    then the same.

    Two clients play two rounds of one step each, with their states at nodes and with all in one
    place.
    """
    method, net, name = run.method, run.net, type(run.method).__name__
    if method.server_sees == SEES[-1]:
        return f"the server of {name} looks at clients' states"
    federation = run.federation.of(
        sorted(run.federation.train_sizes.argsort(descending=True)[:2].tolist())
    )
    pair, local, early = (
        [*range(federation.clients)],
        replace(run.local, epochs=None, steps=1),
        run.stopping.early,
    )
    backend = make(Engine("loop"), net, run.device)
    first = begin(method, net, len(pair), run.device, stopping=early)
    node = Node(backend, method, federation, {}, pair, 0)
    remote = Remote(
        net, backend.engine, Here({0: node}), {}, first, Federate(minimum=len(pair)), ""
    )

    def played(by: Backend, state: State) -> Tree:
        outcomes = []
        for _ in range(2):
            state, outcome = play(by, method, federation, state, pair, local, 0, run.stopping)
            outcomes.append(outcome)
        looking = Tuning(local, Draws(0, "adapt", state.round))
        judged = by.judge(method, federation, state, pair, None, looking)
        own = {
            str(place): {"after": one.after, "loss": one.loss} for place, one in enumerate(outcomes)
        }
        return {
            "server": state.server,
            "buffers": state.server_buffers,
            "judged": judged,
            "own": own,
        }

    try:
        away, here = (
            played(by, state) for by, state in ((remote, remote.begun(first)), (backend, first))
        )
    except KeyError as entry:
        return f"{name} asks at the server for {entry} of clients' states"
    except FedpflError as fault:
        return str(fault)
    pairs = zip(tree.items(away), tree.leaves(here), strict=True)
    far = [path for (path, leaf), other in pairs if not torch.equal(leaf, other)]
    return f"{name} goes by more than is sent: {far[0]} would be another" if far else ""
