"""Promises of a user's code: functions that try it, and raise Unkept where it breaks them.

A run asks the few promises that are marked for runs; `fedpfl check` and pytest ask all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from fedpfl.ground.errors import FedpflError, MethodError, error_text, original_error


class Unkept(AssertionError):
    """A promise is not kept; the message says what differs, and by how much."""


class Untriable(FedpflError):
    """No promise can be tried until the user fixes something: files are absent, say."""


class Promise(NamedTuple):
    """Hold a promise, its check, and advice for code that breaks it.

    Attributes:
        title: The promise in words, as the command prints it.
        advice: How to fix code that does not keep it.
        check: `check(trial)`, or `check(trial, engine)` for each of `engines`.
        engines: The backends that it is tried on, if it depends on them.
        binding: Whether it must be kept; a broken one that need not be is only noted.
        slow: Whether a quick look leaves it out.
        for_runs: Whether a run of a plugin asks it before its first round: "batched" where the
            batched backend may be taken.
    """

    title: str
    advice: str
    check: Callable[..., None]
    engines: tuple[str, ...] = ()
    binding: bool = True
    slow: bool = False
    for_runs: Literal["", "always", "batched"] = ""


class Verdict(NamedTuple):
    """Faults found in a promise, and advice; empty if it is kept."""

    promise: Promise
    faults: list[str]
    advice: str


def promise_in(promises: list[Promise]) -> Callable[..., Callable[[Any], Any]]:
    """Make a decorator `promise(title, advice, ...)` that appends its function to the list."""

    def promise(title: str, advice: str, **options: Any) -> Callable[[Any], Any]:
        def register(check: Callable[..., None]) -> Callable[..., None]:
            promises.append(Promise(title, advice, check, **options))
            return check

        return register

    return promise


def repeats_elsewhere(trial: Any) -> None:
    """Compare a trial's digests with those of another process, which asks in another order."""
    if trial.ask_elsewhere is None:
        raise Untriable("another process needs the name of the choice and its plugin file")
    there = trial.ask_elsewhere()
    if "error" in there:
        raise Unkept(f"another process fails: {there['error']}")
    here = trial.digests()
    names = [name for name in here if here[name] != there.get(name)]
    if names:
        raise Unkept(f"another process has other {names[0]}")


def describe_error(error: BaseException) -> str:
    """Describe an error in one line."""
    return f"raised {error_text(original_error(error), with_class=True)}"


def audit(trial: Any, promises: list[Promise], quick: bool = False) -> Iterator[Verdict]:
    """Try each promise and yield its verdict; stop after the first if it is broken.

    Args:
        trial: The trial.
        promises: The promises; the first is about the form of answers.
        quick: Whether to leave out slow promises and all engines but one.

    Raises:
        Untriable: No promise can be tried, as files are absent.
    """
    for promise in promises:
        if quick and promise.slow:
            continue
        is_first = promise is promises[0]
        verdict = try_promise(trial, promise, quick and not is_first)
        if is_first and verdict.faults:
            yield verdict._replace(advice="the rest is tried once this is fixed")
            return
        yield verdict


def try_promise(trial: Any, promise: Promise, quick: bool = False) -> Verdict:
    """Try one promise on its engines, the last alone if quick. Raises Untriable."""
    engines = promise.engines or ("",)
    if quick:
        engines = engines[-1:]
    faults: dict[str, str] = {}
    is_tried_to_end = False
    for engine in engines:
        fault, is_unkept = _try_on_engine(trial, promise, engine)
        if fault:
            faults[engine] = fault
        is_tried_to_end |= is_unkept

    # A fault that all engines share is told once, without their names.
    if len(faults) == len(engines) and len(set(faults.values())) == 1:
        lines = list(faults.values())[:1]
    else:
        lines = [f"{engine}: {fault}" for engine, fault in faults.items()]
    advice = promise.advice if is_tried_to_end else ""
    return Verdict(promise, lines, advice and f"-> {advice}")


def _try_on_engine(trial: Any, promise: Promise, engine: str) -> tuple[str, bool]:
    """Return the fault, "" for none, and whether the promise was tried to its end."""
    try:
        if engine:
            promise.check(trial, engine)
        else:
            promise.check(trial)
    except Untriable:
        raise
    except (Unkept, MethodError) as fault:
        return str(fault), isinstance(fault, Unkept)
    except (Exception, SystemExit) as error:
        describe = getattr(trial, "describe_error", describe_error)
        return describe(error), False
    return "", False
