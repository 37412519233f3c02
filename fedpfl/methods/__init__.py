"""Federated methods: one file per method or close family, and the registry of their names."""

from fedpfl.methods.base import Batch, Method, Phase, mean_cross_entropy
from fedpfl.methods.ditto import Ditto
from fedpfl.methods.fedavg import FedAvg
from fedpfl.methods.fedbabu import FedBABU
from fedpfl.methods.fedobp import FedOBP
from fedpfl.methods.fedper import FedPer
from fedpfl.methods.fedprox import FedProx
from fedpfl.methods.local_only import LocalOnly
from fedpfl.methods.partial import FedBN, FedRep, LGFedAvg
from fedpfl.methods.scaffold import Scaffold

METHODS: dict[str, type[Method]] = {
    "ditto": Ditto,
    "fedavg": FedAvg,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "fedobp": FedOBP,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "lg_fedavg": LGFedAvg,
    "local_only": LocalOnly,
    "scaffold": Scaffold,
}

__all__ = [
    "METHODS",
    "Batch",
    "Ditto",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedOBP",
    "FedPer",
    "FedProx",
    "FedRep",
    "LGFedAvg",
    "LocalOnly",
    "Method",
    "Phase",
    "Scaffold",
    "mean_cross_entropy",
]
