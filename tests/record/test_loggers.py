"""TensorBoard and MLflow, several loggers at once, and runs that are logged when they are over."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedpfl import export
from fedpfl.config.group_options import read_loggers
from fedpfl.record.loggers import make_loggers, start_callbacks
from fedpfl.record.picture import draw_partition
from tests.command import TINY_TASK, rewrite_summary, run_command
from tests.conftest import read_cases
from tests.data.promises import one_line
from tests.record.test_record import done
from tests.record.test_wandb import info, row, without_login, write_rows

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="the package tensorboard is not installed",
)

FLAT = {"seed": 1, "method.name": "fedobp", "method.q": 0.9998, "partition.alpha": 0.1}


class Client:
    """As much of MLflow as is used: experiments and runs by id, and every call that changes one."""

    def __init__(self):
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, SimpleNamespace] = {}

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return found and SimpleNamespace(experiment_id=found)

    def create_experiment(self, name):
        return self.experiments.setdefault(name, f"e{len(self.experiments)}")

    def search_runs(self, experiments, filter_string=""):
        key, _, value = filter_string.removeprefix("tags.").partition(" = ")
        return [
            run
            for run in self.runs.values()
            if run.place in experiments
            and not run.deleted
            and (not key or run.data.tags.get(key.strip("`")) == value.strip("'"))
        ]

    def create_run(self, place, run_name, tags):
        number = str(len(self.runs) + 1)
        one = SimpleNamespace(run_id=number, run_name=run_name, status="RUNNING")
        data = SimpleNamespace(tags={**tags}, params={}, metrics={})
        held = {"history": defaultdict(list), "deleted": False, "artifacts": {}}
        self.runs[number] = SimpleNamespace(place=place, info=one, data=data, **held)
        return self.runs[number]

    def delete_run(self, run):
        self.runs[run].deleted = True

    def update_run(self, run, status):
        self.runs[run].info.status = status

    set_terminated = update_run

    def get_run(self, run):
        return self.runs[run]

    def get_metric_history(self, run, key):
        return self.runs[run].history[key]

    def log_batch(self, run, metrics=(), params=(), tags=()):
        one = self.runs[run]
        assert len(metrics) <= 1000
        assert len(params) <= 100
        assert len(tags) <= 100
        for metric in metrics:
            one.history[metric.key].append(metric)
            one.data.metrics[metric.key] = metric.value
        for param in params:
            # A parameter cannot change
            assert one.data.params.setdefault(param.key, param.value) == param.value
        one.data.tags.update({tag.key: tag.value for tag in tags})

    def log_dict(self, run, values, name):
        self.runs[run].artifacts[name] = json.dumps(values).encode()

    def log_artifact(self, run, path):
        self.runs[run].artifacts[Path(path).name] = Path(path).read_bytes()

    def list_artifacts(self, run):
        return [SimpleNamespace(path=name) for name in self.runs[run].artifacts]


class Entity(SimpleNamespace):
    def __init__(self, key, value, timestamp=0, step=0):
        super().__init__(key=key, value=value, timestamp=timestamp, step=step)


@pytest.fixture
def pretended(monkeypatch):
    """A small MLflow in the real one's place."""
    client = Client()

    def make_client(tracking_uri=None):
        return client

    modules: dict[str, dict] = {"mlflow": {}, "mlflow.tracking": {"MlflowClient": make_client}}
    modules["mlflow.entities"] = dict.fromkeys(("Metric", "Param", "RunTag"), Entity)
    for name, values in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        module.__spec__ = SimpleNamespace(origin="here")
        monkeypatch.setitem(sys.modules, name, module)
    return make_client


