"""Composition of many configurations: each file is parsed once."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

SEARCHPATH = "hydra.searchpath"


class ParsedFiles(ConfigRepository):
    """Parse each file once, while none is edited and all words name one search path."""

    def __init__(self, search_path: ConfigSearchPath):
        super().__init__(search_path)
        self._contents: dict[str, bytes] = {}

    def load_config(self, config_path: str) -> Any:
        """Return a copy of a file's content, which Hydra edits."""
        if config_path not in self._contents:
            self._contents[config_path] = pickle.dumps(super().load_config(config_path))
        return pickle.loads(self._contents[config_path])

    def __deepcopy__(self, memo: Any) -> ParsedFiles:
        """Share the files; Hydra copies its repository to set other sources."""
        return copy.copy(self)


class CachingLoader(ConfigLoaderImpl):
    """Load configurations as Hydra does, in a tenth of the time from the second on.

    Attributes:
        checked_jobs: configurations that a sweeper has checked, by words, each for one launch:
            Hydra writes into them.
    """

    def __init__(self, loader: ConfigLoader):
        super().__init__(loader.get_search_path())
        self.repository = ParsedFiles(loader.get_search_path())
        self.checked_jobs: dict[tuple[str, ...], DictConfig] = {}
        self._merged: dict[str, bytes] = {}
        self._defaults: dict[str, DefaultsList] = {}

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Compose a job of a sweep, unless the sweeper has."""
        checked_job = self.checked_jobs.pop(tuple(sweep_overrides), None)
        return checked_job or super().load_sweep_config(master_config, sweep_overrides)

    def _load_configuration_impl(self, *arguments: Any, **options: Any) -> DictConfig:
        """Load a configuration, with a list of files that is known from words alike."""
        config_loader_impl.create_defaults_list = self._find_defaults  # type: ignore[assignment]
        try:
            return super()._load_configuration_impl(*arguments, **options)
        finally:
            config_loader_impl.create_defaults_list = create_defaults_list

    def _find_defaults(
        self, repo: IConfigRepository, overrides_list: list[Override], **options: Any
    ) -> DefaultsList:
        """Find the list of files, which depends on the words that choose files."""
        choices: list[Override] = []
        values: list[Override] = []
        for override in overrides_list:
            if not override.is_sweep_override():
                is_value = isinstance(override.value(), dict)
                is_choice = not is_value and repo.group_exists(override.key_or_group)
                (choices if is_choice else values).append(override)
        key = repr(([override.input_line for override in choices], options))
        if key not in self._defaults:
            self._defaults[key] = create_defaults_list(repo=repo, overrides_list=choices, **options)
        return replace(self._defaults[key], config_overrides=values)

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        """Merge each list of files once; values of the command line come later."""
        key = repr(defaults)
        if key not in self._merged:
            self._merged[key] = pickle.dumps(
                super()._compose_config_from_defaults_list(defaults, repo)
            )
        return pickle.loads(self._merged[key])
