"""Promises of a user's code: functions that try it, and raise Unkept where it breaks them.

A run asks the few promises that are marked for runs; `fedpfl check` and pytest ask all.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fedpfl
from fedpfl.engine import vmap_advice
from fedpfl.engine.backends.ranks import error_frames
from fedpfl.ground.errors import FedpflError, MethodError, error_text, original_error

LIBRARIES = (str(Path(fedpfl.__file__).parent), sysconfig.get_path("purelib"))


class Unkept(AssertionError):
    """A promise is not kept; the message says what differs, and by how much."""


class Untriable(FedpflError):
    """No promise can be tried until the user fixes something: files are absent, say."""


class Trial:
    """Code of a user, made ready for promises.

    Attributes:
        ask_elsewhere: Returns the digests of another process; None: no process can make the trial.
    """

    ask_elsewhere: Callable[[], dict[str, str]] | None = None

    def digests(self, is_elsewhere: bool = False) -> dict[str, str]:
        """Return digests of the code's answers by name; the other process asks in another order."""
        raise NotImplementedError


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


def repeats_elsewhere(trial: Trial) -> None:
    """Compare a trial's digests with those of another process, which asks in another order."""
    if trial.ask_elsewhere is None:
        raise Untriable("another process needs the name of the choice and its plugin file")
    there = trial.ask_elsewhere()
    if "error" in there:
        raise Unkept(f"another process fails: {there['error']}")
    for name, digest in trial.digests().items():
        if digest != there.get(name):
            raise Unkept(f"another process has other {name}")


def audit(trial: Trial, promises: list[Promise], quick: bool = False) -> Iterator[Verdict]:
    """Try each promise and yield its verdict; stop after the first if it is broken.

    Args:
        trial: The trial.
        promises: The promises; the first is about the form of answers.
        quick: Whether to leave out slow promises and all engines but one.

    Raises:
        Untriable: No promise can be tried, as files are absent.
    """
    first, *rest = promises
    verdict = try_promise(trial, first)
    if verdict.faults:
        yield verdict._replace(advice="the rest is tried once this is fixed")
        return
    yield verdict
    for promise in rest:
        if not (quick and promise.slow):
            yield try_promise(trial, promise, quick)


def try_promise(trial: Trial, promise: Promise, quick: bool = False) -> Verdict:
    """Try one promise on its engines, the last alone if quick. Raises Untriable."""
    faults: list[str] = []
    advice = ""
    engines = promise.engines or ("",)
    for engine in engines[-1:] if quick else engines:
        try:
            promise.check(trial, *[engine] if engine else [])
            continue
        except Untriable:
            raise
        except Unkept as error:
            fault = str(error)
            advice = f"-> {promise.advice}"
        except MethodError as error:
            fault = str(error)
        except (Exception, SystemExit) as error:
            fault = describe_error(error)
        faults.append(f"{engine}: {fault}" if engine else fault)
    return Verdict(promise, faults, advice if promise.advice else "")


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with its place in the author's code."""
    original = original_error(error)
    text = vmap_advice(original) or f"raised {error_text(original, with_class=True)}"
    for file, function, line in reversed(error_frames(error)):
        if not file.startswith((*LIBRARIES, "<")):
            return f"{function} {text} ({file}:{line})"
    return text
