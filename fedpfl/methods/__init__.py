"""Federated methods: one file per method or close family, and the registry of their names."""

from fedpfl.methods.apfl import APFL
from fedpfl.methods.base import Batch, Method, Phase, mean_cross_entropy
from fedpfl.methods.ditto import Ditto
from fedpfl.methods.fedala import FedALA
from fedpfl.methods.fedavg import FedAvg
from fedpfl.methods.fedbabu import FedBABU
from fedpfl.methods.feddpa import FedDPA
from fedpfl.methods.fedobp import FedOBP
from fedpfl.methods.fedpac import FedPAC
from fedpfl.methods.fedper import FedPer
from fedpfl.methods.fedprox import FedProx
from fedpfl.methods.fedrod import FedRoD
from fedpfl.methods.floco import Floco
from fedpfl.methods.flute import FLUTE
from fedpfl.methods.local_only import LocalOnly
from fedpfl.methods.partial import FedBN, FedRep, LGFedAvg
from fedpfl.methods.per_fedavg import PerFedAvg
from fedpfl.methods.pfedfda import PFedFDA
from fedpfl.methods.pfedme import PFedMe
from fedpfl.methods.scaffold import Scaffold

METHODS: dict[str, type[Method]] = {
    "apfl": APFL,
    "ditto": Ditto,
    "fedala": FedALA,
    "fedavg": FedAvg,
    "fedbabu": FedBABU,
    "fedbn": FedBN,
    "feddpa": FedDPA,
    "fedobp": FedOBP,
    "fedpac": FedPAC,
    "fedper": FedPer,
    "fedprox": FedProx,
    "fedrep": FedRep,
    "fedrod": FedRoD,
    "floco": Floco,
    "flute": FLUTE,
    "lg_fedavg": LGFedAvg,
    "local_only": LocalOnly,
    "per_fedavg": PerFedAvg,
    "pfedfda": PFedFDA,
    "pfedme": PFedMe,
    "scaffold": Scaffold,
}

__all__ = [
    "APFL",
    "FLUTE",
    "METHODS",
    "Batch",
    "Ditto",
    "FedALA",
    "FedAvg",
    "FedBABU",
    "FedBN",
    "FedDPA",
    "FedOBP",
    "FedPAC",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedRoD",
    "Floco",
    "LGFedAvg",
    "LocalOnly",
    "Method",
    "PFedFDA",
    "PFedMe",
    "PerFedAvg",
    "Phase",
    "Scaffold",
    "mean_cross_entropy",
]
