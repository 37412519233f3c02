"""The messages between server and nodes, as models that refuse any other field or type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fedpfl.ground.checks import describe_fault
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record
from fedpfl.ground.tree import Tree
from fedpfl.remote import wire

MAX_TEXT = 200  # characters of a site's name, and of a refused value that is quoted
MAX_FAULT = 4_000  # characters
MAX_PATHS = 2**20
MAX_CLIENTS = 2**24


def require_printable(text: str) -> str:
    """Return a text that a terminal shows in one line. Raises ValueError for any other."""
    if not text.isprintable() or not text.strip():
        raise ValueError("it must be printable")
    return text


Label = Annotated[str, AfterValidator(require_printable)]
Name = Annotated[Label, Field(max_length=MAX_TEXT)]
Client = Annotated[int, Field(ge=0, lt=MAX_CLIENTS)]


class Message(BaseModel):
    """A message's values; its tensors travel beside them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# ---- From the server


class Question(Message):
    """Ask a client to train or to be evaluated.

    Attributes:
        key: Configuration, data and version, which both sides have in common.
        agreement: What sites have agreed on; absent where nodes have no site.
        client: The client that is asked.
        round: Rounds that are finished.
        asks: The call in plain values, as `schedule.describe_call` gives it.
        shares: Whether the client's state travels.
        participated: Whether the client has taken part.
        initial: Server entries that are as before round 1.
    """

    key: Record
    agreement: Any = None
    client: Client
    round: Annotated[int, Field(ge=0, lt=2**31)]
    asks: Record
    shares: bool
    participated: bool = False
    initial: Annotated[list[str], Field(max_length=MAX_PATHS)] = []


class Request(Message):
    """Ask a node about itself.

    Attributes:
        wants: The facts of its site, the sums of its training samples, or the clients that it holds.
    """

    key: Record
    agreement: Any = None
    wants: Literal["site", "sums", "clients"]


# ---- From a node


class Reply(Message):
    """Repeat the question that the tensors answer."""

    key: Record
    client: Client
    asks: Record


class Holdings(Message):
    """Name the clients of a node."""

    key: Record
    clients: Annotated[list[Client], Field(max_length=MAX_CLIENTS)]


class Fault(Message):
    """Say why there is no answer.

    Attributes:
        fault: The reason, in one line.
        needs: Whether the method reads entries that do not travel.
    """

    fault: Annotated[str, Field(max_length=MAX_FAULT)]
    needs: bool = False


AnyMessage = TypeVar("AnyMessage", bound=BaseModel)


def read_message(kind: type[AnyMessage], fields: Any) -> AnyMessage:
    """Check received values. Raises FedpflError, which names the first that does not fit."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        name = kind.__name__.lower()
        raise FedpflError(f"a message that is no {name}: {describe_fault(error)}") from None


def pack_model(message: Message, trees: Tree | None = None, whole: bool = False) -> bytes:
    """Return a message as bytes; see `wire.pack_message`."""
    return wire.pack_message(message.model_dump(mode="json"), trees or {}, whole)


def require_same_key(
    key: Any, expected_key: Mapping[str, str], sender: str = "it", receiver: str = "the server"
) -> None:
    """Raise FedpflError for another configuration, data or version."""
    entries = key if isinstance(key, dict) else {}
    for name, expected in expected_key.items():
        if entries.get(name) != expected:
            raise FedpflError(
                f"{sender} has {name} {str(entries.get(name))[:MAX_TEXT]}, {receiver} {expected};"
                " give both the same command, data and packages"
            )
