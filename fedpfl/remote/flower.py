"""Flower's part: a grid over its own, and its two apps. Everything here needs the extra `flower`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.terminal import tell
from fedpfl.remote import app, wire
from fedpfl.remote.node import Node
from fedpfl.remote.server import Grid

try:
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
except ImportError as error:
    raise FedpflError(f"Flower is not installed ({error}); pip install 'fedpfl[flower]'") from None

RECORD, FIELD, KIND = "fedpfl", "message", "query"


class FlowerGrid(Grid):
    """Carry messages by Flower's grid, each as bytes in a record of its own."""

    def __init__(self, grid: Any):
        self._grid = grid

    def nodes(self) -> list[int]:
        """See Grid."""
        return sorted(self._grid.get_node_ids())

    def send(
        self, messages: Sequence[tuple[int, bytes]], timeout: float
    ) -> list[bytes | str | None]:
        """See Grid."""
        sent = [Message(record(message), node, KIND, ttl=timeout) for node, message in messages]
        replies = self._grid.send_and_receive(sent, timeout=timeout) if sent else ()
        found = {reply.metadata.reply_to_message_id: _content(reply) for reply in replies}
        return [found.get(message.metadata.message_id) for message in sent]


def record(message: bytes) -> RecordDict:
    """Return a message's bytes as Flower carries them."""
    return RecordDict({RECORD: ConfigRecord({FIELD: message})})


def _content(reply: Any) -> bytes | str:
    """Return what a reply carries, or what is wrong."""
    if reply.has_error():
        return " ".join(str(reply.error.reason).split()) or f"error {reply.error.code}"
    try:
        content = reply.content[RECORD][FIELD]
        return content if isinstance(content, bytes) else "an answer that is no message"
    except (KeyError, TypeError):
        return "an answer that is no message"


def server() -> ServerApp:
    """Return the app that plays the rounds; the run's configuration has the words of the command
    under `words`.
    """
    made = ServerApp()

    @made.main()
    def main(grid: Any, context: Any) -> None:
        try:
            app.serve(FlowerGrid(grid), shlex.split(str(context.run_config["words"])))
        except FedpflError as error:
            tell(error)
            raise SystemExit(2) from None

    return made


def client() -> ClientApp:
    """Return the app that answers at a node.

    A node's configuration names its clients (`clients="0,3"`, or `partition-id` of
    `num-partitions`), where their states are kept (`state`), and where the data are (`data-dir`).
    """
    made = ClientApp()

    @made.query()
    def answer(message: Message, context: Any) -> Message:
        given = context.node_config
        clients, state = str(given.get("clients", "")), str(given.get("state", "federated"))
        place = int(given.get("partition-id", 0)), int(given.get("num-partitions", 1))
        try:
            here = _node(
                str(context.run_config["words"]),
                clients,
                *place,
                state,
                str(given.get("data-dir", "")),
            )
            answered = here.answer(cast(bytes, message.content[RECORD][FIELD]))
        except FedpflError as error:
            answered = wire.packed({"fault": str(error)}, {})
        return Message(record(answered), reply_to=message)

    return made


@cache
def _node(words: str, clients: str, number: int, nodes: int, state: str, data: str) -> Node:
    """Return the node, which a process makes once."""
    own = [int(client) for client in clients.split(",")] if clients else None
    return app.node(shlex.split(words), own, number, nodes, Path(state), data)
