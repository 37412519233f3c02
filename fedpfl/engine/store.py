"""Where the clients' states live between rounds. Clients that never took part share one."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record
from fedpfl.ground.tree import Entries, Tree

SPARE = 8  # one of so many rows may stand empty


@dataclass(frozen=True)
class Store(Checked):
    """Say where the clients' states are stored.

    Attributes:
        device: auto (with the model), cpu (host memory) or disk (files mapped into memory, in the
            run directory). The files have no names: they are gone, and their room is free again,
            when the process ends.
    """

    device: Literal["auto", "cpu", "disk"] = "auto"

    def on(self, device: torch.device) -> torch.device:
        """Return the device of the stored tensors, beside a model on `device`."""
        return device if self.device == "auto" else torch.device("cpu")

    def repeat(self, row: Tree, count: int, folder: Path | None = None) -> Tree:
        """Return `count` copies of one client's tree, stacked.

        Raises:
            FedpflError: The disk has no room.
        """
        if self.device != "disk":
            return tree.repeat(row, count)
        return tree.map(lambda leaf: self._repeat_in_file(leaf, count, folder), row)

    @staticmethod
    def _repeat_in_file(leaf: Tensor, count: int, folder: Path | None) -> Tensor:
        """Return copies of a leaf, stacked, in a file that is mapped into memory."""
        shape = (count, *leaf.shape)
        try:
            return map_file(shape, leaf.dtype, folder).copy_(leaf.expand(shape))
        except OSError as error:
            raise FedpflError(
                f"state.device=disk needs {count * leaf.nbytes / 2**20:,.0f} MiB more in "
                f"{folder or tempfile.gettempdir()}: {error.strerror}; make room, or choose "
                "another place with hydra.run.dir=..."
            ) from None


def map_file(shape: tuple[int, ...], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Return a tensor in a file without a name, gone when the process ends.

    Raises:
        OSError: The disk has no room.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clients.") as file:
        # All of it now: a mapped write to a full disk would kill the process.
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        mapped = torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    return mapped.view(shape)


@dataclass(frozen=True)
class RowStorage:
    """Say where one run keeps its clients' rows.

    Attributes:
        folder: Of a store on disk.
    """

    store: Store = field(default_factory=Store)
    folder: Path | None = None


@dataclass(frozen=True, eq=False)
class _Block:
    """Hold stacked rows of one kind; the leading ones belong to `clients`."""

    kind: int
    clients: list[int]
    size: int
    rows: Entries


class Rows:
    """Hold every client's `{"client": state, "buffers": statistics, "facts": FACTS}`.

    A client that has never written a row has the initial one. Written rows stand in stacked blocks
    in the order of their first writing, each block an eighth of those before it: none is ever
    moved, few stand empty, and a checkpoint writes blocks as they are.

    Clients may have rows of several kinds, as their networks are. Stacked rows of several kinds have
    the entries alone that have one form in all.

    Attributes:
        initials: One client's tree of each kind.
        initial: That of the first kind.
        kinds: Of the clients' rows.
        common: By part the names of entries that have one form in all kinds.
        clients: How many there are.
        device: Of the trees that `take` gives.
        folder: As in RowStorage.
        writes: How often rows were written so far.
    """

    def __init__(
        self,
        initial: Entries,
        varied_entries: Entries,
        clients: int,
        device: torch.device,
        storage: RowStorage | None = None,
        other_kinds: Sequence[Entries] = (),
        kinds: Sequence[int] = (),
    ):
        storage = storage or RowStorage()
        self.kinds = [*kinds] or [0] * clients
        self.clients = clients
        self.device = device
        self.writes = 0
        self._store = storage.store
        self.folder = storage.folder
        self.initials = [
            tree.clone(tree.to(row, self._store.on(device))) for row in (initial, *other_kinds)
        ]
        self.initial = self.initials[0]
        self.common = {part: self._find_common(part) for part in initial}
        # In these entries of their states clients differ from the beginning, stacked.
        self._varied_entries = tree.map(
            lambda leaf, values: values.to(leaf),
            tree.select(self.initial["client"], varied_entries),
            varied_entries,
        )
        self._blocks: list[_Block] = []
        self._position_of_client: dict[int, tuple[_Block, int]] = {}  # block, and row in it

    def __len__(self) -> int:
        return len(self._position_of_client)

    @property
    def stored_clients(self) -> list[int]:
        """Return the clients that have written a row, ascending."""
        return sorted(self._position_of_client)

    @property
    def varied_entries(self) -> list[str]:
        """Return the entries of a state in which clients differ from the beginning."""
        return [*self._varied_entries]

    @property
    def trees(self) -> list[Entries]:
        """Return all that is kept: blocks, the initial tree, and the entries that differ."""
        blocks = [block.rows for block in self._blocks]
        return [*blocks, *self.initials, {"client": self._varied_entries}]

    def initial_of(self, client: int) -> Entries:
        """Return the initial tree of a client's kind."""
        return self.initials[self.kinds[client]]

    def without_writes(self) -> Rows:
        """Return rows of the same kinds that no client has written yet."""
        rows = copy.copy(self)
        rows._blocks, rows._position_of_client = [], {}
        return rows

    def _find_common(self, part: str) -> list[str]:
        """Return the entries of a part that have one form in all kinds."""
        first, *others = [row[part] for row in self.initials]

        def has_one_form(name: str) -> bool:
            form = tree.specs(first[name])
            return all(name in row and tree.specs(row[name]) == form for row in others)

        return [*filter(has_one_form, first)]

    def is_initial(self, client: int) -> bool:
        """Check whether a client has the initial state that all clients have in common."""
        return client not in self._position_of_client and not self._varied_entries

    def take(self, part: str, clients: int | Sequence[int]) -> Entries:
        """Return a client's part on `device`, not to be changed; of several a stacked copy."""
        if isinstance(clients, int):
            row = self._row(part, clients)
        else:
            rows = [self._row(part, client) for client in clients]
            if len({self.kinds[client] for client in clients}) > 1:
                rows = [tree.select(row, self.common[part]) for row in rows]
            row = tree.stack(rows)
        return tree.to(row, self.device)

    def take_private(self, client: int) -> Entries:
        """Return a row's entries, by part, that other kinds lack or have in another form."""
        return {
            part: tree.drop(self.take(part, client), names) for part, names in self.common.items()
        }

    def put_(self, clients: Sequence[int], rows: Entries) -> None:
        """Write parts of clients' rows, or some entries of them, stacked, in place.

        Raises:
            FedpflError: The disk has no room.
        """
        self.writes += 1
        targets: list[Tensor] = []
        values: list[Tensor] = []
        rows = tree.to(rows, self._store.on(self.device))
        for position, client in enumerate(clients):
            if client not in self._position_of_client:
                self._add_row(client)
            for part, stacked in rows.items():
                # In the order of the stored row, which may differ from the given one.
                row = {n: entry for n, entry in self._row(part, client).items() if n in stacked}
                targets += tree.leaves(row)
                values += tree.leaves(tree.map(lambda _, leaf, at=position: leaf[at], row, stacked))
        # One copy of all leaves takes a GPU one launch in place of hundreds.
        if targets:
            torch._foreach_copy_(targets, values)

    def saved(self) -> list[Record]:
        """Return the written rows as `load_` takes them: blocks, with their clients as `who`."""
        return [
            {"who": torch.tensor(block.clients), **tree.take(block.rows, slice(len(block.clients)))}
            for block in self._blocks
        ]

    def load_(self, saved: Sequence[Record]) -> None:
        """Write rows that were `saved`."""
        for block in saved:
            self.put_(block["who"].tolist(), tree.drop(block, ["who"]))

    def _row(self, part: str, client: int) -> Entries:
        """Return a part of a client's row, as a view where it is stored."""
        if client in self._position_of_client:
            block, row = self._position_of_client[client]
            return tree.take(block.rows[part], row)
        initial = self.initial_of(client)[part]
        if part == "client":
            return {**initial, **tree.take(self._varied_entries, client)}
        return initial

    def _add_row(self, client: int) -> None:
        """Give a client a stored row, with its values until now."""
        kind = self.kinds[client]
        blocks = [block for block in self._blocks if block.kind == kind]
        if not blocks or len(blocks[-1].clients) == blocks[-1].size:
            size = min(max(1, len(self) // SPARE), self.clients - len(self))
            rows = self._store.repeat(self.initial_of(client), size, self.folder)
            blocks.append(_Block(kind=kind, clients=[], size=size, rows=rows))
            self._blocks.append(blocks[-1])
        block = blocks[-1]
        row = len(block.clients)
        varied_rows = tree.select(block.rows["client"], self._varied_entries)
        tree.put_(varied_rows, row, tree.take(self._varied_entries, client))
        block.clients.append(client)
        self._position_of_client[client] = block, row
