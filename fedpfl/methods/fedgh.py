"""FedGH: the server trains one head for all on the mean features of clients' classes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedpfl.ground.ranges import Count, Positive, WholeNumber
from fedpfl.methods.shared.by_name import PersonalByName
from fedpfl.methods.shared.prototypes import average_by_class, fit_to_uploads, mask_absent


@dataclass(frozen=True)
class FedGH(PersonalByName):
    """FedGH (Yi et al., ACM Multimedia 2023, arXiv:2303.13137).

    A client trains its body under the server's head, everything on CE, and sends for each of its
    classes c the mean features R_c of its trained body, in a separate pass. The server trains the
    head on the pairs (R_c, c) of the cohort; the heads that clients trained are dropped. Bodies may
    be of any kind, and a client's body never leaves it, with its BatchNorm statistics.

    server_epochs, server_batch, server_lr: plain SGD of the server, over the pairs in random order.
        The paper goes over them once, one by one; HtFLlib a hundred times in batches of 10. In the
        official code the server's optimizer holds the last client's network, so that the head that
        is sent never moves.
    """

    server_epochs: WholeNumber = 1
    server_batch: Count = 1
    server_lr: Positive = 0.01

    _key: ClassVar[str] = "body"

    needs_classes = "it averages features by class"
    server_sees = "each upload"
    takes_kinds = True

    def init(self, params, parts):
        """Give the head to the server, the body to the client."""
        parts.require_linear_end()
        return super().init(params, parts)

    def buffers(self):
        """Keep statistics on the client."""
        return {"main": "local"}

    def _personal(self, parts):
        """Return the names of the body's parameters."""
        return parts.body

    def after_training(self, server, client, net, params, shard, aux):
        """Return the mean features of the client's classes."""
        head_weight = next(iter(server.values()))
        z = shard.features(net, params)
        return average_by_class(z, shard.data.y, torch.zeros_like(head_weight))

    def finish(self, server, client, start, params):
        """Send the prototypes up, keep the body."""
        _, state = super().finish(server, client, start, params)
        return mask_absent(client), state

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Train the head on the prototypes."""

        def loss(head, z, y):
            return F.cross_entropy(F.linear(z, *head.values()), y)

        return fit_to_uploads(self, loss, server, uploads, generator), clients
