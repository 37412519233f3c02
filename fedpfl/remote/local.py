"""Play a federation in processes of this machine.

Flower's own commands are started on 127.0.0.1 and ended with the run.
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
from fedpfl.ground.errors import FedpflError, missing_extra

StartCommand = Callable[..., subprocess.Popen]

LINK_TIMEOUT = 60.0  # seconds for a SuperLink to come up
TERMINATION_GRACE = 10.0  # seconds for processes to end by themselves
POLL_SECONDS = 0.3
HOST = "127.0.0.1"
LINK_NAME = "here"
NOTICE = "fedpfl: "
STATUS_WORDS = "exit status"
"""How a server's line begins that says how it has ended."""

APP_MODULE = '''"""A Flower app that fedpfl has written: a federation of the configuration in pyproject.toml."""

from fedpfl.remote import flower

server = flower.server()
client = flower.client()
'''
PROJECT_FILE = """[project]
name = "{name}"
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
    project = PROJECT_FILE.format(name="fedpfl-app", words=json.dumps(shlex.join(words)))
    with files.explain_write_errors(folder, "--flower"):
        folder.mkdir(parents=True)
        (folder / "fedpfl_app.py").write_text(APP_MODULE)
        (folder / "pyproject.toml").write_text(project)


def play_locally(
    words: Sequence[str], node_configs: Sequence[str], log: Path, run_log: Path
) -> int | None:
    """Play a federation to its end on SuperLink and SuperNodes, and show it.

    Args:
        words: The command line of the federation.
        node_configs: Of the SuperNodes that are started.
        log: The file for what Flower says.
        run_log: The file in which the run says how far it is.

    Returns:
        The exit status of a server that has refused or given up the run, else None.

    Raises:
        FedpflError: if Flower is not there, or does not take the run.
    """
    with (
        tempfile.TemporaryDirectory(prefix="fedpfl-") as temporary,
        log.open("ab") as output,
        flower_processes() as start_command,
    ):
        # ---- Step 1: Flower's processes, on ports of their own.
        folder = Path(temporary)
        write_app(folder / "app", words)
        link_port, *node_ports = find_free_ports(len(node_configs) + 1)
        environment = flower_environment(folder, link_port)
        process_options: dict[str, Any] = {"env": environment, "stdout": output, "stderr": output}
        # From here on: both files may have lines of an earlier start.
        server_lines = NewLines(log)
        run_lines = NewLines(run_log)
        start_superlink(start_command, link_port, **process_options)
        for node_port, node_config in zip(node_ports, node_configs, strict=True):
            start_supernode(start_command, link_port, node_port, node_config, **process_options)

        # ---- Step 2: the run, whose lines are shown as they come.
        process = start_command(
            ["flwr", "run", str(folder / "app"), LINK_NAME, "--stream"], **process_options
        )
        status = None
        is_running = True
        while is_running:
            time.sleep(POLL_SECONDS)
            is_running = process.poll() is None
            for line in run_lines.read_lines():
                print(line.partition(" ")[2], file=sys.stderr, flush=True)
            for line in server_lines.read_lines():
                if line.startswith(f"{NOTICE}{STATUS_WORDS}"):
                    status = int(line.split()[-1])
                elif line.startswith(NOTICE):
                    print(line, file=sys.stderr, flush=True)
        if process.returncode:
            raise FedpflError(f"Flower has not taken the run; {log} says why")
        return status


class NewLines:
    """Read the lines that a file gets from now on; it may begin anew."""

    def __init__(self, path: Path):
        self._path = path
        self._position = path.stat().st_size if path.is_file() else 0

    def read_lines(self) -> list[str]:
        """Return the whole lines since the last call."""
        if not self._path.is_file():
            return []
        if self._path.stat().st_size < self._position:
            self._position = 0
        with self._path.open("rb") as file:
            file.seek(self._position)
            content = file.read()
        # What follows the last line break is a line that is being written.
        length = content.rfind(b"\n") + 1
        self._position += length
        return content[:length].decode(errors="replace").splitlines()


def start_superlink(
    start_command: StartCommand, port: int, **process_options: Any
) -> subprocess.Popen:
    """Start a SuperLink, and wait until it answers. Raises FedpflError."""
    command = ["flower-superlink", "--insecure", "--host", HOST, "--port", str(port)]
    command.append("--disable-runtime-dependency-installation")
    link = start_command(command, **process_options)
    deadline = time.monotonic() + LINK_TIMEOUT
    while link.poll() is None and time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2),
        ):
            return link
        time.sleep(POLL_SECONDS)
    raise FedpflError(f"Flower's SuperLink has not come up on port {port}")


def start_supernode(
    start_command: StartCommand,
    link_port: int,
    node_port: int,
    node_config: str,
    **process_options: Any,
) -> subprocess.Popen:
    """Start a SuperNode of the SuperLink at a port."""
    command = ["flower-supernode", "--insecure", "--superlink", f"{HOST}:{link_port}"]
    command += ["--host", HOST, "--port", str(node_port), "--node-config", node_config]
    return start_command(command, **process_options)


def find_command(name: str) -> str:
    """Return the path of one of Flower's commands. Raises FedpflError without it."""
    executable = shutil.which(name, path=_search_path())
    if executable is None:
        raise missing_extra(f"Flower's command {name} is not installed", "flower")
    return executable


def flower_environment(folder: Path, link_port: int) -> dict[str, str]:
    """Return the environment of Flower's processes, without telemetry.

    Args:
        folder: Where Flower's files are written, among them one that names the SuperLink.
        link_port: The SuperLink's port.
    """
    home = folder / "flwr"
    home.mkdir(exist_ok=True)
    link_config = f'[superlink.{LINK_NAME}]\naddress = "{HOST}:{link_port}"\ninsecure = true\n'
    (home / "config.toml").write_text(link_config)
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "PATH": _search_path(),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


def _search_path() -> str:
    """Return PATH, before it the folder of this Python, where pip installs commands."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def find_free_ports(count: int) -> list[int]:
    """Return numbers of ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        # All are bound before one is closed, so that no number comes twice.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for open_socket in sockets:
            open_socket.bind((HOST, 0))
        return [open_socket.getsockname()[1] for open_socket in sockets]


@contextlib.contextmanager
def flower_processes() -> Iterator[StartCommand]:
    """Give a function that starts Flower's commands; end all of them on leaving."""
    processes: list[subprocess.Popen] = []

    def start_command(command: Sequence[str], **process_options: Any) -> subprocess.Popen:
        # A session of its own, so that its children can be ended with it.
        process = subprocess.Popen(
            [find_command(command[0]), *command[1:]], start_new_session=True, **process_options
        )
        processes.append(process)
        return process

    try:
        yield start_command
    finally:
        for end_signal in (signal.SIGTERM, signal.SIGKILL):
            _end_processes(processes, end_signal)


def _end_processes(processes: Sequence[subprocess.Popen], end_signal: signal.Signals) -> None:
    """Send a signal to process groups, and wait for their leaders for a while."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, end_signal)
    deadline = time.monotonic() + TERMINATION_GRACE
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
