"""Run a node's side of a federation: it trains its clients, whose data and states stay here."""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedpfl.data import Federation
from fedpfl.engine import Backend, State, make_initial_state
from fedpfl.engine.calls import Call, EvalCall, Participation, TrainCall
from fedpfl.engine.store import Rows
from fedpfl.ground import files, tree
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.tree import Known, Tree
from fedpfl.methods import Method, Turn
from fedpfl.record import checkpoint
from fedpfl.remote import trust, wire
from fedpfl.remote.budget import SampleBudget, digest_question
from fedpfl.remote.keys import describe_mismatch
from fedpfl.remote.server import NotSentError

# A server that goes on from its last checkpoint asks for a round again.
STORED_ROUNDS = 2


@dataclass(frozen=True)
class NodePolicy:
    """Hold what a node decides by itself, whatever a server says.

    Attributes:
        share_states: Whether clients' states may leave the node.
        epsilon: The most that samples may give away in all runs; None for any, and for runs that
            promise nothing.
    """

    share_states: bool = False
    epsilon: float | None = None


PLAIN_POLICY = NodePolicy()


@dataclass(frozen=True)
class NodeSettings:
    """Hold what a node is made of beside the run.

    Attributes:
        clients: The clients that it holds.
        folder: Where their states are stored; in memory if None.
        policy: What it allows.
    """

    clients: Collection[int]
    folder: Path | None = None
    policy: NodePolicy = PLAIN_POLICY


