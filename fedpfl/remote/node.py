"""A node's side of a federation: it plays its clients' part with their data and states, which stay
here.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from fedpfl.data import Federation
from fedpfl.engine import Backend, Local, State, Tuning, begin
from fedpfl.engine.backend import EvalCall, Participation, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.store import Rows
from fedpfl.ground import files, tree
from fedpfl.ground.errors import FedpflError, reason
from fedpfl.ground.tree import Known, Tree
from fedpfl.methods import Method, Turn
from fedpfl.record import checkpoint
from fedpfl.remote import wire
from fedpfl.remote.server import Needs, other

# States of each client: a server that goes on from its last checkpoint asks for a round again
KEPT = 2


class Node:
    """Answer the server's messages for some clients of a federation.

    key: what server and nodes must have in common. folder: where the clients' states are kept, in
    memory without one.
    """

    def __init__(
        self,
        backend: Backend,
        method: Method,
        federation: Federation,
        key: Mapping[str, str],
        clients: Collection[int],
        seed: int,
        folder: Path | None = None,
    ):
        self._backend, self._method, self._federation, self._key = (
            backend,
            method,
            federation,
            dict(key),
        )
        self._clients, self._shelf = sorted(clients), Shelf(folder)
        self._first = begin(method, backend.net, federation.clients, federation.x.device, seed=seed)
        roles = method.buffers()
        self._shared = [role for role, place in roles.items() if place == "aggregate"]

    def answer(self, message: bytes) -> bytes:
        """Return the answer to a message, be it what is wrong."""
        try:
            about, trees = wire.unpacked(message)
            if told := other(about.get("key"), self._key, "the server", "this node"):
                raise FedpflError(told)
            if "hello" in about:  # of a server that may have been set back
                for client in self._clients:
                    self._shelf.forget(client, about["hello"])
                return wire.packed({"key": self._key, "clients": self._clients}, {})
            if about["client"] not in self._clients:
                raise FedpflError(f"client {about['client']} is not here")
            said = {"key": self._key, "client": about["client"], "asks": about["asks"]}
            return wire.packed(said, self._answer(about, trees), whole=about["shares"])
        except FedpflError as fault:
            return wire.packed({"fault": str(fault), "needs": isinstance(fault, Needs)}, {})
        except Exception as error:
            traceback.print_exc()
            return wire.packed({"fault": reason(error, kind=True)}, {})

    def _answer(self, about: dict[str, Any], trees: dict[str, Tree]) -> Tree:
        """Return what the client brings back, and keep its state."""
        client, number, asks = about["client"], about["round"], about["asks"]
        row: Tree = trees.get("row")
        first = self._first.rows
        if not about["shares"]:
            row = self._shelf.state(client, number) or {
                part: first.take(part, client) for part in ("client", "buffers", "facts")
            }
            if about["participated"] and not bool(row["facts"]["participated"]):
                raise FedpflError(
                    "the client's state is lost: it took part, and there is none here"
                )
        rows = Rows(first.initial, {}, first.clients, first.device)
        rows.put_([client], tree.repeat(row, 1))
        method, server = self._method, trees.get("server")
        if not about["shares"]:
            method, server = self._given(about, trees.get("sent"))
        state = State(number, server, rows, trees["shared"], {})
        laid = tree.repeat(trees.get("laid", {}), 1)
        with _told(method):
            if "local" not in asks:
                tunings: dict[str, Any] = {name: own and _tuning(own) for name, own in asks.items()}
                call = EvalCall(method, self._federation, state, [client], **tunings, laid=laid)
                return tree.take(self._backend._one(call), 0)
            turn = None if asks["turn"] is None else Turn([client], trains=asks["turn"])
            about_it = (_local(asks["local"]), Draws(**asks["draws"]), asks["stopping"], turn, laid)
            part = self._backend._one(
                TrainCall(method, self._federation, state, [client], *about_it)
            )
        part = tree.take(part, 0)
        return part if about["shares"] else self._kept(client, number + 1, row, part)

    def _kept(
        self, client: int, number: int, row: dict[str, Tree], part: Participation
    ) -> Participation:
        """Return what leaves the node of a participation; its state is kept."""
        dealt = self._first.rows.dealt
        for name in dealt:
            if not all(
                map(torch.equal, tree.leaves(part.clients[name]), tree.leaves(row["client"][name]))
            ):
                raise Needs(f"a client's {name}, which the server knows, has changed")
        facts = {"participated": torch.ones_like(part.trained), "trained": part.trained}
        own = {
            "client": part.clients,
            "buffers": tree.drop(part.buffers, self._shared),
            "facts": facts,
        }
        self._shelf.keep(client, number, own)
        travel: dict[str, Any] = {
            name: {role: own for role, own in getattr(part, name).items() if role in self._shared}
            for name in ("buffers", "updated")
        }
        return part._replace(clients=tree.select(part.clients, dealt), **travel)

    def _given(self, about: dict[str, Any], sent: Tree | None) -> tuple[Method, Tree]:
        """Return the method as it is where only so much was sent, and what is known here of the
        server's side.
        """
        begun = dict(tree.items(self._first.server))
        known = {path: begun[path] for path in about["initial"]}
        if sent is not None:
            for own, place in zip(wire.leaves(sent), about["places"], strict=True):
                if place is None or place in known:
                    continue
                if own.mask is None:
                    known[place] = own.value
                elif (
                    own.value.is_floating_point()
                ):  # whoever looks at the rest gets what nobody takes for a number
                    known[place] = torch.where(own.mask, own.value, torch.nan)
            sent = _filled(sent, begun)
        method = copy.copy(self._method)

        def download(server: Tree, client: dict[str, Tree]) -> Tree:
            if sent is None:
                raise KeyError("download")
            return sent

        vars(method)["download"] = download
        return method, _pruned(self._first.server, known)


class Shelf:
    """Keep the last states of clients, each as it was after a round, in checkpoints
    `client<k>/round<n>.pt`.
    """

    def __init__(self, folder: Path | None):
        self._folder, self._memory = folder, dict[tuple[int, int], Tree]()

    def state(self, client: int, number: int) -> Tree | None:
        """Return a client's last state of round `number` or an earlier one; None before its first
        participation.
        """
        there = [own for own in self._rounds(client) if own <= number]
        if not there:
            return None
        if self._folder is None:
            return self._memory[client, max(there)]
        return checkpoint.load(self._path(client, max(there)))["row"]

    def keep(self, client: int, number: int, row: Tree) -> None:
        """Keep a client's state after a round, and drop those that nobody will ask for."""
        if self._folder is None:
            self._memory[client, number] = row
        else:
            path = self._path(client, number)
            with files.writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            with files.replacing(path, lambda: None) as file:
                checkpoint.save(
                    checkpoint.plain({"round": number, "row": tree.to(row, "cpu")}), file
                )
        for gone in sorted(self._rounds(client))[:-KEPT]:
            self._drop(client, gone)

    def forget(self, client: int, number: int) -> None:
        """Drop a client's states of rounds after `number`, which for the server are still to come."""
        for gone in self._rounds(client):
            if gone > number:
                self._drop(client, gone)

    def _drop(self, client: int, number: int) -> None:
        self._memory.pop((client, number), None)
        if self._folder is not None:
            self._path(client, number).unlink(missing_ok=True)

    def _rounds(self, client: int) -> list[int]:
        if self._folder is None:
            return [number for own, number in self._memory if own == client]
        found = (
            path.stem.removeprefix("round")
            for path in self._path(client, 0).parent.glob("round*.pt")
        )
        return [int(number) for number in found if number.isdigit()]

    def _path(self, client: int, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"client{client}" / f"round{number}.pt"


@contextlib.contextmanager
def _told(method: Method) -> Any:
    """Raise Needs where a hook asks for an entry that is not here."""
    try:
        yield
    except KeyError as entry:
        raise Needs(
            f"a hook of {type(method).__name__} asks for {entry}, which is not sent"
        ) from entry


def _local(said: dict[str, Any]) -> Local:
    return Local(**{**said, "betas": tuple(said["betas"])})


def _tuning(said: dict[str, Any]) -> Tuning:
    return Tuning(_local(said["local"]), Draws(**said["draws"]), said["part"])


def _filled(sent: Tree, begun: dict[str, Tree]) -> Tree:
    """Return what was sent, with what was known in the place of its names."""
    if isinstance(sent, Known):
        return Known(tree.map(begun.__getitem__, sent.values))
    return (
        {name: _filled(part, begun) for name, part in sent.items()} if type(sent) is dict else sent
    )


def _pruned(server: Tree, known: dict[str, Tree], at: str = "") -> Tree:
    """Return the server's tree as far as it is known."""
    if not isinstance(server, dict):
        return known.get(at, {})
    parts = {
        name: _pruned(part, known, f"{at}.{name}" if at else name) for name, part in server.items()
    }
    return {
        name: part
        for name, part in parts.items()
        if tree.leaves(part) or not tree.leaves(server[name])
    }
