"""Every experiment composes into settings that its methods, models, data sets and partitions take."""

import functools
import itertools
import math
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fedpfl.config.checks import arguments, typed
from fedpfl.config.plan import _partition, register, resolve
from fedpfl.config.schema import SETTINGS, Eval, Settings, Start
from fedpfl.data import datasets, partition
from fedpfl.engine import Local
from fedpfl.ground.identity import identity
from fedpfl.methods import METHODS
from fedpfl.models import MODELS
from tests.command import call, table
from tests.conftest import ROOT, sampled

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf/experiment").glob("*.yaml"))
QUICK = [name for name in EXPERIMENTS if name.endswith("_quick")]
MOST = 8  # jobs of a sweep that are all composed; of larger ones each value once


def composed(*overrides: str) -> DictConfig:
    """The whole configuration, Hydra's own with it."""
    register()
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        return compose("train", overrides=list(overrides), return_hydra_config=True)


def swept(cfg: DictConfig) -> dict[str, list[str]]:
    """The values of each key that an experiment sweeps over; for `glob(*)` all that it stands for."""
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        return {
            override.key_or_group: list(override.sweep_string_iterator())
            if override.is_sweep_override()
            else [override.get_value_element_as_str()]
            for override in parser.parse_overrides([f"{k}={v}" for k, v in (cfg.hydra.sweeper.params or {}).items()])
        }


@functools.cache
def jobs(name: str) -> list[list[str]]:
    """Overrides of the jobs of an experiment's own sweep: all, or so many that each value occurs; of twins one."""
    values = swept(composed(f"experiment={name}"))
    choices = [[f"{key}={value}" for value in own] for key, own in values.items()]
    if math.prod(map(len, choices)) <= MOST:
        return [[f"experiment={name}", *job] for job in itertools.product(*choices)]
    turns = 1 if name.startswith("figure") or name in QUICK else max(map(len, choices))
    return [[f"experiment={name}", *(values[turn % len(values)] for values in choices)] for turn in range(turns)]


def assert_fits(composed: DictConfig) -> None:
    """What was composed is what its method, network, data set and partition take."""
    cfg = resolve(composed)
    rest = {group: {k: v for k, v in cfg[group].items() if k != "name"} for group in ("method", "model")}
    typed(METHODS[cfg["method"]["name"]], rest["method"], "method")
    typed(Local, cfg["local"], "local")
    typed(Eval, cfg["eval"], "eval")
    typed(Settings, {key: cfg[key] for key in SETTINGS}, "")
    network = (MODELS[cfg["model"]["name"]], Start)
    arguments(network, rest["model"], "model", given=("shape", "classes"))
    _partition(cfg)
    assert cfg["dataset"]["name"] in datasets.SETS


@pytest.mark.parametrize("name", sampled(EXPERIMENTS, 6))
def test_an_experiment_composes(name):
    """The ends of its sweep."""
    assert_compose(jobs(name)[:: max(1, len(jobs(name)) - 1)])


@pytest.mark.full
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_of_an_experiment_composes(name):
    assert_compose(jobs(name))


def assert_compose(chosen: list[list[str]]) -> None:
    """Each of these jobs fits."""
    register()
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        for overrides in chosen:
            assert_fits(compose("train", overrides=overrides))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_says_how_to_run_it_and_is_listed(name):
    text = (ROOT / f"conf/experiment/{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n# ")
    head = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()))
    assert re.search(rf"# Run: .*(experiment={name}\b|make \w+)", head)
    assert f"`{name}`" in (ROOT / "docs/experiments.md").read_text()


def test_every_paper_has_its_experiments_and_every_own_setting_its_method():
    texts = [
        path.read_text() for folder in ("experiment", "paper") for path in (ROOT / f"conf/{folder}").glob("*.yaml")
    ]
    used = {name for text in texts for name in re.findall(r"^  - override /paper: (\w+)$", text, re.MULTILINE)}
    used |= {
        name
        for text in texts
        for value in re.findall(r"^      paper: (.*)$", text, re.MULTILINE)
        for name in value.split(",")
    }
    papers = {path.stem for path in (ROOT / "conf/paper").glob("*.yaml")}
    assert papers == used
    for path in (ROOT / "conf/paper/own").glob("*.yaml"):
        assert path.stem in {f"{paper}_{method}" for paper in papers for method in METHODS}
    for path in (ROOT / "conf/paper/split").glob("*.yaml"):
        dealt = itertools.product(papers, datasets.SETS, partition.SCHEMES)
        assert path.stem in {"_".join(names) for names in dealt}


