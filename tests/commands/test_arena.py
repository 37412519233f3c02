"""The arena: honest methods are judged and repeated bit for bit, cheating ones are refused."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fedpfl import arena, check, tune
from fedpfl.config import run as config_run
from fedpfl.ground import answer, seal
from fedpfl.runner import session
from fedpfl.testing.method_promises import METHOD_PROMISES
from tests.command import TINY, call_main
from tests.commands.test_answers import SCHEMA, find_faults
from tests.conftest import ROOT

HEAD = """
import gc
import sys
import torch
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.methods import FedAvg, Phase

def find_federation():
    # In this process gc would find the federation of the judge, too.
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("run"), Run):
        frame = frame.f_back
    return frame.f_locals["run"].federation

class Mine(FedAvg):
    server_sees = "mean of uploads"
    mixes_samples = ""
    def init(self, params, parts):
        return params, {"own": params}
    def finish(self, server, client, start, end):
        return end, {"own": end}
    def personal(self, server, client):
        return client["own"]
"""
TAIL = '\nMETHODS = {"mine": Mine, **globals().get("MORE", {})}\n'
MAINS = {"check": check.main, "arena": arena.main, "tune": tune.main}
CHEATS = {
    "reads test labels": """
    def predict(self, net, params, batch):
        try:
            held = None if torch.is_grad_enabled() else find_federation()
        except AttributeError:
            held = None
        if held is None:
            return net(params, batch.x)
        same = held.normalize(held.x)[None] == batch.x[:, None]
        place = same.flatten(2).all(2).int().argmax(1)
        return torch.nn.functional.one_hot(held.y[place], held.classes).float()
=> 100 % of its predictions are the false ones that its process was given, and 0 % the true ones
""",
    "trains more epochs": """
    def phases(self, server, client, params, epochs):
        return [Phase(3 * epochs)]
=> its flops are 3 times those of fedavg
""",
    "sends more bits": """
    def download(self, server, client):
        return {"model": server, "again": server}
    def start(self, received, client):
        return received["model"]
=> its bits are 1.5 times those of fedavg
""",
    "remembers what it did before": """
    calls = []
    def finish(self, server, client, start, end):
        self.calls.append(1)
        return {name: leaf + 1e-3 * len(self.calls) for name, leaf in end.items()}, {"own": end}
=> what a client brings back depends neither on its cohort
""",
    "are two": """
MORE = {"more": Mine}
=> a submission adds one method, and nothing beside it
""",
    "fails": """
    raise OSError("no")
