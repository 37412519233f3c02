"""The files of a Flower app: a federation of one configuration, for `flwr run`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from fedpfl.ground import files

APP_MODULE = '''"""A Flower app that fedpfl has written: a federation of the configuration in pyproject.toml."""

from fedpfl.remote import flower

server = flower.server()
client = flower.client()
'''
PROJECT_FILE = """[project]
name = "fedpfl-app"
version = "1.0.0"
description = "A federation that fedpfl has written"
# It needs fedpfl too, which no package index has: at the server and at each node, install it from
# a checkout of its repository (pip install -e '.[flower]').
dependencies = ["flwr>=1.42,<2", "torch"]

[tool.flwr.app]
publisher = "fedpfl"

[tool.flwr.app.components]
serverapp = "fedpfl_app:server"
clientapp = "fedpfl_app:client"

[tool.flwr.app.config]
words = {words}
"""


def write_app(folder: Path, words: Sequence[str]) -> None:
    """Write the app into a new folder. Raises FedpflError."""
    project = PROJECT_FILE.format(words=json.dumps(shlex.join(words)))
    with files.explain_write_errors(folder, "--flower"):
        folder.mkdir(parents=True)
        (folder / "fedpfl_app.py").write_text(APP_MODULE)
        (folder / "pyproject.toml").write_text(project)
