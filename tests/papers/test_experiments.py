"""Every experiment composes into settings that its methods, models, data sets and partitions take."""

import functools
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedpfl.config.choices import list_choices
from fedpfl.config.group_options import read_partition_options
from fedpfl.config.resolution import resolve_config
from fedpfl.config.run_location import register_resolver, run_subdir
from fedpfl.config.schema import SETTINGS, Eval, ModelOptions, Settings
from fedpfl.data import datasets, partition
from fedpfl.engine import Local
from fedpfl.ground.checks import build_dataclass, checked_arguments
from fedpfl.ground.identity import identity
from fedpfl.methods import METHODS
from fedpfl.models import MODELS
from tests.command import read_table, run_command
from tests.conftest import ROOT, keep_only, keep_quick, read_cases

EXPERIMENTS = list_choices("experiment")
PAPERS = sorted(path.name for path in (ROOT / "conf/experiment").iterdir() if path.is_dir())
MOST = 8  # jobs of a sweep that are all composed; of larger ones each value once


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """Return the whole configuration, Hydra's own with it."""
    register_resolver()
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        return compose("train", overrides=list(overrides), return_hydra_config=True)


def resolved(*overrides: str) -> dict[str, Any]:
    return resolve_config(composed(*overrides))


def swept(cfg: DictConfig) -> dict[str, list[str]]:
    """Return the values of each key that an experiment sweeps over; of `glob(*)` all its names."""
    words = [f"{key}={value}" for key, value in (cfg.hydra.sweeper.params or {}).items()]
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        return {
            override.key_or_group: (
                list(override.sweep_string_iterator())
                if override.is_sweep_override()
                else [override.get_value_element_as_str()]
            )
            for override in parser.parse_overrides(words)
        }


@functools.cache
def jobs(name: str) -> list[list[str]]:
    """Overrides of the jobs of an experiment's sweep: all, or each value once."""
    values = swept(composed(f"experiment={name}"))
    words = [[f"{key}={value}" for value in own] for key, own in values.items()]
    if math.prod(map(len, words)) <= MOST:
        return [[f"experiment={name}", *job] for job in itertools.product(*words)]
    turns = 1 if "/figure" in name else max(map(len, words))
    return [
        [f"experiment={name}", *(own[turn % len(own)] for own in words)] for turn in range(turns)
    ]


def ends(name: str) -> list[list[str]]:
    """Overrides of the first and of the last job of an experiment's sweep."""
    values = swept(composed(f"experiment={name}"))
    return [
        [f"experiment={name}", *(f"{key}={own[at]}" for key, own in values.items())]
        for at in (0, -1)
    ]


def assert_fits(composed: DictConfig) -> None:
    """What was composed is what its method, network, data set and partition take."""
    cfg = resolve_config(composed)
    rest = {
        group: {k: v for k, v in cfg[group].items() if k != "name"} for group in ("method", "model")
    }
    build_dataclass(METHODS[cfg["method"]["name"]], rest["method"], "method")
    build_dataclass(Local, cfg["local"], "local")
    build_dataclass(Eval, cfg["eval"], "eval")
    build_dataclass(Settings, {key: cfg[key] for key in SETTINGS}, "")
    network = (MODELS[cfg["model"]["name"]], ModelOptions)
    checked_arguments(network, rest["model"], "model", provided_elsewhere=("shape", "classes"))
    read_partition_options(cfg)
    assert cfg["dataset"]["name"] in datasets.DATA_SETS


@pytest.mark.parametrize("name", keep_only(EXPERIMENTS, {"demo"}))
def test_an_experiment_composes(name):
    chosen = jobs(name)
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        for overrides in chosen:
            assert_fits(compose("train", overrides=overrides))


def test_an_experiment_says_how_to_run_it_and_is_listed():
    listed = (ROOT / "docs/experiments.md").read_text()
    for name in EXPERIMENTS:
        text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
        assert text.startswith("# @package _global_\n# "), name
        head = "\n".join(itertools.takewhile(lambda line: line[:1] == "#", text.splitlines()))
        assert re.search(rf"# Run: .*(experiment={name}\b|make \w+)", head), name
        assert f"`{name.partition('/')[2] or name}`" in listed, name


def test_every_paper_has_its_experiments_and_every_own_setting_its_method():
    folders = (ROOT / f"conf/{name}" for name in ("experiment", "paper", "debug"))
    text = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.yaml"))
    used = {*re.findall(r"^  - override /paper: (\w+)$", text, re.MULTILINE)}
    for value in re.findall(r"^      paper: (.*)$", text, re.MULTILINE):
        used |= {*value.split(",")}
    papers = {path.stem for path in (ROOT / "conf/paper").glob("*.yaml")}
    assert papers == used - {"null"}
    for path in (ROOT / "conf/paper/own").glob("*.yaml"):
        assert path.stem in {f"{paper}_{method}" for paper in papers for method in METHODS}
    for path in (ROOT / "conf/paper/split").glob("*.yaml"):
        dealt = itertools.product(papers, datasets.DATA_SETS, partition.SCHEMES)
        assert path.stem in {"_".join(names) for names in dealt}


