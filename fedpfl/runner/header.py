"""What is said of a run before its first round: to its summary, to callbacks, and to who reads its
first lines.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedpfl import engine
from fedpfl.config.messages import describe_choice
from fedpfl.config.plan import Run
from fedpfl.ground import tree
from fedpfl.ground.identity import identity
from fedpfl.methods import METHODS
from fedpfl.methods.shared.submodel import Submodel
from fedpfl.models import Net
from fedpfl.record import console, environment
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.forecast import Forecast, Schedule
from fedpfl.record.logfile import append_to_log
from fedpfl.record.rundir import RunDirectory
from fedpfl.runner.attendance import warn_if_few_train
from fedpfl.runner.cost import count_submodel_costs
from fedpfl.runner.needs import ResourceNeeds, format_mib, warn_of_shortage


def make_summary_facts(run: Run) -> dict[str, Any]:
    """Return what the summary says of a run from its first moment on."""
    settings, method = run.settings, run.method
    return {
        "rounds": settings.rounds,
        "seed": settings.seed,
        "read": run.read,
        "cohort": run.cohort,
        "clients": run.federation.clients,
        "parameters": tree.size(run.net.params),
        **({"frozen": tree.size(run.net.frozen)} if run.net.frozen else {}),
        **(
            {"devices": count_submodel_costs(method, run.net, run.federation.shape)}
            if isinstance(method, Submodel)
            else {}
        ),
        **({"privacy": promise(run)} if run.account else {}),
        **({"caveat": run.origin.caveat} if run.origin.caveat else {}),
        "environment": environment.describe_environment(),
    }


def promise(run: Run) -> str:
    """Say what a private run protects, and that its initial weights are beyond it."""
    assert run.account
    sentence = run.account.sentence()
    place = run.origin.place
    return (
        f"{sentence}; nor is what {place} gives away, the weights that it starts from"
        if place
        else sentence
    )


def make_run_info(
    config: dict[str, Any],
    path: Path,
    summary: Mapping[str, Any],
    group: str,
    backend: str | None,
    **more: Any,
) -> RunInfo:
    """Return what callbacks are told of a run. group: where it belongs. more: other fields of
    RunInfo.
    """
    name, method, seed, key = (
        config.get("name"),
        config["method"]["name"],
        config["seed"],
        identity(config),
    )
    kind = METHODS[method].__name__ if method in METHODS else method
    chosen = (config[group]["name"] for group in ("dataset", "partition", "model"))
    return RunInfo(
        name="-".join(filter(None, (name, kind, key, f"seed{seed}"))),
        group=group,
        job_type=method,
        tags=tuple(filter(None, (*chosen, backend, config.get("engine", {}).get("precision")))),
        config=config,
        path=path,
        identity=key,
        seed=seed,
        rounds=config["rounds"],
        facts=summary,
        **more,
    )


def format_header(
    run: Run,
    path: Path,
    cohort: int,
    counts: torch.Tensor,
    backend: str,
    held: int,
    needs: ResourceNeeds,
    pace: engine.PrecisionTimes | None = None,
    time: str = "",
) -> list[str]:
    """Return the first lines that a user sees.

    cohort: clients of a round. counts: samples `[clients, classes]`. backend: its name. held: bytes
    of client states.
    pace: of bf16 beside fp32. time: how long it will take.
    """
    federation, settings, sizes = run.federation, run.settings, counts.sum(1)
    spread = "/".join(f"{int(value):,}" for value in (sizes.min(), sizes.median(), sizes.max()))
    where = {"auto": "", "cpu": " in host memory", "disk": " on disk"}[run.state.device]
    idle = federation.idle(run.local.batch_size)
    never = f"; {idle} never train, for lack of samples" if idle else ""
    never += f"; {run.unseen.clients} others never take part" if run.unseen else ""
    shape, frozen = "x".join(map(str, federation.shape)), run.net.frozen
    once = f"; {tree.size(frozen):,} frozen ones, {format_mib(tree.nbytes(frozen))} MiB to send once, are not counted"
    return [
        *([f"name        {settings.name}"] if settings.name else []),
        *([f"of a sweep  {console.run_label.get()}"] if console.run_label.get() else []),
        f"data set    {federation.name}: {len(federation.y):,} samples {shape}, {federation.classes} classes",
        f"clients     {federation.clients}, {cohort} per round; samples min/median/max {spread}{never}",
        f"partition   {describe_choice(run.config['partition'])}",
        f"method      {describe_choice(run.config['method'])}",
        f"model       {run.config['model']['name']}: {tree.size(run.net.params):,} parameters, "
        f"{_head_share(run.net)}{once if frozen else ''}",
        *([f"devices     {describe_choice(run.config['system'])}"] if run.clock else []),
        *([f"weights     {run.origin.line}"] if run.origin.line else []),
        *([f"privacy     {promise(run)}"] if run.account else []),
        f"engine      {backend} on {run.device}, {run.engine.precision}",
        *([f"precision   {pace}"] if pace and pace.pays else []),
        f"memory      client states {format_mib(held)} MiB{where}, up to {format_mib(needs.states)} once {needs.clients:,} clients "
        f"have trained; checkpoint up to {format_mib(needs.checkpoint)} MiB",
        *([f"time        {time}"] if time else []),
        f"directory   {path}",
    ]


def _head_share(net: Net) -> str:
    """Return how much of a network is its head, and which layer that is."""
    parts = net.parts
    if parts.unclear:
        return "of which none is known to be the head"
    entries = tree.size(tree.select(net.params, parts.head))
    return f"{entries:,} of them the head ({parts.head_layer or 'the whole network'})"


def introduce_run(
    run: Run,
    directory: RunDirectory,
    group: str,
    backend: engine.Backend,
    state: engine.State,
    counts: torch.Tensor,
    needs: ResourceNeeds,
    forecast: Forecast | None = None,
) -> RunInfo:
    """Return what callbacks are told of a run that begins or goes on. group, counts, needs: as in
    `info`, `header`.
    """
    path, held = directory.path, sum(map(tree.nbytes, state.rows.trees))
    pace = engine.time_precisions(
        run.engine, run.device, run.net, run.federation, run.local.batch_size
    )
    slow = [f"slow: {pace}; use engine.precision=fp32"] if pace and not pace.pays else []
    few = filter(None, [warn_if_few_train(run, needs.clients)])
    notes = (
        *directory.notes,
        *run.notes,
        *few,
        *engine.slow(run.engine, run.device),
        *slow,
        *warn_of_shortage(run, path, needs, held),
    )
    remaining = Schedule.of(run.settings.rounds, run.config).remaining(state.round)
    time = console.describe_expected_time(remaining, forecast) if forecast else ""
    lines = format_header(
        run, path, directory.summary["cohort"], counts, backend.name, held, needs, pace, time
    )
    return make_run_info(
        run.config,
        path,
        directory.summary,
        group,
        backend.name,
        start_round=state.round,
        lines=tuple(lines),
        notes=notes,
        forecast=forecast,
    )


def report_finished(directory: RunDirectory, quiet: bool) -> None:
    """Say that the run is finished already. quiet: to run.log alone."""
    last = directory.summary.get("last", {})
    words = {
        "accuracy": "mean over clients",
        "accuracy_pooled": "pooled",
        "ft_accuracy": "after fine-tuning",
    }
    final = ", ".join(
        f"{last[name]:.2f} % {what}" for name, what in words.items() if last.get(name) is not None
    )
    final = final or console.describe_result(directory.summary) or "no test samples"
    line = f"already finished: {directory.path} ({final}); restart=true runs it again"
    label = console.run_label.get()
    if not (quiet or label):
        print(line, *directory.notes, sep="\n")
    for note in directory.notes if label else ():  # among many, who plays them says what has ended
        print(f"{label}: {note}", file=sys.stderr, flush=True)
    for note in directory.notes:
        append_to_log(directory.path, note)
