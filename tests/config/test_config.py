"""The configuration: groups compose, values are checked, and a run's identity is what it computes."""

import functools
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf import _utils as yaml_loader

from fedpfl import train
from fedpfl.config import overrides, run_location
from fedpfl.config.plan import check_config
from fedpfl.config.resolution import resolve_config
from fedpfl.config.schema import Settings
from fedpfl.ground.casting import Checked
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import identity
from fedpfl.ground.ranges import Above, AtLeast, AtMost, Below, Between
from fedpfl.methods import METHODS
from fedpfl.models import MODELS
from tests.command import TINY, compose_once, run_command
from tests.conftest import read_cases
from tests.data.promises import build, one_line

CONF = Path(train.CONF)
APART = ("board",)  # suites
NO_KEYS = ("shape", "classes", "head", "overlap")  # of a network's file
GROUPS = sorted(
    folder.name for folder in CONF.iterdir() if folder.is_dir() and folder.name not in APART
)
FILES = sorted(CONF.rglob("*.yaml"))
EXPERIMENTS = CONF / "experiment"
OPTIONS = [
    (path.parent.name, path.stem)
    for path in FILES
    if path.parent.name in GROUPS and path.parent != EXPERIMENTS
]
UNSET = {
    "npz": ["dataset.path=mine.npz"],
    # Of data that are at hand, clients and test parts are counted (tests/data).
    "sites": ["dataset.path=null", "clients=3"],
    "hf": ["dataset.path=mine", "partition.test_fraction=0.2"],
    "pfllib": ["dataset.path=mine", "clients=3"],
    "flbench": ["dataset=flbench", "dataset.path=mine", "clients=3"],
    "tuned": ["quantile.q=0.9"],
    "file": ["partition.path=mine.json"],
    "paper": ["dataset=fmnist"],
    **{f"subflot_without_{part}": ["method=subflot"] for part in ("ota", "otp", "sar")},
}
"""What an option needs beside itself."""


@functools.cache
def resolved(*overrides: str) -> dict[str, Any]:
    return resolve_config(compose_once(*overrides))


def key_of(*overrides: str) -> str:
    return identity(resolved(*overrides))


TOGETHER = """
adapter=bitfit attack=backdoor augment=crop_flip dataset=mnist defence=bulyan engine=batched logger=wandb system=simulated
method=fedobp model=cnn4 norm=layer partition=shards privacy=client quantile=auto score=fisher shift=blur
paper=adapters debug=fast
"""
"""A choice of each group."""


def test_a_choice_of_each_group_composes_and_its_values_fit() -> None:
    assert {word.partition("=")[0] for word in TOGETHER.split()} == {group for group, _ in OPTIONS}
    for words in read_cases(TOGETHER, "|"):
        assert_values_fit(*words.split())


@pytest.mark.full
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes_and_its_values_fit(group: str, option: str) -> None:
    """Experiments: tests/papers/test_experiments.py."""
    assert_values_fit(f"{group}={option}", *UNSET.get(option, []))


def assert_values_fit(*words: str) -> None:
    whole = resolved(*words)
    build_dataclass(Settings, {key: whole[key] for key in Settings.__annotations__}, "")
    method = METHODS[whole["method"]["name"]]
    values = {key: value for key, value in whole["method"].items() if key != "name"}
    build_dataclass(method, values, "method")


def test_registered_methods_and_models_have_files_these_with_their_options_defaults() -> None:
    assert {path.stem for path in (CONF / "method").glob("*.yaml")} == set(METHODS)
    assert {path.stem for path in (CONF / "model").glob("*.yaml")} == set(MODELS)
    for name, network in MODELS.items():
        parameters = inspect.signature(network).parameters.items()
        options = {key: one.default for key, one in parameters if key not in NO_KEYS}
        for key, value in options.items():
            options[key] = list(value) if isinstance(value, tuple) else value
        text = (CONF / f"model/{name}.yaml").read_text()
        held = yaml.load(text, yaml_loader.get_yaml_loader())
        assert held == {"name": name, **options, "weights": None}


def test_the_groups_of_a_method_choose_its_hyperparameters() -> None:
    words = "method=fedobp norm=none score=fisher quantile=ablation_cls dataset=svhn"
    chosen = resolved(*words.split())["method"]
    assert (chosen["norm"], chosen["score"], chosen["q"]) == ("none", "fisher", 0.9495)
    for group in ("+score.name=fisher", "+quantile.q=0.5", "+norm=layer"):
        with pytest.raises(FedpflError, match="that method=seqfededt does not have"):
            resolved("method=seqfededt", group)


