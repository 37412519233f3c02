"""Train: `python -m fedpfl.train method=fedobp dataset=cifar100`; `-m` sweeps. conf/train.yaml lists every key.

Exit status: 0 finished (or finished before), 1 a method's own code failed, 2 something in the command, the data or the
files to mend, 3 diverged, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:

    def _interrupted(*_: object) -> None:
        """Before `main`: a second or two of imports, nothing is open."""
        if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["RANK"] == "0":
            print("fedpfl: interrupted before anything was done", file=sys.stderr, flush=True)
        os._exit(130)

    signal.signal(signal.SIGINT, _interrupted)

import csv
import io
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedpfl import engine
from fedpfl.config import manual, overrides, plugins, tidy
from fedpfl.config import plan as config
from fedpfl.config.overrides import CONF
from fedpfl.data import Federation
from fedpfl.engine import lockstep, ranks
from fedpfl.engine.evaluate import accuracies, per_client, pooled, unsound
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import Broken, FedpflError, printable
from fedpfl.ground.files import damaged
from fedpfl.methods import Method
from fedpfl.methods.shared.cost import devices
from fedpfl.methods.shared.submodel import Submodel
from fedpfl.record import environment, rundir
from fedpfl.record.loggers import open_sinks
from fedpfl.record.sinks import RunInfo, Sinks, add_to_log
from fedpfl.runner import trials
from fedpfl.runner.needs import Needs, foresee, mib, tight

STATE = ("server", "server_buffers", "stopping")
"""Trees of a state that a checkpoint holds beside the clients' rows."""
JUDGED = ("accuracy", "accuracy_pooled", "accuracy_std", "accuracy_worst10", "loss")
TUNED = tuple(f"ft_{name}" for name in JUDGED)
OTHERS = ("val_", "unseen_")
"""What stands before JUDGED and TUNED where they are about held-out samples, and about newcomers."""


def columns(*others: str) -> tuple[str, ...]:
    """Return the columns of rounds.csv after `round`; a method's own follow. Empty where nothing was judged.

    others: which of OTHERS there are.
    """
    return (
        *("participants", "seconds", "eval_seconds", "cohort_before", "cohort_after", "train_loss"),
        *(f"{prefix}{name}" for prefix in ("", *others) for name in (*JUDGED, *TUNED)),
        *("values_down", "values_up", "bits_down", "bits_up"),
    )


CHOSEN = ("backend", "graphs", "width")
"""What engine=auto finds out, of the engine's keys."""

_begun: list[bool] = []  # whether a job was reached
_full: list[bool] = []  # whether the user asked for tracebacks

NO_ROOM = ("can't allocate memory", "out of memory", "Storage size calculation overflowed")
"""What PyTorch says where memory runs out, by several kinds of errors."""


class Diverged(FedpflError):
    """Training produced numbers that are not finite."""


class GivenUp(FedpflError):
    """A search for hyperparameters has no more use for the run."""


STATUS: dict[type[Exception], int] = {Broken: 1, Diverged: 3}
"""The exit status by the kind of error; 2 for the others."""


def attempt(
    cfg: DictConfig, path: Path, experiment: str | None = None, quiet: bool = False, watch: trials.Watch | None = None
) -> dict[str, Any]:
    """Do as `train`, and raise FedpflError for whatever a user or the method's author can mend."""
    started = time.time()
    try:
        return train(cfg, path, experiment, quiet, watch)
    except Broken as error:
        raise Broken(f"method={cfg.method.name}: {error}") from error
    except FedpflError:
        raise
    except Exception as error:
        fault = _fault(error, cfg, path / "run.log", started)
        if fault is None:
            raise
        raise fault from error


