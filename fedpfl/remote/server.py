"""Run the server's side of a federation: a backend that asks each client at its node."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpfl.engine import Backend, Engine, State
from fedpfl.engine.calls import Answer, Call, Participation, TrainCall
from fedpfl.engine.store import Rows
from fedpfl.ground import tree
from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Count, Positive
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tree import Tree
from fedpfl.models import Net
from fedpfl.remote import trust
from fedpfl.remote.download import NotSentError, call_download, drop_known
from fedpfl.remote.messages import (
    Fault,
    Holdings,
    Question,
    Reply,
    Request,
    pack_model,
    read_message,
    require_same_key,
)
from fedpfl.remote.releases import select_answers
from fedpfl.remote.schedule import describe_call
from fedpfl.runner.faults import Diverged

log = logging.getLogger(__name__)

NODE_POLL_SECONDS = 0.5
HELLO_SECONDS = 5.0
"""How long a node is waited for that has not answered before."""


@dataclass(frozen=True)
class FederateSettings(Checked):
    """Hold the configuration keys `federate.*`.

    Attributes:
        share_states: Whether clients' states may go to the server, and all that the server holds
            to clients, for methods that need more than is sent.
        timeout: Seconds for the answers to a round, and for nodes to come in the beginning.
        minimum: Answers without which a round is given up.
        nodes: How many nodes are started on this machine.
    """

    share_states: bool = False
    timeout: Positive = 600.0
    minimum: Count = 1
    nodes: Count = 4


class NoAnswerError(FedpflError):
    """Report a node that has not answered in time; it may answer later."""


Requests = Sequence[tuple[int, bytes]]
"""Messages, each with its node."""
Answered = bytes | str | None
"""None stands for a missing answer, a text for the reason of a failed node."""


class Grid(ABC):
    """Carry messages to nodes and their answers back."""

    @abstractmethod
    def node_ids(self) -> list[int]:
        """Return the ids of the nodes that are connected now."""

    @abstractmethod
    def send_and_receive(self, messages: Requests, timeout: float) -> list[Answered]:
        """Return the answer to each message, after `timeout` seconds at most."""


class InProcessGrid(Grid):
    """Hold nodes in this process.

    Args:
        node_by_id: The nodes, which have a method `answer_message`.
    """

    def __init__(self, node_by_id: dict[int, Any]):
        self.node_by_id = node_by_id

    def node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return [*self.node_by_id]

    def send_and_receive(self, messages: Requests, timeout: float) -> list[Answered]:
        """Return the answer to each message; a node always answers."""
        return [self.node_by_id[node].answer_message(message) for node, message in messages]


class RemoteBackend(Backend):
    """Ask clients at their nodes, and go on with those that answer.

    Args:
        net: The network that is trained.
        engine: How nodes do the arithmetic.
        grid: Carries the messages.
        compatibility_key: What server and nodes must have in common, by name.
        initial_state: The state before round 1.
        settings: The keys `federate.*`.

    Attributes:
        agreement: The agreement of sites at nodes, which goes with each message.
        release_folder: Where the answers that got a round's noise are noted, if the server adds any.
    """

    name = "nodes"
    agreement: Values | None = None
    release_folder: Path | None = None

    def __init__(
        self,
        net: Net,
        engine: Engine,
        grid: Grid,
        compatibility_key: Mapping[str, str],
        initial_state: State,
        settings: FederateSettings,
    ):
        # ---- Arguments
        self.net = net
        self.engine = engine
        self.shares_states = settings.share_states
        self.keeps_states_at_nodes = not settings.share_states
        self.wire_bytes: Counter[str] = Counter()  # of answered messages, by column of wire.csv
        self._grid = grid
        self._compatibility_key = dict(compatibility_key)
        self._settings = settings
        self._initial_server = {
            path: leaf.clone() for path, leaf in tree.items(initial_state.server)
        }
        self._initial_state = initial_state
        self._limits = trust.MessageLimits.of_state(initial_state)

        # ---- Findings about nodes
        self._node_of_client: dict[int, int] = {}
        self._greeted_nodes: set[int] = set()
        self._failed_nodes: set[int] = set()  # with a wrong or missing answer at some time
        self._seen_clients: set[int] = set()  # with a node at some time
        self._answer_forms: dict[str, str] = {}

    def select_local_state(self, state: State) -> State:
        """Return a state before round 1 without what stays at the nodes."""
        if self.shares_states:
            return state
        rows = state.rows
        dealt = state.rows.varied_entries
        own = tree.select(rows.take("client", range(rows.clients)), dealt) if dealt else {}
        initial = {
            "client": tree.select(rows.initial["client"], dealt),
            "buffers": {},
            "facts": rows.initial["facts"],
        }
        return replace(state, rows=Rows(initial, own, rows.clients, rows.device))

    def complete_initial_row(self, state: State) -> State:
        """Return the state with a new client's whole row alone."""
        return replace(state, rows=self._initial_state.rows)

    def run(self, calls: Sequence[Call]) -> list[Answer]:
        """Answer calls one after another; an error is the answer of its call."""
        answers: list[Answer] = []
        for call in calls:
            try:
                answers.append(self._answer_call(call))
            except FedpflError as error:
                answers.append(error)
        return answers

    def try_participation(self, call: TrainCall) -> Participation:
        """Answer a call for the form of its answer, without asking a node."""
        return tree.stack([self._make_example(call)])

    def _answer_call(self, call: Call) -> Answer:
        """Return the stacked answers of a call's clients.

        Raises:
            FedpflError: if fewer clients have answered than `federate.minimum`.
        """
        # ---- Step 1: ask the nodes. The log is not open before the first call.
        if self.shares_states and not self._greeted_nodes:
            entries = ", ".join(self._initial_state.rows.initial["client"]) or "nothing"
            log.warning("clients' states (%s) leave them in every round", entries)
        answers, faults = self._collect_answers(call)

        # ---- Step 2: too few answers are no round.
        is_training = isinstance(call, TrainCall)
        minimum = min(self._settings.minimum, len(call.clients)) if is_training else 1
        if len(answers) < minimum:
            if faults and all(isinstance(fault, trust.NotFiniteError) for fault in faults.values()):
                if not is_training:
                    # The engine decides: a fine-tuning that diverges does not end a run.
                    blank = tree.map(_fill_with_nan, self._make_example(call))
                    return tree.stack([blank for _ in call.clients])
                raise Diverged(
                    f"training diverged: after round {call.state.round} no client's numbers are"
                    " finite; lower local.lr, choose a defence, or the method reads what it is"
                    " not sent"
                )
            raise FedpflError(
                f"{len(answers)} of {len(call.clients)} clients answered after round "
                f"{call.state.round}, and federate.minimum={minimum}; bring nodes back, and give "
                "the same command again"
            )

        # ---- Step 3: answers are stacked as any backend's.
        if is_training:
            if self.release_folder:
                # In a private run, those that the round's noise was drawn for.
                number = call.state.round + 1
                answers = select_answers(self.release_folder, number, answers)
            participations = [answers[client] for client in call.clients if client in answers]
            return tree.to(tree.stack(participations), call.state.rows.device)
        # An evaluation has a row for each client: without an answer it has no test samples.
        no_counts = tree.map(torch.zeros_like, next(iter(answers.values())))
        return tree.stack([answers.get(client, no_counts) for client in call.clients])

    # ---- Requests

    def _pack_request(self, call: Call, client: int) -> bytes:
        """Return the message that asks a client to train or to be evaluated."""
        state = call.state
        fields: Record = {
            "key": self._compatibility_key,
            "agreement": self.agreement,
            "client": client,
            "round": state.round,
            "asks": describe_call(call),
            "shares": self.shares_states,
            "participated": bool(state.facts(client)["participated"]),
        }
        trees: dict[str, Tree] = {"shared": state.server_buffers}

        # ---- With shared states: everything travels.
        if self.shares_states:
            trees["server"] = state.server
            trees["row"] = {
                part: state.rows.take(part, client) for part in ("client", "buffers", "facts")
            }
            trees["laid"] = tree.take(call.overlay or {}, call.clients.index(client))
            return pack_model(Question(**fields), trees)

        # ---- Else: what `download` sends, and which of the server's entries are as in the beginning.
        if call.overlay:
            raise NotSentError(f"{type(call.method).__name__}.before_turn reads clients' states")
        initial_ids = set()
        fields["initial"] = []
        for path, leaf in tree.items(state.server):
            if torch.equal(leaf, self._initial_server[path]):
                fields["initial"].append(path)
                initial_ids.add(id(leaf))
        sent = call_download(call, client)
        if sent is not None:
            trees["sent"] = drop_known(sent, initial_ids)
        return pack_model(Question(**fields), trees)

    # ---- Who is asked, and what comes back

    def _collect_answers(self, call: Call) -> tuple[dict[int, Any], dict[int, FedpflError]]:
        """Return the valid answers to a call and the faults, by client."""
        # ---- Step 1: ask every client that has a node.
        self._find_nodes(call.clients)
        label_client = call.federation.client_label
        clients = [client for client in call.clients if client in self._node_of_client]
        for client in set(call.clients) - set(clients):
            self._warn_left_out(call, f"client {label_client(client)} has no node")
        requests = [
            (self._node_of_client[client], self._pack_request(call, client)) for client in clients
        ]
        replies = self._grid.send_and_receive(requests, self._settings.timeout)

        # ---- Step 2: leave out the clients with missing or wrong answers.
        column = "bytes" if isinstance(call, TrainCall) else "judged"
        answers: dict[int, Any] = {}
        faults: dict[int, FedpflError] = {}
        for client, (node, request), reply in zip(clients, requests, replies, strict=True):
            try:
                message = require_reply(reply, self._settings.timeout)
                answers[client] = self._check_answer(call, client, message)
            except NotSentError:
                raise
            except FedpflError as fault:
                self._warn_left_out(call, f"node {node}, client {label_client(client)}: {fault}")
                faults[client] = fault
                # A second node may have its clients.
                self._failed_nodes.add(node)
                self._greeted_nodes.discard(node)
                self._keep_nodes({*self._node_of_client.values()} - {node})
                continue
            self.wire_bytes[f"{column}_down"] += len(request)
            self.wire_bytes[f"{column}_up"] += len(message)
        return answers, faults

    def _keep_nodes(self, nodes: Collection[int]) -> None:
        """Forget the clients of all other nodes."""
        node_of_client = self._node_of_client.items()
        self._node_of_client = {client: node for client, node in node_of_client if node in nodes}

    def _warn_left_out(self, call: Call, fault: str) -> None:
        """Log that a call goes on without a client, and why."""
        purpose = "round" if isinstance(call, TrainCall) else "evaluation after round"
        log.warning("%s; %s %s goes on without it", fault, purpose, call.draws.round)

    def _find_nodes(self, clients: Sequence[int]) -> None:
        """Find the node of each client; wait for clients that never had one."""
        deadline = time.monotonic() + self._settings.timeout
        while True:
            self._greet_new_nodes()
            self._seen_clients |= {*self._node_of_client}
            if {*clients} <= self._seen_clients or time.monotonic() > deadline:
                return
            time.sleep(min(NODE_POLL_SECONDS, self._settings.timeout))

    def _greet_new_nodes(self) -> None:
        """Forget the nodes that are gone, and ask new ones which clients they hold."""
        connected_nodes = self._grid.node_ids()
        self._keep_nodes(connected_nodes)
        new_nodes = {*connected_nodes} - self._greeted_nodes
        self._greet(sorted(new_nodes - self._failed_nodes), self._settings.timeout)
        # Nodes that have failed come last, and are not waited for as long: they must not keep
        # clients from right nodes.
        timeout = min(HELLO_SECONDS, self._settings.timeout)
        self._greet(sorted(new_nodes & self._failed_nodes), timeout)

    def _greet(self, nodes: Sequence[int], timeout: float) -> None:
        """Ask nodes which clients they hold."""
        request = Request(key=self._compatibility_key, agreement=self.agreement, wants="clients")
        message = pack_model(request)
        replies = self._grid.send_and_receive([(node, message) for node in nodes], timeout)
        for node, reply in zip(nodes, replies, strict=True):
            try:
                fields, _ = self._open_message(require_reply(reply, timeout))
                self._assign_clients(node, read_message(Holdings, fields).clients)
            except NoAnswerError as fault:
                if node not in self._failed_nodes:
                    log.warning("node %s is left out: %s", node, fault)
                self._failed_nodes.add(node)
            except FedpflError as fault:
                self._greeted_nodes.add(node)
                log.warning("node %s is left out: %s", node, fault)

    def _assign_clients(self, node: int, claimed: Sequence[int]) -> None:
        """Note which clients a node holds. One that another node has stays with that one.

        Raises:
            FedpflError: The node names clients that the federation does not have.
        """
        clients = self._initial_state.rows.clients
        if any(client >= clients for client in claimed):
            raise FedpflError(f"it names clients that are not 0 to {clients - 1}")
        # A node with a client that is taken is asked again, as the other may go.
        self._greeted_nodes.add(node)
        for client in claimed:
            holder = self._node_of_client.setdefault(client, node)
            if holder != node:
                log.warning(
                    "node %s is left out for client %s: node %s has it", node, client, holder
                )
                self._greeted_nodes.discard(node)

    def _open_message(self, message: bytes) -> tuple[Record, Tree]:
        """Return the fields and trees of a node's message. Raises FedpflError."""
        fields, trees = self._limits.unpack_message(message)
        check_reply(fields, self._compatibility_key)
        return fields, trees

    def _check_answer(self, call: Call, client: int, message: bytes) -> Tree:
        """Return a client's answer to a call: a Participation, or Counts by split.

        Raises:
            FedpflError: It answers another question, has another form or is not finite.
        """
        answer: Any
        fields, answer = self._open_message(message)
        answered = read_message(Reply, fields)
        if (answered.client, answered.asks) != (client, describe_call(call)):
            raise FedpflError("an answer to another question")
        kind: type[Any] = Participation if isinstance(call, TrainCall) else dict
        if not isinstance(answer, kind):
            raise FedpflError("an answer of another kind")
        if str(tree.specs(answer)) != self._expected_form(call):
            raise FedpflError("an answer of another form than the method has")
        if isinstance(call, TrainCall):
            trust.check_participation(answer, call, client)
        else:
            for split, counts in answer.items():
                samples = len(getattr(call.federation, split)[client])
                trust.check_counts(counts, samples, f"in the {split} split")
        return answer

    def _expected_form(self, call: Call) -> str:
        """Return the form that answers to a call of this kind must have."""
        asks = describe_call(call)
        network = self._initial_state.rows.kinds[call.clients[0]]
        kind = f"{type(call).__name__} {asks.get('turn')} {asks.get('measures')} {network}"
        if kind not in self._answer_forms:
            self._answer_forms[kind] = str(tree.specs(self._make_example(call)))
        return self._answer_forms[kind]

    def _make_example(self, call: Call) -> Tree:
        """Return an answer of the form that answers to a call must have."""
        return trust.expect_answer(call, self.net, self._initial_state, self.shares_states)


def require_reply(reply: Answered, timeout: float) -> bytes:
    """Return a node's reply. Raises NoAnswerError without one, FedpflError where it failed."""
    if reply is None:
        raise NoAnswerError(f"no answer within {timeout:g} seconds")
    if isinstance(reply, str):
        raise FedpflError(reply)
    return reply


def check_reply(fields: Values, key: Mapping[str, str]) -> None:
    """Raise FedpflError for a reported fault, or another configuration, data or version."""
    if "fault" in fields:
        fault = read_message(Fault, fields)
        error_type = NotSentError if fault.needs else FedpflError
        raise error_type(fault.fault)
    require_same_key(fields.get("key"), key)


def _fill_with_nan(leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, torch.nan if leaf.is_floating_point() else 0)
