"""Promises: what code of a user's keeps to, each a function that tries it and raises Unkept where
it does not.

A list of promises and something to try them on is all that `fedpfl check` needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fedpfl.ground.errors import FedpflError, MethodError, error_text, original_error


class Unkept(AssertionError):
    """A promise is not kept; the message says what differs, and by how much."""


class Untriable(FedpflError):
    """Nothing can be said of any promise before the user has mended this: files are absent, say."""


class Promise(NamedTuple):
    """Hold a promise: in words, how it is tried, and what mends what does not keep it.

    check: `check(trial)`, or `check(trial, engine)` for each of `engines`. binding: whether it must
    be kept. slow: whether a quick look leaves it out.
    """

    words: str
    mend: str
    check: Callable[..., None]
    engines: tuple[str, ...] = ()
    binding: bool = True
    slow: bool = False


class Verdict(NamedTuple):
    """Hold what came of a promise: the faults, and what mends them; both empty where it is kept."""

    promise: Promise
    faults: list[str]
    mend: str


def promise_in(promises: list[Promise]) -> Callable[..., Callable[[Any], Any]]:
    """Return a decorator `promise(words, mend, ...)` that appends the function below it to the
    list.
    """

    def promise(
        words: str,
        mend: str,
        engines: tuple[str, ...] = (),
        binding: bool = True,
        slow: bool = False,
    ) -> Callable[[Any], Any]:
        def register(check: Callable[..., None]) -> Callable[..., None]:
            promises.append(Promise(words, mend, check, engines, binding, slow))
            return check

        return register

    return promise


def describe_error(error: BaseException) -> str:
    """Say what was raised, in one line."""
    return f"raised {error_text(original_error(error), with_class=True)}"


def audit(
    trial: Any,
    promises: list[Promise],
    quick: bool = False,
    describe: Callable[[BaseException], str] = describe_error,
    advise: Callable[[Promise], str] = lambda promise: promise.mend,
) -> Iterator[Verdict]:
    """Try each promise and yield its verdict; where the first is not kept, the rest is not tried.

    quick: on one of the engines, without the slow ones. describe: words for what was raised.
    advise: what mends a promise that was tried and not kept. Raises Untriable.
    """
    for promise in promises:
        if quick and promise.slow:
            continue
        first, engines = promise is promises[0], promise.engines or ("",)
        tried = engines if first or not quick else engines[-1:]
        found = {engine: _find_fault(trial, promise, engine, describe) for engine in tried}
        faults = {engine: fault for engine, (fault, _) in found.items() if fault}
        # What all engines say alike is said once.
        alike = list(faults) == list(tried) and len(set(faults.values())) == 1
        lines = [f"{'' if alike else engine + ': '}{fault}" for engine, fault in faults.items()]
        mend = ""
        if faults and first:
            mend = "the rest is tried once this is mended"
        elif any(unkept for _, unkept in found.values()):
            advice = advise(promise)
            mend = advice and f"-> {advice}"
        yield Verdict(promise, lines[: 1 if alike else None], mend)
        if faults and first:
            return


def _find_fault(
    trial: Any, promise: Promise, engine: str, describe: Callable[[BaseException], str]
) -> tuple[str, bool]:
    """Return the fault, "" if there is none, and whether the promise was tried to its end."""
    try:
        promise.check(trial, *([engine] if engine else []))
    except Untriable:
        raise
    except (Unkept, MethodError) as fault:
        return str(fault), isinstance(fault, Unkept)
    except (Exception, SystemExit) as error:
        return describe(error), False
    return "", False
