"""Every experiment composes into settings that its parts take, and that its paper or code states."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig

from fedpfl.config.choices import list_choices
from fedpfl.config.group_options import read_group
from fedpfl.config.resolution import resolve_config
from fedpfl.config.run_location import register_resolver
from fedpfl.config.schema import SETTINGS
from fedpfl.data import datasets
from fedpfl.ground.identity import identity
from fedpfl.papers import published
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import QUANTILE, SOURCE
from fedpfl.report.names import DATASET_TITLES
from tests.command import read_table, run_command
from tests.conftest import ROOT, keep_only, keep_quick

EXPERIMENTS = list_choices("experiment")
FOLDERS = sorted(path.name for path in (ROOT / "conf/experiment").iterdir() if path.is_dir())


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
            one.key_or_group: list(one.sweep_string_iterator())
            if one.is_sweep_override()
            else [one.get_value_element_as_str()]
            for one in parser.parse_overrides(words)
        }


@functools.cache
def sweep(name: str) -> dict[str, list[str]]:
    """What an experiment sweeps over."""
    return swept(composed(f"experiment={name}"))


def jobs(name: str) -> list[list[str]]:
    """Overrides of jobs of an experiment's sweep that have each value once."""
    values = sweep(name)
    turns = 1 if "/figure" in name else max(map(len, values.values()), default=1)
    return [
        [f"experiment={name}", *(f"{key}={own[turn % len(own)]}" for key, own in values.items())]
        for turn in range(turns)
    ]


def ends(*words: str) -> list[list[str]]:
    """Overrides of the first and of the last job of an experiment's sweep."""
    values = swept(composed(*words))
    return [[*words, *(f"{key}={own[at]}" for key, own in values.items())] for at in (0, -1)]


def assert_fits(composed: DictConfig) -> None:
    """What was composed is what its method, network, data set and partition take."""
    cfg = resolve_config(composed)
    read_group("", {key: cfg[key] for key in SETTINGS})
    for group in ("method", "local", "eval", "model", "partition"):
        read_group(group, cfg[group])
    assert cfg["dataset"]["name"] in datasets.DATA_SETS


@pytest.mark.parametrize("name", keep_only(EXPERIMENTS, {"demo"}))
def test_an_experiment_composes(name):
    """A sweep needs no option."""
    several = any(len(values) > 1 for values in sweep(name).values())
    assert composed(f"experiment={name}").hydra.mode == (RunMode.MULTIRUN if several else None)
    chosen = jobs(name)
    with initialize_config_dir(config_dir=str(ROOT / "conf"), version_base="1.3"):
        for overrides in chosen:
            assert_fits(compose("train", overrides=overrides))


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
    for words in ends(f"experiment={name}", "debug=quick"):
        cfg = composed(*words)
        assert_fits(cfg)
        assert (cfg.rounds, cfg.clients) <= (40, 20)
        assert cfg.dataset.mean == [0.3053]


@pytest.mark.full
@pytest.mark.parametrize("name", [f"{paper}/" for paper in FOLDERS])
def test_a_paper_in_small_runs(name: str, tmp_path: Path) -> None:
    """A round of the first method of its last experiment."""
    name = [one for one in EXPERIMENTS if one.startswith(name)][-1]
    words, _ = ends(f"experiment={name}", "debug=quick")
    small = ["rounds=1", "clients=4", "local.epochs=1", "eval.every=1", "eval.finetune_every=1"]
    small += ["hydra.run.dir=run", "hydra.mode=RUN"]
    assert run_command(*words, *small, cwd=tmp_path).code == 0
    assert read_table(tmp_path / "run/rounds.csv")[0]["accuracy"]


# Runs are found again

IDENTITIES = (ROOT / "tests/papers/identities.txt").read_text().splitlines()
"""An experiment, and the identities of the first and the last job of its sweep; a run of an earlier
day is found again by it.
"""


@pytest.mark.parametrize("name", keep_quick([name for name in EXPERIMENTS if "/" in name], 2))
def test_the_jobs_of_an_experiment_are_the_same_as_ever(name: str) -> None:
    first, last = (identity(resolved(*words)) for words in ends(f"experiment={name}"))
    assert f"{name} {first} {last}" in IDENTITIES


# Settings are those of each of the five papers or its public code

TABLE = ROOT / "tests/papers/settings.txt"
OF_NONE = "adapters/cifar100 fedobp/all_methods fedobp/alpha_sweep fedobp/q_sweep demo smoke"
OF_PAPERS = [name for name in EXPERIMENTS if name not in OF_NONE.split()]
ALWAYS = "rounds clients participation partition.name model.name eval.finetune_epochs"
ALWAYS += " local.epochs local.batch_size local.lr local.momentum local.weight_decay"


