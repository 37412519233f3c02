"""Methods with personal entries, chosen by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Known, Tree
from fedpfl.methods.shared.method import Method, Phase
from fedpfl.models import Parts


@dataclass(frozen=True)
class PersonalByName(Method):
    """Lay a client's personal entries, chosen by name, over the server's.

    A client that was never sampled has the initial ones, or, where all entries are averaged, the
    server's.
    """

    _key: ClassVar[str] = "own"
    """The name of these entries in the client's state."""

    def _personal(self, parts: Parts) -> tuple[str, ...]:
        """Return the names of the parameters that never leave a client (the head's)."""
        return parts.head

    @property
    def _averages_all(self) -> bool:
        """Whether personal entries travel and are averaged too, for clients never sampled."""
        return False

    def init(self, params, parts):
        """Give the shared entries to the server, the personal ones to the client."""
        names = self._personal(parts)
        personal = tree.select(params, names)
        server = params if self._averages_all else tree.drop(params, names)
        return server, {self._key: personal}

    def start(self, received, client):
        """Return the latest shared entries beside the client's personal ones."""
        model = {**received, **client[self._key]}
        # FL-bench's cold start: until its first participation a client has the averaged entries.
        if self._averages_all:
            model = tree.where(client["participated"], model, received)
        return model

    def finish(self, server, client, start, params):
        """Send the shared entries up, keep the personal ones."""
        names = client[self._key]
        personal = tree.select(params, names)
        upload = params if self._averages_all else tree.drop(params, names)
        return upload, {self._key: personal}

    def _head_loss(self, server, client, net, params, batch):
        """Return the cross-entropy on the features of a frozen body.

        The body's BatchNorm layers use their running statistics and do not move them.
        """
        frozen_statistics = net.still()
        return batch.loss(self.predict(frozen_statistics, params, batch))


@dataclass(frozen=True)
class PersonalInit(PersonalByName):
    """Let a client that was never sampled begin from the averaged model, as FL-bench does.

    personal_init: its personal entries: the `initial` ones (the papers: they never leave a client)
        or the `server_average` of uploaded ones (FL-bench; they then travel too).
    """

    personal_init: Literal["initial", "server_average"] = "initial"

    @property
    def _averages_all(self) -> bool:
        """Whether personal entries travel and are averaged too."""
        return self.personal_init == "server_average"


@dataclass(frozen=True)
class FixedByName(Method):
    """Train and average some entries; all clients have the rest from the beginning."""

    mixes_samples = ""
    server_sees = "mean of uploads"

    _trained_key: ClassVar[str] = "model"
    """The name of the trained entries in the server's state."""
    _fixed_key: ClassVar[str] = "fixed"
    """The name of the other ones."""

    @abstractmethod
    def _fixed(self, parts: Parts) -> Sequence[str]:
        """Return the names of the parameters that never move."""

    def init(self, params, parts):
        """Set apart what never moves, so that nothing can average it."""
        fixed = tree.select(params, self._fixed(parts))
        return {self._trained_key: tree.drop(params, fixed), self._fixed_key: fixed}, {}

    def download(self, server, client):
        """Return the trained entries; the rest was known from the beginning."""
        return {**server, self._fixed_key: Known(server[self._fixed_key])}

    def start(self, received, client):
        """Return the latest trained entries beside the fixed ones."""
        return {**received[self._trained_key], **received[self._fixed_key]}

    def phases(self, server, client, params, epochs):
        """Move all but the fixed entries."""
        return [Phase(epochs, train_only(params, server[self._trained_key]))]

    def finish(self, server, client, start, params):
        """Send up what moved."""
        return tree.select(params, server[self._trained_key]), client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average what moved."""
        return {**server, self._trained_key: tree.mean(uploads, weight)}, clients


def train_only(params: Tree, names: Collection[str]) -> Tree:
    """Return the mask of a phase in which only the entries with these names move."""
    return {name: name in names for name in params}


def train_all_but(params: Tree, names: Collection[str]) -> Tree:
    """Return the mask of a phase in which all entries but these move."""
    return {name: name not in names for name in params}


def top_layer_names(parts: Parts, layers: int) -> tuple[str, ...]:
    """Return the names of the parameters in the last `layers` of a network.

    Raises:
        FedpflError: where the network has fewer layers, or it is not clear which one is the last.
    """
    depth = len(parts.layers)
    lower_layers = depth - layers
    if lower_layers < 0:
        raise FedpflError(
            f"method.layers must be at most {depth}, the network's layers, got {layers}"
        )
    if 0 < layers < depth:
        _ = parts.head  # raises where it is not clear which layer is the last
    return tuple(name for layer in parts.layers[lower_layers:] for name in layer)