# Identity


def identity_with(word: str) -> str:
    """Return a run's identity; what chooses no group is set in what is composed once."""
    key, _, value = word.partition("=")
    if key in GROUPS:
        return key_of(word)
    cfg = compose_once().copy()
    OmegaConf.update(cfg, key, yaml.load(value, yaml_loader.get_yaml_loader()))
    return identity(resolve_config(cfg))


def test_where_and_how_it_runs_leaves_the_identity() -> None:
    """Nor what the defaults resolve to, nor another spelling of the same number."""
    words = (
        "seed=7 logger=[mlflow,wandb] device=cpu data_dir=elsewhere checkpoint.seconds=1"
        " engine.workers=1 engine=loop engine.width=3 dataset.download=false quantile.q=0.999"
        " norm.name=global local.lr=1e-2 local.weight_decay=0 method.ema=0 validation=0 name=mine"
        " extend=elsewhere restart=true"
    )
    assert key_of(*words.split()) == key_of()


def test_whatever_changes_the_results_changes_the_identity() -> None:
    words = (
        "validation=0.1 unseen=0.2 rounds=10 clients=50 participation=0.2 local.lr=0.1"
        " local.epochs=1 local.batch_size=16 local.momentum=0.7 local.weight_decay=0.1 eval.every=5"
        " eval.finetune_epochs=1 local.optimizer=adam local.decay=0.99 local.decay=cosine"
        " partition.seed=42 partition.alpha=0.5 partition.min_samples=5 partition.test_fraction=0.5"
        " dataset.mean=[0.5] method=fedavg method.ema=0.3 method.scope=tensor"
        " method.classifier_only=true quantile.q=0.5 engine.precision=bf16 model=resnet8"
        " eval.classes=own"
    )
    assert [word for word in words.split() if identity_with(word) == key_of()] == []
    assert key_of("model=resnet8", "model.norm=group") != key_of("model=resnet8")


# Types


@dataclass(frozen=True)
class Schema(Checked):
    count: int = 1
    share: float = 0.5
    fast: bool = False
    name: str = "x"
    kind: Literal["a", "b"] = "a"
    limit: int | None = None
    values: Sequence[float] = ()
    pair: tuple[int, ...] = ()
    part: Annotated[float, Between(0, 1)] = 0.5
    rate: Annotated[float, Above(0), AtMost(1)] | Literal["auto"] = "auto"
    levels: (
        Annotated[float, AtLeast(0), Below(1)] | tuple[Annotated[float, AtLeast(0), Below(1)], ...]
    ) = ()


FITTING = """
share: 1, 1.0; 0.25, 0.25
values: [1, 0.5], (1.0, 0.5); [0.0, -3.4e38, 1.2e-38], (0.0, -3.4e38, 1.2e-38)
count: 2**63 - 1, 2**63 - 1
name: "Größe 你好", "Größe 你好"
rate: 1, 1.0; "auto", "auto"
levels: 0, 0.0; [0, 0.99], (0.0, 0.99)
"""
"""Key: what is given, what it becomes."""


def test_a_value_that_fits_is_taken() -> None:
    for key, pairs in read_cases(FITTING, ": "):
        for pair in pairs.split("; "):
            value, becomes = eval(pair)
            taken = getattr(build_dataclass(Schema, {key: value}, "group"), key)
            assert (taken, type(taken)) == (becomes, type(becomes))


UNFITTING = r"""
count: True, 1.0, "abc", None => a whole number
share: True, "abc" => a number
fast: 1 => true or false
kind: "c", ["a"] => one of a, b
limit: 0.5 => a whole number or null
values: [0.5, "abc"], 0.5 => a list of numbers
part: -0.1, 1.1 => between 0 and 1
rate: 0, 1.1 => above 0 and at most 1, or auto
levels: 1, [0.5, 1] => at least 0 and below 1
share: 3.5e38 => within 1.2e-38 and 3.4e+38 in size, as float32 is, got 3.5e+38
values: [0.5, float("inf")] => within 1.2e-38 and 3.4e+38 in size, as float32 is, got inf
name: "a\x9bb" => a text without control characters, got 'a\x9bb'
"""
"""Key: values => what is allowed; where it says what it got, that is all that is said."""


