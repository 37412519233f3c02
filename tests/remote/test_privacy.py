"""Privacy at nodes: as in one place with the same secret; a node answers each planned question once,
by a key and a ledger of its own, and the server's noise is for one set of answers.
"""

import json
import re
import shutil
import stat

import pytest
import torch

from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.ground.errors import FedpflError
from fedpfl.record import checkpoint
from fedpfl.remote import app, budget, wire
from fedpfl.remote.node import NodePolicy
from fedpfl.remote.server import InProcessGrid
from tests.command import TINY, play_run, read_table
from tests.conftest import keep_quick
from tests.remote.grids import Overheard, make_nodes

pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")
pytestmark = pytest.mark.usefixtures("few_orders")

WORDS = [*("dataset=digits", *TINY[1:], "rounds=3", "validation=0", "federate.timeout=0.01")]
SAMPLE = [*WORDS, "privacy=sample", "privacy.noise=2", "privacy.clip=0.5"]
CLIENT = [*WORDS, "privacy=client", "privacy.noise=1", "privacy.clip=0.1"]
TUNED = ["eval.finetune_epochs=1", "eval.finetune_every=3"]
SEEDED = ["privacy.seed=1"]


ALIKE = {
    "samples, fine-tuned": ["method=fedper", *SAMPLE, *TUNED],
    "clients": ["method=fedper", *CLIENT],
    "samples by epsilon": ["method=ditto", *WORDS, "privacy=sample", "privacy.epsilon=9"],
    "clients, a bound that moves": [
        *("method=fedavg", *CLIENT, "privacy.quantile=0.5", "privacy.count_noise=2"),
    ],
    "poisson clients": ["method=fedavg", *CLIENT, "privacy.sampling=poisson", "participation=0.2"],
}


@pytest.mark.parametrize("kind", keep_quick(ALIKE, 2))
def test_with_the_same_secret_as_in_one_place(kind, here):
    """Server and nodes are killed on the way; of Poisson's cohorts some have nobody."""
    words = [*ALIKE[kind], *SEEDED]
    with pytest.raises(KeyboardInterrupt):
        app.run_server(Overheard(make_nodes(words), left=10), words)
    path = app.run_server(InProcessGrid(make_nodes(words)), words)
    kept = [word for word in words if "federate" not in word]
    play_run(here / "alone", *kept, "engine=loop")
    for name in ("rounds.csv", "clients.csv"):
        assert read_table(path / name) == read_table(here / "alone" / name)


# ---- Samples: a node's key and ledger


@pytest.fixture(scope="module")
def played(tmp_path_factory, few_orders):
    """Return a folder in which a federation was played, and all its messages."""
    folder = tmp_path_factory.mktemp("played")
    words = ["method=ditto", *SAMPLE, *TUNED]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        grid = Overheard(make_nodes(words))
        path = app.run_server(grid, words)
    return folder, words, path, grid.exchanges


def test_each_node_has_a_key_and_a_ledger_of_its_own(played):
    folder, _, path, requests = played
    keys = [*folder.glob(f"node*/*/{budget.KEY_FILE}")]
    contents = {key.read_bytes() for key in keys}
    assert len(keys) == len(contents) == 2
    assert all(stat.S_IMODE(key.stat().st_mode) == 0o600 for key in keys)
    assert not [*(folder / path).glob("privacy.key")]
    for _, message, answer in requests:
        assert not any(key in message + answer for key in contents)

    # ---- What clients say they have given away is what the server's account says.
    for row in read_table(folder / path / "clients.csv"):
        (ledger,) = folder.glob(f"node*/*/client{row['client']}/{budget.LEDGER_FILE}")
        entries = budget.read_ledger(ledger)
        assert float(row["epsilon"]) == pytest.approx(entries[-1].epsilon, rel=1e-4)
        kinds = [entry.kind for entry in entries]
        assert kinds.count("fine-tuning") == 1
        assert sorted(entry.epsilon for entry in entries) == [e.epsilon for e in entries]


def find_question(requests, kind, returning=False):
    """Return the last message of a kind: its node, itself and its answer.

    returning: to a client that has taken part before.
    """

    def is_asked(message):
        fields = wire.unpack_message(message)[0]
        asks = fields.get("asks", {})
        is_kind = kind in asks and bool(asks.get("tuning")) == (kind == "tuning")
        return is_kind and (fields["participated"] or not returning)

    return [request for request in requests if is_asked(request[1])][-1]


