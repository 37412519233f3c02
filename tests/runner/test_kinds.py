"""Runs of clients with networks of several kinds: killed and resumed, newcomers, files, report, nodes."""

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedpfl
from fedpfl.engine import make_backend, make_initial_state
from fedpfl.engine.store import Rows
from fedpfl.methods import METHODS
from fedpfl.models import MODELS, MixedNet
from fedpfl.report.__main__ import main as report
from fedpfl.report.html import write_pages
from tests.command import TINY_TASK, keep_last_words, play_run, run_command, wait_for
from tests.conftest import CPU, assert_same, tiny
from tests.engine.test_kinds import SMALL, Normed, build
from tests.engine.test_ranks import torchrun
from tests.record.test_damage import assert_ends_alike
from tests.remote import test_remote
from tests.runner.test_resume import die_after, replace_call, start_child, wait_for_child

KINDS = "model.kinds=[{name:mlp,hidden:[6]},{name:mlp,hidden:[8,5]},lenet5]"
WORDS = keep_last_words(
    *TINY_TASK,
    *("rounds=3", "clients=7", "unseen=0.43", "participation=1", "method=lg_fedavg"),
    *("partition.samples_per_client=60", "local.lr=0.2", "local.epochs=2"),
    *("eval.finetune_epochs=1", "eval.finetune_every=3", "model=mixed", "model.features=6", KINDS),
)
SIZES = {"mlp_0": 784 * 6 + 6 + 70, "mlp_1": 784 * 8 + 8 + 45 + 70, "lenet5": 43_576 + 70}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory; members and newcomers of each kind."""
    folder = tmp_path_factory.mktemp("kinds") / "run"
    play_run(folder, *WORDS)
    return folder


def read_clients(folder: Path) -> list[dict[str, str]]:
    with (folder / "clients.csv").open() as file:
        return list(csv.DictReader(file))


def test_killed_between_two_kinds_it_ends_as_if_it_never_was(whole, tmp_path):
    """Rows of a kind are written, those of the next are not; they are on disk the second time."""
    words = (*WORDS, "state.device=disk")

    def play() -> None:
        replace_call(Rows, "put_", 7, die_after)  # the first kind's in round 2
        play_run(tmp_path / "run", *words)

    assert wait_for_child(start_child(play)) == -9
    play_run(tmp_path / "run", *words)
    assert_ends_alike(tmp_path / "run", whole)


def test_each_client_has_its_own_network_in_files_and_what_it_costs(whole):
    run = fedpfl.load(whole)
    rows = read_clients(whole)
    kinds = ["mlp_0", "mlp_1", "lenet5"] * 2 + ["mlp_0"]
    members = [kind for row, kind in zip(rows, kinds, strict=True) if row["unseen"] == "0"]
    newcomers = [kind for row, kind in zip(rows, kinds, strict=True) if row["unseen"] == "1"]
    assert members[:3] != newcomers
    assert [row["kind"] for row in rows] == kinds
    assert {row["unseen"] for row in rows} == {"0", "1"}
    for client, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        assert int(row["parameters"]) == SIZES[kind]
        is_member = row["unseen"] == "0"
        # A head of 10 x 6 weights and 10 biases, 32 bits each.
        assert (row["bits_up"], row["bits_down"]) == (("2240", "2240") if is_member else ("", ""))
        assert bool(row["flops"]) == is_member
        x, y = run.samples(client)
        network = run.network(client).eval()
        network.load_state_dict(run.personal(client))
        trained = [leaf.numel() for leaf in network.parameters() if leaf.requires_grad]
        assert sum(trained) == SIZES[kind]
        logits = run.predict(client, x)
        torch.testing.assert_close(network(x), logits)
        torch.testing.assert_close(run.personal_module(client)(x), logits)
        hits = (logits.argmax(1) == y).double().mean() if len(y) else torch.tensor(torch.nan)
        assert float(row["accuracy"] or "nan") == pytest.approx(100 * float(hits), nan_ok=True)
        assert run.predict(client, x, finetuned=True).shape == logits.shape
    assert {*run.global_model()} == {"head.weight", "head.bias"}


def test_the_report_has_a_row_and_the_page_a_box_for_each_kind(whole, tmp_path, capsys):
    rows = [row for row in read_clients(whole) if row["unseen"] == "0" and row["accuracy"]]
    assert report([str(whole), "--format", "csv", "--out", str(tmp_path)]) == 0
    with (tmp_path / "kinds.csv").open() as file:
        table = {row["kind"]: row for row in csv.DictReader(file)}
    assert {*table} == {row["kind"] for row in rows}
    means = {}
    for kind, row in table.items():
        own = [client for client in rows if client["kind"] == kind]
        means[kind] = sum(float(client["accuracy"]) for client in own) / len(own)
        assert float(row["accuracy"]) == pytest.approx(means[kind])
        assert float(row["flops"]) == sum(float(client["flops"]) for client in own) / len(own)
    for kind, mean in means.items():
        assert float(table[kind]["gap"]) == pytest.approx(max(means.values()) - mean)
    capsys.readouterr()
    assert report([str(whole), "--format", "terminal"]) == 0
    assert "Clients of each kind of network" in capsys.readouterr().out
    (page,) = write_pages(roots=[whole], out=tmp_path)
    assert all(f"LG-FedAvg {kind}" in page.read_text() for kind in means)


@pytest.mark.parametrize("name", ["lg_fedavg", "fedproto"])
def test_nodes_have_each_its_own_network(name, monkeypatch):
    """As on the loop backend; with states at the nodes where that is all that a method needs."""
    monkeypatch.setitem(MODELS, "normed", Normed)
    net = build(SMALL, {"name": "mlp", "hidden": [9, 5]}, "normed", names=[0, 1, 2, 0, 1, 2])
    monkeypatch.setattr(test_remote.MethodTrial, "net", lambda *_, **more: net)
    method = METHODS[name]()
    found = test_remote.in_one_place.__wrapped__(method, *test_remote.COHORTS)
    state, outcomes, judgement = found
    played = test_remote.Played(method, shares=name == "fedproto")
    test_remote.assert_played(played, outcomes, judgement)
    assert_same(played.state.server, state.server)
    nodes = played.grid.node_by_id.values()
    assert [len(node._initial_state.rows) for node in nodes] == [0, 0]
    if not played.shares:
        played.judged()
        for client, kind in ((0, 0), (4, 1), (5, 2)):
            (file,) = [
                path
                for node in nodes
                for path in node._folder.glob(f"client{client}/*.safetensors")
            ]
            assert load_file(file).keys() == net.nets[kind].module.state_dict().keys()
    assert played.first().rows.kinds == net.kinds
    assert make_backend(test_remote.LOOP, net, CPU).net is net


@pytest.mark.full
def test_two_processes_are_one(whole, tmp_path):
    result = wait_for(torchrun(2, *WORDS, "hydra.run.dir=run", cwd=tmp_path))
    assert result.code == 0, result.err
    assert_ends_alike(tmp_path / "run", whole)


@pytest.mark.full
def test_a_lockstep_sweep_of_kinds_equals_its_runs_alone(whole, tmp_path):
    sweep = ("-m", "hydra/launcher=lockstep", "seed=42,1")
    result = run_command(*sweep, *WORDS, "hydra.sweep.dir=runs", cwd=tmp_path)
    assert result.code == 0, result.err
    (one,) = [path.parent for path in tmp_path.rglob("rounds.csv") if "42" in path.parent.name]
    assert_ends_alike(one, whole)


@pytest.mark.full
@pytest.mark.parametrize("privacy", ["client", "sample"])
def test_private_runs_take_kinds_where_the_upload_allows_it(privacy, tmp_path):
    words = [word for word in WORDS if not word.startswith(("unseen", "participation"))]
    own = {"client": ["participation=0.5"], "sample": ["participation=1"]}[privacy]
    run = ("eval.finetune_epochs=0", f"privacy={privacy}", *own, "privacy.noise=0.5")
    play_run(tmp_path / "run", *keep_last_words(*words, *run))
    assert {row["kind"] for row in read_clients(tmp_path / "run")} == {*SIZES}


def test_a_state_of_several_kinds_has_no_rows_but_its_own():
    nets = [tiny(norm=True), tiny()]
    rows = make_initial_state(METHODS["local_only"](), MixedNet(nets, [1, 0, 1]), 3, CPU).rows
    assert (rows.common, rows.kinds) == (
        {"client": [], "buffers": [], "facts": ["participated", "trained"]},
        [1, 0, 1],
    )
    assert_same(rows.take("client", 1)["model"], nets[0].params)
    assert rows.take("client", [0, 1]) == {}
    assert_same(
        rows.take("client", [0, 2])["model"],
        {name: torch.stack([leaf, leaf]) for name, leaf in nets[1].params.items()},
    )