@pytest.fixture(params=["pretended", pytest.param("real", marks=pytest.mark.full)])
def mlflow(request, monkeypatch, tmp_path):
    """What makes a client, of the real MLflow with a database in the folder."""
    if request.param == "pretended":
        return request.getfixturevalue("pretended")
    tracking = pytest.importorskip("mlflow.tracking", reason="the package mlflow is not installed")
    for name in ("MAX_RETRIES", "TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tracking.MlflowClient


def mlflow_runs(client) -> list:
    """The experiment's runs that are not deleted."""
    return client.search_runs([client.get_experiment_by_name("fedpfl").experiment_id])


def mlflow_rows(client, run) -> list[dict]:
    """What was logged by step, a list per name, so that nothing logged twice is lost."""
    rows: dict[int, dict] = defaultdict(lambda: defaultdict(list))
    for name in run.data.metrics:
        for one in client.get_metric_history(run.info.run_id, name):
            rows[one.step][name].append(one.value)
    return [dict(values) for _, values in sorted(rows.items())]


def events(folder: Path):
    """All that TensorBoard reads in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"scalars": 0, "images": 0, "tensors": 0}
    return EventAccumulator(str(folder / "tensorboard"), size_guidance=everything).Reload()


def scalars(read, *without: str) -> dict[str, list[tuple[int, float]]]:
    names = [name for name in read.Tags()["scalars"] if name not in without]
    return {name: [(one.step, one.value) for one in read.Scalars(name)] for name in names}


def text(read, name: str) -> str:
    (one,) = read.Tensors(f"{name}/text_summary")
    return one.tensor_proto.string_val[0].decode()


def expected(*numbers: int) -> dict[str, list[tuple[int, float]]]:
    """The rounds' values by name, float32 as TensorBoard has them."""
    found: dict[str, list] = defaultdict(list)
    for number in numbers:
        for name, value in row(number).items():
            if value is not None and name != "round":
                found[name].append((number, float(np.float32(value))))
    return dict(found)


def play(
    logger: dict, path: Path, numbers=(1, 2, 3, 4), start=0, status="finished", **summary
) -> str:
    """Log rounds as a run does; returns run.log."""
    run = info(path, start_round=start, facts={"cohort": 2, "identity": "abc-seed1"})
    with start_callbacks(read_loggers(logger), run, quiet=True) as callbacks:
        for number in numbers:
            callbacks.on_round(done(row(number)))
        callbacks.on_end(status, summary)
    return (path / "run.log").read_text()


@needs_tensorboard
def test_event_files_hold_everything(tmp_path):
    write_rows(tmp_path / "run", 1, 2, 3)
    draw_partition(np.array([[1, 2], [3, 0]]), tmp_path / "run/partition.png", "two clients")
    ended = {"hours": 0.5, "last": {"accuracy": 54.0}, "error": None}
    # The run is resumed: round 3 is behind the checkpoint.
    play({"tensorboard": {}}, tmp_path / "run", (1, 2, 3), status="interrupted")
    log = play({"tensorboard": {}}, tmp_path / "run", (3, 4), start=2, **ended)
    assert "left out" not in log
    read = events(tmp_path / "run")
    found = scalars(read)
    assert {name: found[name] for name in expected(1, 2, 3, 4)} == expected(1, 2, 3, 4)
    assert set(found) - set(expected(2)) == {
        *("hours", "cohort", "q", "one_minus_q", "alpha", "last_accuracy", "best_accuracy"),
        *("best_round", "personal_entries"),
    }
    assert found["best_accuracy"] == [(4, 54.0)]
    config = json.loads(text(read, "configuration"))
    assert config == info(tmp_path / "run").config
    summary = json.loads(text(read, "summary"))
    told = {"status": "finished", "hours": 0.5, "last": {"accuracy": 54.0}}
    assert summary.items() >= told.items()
    assert "error" not in summary
    (image,) = read.Images("partition")
    assert image.width > 10
    assert "_hparams_/session_start_info" in read.summary_metadata
    values = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert all(key.encode() in values for key in (*FLAT, "identity", "status"))


def test_mlflow_holds_everything(tmp_path, mlflow):
    (tmp_path / "run").mkdir()
    draw_partition(np.eye(2), tmp_path / "run/partition.png", "two clients")
    log = play({"mlflow": {}}, tmp_path / "run", hours=0.5, cohort_before=-1.0, error="x" * 7000)
    assert "left out" not in log
    client = mlflow()
    (run,) = mlflow_runs(client)
    assert (run.info.run_name, run.info.status) == ("FedOBP-abc-seed1", "FINISHED")
    params = {key: run.data.params[key] for key in FLAT}
    assert params == {key: str(value) for key, value in FLAT.items()}
    assert run.data.params["identity"] == "abc"
    rows = mlflow_rows(client, run)
    for number, found in enumerate(rows, 1):
        wanted = {name: [value] for name, value in row(number).items() if value is not None}
        assert {name: found[name] for name in wanted} == wanted
    assert len(rows) == 4
    final = {name: value for name, (value,) in rows[-1].items() if name not in row(4)}
    told = {"hours": 0.5, "best_accuracy": 54.0, "best_round": 4, "q": 0.9998, "cohort": 2}
    assert final.items() >= told.items()
    tags = {"status": "finished", "group": "table3", "tags": "digits, dirichlet"}
    assert run.data.tags.items() >= tags.items()
    assert len(run.data.tags["error"]) == 5000
    artifacts = {one.path for one in client.list_artifacts(run.info.run_id)}
    assert artifacts == {"partition.png", "summary.json"}


def test_a_resumed_run_has_every_round_once_in_mlflow(tmp_path, mlflow):
    """Whether the store has fewer rounds than the checkpoint or more."""
    path, logger = tmp_path / "run", {"mlflow": {"experiment": "fedpfl"}}
    write_rows(path, 1, 2)
    for held in (1, 3):
        play(logger, path, range(1, held + 1), status="interrupted", hours=0.1)
        client = mlflow()
        (before,) = mlflow_runs(client)
        assert before.info.status == "KILLED"
        play(logger, path, (3, 4), start=2, hours=0.2)
        (run,) = mlflow_runs(client)
        assert (run.info.run_id, run.info.status) == (before.info.run_id, "FINISHED")
        rows = mlflow_rows(client, run)
        assert [values["round"] for values in rows] == [[1], [2], [3], [4]]
        before = [values["cohort_before"] for values in rows]
        assert before == [[number / 3] for number in (1, 2, 3, 4)]


BAD = """
{"tensorboard": {"dir": "x"}} => logger.tensorboard.dir is not a key here; known keys: none
{"mlflow": 3} => logger.mlflow must be a group of keys, got 3
{"name": "wandb", "mode": "online"} => logger.mode=online but W&B is not logged in
"""


def test_bad_options_are_one_line(tmp_path, monkeypatch):
    without_login(monkeypatch, tmp_path)
    for logger, message in read_cases(BAD):
        line = one_line(lambda logger=logger: make_loggers(read_loggers(json.loads(logger))))
        assert line.startswith(message)
    assert read_loggers({"name": "none"}) == {}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The directory of a run that logged itself to what there is, and how."""
    folder = tmp_path_factory.mktemp("logged")
    words = ["method=fedobp", "name=mine", "model=mlp", "rounds=3", "eval.every=2"]
    if importlib.util.find_spec("tensorboard"):
        words.append("logger=tensorboard")
    result = run_command(*TINY_TASK[1:-2], *words, cwd=folder)
    assert result.code == 0, result.err
    (path,) = (found.parent for found in folder.glob("outputs/*/*/*/*/rounds.csv"))
    return path


@needs_tensorboard
def test_tensorboard_gets_afterwards_what_the_run_would_have_written(logged, capsys):
    own = events(logged)
    before = scalars(own), text(own, "configuration"), json.loads(text(own, "summary"))
    for _ in range(2):  # run twice it is there once
        assert export.main([str(logged), "logger=tensorboard"]) == 0
        late = events(logged)
        now = scalars(late), text(late, "configuration"), json.loads(text(late, "summary"))
        assert now == before
        assert len(late.Images("partition")) == 1


def copied(logged: Path, folder: Path, **changes) -> Path:
    """A run directory as it was before it ended."""
    folder.mkdir(parents=True)
    for name in ("config.yaml", "rounds.csv", "clients.csv", "summary.json"):
        (folder / name).write_bytes((logged / name).read_bytes())
    rewrite_summary(folder, without=("files",), **changes)
    return folder


def test_a_killed_run_is_logged_as_far_as_it_came(logged, tmp_path, pretended, capsys):
    path = copied(logged, tmp_path / "killed", status="running")
    whole = (path / "rounds.csv").read_text().splitlines(keepends=True)
    # A row's first byte, as a power cut may leave it
    (path / "rounds.csv").write_text("".join(whole[:3]) + "1")
    assert export.main([str(path), "logger=mlflow"]) == 0
    (run,) = mlflow_runs(pretended())
    assert [one.step for one in run.history["round"]] == [1, 2]
    tags = run.data.tags
    assert (run.info.status, tags["status"], tags["group"]) == ("KILLED", "interrupted", "digits")
