"""Small federations, tiny smooth networks, trajectories, and comparisons bit for bit."""

import copy
import dataclasses
import gc
import os
import pickle
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import settings
from omegaconf import DictConfig
from torch import Tensor

from fedpfl.config import plugins
from fedpfl.data.federation import Federation
from fedpfl.engine import (
    Engine,
    Local,
    Outcome,
    RoundSetup,
    State,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall, Participation, with_before_turn
from fedpfl.engine.training.clients import OneClient
from fedpfl.engine.training.jobs import EvalJob
from fedpfl.engine.training.participation import run_evaluation
from fedpfl.ground import tree
from fedpfl.ground.files import atomic_output
from fedpfl.methods import METHODS, Method
from fedpfl.methods.shared import neurons
from fedpfl.models import Net
from fedpfl.report import figures
from fedpfl.testing import toy
from fedpfl.testing.toy import (  # noqa: F401
    BACKENDS,
    CLASSES,
    CPU,
    LOCAL,
    LOOP,
    Tiny,
    as_engine,
    differing,
    flatten,
    state_trees,
    tiny,
)

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES, save_figure = figures.SUFFIXES, figures._save_figure
DATA = Path(os.environ["FEDPFL_TEST_DATA"]) if "FEDPFL_TEST_DATA" in os.environ else None
"""A folder of public data sets as they are downloaded, for the tests that look at them; None: those
are skipped.
"""


# Ragged on purpose: remainders of one sample (33, 65), clients of one batch, of one sample, without
# test samples.
TRAIN = (40, 33, 65, 7, 90, 3, 50, 64, 2, 1)
TEST = (10, 8, 16, 2, 22, 1, 12, 16, 1, 0)
COHORTS = [
    [0, 2, 3, 5, 9],
    [1, 2, 4, 6, 8],
    [0, 1, 5, 7, 9],
]  # client 7 is unseen for two rounds, 2 trains twice in a row
PLAIN = Local(epochs=1, batch_size=512, lr=0.05)  # one full-batch step without momentum

# Whoever clones the project chooses the folder: temporary files lie where a name has a space and a
# letter that is not ASCII, so that a test which does not quote a path fails here. Each user has a
# folder, for nobody else can write there.
TEMPORARY = Path(tempfile.gettempdir()) / f"fedpfl Übung {os.getuid()}"
TEMPORARY.mkdir(mode=0o700, exist_ok=True)
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(TEMPORARY))

torch.set_num_threads(1)  # as the loop backend does; workers of the test run share the cores

settings.register_profile(
    "fedpfl", deadline=None, derandomize=True
)  # a shared machine stalls now and then
settings.load_profile("fedpfl")

ENGINES = ("loop", "batched", "loop-bf16", "batched-bf16")

