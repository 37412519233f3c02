"""Introduces a run before its first round: to its summary, callbacks and the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fedpfl import engine
from fedpfl.config.messages import describe_choice
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.ground import tree
from fedpfl.ground.identity import identity
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, REGRESSION, find_task
from fedpfl.methods import METHODS
from fedpfl.methods.shared.submodel import Submodel
from fedpfl.models import Net
from fedpfl.record import console, environment
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.columns import task_of_columns
from fedpfl.record.forecast import Forecast, Schedule
from fedpfl.record.logfile import append_to_log
from fedpfl.record.rundir import RunDirectory
from fedpfl.runner.attendance import warn_if_few_train
from fedpfl.runner.cost import count_submodel_costs
from fedpfl.runner.needs import ResourceNeeds, format_mib, warn_of_shortage
from fedpfl.runner.resume import Progress

LEARNT_OF_SITES = (
    "of each site its name, number of samples and their form, values of labels (of tables names of "
    "columns, values of dataset.categories), sums and squares per channel unless dataset.mean and "
    "dataset.std are set; nothing else of its data"
)
"""What the server of a federation is told whose sites are at their nodes."""


@dataclass(frozen=True)
class RunOutlook:
    """What is known of a run before its first round, beside its plan.

    Attributes:
        path: the run directory.
        sample_counts: each client's samples.
        backend_name: of the backend that computes the clients.
        state_bytes: bytes of the client states that are there.
        needs: what the run will hold.
        time_text: how long the run will take, "" where that is not known.
    """

    path: Path
    sample_counts: torch.Tensor
    backend_name: str
    state_bytes: int
    needs: ResourceNeeds
    time_text: str = ""


def make_summary_facts(run: Run) -> dict[str, Any]:
    """Return what the summary says of a run from its first moment on."""
    # ---- Step 1: what every run has.
    facts: dict[str, Any] = {
        "rounds": run.settings.rounds,
        "seed": run.settings.seed,
        "read": run.data_digest,
        "cohort": run.cohort,
        "clients": run.federation.clients,
        "heterogeneity": asdict(run.federation.heterogeneity),
        "input": _describe_input(run.federation),
        "parameters": tree.size(run.net.params),
    }

    # ---- Step 2: what only some have.
    if run.federation.class_names:
        facts["classes"] = list(run.federation.class_names)
    if run.net.frozen:
        facts["frozen"] = tree.size(run.net.frozen)
    if isinstance(run.method, Submodel):
        facts["devices"] = count_submodel_costs(
            run.method,
            run.net,
            run.federation.shape,
        )
    if run.account:
        facts["privacy"] = _describe_privacy(run)
    if run.adversary:
        facts["attack"] = _describe_attack(run)
        facts["attackers"] = _number_attackers(run)
    if run.origin.caveat:
        facts["caveat"] = run.origin.caveat
    facts["environment"] = environment.describe_environment()
    return facts


def _describe_input(federation: Federation) -> dict[str, Any]:
    """Return what the network's input is made of, and the constants that scale it."""
    described: dict[str, Any] = {
        "kind": federation.shape.kind,
        "shape": list(federation.shape),
        "mean": list(federation.mean),
        "std": list(federation.std),
    }
    if federation.feature_names:
        described["features"] = list(federation.feature_names)
    return described


def _describe_privacy(run: Run) -> str:
    """Say what a private run protects, and that its initial weights are beyond it."""
    assert run.account
    sentence = run.account.sentence()
    weights_file = run.origin.path
    if not weights_file:
        return sentence
    return f"{sentence}; nor is what {weights_file} gives away, the weights that it starts from"


def _describe_attack(run: Run) -> str:
    """Say who attacks, and who is evaluated."""
    return (
        f"{describe_choice(run.config['attack'])}: {len(_number_attackers(run))} of"
        f" {run.federation.clients} clients attack, and the others alone are evaluated"
    )


def _list_hostilities(run: Run) -> list[str]:
    """Return the lines about attackers and the defence; [] without any."""
    lines = []
    if run.adversary:
        lines.append(f"attack      {_describe_attack(run)}")
        if run.adversary.attackers:
            lines.append(f"attackers   {', '.join(map(str, _number_attackers(run)))}")
    if run.defence:
        lines.append(f"defence     {describe_choice(run.config['defence'])}")
    return lines


