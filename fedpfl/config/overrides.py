"""The words of the command line: options in any place, one value for several choices of a group."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl.config import resolvers  # noqa: F401 - which the defaults of train.yaml ask for
from fedpfl.config.choices import NESTED_GROUPS, list_choices
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.words import check_words, parser_options

CONF = str((Path(__file__).parents[1] / "conf").resolve())
"""The folder with train.yaml: in a checkout a link to the one at the top."""
LISTED = "`python -m fedpfl.train --hydra-help` lists options"
MULTIRUN_OPTIONS = {"-m": "", "--multirun": "", "--config-dir": "config_dir"}
"""The options of commands that sweep by themselves, where they change nothing."""
SEARCHPATH, FILE = "hydra.searchpath", "file://"
HYDRA_ERRORS = HydraException, OmegaConfBaseException
"""What is raised for words that Hydra refuses."""


@contextlib.contextmanager
def _hydra() -> Iterator[Hydra]:
    """Yield Hydra with our configuration; one that is in use around this is left as it was."""
    around = {
        kind: Singleton._instances.pop(kind, None)
        for kind in (GlobalHydra, VersionBase, JobRuntime)
    }
    try:
        with initialize_config_dir(CONF, version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            yield hydra
    finally:
        for kind, instance in around.items():
            Singleton._instances.pop(kind, None)
            if instance is not None:
                Singleton._instances[kind] = instance


def compose_config(words: Sequence[str]) -> DictConfig:
    """Return the configuration, with Hydra's part. Raises what Hydra and OmegaConf do."""
    with _hydra():
        return compose("train", list(words), return_hydra_config=True)


def compose_single_run(words: Sequence[str]) -> DictConfig:
    """Return `composed` of one run, with what its experiment sets for its jobs.

    Raises FedpflError for a sweep, and as `composed`.
    """
    cfg, more = _with_experiment(words)
    for word in filter(is_sweep, (*words, *more)):
        raise FedpflError(
            f"{word} is a sweep, and this is one run: give {word.partition('=')[0]} one value at a time"
        )
    return compose_config([*words, *more]) if more else cfg


def expand_sweep(words: Sequence[str]) -> list[tuple[list[str], dict[str, Any]]]:
    """Return each run of a sweep, as `-m` makes them: its words, and its values of what is swept
    over, by key.

    Raises as `composed`.
    """
    _, more = _with_experiment(words)
    with _hydra() as hydra:
        parsed = OverridesParser.create(hydra.config_loader).parse_overrides(
            [*more, *words]
        )  # which glob(*) asks
        split = [[*map(requote_word, job)] for job in BasicSweeper.split_arguments(parsed, None)[0]]
    swept = [override.key_or_group for override in parsed if override.is_sweep_override()]
    found = []
    for job in split:
        own = {override.key_or_group: override for override in filter(None, map(_parsed, job))}
        found.append((job, {key: _plain(own[key]) for key in swept}))
    return found


def _plain(override: Override) -> Any:
    """Return a value that can stand in a table: of a list or mapping its text."""
    value = override.value()
    return override.get_value_element_as_str() if isinstance(value, list | dict) else value


