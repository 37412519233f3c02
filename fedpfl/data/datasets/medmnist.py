"""MedMNIST's two-dimensional data sets (Yang et al. 2023), by name: 28 x 28 pixels."""

from __future__ import annotations

from fedpfl.data.datasets.shared.archive import MedMNIST
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source
from fedpfl.ground.errors import FedpflError, choices_text

URL = "https://zenodo.org/records/10519652/files/{}.npz?download=1"
# md5 as in medmnist/info.py: release 3, then release 2 where it differs
MD5 = {
    "pathmnist": ("a8b06965200029087d5bd730944a56c1",),
    "chestmnist": ("02c8a6516a18b556561a56cbdd36c4a8",),
    "dermamnist": ("0744692d530f8e62ec473284d019b0c7",),
    "octmnist": ("c68d92d5b585d8d81f7112f81e2d0842",),
    "pneumoniamnist": ("28209eda62fecd6e6a2d98b1501bb15f",),
    "retinamnist": ("bd4c0672f1bba3e3a89f0e4e876791e4",),
    "breastmnist": ("750601b1f35ba3300ea97c75c52ff8f6",),
    "bloodmnist": ("7053d0359d879ad8a5505303e11de1dc",),
    "tissuemnist": ("ebe78ee8b05294063de985d821c1c34b",),
    "organamnist": ("68e3f8846a6bd62f0c9bf841c0d9eacc", "866b832ed4eeba67bfb9edee1d5544e6"),
    "organcmnist": ("b9ceb9546e10131b32923c5bbeaea2b1", "0afa5834fb105f7705a7d93372119a21"),
    "organsmnist": ("9ab87b696fb54e2a387ebe992d6ed5f1", "e5c39f1af030238290b9557d9503af9d"),
}


def medmnist(source: Source, subset: str = "pathmnist") -> Raw:
    """Read training, validation and test part; chestmnist has several labels per image."""
    if subset not in MD5:
        raise FedpflError(f"dataset.subset must be {choices_text(MD5, subset)}")
    return MedMNIST(URL.format(subset), MD5[subset])(source._replace(name=subset))
