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
from fedpfl.config.plan import _partition_options, register_resolver, resolve_config, run_subdir
from fedpfl.config.schema import SETTINGS, Eval, ModelOptions, Settings
from fedpfl.data import datasets, partition
from fedpfl.engine import Local
from fedpfl.ground.checks import build_dataclass, checked_arguments
from fedpfl.ground.identity import identity
from fedpfl.methods import METHODS
from fedpfl.models import MODELS
from tests.command import read_table, run_command
from tests.conftest import ROOT, keep_quick

EXPERIMENTS = list_choices("experiment")
PAPERS = sorted(path.name for path in (ROOT / "conf/experiment").iterdir() if path.is_dir())
MOST = 8  # jobs of a sweep that are all composed; of larger ones each value once


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """The whole configuration, Hydra's own with it."""
    register_resolver()
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        return compose("train", overrides=list(overrides), return_hydra_config=True)


def resolved(*overrides: str) -> dict[str, Any]:
    """The plain values of a configuration."""
    return resolve_config(composed(*overrides))


def swept(cfg: DictConfig) -> dict[str, list[str]]:
    """The values of each key that an experiment sweeps over; for `glob(*)` all that it stands for."""
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        return {
            override.key_or_group: (
                list(override.sweep_string_iterator())
                if override.is_sweep_override()
                else [override.get_value_element_as_str()]
            )
            for override in parser.parse_overrides(
                [f"{k}={v}" for k, v in (cfg.hydra.sweeper.params or {}).items()]
            )
        }


@functools.cache
def jobs(name: str) -> list[list[str]]:
    """Overrides of the jobs of an experiment's own sweep: all, or so many that each value occurs;
    of twins one.
    """
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
    _partition_options(cfg)
    assert cfg["dataset"]["name"] in datasets.DATA_SETS


@pytest.mark.parametrize("name", keep_quick(EXPERIMENTS, 2))
def test_an_experiment_composes(name):
    """The ends of its sweep."""
    assert_compose(jobs(name)[:: max(1, len(jobs(name)) - 1)])


@pytest.mark.full
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_of_an_experiment_composes(name):
    assert_compose(jobs(name))


def assert_compose(chosen: list[list[str]]) -> None:
    """Each of these jobs fits."""
    register_resolver()
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        for overrides in chosen:
            assert_fits(compose("train", overrides=overrides))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_how_to_run_it_and_is_listed(name):
    text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    head = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    assert re.search(rf"# Run: .*(experiment={name}\b|make \w+)", head)
    assert f"`{name.partition('/')[2] or name}`" in (ROOT / "docs/experiments.md").read_text()


def test_every_paper_has_its_experiments_and_every_own_setting_its_method():
    texts = [
        path.read_text()
        for name in ("experiment", "paper", "debug")
        for path in (ROOT / f"conf/{name}").rglob("*.yaml")
    ]
    used = {
        name
        for text in texts
        for name in re.findall(r"^  - override /paper: (\w+)$", text, re.MULTILINE)
    }
    used |= {
        name
        for text in texts
        for value in re.findall(r"^      paper: (.*)$", text, re.MULTILINE)
        for name in value.split(",")
    }
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


@pytest.mark.parametrize("name", keep_quick(SEEDS, 2))
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
    assert OmegaConf.to_container(
        composed("experiment=fedobp/table3").hydra.sweep, resolve=False
    ) == {
        "dir": "outputs",
        "subdir": "${fedpfl.run_subdir:}",
    }


def test_what_two_tables_share_is_one_run():
    base = ("dataset=fmnist", "partition.alpha=0.1", "method=fedobp")
    keys = {
        identity(resolved(f"experiment=fedobp/{name}", *base, *more))
        for name, *more in (
            ("paper",),
            ("table2",),
            ("table4",),
            ("figure2",),
            ("one_momentum", "local.momentum=0.0"),
            ("q_sweep", "quantile.q=0.99993"),
            ("all_methods",),
        )
    }
    assert len(keys) == 1


