"""A folder to play a federation in; words are composed once, and their needs found once."""

import functools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from fedpfl.config.run import Run
from fedpfl.remote import app, rehearsal
from fedpfl.remote.keys import make_run_key
from tests.privacy.conftest import few_orders, reckoned_once  # noqa: F401
from tests.runner.test_plugin_trial import plugin  # noqa: F401


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="package", autouse=True)
def federations_composed_once() -> Iterator[None]:
    """Compose a federation's words once, for its server and each of its nodes."""
    compose_federation = app.compose_federation
    compose_words = functools.cache(lambda *words: compose_federation(words))
    with mock.patch.object(app, "compose_federation", lambda words: compose_words(*words)):
        yield


@pytest.fixture(scope="package", autouse=True)
def needs_found_once() -> Iterator[None]:
    """Rehearse a federation once, whose server may be killed and start again."""
    find_unsent_needs, needs = rehearsal.find_unsent_needs, dict[str, str]()

    def find_needs(run: Run) -> str:
        key = str(make_run_key(run))
        if key not in needs:
            needs[key] = find_unsent_needs(run)
        return needs[key]

    with mock.patch.object(rehearsal, "find_unsent_needs", find_needs):
        yield