TAUGHT = {"noise": 4, "hidden": 8, "steps": 2, "batch": 8}

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "apple": [{}, {"rate": 1.0, "schedule": "cosine", "until": 2.0}],
    "apfl": [{}, {"mixing": "param", "alpha_lr": 1.0, "cold_start": "global"}],
    "cfl": [
        {},
        {"eps1": 9.0, "eps2": 0.0, "warmup": 0, "linkage": "complete", "statistics": "aggregate"},
    ],
    "ditto": [
        {},
        {"lam": 0.3, "personal_epochs": 1},
        {"personal_epochs": 3, "cold_start": "global"},
    ],
    "fedobp": [
        {"q": 0.9},
        {"q": 0.5, "norm": "layer"},
        {"q": 0.9, "score": "obp_as_published", "ema": 0.3},
        {"q": 0.8, "score": "gradient", "scope": "tensor"},
        {"q": 0.9, "score": "fisher", "norm": "none", "ema": 0.5},
        {"q": 0.7, "score": "fisher_batch", "classifier_only": True, "cold_start": "global"},
    ],
    "fedobp_adaptive": [
        {"q": (0.5, 0.9, 0.99)},
        {"q": (0.3, 0.8), "score": "gradient", "scope": "tensor", "norm": "layer", "ema": 0.3},
    ],
    "fedas": [
        {},
        {"first": "init", "align": "means", "judge": "received"},
        {"first": "global", "weights": "samples"},
    ],
    "fedalt": [{}, {"first": "own"}],
    "fedavg": [{}, {"statistics": "local"}],
    "fedala": [{}, {"layers": 2, "max_epochs": 12, "threshold": 0.0}],
    "fedamp": [
        {"sigma": 0.3},
        {"variant": "heurfedamp", "start_from": "cloud", "pool": "last_round"},
    ],
    "fedfomo": [{}, {"candidates": 2, "explore": 1.0, "fallback": "keep", "pool": "all"}],
    "fedcp": [{}, {"lam": 0.3, "policy_noise": "off"}],
    "fedgen": [TAUGHT, {**TAUGHT, "teacher": "mean_logits", "labels": "frequency"}],
    "fedbabu": [{}, {"finetune": "head"}],
    "feddpa": [{}, {"rule": "quantile", "train": "joint"}],
    "fedcac": [{}, {"tau": 0.1, "beta": 1}],
    "fedpac": [{}, {"lam": 0.3, "body_epochs": 1, "combine": False, "keep_prototypes": True}],
    "fedproto": [
        {},
        {"weights": "counts", "judge": "nearest_own"},
        {"prototypes": "final", "judge": "head"},
    ],
    "fd": [{}, {"outputs": "logits", "teacher": "all"}],
    "fedgh": [{}, {"server_epochs": 2, "server_batch": 8}],
    "fedkd": [{}, {"energy_start": 0.5, "compress": "parameters"}],
    "fml": [{}, {"alpha": 0.9, "beta": 0.1}],
    "fedtgp": [{"server_epochs": 2}, {"weights": "counts", "judge": "head", "server_epochs": 1}],
    "fedper": [{}, {"layers": 2}, {"head_init": "server_average", "statistics": "local"}],
    "feddbe": [{"bias_lr": 0.05}, {"rho": 0.3, "kappa": 5.0, "mean": "data"}],
    "feddyn": [{"alpha": 0.3}],
    "fedphp": [{"participation": 0.5}, {"transfer": "mmd", "lam": 0.5, "momentum": 0.5}],
    "fedprox": [{"mu": 0.5}],
    "fedrep": [{}, {"body_epochs": 2, "head_epochs": 1}, {"personal_init": "server_average"}],
    "floco": [{}, {"endpoints": 3, "tau": 1}],
    "floco_plus": [{"endpoints": 3, "tau": 1, "pers_epochs": 1, "stay_inside": True}, {}],
    "fedrod": [{}, {"gamma": 0.0}],
    "fedselect": [
        {"p": 0.5},
        {"delta": "window", "every": 1, "scope": "all", "clamp": True, "lr_v": 0.02},
        {"personalise": "random", "strict": False},
        {"personalise": "fc"},
    ],
    # With the gradient too few for a bias under BatchNorm, whose gradient is rounding
    "fedpurin": [
        {"tau": 0.2},
        {"beta": 1, "score": "delta", "hessian": True, "judge": "dense"},
        {"tau": 0.2, "include_norm": True, "cutoff": -1.0},
    ],
    "ifca": [{}, {"clusters": 3, "layers": 1}],
    "flute": [{}, {"rep_epochs": 2, "l3": 0.0}],
    "knn_per": [{"k": 3}, {"lam": None, "scale": 0.1}, {"distance": "euclidean", "mix": "logits"}],
    "lg_fedavg": [
        {},
        {"layers": 2},
        {"variant": "as_published", "personal_init": "server_average"},
    ],
    "moon": [{}, {"mu": 5.0, "tau": 0.2}],
    "pfedfda": [{}, {"variant": "as_published"}],
    "per_fedavg": [{"outer_lr": 0.05}, {"version": "hf", "outer_lr": 0.05, "adapt_steps": 2}],
    "pfedme": [{}, {"average": "samples", "beta": 0.5, "inner_lr": 0.05}],
    "pfedsd": [{}, {"teacher": "train", "tau": 1.0}],
    "pfedhn": [
        {"hidden": 10},
        {"variant": "pc", "order": "sequential", "rows": "all", "hidden": 10, "embedding": 3},
    ],
    "fedsa_lora": [{}, {"head": "averaged"}],
    "ffa_lora": [{}, {"head": "frozen"}],
    "sdflora": [{}, {"share": 0.5, "merge": "averaged", "head": "averaged"}],
    "fedspu": [{"widths": (0.3, 0.6, 1.0)}, {}],
    "random_dropout": [{"widths": (0.3, 0.6, 1.0)}, {"judge": "own"}],
    "fjord": [{}, {"ordered": True, "distill": 0.3}],
    "hetlora": [{}, {"weighting": "samples", "gamma": 0.5, "lam": 0.5}],
    "hermes": [{}, {"first": "current", "assign": "random"}],
    "pspfl": [{"q": 0.5}, {"upload": "all"}],
    "heterofl": [{"scaler": True}, {"masked": False, "weighting": "samples", "dynamic": True}],
    "fedrolex": [{"widths": (0.3, 0.6, 1.0)}],
    "flexfl": [
        {},
        {"levels": (0.4, 1.0), "apoz": (0.3, 0.6), "devices": (1, 1), "assign": "random"},
    ],
    "scaffold": [{}, {"server_lr": 0.5}],
    "seqfededt": [{"q": 0.9}, {"score": "importance", "q": 0.5, "classifier_only": True}],
    "subflot": [{}, {"mode": "balanced", "alpha": 0.3, "initial": "prefix", "assign": "blocks"}],
}
"""Hyperparameters that the contract suite tries; a method that is not named here is tried with its
defaults.
"""

