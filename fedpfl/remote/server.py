"""The server's side of a federation: a backend whose clients are elsewhere, each asked by a
message.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch

from fedpfl.engine import Backend, Engine, Local, State
from fedpfl.engine.backend import Answer, Call, Participation, TrainCall
from fedpfl.engine.store import Rows
from fedpfl.ground import tree
from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, AtLeast
from fedpfl.ground.tree import Known, Tree
from fedpfl.models import Net
from fedpfl.remote import wire

log = logging.getLogger(__name__)

PAUSE = 0.5  # seconds between two looks for nodes
LARGEST = 4  # times what the server and a client hold, beyond which an answer is refused


@dataclass(frozen=True)
class Federate(Checked):
    """Say how a federation is played.

    share_states: clients' states may go to the server, and all that the server holds to clients,
    for methods that need
    more than what is sent. timeout: seconds for the answers to a round, and for nodes to come in
    the beginning.
    minimum: answers without which a round is given up. nodes: how many are started on this machine.
    """

    share_states: bool = False
    timeout: Annotated[float, Above(0)] = 600.0
    minimum: Annotated[int, AtLeast(1)] = 1
    nodes: Annotated[int, AtLeast(1)] = 4


class Needs(FedpflError):
    """A method asks for what does not travel."""


class Grid(ABC):
    """Carry messages to nodes and their answers back."""

    @abstractmethod
    def nodes(self) -> list[int]:
        """Return the numbers of the nodes that are there now."""

    @abstractmethod
    def send(
        self, messages: Sequence[tuple[int, bytes]], timeout: float
    ) -> list[bytes | str | None]:
        """Return for each (node, message) the answer: None where none came in time, a text where
        the node failed.
        """


class Carried(NamedTuple):
    """Tell of one message that was answered: sizes on the wire, in bytes."""

    round: int
    kind: str
    client: int
    down: int
    up: int


class Remote(Backend):
    """Ask each client of a call at its node, and go on with those that answer.

    key: what server and nodes must have in common, by name. first: the state before round 1.
    leaves: what leaves
    clients beyond what is sent, in words: their states then live here and travel with each message;
    "": they live at the nodes.
    """

    name = "nodes"

    def __init__(
        self,
        net: Net,
        engine: Engine,
        grid: Grid,
        key: Mapping[str, str],
        first: State,
        own: Federate,
        leaves: str,
    ):
        self.net, self.engine, self.shares, self._told = net, engine, bool(leaves), leaves
        self._grid, self._key, self._own = grid, dict(key), own
        self._first = {path: leaf.clone() for path, leaf in tree.items(first.server)}
        held = (first.server, first.rows.initial, first.server_buffers)
        self._largest = 2**20 + LARGEST * sum(map(tree.nbytes, held))
        self._homes: dict[int, int] = {}  # client -> node
        self._met: set[int] = set()  # nodes that were asked whose they are
        self._came: set[int] = set()  # clients that have had a node
        self._forms: dict[str, Any] = {}
        self.carried: list[Carried] = []

    def begun(self, state: State) -> State:
        """Return a state before round 1 as the server keeps it: without what stays at the nodes."""
        if self.shares:
            return state
        rows, dealt = state.rows, state.rows.dealt
        own = tree.select(rows.take("client", range(rows.clients)), dealt) if dealt else {}
        known = {
            "client": tree.select(rows.initial["client"], dealt),
            "buffers": {},
            "facts": rows.initial["facts"],
        }
        return replace(state, rows=Rows(known, own, rows.clients, rows.device))

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """See Backend."""
        answers: list[Answer] = []
        for call in calls:
            try:
                answers.append(self._answer(call))
            except FedpflError as error:
                answers.append(error)
        return answers

    def _answer(self, call: Call) -> Answer:
        if self._told:
            log.warning(self._told)
            self._told = ""
        found = self._asked(call)
        least = min(self._own.minimum, len(call.clients)) if isinstance(call, TrainCall) else 1
        if len(found) < least:
            raise FedpflError(
                f"{len(found)} of {len(call.clients)} clients answered after round {call.state.round}, and "
                f"federate.minimum={least}; bring nodes back, and give the same command again"
            )
        if isinstance(call, TrainCall):
            came = [found[client] for client in call.clients if client in found]
            return tree.to(tree.stack(came), call.state.rows.device)
        nobody = tree.map(torch.zeros_like, next(iter(found.values())))
        return tree.stack([found.get(client, nobody) for client in call.clients])

    # ---- what is sent

    def _message(self, call: Call, client: int) -> bytes:
        """Return the message to a client."""
        state = call.state
        about: dict[str, Any] = {
            "key": self._key,
            "client": client,
            "round": state.round,
            "asks": _asks(call),
        }
        about["shares"] = self.shares
        trees: dict[str, Tree] = {"shared": state.server_buffers}
        if self.shares:
            trees["server"] = state.server
            trees["row"] = {
                part: state.rows.take(part, client) for part in ("client", "buffers", "facts")
            }
            trees["laid"] = tree.take(call.laid or {}, call.clients.index(client))
            return wire.packed(about, trees)
        about["participated"] = bool(state.facts(client)["participated"])
        entries = dict(tree.items(state.server))
        about["initial"] = [
            path for path, leaf in entries.items() if torch.equal(leaf, self._first[path])
        ]
        if (sent := self._download(call, client)) is not None:
            places = {id(leaf): path for path, leaf in entries.items()}
            about["places"] = [places.get(id(own.value)) for own in wire.leaves(sent)]
            trees["sent"] = _known(sent, {id(entries[path]): path for path in about["initial"]})
        return wire.packed(about, trees)

    def _download(self, call: Call, client: int) -> Tree | None:
        """Return what the method sends to a client; None before an evaluation that needs nothing."""
        method, server, trains = call.method, call.state.server, isinstance(call, TrainCall)
        known = call.state.client(client)
        if trains:
            known |= tree.to(
                method.sample(server, call.draws.server(client)), call.state.rows.device
            )
        with contextlib.suppress(KeyError):  # `download` may ask for nothing of it
            known = method.prepare(server, known)
        try:
            return method.download(server, known)
        except KeyError as entry:
            if not trains:
                return None
            raise Needs(
                f"{type(method).__name__}.download asks for {entry} of a client's state"
            ) from None

    # ---- who is asked, and what comes back

    def _asked(self, call: Call) -> dict[int, Tree]:
        """Return the sound answers, by client."""
        self._meet(call.clients, call.state.round)
        places = [client for client in call.clients if client in self._homes]
        for client in set(call.clients) - set(places):
            self._without(call, f"client {client} has no node")
        messages = [(self._homes[client], self._message(call, client)) for client in places]
        found, kind = {}, "train" if isinstance(call, TrainCall) else "judge"
        for client, (node, message), answer in zip(
            places, messages, self._grid.send(messages, self._own.timeout), strict=True
        ):
            try:
                found[client] = self._sound(call, client, answer)
            except Needs:
                raise
            except FedpflError as fault:
                self._without(call, f"node {node}, client {client}: {fault}")
                continue
            assert isinstance(answer, bytes)
            self.carried.append(Carried(call.draws.round, kind, client, len(message), len(answer)))
        return found

    def _without(self, call: Call, fault: str) -> None:
        what = "round" if isinstance(call, TrainCall) else "evaluation after round"
        log.warning("%s; %s %s goes on without it", fault, what, call.draws.round)

    def _meet(self, clients: Sequence[int], number: int) -> None:
        """Find out after round `number` where clients are; wait in the beginning for those that
        were never there.
        """
        until = time.monotonic() + self._own.timeout
        while True:
            nodes = self._grid.nodes()
            self._homes = {client: node for client, node in self._homes.items() if node in nodes}
            new = [node for node in nodes if node not in self._met]
            hello = wire.packed({"key": self._key, "hello": number}, {})
            answers = self._grid.send([(node, hello) for node in new], self._own.timeout)
            for node, answer in zip(new, answers, strict=True):
                try:
                    about, _ = self._opened(answer)
                    self._homes |= dict.fromkeys(map(int, about["clients"]), node)
                    self._met.add(node)
                except (FedpflError, KeyError, TypeError, ValueError) as fault:
                    if not isinstance(fault, Silent):
                        self._met.add(node)
                    log.warning("node %s is left out: %s", node, fault)
            self._came |= {*self._homes}
            if {*clients} <= self._came or time.monotonic() > until:
                return
            time.sleep(PAUSE)

    def _opened(self, answer: bytes | str | None) -> tuple[dict[str, Any], Tree]:
        """Return what an answer says. Raises FedpflError, which says what is wrong with it."""
        if answer is None:
            raise Silent(f"no answer within {self._own.timeout:g} seconds")
        if isinstance(answer, str):
            raise FedpflError(answer)
        if len(answer) > self._largest:
            raise FedpflError(
                f"an answer of {len(answer):,} bytes, where {self._largest:,} are the most"
            )
        about, trees = wire.unpacked(answer)
        if "fault" in about:
            raise (Needs if about.get("needs") else FedpflError)(str(about["fault"]))
        if told := other(about.get("key"), self._key):
            raise FedpflError(told)
        return about, trees

    def _sound(self, call: Call, client: int, answer: bytes | str | None) -> Tree:
        """Return what a client brings back. Raises FedpflError, which says what is wrong with it."""
        about, found = self._opened(answer)
        asked = _asks(call)
        if (about.get("client"), about.get("asks")) != (client, asked):
            raise FedpflError("an answer to another question")
        kind = "train" if isinstance(call, TrainCall) else "judge"
        if not isinstance(found, Participation if kind == "train" else dict):
            raise FedpflError("an answer of another kind")
        form = str(tree.specs(found))
        if form != self._forms.setdefault(f"{kind} {asked.get('turn')}", form):
            raise FedpflError("an answer of another form than the others'")
        if kind == "train" and not all(
            leaf.isfinite().all() for leaf in tree.leaves(found) if leaf.is_floating_point()
        ):
            raise FedpflError("numbers that are not finite")
        return found


class Silent(FedpflError):
    """A node has not answered; it may yet."""


def other(key: Any, own: Mapping[str, str], who: str = "it", here: str = "the server") -> str:
    """Say in what `who` differs from here; "" where it does not."""
    key = key if isinstance(key, dict) else {}
    told = [
        f"{who} has {name} {key.get(name)}, {here} {own[name]}"
        for name in own
        if key.get(name) != own[name]
    ]
    return f"{told[0]}; give both the same command, data and packages" if told else ""


def _asks(call: Call) -> dict[str, Any]:
    """Return the question in plain values."""
    if isinstance(call, TrainCall):
        turn = None if call.turn is None else call.turn.trains
        return {
            "draws": asdict(call.draws),
            "local": _said(call.local),
            "stopping": call.stopping,
            "turn": turn,
        }
    tunings = {name: getattr(call, name) for name in ("tuning", "before")}
    return {
        name: own and {"local": _said(own.local), "draws": asdict(own.draws), "part": own.part}
        for name, own in tunings.items()
    }


def _said(local: Local) -> dict[str, Any]:
    return {**asdict(local), "betas": list(local.betas)}


def _known(sent: Tree, places: Mapping[int, str]) -> Tree:
    """Return what is sent with the names of the server's entries in the place of what clients know
    of it.

    Raises Needs where a client has no such entry.
    """
    if isinstance(sent, Known):
        unknown = [name for name, leaf in tree.items(sent.values) if id(leaf) not in places]
        if unknown:
            raise Needs(
                f"download counts on a client's knowing {unknown[0]}, which is not as it was in the beginning"
            )
        return Known(tree.map(lambda leaf: places[id(leaf)], sent.values))
    return (
        {name: _known(part, places) for name, part in sent.items()} if type(sent) is dict else sent
    )
