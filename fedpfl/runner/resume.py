"""Where a run begins, and what it saves to go on from: from the start, from its last checkpoint, or
from a shorter run.

A run's processes (torchrun) share it: process 0 has the directory, the others hear from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from fedpfl import engine
from fedpfl.config import plugins
from fedpfl.config.plan import Plan, Run
from fedpfl.data.fingerprint import COVERED
from fedpfl.engine.backends import ranks
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.files import damaged_error
from fedpfl.ground.identity import identity
from fedpfl.privacy import Secret
from fedpfl.record import environment, rounds, rundir
from fedpfl.record.columns import METRICS
from fedpfl.record.rundir import NullRunDirectory, RunDirectory
from fedpfl.runner.loop import Round

Begun = Callable[[engine.State], engine.State]
STATE_TREES = ("server", "server_buffers", "stopping", "privacy")
"""Trees of a state that a checkpoint holds beside the clients' rows."""


def open_directory(run: Run, path: Path) -> AbstractContextManager[Any]:
    """Open the run's directory; processes beside the first get an Absent. Raises FedpflError."""
    text, name = OmegaConf.to_yaml(run.config), f"{run.identity}-seed{run.settings.seed}"
    code = digest_code(run)
    ranks.agree(configuration=name, data=run.fingerprint, code=code, torch=torch.__version__)
    if not ranks.leads():
        return NullRunDirectory(path)
    return RunDirectory.open(path, text, name, run.fingerprint, code, run.settings.restart)


def digest_code(run: Plan) -> dict[str, str]:
    """Return digests of the code that a run's numbers come from."""
    return environment.source_fingerprint(type(run.method)) | plugins.digest_plugins(
        run.config["plugins"]
    )


def is_finished(directory: RunDirectory | NullRunDirectory) -> bool:
    """Return whether the run is finished already."""
    return ranks.share(directory.status) == "finished"


def add_secret(run: Run, progress: Progress) -> Run:
    """Return a private run with the secret of its noise and cohorts.

    Raises FedpflError where it is not the one that the run began with.
    """
    account, directory = run.account, progress.directory
    if not account:
        return run
    assert run.privacy
    if run.privacy.seed is not None:
        secret = Secret.of_seed(run.privacy.seed)
    elif not account.noise:  # nothing is promised
        secret = Secret.of_seed(run.settings.seed)
    else:
        secret = Secret(bytes.fromhex(ranks.share(directory.secret())))
    # Equal noise in two runs would cancel in their difference: each has its own, be the key the
    # same.
    code = sorted(digest_code(run).items())
    return replace(
        run, secret=secret.bind_to((run.identity, run.settings.seed, run.fingerprint, code))
    )


# ---- begin


def restore_state(
    run: Run, past: dict[str, Any], path: Path | None, begun: Begun | None = None
) -> engine.State:
    """Return the state of a checkpoint, of which nothing is left in `past`; for {} a fresh one.

    path: the directory. begun: returns of a fresh state what is kept here.
    """
    place = run.federation.clients, run.device, run.state, path
    mine = ranks.mine if run.state.sharded else None
    state = engine.make_initial_state(
        run.method, run.net, *place, run.settings.seed, run.stopping.early, mine
    )
    state = replace(state, privacy=engine.make_privacy_state(run.account, run.device))
    state = begun(state) if begun else state
    if past and "rows" not in past:
        raise damaged_error((path or Path()) / "state.pt", "is of an older version")
    for block in map(state.rows.renewed, ranks.share_each(past.pop("rows", []))):
        if tree.specs(tree.take(tree.drop(block, ["who"]), 0)) != tree.specs(state.rows.initial):
            how = "holds client states of another form than the method now has"
            raise damaged_error((path or Path()) / "state.pt", how)
        state.rows.load_([block])
    saved = ranks.share({part: past.pop(part, {}) for part in ("round", *STATE_TREES)})
    if not saved["round"]:
        return state
    trees = {part: tree.clone(tree.to(saved[part], run.device)) for part in STATE_TREES}
    if any(tree.specs(trees[part]) != tree.specs(getattr(state, part)) for part in STATE_TREES):
        how = "holds a server state of another form than the method now has"
        raise damaged_error((path or Path()) / "state.pt", how)
    return replace(state, round=saved["round"], **trees)


# ---- go on


