"""Turn promises into test items of the author's own pytest, as scikit-learn does for estimators."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedpfl.config import overrides, plugins
from fedpfl.config.plugins import resolve_files
from fedpfl.config.twins import build_repeatable_network
from fedpfl.ground.checks import build_dataclass
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, Method
from fedpfl.testing.dataset_promises import DatasetTrial
from fedpfl.testing.network_promises import NetworkTrial
from fedpfl.testing.partition_promises import PartitionTrial
from fedpfl.testing.promises import Promise, Unkept, Untriable, Verdict, try_promise
from fedpfl.testing.toy import MethodTrial
from fedpfl.testing.trials import (
    PROMISES_BY_KIND,
    REGISTRIES,
    Choice,
    Command,
    OtherProcess,
    choice_names,
    make_judge,
    make_trials,
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
    """Return a pytest decorator that gives the test one `check` per promise.

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
    subject = PromiseSubject(kind, value, plugins, options)
    checks = [PromiseCheck(subject, promise) for promise in PROMISES_BY_KIND[kind]]
    items = [pytest.param(check, id=check.promise.title) for check in checks]
    return pytest.mark.parametrize("check", items)


class PromiseCheck:
    """Try one promise when it is called.

    Raises Unkept where the promise is broken, warns if it is not binding, and skips the test where
    it cannot be tried.
    """

    def __init__(self, subject: PromiseSubject, promise: Promise):
        self._subject = subject
        self.promise = promise

    def __repr__(self) -> str:
        return f"<check: {self.promise.title}>"

    def __call__(self) -> None:
        """Try the promise."""
        import pytest

        try:
            verdict = self._subject.try_promise(self.promise)
        except Untriable as reason:
            pytest.skip(str(reason))
        if not verdict.faults:
            return
        text = "\n".join([self.promise.title, *verdict.faults, verdict.mend]).strip()
        if self.promise.binding:
            raise Unkept(text)
        warnings.warn(text, PromiseWarning, stacklevel=2)


class PromiseSubject:
    """A method, network, data set or partition, and its trial, made when first needed."""

    def __init__(
        self, kind: str, value: Any, plugin_files: Sequence[str], options: Mapping[str, Any]
    ):
        self._kind = kind
        self._value = value
        self._plugin_files = resolve_files(plugin_files)
        self._options = dict(options)

    def try_promise(self, promise: Promise) -> Verdict:
        """Return the verdict on a promise. Raises Untriable, also if the first one is broken."""
        if promise is PROMISES_BY_KIND[self._kind][0]:
            return self._first_verdict
        if self._first_verdict.faults:
            raise Untriable("tried once the first promise is kept")
        return self._judge(promise)

    @cached_property
    def _first_verdict(self) -> Verdict:
        return self._judge(PROMISES_BY_KIND[self._kind][0])

    def _judge(self, promise: Promise) -> Verdict:
        with self._register_choices():
            trial = self._trial
            judge = make_judge(self._kind, trial)
            return try_promise(trial, promise, quick=False, judge=judge)

    @contextmanager
    def _register_choices(self) -> Iterator[None]:
        """Add the plugins' choices, and an object itself, to the registries for a check."""
        plugins.load_plugins(self._plugin_files)
        if isinstance(self._value, str):
            yield
            return
        registry = REGISTRIES[self._kind].registry
        name = self._object_name
        # The name may be another choice's, which has it back afterwards.
        shadowed = {key: registry[key] for key in [name] if key in registry}
        registry[name] = self._value
        try:
            yield
        finally:
            del registry[name]
            registry.update(shadowed)

    @property
    def _object_name(self) -> str:
        return getattr(self._value, "__name__", type(self._value).__name__)

    @cached_property
    def _trial(self) -> Any:
        if isinstance(self._value, str):
            return self._make_named_trial()
        return self._make_object_trial()

    def _make_named_trial(self) -> Any:
        """Return the trial of a choice by its name, with its YAML's defaults."""
        choice = Choice(self._kind, self._value)
        if choice.name not in choice_names(choice.kind):
            raise FedpflError(f"{choice} is no choice; name the file that adds it in plugins=[...]")
        settings = [
            word
            for key, value in self._options.items()
            for word in overrides.format_words(key, value)
        ]
        # `fedpfl check` in another process takes one file.
        check_words = [*self._plugin_files[:1], str(choice), *settings]
        command = Command([choice], settings, by_name=True)
        trial = make_trials(command, OtherProcess(check_words))[choice]
        # The other process would know the choices of one file alone.
        if len(self._plugin_files) > 1 and hasattr(trial, "read_elsewhere"):
            trial.read_elsewhere = None
        return trial

    def _make_object_trial(self) -> Any:
        """Return the trial of a class, function or instance, with the defaults of its arguments."""
        options = dict(self._options)
        if self._kind == "method":
            if isinstance(self._value, Method):
                return MethodTrial(replace(self._value, **options))
            return MethodTrial(build_dataclass(self._value, options, ""))
        if self._kind == "model":
            shape = options.pop("shape", None)
            build = partial(build_repeatable_network, self._object_name, **options)
            return NetworkTrial(build, METHODS["fedavg"](), shape)
        if self._kind == "dataset":
            data_dir = Path(options.pop("data_dir", "data"))
            return DatasetTrial(self._object_name, data_dir, options)
        clients = options.pop("clients", None)
        return PartitionTrial(self._value, options, clients)
