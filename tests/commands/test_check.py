"""`fedpfl check`: the documented method passes, and each promise is told of by a method that breaks it."""

from pathlib import Path

import pytest

from fedpfl import check
from fedpfl.config import plugins
from fedpfl.engine import contract
from fedpfl.engine.contract import PROMISES
from tests.conftest import ROOT

HEAD = """
import torch
from fedpfl.methods import FedAvg
CALLS = []
class Mine(FedAvg):
"""
FAULTS = {
    "counts calls": (
        """
    def finish(self, server, client, start, end):
        CALLS.append(1)
        return {name: leaf + 1e-3 * len(CALLS) for name, leaf in end.items()}, client
        """,
        {"runs_repeat", "workers_do_not_matter", "order_does_not_matter", "clients_are_apart"},
        "something outlives a hook's call",
    ),
    "keeps state on self": (
        """
    def finish(self, server, client, start, end):
        object.__setattr__(self, "last", 1)
        return end, client
        """,
        {"is_frozen"},
        "`self.last` was set",
    ),
    "draws at evaluation": (
        """
    def personal(self, server, client):
        return {name: leaf + 0.01 * torch.rand(leaf.shape) for name, leaf in server.items()}
        """,
        {"draws_from_what_is_given"},
        "draws from the generators of the process, of torch",
    ),
    "counts evaluations": (
        """
    def personal(self, server, client):
        CALLS.append(1)
        return {name: leaf + 1e-3 * len(CALLS) for name, leaf in server.items()}
        """,
        {"asking_changes_nothing"},
        "evaluated again: loss up to 0.",
    ),
    "leaves": (
        """
    def finish(self, server, client, start, end):
        raise SystemExit(0)
        """,
        {"keeps_form"},
        "Mine.finish raised SystemExit: 0 (",
    ),
    "averages over padding": (
        """
    def loss(self, server, client, net, params, batch):
        return batch.losses(net(params, batch.x)).mean()
        """,
        {"backends_agree", "backends_agree_with_norm", "width_does_not_matter"},
        "use batch.mean",
    ),
    "normalises over padding": (
        """
    def loss(self, server, client, net, params, batch):
        net.weight = None
        return super().loss(server, client, net, params, batch)
        """,
        {"backends_agree_with_norm"},
        "after round 1: server.",
    ),
    "predicts by the batch": (
        """
    def predict(self, net, params, batch):
        return net(params, batch.x - batch.x.mean())
        """,
        {"backends_agree_in_evaluation"},
        "evaluated, test loss: up to 0.",
    ),
    "starts from what is not sent": (
        """
    def download(self, server, client):
        return {name: leaf for name, leaf in server.items() if name != "fc.bias"}
        """,
        {"keeps_form"},
        "Mine.start returned a model without the network's fc.bias",
    ),
    "trains with what is not sent": (
        """
    def init(self, params, parts):
        return {"w": params, "old": params}, {}
    def download(self, server, client):
        return server["w"]
    def loss(self, server, client, net, params, batch):
        return super().loss(server, client, net, params, batch) + server["old"]["fc.bias"].sum()
    def aggregate(self, server, clients, net, uploads, weight, generator):
        new, clients = super().aggregate(server, clients, net, uploads, weight, generator)
        return {"w": new, "old": server["w"]}, clients
        """,
        {"sees_what_was_sent"},
        "a step of client",
    ),
    "amplifies rounding": (
        """
    def personal(self, server, client):
        return {name: torch.sin(500 * leaf) for name, leaf in server.items()}
        """,
        {"bf16_is_near"},
        "use engine.precision=fp32",
    ),
    "changes an argument": (
        """
    def start(self, received, client):
        received["fc.bias"].mul_(1.0)
        return received
        """,
        {"keeps_form"},
        "Mine.start changed its argument received.fc.bias in place",
    ),
    "branches": (
        """
    def init(self, params, parts):
        return params, {"n": params["fc.bias"].sum()}
    def prepare(self, server, client):
        return client if client["n"] > 9 else {**client}
        """,
        {"keeps_form"},
        "batched: Mine.prepare looks at the values of a tensor",
    ),
    "forgets its return": (
        """
    def aggregate(self, server, clients, net, uploads, weight, generator):
        super().aggregate(server, clients, net, uploads, weight, generator)
        """,
        {"keeps_form"},
        "Mine.aggregate returned None (is a `return` missing?); it must return two things",
    ),
    "misses an entry": (
        """
    def finish(self, server, client, start, end):
        return end, {"own": client["own"]}
        """,
        {"keeps_form"},
        "Mine.finish raised KeyError: 'own' (",
    ),
}
ALONE = {*FAULTS} - {
    *("counts calls", "counts evaluations", "draws at evaluation"),
    *("averages over padding", "predicts by the batch"),
}
"""Those that break nothing else."""