def train(
    cfg: DictConfig, path: Path, experiment: str | None = None, quiet: bool = False, watch: trials.Watch | None = None
) -> dict[str, Any]:
    """Run (or resume, or recognise as finished) what `cfg` says in run directory `path`; returns the summary.

    quiet: nothing on the terminal. watch: asked at the beginning and after evaluations whether to give up.
    """
    started = time.monotonic()
    stage = lockstep.stage.get()
    path = Path(ranks.share(str(path)))
    run = config.build(config.check(cfg), stage.share if stage else config.alone)
    settings, federation, method = run.settings, run.federation, run.method
    needs = foresee(run)
    text, identity = OmegaConf.to_yaml(run.config), f"{run.identity}-seed{settings.seed}"
    code = environment.source(type(method)) | plugins.code(run.config["plugins"])
    ranks.agree(configuration=identity, data=run.fingerprint, code=code, torch=torch.__version__)
    earlier = _earlier(run) if ranks.leads() else None
    opened: Any = rundir.RunDirectory.open if ranks.leads() else rundir.Absent
    with opened(path, text, identity, run.fingerprint, code, settings.restart) as directory:
        if ranks.share(directory.status) == "finished":
            return _told(directory, quiet) if ranks.leads() else {}
        state, best, last, spent, used = begin(run, directory.restore(earlier) or {}, directory.path)
        backend = _backend(run, stage, used)
        draws = settings.seed, federation.clients, settings.participation
        cohorts = islice(engine.cohorts(*draws, settings.rounds), state.round, None)
        each = [own.label_counts() for own in _federations(run)]
        order = torch.tensor([own.number(client) for own in _federations(run) for client in range(own.clients)])
        counts = torch.cat(each)[order.argsort()]
        size = len(next(engine.cohorts(*draws, 1)))
        directory.write_summary(status="running", rounds=settings.rounds, **_facts(run, size))
        with _sinks(run, directory, experiment or federation.name, backend, state, counts, needs, quiet) as sinks:
            title = f"{federation.name}, {settings.clients} clients, {config.described(run.config['partition'])}"
            owned = [
                [getattr(own, split)[client].numpy() for own, client in everyone(run) if getattr(own, split)]
                for split in ("train", "test", "validation")
            ]
            directory.write_partition(
                *owned[:2], counts.numpy(), title, owned[2], run.unseen.numbers if run.unseen else ()
            )
            sinks.picture("partition", path / "partition.png")
            there = federation.validation, run.unseen
            others = [prefix for prefix, own in zip(OTHERS, there, strict=True) if own]
            saved, cost, used = time.monotonic(), 0.0, {}
            try:
                cohort = _next(run, state, cohorts)
                if watch and watch(state.round, None):
                    raise GivenUp("given up")
                while cohort:
                    row: dict[str, Any] = {"round": state.round + 1, **dict.fromkeys(columns(*others))}
                    before = time.monotonic()
                    local = run.local.at(state.round + 1, settings.rounds)
                    state, outcome = engine.play(
                        backend, method, federation, state, cohort, local, settings.seed, run.stopping
                    )
                    row |= _row(outcome, [federation.number(client) for client in cohort], time.monotonic() - before)
                    cohort = _next(run, state, cohorts)
                    if state.round % run.eval.every == 0 or not cohort:
                        before = time.monotonic()
                        alone = not outcome.sent.values_down
                        if alone and run.unseen and not last:
                            sinks.note("nothing is sent to clients: newcomers are judged after fine-tuning alone")
                        judged, clients = _evaluate(run, backend, state, sinks, alone, last=not cohort)
                        row |= judged | {"eval_seconds": time.monotonic() - before}
                        last = row
                        best = row if row["accuracy"] > best.get("accuracy", -1) else best
                        directory.write_clients(_clients(run, counts, clients))
                    directory.row(row)
                    sinks.row(row)
                    if used != (used := _used(run, backend)):
                        directory.write_summary(engine=used)
                    now = time.monotonic()
                    due = run.checkpoint.due(now - saved, cost) if cohort else run.checkpoint.keep
                    if ranks.share(due):
                        rows = ranks.collect(state.rows.saved()) if state.rows.mine else state.rows.saved()
                        parts = {"rows": rows, **{part: getattr(state, part) for part in STATE}}
                        told = {"best": best, "last": last, "seconds": spent + now - started, "engine": used}
                        directory.checkpoint({"round": state.round, **parts, **told})
                        saved = time.monotonic()
                        cost = saved - now
                    if watch and cohort and last is row and watch(state.round, row):
                        raise GivenUp("given up")
            except GivenUp:
                sinks.note(f"given up after round {state.round}: its validation accuracy is below the others' median")
                sinks.end("interrupted", directory.summary)
                raise
            except Diverged as error:
                directory.write_summary(status="diverged", error=str(error))
                sinks.end("diverged", directory.summary)
                raise
            masks = engine.compared(method, state)
            directory.write_masks(masks and {**masks, "clients": [federation.number(own) for own in masks["clients"]]})
            hours = (spent + time.monotonic() - started) / 3600
            directory.write_summary(status="finished", best=best, last=last, hours=hours, rounds_played=state.round)
            if not run.checkpoint.keep:
                directory.drop_checkpoint()
            sinks.end("finished", directory.summary)
        return directory.summary