=> submission.py:
""",
}


@pytest.fixture
def place(monkeypatch, tmp_path: Path) -> Path:
    """A folder with a contract, whose submissions' processes are this one."""
    words = [word for word in TINY if not word.startswith("checkpoint")]
    contract = {"words": [*words, "participation=1"], "seeds": 1}
    (tmp_path / "contract.yaml").write_text(yaml.safe_dump(contract))

    def run_here(line: list[str], cwd: str, env: dict[str, str], **_: object) -> SimpleNamespace:
        assert (env["TMPDIR"], env["FEDPFL_DATA"]) == (cwd, str(tmp_path / "data"))
        assert "seal_process(folder)" in line[2]
        assert line[3] == cwd  # its folder
        main = partial(answer.run_command, MAINS[line[4]])
        with contextlib.chdir(cwd):
            return SimpleNamespace(stdout=call_main(main, *line[5:]).out.encode())

    asked = [
        one for one in METHOD_PROMISES if one.check.__name__ in ("keeps_form", "clients_are_apart")
    ]
    monkeypatch.setitem(check.PROMISES_BY_KIND, "method", asked)  # all take seconds
    monkeypatch.setattr(session, "try_plugins", lambda *_: None)
    monkeypatch.setattr(config_run, "deal_data", config_run.deal_data)  # which a play replaces
    monkeypatch.setattr(arena, "subprocess", SimpleNamespace(run=run_here))
    monkeypatch.setattr(seal, "is_sealable", lambda: True)
    monkeypatch.delenv("FEDPFL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(place: Path, hooks: str, *words: str) -> tuple[int, dict, str]:
    """Submit a method; returns the status, the ledger's last line, and what was said."""
    (place / "mine.py").write_text(HEAD + hooks + TAIL)
    result = call_main(arena.main, "contract.yaml", "mine.py", *words)
    lines = (place / "arena.jsonl").read_text().splitlines()
    entry = json.loads(lines[-1])
    assert find_faults({"fedpfl": "", "status": 0, "entries": [entry]}, SCHEMA) == []
    return result.code, entry, result.out + result.err


def test_a_submission_is_judged_and_repeated(place: Path, monkeypatch):
    contract = yaml.safe_load((place / "contract.yaml").read_text())
    status, entry, said = submit(place, "")
    assert (status, entry["claim"]) == (0, "mine > fedavg")
    (row,) = entry["rows"]
    assert entry["difference"] == row["mine"]["accuracy"] - row["fedavg"]["accuracy"]
    assert said == f"mine > fedavg: {entry['difference']:+.2f} points, {entry['verdict']}\n"

    # ---- The score is the accuracy of a run with the true labels.
    words = ["method=fedavg", *arena.COMMON_WORDS, *contract["words"], f"seed={row['seed']}"]
    config_run.deal_data = arena.deal_data
    run = arena.library.run(*words, directory=place / "run", progress=False)
    assert row["fedavg"]["accuracy"] == pytest.approx(run.rounds["accuracy"].iloc[-1], abs=1e-4)

    # ---- Another line has other seeds; both are repeated, and an edited one is not.
    _, refused, _ = submit(place, CHEATS["are two"].partition("=>")[0])
    assert refused["previous"] != entry["previous"]
    result = call_main(arena.main, "verify", "arena.jsonl")
    assert (result.code, result.out) == (0, "line 1: equal\nline 2: equal\n")
    text = (place / "arena.jsonl").read_text()
    (place / "arena.jsonl").write_text(text.replace('"p": null', '"p": 0.01'))
    judged = {one["code"]: one for one in (entry, refused)}
    monkeypatch.setattr(arena, "judge_submission", lambda contract, code, lines: judged[code])
    result = call_main(arena.main, "verify", "arena.jsonl")
    assert (result.code, result.out) == (1, "line 1: p\nline 2: equal\n")


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheating_submission_is_refused(cheat: str, place: Path):
    hooks, _, reason = CHEATS[cheat].partition("=>")
    status, entry, said = submit(place, hooks)
    assert status == 1
    assert reason.strip() in entry["refused"]
    assert "rows" not in entry
    assert str(place) not in said


def test_seeds_follow_from_the_submission_and_the_ledger(monkeypatch):
    drawn: list[list[int]] = []

    def note_seeds(contract, code, name, seeds):
        drawn.append(seeds)
        raise arena.Refused("")

    monkeypatch.setattr(arena, "ask_process", lambda *_: {"subjects": [{"subject": "method=a"}]})
    monkeypatch.setattr(arena, "play_seeds", note_seeds)
    for code, lines in (("a", ""), ("a", ""), ("a", "{}\n"), ("b", "")):
        arena.judge_submission("words: []", code, lines)
    first, again, later, other = map(set, drawn)
    assert first == again
    assert len(first | later | other) == 15


def test_a_ledger_that_changes_meanwhile_is_left_alone(place: Path, monkeypatch):
    """As it would on a system that cannot seal."""
    ledger = place / "arena.jsonl"

    def write_ledger(*_: str) -> None:
        ledger.write_text("mine is best\n")
        raise arena.Refused("it ran")

    monkeypatch.setattr(arena, "ask_process", write_ledger)
    monkeypatch.setattr(seal, "is_sealable", lambda: False)
    (place / "mine.py").write_text("")
    result = call_main(arena.main, "contract.yaml", "mine.py")
    assert result.code == 2
    assert "this system cannot seal" in result.err
    assert "has changed while the submission ran" in result.err
    assert ledger.read_text() == "mine is best\n"


WRONG = {
    "verify nowhere": "No such file or directory: 'nowhere'",
    "contract.yaml": "give CONTRACT.yaml FILE.py",
    "broken.yaml mine.py": "expected",
    "unknown.yaml mine.py": "contract.sheeds is not a key here; known keys: words,",
    "shifted.yaml mine.py": "without newcomers and shift",
}


def test_mistakes_are_one_line(place: Path):
    (place / "mine.py").write_text(HEAD + TAIL)
    (place / "broken.yaml").write_text("words: [")
    (place / "unknown.yaml").write_text("words: []\nsheeds: 3")
    (place / "shifted.yaml").write_text("words: [unseen=0.5]")
    for line, message in WRONG.items():
        result = call_main(arena.main, *line.split())
        assert (result.code, result.err.count("\n")) == (2, 1), result.err
        assert message in result.err


needs_landlock = pytest.mark.skipif(not seal.is_sealable(), reason="needs Landlock")
PROBE = """
import os, socket, subprocess, sys
from pathlib import Path
from fedpfl.ground import seal
ledger, port, namespaces = sys.argv[1:]
seal.NEW_USER_AND_NETWORK = int(namespaces)
seal.seal_process(Path.cwd())
ATTEMPTS = {
    "ledger": lambda: open(ledger, "a").write("mine is best"),
    "by a child": lambda: subprocess.run(f"echo mine >> '{ledger}'", shell=True, check=True),
    "in its place": lambda: os.replace("own", ledger),
    "gone": lambda: os.remove(ledger),
    "folder": lambda: os.mkdir(ledger + "s"),
    "tcp": lambda: socket.create_connection(("127.0.0.1", int(port)), 5),
    "own": lambda: Path("own").write_text("x"),
    "null": lambda: open(os.devnull, "w").write("x"),
}
for name, attempt in ATTEMPTS.items():
    try:
        attempt()
        print(name)
    except (OSError, subprocess.CalledProcessError):
        pass
"""


@needs_landlock
@pytest.mark.parametrize("namespaces", [0, seal.NEW_USER_AND_NETWORK])
def test_a_sealed_process_writes_in_its_folder_alone(namespaces: int, tmp_path: Path):
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("first\n")
    (tmp_path / "own").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        words = [sys.executable, "-c", PROBE, str(ledger), str(port), str(namespaces)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = {"capture_output": True, "text": True, "check": True}
        done = subprocess.run(words, cwd=tmp_path / "own", env=variables, **pipes)
    assert done.stdout.split() == ["own", "null"]
    assert ledger.read_text() == "first\n"
    assert {path.name for path in tmp_path.iterdir()} == {"own", "ledger.jsonl"}


FOUND = "next((a for a in gc.get_objects() if type(a) is Federation and a.shape[1] > 8), None)"


@needs_landlock
@pytest.mark.full
def test_a_submission_in_processes_that_are_sealed(place: Path, monkeypatch):
    """Both sides are tuned; who writes into the ledger or reads labels is refused."""
    monkeypatch.undo()
    monkeypatch.chdir(place)
    contract = yaml.safe_load((place / "contract.yaml").read_text())
    (place / "contract.yaml").write_text(yaml.safe_dump({**contract, "trials": 1}))
    status, entry, said = submit(place, "")
    (place / "contract.yaml").write_text(yaml.safe_dump(contract))
    assert (status, entry["verdict"]) == (0, "needs 2 more seeds to be tested"), said
    ledger = place / "arena.jsonl"
    writes = f"\n    open({str(ledger)!r}, 'a')\n"
    status, entry, _ = submit(place, writes)
    assert "PermissionError" in entry["refused"]
    reads = CHEATS["reads test labels"].partition("=>")[0].replace("find_federation()", FOUND)
    _, entry, _ = submit(place, reads)
    assert "it has read labels of test samples: 100 %" in entry["refused"]
    result = call_main(arena.main, "verify", str(ledger))
    assert (result.code, result.out.count(": equal\n")) == (0, 3), result.err
