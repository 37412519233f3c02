"""Methods with a small network that all clients have beside their own, and that alone travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import Method
from fedpfl.models import Parts


@dataclass(frozen=True)
class CommonBeside(Method):
    """Average the common network; all else that a client trains stays with it."""

    _kept: ClassVar[tuple[str, ...]] = ("model",)
    """The names of that in the client's state."""

    def init(self, params, parts):
        """Give the common network to the server, the client's own to the client.

        Raises:
            FedpflError: there is no common network.
        """
        if not parts.common:
            name = type(self).__name__
            raise FedpflError(
                f"method={name.lower()} is about a common network beside each client's own; choose"
                " model=mixed model.common=NAME, such as mlp"
            )
        return {"common": parts.common}, self._make_own(params, parts)

    def _make_own(self, params: Tree, parts: Parts) -> dict[str, Tree]:
        """Return the entries that a client trains and keeps."""
        return {"model": params}

    def buffers(self):
        """Keep the own network's BatchNorm statistics on the client; the common one has none."""
        return {"main": "local"}

    def start(self, received, client):
        """Return the received network beside the client's own."""
        return {"common": received["common"], **tree.select(client, self._kept)}

    def finish(self, server, client, start, params):
        """Send the common network up, keep the rest."""
        return params["common"], tree.drop(params, ("common",))

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average the common networks."""
        return {**server, "common": tree.mean(uploads, weight)}, clients
