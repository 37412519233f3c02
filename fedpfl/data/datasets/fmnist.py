"""FashionMNIST (Xiao et al. 2017): 70,000 articles of clothing, in MNIST's form."""

from fedpfl.data.datasets.shared.idx import read_mnist_like
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source

# md5 and addresses as in torchvision.datasets.mnist
URLS = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}


def fmnist(source: Source) -> Raw:
    """Read the original files, packed or not: uint8 `[28, 28]`, training then test."""
    return read_mnist_like(source, "FashionMNIST/raw", URLS, MD5)
