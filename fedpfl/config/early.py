"""Mistakes that the composition tells, told before torch is loaded, which takes longer than all
that comes before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence

from fedpfl.config import overrides
from fedpfl.config.choices import GROUPS, list_choices
from fedpfl.config.messages import format_error
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.terminal import print_notice


def exit_if_refused(arguments: Iterable[str]) -> None:
    """End the process with status 2 and one line where the command line is refused whatever else is
    looked at.

    What plugins add is not known yet, nor is anything said of options that ask for something else
    than runs.
    """
    with contextlib.suppress(ValueError):  # told where all is known
        if "TORCHELASTIC_RUN_ID" not in os.environ and (fault := _find_fault(list(arguments))):
            print_notice(fault)
            sys.exit(2)


def _find_fault(arguments: Sequence[str]) -> str:
    try:
        arguments = overrides.move_options_first(arguments)
        keys = [word for word in arguments if word not in ("-m", "--multirun")]
        if any(word.startswith("-") for word in keys) or overrides.read_list_value(keys, "plugins"):
            return ""
        has_sweep = any(
            word not in keys or word.startswith(("experiment=", "hydra")) for word in arguments
        )
        arguments = overrides.adapt_for_sweeps(keys, GROUPS)
        overrides.compose_config(
            [word for word in arguments if not (has_sweep and overrides.is_sweep(word))]
        )
        groups = {word: word.partition("=")[0] for word in arguments if overrides.is_sweep(word)}
        for word, group in groups.items():
            unknown = (
                {*overrides.split_values(word)} - {*list_choices(group)} if group in GROUPS else ()
            )
            overrides.compose_config([f"{group}={name}" for name in unknown][:1])
    except (FedpflError, *overrides.HYDRA_ERRORS) as error:
        return format_error(error)
    return ""
