"""Neither side trusts a byte of the other: hostile and broken nodes and servers, each in one process."""

import json
import logging
import random
import re
import traceback
import tracemalloc
from unittest import mock

import pytest
import torch

from fedpfl.engine.calls import Counts
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.traffic import Traffic
from fedpfl.ground.tree import Known
from fedpfl.methods import METHODS
from fedpfl.remote import wire
from fedpfl.remote.download import NotSentError, drop_known
from fedpfl.remote.node import NodePolicy
from fedpfl.remote.trust import check_counts
from tests.conftest import assert_same
from tests.remote.grids import Overheard
from tests.remote.test_remote import KEY, Faulty, Played, changed, in_one_place

FEDAVG = METHODS["fedavg"]()


def change_about(**fields):
    """Return a fault: a node says other things beside its answer."""
    return lambda answer: changed(answer, lambda about, found: ({**about, **fields}, found))


def change_found(change):
    """Return a fault: a node answers with another participation."""
    return lambda answer: changed(answer, lambda about, found: (about, change(found)))


def change_fields(**fields):
    """Return a fault: a node's participation has other fields."""
    return change_found(lambda found: found._replace(**fields))


def change_counts(**fields):
    """Return a fault: a node tells other test results."""
    values = {name: torch.tensor(value) for name, value in fields.items()}
    return change_found(lambda found: found._replace(after=found.after._replace(**values)))


def change_uploads(change):
    """Return a fault: a node sends other leaves."""
    return change_found(lambda found: found._replace(uploads=tree.map(change, found.uploads)))


FEWER_BITS = Traffic(torch.tensor(-5), torch.tensor(-5))
OTHER_KEY = {**KEY, "data": "9"}
OTHER_DATA = "it has data 9, the server 123; give both the same command, data and packages"
NODE_FAULTS = {
    "vanished": (lambda answer: None, "no answer within 0.01 seconds"),
    "too large": (lambda answer: answer + bytes(2**21), "of .* bytes, where .* are the most"),
    "not finite": (change_uploads(lambda leaf: leaf / 0), "numbers that are not finite"),
    "configuration": (change_about(key=OTHER_KEY), OTHER_DATA),
    "samples it has not": (change_counts(total=10**9), r"of 1,000,000,000 samples"),
    "negative traffic": (change_fields(up=FEWER_BITS), "traffic or FLOPs that cannot be"),
    "another client": (change_fields(client_ids=torch.tensor(0)), "it answers for client 0"),
    "a test result alone": (change_found(lambda found: {"test": found.after}), "of another kind"),
}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("precision", [[3, 0, 1, 1], [1, 1, 3, 0]], [[3, 0, 1, 1], [1, 1, 3, 1]]),
        ("auroc", float("nan"), 1.5),
        ("ece", 0.0, -0.1),
        ("label_spread", 0.0, float("inf")),
    ],
)
def test_a_measure_that_samples_cannot_have_is_refused(name, right, wrong):
    counts = Counts(torch.tensor(3), torch.tensor(1.0), torch.tensor(5))
    check_counts(counts._replace(measures={name: torch.tensor(right)}), 5, "in the test split")
    with pytest.raises(FedpflError, match=f"a measure {name} in the test split that 5 samples"):
        check_counts(counts._replace(measures={name: torch.tensor(wrong)}), 5, "in the test split")


@pytest.mark.parametrize("fault", NODE_FAULTS)
def test_a_round_goes_on_without_a_node_that_fails_or_lies(fault, caplog):
    """As if its clients had not been drawn; one line names node and client. What a right answer
    looks like is known from the method, also in the first round.
    """
    lie, reason = NODE_FAULTS[fault]
    played = Played(FEDAVG)
    played.remote._grid = Faulty(played.grid, 1, lie)
    with caplog.at_level(logging.WARNING):
        outcome = played.round([2, 3, 4])
    state, (known,), _ = in_one_place(FEDAVG, (2, 4))
    assert_same(played.state.server, state.server)
    assert (len(outcome.loss), outcome.traffic) == (2, known.traffic)
    (line,) = (record.getMessage() for record in caplog.records)
    assert re.fullmatch(f"node 1, client 3: .*{reason}.*; round 1 goes on without it", line)


# ---- Who holds whom


def test_a_client_stays_with_the_node_that_brought_it_first(caplog):
    played = Played(FEDAVG)
    played.remote._grid = Faulty(played.grid, 1, change_about(clients=[0, 1, 3, 5]), hello=True)
    played.round([0, 3])
    assert played.remote._node_of_client == {0: 0, 2: 0, 4: 0, 1: 1, 3: 1, 5: 1}
    assert "node 1 is left out for client 0: node 0 has it" in caplog.text
    del played.grid.node_by_id[0]  # which releases its clients
    played.round([3])
    assert played.remote._node_of_client == {0: 1, 1: 1, 3: 1, 5: 1}


@pytest.mark.parametrize("clients", [[7], [-1], [True], "0", None, {"0": 1}, 10**400])
def test_a_claim_must_be_of_clients_that_there_are(clients, caplog):
    played = Played(FEDAVG)
    played.remote._grid = Faulty(played.grid, 1, change_about(clients=clients), hello=True)
    played.round([0, 2])
    assert set(played.remote._node_of_client.values()) == {0}
    assert "node 1 is left out: " in caplog.text


