"""A federation as the command plays it, its grid in memory: files, going on, and what is refused."""

from pathlib import Path
from unittest.mock import Mock

import pytest

import fedpfl
from fedpfl import federate
from fedpfl.ground.errors import FedpflError
from fedpfl.remote import app
from fedpfl.remote.node import NodePolicy
from fedpfl.remote.server import InProcessGrid
from tests.command import FILES, TINY, read_table, run_command
from tests.conftest import read_cases
from tests.remote.grids import Overheard, make_nodes

WORDS = ["dataset=digits", *TINY, "rounds=3", "federate.timeout=0.01"]


def test_the_files_are_those_of_any_run(here):
    """Server and nodes are killed in round 2 and go on; the numbers are those of `fedpfl train`,
    the server's defence included.
    """
    words = ["method=fedper", "defence=median", *WORDS]
    with pytest.raises(KeyboardInterrupt):
        app.run_server(Overheard(make_nodes(words), left=9), words)
    path = app.run_server(InProcessGrid(make_nodes(words)), words)
    assert run_command(*words[:-1], cwd=here).code == 0
    alone = Path(str(path).replace("federated/", ""))
    files = {*FILES, "run.lock", "wire.csv", "partition.png"}  # the last for its callback
    assert {own.name for own in path.iterdir()} == files
    for name in ("rounds.csv", "clients.csv"):
        assert read_table(path / name) == read_table(alone / name)
    rows, counted = read_table(path / "wire.csv"), read_table(path / "rounds.csv")
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    for row, own in zip(rows, counted, strict=True):
        assert int(row["counted_up"]) * 8 == int(own["bits_up"])
        assert int(row["counted_up"]) < int(row["bytes_up"]) < int(row["counted_up"]) + 2 * 3000
        assert row["answers"] == own["participants"] == "2"
    assert len([*here.glob("node*/*/client*/round*.pt")]) > 3
    message = "clients' states are at their nodes"
    with pytest.raises(FedpflError, match=message):
        fedpfl.load(path).personal(0)
    longer = (*words[:-2], "rounds=4", f"extend='{path}'")
    with pytest.raises(FedpflError, match=message):
        fedpfl.run(*longer, directory=here / "longer", progress=False)
    assert len(fedpfl.load(path).rounds) == 3


def test_what_would_leave_clients_is_said(here):
    """By the method, or once something is asked for that does not travel."""
    words = ["method=fedobp", *WORDS]
    message = "needs more than is sent .* federate.share_states=true allows it"
    with pytest.raises(FedpflError, match=message):
        app.run_server(InProcessGrid(make_nodes(words)), words)
    with pytest.raises(FedpflError, match="server looks at clients' states"):
        app.run_server(InProcessGrid({}), ["method=fedamp", *WORDS])
    nodes = make_nodes(words, NodePolicy(share_states=True))
    shared = [*words, "federate.share_states=true", "restart=true"]
    path = app.run_server(InProcessGrid(nodes), shared)
    assert "clients' states (model) leave them in every round" in (path / "run.log").read_text()
    assert not [*here.glob("node*/*/client*")]
    assert [row["participants"] for row in read_table(path / "rounds.csv")] == ["2"] * 3


def test_the_command_as_in_one_place(here):
    """Nodes have their clients' states beside the run directory; what diverges has status 3."""
    words = ["method=fedper", *WORDS[:-1], "federate.nodes=3"]
    assert federate.main(words) == 0
    assert run_command(*words[:-1], cwd=here).code == 0
    (path,) = here.glob("outputs/federated/**/rounds.csv")
    assert read_table(path) == read_table(Path(str(path).replace("federated/", "")))
    nodes = path.parent.with_name(f"{path.parent.name}.nodes")
    assert len([*nodes.glob("node*")]) == 3
    assert federate.main([*words, "local.lr=1e30"]) == 3


REFUSED = r"""
unseen=0.25 => a federation has no newcomers; set unseen=0
eval.common=true => a federation has samples at their nodes; leave out eval.common
system=simulated => real time, .* set system=none
federate.minimun=1 => federate.minimun
method=centralized => samples that stay at nodes; centralized training is for train
attack=lie attack.share=0.5 => nodes that play .* honestly; set attack=none
SITES shift.label_noise=0.1 => shift lays anew what clients hold
SITES dataset.missing=median => dataset.missing=median needs the values of all sites, and samples are at
"""


@pytest.mark.parametrize(("words", "said"), read_cases(REFUSED))
def test_what_is_refused(words, said, here):
    """In one line, and nothing is written."""
    given = words.replace("SITES", "dataset=sites partition.samples_per_client=null").split()
    with pytest.raises(FedpflError, match=said):
        app.run_server(InProcessGrid({}), ["method=fedavg", *WORDS, *given])
    assert not [*here.rglob("*")]


def test_plugins_are_tried_before_nodes_are_asked(here, monkeypatch):
    """`tests/runner/test_plugin_trial.py` has what is tried."""
    monkeypatch.setattr(app, "try_plugins", Mock(side_effect=FedpflError("tried")))
    with pytest.raises(FedpflError, match="tried"):
        app.run_server(InProcessGrid({}), ["method=fedavg", *WORDS])
    assert not [*here.glob("outputs")]
