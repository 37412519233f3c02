"""Introduce a run to its summary, its callbacks and the terminal."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedpfl import engine
from fedpfl.config.messages import describe_choice
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.ground import answer, tree
from fedpfl.ground.identity import identity
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import CLASSIFICATION, NEXT_TOKEN, SURVIVAL
from fedpfl.methods import METHODS
from fedpfl.methods.shared.submodel import Submodel
from fedpfl.models import Net
from fedpfl.record import console, environment
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.logfile import append_to_log
from fedpfl.record.rundir import RunDirectory
from fedpfl.robust import DataAttack
from fedpfl.runner.cost import count_submodel_costs
from fedpfl.runner.deploy import describe_input
from fedpfl.runner.everyone import list_federations
from fedpfl.runner.needs import ResourceNeeds, format_mib

LEARNT_OF_SITES = (
    "of each site its name, number of samples and their form, values of labels (of tables names of "
    "columns, values of dataset.categories, columns with empty cells under missing=indicator), sums, "
    "squares and numbers of values per channel unless dataset.mean and dataset.std are set; nothing "
    "else of its data"
)
"""Facts that the server learns of sites whose samples are at nodes."""


def make_summary_facts(run: Run) -> Record:
    """Return the facts about a run that its summary holds from the beginning."""
    federation = run.federation
    facts: Record = {
        "rounds": run.settings.rounds,
        "seed": run.settings.seed,
        "read": run.data_digest,
        "cohort": run.cohort,
        "clients": federation.clients,
        "heterogeneity": asdict(run.heterogeneity),
        "input": describe_input(federation),
        "parameters": tree.size(run.net.params),
        "environment": environment.describe_environment(),
    }
    optional_facts: Record = {
        "classes": list(federation.class_names or ()),
        "frozen": tree.size(run.net.frozen),
        "title": run.method.title,
        "privacy": _describe_privacy(run),
        "attack": _describe_attack(run),
        "caveat": run.origin.caveat,
    }
    if isinstance(run.method, Submodel):
        optional_facts["devices"] = count_submodel_costs(run.method, run.net, federation.shape)
    facts |= {name: value for name, value in optional_facts.items() if value}
    if run.adversary:
        facts["attackers"] = _number_attackers(run)
    return facts


def _describe_privacy(run: Run) -> str:
    """Describe the protection of a private run, and that its initial weights have none."""
    if not run.account:
        return ""
    sentence = run.account.sentence()
    weights_file = run.origin.path
    if not weights_file:
        return sentence
    return f"{sentence}; nor is what {weights_file} gives away, the weights that it starts from"


def _describe_attack(run: Run) -> str:
    """Describe the attack and the clients that are evaluated; "" without an attack."""
    if not run.adversary:
        return ""
    attack = run.adversary.attack
    classes = attack.describe_classes(run.federation) if isinstance(attack, DataAttack) else ""
    return (
        f"{describe_choice(run.config['attack'])}{classes}: {len(_number_attackers(run))} of"
        f" {run.federation.clients} clients attack, and the others alone are evaluated"
    )


def _number_attackers(run: Run) -> list[int]:
    """Return the attackers' numbers in the partition; [] without an attack."""
    attackers = run.adversary.attackers if run.adversary else ()
    return [run.federation.partition_number(client) for client in attackers]


def make_run_info(
    config: Record,
    path: Path,
    summary: Values,
    group: str,
    backend_name: str | None,
    **fields: Any,
) -> RunInfo:
    """Return the description of a run that callbacks receive.

    Args:
        config: resolved configuration.
        path: the run directory.
        summary: content of summary.json.
        group: of the run in loggers, such as its experiment.
        backend_name: of the backend that computes the clients, None if none is recorded.
        fields: other fields of RunInfo.
    """
    method_name = config["method"]["name"]
    method_title = METHODS[method_name].__name__ if method_name in METHODS else method_name
    run_identity = identity(config)
    name_parts = (config.get("name"), method_title, run_identity, f"seed{config['seed']}")
    tags = [config[key]["name"] for key in ("dataset", "partition", "model")]
    tags += [backend_name, config.get("engine", {}).get("precision")]
    return RunInfo(
        name="-".join(filter(None, name_parts)),
        group=group,
        job_type=method_name,
        tags=tuple(filter(None, tags)),
        config=config,
        path=path,
        identity=run_identity,
        seed=config["seed"],
        rounds=config["rounds"],
        facts=summary,
        **fields,
    )


