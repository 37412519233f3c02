"""Where the clients' states live between rounds. Only the rows of those who take part are moved to the device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.errors import FedpflError
from fedpfl.tree import Tree


@dataclass(frozen=True)
class Store:
    """device: auto (with the model), cpu (host memory) or disk (files mapped into memory, in the run directory).

    The files have no names: they are gone, and their room is free again, when the process ends in whatever way.
    """

    device: Literal["auto", "cpu", "disk"] = "auto"

    def repeat(self, mine: Tree, clients: int, device: torch.device, folder: Path | None = None) -> Tree:
        """`clients` copies of one client's tree, stacked. Raises FedpflError where the disk has no room."""
        if self.device != "disk":
            return tree.repeat(tree.to(mine, self._on(device)), clients)
        return tree.map(lambda leaf: self._mapped((clients, *leaf.shape), leaf.dtype, folder, leaf.expand_as), mine)

    def keep(self, stacked: Tree, device: torch.device, folder: Path | None = None) -> Tree:
        """A stacked tree, put where it belongs. Raises as `repeat`."""
        if self.device != "disk":
            return tree.to(stacked, self._on(device))
        return tree.map(lambda leaf: self._mapped(leaf.shape, leaf.dtype, folder, lambda _: leaf), stacked)

    def _on(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if self.device == "cpu" else device

    @staticmethod
    def _mapped(
        shape: tuple[int, ...], dtype: torch.dtype, folder: Path | None, values: Callable[[Tensor], Tensor]
    ) -> Tensor:
        empty = torch.empty(shape, dtype=dtype, device="meta")
        if not empty.numel():
            return torch.empty(shape, dtype=dtype)
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".clients.") as file:
                # All of it now: a mapped write to a full disk would kill the process.
                os.posix_fallocate(file.fileno(), 0, empty.nbytes)
                mapped = torch.from_file(file.name, shared=True, size=empty.numel(), dtype=dtype).view(shape)
        except OSError as error:
            raise FedpflError(
                f"state.device=disk needs {empty.nbytes / 2**20:,.0f} MiB more in {folder or tempfile.gettempdir()}: "
                f"{error.strerror}; make room, or choose another place with hydra.run.dir=..."
            ) from None
        return mapped.copy_(values(mapped))
