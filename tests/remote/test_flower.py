"""Flower: the app that is written, and the docs' federation as typed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedpfl import export, federate
from tests.command import read_table

WORDS = [
    *("dataset=digits", "clients=4", "participation=1.0", "rounds=2", "eval.every=2"),
    "local.epochs=1",
]
DOCS = Path(__file__).parents[2] / "docs" / "federation.md"


def test_the_app_is_written(tmp_path, capsys):
    """Without Flower; a folder that is there stays as it is."""
    folder = tmp_path / "app"
    assert export.main(["--flower", str(folder), "method=fedper", *WORDS]) == 0
    text = (folder / "pyproject.toml").read_text()
    # Whoever takes a name on a package index runs code at those who install it.
    assert not [name for name in tomllib.loads(text)["project"]["dependencies"] if "fedpfl" in name]
    assert "license" not in text
    project = tomllib.loads(text)["tool"]["flwr"]["app"]
    assert project["config"]["words"] == " ".join(["method=fedper", *WORDS])
    modules = {own.partition(":")[0] for own in project["components"].values()}
    assert all((folder / f"{module}.py").is_file() for module in modules)
    assert export.main(["--flower", str(folder), "method=fedper"]) == 2
    wrong = ("method=fedper", "federate.timeout=-1")
    assert export.main(["--flower", str(tmp_path / "other"), *wrong]) == 2
    assert "federate.timeout must be a positive number, got -1" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


# ---- The docs' federation, typed with real processes


def read_command(opening: str) -> str:
    """Return the docs' command that begins so, on one line."""
    text = DOCS.read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"^{re.escape(opening)}.*$", text, re.MULTILINE)
    return line


def find_free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [own.getsockname()[1] for own in sockets]


@pytest.fixture
def start(tmp_path):
    """Return what starts a command line in the background, until the test ends."""
    processes = []
    environment = {**os.environ, "FLWR_HOME": str(tmp_path / "flwr"), "OMP_NUM_THREADS": "1"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

    def start_line(line: str, folder: Path) -> subprocess.Popen:
        folder.mkdir(exist_ok=True)
        log = (folder / "log").open("ab")
        streams = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(["bash", "-c", line], cwd=folder, env=environment, **streams)
        processes.append(process)
        return process

    yield start_line
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.full
@pytest.mark.slow
def test_the_docs_federation_with_real_processes(start, tmp_path, monkeypatch):
    """Three sites and a server, with certificates and keys: the rounds of `fedpfl federate`; one node
    is killed within the run, and the log names its site.
    """
    pytest.importorskip("flwr", reason="needs the extra flower")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sites").mkdir()
    rng = np.random.default_rng(0)
    for name in ("aachen", "berlin", "chur"):
        x = rng.normal(size=(60, 5)).astype(np.float32)
        np.savez(tmp_path / "sites" / f"{name}.npz", x=x, y=rng.integers(0, 3, 60))

    def wait_for(is_reached, seconds: float = 300) -> None:
        until = time.monotonic() + seconds
        while not is_reached():
            assert time.monotonic() < until
            time.sleep(0.3)

    # ---- Steps 1 and 2 of the page: the app, certificates, and a key for each site.
    words = read_command("python -m fedpfl.export --flower app").split()[5:]
    words = [word for word in words if not word.startswith(("dataset.label", "rounds"))]
    words += ["rounds=3", "local.epochs=1", "federate.timeout=60"]
    assert export.main(["--flower", "app", *words]) == 0
    server = tmp_path / "server"
    for opening in ("openssl req -x509", "openssl req -newkey", "printf", "openssl x509"):
        line = read_command(opening).replace("HOST", "localhost")
        assert start(line, server).wait(60) == 0

    # ---- Steps 3 and 4: the SuperLink, and a node for each site.
    link_port, *ports = find_free_ports(4)
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink.mine]\naddress = "localhost:{link_port}"\n'
        f'root-certificates = "{server}/ca.crt"\n'
    )
    line = read_command("flower-superlink --host 0.0.0.0").replace("8000", str(link_port))
    start(line, server)
    register = read_command("flwr supernode register")
    nodes = {}
    for name, port in zip(("aachen", "berlin", "chur"), ports, strict=True):
        folder = tmp_path / name
        assert start(read_command("ssh-keygen"), folder).wait(60) == 0
        wait_for(lambda folder=folder: start(register, folder).wait(60) == 0)
        line = read_command("flower-supernode").replace("HOST:8000", f"localhost:{link_port}")
        line = line.replace("8081", str(port)).replace("ca.crt", "../server/ca.crt")
        line = line.replace("/data/hospital_01.csv", f"{tmp_path}/sites/{name}.npz")
        line = line.replace("hospital_01", name).replace("/var/lib/fedpfl", f"{folder}/state")
        nodes[name] = start(line, folder)

    # ---- Step 5: the run; a node is killed once a round is done.
    process = start(read_command("flwr run app mine --stream"), tmp_path)

    def find_rows() -> list:
        paths = [*server.glob("outputs/federated/**/rounds.csv")]
        return read_table(paths[0]) if paths else []

    wait_for(lambda: len(find_rows()) >= 1)
    os.killpg(nodes["berlin"].pid, signal.SIGKILL)
    process.wait(300)
    rows = find_rows()
    (run,) = (path.parent for path in server.glob("outputs/federated/**/rounds.csv"))
    assert len(rows) == 3
    assert re.search(r"client 1 \(berlin\)", (run / "run.log").read_text())
    assert rows[-1]["participants"] == "2"

    # ---- The first round is that of the command on one machine.
    plain = [word for word in words if not word.startswith(("clients", "federate"))]
    assert federate.main([*plain, "dataset.path=sites"]) == 0
    (alone,) = tmp_path.glob("outputs/federated/**/rounds.csv")
    times = {"seconds", "eval_seconds"}
    first, own = (
        {key: value for key, value in table[0].items() if key not in times}
        for table in (rows, read_table(alone))
    )
    assert first == own
