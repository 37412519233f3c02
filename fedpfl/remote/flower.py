"""Connect to Flower: a grid over its own, and its two apps. This needs the extra `flower`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.terminal import print_notice
from fedpfl.remote import app, wire
from fedpfl.remote.node import Node
from fedpfl.remote.server import Grid

try:
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
except ImportError as error:
    raise FedpflError(f"Flower is not installed ({error}); pip install 'fedpfl[flower]'") from None

RECORD_NAME = "fedpfl"
FIELD_NAME = "message"
MESSAGE_TYPE = "query"
NO_MESSAGE = "an answer that is no message"


class FlowerGrid(Grid):
    """Carry messages by Flower's grid, each as bytes in a record."""

    def __init__(self, grid: Any):
        self._grid = grid

    def node_ids(self) -> list[int]:
        """Return the ids of Flower's nodes."""
        return sorted(self._grid.get_node_ids())

    def send_and_receive(
        self, messages: Sequence[tuple[int, bytes]], timeout: float
    ) -> list[bytes | str | None]:
        """Return the answer to each (node, message); see Grid."""
        if not messages:
            return []
        requests = [
            Message(_make_record(message), node, MESSAGE_TYPE, ttl=timeout)
            for node, message in messages
        ]
        replies = self._grid.send_and_receive(requests, timeout=timeout)
        # Flower returns replies in any order.
        contents = {reply.metadata.reply_to_message_id: _read_reply(reply) for reply in replies}
        return [contents.get(request.metadata.message_id) for request in requests]


def _make_record(message: bytes) -> RecordDict:
    """Return a message's bytes as Flower carries them."""
    return RecordDict({RECORD_NAME: ConfigRecord({FIELD_NAME: message})})


def _read_reply(reply: Any) -> bytes | str:
    """Return the bytes of a reply, or what is wrong as a text."""
    if reply.has_error():
        return " ".join(str(reply.error.reason).split()) or f"error {reply.error.code}"
    try:
        content = reply.content[RECORD_NAME][FIELD_NAME]
    except (KeyError, TypeError):
        return NO_MESSAGE
    return content if isinstance(content, bytes) else NO_MESSAGE


def server() -> ServerApp:
    """Return the app that plays the rounds.

    The run's configuration has the words of the command line under `words`.
    """
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        try:
            words = shlex.split(str(context.run_config["words"]))
            app.run_server(FlowerGrid(grid), words)
        except FedpflError as error:
            print_notice(error)
            raise SystemExit(2) from None

    return server_app


def client() -> ClientApp:
    """Return the app that answers at a node.

    A node's configuration names its clients (`clients="0,3"`, or `partition-id` of
    `num-partitions`), where their states are kept (`state`), where the data are (`data-dir`), and
    whether states may leave it (`share-states`).
    """
    client_app = ClientApp()

    @client_app.query()
    def answer_query(message: Message, context: Any) -> Message:
        node_config = context.node_config
        try:
            node = _load_node(
                words=str(context.run_config["words"]),
                clients=str(node_config.get("clients", "")),
                node_number=int(node_config.get("partition-id", 0)),
                node_count=int(node_config.get("num-partitions", 1)),
                folder=str(node_config.get("state", "federated")),
                data_dir=str(node_config.get("data-dir", "")),
                share_states=node_config.get("share-states", False) is True,
            )
            answer = node.answer_message(cast(bytes, message.content[RECORD_NAME][FIELD_NAME]))
        except FedpflError as error:
            answer = wire.pack_message({"fault": str(error)}, {})
        return Message(_make_record(answer), reply_to=message)

    return client_app


@cache
def _load_node(
    words: str,
    clients: str,
    node_number: int,
    node_count: int,
    folder: str,
    data_dir: str,
    share_states: bool,
) -> Node:
    """Return the node, which a process makes once."""
    client_ids = None
    if clients:
        client_ids = [int(client) for client in clients.split(",")]
    return app.make_node(
        words=shlex.split(words),
        clients=client_ids,
        node_number=node_number,
        node_count=node_count,
        folder=Path(folder),
        data_dir=data_dir,
        share_states=share_states,
    )
