"""Turn promises into test items of the author's own pytest, as scikit-learn does for estimators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from fedpfl import models
from fedpfl.config import overrides, plugins
from fedpfl.data import datasets
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, Method
from fedpfl.testing.dataset_promises import DatasetTrial
from fedpfl.testing.elsewhere import OtherProcess
from fedpfl.testing.network_promises import NetworkTrial
from fedpfl.testing.partition_promises import PartitionTrial
from fedpfl.testing.promises import Promise, Unkept, Untriable, Verdict, try_promise
from fedpfl.testing.toy import MethodTrial
from fedpfl.testing.trials import (
    PROMISES_BY_KIND,
    TRIAL_KEYS,
    list_names,
    make_trial,
    read_subjects,
)


class PromiseWarning(UserWarning):
    """A promise that need not be kept is not kept; it may be on purpose."""


def parametrize_with_promises(
    *,
    method: Any = None,
    model: Any = None,
    dataset: Any = None,
    partition: Any = None,
    plugins: Sequence[str] = (),
    **options: Any,
) -> Callable[[Any], Any]:
    """Make a pytest decorator that gives the test one `check` per promise.

    Exactly one of `method`, `model`, `dataset` and `partition` is given.

    Args:
        method: A method's name, its class or an instance.
        model: A network's name, or its class or function.
        dataset: A data set's name, or its reader.
        partition: A partition's name, or its function.
        plugins: Python files that add the name.
        **options: Values in place of defaults, and `shape` for a network, `data_dir` for a data
            set, `clients` for a partition.
    """
    import pytest  # here, as a run does not need it

    candidates = {"method": method, "model": model, "dataset": dataset, "partition": partition}
    selected = {kind: value for kind, value in candidates.items() if value is not None}
    if len(selected) != 1:
        raise TypeError("give one of method, model, dataset and partition")
    ((kind, value),) = selected.items()
    # A trial is made once, when its first promise is tried.
    make = cache(partial(_make_trial, kind, value, plugins, options))
    checks = [PromiseCheck(kind, make, promise) for promise in PROMISES_BY_KIND[kind]]
    items = [pytest.param(check, id=check.promise.title) for check in checks]
    return pytest.mark.parametrize("check", items)


class PromiseCheck:
    """Try one promise when it is called.

    Raises Unkept where the promise is broken, warns if it is not binding, and skips the test where
    it cannot be tried.
    """

    def __init__(self, kind: str, make_trial: Callable[[], Any], promise: Promise):
        self._kind = kind
        self._make_trial = make_trial
        self.promise = promise

    def __repr__(self) -> str:
        return f"<check: {self.promise.title}>"

    def __call__(self) -> None:
        """Try the promise."""
        import pytest

        try:
            verdict = self._try_promise()
        except Untriable as reason:
            pytest.skip(str(reason))
        if not verdict.faults:
            return
        text = "\n".join([self.promise.title, *verdict.faults, verdict.advice]).strip()
        if self.promise.binding:
            raise Unkept(text)
        warnings.warn(text, PromiseWarning, stacklevel=2)

    def _try_promise(self) -> Verdict:
        trial = self._make_trial()
        first = PROMISES_BY_KIND[self._kind][0]
        # No other promise means anything before the first one is kept.
        if self.promise is not first and try_promise(trial, first).faults:
            raise Untriable("tried once the first promise is kept")
        return try_promise(trial, self.promise)


def _make_trial(
    kind: str, value: Any, plugin_files: Sequence[str], options: Mapping[str, Any]
) -> Any:
    """Make the trial of a name, class, function or instance. Raises FedpflError."""
    files = plugins.load_plugins(plugin_files)
    if isinstance(value, str):
        return _make_named_trial(kind, value, files, options)
    options = dict(options)
    name = getattr(value, "__name__", type(value).__name__)
    if kind == "method":
        if isinstance(value, Method):
            return MethodTrial(replace(value, **options))
        return MethodTrial(build_dataclass(value, options, ""))
    if kind == "partition":
        return PartitionTrial(value, options, options.pop("clients", None))
    # Networks and data sets are made by their name, which may not be another choice's.
    if kind == "model":
        models.MODELS[name] = value
        shape = options.pop("shape", None)
        build = partial(models.build_network, name, **options)
        make = partial(models.make_module, name, **options)
        return NetworkTrial(build, METHODS["fedavg"](), shape, make=make)
    datasets.DATA_SETS[name] = value
    return DatasetTrial(name, Path(options.pop("data_dir", "data")), options)


def _make_named_trial(
    kind: str, name: str, files: Sequence[str], options: Mapping[str, Any]
) -> Any:
    """Make the trial of a choice, with its YAML's defaults. Raises FedpflError."""
    if name not in list_names(kind):
        raise FedpflError(
            f"{kind}={name} is no choice; name the file that adds it in plugins=[...]"
        )
    settings: list[str] = []
    for key, value in options.items():
        full_key = key if key in TRIAL_KEYS else f"{kind}.{key}"
        settings += overrides.format_words(full_key, value)
    (subject,) = read_subjects([(kind, name)], settings)
    other_process = OtherProcess(files, {str(subject): subject})
    return make_trial(subject, partial(other_process.ask, str(subject)))