def _number_attackers(run: Run) -> list[int]:
    """Return the attackers' numbers in the partition."""
    assert run.adversary
    return [run.federation.partition_number(client) for client in run.adversary.attackers]


def make_run_info(
    config: dict[str, Any],
    path: Path,
    summary: Mapping[str, Any],
    group: str,
    backend_name: str | None,
    **fields: Any,
) -> RunInfo:
    """Return what callbacks are told of a run.

    Args:
        config: resolved configuration.
        path: the run directory.
        summary: what summary.json holds.
        group: of the run in loggers, such as its experiment.
        backend_name: of the backend that computes the clients, None where that is not recorded.
        fields: other fields of RunInfo.
    """
    # ---- Step 1: names by which services group and search.
    method_name = config["method"]["name"]
    method_title = method_name
    if method_name in METHODS:
        method_title = METHODS[method_name].__name__
    run_identity = identity(config)
    name_parts = [
        config.get("name"),
        method_title,
        run_identity,
        f"seed{config['seed']}",
    ]
    tags = [config[key]["name"] for key in ("dataset", "partition", "model")]
    tags += [backend_name, config.get("engine", {}).get("precision")]

    # ---- Step 2: the run.
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


def format_header(run: Run, outlook: RunOutlook) -> list[str]:
    """Return the first lines that a user sees of a run."""
    federation = run.federation
    sample_counts = outlook.sample_counts
    quantiles = (sample_counts.min(), sample_counts.median(), sample_counts.max())
    quantiles_text = "/".join(f"{int(count):,}" for count in quantiles)
    shape = "x".join(map(str, federation.shape))

    # ---- What is trained, where, by how many
    lines = []
    if run.settings.name:
        lines.append(f"name        {run.settings.name}")
    if console.run_label.get():
        lines.append(f"of a sweep  {console.run_label.get()}")
    lines += [
        (
            f"data set    {federation.name}: {len(federation.y):,} samples {shape}, "
            f"{_describe_labels(federation)}"
        ),
        (
            f"clients     {federation.clients}, {run.cohort} per round; samples min/median/max "
            f"{quantiles_text}{_describe_absent_clients(run)}"
        ),
        f"partition   {describe_choice(run.config['partition'])}",
        f"from iid    {federation.heterogeneity} (0: none)",
        f"method      {describe_choice(run.config['method'])}",
        (
            f"model       {run.config['model']['name']}: {tree.size(run.net.params):,} parameters, "
            f"{_describe_head(run.net)}{_describe_frozen(run.net)}"
        ),
    ]
    lines += _describe_samples(run)
    if run.clock:
        lines.append(f"devices     {describe_choice(run.config['system'])}")
    if run.origin.line:
        lines.append(f"weights     {run.origin.line}")
    if run.account:
        lines.append(f"privacy     {_describe_privacy(run)}")
    lines += _list_hostilities(run)
    lines.append(f"engine      {outlook.backend_name} on {run.device}, {run.engine.precision}")

    # ---- What it takes
    lines.append(_describe_memory(run, outlook))
    if outlook.time_text:
        lines.append(f"time        {outlook.time_text}")
    lines.append(f"directory   {outlook.path}")
    return lines


def _describe_samples(run: Run) -> list[str]:
    """Return the lines about samples that are at nodes, or laid anew."""
    lines = []
    if run.federation.is_elsewhere:
        lines.append(f"learnt      {LEARNT_OF_SITES}")
    if run.shift:
        lines.append(f"shift       {run.shift}")
    return lines


def _describe_memory(run: Run, outlook: RunOutlook) -> str:
    """Return the line about client states and checkpoints."""
    needs = outlook.needs
    store_text = {"auto": "", "cpu": " in host memory", "disk": " on disk"}[run.state.device]
    return (
        f"memory      client states {format_mib(outlook.state_bytes)} MiB{store_text}, up to "
        f"{format_mib(needs.states)} once {needs.clients:,} clients have trained; checkpoint up "
        f"to {format_mib(needs.checkpoint)} MiB"
    )


def _describe_labels(federation: Federation) -> str:
    """Return what a network answers for a sample."""
    if federation.task is REGRESSION:
        return "a number each"
    things = "classes" if federation.task is CLASSIFICATION else "labels"
    return f"{federation.classes} {things}"


