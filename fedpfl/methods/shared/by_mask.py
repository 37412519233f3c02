"""Methods with personal entries, chosen one by one."""

from dataclasses import dataclass
from typing import ClassVar

from fedpfl.ground import tree
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class PersonalByMask(Method):
    """Lay a client's personal entries over the server's, where `client["mask"]` holds.

    `prepare` puts the mask there. It is element-wise and has the names of the tensors in which
    something can be personal.
    """

    _key: ClassVar[str] = "model"
    """The name of the model, in the client's state, that they come from."""

    def start(self, received, client):
        """Return the personal entries of the client's model within those of the server's."""
        mask = client["mask"]
        received_part = tree.select(received, mask)
        mixture = tree.where(mask, client[self._key], received_part)
        return {**received, **mixture}

    def masks(self, server, client):
        """Return the mask that the client would enter the next round with."""
        return self.prepare(server, client)["mask"]

    def metrics(self, server, client):
        """Count the personal entries of each tensor, and return their share of all entries."""
        mask = client["mask"]
        personal = tree.ravel(mask).sum().double()
        counts = {f"personal/{name}": leaf.sum() for name, leaf in mask.items()}
        return {"personal_share": personal / tree.size(server), **counts}
