"""OrganCMNIST of MedMNIST: 28 x 28 pixels of abdominal CT, coronal view, eleven organs."""

from fedpfl.data.datasets.shared.archive import MedMNIST

# md5 and address as in medmnist/info.py: release 3 (a few images fewer), then release 2
organcmnist = MedMNIST(
    "https://zenodo.org/records/10519652/files/organcmnist.npz?download=1",
    ("b9ceb9546e10131b32923c5bbeaea2b1", "0afa5834fb105f7705a7d93372119a21"),
)
