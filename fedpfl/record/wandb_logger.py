"""Weights & Biases as a copy of rounds.csv. A resumed run that is offline is complete by itself."""

from __future__ import annotations

import contextlib
import netrc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.columns import METRICS, PERSONAL_PREFIX, task_of_columns
from fedpfl.record.mirror import ServiceLogger, service_run_id

MAX_BINS = 512  # W&B's limit for a histogram
MAX_TAG = 64  # characters, W&B's limit
MAX_NAME = 128  # characters, its limit of the names of projects, groups and runs
TIMEOUT_SECONDS = 30.0  # seconds that `auto` waits for the server before it goes offline

CLOUD_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")
"""Names of the public server: `wandb login` keeps the key under the first since 0.31."""

SUMMARIES = {
    name: f"{metric.best},last"
    for name, metric in METRICS.items()
    if metric.is_evaluated and metric.best
}
"""The values that W&B keeps of a column, beside the default: the last one."""


@dataclass(frozen=True)
class WandbOptions:
    """The configuration's `logger` where it is W&B; see conf/logger/wandb.yaml."""

    project: str = "fedpfl"
    entity: str | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    group: str | None = None
    tags: tuple[str, ...] = ()
    dir: str | None = None


class WandbLogger(ServiceLogger):
    """Keep one W&B run per run directory; a resumed run continues it.

    Args:
        options: the configuration's `logger`.
        print_note: called with where the run can be seen or how to upload it.
    """

    def __init__(self, options: WandbOptions, print_note: Callable[[str], None] | None = None):
        super().__init__()
        if options.mode == "online" and not is_logged_in():
            raise FedpflError(
                "logger.mode=online but W&B is not logged in; run `wandb login` or set "
                "logger.mode=offline"
            )
        self._options = options
        self._print_note = print_note or (lambda text: print(text, file=sys.stderr))
        self._run: Any = None
        self._defined_metrics: set[str] = set()

    def _send_picture(self, path: Path) -> None:
        """Send an image, unless the run that is continued online has sent it."""
        if self._next_round:
            return
        import wandb

        self._run.log({path.stem: wandb.Image(str(path))})

    def _start(self, run: RunInfo, facts: Values) -> int:
        """Start or continue the W&B run; offline where `auto` cannot reach the server.

        Raises the errors of wandb.
        """
        # ---- Step 1: a W&B run, online where that works.
        mode = choose_mode(self._options.mode)
        try:
            self._run = self._init_wandb(run, mode)
        except Exception as error:
            if self._options.mode != "auto" or mode != "online":
                raise
            self._print_note(
                f"W&B cannot be reached, logging offline: {' '.join(str(error).split())}"
            )
            # Its service holds on to the run that it could not start.
            import wandb

            wandb.teardown()
            self._run = self._init_wandb(run, "offline")

        # ---- Step 2: rounds are the axis of all charts.
        self._defined_metrics = {"round"}
        self._run.define_metric("round", hidden=True)  # an x-axis, not a chart
        self._run.define_metric("*", step_metric="round")
        self._run.summary.update(facts)

        # ---- Step 3: tell the user where it is.
        if self._run.offline and mode != "disabled":
            self._print_note(f"W&B offline; upload with: wandb sync {Path(self._run.dir).parent}")
        elif self._run.url:
            self._print_note(f"W&B {self._run.url}")
        # Of a continued run the server may hold fewer rounds than the last checkpoint, or more,
        # which are the same.
        return self._run.step if run.start_round and not self._run.offline else 0

    def _send_round(self, row: Values, values: Values) -> None:
        """Send a round.

        Where all clients were evaluated, also the mask distribution and the runs table.
        """
        import wandb

        for name in row:
            if name not in self._defined_metrics:
                self._defined_metrics.add(name)
                self._run.define_metric(name, step_metric="round", summary=SUMMARIES.get(name))
        logged = dict(values)
        is_evaluated = row.get(task_of_columns(row).score) is not None
        layers = [float(values[key]) for key in values if key.startswith(PERSONAL_PREFIX)]
        if is_evaluated and 0 < len(layers) <= MAX_BINS:
            # Bin i is layer i in the order of the columns.
            histogram = (np.array(layers), np.arange(len(layers) + 1.0))
            logged["mask distribution"] = wandb.Histogram(np_histogram=histogram)
        # The round as the step: W&B itself then refuses a round it already has.
        self._run.log(logged, step=row["round"])
        if is_evaluated:
            self._run.summary.update(self._summarize_rows())

    def _finish(self, status: str, summary: Values) -> None:
        """Finish the W&B run in any case; else it would absorb the sweep's next run."""
        if self._run is None:
            return
        try:
            self._run.summary.update(summary)  # of a column W&B keeps the last value itself
        finally:
            self._run.finish(exit_code=0 if status == "finished" else 1)
            self._run = None

    def _init_wandb(self, run: RunInfo, mode: str) -> Any:
        import wandb

        # ---- Step 1: W&B's folder and settings.
        folder = Path(self._options.dir or run.path)
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            # wandb's own lines would break the progress bar.
            silent=True,
            console="off",
            reinit="create_new",
            init_timeout=TIMEOUT_SECONDS if self._options.mode == "auto" else 90,
            # Seconds; without a network the rest stays on disk for `wandb sync`.
            finish_timeout=300,
        )

        # ---- Step 2: the run, grouped with its configuration's other seeds.
        tags = [tag[:MAX_TAG] for tag in run.tags]
        return wandb.init(
            project=self._options.project,
            entity=self._options.entity,
            group=self._options.group or run.group[:MAX_NAME],
            job_type=run.job_type,
            name=run.name[:MAX_NAME],
            tags=list(dict.fromkeys([*tags, *self._options.tags])),
            config={**run.config, "identity": run.identity},  # to group seeds by
            id=service_run_id(run),
            # A fresh or offline run is complete by itself and replaces the server's run of this id.
            resume="allow" if run.start_round and mode == "online" else None,
            dir=str(folder),
            mode=mode,  # type: ignore[arg-type]
            settings=settings,
        )


def choose_mode(mode: str) -> str:
    """Return the mode of W&B.

    `auto` becomes WANDB_MODE where it is set, online for a user who is logged in, else offline.
    """
    if mode != "auto":
        return mode
    environment_mode = os.environ.get("WANDB_MODE", "")
    if environment_mode in ("offline", "disabled"):
        return environment_mode
    return "online" if is_logged_in() else "offline"


def is_logged_in() -> bool:
    """Look for a W&B key in the environment and the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    # The server of WANDB_BASE_URL or of `wandb login --host`, else the public one.
    host = urlsplit(wandb.setup().settings.base_url).netloc
    hosts = CLOUD_HOSTS if host in CLOUD_HOSTS else (host,)
    netrc_names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in netrc_names:
        with contextlib.suppress(OSError, RuntimeError, netrc.NetrcParseError):
            file = netrc.netrc(Path(name).expanduser())
            if any(map(file.authenticators, hosts)):
                return True
    return False
