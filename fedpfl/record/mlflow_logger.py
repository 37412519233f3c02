"""MLflow as a mirror of rounds.csv. The tracking store tells which rounds it has, and is sent the
others.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpfl.ground.dotted import flatten_keys
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.mirror import ServiceLogger, service_run_id

RUN_TAG = "fedpfl.run"
"""The tag by which a run directory's MLflow run is found again."""

TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
"""What MLflow's environment variables are where the user has not set them: by default it waits for
many minutes.
"""

MAX_METRICS, MAX_PARAMS, MAX_TEXT = 1000, 100, 5000  # of a request, and characters of a value
STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}


class MlflowLogger(ServiceLogger):
    """Keep one MLflow run per run directory; a resumed run continues it."""

    def __init__(self, experiment: str = "fedpfl", uri: str | None = None):
        super().__init__()
        self._experiment, self._uri = experiment, uri
        self._client: Any = None
        self._id = ""
        self._round = 0

    def _picture(self, name: str, path: Path) -> None:
        """Send an image as an artifact."""
        self._client.log_artifact(self._id, str(path))

    def _start(self, run: RunInfo, facts: Mapping[str, Any]) -> int:
        for name, value in TIMEOUTS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=self._uri)
        place, key = _experiment(client, self._experiment), service_run_id(run)
        known = [
            one.info.run_id for one in client.search_runs([place], f"tags.`{RUN_TAG}` = '{key}'")
        ]
        if known and run.start_round:
            self._client, self._id = client, known[0]
            client.update_run(self._id, status="RUNNING")
            self._tell(facts)
            return 1 + max(
                (one.step for one in client.get_metric_history(self._id, "round")), default=-1
            )
        for old in known:  # begun afresh, the run replaces it
            client.delete_run(old)
        tags = {RUN_TAG: key, "group": run.group, "tags": ", ".join(run.tags)}
        self._id = client.create_run(place, run_name=run.name, tags=tags).info.run_id
        self._client = client
        self._tell(facts)
        config = (*flatten_keys(run.config), ("identity", run.identity))  # to group seeds by
        params = {
            _name(key): str(value)[:MAX_TEXT] for key, value in config if value not in (None, "")
        }
        self._batches("params", [Param(key, value) for key, value in params.items()], MAX_PARAMS)
        return 0

    def _send(self, row: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._round = row["round"]
        # The round last: where it is, the others are.
        self._log(
            {
                **{key: value for key, value in values.items() if key != "round"},
                "round": self._round,
            }
        )

    def _finish(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._client is None:
            return
        try:
            held = self._client.get_run(self._id).data.metrics
            numbers = {
                _name(key): float(value)
                for key, value in summary.items()
                if isinstance(value, int | float)
            }
            self._log({key: value for key, value in numbers.items() if held.get(key) != value})
            self._tell(summary)
            self._client.log_dict(
                self._id, json.loads(json.dumps(summary, default=str)), "summary.json"
            )
        finally:
            client, self._client = self._client, None
            client.set_terminated(self._id, STATUS.get(status, "FAILED"))

    def _log(self, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(_name(key), float(value), now, self._round) for key, value in values.items()
        ]
        self._batches("metrics", metrics, MAX_METRICS)

    def _tell(self, facts: Mapping[str, Any]) -> None:
        """Send the texts among them as tags."""
        from mlflow.entities import RunTag

        texts = {
            _name(key): value[:MAX_TEXT] for key, value in facts.items() if isinstance(value, str)
        }
        self._batches("tags", [RunTag(key, value) for key, value in texts.items()], MAX_PARAMS)

    def _batches(self, kind: str, entries: list[Any], most: int) -> None:
        for first in range(0, len(entries), most):
            self._client.log_batch(self._id, **{kind: entries[first : first + most]})


def _experiment(client: Any, name: str) -> str:
    """Return the experiment's id; it is made where there is none, perhaps by another process at the
    same moment.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(name)
        except Exception:
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    return experiment.experiment_id


def _name(key: str) -> str:
    """Return a name of the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", key)
