"""A federation in processes of this machine: Flower's own commands, started on 127.0.0.1 and ended
with the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError

Start = Callable[..., subprocess.Popen]

PATIENCE = 60.0  # seconds for a SuperLink to come up
GRACE = 10.0  # seconds for processes to end by themselves
LINK = "here"

APP = '''"""A Flower app that fedpfl has written: a federation of the configuration in pyproject.toml."""

from fedpfl.remote import flower

server = flower.server()
client = flower.client()
'''
PROJECT = """[project]
name = "{name}"
version = "1.0.0"
description = "A federation that fedpfl has written"
license = "Apache-2.0"
dependencies = ["fedpfl[flower]"]

[tool.flwr.app]
publisher = "fedpfl"

[tool.flwr.app.components]
serverapp = "fedpfl_app:server"
clientapp = "fedpfl_app:client"

[tool.flwr.app.config]
words = {words}
"""


def write(folder: Path, words: Sequence[str]) -> None:
    """Write the app into a new folder. Raises FedpflError."""
    with files.writing(folder, "--flower"):
        folder.mkdir(parents=True)
        (folder / "fedpfl_app.py").write_text(APP)
        text = PROJECT.format(name="fedpfl-app", words=json.dumps(shlex.join(words)))
        (folder / "pyproject.toml").write_text(text)


def play(words: Sequence[str], nodes: int, states: Path, log: Path) -> None:
    """Play a federation to its end, on a SuperLink and so many SuperNodes.

    states: where nodes keep theirs, one folder for each. log: the file for what Flower says. Raises
    FedpflError.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fedpfl-") as place,
        log.open("ab") as said,
        started() as start,
    ):
        folder = Path(place)
        write(folder / "app", words)
        link, *ports = free(nodes + 1)
        more: dict[str, Any] = {"env": around(folder, link), "stdout": said, "stderr": said}
        superlink(start, link, **more)
        for number, port in enumerate(ports):
            config = f'partition-id={number} num-partitions={nodes} state="{states}/node{number}"'
            supernode(start, link, port, config, **more)
        asked = [command("flwr"), "run", str(folder / "app"), LINK, "--stream"]
        if subprocess.run(asked, check=False, **more).returncode:
            raise FedpflError(f"Flower has not taken the run; {log} says why")


def superlink(start: Start, port: int, **more: Any) -> subprocess.Popen:
    """Start a SuperLink, and wait until it answers. Raises FedpflError."""
    here = ("--insecure", "--host", "127.0.0.1", "--port", str(port))
    link = start("flower-superlink", *here, "--disable-runtime-dependency-installation", **more)
    until = time.monotonic() + PATIENCE
    while link.poll() is None and time.monotonic() < until:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2),
        ):
            return link
        time.sleep(0.3)
    raise FedpflError(f"Flower's SuperLink has not come up on port {port}")


def supernode(start: Start, link: int, port: int, config: str, **more: Any) -> subprocess.Popen:
    """Start a SuperNode of the SuperLink at port `link`."""
    here = ("--host", "127.0.0.1", "--port", str(port), "--node-config", config)
    return start(
        "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link}", *here, **more
    )


def command(name: str) -> str:
    """Return where one of Flower's commands is. Raises FedpflError without it."""
    beside = str(Path(sys.executable).parent)
    if found := shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")])):
        return found
    raise FedpflError(f"Flower's command {name} is not installed; pip install 'fedpfl[flower]'")


def around(folder: Path, port: int) -> dict[str, str]:
    """Return the environment of Flower's processes: its files in `folder`, which names the
    SuperLink; no telemetry.
    """
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink.{LINK}]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {
        "FLWR_HOME": str(home),
        "PATH": path,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    return {**os.environ, **own}


def free(count: int) -> list[int]:
    """Return numbers of ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def started() -> Iterator[Start]:
    """Give what starts Flower's commands, each in a group of its own; all of these are ended in the
    end.
    """
    running: list[subprocess.Popen] = []

    def start(name: str, *words: str, **more: Any) -> subprocess.Popen:
        running.append(subprocess.Popen([command(name), *words], start_new_session=True, **more))
        return running[-1]

    try:
        yield start
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            for one in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, how)
            until = time.monotonic() + GRACE
            for one in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(max(0.1, until - time.monotonic()))
