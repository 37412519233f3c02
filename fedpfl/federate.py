"""Play a run on Flower, on this machine.

    python -m fedpfl.federate method=fedper dataset=digits clients=4

Words are those of fedpfl.train, and
  federate.nodes=4            processes that hold the clients' data and states
  federate.timeout=600        seconds for the answers to a round
  federate.minimum=1          answers without which a round is given up
  federate.share_states=true  for methods that need more than what is sent

With dataset=sites dataset.path=FOLDER each site has a node, and the server no data. One SuperLink and
the nodes are started on 127.0.0.1 and ended with the run. `<run directory>.nodes`
has the nodes' states and, in `flower.log`, what Flower says. The same command goes on where it was
stopped. `fedpfl export --flower` writes the app for a SuperLink of your own.

Exit status: as of fedpfl.train.
"""

from __future__ import annotations

import sys

from fedpfl.ground import interrupts, terminal

if __name__ == "__main__":
    interrupts.install_handler(interrupts.exit_during_import)
    terminal.outlive_readers()

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

from fedpfl.config import overrides
from fedpfl.config.plan import check_config
from fedpfl.config.run import Run, build_run
from fedpfl.data.datasets.sites import list_sites
from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError, missing_extra
from fedpfl.ground.terminal import print_notice
from fedpfl.ground.words import check_words
from fedpfl.remote import app, local, sites
from fedpfl.remote.server import FederateSettings
from fedpfl.runner.method_trial import try_method_of_nodes

EXIT_STATUS = {"finished": 0, "failed": 1, "diverged": 3}
REFUSED_STATUS = 2


def play_federation(words: Sequence[str]) -> int:
    """Play a run; return the exit status.

    Raises:
        FedpflError: for what is refused before anything is started.
    """
    # ---- Check the command and the method before any process starts
    words = check_words(words, (), "python -m fedpfl.federate --help tells what it takes")
    settings, cfg = app.compose_federation(words)
    if importlib.util.find_spec("flwr") is None:
        raise missing_extra("fedpfl federate needs Flower", "flower")
    run = build_run(check_config(cfg))
    app.require_playable(run)
    if run.account:
        run.account.check()
    try_method_of_nodes(run)
    disclosure = app.find_disclosure(run, settings)
    if disclosure:
        print(disclosure)
    node_configs, common_words = plan_nodes(words, run, settings)
    _, cfg = app.compose_federation(common_words)

    # ---- Play it in processes that are ended with it
    run_directory = Path(cfg.hydra.run.dir).resolve()
    # Beside the run, not in it: states hold clients' data, and a run directory is handed on.
    nodes_folder = run_directory.with_name(f"{run_directory.name}.nodes")
    with files.explain_write_errors(nodes_folder):
        nodes_folder.mkdir(parents=True, exist_ok=True)
    # The app runs in a folder of its own, so it is given the whole path.
    app_words = [word for word in common_words if not word.startswith("hydra.run.dir=")]
    app_words += overrides.format_words("hydra.run.dir", str(run_directory))
    log = nodes_folder / "flower.log"
    status = local.play_locally(
        words=app_words,
        node_configs=[
            f'{node_config} state="{nodes_folder}/node{number}"'
            for number, node_config in enumerate(node_configs)
        ],
        log=log,
        run_log=run_directory / "run.log",
    )
    return report_end(run_directory, log) if status is None else status


def plan_nodes(
    run_words: Sequence[str], run: Run, settings: FederateSettings
) -> tuple[list[str], list[str]]:
    """Return the configuration of each node, and the words for server and nodes.

    Of a data set of sites each node has one of them, and the server none.

    Raises:
        FedpflError: Words are about nodes in another way.
    """
    shares = f"share-states={str(settings.share_states).lower()}"
    if run.config["dataset"]["name"] != "sites":
        count = min(settings.nodes, run.settings.clients)
        numbers = [f"partition-id={number} num-partitions={count}" for number in range(count)]
        return [f"{number} {shares}" for number in numbers], [*run_words]

    # ---- The words with what was found in the folder, and without the folder
    sites.require_sites_partition(run)
    entries = list_sites(run.config["dataset"]["path"])
    if run.settings.clients != len(entries):
        raise FedpflError(
            f"clients={run.settings.clients}, and dataset.path has {len(entries)} sites, each at a "
            "node; leave clients out"
        )
    # Where a site's data lie is for its node to know; the number of sites and the share were read
    # here.
    keys = ("dataset.path=", "clients=", "partition.test_fraction=", "federate.nodes=")
    app_words = [word for word in run_words if not word.startswith(keys)]
    app_words.append(f"clients={len(entries)}")
    test_fraction = run.config["partition"]["test_fraction"]
    app_words += overrides.format_words("partition.test_fraction", test_fraction)
    return [f'data="{entry.resolve()}" {shares}' for entry in entries], app_words


def report_end(run_directory: Path, log: Path) -> int:
    """Print how a run has ended, and return the exit status. `log` is where Flower says more."""
    summary_file = run_directory / "summary.json"
    summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
    status = summary.get("status", "not begun")
    if status == "finished":
        print(f"finished: {run_directory}")
    else:
        print_notice(f"{status}: {summary.get('error') or log}")
    return EXIT_STATUS.get(status, REFUSED_STATUS)


def main(words: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    if words is None:
        words = sys.argv[1:]
    if not words or {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    try:
        return play_federation(words)
    except FedpflError as error:
        print_notice(error)
        return REFUSED_STATUS
    except KeyboardInterrupt as error:
        interrupts.exit_interrupted(error, print_notice)


if __name__ == "__main__":
    interrupts.install_handler(interrupts.raise_interrupt)
    raise SystemExit(main())