def test_a_value_that_does_not_fit_is_named_with_what_is_allowed():
    for given, allowed in read_cases(UNFITTING):
        key, _, values = given.partition(": ")
        for value in eval(f"[{values}]"):
            with pytest.raises(FedpflError) as caught:
                build_dataclass(Schema, {key: value}, "group")
            message, says = str(caught.value), f"group.{key} must be {allowed}"
            if ", got " in says:  # what no file or tensor holds, of which Python knows nothing
                assert message == says
                continue
            assert message.startswith(f"{says}, got ")
            assert "\n" not in message
            with pytest.raises(ValueError, match="must be") as caught:  # also where Python makes it
                Schema(**{key: value})
            assert str(caught.value) == message.removeprefix("group.")


UNRESOLVED = """
quantile.table=3 => quantile.table must map data sets to alphas to q, got 3
local=3 => local must be a group of keys, got 3
~local.epochs => local.epochs has no value; set it with local.epochs=
"""


def test_a_configuration_that_cannot_be_resolved_is_one_line() -> None:
    for words, message in read_cases(UNRESOLVED):
        told = one_line(lambda words=words: check_config(compose_once(*words.split())))
        assert told.startswith(message)


UNHAD = """
local.steps=20 => local.steps must be null beside local.epochs=5; set local.epochs=null, got 20
method=per_fedavg local.decay=cosine => local.decay=cosine has no part in method=per_fedavg
dataset=cifar10_c dataset.corruptions=fog => dataset.corruptions must be a list of texts or null, got 'fog'
model=mlp model.hidden=[200,0] => model.hidden must be 1 or more, got [200, 0]
"""


@pytest.mark.parametrize(("words", "message"), read_cases(UNHAD))
def test_what_is_out_of_range_or_cannot_be_had_is_one_line(words: str, message: str) -> None:
    assert message in one_line(lambda: build(*words.split()))


# Build


def test_more_clients_are_drawn_than_a_round_is_meant_for() -> None:
    run = build(*TINY, "participation=0.25", "system=simulated", "system.over=2")
    assert (run.cohort, len(next(iter(run.draw_cohorts())))) == (1, 2)


def test_clients_are_judged_over_their_own_classes_if_it_is_said() -> None:
    for which, is_told in (("all", False), ("own", True)):
        federation = build(*TINY, f"eval.classes={which}").federation
        assert (federation.excluded_classes is not None) == is_told


def test_runs_ask_for_their_places_side_by_side():
    """As those of `fedpfl.run` in threads do."""
    run_location.register_resolver()
    cfg = overrides.compose_config(TINY)
    with ThreadPoolExecutor(4) as pool:
        places = [*pool.map(lambda _: cfg.copy().hydra.sweep.subdir, range(12))]
    assert len({*places}) == 1
    assert run_location.INVALID not in places[0]


WRONG_FILES = """
method | mu: 0.1 | method=mine => method.name must be one of
local | lr: 0.1 | local=mine => local is a group of keys; set one of them, local.KEY=...
experiment | # @package _global_;;defaults: [/method: fedprox] | experiment=mine => To override a value use 'override method: fedprox'
"""


@pytest.mark.parametrize(("file", "message"), read_cases(WRONG_FILES))
def test_a_file_of_ones_own_that_is_wrong_is_one_line(file, message, tmp_path):
    group, text, word = (part.strip() for part in file.split("|"))
    (tmp_path / "my" / group).mkdir(parents=True)
    (tmp_path / "my" / group / "mine.yaml").write_bytes(text.replace(";;", "\n").encode("latin-1"))
    (line,) = run_command("--config-dir", "my", word, *TINY, cwd=tmp_path).complaints
    assert message in line


def test_a_folder_of_ones_own_is_read_by_every_way_to_look_at_a_run(tmp_path):
    (tmp_path / "my/experiment").mkdir(parents=True)
    text = "# @package _global_\nlocal:\n  lr: 0.125\n"
    (tmp_path / "my/experiment/mine.yaml").write_text(text)
    words = ("--config-dir", "my", "experiment=mine", *TINY)
    assert "local.lr=0.125" in run_command(*words, "--help", cwd=tmp_path).out
    assert "lr=0.125" in run_command(*words, "--dry-run", cwd=tmp_path).out
