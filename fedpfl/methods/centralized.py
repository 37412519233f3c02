"""Centralized: one model on pooled samples, an upper line for federated methods."""

from dataclasses import dataclass
from typing import ClassVar

from fedpfl.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Centralized(FedAvg):
    """Train one model on all clients' samples, and test it at each client.

    A round takes as many steps as its cohort would under FedAvg, one after another, on minibatches
    of all samples. Nothing is private, and no model travels. With one client it is Local-Only.
    """

    pools_samples: ClassVar[bool] = True
