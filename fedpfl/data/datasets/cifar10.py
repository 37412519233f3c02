"""CIFAR-10 (Krizhevsky 2009): 60,000 colour images of 10 classes."""

from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source
from fedpfl.data.datasets.shared.vision import read_cifar
from fedpfl.ground.vision import load_torchvision


def cifar10(source: Source) -> Raw:
    """Read the archive, or its folder where it is unpacked: uint8 `[3, 32, 32]`, training then
    test.
    """
    return read_cifar(source, load_torchvision().CIFAR10)
