"""A federation's grid in memory: what travels is kept, and its server may be killed or deaf."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.remote import app
from fedpfl.remote.node import PLAIN_POLICY, Node, NodePolicy, make_run_node
from fedpfl.remote.server import InProcessGrid


def make_nodes(words: list[str], policy: NodePolicy = PLAIN_POLICY) -> dict[int, Node]:
    """Make two nodes in memory, each with a half of the clients."""
    run = build_run(check_config(app.compose_federation(words)[1]))
    clients = range(run.federation.clients)
    return {
        number: make_run_node(run, clients[number::2], Path(f"node{number}"), policy)
        for number in range(2)
    }


class Overheard(InProcessGrid):
    """Nodes whose messages are kept.

    left: how many messages the server sends to nodes that it hears, before it is killed.
    deaf: nodes of which it gets no answers, and which it greets as often as time allows.
    """

    def __init__(self, node_by_id: dict[int, Any], left: int = 10**9, deaf: Collection[int] = ()):
        super().__init__(node_by_id)
        self.left, self.deaf = left, deaf
        self.exchanges: list[tuple[int, bytes, Any]] = []

    def send_and_receive(self, messages: Any, timeout: float) -> list[Any]:
        """Pass messages on, and keep each with its node and the answer."""
        self.left -= sum(node not in self.deaf for node, _ in messages)
        if self.left < 0:
            raise KeyboardInterrupt
        answers = super().send_and_receive(messages, timeout)
        for (node, message), answer in zip(messages, answers, strict=True):
            self.exchanges.append((node, message, answer))
        pairs = zip(messages, answers, strict=True)
        return [None if node in self.deaf else answer for (node, _), answer in pairs]

    @property
    def requests(self) -> list[bytes]:
        return [message for _, message, _ in self.exchanges]

    @property
    def replies(self) -> list[Any]:
        return [answer for _, _, answer in self.exchanges]
