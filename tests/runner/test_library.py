"""`fedpfl.run` and `fedpfl.load`: the command line's runs from Python, and what is left of them."""

import ast
import json
import logging
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.version import VersionBase

import fedpfl
from fedpfl import export
from fedpfl.ground import interrupts
from fedpfl.runner import resume
from tests.command import (
    TINY,
    TINY_TASK,
    play_run,
    read_checkpoint,
    read_summary,
    read_table,
    rewrite_summary,
    run_command,
)
from tests.conftest import ROOT, assert_same, keep_quick, read_cases

sys.path.insert(0, str(ROOT / "scripts"))
import notebook

SMALL = (*TINY_TASK, "model=mlp", "model.hidden=[16]")
SERVERS = {  # how the server's state holds the network
    "fedobp": lambda server: server,
    "scaffold": lambda server: server["model"],
    "fedbabu": lambda server: {**server["body"], **server["head"]},
    "floco": lambda server: server["shared"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run directory; tests read it, or change a copy."""
    path = tmp_path_factory.mktemp("library") / "run"
    play_run(path, *SMALL, "method=fedobp")
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def accuracies(run: fedpfl.Trained) -> list[float]:
    """Of each client by its own predictions; the loss of those that train is the last round's."""
    found, losses = [], []
    for row in run.clients.to_dict("records"):
        x, y = run.samples(int(row["client"]))
        logits = run.predict(int(row["client"]), x.numpy())
        found.append(100 * int((logits.argmax(1) == y).sum()) / len(y))
        if not row.get("unseen"):
            losses.append(F.cross_entropy(logits, y, reduction="none"))
    loss = float(torch.cat(losses).mean())
    assert loss == pytest.approx(run.rounds["loss"].iloc[-1], rel=1e-6)
    return found


@pytest.mark.parametrize("method", keep_quick([*SERVERS, "per_fedavg"]))
def test_predictions_have_the_accuracies_of_the_table(method, tmp_path):
    """The plain network with the personal entries is the personal model."""
    adapted = ["method.adapt_steps=1"] if method == "per_fedavg" else []
    play_run(tmp_path, *SMALL, f"method={method}", "local.batch_size=8", *adapted)
    run = fedpfl.load(tmp_path)
    assert accuracies(run) == run.clients["accuracy"].tolist()
    network, x = run.network(), run.samples(1)[0]
    network.load_state_dict(run.personal(1))
    with torch.no_grad():
        torch.testing.assert_close(network(x), run.predict(1, x))
    if method in SERVERS:
        server = SERVERS[method](read_checkpoint(tmp_path)["server"])
        names = network.state_dict().keys() & server.keys()
        assert_same(run.global_model(), {name: server[name] for name in names})


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["fedobp", "fedpurin"])
def test_models_are_the_same_on_a_gpu(method, tmp_path):
    play_run(tmp_path, *SMALL, f"method={method}", "device=cpu")
    here, there = fedpfl.load(tmp_path, device="cpu"), fedpfl.load(tmp_path, device="cuda")
    assert_same(here.mask(1), there.mask(1))
    assert_same(here.personal(1), there.personal(1))
    x = here.samples(1)[0]
    torch.testing.assert_close(here.predict(1, x), there.predict(1, x), atol=1e-3, rtol=1e-3)


def test_the_mask_is_where_the_personal_model_is_not_the_global_one(folder):
    """FedOBP's rule: theta_i where the mask holds, theta_g elsewhere."""
    run = fedpfl.load(folder)
    shared, some = run.global_model(), 0
    for client in range(len(run)):
        personal, mask = run.personal(client), run.mask(client)
        for name, own in mask.items():
            assert own.dtype == torch.bool
            assert torch.equal(personal[name][~own], shared[name][~own])
            some += int((personal[name] != shared[name])[own].sum())
    assert some


def test_a_newcomer_predicts_with_a_newcomers_state(tmp_path):
    """Not with the head of a client that trained; its accuracy is that of the table."""
    play_run(tmp_path, *SMALL, "method=fedper", "unseen=0.5", "local.lr=0.1", "rounds=3")
    run = fedpfl.load(tmp_path)
    assert accuracies(run) == run.clients["accuracy"].tolist()
    first, second = run.clients["client"][run.clients["unseen"] == 1].astype(int)
    assert_same(run.personal(first), run.personal(second))


def test_a_run_from_python_is_the_command_lines(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    words = (*(word for word in SMALL if not word.startswith(("rounds", "local"))), "method=fedper")
    run = fedpfl.run(*words, rounds=2, local={"epochs": 1})
    assert capfd.readouterr().err.splitlines()[-1].startswith("finished after round 2")
    assert run.path.parts[:3] == ("outputs", "digits", "fedper")
    assert (run.status, run.round, len(run.rounds), len(run.clients)) == ("finished", 2, 2, 4)
    # It knows the run as its own.
    again = run_command(*words, "rounds=2", "local.epochs=1", cwd=tmp_path)
    assert again.out.startswith("already finished")
    by_config = fedpfl.run(run.config)
    assert by_config.path == run.path
    assert capfd.readouterr().out.startswith("already finished")
    fedpfl.run(run.config, directory="other", progress=False)
    assert capfd.readouterr() == ("", "")
    assert read_table(Path("other/rounds.csv")) == read_table(run.path / "rounds.csv")
    fedpfl.run(run.config, directory="other", progress=False)
    assert capfd.readouterr() == ("", "")


def surroundings() -> list:
    """What a run might change of the process that it is in."""
    logs = map(logging.getLogger, (None, "fedpfl"))
    found = [(log.handlers[:], log.level, log.propagate) for log in logs]
    found += [signal.getsignal(number) for number in interrupts.EXIT_STATUS]
    found += [GlobalHydra.instance().hydra, VersionBase.instance().getbase()]
    found += [torch.get_num_threads(), torch.get_rng_state().tolist()]
    return [*found, list(warnings.filters), dict(os.environ)]


def test_what_is_around_is_left_as_it_was(tmp_path, monkeypatch):
    """A program with a Hydra, threads and logs of its own."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "conf"
    own.mkdir()
    torch.set_num_threads(2)
    try:
        with initialize_config_dir(str(own), version_base="1.2", job_name="mine"):
            singletons, before = dict(Singleton._instances), surroundings()
            fedpfl.run(*SMALL, "method=local_only", progress=False)
            assert singletons.items() <= Singleton._instances.items()
            assert surroundings() == before
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


MISTAKES = r"""
run(rounds="5") | rounds must be a whole number, got '5'
run("method=fedavg,fedper") | method=fedavg,fedper is a sweep, .* give method one value
run({"rounds": 1}) | has no value
# what is wrong with any run of a sweep is told before the first
sweep(*TINY, seed=[1, 1]) | seed=1 is a run already
sweep(*TINY, method=["fedavg", "fedper"], rounds=[1, 0]) | rounds must be 1 or more
"""


def test_mistakes_are_one_line_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call, line in (case for case in read_cases(MISTAKES, " | ") if isinstance(case, tuple)):
        with pytest.raises(fedpfl.FedpflError, match=line) as told:
            eval(f"fedpfl.{call}", {"fedpfl": fedpfl, "TINY": TINY})
        assert "\n" not in str(told.value)
        assert not list(tmp_path.iterdir())


MANY = (*TINY_TASK, "model=mlp", "method=fedavg")


class Stops(fedpfl.Callback):
    """Ctrl-C when the second run begins; counts the rounds that are played."""

    begun = rounds = 0

    def on_begin(self, run):
        self.begun += 1
        if self.begun == 2:
            raise KeyboardInterrupt

    def on_round(self, round):
        self.rounds += 1


def test_a_sweep_goes_on_and_has_a_row_for_each_run(tmp_path, monkeypatch):
    """Its runs are the command line's."""
    monkeypatch.chdir(tmp_path)
    assert run_command("-m", *MANY, "model.hidden=[4]", "seed=1", cwd=tmp_path).code == 0
    swept = {"model": {"hidden": [[8], [4], [2]]}, "seed": np.arange(1, 2)}
    with pytest.raises(KeyboardInterrupt):
        fedpfl.sweep(*MANY, **swept, callbacks=[Stops()])
    heard = Stops()
    heard.begun = 2
    runs, found = fedpfl.sweep(*MANY, **swept, callbacks=[heard], progress=False)
    # One of three runs is the command line's, and one was there before the interrupt.
    assert heard.rounds == 2
    assert found["model.hidden"].tolist() == ["[8]", "[4]", "[2]"]
    assert found["status"].tolist() == ["finished"] * 3
    for (_, row), run in zip(found.iterrows(), runs, strict=True):
        assert str(run.config["model"]["hidden"]) == row["model.hidden"]
        assert run.config["seed"] == row["seed"] == 1
        assert row["accuracy"] == run.clients["accuracy"].mean()
        assert row[run.rounds.columns].dropna().tolist() == run.rounds.iloc[-1].dropna().tolist()
    assert {run.path.resolve() for run in runs} == {*tmp_path.glob("outputs/*/*/*/seed*")}


CHANGED = """
(run / "state.pt").unlink() | state.pt is not there, .* checkpoint.keep=true
(run / "state.pt").write_bytes(b"no state") | state.pt is damaged
rewrite_summary(run, data="0123") | the data are not those of run
"""


@pytest.mark.parametrize(("change", "line"), read_cases(CHANGED, " | "))
def test_models_are_refused_where_they_would_not_be_the_runs(change, line, copy):
    eval(change, {**globals(), "rewrite_summary": rewrite_summary, "run": copy})
    run = fedpfl.load(copy)
    assert len(run.rounds) == 2
    with pytest.raises(fedpfl.FedpflError, match=line) as told:
        run.personal(0)
    assert "\n" not in str(told.value)


def test_changed_code_of_the_method_is_told(copy, monkeypatch):
    (code,) = read_summary(copy)["code"]
    monkeypatch.setattr(resume, "digest_code", lambda run: {**code, "method": "0"})
    with pytest.warns(UserWarning, match="the method's code has changed since the run"):
        fedpfl.load(copy).personal(0)


UNANSWERED = r"""
run.personal(4) => client must be a whole number from 0 to 3, got 4
run.predict(0, np.zeros((2, 1, 28, 28))) => uint8 .* digits, got float64
fedpfl.load(run.path, "cuda:77").mask(0) => no such CUDA device
"""


def test_questions_without_an_answer(folder):
    run = fedpfl.load(folder)
    for question, line in read_cases(UNANSWERED):
        with pytest.raises(fedpfl.FedpflError, match=line):
            eval(question, {"run": run, "fedpfl": fedpfl, "np": np})


def test_an_export_is_all_or_nothing(folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine").touch()
    assert export.main([str(folder), str(tmp_path / "there")]) == 2
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 2
    real, saved = torch.save, []

    def full(*about):
        saved.append(about)
        if len(saved) == 3:
            raise OSError(28, "No space left on device")
        real(*about)

    monkeypatch.setattr(torch, "save", full)
    assert export.main([str(folder), str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("fedpfl: ") for line in lines] == [True] * 3
    assert lines[0].endswith("there exists; name a new folder")
    assert "No space left on device; choose a new folder" in lines[2]
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine"]


@pytest.mark.full
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells as they stand; what they print is kept in it."""
    path = ROOT / "docs" / "library.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    for cell, text in zip(cells, notebook.run_cells(path, tmp_path), strict=True):
        kept = "".join(line for output in cell["outputs"] for line in output["data"]["text/plain"])
        assert bool(kept) == bool(text), "run python scripts/notebook.py --write"
        assert kept.count("\n") == text.count("\n"), "run python scripts/notebook.py --write"


@pytest.mark.full
def test_the_pages_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = (ROOT / "docs" / "library.md").read_text().split("```python\n")[1:]
    source = "".join(block.split("```")[0] for block in blocks)
    asked = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    public = {name for name in vars(fedpfl.Trained) if not name.startswith("_")}
    assert public <= asked
    # What is about clients with names, and about samples of the reader's own, is not for digits.
    runnable = [block.split("```")[0] for block in blocks if "data=(x, y)" not in block]
    lines = "".join(runnable).splitlines(keepends=True)
    source = "".join(line for line in lines if "hospital_07" not in line)
    source = source.replace(
        "rounds=5",
        "rounds=1, model='mlp', clients=8, participation=0.2, eval={'finetune_epochs': 1}",
    )
    source = source.replace("seed=[1, 2, 3]", "seed=[1]")
    exec(compile(source, "docs/library.md", "exec"), {})