@pytest.mark.parametrize("name", sampled(EXPERIMENTS, 3))
def test_what_sweeps_needs_no_option(name: str):
    cfg = composed(f"experiment={name}")
    several = any(len(values) > 1 for values in swept(cfg).values())
    assert cfg.hydra.mode == (RunMode.MULTIRUN if several else None)


SEEDS = {"table3": 4, "table4": 4, "figure2": 4, "figure3": 4, "fedpurin_cifar100": 3, "fedpurin_cifar10_ablation": 3}
SEEDS |= {"fedspu_speech": 3, "fedspu_emnist_stopping": 3} | dict.fromkeys(QUICK, 1)


@pytest.mark.parametrize("name", sampled(SEEDS, 3))
def test_full_experiments_run_as_many_seeds_as_the_paper_averages(name: str):
    seeds = swept(composed(f"experiment={name}")).get("seed", ["42"])
    assert len(set(seeds)) == len(seeds) == SEEDS[name]
    job = jobs(name)[0]
    assert len({identity(resolve(composed(*job, f"seed={seed}"))) for seed in seeds}) == 1


@pytest.mark.parametrize("name", ["smoke", "all_methods"])
def test_every_method_takes_part(name: str):
    assert swept(composed(f"experiment={name}"))["method"] == sorted(METHODS)


FEDOBP = ("table2", "table3", "table5", "figure2", "figure4", "figure6", "figure7", "q_sweep", "all_methods")


@pytest.mark.parametrize("name", FEDOBP)
def test_the_paper_runs_without_multirun_and_in_one_place(name):
    cfg = composed(f"experiment={name}")
    assert cfg.hydra.mode == RunMode.MULTIRUN
    assert OmegaConf.to_container(cfg.hydra.sweep, resolve=False)["subdir"] == "${fedpfl.run_subdir:fedobp}"


def test_what_two_tables_share_is_one_run():
    base = ("dataset=fmnist", "partition.alpha=0.1", "method=fedobp")
    keys = {
        identity(resolve(composed(f"experiment={name}", *base, *more)))
        for name, *more in (
            ("fedobp_paper",),
            ("table2",),
            ("table4",),
            ("table5", "norm=global"),
            ("figure5", "paper=fedobp_global"),
            ("q_sweep", "quantile.q=0.99993"),
            ("figure4", "score=obp", "quantile.q=0.99993"),
            ("all_methods",),
        )
    }
    assert len(keys) == 1


def test_classifier_only_quantiles_personalise_as_many_entries():
    """As Table II's q does among all entries: N - 1 - floor(q (N - 1)) of the paper's model sizes."""
    all_entries, classifier = composed("quantile=paper").quantile.table, composed("quantile=paper_cls").quantile.table
    classes = {"cifar100": 100, "emnist": 62, "organamnist": 11, "organcmnist": 11}
    for name, row in all_entries.items():
        head = 513 * classes.get(name, 10)
        size = (873_408 if name in ("cifar10", "cifar100", "svhn") else 576_896) + head
        for alpha, q in row.items():
            count, own = (
                n - 1 - math.floor(round(p * (n - 1), 9)) for n, p in ((size, q), (head, classifier[name][alpha]))
            )
            assert count == own, (name, alpha)


@pytest.mark.parametrize("name", sampled(QUICK, 2))
def test_a_quick_twin_runs(name, tmp_path: Path):
    """A round of its first method."""
    first = jobs(name)[0]
    small = ["rounds=1", "clients=4", "participation=0.5", "local.epochs=1", "eval.every=1", "hydra.run.dir=run"]
    small += ["eval.finetune_every=1", "eval.finetune_epochs=1"]
    if "samples_per_client" in composed(*first).partition:
        small.append("partition.samples_per_client=24")
    assert call(*first, "hydra.mode=RUN", *small, cwd=tmp_path).code == 0
    assert table(tmp_path / "run/rounds.csv")[0]["accuracy"]