def _with_experiment(words: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return the configuration without what is swept over, and what the experiment sets for its
    jobs besides.
    """
    given = {override.key_or_group for word in words if (override := _parsed(word))}
    cfg = compose_config([word for word in words if not is_sweep(word)])
    return cfg, [
        f"{key}={value}"
        for key, value in (cfg.hydra.sweeper.params or {}).items()
        if key not in given
    ]


def format_words(key: str, value: Any, choices: bool = False) -> Iterator[str]:
    """Yield `key=value` as the command line says it; of a mapping, one for each value in it.

    choices: whether several values are a sweep's, of which a run has one, and no list.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from format_words(f"{key}.{name}", inner, choices)
    elif choices and isinstance(value, Iterable) and not isinstance(value, str):
        yield f"{key}=choice({','.join(map(_said, value))})"
    else:
        yield f"{key}={_said(value)}"


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_said, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return (
        str(value)
        if isinstance(value, Real)
        else QuotedString(str(value), Quote.single).with_quotes()
    )


def requote_word(word: str) -> str:
    """Return a word of a sweep's job as Hydra reads it, which leaves out the quotes that letters
    beyond ASCII need.
    """
    key, equals, text = word.partition("=")
    if text.isascii() or text[0] in "[{'\"":
        return word
    unescaped = re.sub(r"\\(.)", r"\1", text)
    return f"{key}{equals}{_said(unescaped)}"


def quote_word(key: str, value: str) -> str:
    """Return `"key='value'"`: a text as a shell hands it to Hydra, whatever is in it."""
    word = f"{key}={_said(value)}"
    return shlex.quote(word) if set("'\"$`\\!") & set(value) else f'"{word}"'


def quote_list(key: str, values: Iterable[str]) -> str:
    """Return `key=[...]` as a shell hands it to Hydra, with quotes only where a value needs them."""
    texts = [*values]
    word = f"{key}=[{','.join(texts)}]"
    if read_list_value([word], key) != texts:
        (word,) = format_words(key, texts)
    return shlex.quote(word) if re.search(r"[^\w./,=\[\]:@%+-]", word) else word


def print_completion(word: str, line: str) -> None:
    """Print what Hydra answers a shell: to `install=bash` a script, to `query=bash` what `line` may
    go on with.
    """
    group, equals, begun = line.rpartition(" ")[2].partition("=")
    if (
        equals and group in NESTED_GROUPS and word.startswith("query=")
    ):  # Hydra offers no choices in folders
        print(*(f"{group}={choice}" for choice in list_choices(group) if choice.startswith(begun)))
        return
    os.environ["COMP_LINE"] = line
    hidden = (
        (Exception, SystemExit) if word.startswith("query=") else ()
    )  # nobody can read it while typing
    answer = io.StringIO()
    said = contextlib.redirect_stdout(answer), contextlib.redirect_stderr(io.StringIO())
    with said[0], said[1], contextlib.suppress(*hidden), _hydra() as hydra:
        hydra.shell_completion("train", [word])
    # Hydra's script for bash splits the program's path at a space, and then offers nothing.
    print(
        answer.getvalue().replace("=($(command -v $helper))", '=("$(command -v $helper)")'), end=""
    )


def move_options_first(words: Sequence[str]) -> list[str]:
    """Return `seed=1,2 -m` as Hydra takes it, with options before keys. Raises FedpflError for what
    is no option.
    """
    parser, said = get_args_parser(), io.StringIO()
    words = check_words(words, parser_options(parser), LISTED)
    try:
        with contextlib.redirect_stderr(said):
            options = parser.parse_intermixed_args(words)
    except SystemExit as end:
        if not end.code:  # --version
            raise
        reason = said.getvalue().rpartition("error: ")[2].strip()
        raise FedpflError(f"{reason}; {LISTED}") from None
    if options.package is not None and not options.cfg:
        raise FedpflError(
            f"--package {options.package} chooses what --cfg prints; add --cfg job, or leave it out"
        )
    keys = options.overrides
    return [*(word for word in words if word not in keys), *keys]


def adapt_for_sweeps(words: Iterable[str], groups: Collection[str]) -> list[str]:
    """Return `method=heterofl,fedrolex method.assign=random` as Hydra takes it: the second with
    `++` before it.

    Hydra composes once before the sweep, without what is swept over, and refuses `method.assign`
    where the method that stands there by default lacks it. A job checks its keys when it is built.
    A key that the experiment sweeps over becomes a sweep over the one value. groups: names of
    configuration groups.
    """
    words = list(words)
    given = {place: override for place, word in enumerate(words) if (override := _parsed(word))}
    inside = {
        place: override.key_or_group.split(".")[0]
        for place, override in given.items()
        if override.type == OverrideType.CHANGE
        and "." in override.key_or_group
        and not override.is_sweep_override()
    }
    chosen = {
        override.key_or_group: override
        for override in given.values()
        if override.key_or_group in groups
    }
    swept = {name for name, override in chosen.items() if override.is_sweep_override()}
    of_experiment: set[str] = set()
    if set(inside.values()) & set(groups):
        of_experiment = set(_of_experiment(given.values()))
        swept |= of_experiment - set(chosen)
    for place in inside:
        if inside[place] not in swept & set(groups):
            continue
        key, _, value = words[place].partition("=")
        # `++` would stand beside what the experiment sweeps over; a sweep over one value takes its
        # place.
        words[place] = f"{key}=choice({value})" if key in of_experiment else f"++{words[place]}"
    return words


def disable_hydra_files(words: Iterable[str]) -> list[str]:
    """Return the words for a process that leaves files to another: Hydra then makes no directory
    and no log.
    """
    logs = ("hydra/job_logging", "hydra/hydra_logging", "hydra.job_logging", "hydra.hydra_logging")
    return [
        *(word for word in words if not word.lstrip("+~").startswith(logs)),
        "hydra.run.dir=.",
        "hydra.output_subdir=null",
    ]


def _parsed(word: str) -> Override | None:
    """Read a word; None for options and for what Hydra itself will refuse."""
    if word.startswith("-"):
        return None
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def read_list_value(words: Iterable[str], key: str) -> list[str]:
    """Return the list of texts that the words set a key to; empty for a sweep, and for what is no
    such list.
    """
    value: Any = []
    for override in filter(None, map(_parsed, words)):
        if override.key_or_group == key and not override.is_sweep_override():
            value = override.value()
    return [str(one) for one in value] if isinstance(value, list) else []


def read_text_value(words: Iterable[str], key: str) -> str:
    """Return the text that the words set a key to, without quotes; "" where they do not."""
    given = [
        override for override in filter(None, map(_parsed, words)) if override.key_or_group == key
    ]
    return str(given[-1].value()) if given else ""


def is_sweep(word: str) -> bool:
    """Return whether a word gives its key several values."""
    override = _parsed(word)
    return override is not None and override.is_sweep_override()


def replace_config_dir_option(words: Sequence[str]) -> list[str]:
    """Return words with `--config-dir my_conf` as `hydra.searchpath=[file:///.../my_conf]`, which
    composes alike.

    So it holds wherever a configuration is composed from words. Raises FedpflError where there is
    no such folder.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    options, rest = parser.parse_known_args(words)
    if options.config_dir is None:
        return list(words)
    folder = Path(options.config_dir).expanduser().absolute()
    if not folder.is_dir():
        raise FedpflError(
            f"--config-dir {options.config_dir} is no folder; give the one that holds yours"
        )
    searched = [place for word in rest for place in read_list_value([word], SEARCHPATH)]
    rest = [word for word in rest if not word.startswith(f"{SEARCHPATH}=")]
    return [*rest, f"{SEARCHPATH}={_said([*searched, f'{FILE}{folder}'])}"]


def find_config_dirs(words: Iterable[str]) -> list[Path]:
    """Return the folders beside ours in which words have configurations looked for."""
    places = [place.removeprefix(FILE) for place in read_list_value(words, SEARCHPATH)]
    return [Path(place) for place in places if "://" not in place]


def is_hydra_setting(word: str) -> bool:
    """Return whether a word is about how Hydra runs, and not about what a run is or where its files
    are.
    """
    return word.startswith("hydra") and not word.startswith(f"{SEARCHPATH}=")


def split_values(word: str) -> list[str]:
    """Return the values that a word gives its key, `[]` where they cannot be counted."""
    override = _parsed(word)
    if override is None or not override.is_sweep_override():
        return [word.partition("=")[2]]
    return (
        []
        if override.is_interval_sweep()
        else [str(value) for value in override.sweep_string_iterator()]
    )


def find_dropped_sweeps(hydra_cfg: HydraConf) -> list[str]:
    """Return the keys that the configuration sets for the jobs of a sweep, and the words of one run
    do not.
    """
    words: Any = OmegaConf.to_container(
        hydra_cfg.overrides.task
    )  # as they are, whatever they interpolate
    given = {override.key_or_group for override in filter(None, map(_parsed, words))}
    return [str(key) for key in hydra_cfg.sweeper.get("params") or {} if key not in given]


def _of_experiment(given: Iterable[Override]) -> Iterator[str]:
    """Yield the keys that the experiment itself sets for its jobs alone, be it a single value."""
    chosen = [
        str(override.input_line)
        for override in given
        if override.key_or_group in ("experiment", "debug", SEARCHPATH)
    ]
    if not chosen:
        return
    try:
        sweeper = compose_config(chosen).hydra.sweeper
    except HYDRA_ERRORS:
        return  # Hydra will tell
    yield from map(str, sweeper.params or {})
