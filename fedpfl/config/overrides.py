"""The words of the command line: options in any place, one value for several choices of a group."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from numbers import Real
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config import resolvers  # noqa: F401 - which the defaults of train.yaml ask for
from fedpfl.config.composition import SEARCHPATH, CachingLoader
from fedpfl.ground.checks import refuse_single_text
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record
from fedpfl.ground.words import check_words

CONF = str((Path(__file__).parents[1] / "conf").resolve())
"""The folder with train.yaml: in a checkout a link to the one at the top."""
LISTED = "`python -m fedpfl.train --hydra-help` lists options"
MULTIRUN_OPTIONS = ("-m", "--multirun", "--config-dir")
"""The options of commands that sweep by themselves, where they change nothing."""
FILE = "file://"
HYDRA_ERRORS = HydraException, OmegaConfBaseException
"""What is raised for words that Hydra refuses."""


_caching_loader: ContextVar[CachingLoader | None] = ContextVar("caching loader", default=None)


@contextlib.contextmanager
def _hydra() -> Iterator[Hydra]:
    """Yield Hydra with our configuration; one in use around this stays as it was."""
    # Hydra is a process's singleton. Inside a job of a sweep it is in use, and must find itself as
    # it was when this composition ends.
    outer_instances = {
        kind: Singleton._instances.pop(kind, None)
        for kind in (GlobalHydra, VersionBase, JobRuntime)
    }
    try:
        with initialize_config_dir(CONF, version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            yield hydra
    finally:
        for kind, instance in outer_instances.items():
            Singleton._instances.pop(kind, None)
            if instance is not None:
                Singleton._instances[kind] = instance


@contextlib.contextmanager
def composing_once() -> Iterator[None]:
    """Compose what configurations have in common once while the body runs, which edits none."""
    with _hydra() as hydra:
        loader = CachingLoader(hydra.config_loader)
    token = _caching_loader.set(loader)
    try:
        yield
    finally:
        _caching_loader.reset(token)


def compose_config(run_words: Sequence[str]) -> DictConfig:
    """Return the configuration, with Hydra's part. Raises what Hydra and OmegaConf do."""
    with _hydra() as hydra:
        hydra.config_loader = _caching_loader.get() or hydra.config_loader
        try:
            return compose("train", add_open_keys(run_words), return_hydra_config=True)
        except ValueError as error:  # such as `model=5`
            raise FedpflError(str(error)) from None


def compose_single_run(run_words: Sequence[str]) -> DictConfig:
    """Return the configuration of one run, with what its experiment sets for its jobs.

    Raises:
        FedpflError: for a sweep; and what Hydra and OmegaConf raise.
    """
    cfg, experiment_words = _compose_with_experiment(run_words)
    all_words = [*run_words, *experiment_words]
    for word in all_words:
        if is_sweep(word):
            raise FedpflError(
                f"{word} is a sweep, and this is one run: give {word.partition('=')[0]} one value "
                "at a time"
            )
    return compose_config(all_words) if experiment_words else cfg


def expand_sweep(run_words: Sequence[str]) -> list[tuple[list[str], Record]]:
    """Return the words of each run of a sweep, and its swept values by key.

    They are those that `-m` makes. Raises what Hydra and OmegaConf do.
    """
    _, experiment_words = _compose_with_experiment(run_words)
    with _hydra() as hydra:
        # glob(*) asks the loader which choices there are.
        parser = OverridesParser.create(hydra.config_loader)
        # The experiment's words first, as Hydra has it: their order is that of the jobs.
        parsed = parser.parse_overrides([*experiment_words, *run_words])
        batches = BasicSweeper.split_arguments(parsed, None)
    swept_keys = [override.key_or_group for override in parsed if override.is_sweep_override()]
    jobs = []
    for job in batches[0]:
        job_words = [requote_word(word) for word in job]
        # The sweeper hands out texts; parsed again, 0.10 and 0.1 are one value of a table.
        by_key = {override.key_or_group: override for override in _parse_words(job_words)}
        swept_values = {key: _to_table_value(by_key[key]) for key in swept_keys}
        jobs.append((job_words, swept_values))
    return jobs