CUTS_NEURONS = {
    *("fedmp", "fedrolex", "fedspu", "fjord", "flexfl", "heterofl", "hermes", "prunefl"),
    *("random_dropout", "subflot"),
}
"""Methods whose clients train some of the network's neurons."""


def settings_of(name: str) -> list[dict[str, Any]]:
    return SETTINGS.get(name, [{}])


def build_method(name: str, **values: Any) -> Method:
    """Build the method in its first setting, but for these values.

    One with required hyperparameters must be listed in SETTINGS.
    """
    given, fields = {**settings_of(name)[0], **values}, dataclasses.fields(METHODS[name])
    open_fields = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    required = [field for field in open_fields if field not in given]
    assert not required, f"add {name} with values of {required} to SETTINGS in tests/conftest.py"
    return METHODS[name](**given)


CASES = [
    pytest.param(name, values, id="-".join([name, *(f"{k}={v}" for k, v in values.items())]))
    for name in METHODS
    for values in settings_of(name)
]
REPRESENTATIVES = (
    "fedavg",  # one model
    "fedper",  # a body and a head
    "ditto",  # two models
    "fedobp",  # entries that stay
    "scaffold",  # states on both sides
    "heterofl",  # parts of the network
    "seqfededt",  # turns
)
"""Methods of each kind, which stand for the others where `make test` asks no more."""


def every_method(
    *engines: str, quick: Sequence[str] = REPRESENTATIVES
) -> Callable[[Callable], Callable]:
    """Ask a test of every method: of `name` and `values`, and of a `backend` if engines are named.

    `make test` asks each of the quick ones in its first setting on one of the engines; the other
    methods, settings and engines are `full`.
    """

    def parametrize_test(test: Callable) -> Callable:
        names = ("name", "values", "backend") if engines else ("name", "values")
        return pytest.mark.parametrize(names, method_cases(engines, quick))(test)

    return parametrize_test


def method_cases(engines: tuple[str, ...], quick: Sequence[str]) -> list[Any]:
    """Return every setting of every method, on each of the engines if there are any."""
    parameters, past = list[Any](), set[str]()
    for case in CASES:
        name = case.values[0]
        is_first = name in quick and name not in past
        past.add(name)
        if not engines:
            parameters.append(case if is_first else case._replace(marks=[pytest.mark.full]))
        for number, engine in enumerate(engines):
            is_quick = is_first and number == quick.index(name) % len(engines)
            marks = [] if is_quick else [pytest.mark.full]
            values = (*case.values, engine)
            parameters.append(pytest.param(*values, id=f"{case.id}-{engine}", marks=marks))
    return parameters


def read_cases(text: str, separator: str = " => ") -> list[Any]:
    """Return a tuple of the parts of each line, or the line itself where nothing separates it."""
    rows = (line.strip() for line in text.splitlines() if line.strip())
    return [tuple(row.split(separator)) if separator in row else row for row in rows]


