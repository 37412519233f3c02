"""Flower: messages as it carries them, the app that is written, and federations of real processes
on 127.0.0.1.
"""

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedpfl import export
from fedpfl.remote import app, local, wire
from tests.command import format_override, read_table, run_command

WORDS = [
    *("dataset=digits", "clients=4", "participation=1.0", "rounds=2", "eval.every=2"),
    "local.epochs=1",
]
STATES = {"fedobp": ["federate.share_states=true"]}
PRIVATE = ("privacy=sample", "privacy.noise=2", "privacy.seed=1", "model=mlp")
PLAYED = {
    **{method: [f"method={method}"] for method in ("fedper", "fedobp")},
    "hidden": ["method=fedper", *PRIVATE],
}
"""That methods are played as in one place is for test_remote.py to say."""


def directory(words: list[str]) -> Path:
    return Path(app.compose_federation(words)[1].hydra.run.dir)


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


def test_flower_carries_bytes(monkeypatch):
    """In order, whatever order answers come in; what fails is a text, what does not come is None."""
    pytest.importorskip("flwr", reason="needs the extra flower")
    from flwr.app import Error, Message
    from flwr.supercore.task_identity import TaskIdentity

    from fedpfl.remote import flower

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)

    class Grid:
        def get_node_ids(self):
            return {5, 3}

        def push_messages(self, messages):
            self.messages = messages
            for place, message in enumerate(messages):
                message.metadata.__dict__["_message_id"] = str(place)
                message.metadata.__dict__["_src_node_id"] = 1
            return [message.metadata.message_id for message in messages]

        def pull_messages(self, ids):
            one, two, _ = self.messages
            failed = Message(Error(3, "it\nraised"), reply_to=two)
            answers = {"1": failed, "0": Message(one.content, reply_to=one)}
            return [answer for name, answer in answers.items() if name in ids]

    grid = flower.FlowerGrid(Grid())
    assert grid.node_ids() == [3, 5]
    sent = wire.pack_message({"hello": True}, {})
    answers = grid.send_and_receive([(3, sent), (5, b"b"), (3, b"c")], 0.2)
    assert answers == [sent, "it raised", None]
    assert grid.send_and_receive([], 1.0) == []


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("method", PLAYED)
def test_processes_as_in_one_place(method: str, tmp_path, monkeypatch):
    """One SuperLink, four SuperNodes: the same rounds and clients as of fedpfl.train, bit for bit."""
    pytest.importorskip("flwr", reason="needs the extra flower")
    if method == "hidden":
        pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")
    monkeypatch.chdir(tmp_path)
    words = [*PLAYED[method], *WORDS]
    command = [sys.executable, "-m", "fedpfl.federate", *words, *STATES.get(method, [])]
    subprocess.run(command, check=True)
    assert run_command(*words, cwd=tmp_path).code == 0
    there, here = directory(words), Path(str(directory(words)).replace("federated/", ""))
    for name in ("rounds.csv", "clients.csv"):
        assert read_table(there / name) == read_table(here / name)
    for row in read_table(there / "wire.csv"):
        counted, sent = (int(row[f"{name}_down"]) for name in ("counted", "bytes"))
        assert method == "fedobp" or counted < sent < 1.1 * counted + 2**17


@pytest.mark.full
@pytest.mark.slow
def test_processes_that_are_killed(tmp_path, monkeypatch):
    """The server within round 2, which loses nothing, and a node within round 3, which goes on
    without it.
    """
    pytest.importorskip("flwr", reason="needs the extra flower")
    monkeypatch.chdir(tmp_path)
    words = ["method=ditto", *WORDS[:3], "rounds=4", "eval.every=4", "local.epochs=1"]
    run = directory(words).absolute()
    local.write_app(
        tmp_path / "app", [*words, "federate.timeout=150", format_override("hydra.run.dir", run)]
    )
    link, *ports = local.find_free_ports(3)
    more = {
        "env": local.flower_environment(tmp_path, link),
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
    }

    def reached(number: int) -> None:
        until = time.monotonic() + 400
        while time.monotonic() < until:
            if (run / "rounds.csv").is_file() and len(read_table(run / "rounds.csv")) >= number:
                return
            time.sleep(0.2)
        raise AssertionError(f"round {number} was not reached")

    with local.flower_processes() as start:
        configs = [
            f'partition-id={number} num-partitions=2 state="{tmp_path}/n{number}"'
            for number in (0, 1)
        ]

        def begin() -> list[subprocess.Popen]:
            server = local.start_superlink(start, link, **more)
            nodes = [
                local.start_supernode(start, link, port, own, **more)
                for port, own in zip(ports, configs, strict=True)
            ]
            subprocess.run(
                [local.find_command("flwr"), "run", str(tmp_path / "app"), local.LINK_NAME],
                check=True,
                **more,
            )
            return [server, *nodes]

        processes = begin()
        reached(1)
        for one in processes:
            os.killpg(one.pid, 9)
            one.wait()
        assert len(read_table(run / "rounds.csv")) == 1
        *_, node = begin()
        reached(2)
        os.killpg(node.pid, 9)
        local.start_supernode(start, link, *local.find_free_ports(1), configs[1], **more)
        reached(4)
    assert run_command(*words, cwd=tmp_path).code == 0
    rows = read_table(run / "rounds.csv")
    alone = read_table(Path(str(run).replace("federated/", "")) / "rounds.csv")
    assert rows[:2] == alone[:2]
    assert [row["participants"] for row in rows] == ["4", "4", "2", "4"]
    assert "is lost" not in (run / "run.log").read_text()