@pytest.mark.parametrize("name", keep_quick(EXPERIMENTS, 2))
def test_what_sweeps_needs_no_option(name: str):
    cfg = composed(f"experiment={name}")
    several = any(len(values) > 1 for values in swept(cfg).values())
    assert cfg.hydra.mode == (RunMode.MULTIRUN if several else None)


SEEDS = {f"fedobp/{name}": 4 for name in ("table3", "table4", "figure2", "figure3")}
SEEDS |= dict.fromkeys(
    ("fedpurin/cifar100", "fedpurin/cifar10_ablation", "fedspu/speech", "fedspu/emnist_stopping"), 3
)


@pytest.mark.parametrize("name", keep_quick(SEEDS))
def test_full_experiments_run_as_many_seeds_as_the_paper_averages(name: str):
    seeds = swept(composed(f"experiment={name}")).get("seed", ["42"])
    assert len(set(seeds)) == len(seeds) == SEEDS[name]
    job = jobs(name)[0]
    assert len({identity(resolve_config(composed(*job, f"seed={seed}"))) for seed in seeds}) == 1


ADAPTED = {name for name, method in METHODS.items() if method.pairs}


@pytest.mark.parametrize(
    ("name", "without"),
    [("smoke", ADAPTED), ("fedobp/all_methods", {"fedfomo", "fedobp_adaptive"} | ADAPTED)],
)
def test_every_method_takes_part(name: str, without: set[str]):
    """But for those that need held-out samples, where all train on all, or an adapter."""
    assert swept(composed(f"experiment={name}"))["method"] == sorted(METHODS.keys() - without)


def test_experiments_of_a_paper_run_in_one_place() -> None:
    base = resolved("experiment=fedobp/table3", "dataset=fmnist", "method=fedavg")
    assert run_subdir(base, "fedobp/table3").startswith("fedobp/fedavg/")
    assert run_subdir(base, "fedobp/table3", "quick").startswith("fedobp_quick/fedavg/")
    assert run_subdir(base, "demo").startswith("demo/fedavg/")
    sweep = OmegaConf.to_container(composed("experiment=fedobp/table3").hydra.sweep, resolve=False)
    assert sweep == {"dir": "outputs", "subdir": "${fedpfl.run_subdir:}"}


@pytest.mark.full
def test_what_two_tables_share_is_one_run():
    base = ("dataset=fmnist", "partition.alpha=0.1", "method=fedobp")
    names = "table2, table4, figure2"
    keys = {
        identity(resolved(*f"experiment=fedobp/{words}".split(), *base))
        for words in names.split(", ")
    }
    assert len(keys) == 1


def test_the_default_is_the_papers_fedobp():
    """Table III's CIFAR100 cell at Dir(0.1) but for the split, by q of Table II and local SGD."""
    cfg = resolved("method=fedobp", "dataset=cifar100")
    assert [cfg["method"][key] for key in ("q", "score", "ema")] == [0.9998, "obp", 0.0]
    same = ("rounds", "clients", "participation", "local", "model")
    paper = resolved("experiment=fedobp/table3", "method=fedobp", "dataset=cifar100")
    assert {key: cfg[key] for key in same} == {key: paper[key] for key in same}
    assert cfg["local"]["momentum"] == 0.0


# In small


@pytest.mark.parametrize("name", keep_quick(EXPERIMENTS))
def test_in_small_every_experiment_is_one_of_digits(name: str) -> None:
    """Those of networks and splits that digits cannot have, too."""
    values = swept(composed(f"experiment={name}", "debug=quick"))
    assert (values["dataset"], values["seed"]) == (["digits"], ["42"])
    for at in (0, -1):
        words = (f"{key}={own[at]}" for key, own in values.items())
        cfg = composed(f"experiment={name}", "debug=quick", *words)
        assert_fits(cfg)
        assert (cfg.rounds, cfg.clients) <= (40, 20)
        assert cfg.dataset.mean == [0.3053]


@pytest.mark.full
@pytest.mark.parametrize("name", [f"{paper}/" for paper in PAPERS])
def test_a_paper_in_small_runs(name: str, tmp_path: Path) -> None:
    """A round of the first method of its last experiment."""
    name = [one for one in EXPERIMENTS if one.startswith(name)][-1]
    words = [f"experiment={name}", "debug=quick"]
    words += [f"{key}={values[0]}" for key, values in swept(composed(*words)).items()]
    small = ["rounds=1", "clients=4", "local.epochs=1", "eval.every=1", "eval.finetune_every=1"]
    small += ["hydra.run.dir=run", "hydra.mode=RUN"]
    assert run_command(*words, *small, cwd=tmp_path).code == 0
    assert read_table(tmp_path / "run/rounds.csv")[0]["accuracy"]


# Runs are found again

IDENTITIES = {
    name: (first, last)
    for name, first, last in read_cases((ROOT / "tests/papers/identities.txt").read_text(), " ")
}
"""Of the first and the last job of an experiment's sweep; a run of an earlier day is found again by
it.
"""


@pytest.mark.parametrize("name", keep_quick([*IDENTITIES], 2))
def test_the_jobs_of_an_experiment_are_the_same_as_ever(name: str) -> None:
    assert tuple(identity(resolved(*words)) for words in ends(name)) == IDENTITIES[name]


def test_no_experiment_of_a_paper_is_without_identities() -> None:
    assert set(IDENTITIES) == {name for name in EXPERIMENTS if "/" in name}
