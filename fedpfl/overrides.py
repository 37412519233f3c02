"""The words of the command line: options in any place, one value for several choices of a group."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterable, Iterator, Sequence

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from fedpfl.errors import FedpflError


def options_first(words: Sequence[str]) -> list[str]:
    """Return `seed=1,2 -m` as Hydra takes it, with options before keys. Raises FedpflError for what is no option."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            keys = get_args_parser().parse_intermixed_args(words).overrides
    except SystemExit as end:
        if not end.code:  # --version
            raise
        reason = said.getvalue().rpartition("error: ")[2].strip()
        raise FedpflError(f"{reason}; `python -m fedpfl.train --help` lists options and groups") from None
    return [*(word for word in words if word not in keys), *keys]


def for_sweeps(words: Iterable[str], conf: str, groups: Collection[str]) -> list[str]:
    """`method=heterofl,fedrolex method.assign=random` as Hydra takes it: the second with `++` before it.

    Hydra composes once before the sweep, without what is swept over, and refuses `method.assign` where the method that
    stands there by default lacks it. Every job checks its own keys when it is built. A key that the experiment sweeps
    over becomes a sweep over the one value. conf: folder with train.yaml; groups: names of configuration groups.
    """
    words = list(words)
    given = {place: override for place, word in enumerate(words) if (override := _parsed(word))}
    inside = {
        place: override.key_or_group.split(".")[0]
        for place, override in given.items()
        if override.type == OverrideType.CHANGE and "." in override.key_or_group and not override.is_sweep_override()
    }
    chosen = {override.key_or_group: override for override in given.values() if override.key_or_group in groups}
    swept = {name for name, override in chosen.items() if override.is_sweep_override()}
    own: set[str] = set()
    if set(inside.values()) & set(groups):
        own = set(_of_experiment(given.values(), conf))
        swept |= own - set(chosen)
    for place in inside:
        if inside[place] not in swept & set(groups):
            continue
        key, _, value = words[place].partition("=")
        # `++` would stand beside what the experiment sweeps over; a sweep over one value takes its place.
        words[place] = f"{key}=choice({value})" if key in own else f"++{words[place]}"
    return words


def unwritten(words: Iterable[str]) -> list[str]:
    """Return the words for a process that leaves files to another: Hydra then makes no directory and no log."""
    logs = ("hydra/job_logging", "hydra/hydra_logging", "hydra.job_logging", "hydra.hydra_logging")
    return [
        *(word for word in words if not word.lstrip("+~").startswith(logs)),
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
    ]


def _parsed(word: str) -> Override | None:
    """None for options and for what Hydra itself will refuse."""
    if word.startswith("-"):
        return None
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _of_experiment(given: Iterable[Override], conf: str) -> Iterator[str]:
    """What the experiment itself sets for its jobs alone, be it a single value."""
    experiment = [str(override.input_line) for override in given if override.key_or_group == "experiment"]
    if not experiment:
        return
    try:
        with initialize_config_dir(conf, version_base="1.3"):
            sweeper = compose("train", experiment, return_hydra_config=True).hydra.sweeper
    except (HydraException, OmegaConfBaseException):
        return  # Hydra will tell
    yield from map(str, sweeper.params or {})
