"""A node answers what its own plan would have asked it, once where samples are hidden, and keeps its
states; a node that fails keeps neither its clients nor the others' evaluation.
"""

import copy
import json
import random
import re
from pathlib import Path

import pytest

from fedpfl.methods import METHODS
from fedpfl.remote import app, wire
from fedpfl.remote.node import NodePolicy
from fedpfl.remote.server import InProcessGrid
from tests.command import TINY, read_table
from tests.remote.grids import Overheard, make_nodes
from tests.remote.test_remote import Faulty, Played
from tests.remote.test_sites import SHORT as SITES
from tests.remote.test_sites import make_nodes as make_site_nodes
from tests.remote.test_sites import write_arrays
from tests.remote.test_trust import change_about

WORDS = [
    *("method=feddbe", "dataset=digits", *TINY[1:], "rounds=3", "eval.every=2"),
    *("eval.finetune_epochs=1", "eval.finetune_every=2", "federate.timeout=0.01"),
    *("federate.share_states=true", "local.decay=0.9"),
]
FORGED_VALUES = (-1, 0, 3, 0.25, 10**400, True, None, "adam", [], {"seed": 1})
"""In the place of each value of a question; those that are equal to it ask nothing else."""


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return the nodes of a federation, and the questions of a round and an evaluation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("asked"))
        grid = Overheard(make_nodes(WORDS, NodePolicy(share_states=True)))
        app.run_server(grid, WORDS)
    questions = {}
    for node, message, answer in grid.exchanges:
        fields, _ = wire.unpack_message(message)
        if "asks" in fields:
            asks = fields["asks"]
            kind = asks.get("draws", {}).get("purpose") or f"tuned {bool(asks['tuning'])}"
            questions[kind] = node, message, answer
    return grid.node_by_id, questions


def iterate_changes(value, path=()):
    """Yield the path of each value of a question, and all that is put in its place."""
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    for name, part in parts.items() if isinstance(parts, dict) else ():
        yield from iterate_changes(part, (*path, name))
    for forged in FORGED_VALUES:
        if forged != value:
            yield path, forged


def with_value(value, path, forged):
    if not path:
        return forged
    changed = copy.deepcopy(value)
    changed[path[0]] = with_value(value[path[0]], path[1:], forged)
    return changed


@pytest.mark.parametrize("kind", ["gather", "train", "tuned False", "tuned True"])
def test_each_field_of_a_question_is_the_nodes_own(kind, asked):
    """More than 60 forged questions of each kind are refused; the asked one is answered."""
    nodes, questions = asked
    number, message, answer = questions[kind]
    node = nodes[number]
    assert node.answer_message(message) == answer
    fields, trees = wire.unpack_message(message)
    changes = list(iterate_changes(fields["asks"], ("asks",)))
    changes += list(iterate_changes(fields["round"], ("round",)))
    changes += [(("round",), number) for number in range(9) if number != fields["round"]]
    changes += list(iterate_changes(fields["client"], ("client",)))
    if "before" in fields["asks"]:  # before round 1, which no run evaluates
        asks = with_value(fields["asks"], ("before", "draws", "round"), 0)
        early = wire.pack_message({**fields, "round": 0, "asks": {**asks, "tuning": None}}, trees)
        assert "not planned" in wire.unpack_message(node.answer_message(early))[0]["fault"]
    assert len(changes) > 60
    for path, forged in changes:
        forged_message = wire.pack_message(with_value(fields, path, forged), trees)
        refused, found = wire.unpack_message(node.answer_message(forged_message))
        if "fault" not in refused:  # it asks another client here the same, or to be judged untuned
            assert (path, forged) == (("asks", "tuning"), None) or path == ("client",)
            continue
        assert found == {}
        assert re.search("not planned|is not here|a message that is no", refused["fault"])


def test_a_client_trains_in_the_rounds_that_draw_it(asked):
    nodes, questions = asked
    number, message, _ = questions["train"]
    fields, trees = wire.unpack_message(message)
    refusals = [
        wire.unpack_message(
            nodes[number].answer_message(wire.pack_message({**fields, "client": client}, trees))
        )[0].get("fault", "")
        for client in range(4)
    ]
    assert sum("not planned" in refusal for refusal in refusals) == 1
    assert sum("not here" in refusal for refusal in refusals) == 2


