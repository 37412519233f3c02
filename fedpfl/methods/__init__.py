"""Federated methods: one file per method or close family, and the registry of their names."""

from fedpfl.methods.base import Batch, Method, Phase, mean_cross_entropy
from fedpfl.methods.ditto import Ditto
from fedpfl.methods.fedavg import FedAvg
from fedpfl.methods.fedobp import FedOBP
from fedpfl.methods.fedper import FedPer
from fedpfl.methods.local_only import LocalOnly

METHODS: dict[str, type[Method]] = {
    "ditto": Ditto,
    "fedavg": FedAvg,
    "fedobp": FedOBP,
    "fedper": FedPer,
    "local_only": LocalOnly,
}

__all__ = [
    "METHODS",
    "Batch",
    "Ditto",
    "FedAvg",
    "FedOBP",
    "FedPer",
    "LocalOnly",
    "Method",
    "Phase",
    "mean_cross_entropy",
]
