"""OrganAMNIST of MedMNIST: 28 x 28 pixels of abdominal CT, axial view, eleven organs."""

from fedpfl.data.datasets.shared.archive import MedMNIST

# md5 and address as in medmnist/info.py: release 3 (a few images fewer), then release 2
organamnist = MedMNIST(
    "https://zenodo.org/records/10519652/files/organamnist.npz?download=1",
    ("68e3f8846a6bd62f0c9bf841c0d9eacc", "866b832ed4eeba67bfb9edee1d5544e6"),
)