def _earlier(run: config.Run) -> dict[str, Any] | None:
    """The last checkpoint of the run that is to be extended, as this run would have made it. Raises FedpflError."""
    settings = run.settings
    if not settings.extend:
        return None
    place = Path(settings.extend).expanduser()
    summary, state = rundir.ended(place)
    done, files = state["round"], state["files"]
    if run.local.decay == "cosine":
        raise FedpflError("extend is not for local.decay=cosine, whose learning rates depend on rounds; run it anew")
    shorter = f"{config.identity({**run.config, 'rounds': done})}-seed{settings.seed}"
    if summary["identity"] != shorter or done >= settings.rounds:
        raise FedpflError(
            f"extend: {place} holds no run of these settings, seed {settings.seed} and fewer rounds than "
            f"{settings.rounds}; set rounds to more than it has, and all else as it was"
        )
    if summary.get("data") != run.fingerprint:
        raise FedpflError(f"extend: {place} was run on other data (samples, labels, groups, or who holds which)")
    header, *rows = csv.reader(io.StringIO(files["rounds.csv"]))
    table = [dict(zip(header, row, strict=True)) for row in rows]
    # Its last round was evaluated for being the last.
    known = [("", *OTHERS)[place] + name for place in range(3) for name in (*JUDGED, *TUNED)]
    if done % run.eval.every:
        known = ["eval_seconds", *known]
    elif done % run.eval.finetune_every:
        known = [name for name in known if name.endswith(TUNED)]
    else:
        known = []
    table[-1] |= dict.fromkeys((name for name in known if name in header), "")
    judged: list[dict[str, Any]] = [
        {key: _number(cell) for key, cell in row.items()} for row in table if row["accuracy"]
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *(row.values() for row in table)])
    best = max(judged, key=lambda row: row["accuracy"], default={})
    return {
        **state,
        "best": best,
        "last": judged[-1] if judged else {},
        "files": {**files, "rounds.csv": text.getvalue()},
    }


def _number(cell: str) -> float | None:
    """A cell of rounds.csv as it was written."""
    return (int(cell) if cell.lstrip("-").isdigit() else float(cell)) if cell else None


def begin(run: config.Run, past: dict[str, Any], path: Path) -> tuple[engine.State, dict, dict, float, dict]:
    """Return the state, the best and the last evaluated row, the seconds spent, what was `_used`.

    past: of a checkpoint, or {} for a fresh state. path: the run directory.
    """
    place = run.federation.clients, run.device, run.state, path
    mine = ranks.mine if run.state.sharded else None
    state = engine.begin(run.method, run.net, *place, run.settings.seed, run.stopping.early, mine)
    if "clients" in past:  # of an older version: of all clients, whether they have trained or not
        old = {"client": past.pop("clients"), "buffers": past.pop("client_buffers")}
        past["rows"] = [{"who": torch.arange(state.rows.clients), **old}]
    blocks, past = past.pop("rows", []), ranks.share(past)
    if not past:
        return state, {}, {}, 0.0, {}
    for block in map(state.rows.renewed, ranks.share_each(blocks)):
        if tree.form(tree.take(tree.without(block, ["who"]), 0)) != tree.form(state.rows.initial):
            how = "holds client states of another form than the method now has"
            raise damaged(path / "state.pt", how)
        state.rows.load_([block])
    trees = {part: tree.clone(tree.to(past.get(part, {}), run.device)) for part in STATE}
    state = replace(state, round=past["round"], **trees)
    return state, past["best"], past["last"], past["seconds"], past.get("engine", {})


def _next(run: config.Run, state: engine.State, cohorts: Iterator[list[int]]) -> list[int]:
    """The next round's cohort; nobody when the run is over."""
    planned = next(cohorts, [])
    return planned and engine.pick(state, planned, run.settings.seed)


def _backend(run: config.Run, stage: lockstep.Stage | None, used: dict[str, Any]) -> engine.Backend:
    """That of the run's processes, or in a lockstep sweep of all runs with such a network and engine.

    used: by the part of the run that is done; on the same kind of device the rest goes on by it, bit for bit.
    """
    known = tree.named(used, CHOSEN) if used.get("device") == run.device.type else {}
    over = partial(ranks.over, device=run.device)
    make = partial(engine.choose, run.engine, run.net, run.device, known, over, ranks.share)
    if stage is None:
        return make()
    shape = (str(run.config["model"]), run.federation.shape, run.federation.classes)
    key = ("backend", *shape, run.engine, run.device, *known.values())
    return lockstep.Shared(stage, stage.share(key, make))