def _describe_absent_clients(run: Run) -> str:
    """Say how many clients never train, and how many are newcomers; "" for none."""
    text = ""
    idle = run.federation.count_untrainable(run.local.batch_size)
    if idle:
        text += f"; {idle} never train, for lack of samples"
    if run.newcomers:
        text += f"; newcomers that never take part: {run.newcomers.clients}"
    return text


def _describe_head(net: Net) -> str:
    """Return how much of a network is its head, and which layer that is."""
    parts = net.parts
    if parts.unclear:
        return "of which none is known to be the head"
    entries = tree.size(tree.select(net.params, parts.head))
    return f"{entries:,} of them the head ({parts.head_layer or 'the whole network'})"


def _warn_of_probabilities(run: Run) -> str:
    """Say that a network answers probabilities where its loss takes logits; "" where not."""
    activation = run.net.traits.activation
    # Others' numbers may lie between 0 and 1 as well.
    misused = {CLASSIFICATION: "softmax", MULTILABEL: "sigmoid"}
    if not activation or misused.get(find_task(run.federation.y)) != activation:
        return ""
    return (
        f"model={run.net.name}: it ends in a {activation}, and the loss takes logits: training is "
        "slow; leave it out"
    )


def _describe_frozen(net: Net) -> str:
    """Say how much of a network is frozen; "" for nothing."""
    if not net.frozen:
        return ""
    return (
        f"; {tree.size(net.frozen):,} frozen ones, {format_mib(tree.nbytes(net.frozen))} MiB to "
        "send once, are not counted"
    )


def introduce_run(
    run: Run,
    progress: Progress,
    group: str,
    backend: engine.Backend,
    sample_counts: torch.Tensor,
    needs: ResourceNeeds,
    forecast: Forecast | None = None,
) -> RunInfo:
    """Return what callbacks are told of a run that begins or goes on.

    Args:
        run: what is played.
        progress: how far it is.
        group: of the run in loggers, such as its experiment.
        backend: what computes the clients.
        sample_counts: each client's samples.
        needs: what the run will hold.
        forecast: seconds of its parts, None where they were not timed.
    """
    directory = progress.directory
    state_bytes = sum(map(tree.nbytes, progress.state.rows.trees))
    time_text = ""
    if forecast:
        schedule = Schedule.of(run.settings.rounds, run.config)
        time_text = console.describe_expected_time(
            schedule.remaining(progress.state.round), forecast
        )
    outlook = RunOutlook(
        path=directory.path,
        sample_counts=sample_counts,
        backend_name=backend.name,
        state_bytes=state_bytes,
        needs=needs,
        time_text=time_text,
    )

    # ---- What may go wrong
    notes = [*directory.notes, *run.notes]
    notes += filter(None, [warn_if_few_train(run, needs.clients), _warn_of_probabilities(run)])
    notes += engine.slowness_notices(run.engine, run.device)
    notes += warn_of_shortage(run, directory.path, needs, state_bytes)
    return make_run_info(
        run.config,
        directory.path,
        directory.summary,
        group,
        backend.name,
        start_round=progress.state.round,
        lines=tuple(format_header(run, outlook)),
        notes=tuple(notes),
        forecast=forecast,
    )


def report_finished(directory: RunDirectory, quiet: bool) -> None:
    """Say that the run is finished already.

    Args:
        directory: of the run.
        quiet: whether notes go to run.log alone.
    """
    last_row = directory.summary.get("last", {})
    task = task_of_columns(last_row)
    titles = {
        task.score: "mean over clients",
        f"{task.score}_pooled": "pooled",
        f"ft_{task.score}": "after fine-tuning",
    }
    accuracies = [
        f"{task.describe_score(last_row[name])} {title}"
        for name, title in titles.items()
        if last_row.get(name) is not None
    ]
    result = (
        ", ".join(accuracies) or console.describe_result(directory.summary) or "no test samples"
    )

    # ---- Among many runs, whoever plays them says what has ended.
    label = console.run_label.get()
    if label:
        for note in directory.notes:
            print(f"{label}: {note}", file=sys.stderr, flush=True)
    elif not quiet:
        line = f"already finished: {directory.path} ({result}); restart=true runs it again"
        print(line, *directory.notes, sep="\n")
    for note in directory.notes:
        append_to_log(directory.path, note)