def _to_table_value(override: Override) -> Any:
    """Return a value that can stand in a table: of a list or mapping its text."""
    value = override.value()
    if isinstance(value, list | dict):
        return override.get_value_element_as_str()
    return value


def _compose_with_experiment(run_words: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return the configuration without sweeps, and the experiment's words for its jobs."""
    cfg = compose_config([word for word in run_words if not is_sweep(word)])
    dropped_keys = find_dropped_sweeps(cfg.hydra, run_words)
    return cfg, [f"{key}={cfg.hydra.sweeper.params[key]}" for key in dropped_keys]


def find_dropped_sweeps(hydra_cfg: Any, run_words: Iterable[str]) -> list[str]:
    """List the keys that the configuration sweeps over, and words do not set."""
    user_keys = {override.key_or_group for override in _parse_words(run_words)}
    return [key for key in hydra_cfg.sweeper.get("params") or {} if key not in user_keys]


# ---- Values as words


def format_words(key: str, value: Any, lists_are_sweeps: bool = False) -> Iterator[str]:
    """Yield `key=value` as the command line says it, for each value in a mapping.

    Args:
        key: with dots.
        value: of any type.
        lists_are_sweeps: whether several values are a sweep and not a list.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from format_words(f"{key}.{name}", inner, lists_are_sweeps)
    elif lists_are_sweeps and isinstance(value, Iterable) and not isinstance(value, str):
        yield f"{key}=choice({','.join(map(_format_value, value))})"
    else:
        yield f"{key}={_format_value(value)}"


def _format_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_format_value, value))}]"
    # Before numbers: a bool is one, and Hydra would take Python's `True` for a text.
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Real):
        return str(value)
    return QuotedString(str(value), Quote.single).with_quotes()


def requote_word(word: str) -> str:
    """Return a word of a sweep's job with the quotes that letters beyond ASCII need.

    Hydra leaves them out, and then cannot read the word.
    """
    key, equals, text = word.partition("=")
    # What begins so is quoted or structured already, and Hydra reads it.
    if text.isascii() or text[0] in "[{'\"":
        return word
    # The sweeper put backslashes where quotes had made them needless; quoting anew would double
    # them.
    unescaped = re.sub(r"\\(.)", r"\1", text)
    return f"{key}{equals}{_format_value(unescaped)}"


def quote_word(key: str, value: str) -> str:
    """Return `"key='value'"`: any text as a shell hands it to Hydra."""
    word = f"{key}={_format_value(value)}"
    return shlex.quote(word) if set("'\"$`\\!") & set(value) else f'"{word}"'


def quote_list(key: str, values: Iterable[str]) -> str:
    """Return `key=['a','b']` as a shell hands it to Hydra."""
    (word,) = format_words(key, list(values))
    return shlex.quote(word)


# ---- The shell and Hydra's options


def print_completion(request: str, line: str) -> None:
    """Print what Hydra answers a shell that completes a command.

    Args:
        request: `install=bash` asks for a script, `query=bash` for completions of `line`.
        line: The text typed so far.
    """
    os.environ["COMP_LINE"] = line
    answer = io.StringIO()
    # A message would be printed into the line that is being typed.
    with (
        contextlib.redirect_stdout(answer),
        contextlib.redirect_stderr(io.StringIO()),
        _hydra() as hydra,
    ):
        hydra.shell_completion("train", [request])
    # Hydra's script for bash splits the program's path at a space, and then offers nothing.
    script = answer.getvalue().replace("=($(command -v $helper))", '=("$(command -v $helper)")')
    print(script, end="")


def move_options_first(arguments: Iterable[str]) -> list[str]:
    """Return `seed=1,2 -m` as Hydra takes it, with options before keys.

    Raises:
        FedpflError: For an unknown option.
    """
    parser = get_args_parser()
    # argparse takes the beginning of an option for the option, `-participation=1` for `-p`.
    arguments = check_words(list(arguments), parser._option_string_actions, LISTED)
    run_words = parser.parse_intermixed_args(arguments).overrides
    return [*(argument for argument in arguments if argument not in run_words), *run_words]


def replace_config_dir_option(arguments: Sequence[str]) -> list[str]:
    """Return `--config-dir my_conf` as `hydra.searchpath=[file:///.../my_conf]`.

    The key also holds for configurations that are composed later, as those of a sweep's workers.

    Raises:
        FedpflError: If the folder does not exist.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    options, other_arguments = parser.parse_known_args(arguments)
    if options.config_dir is None:
        return list(arguments)
    folder = Path(options.config_dir).expanduser().absolute()
    if not folder.is_dir():
        raise FedpflError(f"--config-dir {options.config_dir} is no folder; give an existing one")
    return [*other_arguments, f"{SEARCHPATH}={_format_value([f'{FILE}{folder}'])}"]


OPEN_GROUP = "model.config."
"""Beginning of keys that no file lists."""


def add_open_keys(run_words: Iterable[str]) -> list[str]:
    """Return words with `++` before keys of OPEN_GROUP, without which Hydra refuses them."""
    return [f"++{word}" if word.startswith(OPEN_GROUP) else word for word in run_words]


def adapt_for_sweeps(run_words: Iterable[str], groups: Collection[str]) -> list[str]:
    """Return words as Hydra takes them where a sweep is over choices of a group.

    Of `method=heterofl,fedrolex method.assign=random` the second gets `++` before it. Hydra
    composes once before the sweep, without the swept words, and would refuse `method.assign`
    because the default method lacks it. A job checks its keys when it is built.

    Args:
        run_words: The words of the command line.
        groups: Names of configuration groups.
    """
    words = add_open_keys(run_words)
    swept_groups = {word.partition("=")[0] for word in words if is_sweep(word)} & set(groups)
    for position, word in enumerate(words):
        group, dot, _ = word.partition("=")[0].partition(".")
        if dot and group in swept_groups and not is_sweep(word):
            words[position] = f"++{word}"
    return words


# ---- Reading words


def _parse_word(word: str) -> Override | None:
    """Read a word; None for options and for what Hydra itself will refuse."""
    if word.startswith("-"):
        return None
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _parse_words(run_words: Iterable[str]) -> list[Override]:
    """Read the words that are no options and can be read."""
    overrides = map(_parse_word, run_words)
    return [override for override in overrides if override is not None]


def read_list_value(run_words: Iterable[str], key: str) -> list[str]:
    """Return the list of texts that the words set a key to.

    It is empty for a sweep, for `null` and for numbers. Raises FedpflError for a single text.
    """
    value = _read_value(run_words, key)
    if value:
        refuse_single_text(value, key)
    return list(map(str, value)) if isinstance(value, list) else []


def read_text_value(run_words: Iterable[str], key: str) -> str:
    """Return the text that the words set a key to; "" where they do not."""
    value = _read_value(run_words, key)
    return "" if value is None else str(value)


def _read_value(run_words: Iterable[str], key: str) -> Any:
    """Return the one value that the words set a key to, None without any."""
    value: Any = None
    for override in _parse_words(run_words):
        if override.key_or_group == key and not override.is_sweep_override():
            value = override.value()
    return value


def is_sweep(word: str) -> bool:
    """Return True if a word gives its key several values."""
    override = _parse_word(word)
    return override is not None and override.is_sweep_override()


def split_values(word: str) -> list[str]:
    """Return the values that a word gives its key, `[]` where they cannot be counted."""
    override = _parse_word(word)
    if override is None or not override.is_sweep_override():
        return [word.partition("=")[2]]
    if override.is_interval_sweep():
        return []
    return list(map(str, override.sweep_string_iterator()))


def find_config_dirs(run_words: Iterable[str]) -> list[Path]:
    """Return the folders beside ours in which words have configurations looked for."""
    entries = [entry.removeprefix(FILE) for entry in read_list_value(run_words, SEARCHPATH)]
    return [Path(entry) for entry in entries if "://" not in entry]