def _used(run: config.Run, backend: engine.Backend) -> dict[str, Any]:
    """What answers, on what, and the seconds of each that was tried."""
    own = {name: getattr(backend.engine, name) for name in CHOSEN}
    return {"device": run.device.type, **own, "seconds": getattr(backend, "seconds", {})}


def _row(outcome: engine.Outcome, cohort: list[int], seconds: float) -> dict[str, Any]:
    """The columns that every round has. Raises Diverged where a client's numbers are not finite."""
    if not bool(outcome.finite.all()):
        client = sorted(cohort)[int((~outcome.finite).nonzero()[0])]
        raise Diverged(f"training diverged: client {client} brought back numbers that are not finite; lower local.lr")
    if not outcome.sound:
        raise Diverged("training diverged: the server's numbers are not finite after the round; lower local.lr")
    return {
        "participants": len(cohort),
        "seconds": seconds,
        "cohort_before": pooled(outcome.before),
        "cohort_after": pooled(outcome.after),
        "train_loss": float(outcome.loss.mean()),
        **outcome.sent._asdict(),
        **outcome.metrics,
    }


def _evaluate(
    run: config.Run, backend: engine.Backend, state: engine.State, sinks: Sinks, alone: bool, last: bool
) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Row columns, and accuracies by the clients' numbers; after fine-tuning too where it is due.

    alone: whether the server sends nothing.
    """
    tunings: list[engine.Tuning | None] = [None]
    if run.eval.finetune_epochs and (state.round % run.eval.finetune_every == 0 or last):
        draws = Draws(run.settings.seed, "finetune", state.round)
        local = replace(run.local, epochs=run.eval.finetune_epochs, steps=None)
        tunings.append(engine.Tuning(local, draws, run.eval.finetune_part))
    groups = [(run.federation, state, {"test": "", "validation": "val_"})]
    if run.unseen:
        groups.append((run.unseen, newcomers(run, state), {"test": "unseen_"}))
    row: dict[str, float] = {}
    clients: dict[str, dict[int, float]] = {}
    for federation, own, prefixes in groups:
        for tuning in tunings:
            if federation is run.unseen and not tuning and alone:
                continue  # a newcomer's model is the one that all began with
            everyone = list(range(federation.clients))
            judged = backend.judge(run.method, federation, own, everyone, tuning, looking(run, state))
            when = "ft_" if tuning else ""
            counts = {f"{prefix}{when}": judged[split] for split, prefix in prefixes.items() if split in judged}
            lost = [federation.number(client) for found in counts.values() for client in unsound(found)]
            if lost and not tuning:
                raise Diverged(f"training diverged: the model of client {lost[0]} is not finite; lower local.lr")
            for prefix, found in counts.items():
                column = f"{prefix.removeprefix('unseen_')}accuracy"
                each = enumerate(per_client(found))
                clients.setdefault(column, {}).update({federation.number(client): value for client, value in each})
                if not lost:  # a mean over the others would flatter
                    row |= {f"{prefix}{name}": value for name, value in accuracies(found).items()}
            if lost:
                note = f"fine-tuning diverged at {len({*lost})} of {len(everyone)} clients, client {lost[0]} the first"
                sinks.note(f"round {state.round}: {note}; its columns stay empty")
    return row, clients


def newcomers(run: config.Run, state: engine.State) -> engine.State:
    """Return the state as clients find it who have never taken part: the server's, and their own from the beginning."""
    assert run.unseen
    fresh = engine.begin(run.method, run.net, run.unseen.clients, run.device, seed=run.settings.seed)
    return replace(state, rows=fresh.rows)


def everyone(run: config.Run) -> list[tuple[Federation, int]]:
    """Return where each client of the partition is, in its order: the federation and the number there."""
    places = {own.number(client): (own, client) for own in _federations(run) for client in range(own.clients)}
    return [places[number] for number in sorted(places)]


def _federations(run: config.Run) -> list[Federation]:
    return [run.federation, *([run.unseen] if run.unseen else [])]


def looking(run: config.Run, state: engine.State) -> engine.Tuning:
    """Return how methods look at training data in `before_evaluation`."""
    return engine.Tuning(run.local, Draws(run.settings.seed, "adapt", state.round))


