"""Turn promises into test items of the author's own pytest, as scikit-learn does for estimators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from fedpfl import models
from fedpfl.config import overrides, plugins
from fedpfl.data import datasets
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values
from fedpfl.testing.dataset_promises import DatasetTrial
from fedpfl.testing.elsewhere import OtherProcess
from fedpfl.testing.network_promises import NetworkTrial
from fedpfl.testing.partition_promises import PartitionTrial
from fedpfl.testing.promises import Promise, Trial, Unkept, Untriable, try_promise
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

    Exactly one of `method`, `model`, `dataset` and `partition` is given. A check raises Unkept
    where the promise is broken, warns if it is not binding, and skips the test where it cannot be
    tried.

    Args:
        method: A method's name or its class.
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
    make = _make_named_trial if isinstance(value, str) else _make_trial_of_code
    make = cache(partial(make, kind, value, options, plugins))
    promises = PROMISES_BY_KIND[kind]
    items = [
        pytest.param(partial(_check_promise, make, promises[0], promise), id=promise.title)
        for promise in promises
    ]
    return pytest.mark.parametrize("check", items)


def _check_promise(make_trial: Callable[[], Trial], first: Promise, promise: Promise) -> None:
    """Try a promise. Raises Unkept, or skips the test."""
    import pytest

    trial = make_trial()
    # No other promise means anything before the first one is kept.
    if promise is not first and try_promise(trial, first).faults:
        pytest.skip("tried once the first promise is kept")
    try:
        verdict = try_promise(trial, promise)
    except Untriable as reason:
        pytest.skip(str(reason))
    if not verdict.faults:
        return
    text = "\n".join([promise.title, *verdict.faults, verdict.advice]).strip()
    if promise.binding:
        raise Unkept(text)
    warnings.warn(text, PromiseWarning, stacklevel=2)


def _make_trial_of_code(
    kind: str, value: Any, options: Values, plugin_files: Sequence[str]
) -> Trial:
    """Make the trial of a class or function. Raises FedpflError."""
    plugins.load_plugins(plugin_files)
    own_options = {key: value for key, value in options.items() if key not in TRIAL_KEYS}
    if kind == "method":
        return MethodTrial(build_dataclass(value, own_options, ""))
    if kind == "partition":
        return PartitionTrial(value, own_options, options.get("clients"))
    # Networks and data sets are made by their name, which may not be another choice's.
    name = value.__name__
    if kind == "model":
        models.MODELS[name] = value
        return NetworkTrial(name, options.get("shape"), options=own_options)
    datasets.DATA_SETS[name] = value
    return DatasetTrial(name, Path(options.get("data_dir", "data")), own_options)


def _make_named_trial(kind: str, name: str, options: Values, plugin_files: Sequence[str]) -> Trial:
    """Make the trial of a choice, with its YAML's defaults. Raises FedpflError."""
    files = plugins.load_plugins(plugin_files)
    if name not in list_names(kind):
        raise FedpflError(
            f"{kind}={name} is no choice; name the file that adds it in plugins=[...]"
        )
    settings: list[str] = []
    for key, value in options.items():
        full_key = key if key in TRIAL_KEYS else f"{kind}.{key}"
        settings += overrides.format_words(full_key, value)
    (subject,) = read_subjects([(kind, name)], settings)
    trial = make_trial(subject)
    OtherProcess(files).attach(trial, subject)
    return trial
