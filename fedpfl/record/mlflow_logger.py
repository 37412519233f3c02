"""MLflow as a copy of rounds.csv: the tracking store is sent the rounds that it lacks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.records import Values
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.mirror import ServiceLogger, service_run_id

RUN_TAG = "fedpfl.run"
"""The tag that identifies a run directory's MLflow run."""

TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""MLflow's environment variables, unless the user has set them: by default it waits for minutes."""

MAX_METRICS = 1000  # of a request
MAX_PARAMS = 100  # of a request
MAX_TEXT = 5000  # characters of a value
STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


@dataclass(frozen=True)
class MlflowOptions:
    """Hold the keys of `logger.mlflow`; see conf/logger/mlflow.yaml."""

    experiment: str = "fedpfl"
    uri: str | None = None


class MlflowLogger(ServiceLogger):
    """Keep one MLflow run per run directory; a resumed run continues it."""

    def __init__(self, options: MlflowOptions):
        super().__init__()
        self._options = options
        self._client: Any = None
        self._run_id = ""
        self._round = 0

    def _send_picture(self, path: Path) -> None:
        """Send an image as an artifact."""
        self._client.log_artifact(self._run_id, str(path))

    def _start(self, run: RunInfo, facts: Values) -> int:
        for name, value in TIMEOUTS.items():
            # Before the import, which reads them.
            os.environ.setdefault(name, value)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        # ---- Step 1: continue the MLflow run of a resumed run.
        self._client = MlflowClient(tracking_uri=self._options.uri)
        experiment_id = _find_or_create_experiment(self._client, self._options.experiment)
        key = service_run_id(run)
        found = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{key}'")
        run_ids = [mlflow_run.info.run_id for mlflow_run in found]
        if run_ids and run.start_round:
            self._run_id = run_ids[0]
            self._client.update_run(self._run_id, status="RUNNING")
            self._set_tags(facts)
            history = self._client.get_metric_history(self._run_id, "round")
            return 1 + max((metric.step for metric in history), default=-1)

        # ---- Step 2: a run begun afresh replaces its former one.
        for old_run_id in run_ids:
            self._client.delete_run(old_run_id)
        tags = {RUN_TAG: key, "group": run.group, "tags": ", ".join(run.tags)}
        mlflow_run = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        self._run_id = mlflow_run.info.run_id
        self._set_tags(facts)
        config = (*flatten_keys(run.config), ("identity", run.identity))  # to group seeds by
        params = [
            Param(_allowed_name(key), str(value)[:MAX_TEXT])
            for key, value in config
            if value not in (None, "")
        ]
        self._log_in_batches("params", params, MAX_PARAMS)
        return 0

    def _send_round(self, row: Values, values: Values) -> None:
        self._round = row["round"]
        # The round goes last: if it is there, all values of the row are.
        metrics = {key: value for key, value in values.items() if key != "round"}
        self._log_metrics({**metrics, "round": self._round})

    def _finish(self, status: str, summary: Values) -> None:
        if not self._run_id:
            return
        try:
            logged = self._client.get_run(self._run_id).data.metrics
            numbers = {_allowed_name(key): value for key, value in summary.items()}
            # The last round has sent most of them.
            self._log_metrics(
                {
                    key: float(value)
                    for key, value in numbers.items()
                    if isinstance(value, int | float) and logged.get(key) != value
                }
            )
            self._set_tags(summary)
            plain_summary = json.loads(json.dumps(summary, default=str))
            self._client.log_dict(self._run_id, plain_summary, "summary.json")
        finally:
            self._client.set_terminated(self._run_id, STATUS.get(status, "FAILED"))
            self._run_id = ""

    def _log_metrics(self, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        milliseconds = int(1000 * time.time())
        metrics = [
            Metric(_allowed_name(key), float(value), milliseconds, self._round)
            for key, value in values.items()
        ]
        self._log_in_batches("metrics", metrics, MAX_METRICS)

    def _set_tags(self, facts: Values) -> None:
        """Send the texts among the facts as tags."""
        from mlflow.entities import RunTag

        tags = [
            RunTag(_allowed_name(key), value[:MAX_TEXT])
            for key, value in facts.items()
            if isinstance(value, str)
        ]
        self._log_in_batches("tags", tags, MAX_PARAMS)

    def _log_in_batches(self, kind: str, entries: list[Any], batch_size: int) -> None:
        for start in range(0, len(entries), batch_size):
            batch = entries[start : start + batch_size]
            self._client.log_batch(self._run_id, **{kind: batch})


def _find_or_create_experiment(client: Any, name: str) -> str:
    """Return the experiment's id.

    Another process may create the experiment at the same moment.
    """
    if client.get_experiment_by_name(name) is None:
        # The experiment is asked for below: another process may have just created it.
        with contextlib.suppress(Exception):
            client.create_experiment(name)
    return client.get_experiment_by_name(name).experiment_id


def _allowed_name(key: str) -> str:
    """Return a name of the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", key)