class Node:
    """Answer the server's messages for some clients of a federation.

    Args:
        backend: Trains and evaluates the clients.
        method: The run's method.
        federation: All clients' data; only those of `settings.clients` are read.
        compatibility_key: What server and nodes must have in common, by name.
        seed: The run's seed.
        settings: The node's own.
        budget: What answers for samples of its clients, None where nothing is promised to them.
    """

    def __init__(
        self,
        backend: Backend,
        method: Method,
        federation: Federation,
        compatibility_key: Mapping[str, str],
        seed: int,
        settings: NodeSettings,
        budget: SampleBudget | None = None,
    ):
        self._backend = backend
        self._method = method
        self._federation = federation
        self._compatibility_key = dict(compatibility_key)
        self._clients = sorted(settings.clients)
        self._policy = settings.policy
        self._budget = budget
        self._store = ClientStore(settings.folder)
        self._initial_state = make_initial_state(
            method, backend.net, federation.clients, federation.x.device, seed=seed
        )
        self._limits = trust.MessageLimits(self._initial_state)

    def answer_message(self, message: bytes) -> bytes:
        """Return the answer to a message; a failure is an answer, too."""
        return answer_or_fault(self._answer_request, message)

    def _answer_request(self, message: bytes) -> bytes:
        """Return the answer to a message. Raises FedpflError."""
        # ---- Step 1: nothing is unpacked that is larger than any message of this run.
        self._limits.check_length(message)
        fields, trees = wire.unpack_message(message, self._limits.entries)
        mismatch = describe_mismatch(
            fields.get("key"), self._compatibility_key, sender="the server", receiver="this node"
        )
        if mismatch:
            raise FedpflError(mismatch)

        # ---- Step 2: a server that begins, or goes on, says at which round.
        if "hello" in fields:
            round_number = trust.read_round(fields["hello"])
            # The server may have gone back to a checkpoint: later rounds will be played again.
            for client in self._clients:
                self._store.forget_rounds_after(client, round_number)
            header = {"key": self._compatibility_key, "clients": self._clients}
            return wire.pack_message(header, {})

        # ---- Step 3: a question about a client that is here, and within the node's policy.
        trust.check_request(fields, trees, self._initial_state)
        client = fields["client"]
        if client not in self._clients:
            raise FedpflError(f"client {client} is not here")
        if fields["shares"] and not self._policy.share_states:
            raise FedpflError(
                "the server asks for clients' states, which this node does not share; "
                "share-states=true in its node-config allows it"
            )
        header = {"key": self._compatibility_key, "client": client, "asks": fields["asks"]}
        answer = self._run_client(fields, trees, message)
        return wire.pack_message(header, answer, whole=fields["shares"])

    def _run_client(self, fields: dict[str, Any], trees: dict[str, Tree], message: bytes) -> Tree:
        """Train or evaluate one client, and return what it sends back.

        Args:
            fields: Those of the message.
            trees: Those of the message.
            message: The whole of it.
        """
        # ---- Step 1: the client's state, and as much of the server's as was sent
        client = fields["client"]
        round_number = fields["round"]
        shares_states = fields["shares"]
        if shares_states:
            row = trees["row"]
            method = self._method
            server = trees["server"]
        else:
            row = self._load_row(client, round_number, fields["participated"])
            method, server = self._restrict_to_sent(fields, trees.get("sent"))
        state = self._state_of_client(client, row, round_number, server, trees["shared"])

        # ---- Step 2: the same participation or evaluation as on any backend
        overlay = tree.repeat(trees.get("laid", {}), 1)
        call = self._make_call(method, state, client, fields["asks"], overlay)
        if self._budget:
            # The state here decides of the answer, too, and a server may make the node forget it.
            question = digest_question(message, wire.pack_message({}, row))
            call = self._budget.protect_call(call, client, question)
        with _naming_missing_entries(method):
            stacked = self._backend.run_one(call)
        answer = tree.take(stacked, 0)

        # ---- Step 3: the trained state stays here, unless states are shared
        if isinstance(call, EvalCall) or shares_states:
            return answer
        return self._store_participation(client, round_number + 1, row, answer)

    def _load_row(self, client: int, round_number: int, has_participated: bool) -> dict[str, Tree]:
        """Return a client's last row, the initial one before its first participation.

        Raises:
            FedpflError: if the client took part, and its state is not here.
        """
        row = self._store.load_last(client, round_number)
        if not row:
            initial_rows = self._initial_state.rows
            row = {part: initial_rows.take(part, client) for part in ("client", "buffers", "facts")}
        if has_participated and not bool(row["facts"]["participated"]):
            raise FedpflError("the client's state is lost: it took part, and there is none here")
        return row

    def _state_of_client(
        self,
        client: int,
        row: dict[str, Tree],
        round_number: int,
        server: Tree,
        shared_buffers: dict[str, Tree],
    ) -> State:
        """Return a state in which one client has a row."""
        initial_rows = self._initial_state.rows
        rows = Rows(initial_rows.initial, {}, initial_rows.clients, initial_rows.device)
        rows.put_([client], tree.repeat(row, 1))
        return State(round_number, server, rows, shared_buffers, {})

    def _make_call(
        self,
        method: Method,
        state: State,
        client: int,
        question: dict[str, Any],
        overlay: dict[str, Tree],
    ) -> Call:
        """Return the call that a message asks for, about one client."""
        # ---- An evaluation
        if "local" not in question:
            return EvalCall(
                method=method,
                federation=self._federation,
                state=state,
                clients=[client],
                tuning=trust.read_tuning(question["tuning"]),
                before_evaluation=trust.read_tuning(question["before"]),
                overlay=overlay,
            )

        # ---- Training
        turn = None
        if question["turn"] is not None:
            turn = Turn([client], trains=question["turn"])
        return TrainCall(
            method=method,
            federation=self._federation,
            state=state,
            clients=[client],
            local=trust.read_local(question["local"]),
            draws=trust.read_draws(question["draws"]),
            wants_stopping_loss=question["stopping"],
            survey=turn,
            overlay=overlay,
        )

    def _store_participation(
        self, client: int, round_number: int, row: dict[str, Tree], participation: Participation
    ) -> Participation:
        """Store the client's new state, and return what leaves the node.

        Args:
            client: Whose participation it was.
            round_number: The round that it was in.
            row: The client's row before.
            participation: What the backend returned for it.

        Raises:
            NotSentError: if an entry has changed that the server holds a copy of.
        """
        # `init_clients` gave these entries at the server, too, which is not told of new values.
        server_entries = self._initial_state.rows.varied_entries
        for name in server_entries:
            new_leaves = tree.leaves(participation.client_states[name])
            old_leaves = tree.leaves(row["client"][name])
            if not all(map(torch.equal, new_leaves, old_leaves)):
                raise NotSentError(f"a client's {name}, which the server knows, has changed")

        trained = participation.trained
        new_row = {
            "client": participation.client_states,
            "buffers": tree.drop(participation.buffers, trust.shared_roles(self._method)),
            "facts": {"participated": torch.ones_like(trained), "trained": trained},
        }
        self._store.save(client, round_number, new_row)
        return trust.select_sent(participation, self._method, self._initial_state)

    def _restrict_to_sent(
        self, fields: dict[str, Any], sent: Tree | None
    ) -> tuple[Method, dict[str, Tree]]:
        """Return the method and the server's tree as far as the node has been told.

        The method's `download` returns what was sent. The tree has the entries that were sent and
        those that are as in the beginning; others are absent.
        """
        initial_entries = dict(tree.items(self._initial_state.server))
        entries = {path: initial_entries[path] for path in fields["initial"]}
        if sent is not None:
            sent_leaves = wire.iterate_sent_leaves(sent)
            for leaf, path in zip(sent_leaves, fields["places"], strict=True):
                if path is None or path in entries:
                    continue
                if leaf.mask is None:
                    entries[path] = leaf.value
                elif leaf.value.is_floating_point():
                    # A method that reads what was not sent fails at once by nan.
                    entries[path] = torch.where(leaf.mask, leaf.value, torch.nan)
            sent = _replace_paths_by_known(sent, initial_entries)
        method = copy.copy(self._method)

        def download(server: Tree, client: dict[str, Tree]) -> Tree:
            if sent is None:
                raise KeyError("download")
            return sent

        vars(method)["download"] = download
        return method, _select_paths(self._initial_state.server, entries)


