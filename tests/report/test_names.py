"""Names for people: every method and data set has one, which decides nothing."""

from omegaconf import OmegaConf

from fedpfl.config import overrides
from fedpfl.config.resolution import resolve_config
from fedpfl.data import datasets
from fedpfl.ground.identity import identity
from fedpfl.methods import METHODS
from fedpfl.report import names


def test_every_method_and_data_set_has_a_title():
    assert set(names.METHOD_TITLES) == set(METHODS)
    assert set(names.DATASET_TITLES) == set(datasets.DATA_SETS) - {"npz"}  # named after its file
    assert (names.METHOD_TITLES["lg_fedavg"], names.DATASET_TITLES["cifar10_c"]) == (
        "LG-FedAvg",
        "CIFAR10-C",
    )


def test_a_title_decides_nothing():
    cfg = overrides.compose_config(["method=fedprox", "dataset=mnist"])
    assert (cfg.method.title, cfg.dataset.title) == ("FedProx", "MNIST")
    resolved = resolve_config(cfg)
    assert "title" not in resolved["method"].keys() | resolved["dataset"].keys()
    other = OmegaConf.merge(cfg, {"method": {"title": "Other"}, "dataset": {"title": "Other"}})
    assert identity(resolve_config(other)) == identity(resolved)