@functools.cache
def rows() -> list[tuple[str, str, Any, str]]:
    """Return experiment, key, value and where it stands of each line of the table."""
    lines = [line for line in TABLE.read_text().splitlines() if line[0] != "#"]
    groups = dict(line.split(" = ", 1) for line in lines if " | " not in line)

    def expand(names: str) -> list[str]:
        kept, left = dict[str, None](), set[str]()
        for word in names.split():
            name = word.removeprefix("-")
            members = expand(groups[name]) if name in groups else [name]
            kept |= dict.fromkeys(members if name == word else ())
            left.update(members if name != word else ())
        return [name for name in kept if name not in left]

    table = [line.split(" | ") for line in lines if " | " in line]
    return [
        (name, key, json.loads(value), where)
        for names, key, value, where in table
        for name in expand(names)
    ]


@functools.cache
def settings(experiment: str, choice: str = "") -> dict[str, Any]:
    """An experiment's first job, or that of a method, or of a choice such as `paper=subflot`."""
    group, _, name = choice.rpartition("=")
    own = {key: values[0] for key, values in sweep(experiment).items()}
    if name:
        own[group or "method"] = name
    words = (f"{key}={value}" for key, value in own.items())
    return resolve_config(composed(f"experiment={experiment}", *words))


@pytest.mark.parametrize("experiment", keep_quick(OF_PAPERS))
def test_an_experiment_has_the_papers_settings(experiment: str) -> None:
    wrong = {}
    for key, wanted, where in (row[1:] for row in rows() if row[0] == experiment):
        method, _, path = key.rpartition(": ")
        values, several = settings(experiment, method), sweep(experiment)
        found: Any = values
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not method and path in several:
            found = ",".join(several[path]).lower()
        if found != wanted:
            wrong[key] = f"{found} instead of {wanted} ({where})"
        group, _, name = method.rpartition("=")
        if method and (group or "method") in several:
            assert name in several[group or "method"], key
    assert not wrong


@pytest.mark.parametrize("experiment", keep_quick(OF_PAPERS))
def test_no_setting_of_an_experiment_is_left_out(experiment: str) -> None:
    told = {key for name, key, _, _ in rows() if name == experiment}
    of_methods = {key.rpartition(": ")[2] for key in told if key.endswith("momentum")}
    assert {*ALWAYS.split()} <= told | of_methods
    assert told & {"dataset", "dataset.name"}
    assert told >= {key for key in sweep(experiment) if key not in ("method", "seed")}
    if "alpha" in settings(experiment)["partition"]:
        assert "partition.alpha" in told
    has_one_seed = experiment.startswith(("fedselect", "subflot"))
    assert has_one_seed or ("seed" in told) == ("seed" in sweep(experiment))


def test_every_row_is_of_an_experiment() -> None:
    assert {name for name, *_ in rows()} == set(OF_PAPERS)
    pairs = [(name, key) for name, key, *_ in rows()]
    assert len(set(pairs)) == len(pairs)


def read_quantiles(name: str) -> dict[str, dict[float, float]]:
    """Return q by data set and alpha."""
    return yaml.safe_load((ROOT / f"conf/quantile/{name}.yaml").read_text())["table"]


def test_q_is_table_2s() -> None:
    table = read_quantiles("paper")
    for dataset, by_alpha in table.items():
        for alpha, q in by_alpha.items():
            key = (SOURCE + "II", QUANTILE, "fedobp", str(dataset), f"Dir({alpha:g})")
            assert published.lookup(key).value == q
    assert len(table) == 8


@pytest.mark.parametrize(
    ("name", "files", "kind"),
    [
        ("as_published", "tables", {}),
        ("ablation", "ablation", {"classifier_only": False}),
        ("ablation_cls", "ablation", {"classifier_only": True}),
        ("ablation", "moving average", {"classifier_only": False, "ema": 0.5}),
    ],
)
def test_q_is_that_of_the_public_files(name: str, files: str, kind: dict[str, Any]) -> None:
    own = {
        (DATASET_TITLES[dataset], f"Dir({alpha:g})"): q
        for dataset, by_alpha in read_quantiles(name).items()
        for alpha, q in by_alpha.items()
    }
    known = logs.read_logs().query("files == @files and method == 'fedobp'")
    for key, value in kind.items():
        known = known[known[key] == value]
    places = zip(known["dataset"], known["setting"], strict=True)
    assert [own[place] for place in places] == known["q"].tolist()
    assert {dataset for dataset, _ in own} == {*known["dataset"], "Digits"}


def test_figure_6_has_as_many_personal_entries_as_its_code_divides_by() -> None:
    sizes = {"cifar10": 878_538, "svhn": 878_538, "cifar100": 924_708, "emnist": 608_702}
    sizes |= dict.fromkeys(["mnist", "fmnist", "digits"], 582_026)
    sizes |= dict.fromkeys(["organamnist", "organcmnist"], 582_539)
    counts = {"cifar10": 44, "cifar100": 93, "emnist": 61, "svhn": 36, "mnist": 6, "digits": 583}
    counts |= dict.fromkeys(["fmnist", "organamnist", "organcmnist"], 30)
    table = read_quantiles("figure6")
    for dataset, count in counts.items():
        size = sizes[dataset]
        assert size - 1 - math.floor(round(table[dataset][0.1] * (size - 1), 9)) == count
