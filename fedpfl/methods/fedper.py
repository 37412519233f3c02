"""FedPer: shared body, personal top layers."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast
from fedpfl.methods.shared.by_name import ByName, top
from fedpfl.models import Parts


@dataclass(frozen=True)
class FedPer(ByName):
    """Federated learning with personalization layers (Arivazhagan et al., arXiv:1912.00818).

    layers: number of personal layers, counted from the output (the paper's K_P); 0 is FedAvg, all of them Local-Only.
    head_init: what a client that was never sampled has there: the `initial` head (the paper: personal layers never
        leave a client) or the `server_average` of uploaded ones (FL-bench; the personal layers then travel too).
    """

    layers: Annotated[int, AtLeast(0)] = 1
    head_init: Literal["initial", "server_average"] = "initial"

    _key: ClassVar[str] = "head"

    def _own(self, parts: Parts) -> tuple[str, ...]:
        return top(parts, self.layers)

    def init(self, params, parts):
        """Give the server a whole model, whose top layers keep their initial values unless they are averaged."""
        return params, super().init(params, parts)[1]

    def download(self, server, client):
        """Return the body (with averaged heads: everything)."""
        return server if self.head_init == "server_average" else tree.without(server, client["head"])

    def start(self, received, client):
        """Return the server's body under the client's head."""
        model = super().start(received, client)
        return model if self.head_init == "initial" else tree.where(client["participated"], model, received)

    def finish(self, server, client, start, end):
        """Send the body up (with averaged heads: everything), keep the head."""
        body, kept = super().finish(server, client, start, end)
        return end if self.head_init == "server_average" else body, kept

    def aggregate(self, server, clients, uploads, weight):
        """Average what came."""
        return {**server, **tree.mean(uploads, weight)}, clients