# ---- What a greeting and a claim can do


def test_a_node_keeps_no_client_that_it_does_not_have(caplog):
    """It claims all of them, and answers that they are not here."""
    played = Played(METHODS["fedavg"]())
    played.grid.node_by_id = {1: played.node([1, 3, 5]), 2: played.node([0, 2, 4])}
    claim = change_about(clients=[0, 1, 2, 3, 4, 5])
    played.remote._grid = Faulty(played.grid, 1, claim, hello=True)
    assert len(played.round([2, 3]).loss) == 1
    assert "node 1, client 2: client 2 is not here" in caplog.text
    assert len(played.round([2, 3]).loss) == 2
    assert played.remote._node_of_client[2] == 2


# ---- An evaluation without some clients


def test_an_evaluation_over_some_clients_is_no_score(here):
    """It is said how many answered; neither `best` nor a mean counts it."""
    words = ["method=fedper", "dataset=digits", *TINY[1:], "rounds=2", "federate.timeout=0.01"]

    class Silent(InProcessGrid):
        def send_and_receive(self, messages, timeout):
            answers = super().send_and_receive(messages, timeout)
            is_last = any(b'"before"' in one and b'"round": 2' in one for _, one in messages)
            return [
                None if is_last and node else one
                for (node, _), one in zip(messages, answers, strict=True)
            ]

    path = app.run_server(Silent(make_nodes(words)), words)
    first, second = read_table(path / "rounds.csv")
    assert (first["evaluated"], second["evaluated"]) == ("4", "2")
    assert first["accuracy"]
    assert second["accuracy"] == ""
    assert second["cohort_after"]
    assert json.loads((path / "summary.json").read_text())["best"]["round"] == 1
    assert "2 of 4 clients did not answer the evaluation" in (path / "run.log").read_text()
    scores = [row["accuracy"] for row in read_table(path / "clients.csv")]
    assert scores.count("") == 2


# ---- One set of sites


@pytest.mark.usefixtures("few_orders")
def test_a_node_answers_one_set_of_sites(here):
    """A server that changes another site's size gets no fresh ledger, also in a new process."""
    pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")
    (here / "sites").mkdir(exist_ok=True)
    write_arrays(here / "sites")
    words = [word for word in SITES if "validation" not in word]
    words += ["validation=0", "privacy=sample", "privacy.noise=2", "participation=1"]
    words += ["dataset.mean=[0.,1,2,3,4]", "dataset.std=[1.,9,1,1,1]"]
    grid = Overheard(make_site_nodes(words))
    app.run_server(grid, words)
    number, message, answer = next(
        exchange for exchange in grid.exchanges if b'"draws"' in exchange[1]
    )
    fields, trees = wire.unpack_message(message)
    own = grid.node_by_id[number]._facts.name
    sites = [dict(site) for site in fields["agreement"]["sites"]]
    next(site for site in sites if site["name"] != own)["samples"] += 1
    forged = {**fields, "agreement": {**fields["agreement"], "sites": sites}}
    node = make_site_nodes(words)[number]
    assert node.answer_message(message) == answer
    fault = wire.unpack_message(node.answer_message(wire.pack_message(forged, trees)))[0]["fault"]
    assert "the server has data" in fault
    # The server computes the key of its own agreement, as any server can.
    (key,) = re.findall("this node ([0-9a-f]+)", fault)
    forged["key"] = {**fields["key"], "data": key}
    fault = wire.unpack_message(node.answer_message(wire.pack_message(forged, trees)))[0]["fault"]
    assert "have answered for the same configuration and seed with other sites" in fault
    assert len([*Path("states").glob(f"{number}/*/client*/privacy.csv")]) == 1

    # ---- Nor does it for any other agreement, of which one value is forged.
    changes = list(iterate_changes(fields["agreement"], ("agreement",)))
    for path, value in random.Random(0).sample(changes, 60):
        forged_message = wire.pack_message(with_value(fields, path, value), trees)
        assert "fault" in wire.unpack_message(node.answer_message(forged_message))[0], (path, value)