def _clients(run: config.Run, counts: torch.Tensor, measured: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    """Rows of clients.csv."""
    labels = counts.tolist()
    return [
        {
            "client": number,
            **({"unseen": int(own is run.unseen)} if run.unseen else {}),
            "train": int(own.train_sizes[client]),
            **({"validation": len(own.validation[client])} if own.validation else {}),
            "test": int(own.test_sizes[client]),
            **{f"label_{label}": count for label, count in enumerate(labels[number])},
            **{name: values.get(number, math.nan) for name, values in measured.items()},
        }
        for number, (own, client) in enumerate(everyone(run))
    ]


def _facts(run: config.Run, cohort: int) -> dict[str, Any]:
    """What the summary says of a run from its first moment on."""
    method, shape = run.method, run.federation.shape
    return {
        "seed": run.settings.seed,
        "read": run.read,
        "cohort": cohort,
        "parameters": tree.size(run.net.params),
        **({"devices": devices(method, run.net, shape)} if isinstance(method, Submodel) else {}),
        "environment": environment.describe(),
    }


def _sinks(
    run: config.Run,
    directory: rundir.RunDirectory,
    group: str,
    backend: engine.Backend,
    state: engine.State,
    counts: torch.Tensor,
    needs: Needs,
    quiet: bool,
) -> Any:
    """Open the sinks; the lines that they are told are the first thing a user sees."""
    if not ranks.leads():
        return rundir.Absent(directory.path)
    federation, settings = run.federation, run.settings
    sizes = counts.sum(1)
    spread = "/".join(f"{int(value):,}" for value in (sizes.min(), sizes.median(), sizes.max()))
    name = type(run.method).__name__
    shape = "x".join(map(str, federation.shape))
    where = {"auto": "", "cpu": " in host memory", "disk": " on disk"}[run.state.device]
    held = sum(map(tree.nbytes, state.rows.trees))
    idle = federation.idle(run.local.batch_size)
    told = f"; {idle} never train, for lack of samples" if idle else ""
    if run.unseen:
        told += f"; {run.unseen.clients} others never take part"
    each = f"{directory.summary['cohort']} per round; samples min/median/max {spread}{told}"
    named = f"{settings.name}-{name}" if settings.name else name
    header = (
        *([f"name        {settings.name}"] if settings.name else []),
        f"data set    {federation.name}: {len(federation.y):,} samples {shape}, {federation.classes} classes",
        f"clients     {federation.clients}, {each}",
        f"partition   {config.described(run.config['partition'])}",
        f"method      {config.described(run.config['method'])}",
        f"model       {run.config['model']['name']}: {tree.size(run.net.params):,} parameters",
        f"engine      {backend.name} on {run.device}, {run.engine.precision}",
        f"memory      client states {mib(held)} MiB{where}, up to {mib(needs.states)} once {needs.clients:,} clients "
        f"have trained; checkpoint up to {mib(needs.checkpoint)} MiB",
        f"directory   {directory.path}",
    )
    notes = (*directory.notes, *engine.slow(run.engine, run.device), *tight(run, directory.path, needs, held))
    among = (f"{lockstep.title.get()}; {backend.name} on {run.device}; {directory.path}",)
    info = RunInfo(
        name=f"{named}-{run.identity}-seed{settings.seed}",
        group=group,
        job_type=run.config["method"]["name"],
        tags=(
            federation.name,
            *(run.config[group]["name"] for group in ("partition", "model")),
            *(backend.name, run.engine.precision),
        ),
        config=run.config,
        path=directory.path,
        identity=run.identity,
        seed=settings.seed,
        rounds=settings.rounds,
        start_round=state.round,
        lines=(*header, *notes),
        among=(*among, *notes) if lockstep.stage.get() else (),
        facts=directory.summary,
    )
    return open_sinks(run.config["logger"], info, quiet)


def _told(directory: rundir.RunDirectory, quiet: bool) -> dict[str, Any]:
    """Says that the run is finished already; its summary."""
    last = directory.summary.get("last", {})
    words = {"accuracy": "mean over clients", "accuracy_pooled": "pooled", "ft_accuracy": "after fine-tuning"}
    final = ", ".join(f"{last[name]:.2f} % {what}" for name, what in words.items() if last.get(name) is not None)
    line = f"already finished: {directory.path} ({final or 'no test samples'}); restart=true runs it again"
    if not quiet:
        print(line, *directory.notes, sep="\n")
    for note in directory.notes:
        add_to_log(directory.path, note)
    return directory.summary


@hydra.main(config_path=CONF, config_name="train", version_base="1.3")
def job(cfg: DictConfig) -> str | None:
    """One job of a single run or of a sweep; what a search gave up says so."""
    _begun.append(True)
    hydra_cfg = HydraConfig.get()
    path = Path(hydra_cfg.runtime.output_dir)
    try:
        if hydra_cfg.job.chdir and ranks.launched():
            raise FedpflError("hydra.job.chdir must be false under torchrun: one process alone has the run directory")
        watch = trials.watch(hydra_cfg.sweeper, hydra_cfg.job.num) if hydra_cfg.mode != RunMode.RUN else None
        attempt(cfg, path, hydra_cfg.runtime.choices.get("experiment"), watch=watch)
    except GivenUp:
        return trials.PRUNED
    except FedpflError as fault:
        if hydra_cfg.mode == RunMode.RUN:
            _give_up(fault)
        # In a sweep the others go on, and Hydra raises the first failure again after the last job.
        _tell(f"job {hydra_cfg.job.num} ({hydra_cfg.job.override_dirname}): {fault}")
        raise fault from None
    except Exception:
        if ranks.tells():
            raise
        sys.exit(1)
    finally:
        tidy.prune(path, otherwise=Path(hydra_cfg.sweep.dir))
    return None


def _fault(error: Exception, cfg: DictConfig, log: Path, started: float) -> FedpflError | None:
    """What a user can mend of an error: too little memory, or the method's own code; None for the program's bugs."""
    reason = " ".join(str(error).split())
    if isinstance(error, MemoryError) or any(sign in reason for sign in NO_ROOM):
        reason = reason.rpartition("DefaultCPUAllocator: ")[2] or type(error).__name__
        return FedpflError(f"not enough memory ({reason}); make the model, its cohort or local.batch_size smaller")
    method = config.METHODS.get(OmegaConf.select(cfg, "method.name"))
    kinds = [kind for kind in method.__mro__ if issubclass(kind, Method) and kind is not Method] if method else []
    own = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    calls = [(hook, file, line) for file, hook, line in ranks.frames(error) if file in own]
    if _full:
        return None
    if not calls and isinstance(error, TypeError) and any(f"{kind.__qualname__}." in reason for kind in kinds):
        contract = "fedpfl/methods/shared/method.py"
        return Broken(f"method={cfg.method.name}: {reason}; {contract} says what arguments its hooks have")
    if not calls:
        return None
    (hook, *_), (_, file, line) = calls[0], calls[-1]
    if instead := engine.unseen(error):
        return Broken(f"method={cfg.method.name}: {hook} {instead} ({file}:{line})")
    written = log.is_file() and log.stat().st_mtime >= started
    return Broken(
        f"method={cfg.method.name}: {hook} raised {type(error).__name__}: {reason} ({file}:{line}); "
        f"{f'its traceback is in {log}' if written else 'HYDRA_FULL_ERROR=1 shows its traceback'}"
    )


def _give_up(error: Exception) -> NoReturn:
    _tell(config.one_line(error))
    sys.exit(STATUS.get(type(error), 2))


def _tell(text: str) -> None:
    if ranks.tells():
        print(f"fedpfl: {printable(text)}", file=sys.stderr)


def main() -> None:
    """Entry point: faults of the user's making are one line and a non-zero exit."""
    _begun.clear()
    try:
        config.register()
        logging.captureWarnings(True)
        _full[:] = [True] * (os.environ.get("HYDRA_FULL_ERROR") == "1")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and the line below is ours
        ranks.join()
        try:
            words = overrides.options_first(sys.argv[1:])
            plugins.load(overrides.chosen(words, "plugins"))  # so that Hydra knows what they add
        except FedpflError as error:
            _give_up(error)
        if {"-h", "--help"} & {*words}:
            print(manual.page(words))
            return
        words = overrides.for_sweeps(words, config.GROUPS)
        sys.argv[1:] = words if ranks.leads() else overrides.unwritten(words)
        job()
        ranks.part()
    except FedpflError as error:  # from a sweep; its lines are told
        sys.exit(STATUS.get(type(error), 2))
    except KeyboardInterrupt as reason:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # threads are ending; a second Ctrl-C would only spoil the message
        _tell(f"{str(reason) or 'interrupted'}; the same command goes on from the last checkpoint")
        sys.exit(130)
    except Exception as error:
        if _begun and not isinstance(error, HydraException | OmegaConfBaseException):
            raise
        # Composing the configuration and making the directory: the command line's faults, which Hydra may not name.
        tidy.prune()
        if type(error) is ValueError:
            error = ValueError(f"{error}, in the command {' '.join(sys.argv[1:])}")
        _give_up(error)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