@pytest.fixture(autouse=True)
def forgotten():
    """What files added."""
    yield
    plugins.load([])


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]):
    """Run the command: exit status, and what it prints."""

    def run(*words: object) -> tuple[int, list[str]]:
        status = check.main([*map(str, words)])
        said = capsys.readouterr()
        return status, (said.out + said.err).splitlines()

    return run


def words(*names: str) -> set[str]:
    return {promise.words for promise in PROMISES if promise.check.__name__ in names}


def test_the_documented_method_keeps_everything(told):
    status, lines = told(ROOT / "docs/mine.py", "share=0.3")
    assert status == 0
    assert lines == ["method=halfway", *(f"  ok    {promise.words}" for promise in PROMISES), "  all is kept"]


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.full)], ids=["one", "all"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_promise_is_told(fault: str, everything: bool, tmp_path: Path, told, monkeypatch):
    """Only those that are broken are tried, or all."""
    body, broken, text = FAULTS[fault]
    if not everything:
        tried = [own for own in PROMISES if own is PROMISES[0] or own.check.__name__ in broken]
        for place in (check, contract):
            monkeypatch.setattr(place, "PROMISES", tried)
    file = tmp_path / "mine.py"
    file.write_text(HEAD + body.strip("\n") + '\n\nMETHODS = {"mine": Mine}\n')
    status, lines = told(file, "--quick")
    wrong = {line[8:] for line in lines if line.startswith(("  WRONG ", "  note  "))}
    assert wrong == words(*broken) if fault in ALONE or not everything else wrong >= words(*broken), lines
    assert any(text in line for line in lines), lines
    assert status == (0 if broken == {"bf16_is_near"} else 1)


def test_every_promise_is_broken_by_a_planted_fault():
    assert {name for _, broken, _ in FAULTS.values() for name in broken} == {own.check.__name__ for own in PROMISES}


@pytest.mark.parametrize(
    ("text", "values", "line"),
    [
        (None, (), "fedpfl: plugins: {}: No such file or directory"),
        ("x = c", (), "fedpfl: plugins: {}:1: NameError: name 'c' is not defined"),
        (
            "MODELS = {'mine': lambda shape, classes: None}",
            (),
            "fedpfl: {} has no methods; it needs a dictionary METHODS of names and classes",
        ),
        (
            "docs",
            ("shere=0.2",),
            "fedpfl: method=halfway: shere is not a key here; known keys: share, statistics; did you mean share?",
        ),
        ("docs", ("share=2",), "fedpfl: method=halfway: share must be between 0 and 1, got 2"),
        ("docs", ("share={",), "fedpfl: share={{: its value cannot be read"),
    ],
)
def test_what_cannot_be_checked_is_one_line(text, values, line, tmp_path: Path, told):
    file = tmp_path / "mine.py"
    if text:
        file.write_text((ROOT / "docs/mine.py").read_text() if text == "docs" else text)
    status, lines = told(file, *values)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].startswith(line.format(file))


def test_a_hyperparameter_without_a_default_is_asked_for(tmp_path: Path, told):
    file = tmp_path / "mine.py"
    file.write_text((ROOT / "docs/mine.py").read_text().replace("] = 0.5", "]"))
    assert told(file) == (2, ["fedpfl: method=halfway: share has no value; set it with share=..."])
