"""Composition of many configurations: each combination of group choices is composed once."""

from __future__ import annotations

import copy
import os
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

SEARCHPATH = "hydra.searchpath"


class CachingLoader(ConfigLoaderImpl):
    """Load configurations as Hydra does, each choice of groups once.

    Hydra composes the groups first and then sets the values of single keys. So a copy of the first
    part serves all jobs of a sweep that differ in values alone, in a tenth of the time. Files are
    read once: a loader is for one sweep.
    """

    def __init__(self, loader: ConfigLoader):
        super().__init__(loader.get_search_path())
        self._composed: dict[tuple[Any, ...], DictConfig] = {}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Return the configuration of some words. Raises what Hydra does."""

        def compose_words(chosen_words: list[str]) -> DictConfig:
            return super(CachingLoader, self).load_configuration(
                config_name, chosen_words, run_mode, from_shell, validate_sweep_overrides
            )

        # ---- Step 1: words that choose groups, and those that set values
        parsed = OverridesParser.create().parse_overrides(overrides)
        # A search path may have groups that this loader does not know of.
        if any(word.is_sweep_override() or word.key_or_group == SEARCHPATH for word in parsed):
            return compose_words(overrides)
        values = [override for override in parsed if self._sets_value(override)]
        choices = [str(word.input_line) for word in parsed if not self._sets_value(word)]

        # ---- Step 2: groups, from which Hydra's own keys follow
        key = (config_name, run_mode, os.getcwd(), *choices)
        if key not in self._composed:
            self._composed[key] = compose_words(choices)
        # Values are written into the copy, not into the cached configuration.
        config = copy.deepcopy(self._composed[key])

        # ---- Step 3: values, and what Hydra notes of all words
        try:
            self._apply_overrides_to_config(values, config)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException() from error
        # The cached configuration notes the choices alone; these two are of all words.
        job = config.hydra.job
        app_words = [override for override in parsed if not override.is_hydra_override()]
        config.hydra.overrides.task = [override.input_line for override in app_words]
        job.override_dirname = get_overrides_dirname(
            overrides=app_words,
            kv_sep=job.config.override_dirname.kv_sep,
            item_sep=job.config.override_dirname.item_sep,
            exclude_keys=job.config.override_dirname.exclude_keys,
        )
        return config

    def _sets_value(self, override: Override) -> bool:
        """Return True if a word sets a key of the program and chooses no group."""
        if override.is_hydra_override():
            return False
        is_group = self.repository.group_exists(override.key_or_group)
        # As Hydra sorts them: `local={steps: 3}` gives a group values and chooses nothing.
        return isinstance(override.value(), dict) or not is_group
