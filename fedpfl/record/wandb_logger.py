"""Weights & Biases as a mirror of rounds.csv. A resumed run that is offline is complete by itself."""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.columns import METRICS, PERSONAL_PREFIX
from fedpfl.record.mirror import ServiceLogger, service_run_id

MAX_BINS = 512  # W&B's limit for a histogram
MAX_TAG = 64  # characters, W&B's limit
TIMEOUT_SECONDS = 30.0  # seconds that `auto` waits for the server before it goes offline

CLOUD_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")
"""The public server: under the first name `wandb login` keeps the key since 0.31, under the second
before.
"""

SUMMARIES = {
    name: f"{metric.best},last"
    for name, metric in METRICS.items()
    if metric.is_evaluated and metric.best
}
"""What W&B keeps of a column; of the others the last value."""


@dataclass(frozen=True)
class WandbOptions(Checked):
    """Hold the configuration's `logger` where it is W&B; see conf/logger/wandb.yaml."""

    project: str = "fedpfl"
    entity: str | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    group: str | None = None
    tags: tuple[str, ...] = ()
    dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            all(0 < len(tag) <= MAX_TAG for tag in self.tags),
            "tags",
            f"words of at most {MAX_TAG} characters",
        )


class WandbLogger(ServiceLogger):
    """Keep one W&B run per run directory; a resumed run continues it.

    say: told where the run can be seen or how to upload it.
    """

    def __init__(self, options: WandbOptions, say: Callable[[str], None] | None = None):
        super().__init__()
        if options.mode == "online" and not is_logged_in():
            raise FedpflError(
                "logger.mode=online but W&B is not logged in; run `wandb login` or set logger.mode=offline"
            )
        self._options = options
        self._say = say or (lambda text: print(text, file=sys.stderr))
        self._run: Any = None
        self._defined: set[str] = set()

    def _picture(self, name: str, path: Path) -> None:
        """Send an image, unless the run that is continued online has sent it."""
        if self._run is None or self._next:
            return
        import wandb

        self._run.log({name: wandb.Image(str(path))})

    def _start(self, run: RunInfo, facts: Mapping[str, Any]) -> int:
        """Start or continue the W&B run; offline where `auto` cannot reach the server. Raises
        wandb's errors.
        """
        mode = choose_mode(self._options.mode)
        try:
            self._run = self._init(run, mode)
        except Exception as error:
            if self._options.mode != "auto" or mode != "online":
                raise
            self._say(f"W&B cannot be reached, logging offline: {' '.join(str(error).split())}")
            # Its service holds on to the run that it could not start.
            import wandb

            wandb.teardown()
            self._run = self._init(run, "offline")
        self._defined = {"round"}
        self._run.define_metric("round", hidden=True)  # an x-axis, not a chart
        self._run.define_metric("*", step_metric="round")
        self._run.summary.update(facts)
        if self._run.offline and mode != "disabled":
            self._say(f"W&B offline; upload with: wandb sync {Path(self._run.dir).parent}")
        elif self._run.url:
            self._say(f"W&B {self._run.url}")
        # Of a continued run the server may hold fewer rounds than the last checkpoint, or more,
        # which are the same.
        return self._run.step if run.start_round and not self._run.offline else 0

    def _send(self, row: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Send a round; where all clients were evaluated, the mask distribution over the layers and
        the runs table.
        """
        import wandb

        for name in row:
            if name not in self._defined:
                self._defined.add(name)
                self._run.define_metric(name, step_metric="round", summary=SUMMARIES.get(name))
        sent = dict(values)
        layers = [float(value) for key, value in values.items() if key.startswith(PERSONAL_PREFIX)]
        if row.get("accuracy") is not None and 0 < len(layers) <= MAX_BINS:
            # Bin i is layer i in the order of the columns.
            edges = np.arange(len(layers) + 1.0)
            sent["mask distribution"] = wandb.Histogram(np_histogram=(np.array(layers), edges))
        # The round as the step: W&B itself then refuses a round it already has.
        self._run.log(sent, step=row["round"])
        if row.get("accuracy") is not None:
            self._run.summary.update(self._overview.fields())

    def _finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Finish the W&B run, whatever happened; else it would swallow the sweep's next run."""
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.summary.update(summary)  # of a column W&B keeps the last value itself
        finally:
            run.finish(exit_code=0 if status == "finished" else 1)

    def _init(self, run: RunInfo, mode: str) -> Any:
        import wandb

        folder = Path(self._options.dir or run.path)
        folder.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            # What matters is told above; wandb's own lines would break the progress bar
            silent=True,
            console="off",
            reinit="create_new",
            init_timeout=TIMEOUT_SECONDS if self._options.mode == "auto" else 90,
            # Seconds; without a network the rest stays on disk for `wandb sync`
            finish_timeout=300,
        )
        return wandb.init(
            project=self._options.project,
            entity=self._options.entity,
            group=self._options.group or run.group,
            job_type=run.job_type,
            name=run.name,
            tags=list(dict.fromkeys((*(tag[:MAX_TAG] for tag in run.tags), *self._options.tags))),
            config={**run.config, "identity": run.identity},  # to group seeds by
            id=service_run_id(run),
            # Begun afresh or offline it is complete by itself, and replaces what the server has
            # under this id.
            resume="allow" if run.start_round and mode == "online" else None,
            dir=str(folder),
            mode=mode,  # type: ignore[arg-type]
            settings=settings,
        )


def choose_mode(mode: str) -> str:
    """Return the mode: `auto` becomes WANDB_MODE where it is set, online for a user who is logged
    in, else offline.
    """
    if mode != "auto":
        return mode
    wish = os.environ.get("WANDB_MODE", "")
    if wish in ("offline", "disabled") or (wish == "online" and is_logged_in()):
        return wish
    return "online" if is_logged_in() else "offline"


def is_logged_in() -> bool:
    """Tell whether a W&B key can be found without asking: WANDB_API_KEY, an identity token, or the
    netrc file.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = _hosts()
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in names:
        try:
            file = netrc.netrc(Path(name).expanduser())
        except (OSError, RuntimeError, netrc.NetrcParseError):
            continue
        if any(entry and entry[2] for entry in map(file.authenticators, hosts)):
            return True
    return False


def _hosts() -> tuple[str, ...]:
    """Return under which names a key for the server may be kept: of WANDB_BASE_URL, else of `wandb
    login --host`.
    """
    url = os.environ.get("WANDB_BASE_URL")
    if not url:
        settings = configparser.ConfigParser(interpolation=None)
        with contextlib.suppress(OSError, RuntimeError, UnicodeDecodeError, configparser.Error):
            folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
            settings.read(Path(folder).expanduser() / "settings", encoding="utf-8")
        url = settings.get("default", "base_url", fallback="")
    host = urlsplit(url).netloc
    return (host,) if host and host not in CLOUD_HOSTS else CLOUD_HOSTS