def answer_or_fault(answer_request: Callable[[bytes], bytes], message: bytes) -> bytes:
    """Return the answer to a message; a failure is an answer, too."""
    try:
        return answer_request(message)
    except FedpflError as fault:
        is_not_sent = isinstance(fault, NotSentError)
        return wire.pack_message({"fault": str(fault), "needs": is_not_sent}, {})
    except Exception as error:
        traceback.print_exc()
        return wire.pack_message({"fault": error_text(error, with_class=True)}, {})


class ClientStore:
    """Store the last states of clients, after each round that they took part in.

    With a folder they are checkpoints `client<k>/round<n>.pt` in it, else they stay in memory.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._memory: dict[tuple[int, int], dict[str, Tree]] = {}

    def load_last(self, client: int, round_number: int) -> dict[str, Tree] | None:
        """Return a client's row after its last round up to `round_number`, None without one."""
        earlier_rounds = [stored for stored in self._rounds_of(client) if stored <= round_number]
        if not earlier_rounds:
            return None
        last_round = max(earlier_rounds)
        if self._folder is None:
            return self._memory[client, last_round]
        return checkpoint.load_checkpoint(self._checkpoint_path(client, last_round))["row"]

    def save(self, client: int, round_number: int, row: dict[str, Tree]) -> None:
        """Store a client's row after a round, and delete those that nobody will ask for."""
        if self._folder is None:
            self._memory[client, round_number] = row
        else:
            path = self._checkpoint_path(client, round_number)
            with files.explain_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            payload = {"round": round_number, "row": tree.to(row, "cpu")}
            with files.durable_write(path, lambda: None) as file:
                checkpoint.save_checkpoint(checkpoint.to_plain_values(payload), file)
        for stored in sorted(self._rounds_of(client))[:-STORED_ROUNDS]:
            self._delete(client, stored)

    def forget_rounds_after(self, client: int, round_number: int) -> None:
        """Delete a client's states of later rounds, which the server has not played yet."""
        for stored in self._rounds_of(client):
            if stored > round_number:
                self._delete(client, stored)

    def _delete(self, client: int, round_number: int) -> None:
        self._memory.pop((client, round_number), None)
        if self._folder is not None:
            self._checkpoint_path(client, round_number).unlink(missing_ok=True)

    def _rounds_of(self, client: int) -> list[int]:
        """Return the rounds after which a client's state is stored."""
        if self._folder is None:
            return [stored for owner, stored in self._memory if owner == client]
        checkpoints = self._checkpoint_path(client, 0).parent.glob("round*.pt")
        numbers = (path.stem.removeprefix("round") for path in checkpoints)
        return [int(number) for number in numbers if number.isdigit()]

    def _checkpoint_path(self, client: int, round_number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"client{client}" / f"round{round_number}.pt"


@contextlib.contextmanager
def _naming_missing_entries(method: Method) -> Iterator[None]:
    """Raise NotSentError where a hook reads an entry that was not sent."""
    try:
        yield
    except KeyError as entry:
        raise NotSentError(
            f"a hook of {type(method).__name__} asks for {entry}, which is not sent"
        ) from entry


def _replace_paths_by_known(sent: Tree, initial_entries: Mapping[str, Tree]) -> Tree:
    """Return what was sent, each path of a Known tree replaced by that initial entry."""
    if isinstance(sent, Known):
        return Known(tree.map(initial_entries.__getitem__, sent.values))
    if type(sent) is dict:
        return {name: _replace_paths_by_known(part, initial_entries) for name, part in sent.items()}
    return sent


def _select_paths(server: Tree, entries: Mapping[str, Tree], path: str = "") -> Tree:
    """Return the server's tree with the given entries alone, without subtrees that have none."""
    if not isinstance(server, dict):
        return entries.get(path, {})
    selected = {}
    for name, part in server.items():
        subtree = _select_paths(part, entries, f"{path}.{name}" if path else name)
        # What was empty from the beginning stays, as hooks expect it.
        if tree.leaves(subtree) or not tree.leaves(part):
            selected[name] = subtree
    return selected