def keep_quick(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Leave the first `count` cases, which stand for the others, to `make test`; the rest is
    `full`.
    """
    parameters = []
    for number, case in enumerate(cases):
        if not hasattr(case, "marks"):
            case = pytest.param(*(case if isinstance(case, tuple) else (case,)))
        if number >= count:
            case = case._replace(marks=(*case.marks, pytest.mark.full))
        parameters.append(case)
    return parameters


def keep_one_of_each(cases: Iterable[Any], kind_of: Callable[[Any], Any]) -> list[Any]:
    """Leave the first case of each kind to `make test`; the rest is `full`."""
    cases_by_kind: dict[Any, list[Any]] = {}
    for case in cases:
        cases_by_kind.setdefault(kind_of(case), []).append(case)
    return [case for same in cases_by_kind.values() for case in keep_quick(same)]


def keep_only(names: Iterable[str], quick_names: Collection[str]) -> list[Any]:
    """Leave the names that are quick, which stand for the others, to `make test`; the rest is
    `full`.
    """
    return [
        name if name in quick_names else pytest.param(name, marks=pytest.mark.full)
        for name in names
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the methods' own tests on the loop backend to `make test`, for that the batched one
    agrees with it is for the contract to say; skip what is marked `cuda` where there is no GPU.
    """
    for item in items:
        call = getattr(item, "callspec", None)
        is_methods_own = item.path.is_relative_to(ROOT / "tests/methods")
        if is_methods_own and call and call.params.get("backend") == "batched":
            item.add_marker(pytest.mark.full)
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


HEAD = ("classifier.weight", "classifier.bias")


def make_federation(
    train: tuple[int, ...] = TRAIN, test: tuple[int, ...] = TEST, seed: int = 0
) -> Federation:
    """Make images of five noisy patterns, label-skewed over the clients."""
    return toy.federate(train, test, seed)


def hold_out_quarter(whole: Federation) -> Federation:
    """Hold the first quarter of each client's training samples out for validation."""
    parts = [(own[: len(own) // 4], own[len(own) // 4 :]) for own in whole.train]
    return dataclasses.replace(
        whole, train=tuple(kept for _, kept in parts), validation=tuple(held for held, _ in parts)
    )


def record_rounds(
    method: Method,
    net: Net,
    federation: Federation,
    cohorts: list[list[int]] = COHORTS,
    **more: Any,
) -> tuple[list[State], list[Outcome]]:
    """Play rounds; return copies of the states before and after each, and the outcomes."""
    return toy.play_rounds(method, net, federation, cohorts, toy.PlaySettings(**more))


def participate(*arguments: Any, **settings: Any) -> Participation:
    """Return what clients bring back from a round; the settings are those of `toy.PlaySettings`."""
    return toy.participate(*arguments, toy.PlaySettings(**settings))


def record_states(*args: Any, **kwargs: Any) -> list[State]:
    """Return the states of `record_rounds`."""
    return record_rounds(*args, **kwargs)[0]


def take_part(
    method: Method,
    net: Net,
    federation: Federation,
    engine: Any,
    clients: Iterable[int] = range(10),
    **more: Any,
) -> Any:
    """Let clients take part in round 1; returns their Participation."""
    state = make_initial_state(method, net, 10, CPU)
    return participate(method, net, federation, state, list(clients), engine=engine, **more)


def evaluate(
    method: Method,
    net: Net,
    federation: Federation,
    state: State,
    engine: Engine | str = LOOP,
    clients: Iterable[int] | None = None,
    **more: Any,
) -> Any:
    """Evaluate clients between rounds, all unless some are named."""
    numbers = list(range(federation.clients)) if clients is None else list(clients)
    call = EvalCall(method, federation, state, numbers, **more)
    return make_backend(as_engine(engine), net, CPU).evaluate(call)


def next_round(
    method: Method, net: Net, federation: Federation, state: State, cohort: list[int], **more: Any
) -> tuple[State, Outcome]:
    """Play a round on `state`, which is used up; the settings are those of `toy.PlaySettings`."""
    settings = toy.PlaySettings(**more)
    backend = make_backend(as_engine(settings.engine), net, CPU)
    setup = RoundSetup(backend, method, federation, settings.local, settings.seed)
    return play_round(setup, state, cohort)


def find_eval_job(
    method: Method, net: Net, federation: Federation, state: State, client: int, **more: Any
) -> EvalJob:
    """Return the parameters and statistics by which a client is evaluated between rounds."""
    call = with_before_turn(EvalCall(method, federation, state, [client], **more))
    job = next(run_evaluation(call, OneClient(client), net, nullcontext))
    assert isinstance(job, EvalJob)
    return job


def entries_between(net: Net, active: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return masks of the entries between the active neurons of each group."""
    plan = neurons.build_plan(net.params, net.parts)
    chosen = torch.cat([*active.values(), torch.ones(1, dtype=torch.bool)])
    masks = neurons.entry_masks(plan, chosen, net.params)
    return {**masks, **neurons.statistics_masks(plan, chosen)}


client_row = tree.take
"""One client's tree of a stacked one."""


def assert_same(a: Any, b: Any) -> None:
    """Assert that two trees are equal bit for bit."""
    assert differing(a, b) == []


def assert_close(a: Any, b: Any, atol: float = 1e-6, rtol: float = 1e-5) -> None:
    a, b = flatten(a), flatten(b)
    assert a.keys() == b.keys(), set(a) ^ set(b)
    for path in a:
        torch.testing.assert_close(
            a[path], b[path], atol=atol, rtol=rtol, msg=lambda m, p=path: f"{p}: {m}"
        )


@pytest.fixture(scope="session")
def federation() -> Federation:
    return make_federation()


@pytest.fixture(scope="session")
def net() -> Net:
    return tiny()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session", autouse=True)
def parsed_once() -> Iterator[None]:
    """Parse each word of a command once."""
    parse_rule, rules = OverridesParser.parse_rule, dict[tuple[str, str], Any]()

    def parse_word(parser: OverridesParser, word: str, rule: str) -> Any:
        if (word, rule) not in rules:
            rules[word, rule] = parse_rule(parser, word, rule)
        return copy.copy(rules[word, rule])

    with mock.patch.object(OverridesParser, "parse_rule", parse_word):
        yield


def draw_without_saving(figure: Any, path: Path) -> list[Path]:
    """Draw a figure once where four files' worth are drawn, and write the heads of its files."""
    figure.draw_without_rendering()
    places = [path] if path.suffix in SUFFIXES else [Path(f"{path}{own}") for own in SUFFIXES]
    for place in places:
        with atomic_output(place) as file:
            file.write_bytes(b"%PDF" if place.suffix == ".pdf" else b"\x89PNG\r\n\x1a\n")
    return places


@pytest.fixture(scope="session", autouse=True)
def small_figures() -> Iterator[None]:
    """Let reports draw their figures once; tests of the files have `real_figures`."""
    with mock.patch.object(figures, save_figure.__name__, draw_without_saving):
        yield


@pytest.fixture
def real_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports write their figures as they do."""
    monkeypatch.setattr(figures, save_figure.__name__, save_figure)


@pytest.fixture(scope="session", autouse=True)
def composed_once() -> Iterator[None]:
    """Read files once, and find and merge those of equal choices of groups once: with values of keys on
    top a command's configuration took a sixth of a second, most of it for these.
    """
    merge = ConfigLoaderImpl._compose_config_from_defaults_list
    read = ConfigRepository.load_config
    lists, merged, results = dict[Any, DefaultsList](), dict[Any, bytes](), dict[Any, bytes]()

    def read_file(repo: Any, config_path: str) -> Any:
        if not has_fixed_files(repo):
            return read(repo, config_path)
        sources = (source.path for source in repo.get_sources())
        key = (config_path, *sources, *describe_added_choices())
        if key not in results:
            results[key] = pickle.dumps(read(repo, config_path))
        return pickle.loads(results[key])

    def list_files(
        repo: Any, config_name: str | None, overrides_list: list[Any], **how: bool
    ) -> DefaultsList:
        values = Overrides(repo, overrides_list).config_overrides
        choices = [word for word in overrides_list if word not in values]
        if not has_fixed_files(repo):
            return create_defaults_list(repo, config_name, overrides_list, **how)
        lines = (word.input_line for word in choices)
        key = (str(config_name), *lines, *how.values(), *describe_added_choices())
        if key not in lists:
            lists[key] = create_defaults_list(repo, config_name, choices, **how)
        return dataclasses.replace(lists[key], config_overrides=values)

    def merge_files(loader: Any, defaults: list[Any], repo: Any) -> DictConfig:
        if not has_fixed_files(repo):
            return merge(loader, defaults, repo)
        key = (*((one.config_path, one.package) for one in defaults), *describe_added_choices())
        if key not in merged:
            merged[key] = pickle.dumps(merge(loader, defaults, repo))
        return pickle.loads(merged[key])

    with (
        mock.patch.object(config_loader_impl, "create_defaults_list", list_files),
        mock.patch.object(ConfigLoaderImpl, merge.__name__, merge_files),
        mock.patch.object(ConfigRepository, read.__name__, read_file),
        mock.patch.object(
            ConfigRepository, "__deepcopy__", lambda repo, _: copy.copy(repo), create=True
        ),
    ):
        yield


def has_fixed_files(repo: Any) -> bool:
    """Whether the files are the project's and its packages' alone, which stay as they are."""
    return all(
        source.scheme() != "file" or source.path == str(ROOT / "conf")
        for source in repo.get_sources()
    )


def describe_added_choices() -> list[str]:
    """Return the choices that plugins have added, with their values."""
    groups = ConfigStore.instance().repo
    return [
        f"{kind.group}={name}: {groups[kind.group][f'{name}.yaml'].node}"
        for kind, name in plugins._added_choices
    ]


@pytest.fixture(scope="session", autouse=True)
def without_syncs() -> Iterator[None]:
    """Wait for no disk: a sync takes milliseconds, and guards from what no test can try, a power
    cut.
    """
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.fixture
def without_collections() -> Iterator[None]:
    """Collect no garbage: syntax trees, which have no cycles, are then read in half the time."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of collected tests are garbage at no time: without this each collection would go
    through them.
    """
    gc.collect()
    gc.freeze()