@dataclass
class Progress:
    """Keep how far a run is, and save it.

    best, last: of the evaluated rows. seconds: before this process. known, used: what answered
    rounds before this process, and in it.
    """

    run: Run
    directory: Any
    started: float
    state: engine.State
    best: dict[str, Any]
    last: dict[str, Any]
    seconds: float
    known: dict[str, Any]

    @classmethod
    def of(
        cls,
        run: Run,
        directory: Any,
        earlier: dict[str, Any] | None,
        started: float,
        begun: Begun | None = None,
    ) -> Progress:
        """Return where the directory's run is, or the `earlier` one that it goes on from. Raises
        FedpflError.
        """
        past = directory.restore(earlier) or {}
        state = restore_state(run, past, directory.path, begun)
        known = {"best": {}, "last": {}, "seconds": 0.0, "engine": {}}
        saved = ranks.share({key: past.get(key, value) for key, value in known.items()})
        return cls(run, directory, started, state, *saved.values())

    def __post_init__(self) -> None:
        self.used: dict[str, Any] = {}
        self._saved, self._cost = time.monotonic(), 0.0
        self._kept, self._writes = self.state.round, self.state.rows.writes

    @property
    def spent(self) -> float:
        """Return the seconds that the run took so far."""
        return self.seconds + time.monotonic() - self.started

    def count(self, round: Round, used: dict[str, Any]) -> None:
        """Take a round in, and what answered it."""
        self.state, self._writes = round.state, round.state.rows.writes
        if round.judged:
            self.last = dict(round.row)  # callbacks may change theirs
            if (own := self.last["accuracy"]) is not None and own > self.best.get("accuracy", -1):
                self.best = self.last
        if used != self.used:
            self.used = used
            self.directory.write_summary(engine=used)

    def save_if_due(self, last: bool) -> None:
        """Save where it is time to. last: after the last round, where a run may be told to keep no
        checkpoint.
        """
        keeps = self.run.checkpoint
        due = keeps.keep if last else keeps.due(time.monotonic() - self._saved, self._cost)
        if ranks.share(due):
            self.save()

    def save_if_left(self) -> None:
        """Save the last finished round for whoever goes on; not where the next has overwritten its
        client states.
        """
        rows = self.state.rows
        if self.state.round > self._kept and rows.writes == self._writes and not rows.mine:
            self.save()

    def save(self) -> None:
        """Write a checkpoint."""
        began, rows = time.monotonic(), self.state.rows
        saved = ranks.collect(rows.saved()) if rows.mine else rows.saved()
        trees = {part: getattr(self.state, part) for part in STATE_TREES}
        told = {"best": self.best, "last": self.last, "seconds": self.spent, "engine": self.used}
        self.directory.checkpoint({"round": self.state.round, "rows": saved, **trees, **told})
        self._saved, self._kept = time.monotonic(), self.state.round
        self._cost = self._saved - began


# ---- extend


def load_shorter_run(run: Run) -> dict[str, Any] | None:
    """Return the last checkpoint of the shorter run that `extend` names, as this run would have
    made it, or None.

    Raises FedpflError where it is no such run.
    """
    settings = run.settings
    if not settings.extend or not ranks.leads():
        return None
    place = Path(settings.extend).expanduser()
    summary, state = rundir.read_finished_run(place)
    done = state["round"]
    if run.local.decay == "cosine":
        raise FedpflError(
            "extend is not for local.decay=cosine, whose learning rates depend on rounds; run it anew"
        )
    if run.privacy and run.privacy.epsilon is not None:
        raise FedpflError(
            "extend is not for privacy.epsilon, which sets the noise by the number of rounds; run it anew"
        )
    begun = [
        run.method.init(run.net.params, replace(run.net.parts, rounds=n))
        for n in (done, settings.rounds)
    ]
    if not all(
        torch.equal(*own)
        for own in zip(*map(tree.leaves, map(dict, map(enumerate, begun))), strict=True)
    ):
        raise FedpflError(
            f"extend is not for method={run.config['method']['name']}, which goes by the number of rounds; run it anew"
        )
    shorter = f"{identity({**run.config, 'rounds': done})}-seed{settings.seed}"
    if summary["identity"] != shorter or done >= settings.rounds:
        differing = rundir.differences_from(place, {**run.config, "rounds": done})
        raise FedpflError(
            f"extend: {place} holds no run of these settings, seed {settings.seed} and fewer rounds than "
            f"{settings.rounds}{f' ({differing})' if differing else ''}; set rounds to more than it has, and "
            "all else as it was"
        )
    if summary.get("data") != run.fingerprint:
        raise FedpflError(f"extend: {place} was run on other data ({COVERED})")
    return {**state, **_without_end(run, done, state["files"])}


def _without_end(run: Run, done: int, texts: dict[str, str]) -> dict[str, Any]:
    """Return a shorter run's rows, and the best and last of them, but for what was judged for the
    end's sake alone.
    """
    header, table = rounds.parse_cells(texts["rounds.csv"])
    evaluated, tuned = done % run.eval.every == 0, done % (run.eval.finetune_every or 1) == 0
    for place, name in enumerate(header):
        metric = METRICS.get(name)
        if metric is None:
            continue
        extra = metric.tuned and not tuned
        if extra or ((metric.evaluated or name == "eval_seconds") and not evaluated):
            table[-1][place] = ""
    text = "".join(map(rounds.format_row, (header, *table)))
    rows = [row for row in rounds.read_rows(text) if row["accuracy"] is not None]
    best = max(rows, key=lambda row: row["accuracy"] or 0.0, default={})
    return {"best": best, "last": rows[-1] if rows else {}, "files": {**texts, "rounds.csv": text}}
