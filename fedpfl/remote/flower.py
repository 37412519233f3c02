"""Connect to Flower: a grid over its own, and its two apps. This needs the extra `flower`."""

from __future__ import annotations

import shlex
import time
from functools import cache
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, Field, StrictBool, ValidationError

from fedpfl.config.plan import check_config
from fedpfl.ground.checks import describe_fault
from fedpfl.ground.errors import FedpflError, missing_extra
from fedpfl.ground.terminal import print_notice
from fedpfl.remote import app
from fedpfl.remote.messages import MAX_FAULT, Fault, pack_model
from fedpfl.remote.node import NodePolicy
from fedpfl.remote.server import Answered, Grid, Requests
from fedpfl.remote.sites import SiteNode

try:
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
except ImportError as error:
    raise missing_extra(f"Flower is not installed ({error})", "flower") from None

RECORD_NAME = "fedpfl"
FIELD_NAME = "message"
MESSAGE_TYPE = "query"
PULL_SECONDS = 0.5
NO_MESSAGE = "an answer that is no message"


class FlowerGrid(Grid):
    """Carry messages by Flower's grid, each as bytes in a record."""

    def __init__(self, grid: Any):
        self._grid = grid

    def node_ids(self) -> list[int]:
        """Return the ids of Flower's nodes."""
        return sorted(self._grid.get_node_ids())

    def send_and_receive(self, messages: Requests, timeout: float) -> list[Answered]:
        """Return the answer to each message; see Grid."""
        requests = [
            Message(_make_record(message), node, MESSAGE_TYPE, ttl=timeout)
            for node, message in messages
        ]
        # A message that Flower does not take has no id.
        ids = [*self._grid.push_messages(requests)] if requests else []
        waiting = {name: position for position, name in enumerate(ids) if name}
        answers: list[Answered] = [None] * len(requests)
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() <= deadline:
            for reply in self._grid.pull_messages([*waiting]):
                position = waiting.pop(reply.metadata.reply_to_message_id, None)
                if position is not None:
                    answers[position] = _read_reply(reply)
            if waiting:
                time.sleep(PULL_SECONDS)
        return answers


def _make_record(message: bytes) -> RecordDict:
    """Return a message's bytes as Flower carries them."""
    return RecordDict({RECORD_NAME: ConfigRecord({FIELD_NAME: message})})


def _read_reply(reply: Any) -> bytes | str:
    """Return the bytes of a reply, or the error as a text."""
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
            # Flower calls a run failed, and shows why in `flwr list`, only for an Exception.
            raise FedpflError(str(error)) from None

    return server_app


def client() -> ClientApp:
    """Return the app that answers at a node; `NodeConfig` has the keys of its node-config."""
    client_app = ClientApp()

    @client_app.query()
    def answer_query(message: Message, context: Any) -> Message:
        node_config = context.node_config
        try:
            node = _load_node(
                words=str(context.run_config["words"]),
                node_config=tuple(sorted(node_config.items())),
            )
            answer = node.answer_message(cast(bytes, message.content[RECORD_NAME][FIELD_NAME]))
        except FedpflError as error:
            answer = pack_model(Fault(fault=str(error)[:MAX_FAULT]))
        return Message(_make_record(answer), reply_to=message)

    return client_app


class NodeConfig(BaseModel):
    """The configuration of a node.

    Attributes:
        data: Its site.
        name: Of the site; "" for the file's or folder's name.
        state: The folder of states.
        share_states: As in NodePolicy, as is `epsilon`.
    """

    data: Path
    name: str = ""
    state: Path = Path("federated")
    share_states: StrictBool = Field(False, alias="share-states")
    epsilon: float | None = Field(None, gt=0, allow_inf_nan=False)


@cache
def _load_node(words: str, node_config: tuple[tuple[str, Any], ...]) -> SiteNode:
    """Return the node, which a process makes once. Raises FedpflError."""
    try:
        config = NodeConfig.model_validate(dict(node_config))
    except ValidationError as error:
        raise FedpflError(f"--node-config of this node: {describe_fault(error)}") from None
    _, cfg = app.compose_federation(shlex.split(words))
    policy = NodePolicy(config.share_states, config.epsilon)
    return SiteNode(check_config(cfg), config.data, config.name, config.state, policy)
