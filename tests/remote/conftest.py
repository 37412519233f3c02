"""A folder to play a federation in; words are composed once."""

import functools
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from fedpfl.remote import app
from tests.privacy.conftest import few_orders, reckoned_once  # noqa: F401


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
