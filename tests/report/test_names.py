"""Names for people: every method and data set has one, tables have the methods in their order."""

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


def test_a_method_without_a_place_stands_before_the_last_one(tmp_path, monkeypatch):
    for name in ("late", "zoo", "ant", "untitled"):
        text = f"name: {name}\n" + (f"title: {name.capitalize()}\n" if name != "untitled" else "")
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(names, "_CONF", tmp_path.parent)
    titles = names.read_titles(tmp_path.name, "zoo gone late")
    assert list(titles.items()) == [("zoo", "Zoo"), ("ant", "Ant"), ("late", "Late")]
    assert titles.get("untitled", "plain") == "plain"


def test_a_title_decides_nothing():
    cfg = overrides.compose_config(["method=fedprox", "dataset=mnist"])
    assert (cfg.method.title, cfg.dataset.title) == ("FedProx", "MNIST")
    resolved = resolve_config(cfg)
    assert "title" not in resolved["method"].keys() | resolved["dataset"].keys()
    other = OmegaConf.merge(cfg, {"method": {"title": "Other"}, "dataset": {"title": "Other"}})
    assert identity(resolve_config(other)) == identity(resolved)
