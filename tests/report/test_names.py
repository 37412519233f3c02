"""Names for people: every method and data set has one, which decides nothing."""

from fedpfl.data import datasets
from fedpfl.methods import METHODS
from fedpfl.report import names


def test_every_method_and_data_set_has_a_title():
    assert set(names.METHOD_TITLES) == set(METHODS)
    assert set(names.DATASET_TITLES) == set(datasets.DATA_SETS) - {"npz"}  # named after its file
    assert (names.METHOD_TITLES["lg_fedavg"], names.DATASET_TITLES["cifar10_c"]) == (
        "LG-FedAvg",
        "CIFAR10-C",
    )
