"""A folder to play a federation in."""

from pathlib import Path

import pytest

from tests.privacy.conftest import reckoned_once  # noqa: F401


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
