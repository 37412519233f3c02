"""The family of methods whose clients keep some entries of the model, chosen by name, to
themselves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import Method
from fedpfl.models import Parts


@dataclass(frozen=True)
class PersonalByName(Method):
    """Lay a client's personal entries over the server's. A client that was never sampled has the
    initial ones.
    """

    _key: ClassVar[str] = "own"
    """The name of these entries in the client's state."""

    def _personal(self, parts: Parts) -> tuple[str, ...]:
        """Return the names of the parameters that never leave a client: by default the head."""
        return parts.head

    def init(self, params, parts):
        """Give the shared entries to the server, the personal ones to the client."""
        names = self._personal(parts)
        return tree.drop(params, names), {self._key: tree.select(params, names)}

    def start(self, received, client):
        """Return the latest shared entries beside the client's personal ones."""
        return {**received, **client[self._key]}

    def finish(self, server, client, start, params):
        """Send the shared entries up, keep the personal ones."""
        names = client[self._key]
        return tree.drop(params, names), {self._key: tree.select(params, names)}

    def _head_loss(self, server, client, net, params, batch):
        """Return the cross-entropy on the features of a frozen body, whose BatchNorm statistics do
        not move.
        """
        return batch.cross_entropy(self.predict(net.still(), params, batch))


def train_only(params: Tree, names: Collection[str]) -> Tree:
    """Return the mask of a phase in which the entries called so move."""
    return {name: name in names for name in params}


def train_all_but(params: Tree, names: Collection[str]) -> Tree:
    """Return the mask of a phase in which the entries called so hold still."""
    return {name: name not in names for name in params}


def top_layer_names(parts: Parts, layers: int) -> tuple[str, ...]:
    """Return the names in the last `layers` of a network. Raises FedpflError where it has fewer."""
    below = len(parts.layers) - layers
    if below < 0:
        raise FedpflError(
            f"method.layers must be at most {len(parts.layers)}, the network's layers, got {layers}"
        )
    if layers and below:
        _ = parts.head  # raises where it is not clear which layer is the last
    return tuple(name for layer in parts.layers[below:] for name in layer)
