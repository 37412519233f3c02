"""Run a node's side of a federation: it trains its clients and keeps their data and states."""

from __future__ import annotations

import copy
import io
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fedpfl.config.run import Run
from fedpfl.engine import State, make_backend, make_initial_state
from fedpfl.engine.calls import Call, EvalCall, Participation
from fedpfl.ground import files, tree
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.tree import Tree
from fedpfl.record import checkpoint
from fedpfl.remote import download, trust, wire
from fedpfl.remote.budget import (
    SampleBudget,
    digest_question,
    make_run_key,
    require_promise,
)
from fedpfl.remote.download import NotSentError
from fedpfl.remote.messages import (
    MAX_FAULT,
    Fault,
    Holdings,
    Question,
    Reply,
    Request,
    pack_model,
    read_message,
    require_same_key,
)
from fedpfl.remote.schedule import Schedule, describe_call, make_schedule
from fedpfl.runner.deploy import describe_input, name_entries, pack_entries

# A server that goes on from its last checkpoint asks for a round again.
STORED_ROUNDS = 2


@dataclass(frozen=True)
class NodePolicy:
    """Hold the permissions of a node, which no server can change.

    Attributes:
        share_states: Whether clients' states may leave the node.
        epsilon: The most that samples may give away in all runs; None for any, and for runs that
            promise nothing.
    """

    share_states: bool = False
    epsilon: float | None = None


PLAIN_POLICY = NodePolicy()


