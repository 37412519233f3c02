"""Where the clients' states live between rounds: those of clients that took part, the others equal
the initial one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree

SPARE = 8  # one of so many rows may stand empty


@dataclass(frozen=True)
class Store(Checked):
    """device: auto (with the model), cpu (host memory) or disk (files mapped into memory, in the
    run directory).

    The files have no names: they are gone, and their room is free again, when the process ends in
    whatever way.
    sharded: each of several processes stores the states of its own clients alone.
    """

    device: Literal["auto", "cpu", "disk"] = "auto"
    sharded: bool = False

    def on(self, device: torch.device) -> torch.device:
        """Return the device of the stored tensors, beside a model on `device`."""
        return device if self.device == "auto" else torch.device("cpu")

    def repeat(self, mine: Tree, count: int, folder: Path | None = None) -> Tree:
        """`count` copies of one client's tree, stacked. Raises FedpflError where the disk has no
        room.
        """
        if self.device != "disk":
            return tree.repeat(mine, count)
        return tree.map(lambda leaf: self._mapped(leaf, count, folder), mine)

    @staticmethod
    def _mapped(leaf: Tensor, count: int, folder: Path | None) -> Tensor:
        size, shape = count * leaf.nbytes, (count, *leaf.shape)
        if not size:
            return leaf.new_empty(shape)
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".clients.") as file:
                # All of it now: a mapped write to a full disk would kill the process.
                os.posix_fallocate(file.fileno(), 0, size)
                mapped = torch.from_file(
                    file.name, shared=True, size=count * leaf.numel(), dtype=leaf.dtype
                )
        except OSError as error:
            raise FedpflError(
                f"state.device=disk needs {size / 2**20:,.0f} MiB more in {folder or tempfile.gettempdir()}: "
                f"{error.strerror}; make room, or choose another place with hydra.run.dir=..."
            ) from None
        return mapped.view(shape).copy_(leaf.expand(shape))


class Rows:
    """Hold every client's `{"client": state, "buffers": statistics by role, "facts": what the
    engine knows of it}`.

    Who has written none has the initial one.

    Written rows stand in stacked blocks in the order of their first writing, each block an eighth
    of those before it: none is ever moved, few stand empty, and a checkpoint writes blocks as they
    are.

    initial: one client's tree. own: in what clients' states differ from the beginning, stacked.
    device: of the trees
    that `take` gives. mine: whose rows this process stores, if they are sharded; it has the initial
    ones of others.
    """

    def __init__(
        self,
        initial: dict[str, Tree],
        own: dict[str, Tree],
        clients: int,
        device: torch.device,
        store: Store | None = None,
        folder: Path | None = None,
        mine: Callable[[int], bool] | None = None,
    ):
        self.clients, self.mine = clients, mine
        self._store, self.device, self._folder = store or Store(), device, folder
        self.writes = 0  # so far
        self.initial = tree.clone(tree.to(initial, self._store.on(device)))
        self._own = tree.map(
            lambda leaf, mine: mine.to(leaf), tree.select(self.initial["client"], own), own
        )
        self._blocks: list[_Block] = []
        self._places: dict[int, tuple[_Block, int]] = {}  # who has written -> block, and row in it

    def __len__(self) -> int:
        return len(self._places)

    @property
    def written(self) -> list[int]:
        """The clients that have written a row here, ascending."""
        return sorted(self._places)

    @property
    def dealt(self) -> list[str]:
        """The entries of clients' states in which they differ from the beginning."""
        return [*self._own]

    @property
    def trees(self) -> list[dict[str, Tree]]:
        """All that is kept: blocks, the initial tree, and in what clients differ from it."""
        return [*(block.rows for block in self._blocks), self.initial, {"client": self._own}]

    def alike(self, client: int) -> bool:
        """Return whether a client has the initial state itself, as all have that never took part
        and never differed.
        """
        return client not in self._places and not self._own

    def take(self, part: str, clients: int | Sequence[int]) -> dict[str, Tree]:
        """Return a client's part on `device`, not to be changed; of several clients a stacked copy."""
        if isinstance(clients, int):
            return tree.to(self._row(part, clients), self.device)
        return tree.to(tree.stack([self._row(part, client) for client in clients]), self.device)

    def put_(self, clients: Sequence[int], rows: dict[str, Tree]) -> None:
        """Write parts of clients' rows, stacked, in place. Raises as `Store.repeat`."""
        self.writes += 1
        into: list[Tensor] = []
        values: list[Tensor] = []
        rows = tree.to(rows, self._store.on(self.device))
        for place, client in enumerate(clients):
            if self.mine and not self.mine(client):
                continue
            if client not in self._places:
                self._add(client)

            def pair(mine: Tensor, leaf: Tensor, place: int = place) -> None:
                into.append(mine)
                values.append(leaf[place])

            for part, stacked in rows.items():
                tree.map(pair, self._row(part, client), stacked)
        if into:
            torch._foreach_copy_(into, values)

    def saved(self) -> list[dict[str, Any]]:
        """Return the written rows as `load_` takes them: blocks, in which `who` tells whose they
        are.
        """
        return [
            {"who": torch.tensor(block.who), **tree.take(block.rows, slice(len(block.who)))}
            for block in self._blocks
        ]

    def renewed(self, block: dict[str, Any]) -> dict[str, Any]:
        """Return a saved block in today's form: methods once kept flags of their own in place of
        the facts.
        """
        if "facts" in block:
            return block
        flags = [
            own
            for name in ("trained", "joined", "ranked")
            if (own := block["client"].get(name)) is not None
        ]
        took_part = flags[0] if flags else torch.ones(len(block["who"]), dtype=torch.bool)
        client = {
            name: own for name, own in block["client"].items() if name in self.initial["client"]
        }
        return {**block, "client": client, "facts": dict.fromkeys(self.initial["facts"], took_part)}

    def load_(self, saved: Sequence[dict[str, Any]]) -> None:
        """Write rows that were `saved`."""
        for block in saved:
            self.put_(block["who"].tolist(), tree.drop(block, ["who"]))

    def _row(self, part: str, client: int) -> dict[str, Tree]:
        if client in self._places:
            block, row = self._places[client]
            return tree.take(block.rows[part], row)
        return {**self.initial[part], **(tree.take(self._own, client) if part == "client" else {})}

    def _add(self, client: int) -> None:
        """Give a client a row of its own, with its values until now."""
        if not self._blocks or len(self._blocks[-1].who) == self._blocks[-1].size:
            size = min(max(1, len(self) // SPARE), self.clients - len(self))
            self._blocks.append(
                _Block([], size, self._store.repeat(self.initial, size, self._folder))
            )
        block = self._blocks[-1]
        row = len(block.who)
        tree.put_(tree.select(block.rows["client"], self._own), row, tree.take(self._own, client))
        block.who.append(client)
        self._places[client] = block, row


class _Block(NamedTuple):
    who: list[int]
    size: int
    rows: dict[str, Tree]
