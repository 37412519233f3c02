"""FedCAC: the entries that changed most for their size are averaged over those clients alone that are alike."""

from dataclasses import dataclass

from fedpfl.ground import tree
from fedpfl.ground.tree import Agreed
from fedpfl.methods.shared.critical import Critical, alone


@dataclass(frozen=True)
class FedCAC(Critical):
    """FedCAC (Wu et al., ICCV 2023, arXiv:2309.11103): s = |(theta - theta_start) theta|, of all parameters.

    Models are uploaded whole, with a bit per entry; tau = 0 is FedAvg. Defaults of the paper for CIFAR10.
    The code has a second constant (1e-20) beside the cut-off, with which masks can exceed tau; here it is the same.
    """

    def _scores(self, client, start, end):
        return tree.map(lambda old, new: ((new - old) * new).abs(), start, end)

    def download(self, server, client):
        """Return everything; to a client without collaborators, what was not critical."""
        return Agreed(server["model"], tree.invert(alone(client)))