ALREADY = {"local": "training", "tuning": "fine-tuning", "before": "evaluation"}
"""Kinds of questions, as a ledger names them."""


def test_a_question_is_answered_once_and_no_other_in_its_place(played, monkeypatch):
    """The same one again, also of a restarted node, has the same answer, bit for bit, and costs
    nothing. `test_questions` has other forged questions.
    """
    folder, words, _, requests = played
    monkeypatch.chdir(folder)
    ledgers = {path: path.read_bytes() for path in folder.glob("node*/*/client*/privacy.csv")}
    restarted = make_nodes(words)
    for kind, name in ALREADY.items():
        number, message, answer = find_question(requests, kind)
        assert restarted[number].answer_message(message) == answer
        fields, trees = wire.unpack_message(message)
        if "sent" in trees:
            trees["sent"]["classifier.bias"] = trees["sent"]["classifier.bias"] + 1e-3
        else:  # an evaluation of Ditto needs nothing of the server
            trees["shared"] = {**trees["shared"], "other": torch.zeros(1)}
        forged = wire.pack_message(fields, trees)
        refused, found = wire.unpack_message(restarted[number].answer_message(forged))
        assert found == {}
        assert re.search(f"have answered for {name} of round . already", refused["fault"])
    assert ledgers == {path: path.read_bytes() for path in ledgers}


@pytest.fixture
def again(played, tmp_path, monkeypatch):
    """Return the folder of a node that has answered, to be changed, and a question that it had."""
    folder, words, _, requests = played
    number, message, answer = find_question(requests, "local", returning=True)
    shutil.copytree(folder / f"node{number}", tmp_path / f"node{number}")
    monkeypatch.chdir(tmp_path)
    (run_folder,) = (tmp_path / f"node{number}").glob("*-seed*")
    client = wire.unpack_message(message)[0]["client"]
    return lambda: make_nodes(words)[number], run_folder, client, message, answer


def ask(node, message) -> str:
    """Return why a node refuses a message, "" where it answers."""
    return wire.unpack_message(node.answer_message(message))[0].get("fault", "")


def test_a_node_that_is_told_to_forget_a_state_does_not_answer_from_both(again):
    """From another state the same model is another question, and would have the same noise."""
    make_node, folder, client, message, _ = again
    ledger = folder / f"client{client}" / budget.LEDGER_FILE
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:2]))
    node = make_node()
    fields, trees = wire.unpack_message(message)
    fields["participated"] = False
    forged = wire.pack_message(fields, trees)
    assert not ask(node, forged)
    assert not ask(node, forged)
    assert "answered for training" in ask(node, message)
    shutil.rmtree(folder / f"client{client}", ignore_errors=True)
    assert "the client's state is lost" in ask(make_node(), message)


def test_without_its_key_or_ledger_a_node_answers_nothing(again):
    make_node, folder, client, message, answer = again
    ledger = folder / f"client{client}" / budget.LEDGER_FILE
    content = ledger.read_text()
    assert make_node().answer_message(message) == answer
    key = folder / budget.KEY_FILE
    held = key.read_bytes()
    for damaged in (held[:5], b""):
        key.write_bytes(damaged)
        assert "privacy.key is gone or damaged" in ask(make_node(), message)
    key.write_bytes(held)
    for damaged in (content.replace("training", "training,1", 1), f"{content}training,7"):
        ledger.write_text(damaged)
        assert "the spent epsilon is unknown" in ask(make_node(), message)
    ledger.rename(folder / "elsewhere")
    ledger.symlink_to(folder / "elsewhere")
    assert "cannot read" in ask(make_node(), message)


def test_without_its_lines_a_ledger_is_spent_twice_but_no_noise_is_used_twice(again):
    """As with a ledger out of a backup: nearly the same model is answered with other noise."""
    make_node, folder, client, message, answer = again
    (folder / f"client{client}" / budget.LEDGER_FILE).unlink()
    fields, trees = wire.unpack_message(message)
    trees["sent"]["classifier.bias"] = trees["sent"]["classifier.bias"] + 1e-6
    other = make_node().answer_message(wire.pack_message(fields, trees))
    uploads = [wire.unpack_message(one)[1].uploads["classifier.bias"] for one in (answer, other)]
    assert (uploads[0] - uploads[1]).abs().max() > 1e-4