def test_what_was_run_with_momentum_keeps_its_identity():
    """It is hashed, so that a run of the time when 0.7 was the default is no other one's."""
    former = "method=fedobp", "dataset=fmnist", "partition.alpha=0.1", "local.momentum=0.7"
    assert identity(resolved("experiment=fedobp/paper", *former)) == "44f56df280"
    assert identity(resolved("experiment=fedobp/paper", *former[:-1])) != "44f56df280"


def test_the_default_is_the_papers_fedobp():
    """Table III's CIFAR100 cell at Dir(0.1) but for the split, by q of Table II and local SGD."""
    cfg = resolved("method=fedobp", "dataset=cifar100")
    assert (cfg["method"]["q"], cfg["method"]["score"], cfg["method"]["ema"]) == (
        0.9998,
        "obp",
        0.0,
    )
    same = ("rounds", "clients", "participation", "local", "model")
    paper = resolved("experiment=fedobp/table3", "method=fedobp", "dataset=cifar100")
    assert {key: cfg[key] for key in same} == {key: paper[key] for key in same}
    assert cfg["local"]["momentum"] == 0.0


# In small


@pytest.mark.parametrize("name", keep_quick(EXPERIMENTS, 2))
def test_in_small_every_experiment_is_one_of_digits(name: str) -> None:
    """Those of networks and splits that digits cannot have, too."""
    values = swept(composed(f"experiment={name}", "debug=quick"))
    assert (values["dataset"], values["seed"]) == (["digits"], ["42"])
    for at in (0, -1):
        cfg = composed(
            f"experiment={name}",
            "debug=quick",
            *(f"{key}={own[at]}" for key, own in values.items()),
        )
        assert_fits(cfg)
        assert (cfg.rounds, cfg.clients) <= (40, 20)
        assert cfg.dataset.mean == [0.3053]


@pytest.mark.parametrize("name", keep_quick([f"{paper}/" for paper in PAPERS]))
def test_a_paper_in_small_runs(name: str, tmp_path: Path) -> None:
    """A round of the first method of its last experiment."""
    name = [one for one in EXPERIMENTS if one.startswith(name)][-1]
    words = [f"experiment={name}", "debug=quick"]
    words += [f"{key}={values[0]}" for key, values in swept(composed(*words)).items()]
    small = [
        *("rounds=1", "clients=4", "local.epochs=1", "eval.every=1", "hydra.run.dir=run"),
        "hydra.mode=RUN",
    ]
    assert run_command(*words, *small, "eval.finetune_every=1", cwd=tmp_path).code == 0
    assert read_table(tmp_path / "run/rounds.csv")[0]["accuracy"]


# Names


# Runs are found again

