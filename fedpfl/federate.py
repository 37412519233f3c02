"""Play a federation on this machine: a server and nodes that exchange messages.

    python -m fedpfl.federate method=fedper dataset=digits clients=4

Words are those of fedpfl.train, and
  federate.nodes=4            nodes that hold the clients' data and states
  federate.timeout=600        seconds for the answers to a round
  federate.minimum=1          answers without which a round is given up
  federate.share_states=true  for methods that need more than is sent

Server and nodes are in this process, and exchange the messages that Flower carries between machines.
With dataset=sites dataset.path=FOLDER each site has a node, and the server no data. `<run
directory>.nodes` has the nodes' states. The same command goes on where it was stopped. `fedpfl export
--flower` writes the app for a SuperLink of your own.

Exit status: see fedpfl.train.
"""

from __future__ import annotations

import sys

from fedpfl.ground import answer, interrupts

if __name__ == "__main__":
    interrupts.begin_imports()

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.config.run import Run, build_run
from fedpfl.data.datasets.sites import list_sites
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.words import check_words
from fedpfl.remote import app, sites
from fedpfl.remote.node import NodePolicy, make_run_node
from fedpfl.remote.server import InProcessGrid
from fedpfl.runner.faults import run_guarded


def play_federation(words: Sequence[str]) -> Path:
    """Play a run, and return its run directory. Raises FedpflError."""
    words = check_words(words, (), "python -m fedpfl.federate --help tells what it takes")
    settings, cfg = app.compose_federation(words)
    run = build_run(check_config(cfg))
    app.require_playable(run)
    server_words = plan_server(words, run)
    _, cfg = app.compose_federation(server_words)
    # Beside the run, not in it: states hold clients' data, and a run directory is handed on.
    directory = Path(cfg.hydra.run.dir).resolve()
    folder = directory.with_name(f"{directory.name}.nodes")
    policy = NodePolicy(share_states=settings.share_states)
    nodes: list[Any] = []
    if run.config["dataset"]["name"] == "sites":
        plan = check_config(cfg)
        for number, entry in enumerate(list_sites(run.config["dataset"]["path"])):
            node_folder = folder / f"node{number}"
            nodes.append(sites.SiteNode(plan, entry.resolve(), "", node_folder, policy))
    else:
        count = min(settings.nodes, run.settings.clients)
        for number in range(count):
            clients = range(number, run.settings.clients, count)
            nodes.append(make_run_node(run, clients, folder / f"node{number}", policy))
    return app.run_server(InProcessGrid(dict(enumerate(nodes))), server_words)


def plan_server(run_words: Sequence[str], run: Run) -> list[str]:
    """Return the words of the server, which has no data of sites.

    Raises:
        FedpflError: Words are about sites in another way.
    """
    if run.config["dataset"]["name"] != "sites":
        return [*run_words]
    sites.require_sites_partition(run)
    site_count = len(list_sites(run.config["dataset"]["path"]))
    if run.settings.clients != site_count:
        raise FedpflError(
            f"clients={run.settings.clients}, and dataset.path has {site_count} sites, each at a "
            "node; leave clients out"
        )
    keys = ("dataset.path=", "clients=", "partition.test_fraction=", "federate.nodes=")
    words = [word for word in run_words if not word.startswith(keys)]
    # The sites here tell their number, and whether they have test parts.
    test_fraction = run.config["partition"]["test_fraction"]
    test_words = overrides.format_words("partition.test_fraction", test_fraction)
    return [*words, f"clients={site_count}", *test_words]


def main(words: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    return run_guarded(__doc__, sys.argv[1:] if words is None else words, _play_words)


def _play_words(words: Sequence[str]) -> int:
    play_federation(words)
    return 0


if __name__ == "__main__":
    interrupts.end_imports()
    answer.run_command(main)