def test_a_node_that_does_not_answer_is_not_waited_for_again(caplog):
    played = Played(FEDAVG)
    played.round([2, 3])
    grid = played.remote._grid = Overheard(played.grid.node_by_id, deaf=[1])
    played.round([2, 3])
    assert "node 1, client 3: no answer within" in caplog.text
    grid.exchanges.clear()
    played.round([2, 3])
    (message,) = (message for node, message, _ in grid.exchanges if node == 1)
    assert wire.unpack_message(message)[0]["wants"] == "clients"
    grid.deaf = []
    assert len(played.round([2, 3]).loss) == 2


# ---- What a node keeps


def test_a_node_decides_what_leaves_it():
    """A server that asks for states is refused by a node whose own settings do not share them."""
    played = Played(METHODS["fedper"](), shares=True)
    node = played.node([0])
    node._policy = NodePolicy()
    grid = played.remote._grid = Overheard(played.grid.node_by_id)
    played.round([0, 2])
    played.judged()
    asking = [one for one in grid.requests if "wants" not in wire.unpack_message(one)[0]]
    assert len(asking) > 5
    for message in asking:
        fields, found = wire.unpack_message(node.answer_message(message))
        assert "share-states=true" in fields["fault"] or "is not here" in fields["fault"]
        assert found == {}


def test_a_node_takes_no_tensors_that_its_method_does_not_send():
    played = Played(FEDAVG, nodes=1)
    grid = played.remote._grid = Overheard(played.grid.node_by_id)
    played.round([0])
    fields, trees = wire.unpack_message(grid.requests[-1])
    sent = trees["sent"]
    name = next(iter(sent))

    def read_fault(**parts):
        message = wire.pack_message({**fields, **parts.pop("fields", {})}, {**trees, **parts})
        return wire.unpack_message(played.grid.node_by_id[0].answer_message(message))[0]["fault"]

    for leaf in (sent[name].double(), sent[name][None]):
        assert "sends other entries" in read_fault(sent={**sent, name: leaf})
    assert "sends other entries" in read_fault(sent={**sent, "more": torch.zeros(1)})
    assert "entries which the server does not have" in read_fault(fields={"initial": ["more"]})
    with pytest.raises(NotSentError, match="counts on a client's knowing a"):
        drop_known(Known({"a": torch.ones(1)}), set())


# ---- Messages that are none


def forge(form):
    """Return a message of a form that says more than it brings."""
    text = form if isinstance(form, str) else json.dumps(form)
    header = f'{{"about": {{}}, "form": {text}}}'.encode()
    empty = wire.pack_message({}, {"0": torch.zeros(1)})
    (length,) = wire.HEADER_LENGTH.unpack_from(empty)
    tensors = empty[wire.HEADER_LENGTH.size + length :]
    return wire.HEADER_LENGTH.pack(len(header)) + header + tensors


FORGED = {
    "expanded": ["leaf", "0", [4_000_000_000]],
    "many axes": ["leaf", "0", [1] * 10_000],
    "unknown": ["pickle", "0"],
    "too many": ["leaf", "0", [200_000]],
    "bits": ["bits", "0", [1], [10**12]],
    "mask": ["selected", "Masked", {"a": [10**10]}, ["none", ""], [["leaf", "0", [0]]]],
    "masks": ["selected", "Masked", [[2**30]] * 100, ["all", ""], []],
    "deep": '["dict", {"a": ' * 9_000 + '["dict", {}]' + "}]" * 9_000,
}


@pytest.mark.parametrize("form", FORGED)
def test_a_forged_size_costs_nothing(form):
    tracemalloc.start()
    with pytest.raises(FedpflError):
        wire.unpack_message(forge(FORGED[form]), max_entries=100_000)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


ODD = (None, True, -1, 3, 2.5, 10**30, float("nan"), "a\n\x1b", [[1]], {"a": {"b": 1}})


def mutate(message: bytes, chance: random.Random) -> bytes:
    """Change a message's values, or one to three places of its bytes."""
    if chance.random() < 0.3:
        fields, trees = wire.unpack_message(message)
        fields[chance.choice(sorted(fields))] = chance.choice(ODD)
        return wire.pack_message(fields, trees)
    for _ in range(chance.randint(1, 3)):
        # Half of them in the header, which most of a message is not.
        at = chance.randrange(min(chance.choice([300, len(message)]), len(message)) or 1)
        material = chance.randbytes(chance.randint(1, 9))
        left = chance.choice([at, at + len(material), len(message), at // 2])
        message = message[:at] + material + message[left:]
    return message


def test_neither_side_takes_a_changed_message():
    """300 each: a node has a fault in one line or an answer, and a stored state is as it was; a
    server refuses in one line, or takes finite numbers.
    """
    played = Played(METHODS["ditto"](), nodes=1)
    server = played.remote
    grid = server._grid = Overheard(played.grid.node_by_id)
    with mock.patch.object(server, "_check_answer", wraps=server._check_answer) as spy:
        played.round([0, 2])
        played.judged()
    (node,) = played.grid.node_by_id.values()
    stored = {path: path.read_bytes() for path in node._store._folder.rglob("*.pt")}
    chance = random.Random(0)
    faults = refused = 0
    for _ in range(300):
        message = mutate(chance.choice(grid.requests), chance)
        with mock.patch.object(traceback, "print_exc", side_effect=AssertionError):  # its own fault
            fields, _ = wire.unpack_message(node.answer_message(message))
        if "fault" in fields:
            faults += 1
            assert "\n" not in fields["fault"]
            assert all(path.read_bytes() == state for path, state in stored.items())
        call, client, message = chance.choice(spy.call_args_list).args
        try:
            answer = server._check_answer(call, client, mutate(message, chance))
        except FedpflError:
            refused += 1
        else:
            assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(answer))
    assert min(faults, refused) > 200
