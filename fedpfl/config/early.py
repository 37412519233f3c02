"""Finds mistakes in a command line before torch is loaded, which takes longer than composing."""

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
    """End the process with status 2 and one line where Hydra refuses the command line.

    What plugins add is not loaded yet, nor is anything said of options that ask for something else
    than runs.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # every process would say it
        return
    with contextlib.suppress(ValueError):  # the command itself says it
        fault = _explain_refusal(list(arguments))
        if fault:
            print_notice(fault)
            sys.exit(2)


def _explain_refusal(arguments: Sequence[str]) -> str:
    """Return what is wrong with a command line, "" for nothing."""
    try:
        arguments = overrides.move_options_first(arguments)
        run_words = [word for word in arguments if word not in ("-m", "--multirun")]
        has_options = any(word.startswith("-") for word in run_words)
        if has_options or overrides.read_list_value(run_words, "plugins"):
            return ""
        # An experiment may sweep by itself, and Hydra's own keys may have it do so.
        has_sweep = len(run_words) < len(arguments) or any(
            word.startswith(("experiment=", "hydra")) for word in run_words
        )

        # ---- Compose what is not swept over, then each choice of a group that is.
        run_words = overrides.adapt_for_sweeps(run_words, GROUPS)
        sweep_words = [word for word in run_words if overrides.is_sweep(word)]
        overrides.compose_config(
            [word for word in run_words if not (has_sweep and word in sweep_words)]
        )
        for word in sweep_words:
            group = word.partition("=")[0]
            if group in GROUPS:
                # Known names are composed by the jobs; one unknown name is enough to have Hydra's
                # message.
                unknown_names = {*overrides.split_values(word)} - {*list_choices(group)}
                overrides.compose_config([f"{group}={name}" for name in unknown_names][:1])
    except (FedpflError, *overrides.HYDRA_ERRORS) as error:
        return format_error(error)
    return ""