class Node:
    """Answer the server's messages for some clients of a federation.

    Args:
        schedule: The calls of the run; other questions are refused.
        compatibility_key: Configuration, data and version, as the server must have them.
        clients: The clients that it holds.
        folder: Where their states are stored.
        policy: Its permissions.
        budget: The account of its clients' samples; None where the run promises them nothing.
    """

    def __init__(
        self,
        schedule: Schedule,
        compatibility_key: Mapping[str, str],
        clients: Collection[int],
        folder: Path,
        policy: NodePolicy = PLAIN_POLICY,
        budget: SampleBudget | None = None,
    ):
        setup = schedule.setup
        self._schedule = schedule
        self._backend = setup.backend
        self._method = setup.method
        self._compatibility_key = dict(compatibility_key)
        self._clients = sorted(clients)
        self._policy = policy
        self._budget = budget
        self._folder = folder
        self._store = ClientStore(folder)
        self._initial_state = make_initial_state(
            method=setup.method,
            net=setup.backend.net,
            clients=setup.federation.clients,
            device=setup.federation.x.device,
            seed=setup.seed,
            stopping=schedule.stops_early,
        )
        self._limits = trust.MessageLimits.of_state(self._initial_state)

    def answer_message(self, message: bytes) -> bytes:
        """Return the answer to a message; a failure is an answer, too."""
        return answer_or_fault(self._answer_request, message)

    def _answer_request(self, message: bytes) -> bytes:
        """Return the answer to a message. Raises FedpflError."""
        # ---- Step 1: no message is unpacked that is larger than any of this run.
        fields, trees = self._limits.unpack_message(message)
        require_same_key(fields.get("key"), self._compatibility_key, "the server", "this node")
        if "wants" in fields:
            read_message(Request, fields)
            holdings = Holdings(key=self._compatibility_key, clients=self._clients)
            return pack_model(holdings)

        # ---- Step 2: only what this run asks of a client that is here, within the node's policy.
        question = read_message(Question, fields)
        call = self._find_call(question)
        if question.shares and not self._policy.share_states:
            raise FedpflError(
                "the server asks for clients' states, which this node does not share; "
                "share-states=true in its node-config allows it"
            )
        trust.check_trees(question, trees, self._initial_state)

        # ---- Step 3: the answer, which repeats the question.
        answer = self._run_client(question, call, trees, message)
        opening = Reply(key=self._compatibility_key, client=question.client, asks=question.asks)
        return pack_model(opening, answer, whole=question.shares)

    def _find_call(self, question: Question) -> Call:
        """Return the call of the node's own schedule that a question is equal to.

        Raises:
            FedpflError: The run does not ask this.
        """
        client = question.client
        if client not in self._clients:
            raise FedpflError(f"client {client} is not here")
        state = replace(self._initial_state, round=question.round)
        for call in self._schedule.list_calls(state, client):
            # Values of the message are compared, and never used.
            if describe_call(call) == question.asks:
                return call
        raise FedpflError(
            f"a question that is not planned for client {client} after round {question.round}:"
            " local settings, cohort, seed and phase follow from the configuration; give server"
            " and node the same command"
        )

    def _run_client(
        self, question: Question, call: Call, trees: dict[str, Tree], message: bytes
    ) -> Tree:
        """Train or evaluate one client, and return its answer.

        Args:
            question: The values of the message.
            call: The call that they are equal to.
            trees: The tensors of the message.
            message: The whole message.
        """
        # ---- Step 1: the client's state, and as much of the server's as was sent.
        client = question.client
        if question.shares:
            row = trees["row"]
        else:
            row = self._load_row(client, question.round, question.participated)
        initial = self._initial_state
        rows = initial.rows.without_writes()
        rows.put_([client], tree.repeat(row, 1))
        server = trees["server"] if question.shares else initial.server
        overlay = tree.repeat(trees.get("laid", {}), 1)
        state = State(question.round, server, rows, trees["shared"], {})
        call = replace(call, state=state, overlay=overlay)
        if not question.shares:
            call = self._restrict_to_sent(call, question, trees.get("sent"))

        # ---- Step 2: the same participation or evaluation as on any backend.
        if self._budget:
            # The state here decides about the answer, too.
            digest = digest_question(message, wire.pack_message({}, row))
            call = self._budget.protect_call(call, client, digest)
        if isinstance(call, EvalCall):
            call = replace(call, wants_models=not question.shares)
        try:
            stacked = self._backend.run_one(call)
        except KeyError as entry:
            raise NotSentError(
                f"a hook of {type(self._method).__name__} asks for {entry}, which is not sent"
            ) from entry
        answer = tree.take(stacked, 0)

        # ---- Step 3: the model and the trained state stay here, unless states are shared.
        if question.shares:
            return answer
        if isinstance(call, EvalCall):
            self._keep_model(call, client, answer.pop("model"))
            return answer
        if call.survey is None:
            self._store_participation(client, question.round + 1, row, answer)
        return trust.select_sent(answer, self._method, self._initial_state)

    def _keep_model(self, call: EvalCall, client: int, model: dict[str, Tree]) -> None:
        """Write the evaluated model of a client, as `fedpfl export` would."""
        federation = call.federation
        net = self._backend.net.nets[self._initial_state.rows.kinds[client]]
        entries = name_entries(call.method, net, model["params"], model["buffers"], federation)
        classes = federation.class_names or ()
        content = pack_entries(entries, describe_input(federation), classes)
        stem = "finetuned" if call.tuning else "personal"
        files.write_private(self._folder / f"client{client}" / f"{stem}.safetensors", content)

    def _load_row(self, client: int, round_number: int, has_participated: bool) -> dict[str, Tree]:
        """Return a client's last row, the initial one before its first participation.

        Raises:
            FedpflError: The client took part, and its state is not here.
        """
        if not has_participated:
            # States of a run that has begun anew are replaced as its clients take part.
            rows = self._initial_state.rows
            return {part: rows.take(part, client) for part in ("client", "buffers", "facts")}
        row = self._store.load_last(client, round_number)
        if row is None:
            raise FedpflError("the client's state is lost: it took part, and there is none here")
        return row

    def _store_participation(
        self, client: int, round_number: int, row: dict[str, Tree], participation: Participation
    ) -> None:
        """Store a client's new state.

        Args:
            client: The client that took part.
            round_number: The round that it took part in.
            row: The client's row before.
            participation: The backend's answer.

        Raises:
            NotSentError: An entry has changed that the server holds a copy of.
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

    def _restrict_to_sent(self, call: Call, question: Question, sent: Tree | None) -> Call:
        """Return a call about the part of the server's tree that was sent.

        The method's `download` returns the tensors that were sent. The tree has these and the
        entries that are as before round 1.
        """
        initial_server = self._initial_state.server
        initial_entries = dict(tree.items(initial_server))
        unchanged = {path: initial_entries[path] for path in question.initial}
        entries: dict[str, Tree] = {}
        if sent is not None:
            own = download.call_download(call, question.client)
            sent = download.complete_download(sent, own)
            entries = download.find_sent_entries(sent, own, initial_server)
        server = download.select_paths(initial_server, {**entries, **unchanged})
        method = copy.copy(self._method)

        def return_sent(server: Tree, client: dict[str, Tree]) -> Tree:
            if sent is None:
                raise KeyError("download")
            return sent

        vars(method)["download"] = return_sent
        return replace(call, method=method, state=replace(call.state, server=server))


def make_run_node(run: Run, clients: Collection[int], folder: Path, policy: NodePolicy) -> Node:
    """Return the node of some clients of a run. Raises FedpflError.

    Args:
        run: As the node has built it.
        clients: Their numbers.
        folder: Of the node; each run has one in it, so that no state meets another run's.
        policy: The permissions of the node.
    """
    require_promise(run, policy.epsilon)
    key = make_run_key(run)
    run_folder = folder / "-".join(key.values())
    backend = make_backend(run.engine, run.net, run.device)
    account = run.sample_account
    budget = None
    if account:
        account.check_delta()
        budget = SampleBudget(run, account, run_folder, policy.epsilon)
    return Node(
        schedule=make_schedule(run, backend),
        compatibility_key=key,
        clients=clients,
        folder=run_folder,
        policy=policy,
        budget=budget,
    )


def answer_or_fault(answer_request: Callable[[bytes], bytes], message: bytes) -> bytes:
    """Return the answer to a message; a failure is an answer, too."""
    try:
        return answer_request(message)
    except FedpflError as error:
        fault = Fault(fault=str(error)[:MAX_FAULT], needs=isinstance(error, NotSentError))
    except Exception as error:
        traceback.print_exc()
        fault = Fault(fault=error_text(error, with_class=True)[:MAX_FAULT])
    return pack_model(fault)


class ClientStore:
    """Store the last states of clients as `client<k>/round<n>.pt`, one for each round they trained in.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: Path):
        self._folder = folder

    def load_last(self, client: int, round_number: int) -> dict[str, Tree] | None:
        """Return a client's row after its last round up to `round_number`, None without one."""
        earlier_rounds = [stored for stored in self._list_rounds(client) if stored <= round_number]
        if not earlier_rounds:
            return None
        path = self._checkpoint_path(client, earlier_rounds[-1])
        return checkpoint.load_checkpoint(path)["row"]

    def save(self, client: int, round_number: int, row: dict[str, Tree]) -> None:
        """Store a client's row after a round, beside the previous round's."""
        path = self._checkpoint_path(client, round_number)
        payload = {"round": round_number, "row": tree.to(row, "cpu")}
        content = io.BytesIO()
        checkpoint.save_checkpoint(checkpoint.to_plain_values(payload), content)
        files.write_private(path, content.getvalue())
        stored_rounds = self._list_rounds(client)
        kept = [stored for stored in stored_rounds if stored <= round_number][-STORED_ROUNDS:]
        for stored in {*stored_rounds} - {*kept}:
            self._checkpoint_path(client, stored).unlink(missing_ok=True)

    def _list_rounds(self, client: int) -> list[int]:
        """Return the rounds after which a client's state is stored, ascending."""
        paths = self._checkpoint_path(client, 0).parent.glob("round*.pt")
        numbers = [path.stem.removeprefix("round") for path in paths]
        return sorted(int(number) for number in numbers if number.isdigit())

    def _checkpoint_path(self, client: int, round_number: int) -> Path:
        return self._folder / f"client{client}" / f"round{round_number}.pt"