IDENTITIES = {
    "adapters/cifar100": ("0da1bdea33", "04f882df42"),
    "fedobp/all_methods": ("bf776b87ad", "5a4ea461a4"),
    "fedobp/alpha_sweep": ("5bf27c362f", "8057442310"),
    "fedobp/as_published": ("645aa8390c", "f06cc6e9f2"),
    "fedobp/figure2": ("7ed05ecdc2", "94a2f8eadc"),
    "fedobp/figure3": ("3636c25aa8", "7086d9defa"),
    "fedobp/figure4": ("f7d1e6096d", "b3583ae255"),
    "fedobp/figure4_as_published": ("0644c5e3f4", "aa20ffb587"),
    "fedobp/figure4_mnist": ("b8dafb120c", "0863fe223a"),
    "fedobp/figure4_mnist_as_published": ("97d2c8117d", "916d6d42cd"),
    "fedobp/figure5": ("342b70ed58", "4f40e09d11"),
    "fedobp/figure6": ("847d93fe41", "852609e1b5"),
    "fedobp/figure7": ("f7d1e6096d", "c2992c6941"),
    "fedobp/fmnist_as_published": ("5a627f105f", "5a627f105f"),
    "fedobp/fmnist_dir01": ("8a7987a491", "501a5019a5"),
    "fedobp/one_momentum": ("c93be2cfd8", "8524c2d81b"),
    "fedobp/paper": ("8a7987a491", "8a7987a491"),
    "fedobp/q_sweep": ("2b76146313", "2f8c798eef"),
    "fedobp/table2": ("94757f4b08", "7086d9defa"),
    "fedobp/table3": ("7ed05ecdc2", "dd32b386b6"),
    "fedobp/table4": ("98564341ed", "7086d9defa"),
    "fedobp/table4_as_published": ("251e4cd5ea", "806ec376d1"),
    "fedobp/table5": ("342b70ed58", "3da90c7f79"),
    "fedobp/table5_cls": ("d2e77271db", "bb6416ffef"),
    "fedobp/table5_ema": ("3088105878", "90df8633b7"),
    "fedpurin/cifar10": ("34c709670f", "c4fea56e43"),
    "fedpurin/cifar100": ("ca9992c4e0", "bd903db8d4"),
    "fedpurin/cifar100_ablation": ("ca9992c4e0", "aa3f2a307e"),
    "fedpurin/cifar10_ablation": ("34c709670f", "ed646d4388"),
    "fedpurin/fmnist": ("beade8c444", "5455487c2c"),
    "fedpurin/fmnist_ablation": ("beade8c444", "5ef5699cbd"),
    "fedpurin/norm": ("34c709670f", "39252abf5c"),
    "fedpurin/tau": ("48cdb8129c", "3ce32d8e7f"),
    "fedselect/ablation": ("15c987a6ea", "737f56a5e7"),
    "fedselect/alpha": ("efc7679314", "5e46cf1ac5"),
    "fedselect/cifar10": ("f0b2bfccf2", "876d955805"),
    "fedselect/cifar10c": ("9be52d4342", "3e46da7301"),
    "fedselect/mini_imagenet": ("0cfda05366", "05748778e0"),
    "fedselect/office_home": ("84f0cab02e", "b8b26a2950"),
    "fedselect/sizes": ("d833e74433", "b946d2c73e"),
    "fedspu/cifar10": ("0a5c4021da", "b748ff0b33"),
    "fedspu/cifar10_stopping": ("508e58d46d", "4881e19338"),
    "fedspu/emnist": ("5d8c252a99", "2307671b29"),
    "fedspu/emnist_stopping": ("57467dee00", "a0903f7996"),
    "fedspu/speech": ("4eb588f1fa", "6dd7fa88ad"),
    "fedspu/speech_stopping": ("e913aac142", "b00b7af60f"),
    "subflot/ablation": ("4a90e32503", "cf2e3142bd"),
    "subflot/ablation_digit5": ("b00e34270d", "8f5dfcc8b4"),
    "subflot/ag_news": ("f213d4d279", "ad4473a234"),
    "subflot/cifar10": ("66d2661a20", "0c1bb2208f"),
    "subflot/cifar100": ("16b16ee4bf", "8ea7d28ee9"),
    "subflot/digit5": ("e055f66fd3", "562327b5c5"),
    "subflot/har": ("ac57bcd3eb", "17ce53b1bc"),
    "subflot/pacs": ("723891aae6", "f4946d1cdc"),
    "subflot/scalability": ("910d5b727e", "2caa039ed6"),
    "subflot/tiny_imagenet": ("0faf94daa8", "2509fa66b5"),
}
"""Of the first and the last job of an experiment's sweep; a run of an earlier day is found again by
it.
"""


@pytest.mark.parametrize("name", keep_quick([*IDENTITIES], 2))
def test_the_jobs_of_an_experiment_are_the_same_as_ever(name: str) -> None:
    assert tuple(identity(resolved(*words)) for words in ends(name)) == IDENTITIES[name]


def test_no_experiment_of_a_paper_is_without_identities() -> None:
    assert set(IDENTITIES) == {name for name in EXPERIMENTS if "/" in name}
