"""MNIST (LeCun et al. 1998): 70,000 handwritten digits."""

from fedpfl.data.datasets.shared.idx import read_mnist_like
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source

# md5 and addresses as in torchvision.datasets.mnist
URLS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


def mnist(source: Source) -> Raw:
    """Read the original files, packed or not: uint8 `[28, 28]`, training then test."""
    return read_mnist_like(source, "MNIST/raw", URLS, MD5)