def test_a_node_allows_no_more_than_it_says(here):
    """Of all runs whose folders lie beside each other; runs that promise nothing are refused."""
    short = ["method=fedavg", *WORDS, "rounds=1"]
    words = [*short, "privacy=sample", "privacy.epsilon=3"]
    policy = NodePolicy(epsilon=5)
    for plain in (["privacy=none"], ["privacy=sample", "privacy.noise=2", *SEEDED]):
        with pytest.raises(FedpflError, match="runs of privacy=sample alone, up to epsilon 5"):
            make_nodes([*short, *plain], policy)
    path = app.run_server(InProcessGrid(make_nodes(words, policy)), words)
    assert "allows" not in (path / "run.log").read_text()
    more = [*words, "seed=1"]
    with pytest.raises(FedpflError, match="0 of 2 clients answered"):
        app.run_server(InProcessGrid(make_nodes(more, policy)), more)
    (log,) = here.glob("outputs/federated/**/seed1/run.log")
    assert re.search(
        r"plans epsilon 3 for it, .* given away [23][.\d]*, .* allows 5 in", log.read_text()
    )
    assert not [*here.glob("node*/*seed1*/client*/privacy.csv")]


# ---- Clients: the server's noise


def test_who_does_not_answer_counts_as_one_that_does_not_change(here):
    """The mean divides by how many were drawn, so that nobody is told by how many came."""
    words = ["method=fedavg", *CLIENT, *SEEDED, "participation=1", "rounds=1", "privacy.noise=0"]
    grid = Overheard(make_nodes(words))
    models = []
    for name, own in (("all", grid), ("deaf", Overheard(make_nodes(words), deaf=[1]))):
        path = app.run_server(own, [*words, f"hydra.run.dir={name}"])
        models.append(checkpoint.load_checkpoint(path / "state.pt")["server"])
    uploads = {
        wire.unpack_message(message)[0]["client"]: wire.unpack_message(answer)[1].uploads
        for _, message, answer in grid.exchanges
        if "local" in wire.unpack_message(message)[0].get("asks", {})
    }
    assert sorted(uploads) == [0, 1, 2, 3]
    start = build_run(check_config(app.compose_federation(words)[1])).net.params
    for heard, model in zip(([0, 1, 2, 3], [0, 2]), models, strict=True):
        clipped = [clip_plainly(uploads[client], start) for client in heard]
        for name, leaf in model.items():
            moves = sum(update[name] for update in clipped)
            assert torch.allclose(leaf.double(), start[name] + moves / 4, atol=1e-6)


def clip_plainly(upload, start):
    update = {name: upload[name].double() - start[name].double() for name in start}
    norm = sum(float(leaf.square().sum()) for leaf in update.values()) ** 0.5
    return {name: leaf * min(1, 0.1 / norm) for name, leaf in update.items()}


def test_noise_is_for_one_set_of_answers(here):
    """A server that goes back takes the answers of before, no more, no fewer and no others."""
    words = ["method=ditto", *CLIENT, "participation=1", "rounds=2"]
    nodes = make_nodes(words)
    # Round 1 is played and shown without node 1; the server is killed as it evaluates.
    with pytest.raises(KeyboardInterrupt):
        app.run_server(Overheard(nodes, left=1 + 2, deaf=[1]), words)
    (path,) = (file.parent for file in here.glob("outputs/federated/**/releases.json"))
    assert json.loads((path / "releases.json").read_text())["rounds"]["1"].keys() == {"0", "2"}
    assert (path / "privacy.key").is_file()
    with pytest.raises(FedpflError, match="clients 0, 2 do not answer as they did"):
        app.run_server(Overheard(nodes, deaf=[0]), words)
    app.run_server(Overheard(nodes), words)
    rows = read_table(path / "rounds.csv")
    assert [row["participants"] for row in rows] == ["2", "4"]
    assert not (path / "privacy.key").exists()