def format_header(run: Run, path: Path, backend_name: str, needs: ResourceNeeds) -> list[str]:
    """Return the first lines that a user sees of a run.

    Args:
        run: the built run.
        path: its run directory.
        backend_name: of the backend that computes the clients.
        needs: memory and disk that the run needs.
    """
    # ---- Step 1: data, clients and network.
    federation = run.federation
    config = run.config
    shape = "x".join(map(str, federation.shape))
    counts = torch.cat([part.sample_counts() for part in list_federations(run)])
    quantiles = [f"{int(count):,}" for count in (counts.min(), counts.median(), counts.max())]
    clients = (
        f"{federation.clients}, {run.cohort} per round; samples min/median/max "
        f"{'/'.join(quantiles)}"
    )
    idle = federation.count_untrainable(run.local.batch_size)
    if idle:
        clients += f"; {idle} never train, for lack of samples"
    if run.newcomers:
        clients += f"; newcomers that never take part: {run.newcomers.clients}"

    # ---- Step 2: a line for each fact that holds.
    facts = {
        "name": run.settings.name,
        "of a sweep": console.run_label.get(),
        "data set": f"{federation.name}: {len(federation.y):,} samples {shape}, "
        f"{_describe_labels(federation)}",
        "clients": clients,
        "partition": describe_choice(config["partition"]),
        "from iid": f"{run.heterogeneity} (0: none)",
        "method": describe_choice(config["method"]),
        "model": "; ".join(map(_describe_network, run.net.nets)),
        "learnt": LEARNT_OF_SITES if federation.is_elsewhere else "",
        "shift": run.shift and str(run.shift),
        "devices": run.clock and describe_choice(config["system"]),
        "weights": run.origin.line,
        "privacy": _describe_privacy(run),
        "attack": _describe_attack(run),
        "defence": run.defence and describe_choice(config["defence"]),
        "engine": f"{backend_name} on {run.device}, {run.engine.precision}",
        "memory": f"client states (state.device={run.state.device}) up to "
        f"{format_mib(needs.states)} MiB once {needs.clients:,} clients have trained; checkpoint "
        f"up to {format_mib(needs.checkpoint)} MiB",
        "directory": path,
    }
    return [f"{label:12}{text}" for label, text in facts.items() if text]


def list_notes(run: Run) -> list[str]:
    """Return the warnings about a run that are known before its first round."""
    return [*run.notes, *engine.slowness_notices(run.engine, run.device)]


def _describe_labels(federation: Federation) -> str:
    """Describe the labels of a data set."""
    if federation.task is NEXT_TOKEN:
        return f"{federation.classes:,} tokens"
    if federation.task.output:
        return f"{'a time and an event' if federation.task is SURVIVAL else 'a number'} each"
    things = "classes" if federation.task is CLASSIFICATION else "labels"
    return f"{federation.classes} {things}"


def _describe_network(net: Net) -> str:
    """Describe the size of a network, its head and frozen entries."""
    parts = net.parts
    text = "the head is unknown"
    if not parts.unclear:
        entries = tree.size(tree.select(net.params, parts.head))
        text = f"{entries:,} of them the head ({parts.head_layer or 'the whole network'})"
    text = f"{net.name}: {tree.size(net.params):,} parameters, {text}"
    # The average of features is a constant of the network's own.
    frozen = tree.drop(net.frozen, ["pool.weight"])
    if frozen:
        text += f"; {tree.size(frozen):,} frozen ones are sent once and not counted, and lie in"
        text += f" memory once for all clients ({format_mib(tree.nbytes(frozen))} MiB)"
    return text


def report_finished(directory: RunDirectory, quiet: bool) -> None:
    """Report that the run is already finished.

    Args:
        directory: of the run.
        quiet: whether notes go to run.log alone.
    """
    for note in directory.notes:
        append_to_log(directory.path, note)
    answer.add_facts(runs=[{"path": directory.path, **directory.summary}])
    result = console.describe_result(directory.summary) or "no test samples"
    # Of a sweep's run the sweeper reports the outcome.
    label = console.run_label.get()
    if label:
        for note in directory.notes:
            print(f"{label}: {note}", file=sys.stderr, flush=True)
    elif not quiet:
        line = f"already finished: {directory.path} ({result}); restart=true runs it again"
        print(line, *directory.notes, sep="\n")
