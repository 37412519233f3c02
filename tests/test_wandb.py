"""W&B without a network: the offline file is read back and must hold what the run directory holds."""

from __future__ import annotations

import json
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedpfl.errors import FedpflError
from fedpfl.record import RunDirectory, RunInfo, Sinks, check_logger, open_sinks, partition_picture, wandb_sink
from fedpfl.record.wandb_sink import Options, WandbSink, choose_mode, logged_in, run_id

wandb = pytest.importorskip("wandb")

KEY = "0123456789abcdef" * 3


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))


def info(path: Path, **changes) -> RunInfo:
    path.mkdir(exist_ok=True)
    values = {
        "name": "FedOBP-abc-seed1",
        "group": "table3",
        "job_type": "fedobp",
        "tags": ("digits", "dirichlet"),
        "config": {"seed": 1, "method": {"name": "fedobp", "q": 0.9998}, "partition": {"alpha": 0.1}},
        "path": path,
        "identity": "abc",
        "seed": 1,
        "rounds": 4,
    }
    return RunInfo(**{**values, **changes})


def row(number: int) -> dict:
    judged = 50.0 + number if number % 2 == 0 else None
    return {
        "round": number,
        "cohort_before": number / 3,
        "accuracy": judged,
        "ft_accuracy": None,
        "personal/conv1": 10 * number,
        "personal/classifier": 90 * number,
    }


def records(file: Path) -> list:
    """The records of a `.wandb` file: blocks of 32 KiB; chunks of crc, length, kind; protobuf inside."""
    from wandb.proto import wandb_internal_pb2

    data, found, parts, at = file.read_bytes(), [], b"", 7
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def items(entries) -> dict:
    return {entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return file


def finished_records(folder: Path) -> list:
    """The records of the only offline run; wandb's service may write the last of them after `finish` returned."""
    until = time.monotonic() + 15
    while not exit_codes(found := records(only_file(folder))) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def history(found: list) -> list[dict]:
    return [items(record.history.item) for record in found if record.WhichOneof("record_type") == "history"]


def exit_codes(found: list) -> list[int]:
    return [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"]


def test_an_offline_run_holds_everything(tmp_path):
    notes: list[str] = []
    run = info(tmp_path / "run")
    partition_picture(np.array([[1, 2], [3, 0]]), run.path / "partition.png", "two clients")
    sink = WandbSink(Options.of({"name": "wandb", "tags": ["mine"]}), notes.append)
    sink.begin(run)
    sink.picture("partition", run.path / "partition.png")
    for number in range(1, 5):
        sink.row(row(number))
    sink.end("finished", {"hours": 0.5, "last": {"accuracy": 54.0}, "status": "finished", "error": None})

    file = only_file(run.path)
    assert notes == [f"W&B offline; upload with: wandb sync {file.parent}"]
    found = finished_records(run.path)
    (begun,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (begun.project, begun.run_group, begun.job_type) == ("fedpfl", "table3", "fedobp")
    assert (begun.display_name, begun.run_id) == (run.name, run_id(run))
    assert list(begun.tags) == ["digits", "dirichlet", "mine"]
    config = items(begun.config.update)
    assert {key: config[key] for key in run.config} == run.config

    sent = history(found)
    rows = [entry for entry in sent if "cohort_before" in entry]
    assert [entry["round"] for entry in rows] == [entry["_step"] for entry in rows] == [1, 2, 3, 4]
    assert [entry["cohort_before"] for entry in rows] == [number / 3 for number in range(1, 5)]
    assert [entry.get("accuracy") for entry in rows] == [None, 52.0, None, 54.0]
    assert all("ft_accuracy" not in entry for entry in rows)
    assert [entry.get("mask distribution.values") for entry in rows] == [None, [20, 180], None, [40, 360]]
    assert rows[1]["mask distribution.bins"] == [0, 1, 2]

    (picture,) = [entry["partition.path"] for entry in sent if "partition.path" in entry]
    stored = file.parent / "files" / picture
    assert stored.read_bytes() == (run.path / "partition.png").read_bytes()

    metrics = {
        record.metric.name or record.metric.glob_name: record.metric
        for record in found
        if record.WhichOneof("record_type") == "metric"
    }
    assert {"round", "*", "accuracy", "ft_accuracy"} <= set(metrics)
    assert metrics["*"].step_metric == metrics["accuracy"].step_metric == "round"
    assert metrics["accuracy"].summary.max
    assert metrics["accuracy"].summary.last

    summary: dict = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    assert (summary["status"], summary["hours"]) == ("finished", 0.5)
    assert summary["last"] == {"accuracy": 54.0}
    assert exit_codes(found) == [0]


def test_two_runs_in_one_process_stay_apart(tmp_path):
    """What a sweep does: the basic launcher reuses its process, also after a run that failed."""
    first, second = info(tmp_path / "a"), info(tmp_path / "b", seed=2)
    with pytest.raises(ZeroDivisionError), open_sinks({"name": "wandb"}, first, quiet=True) as sinks:
        sinks.row({**row(1), "cohort_before": 1 / 0})
    with open_sinks({"name": "wandb"}, second, quiet=True) as sinks:
        sinks.row(row(1))
        sinks.row(row(2))
        sinks.end("finished", {})
    assert wandb.run is None
    one, two = finished_records(first.path), finished_records(second.path)
    assert [len([entry for entry in history(found) if "round" in entry]) for found in (one, two)] == [0, 2]
    assert (exit_codes(one), exit_codes(two)) == ([1], [0])
    assert run_id(first) != run_id(second)
    assert "W&B offline; upload with: wandb sync" in (first.path / "run.log").read_text()


def test_an_offline_run_that_was_resumed_is_complete(tmp_path):
    """A kill takes along what wandb had in memory: the file of the resumed run holds the earlier rounds too."""
    fresh, resumed = info(tmp_path / "run"), info(tmp_path / "run", start_round=2)
    partition_picture(np.eye(2), fresh.path / "partition.png", "two clients")
    with RunDirectory.open(fresh.path, "", "abc") as directory:
        directory.row({**row(1), "ft_accuracy": 1 / 3})
        directory.row(row(2))
        directory.row(row(3))  # behind the checkpoint
    for run, numbers in ((fresh, (1, 2, 3)), (resumed, (3, 4))):
        options = Options(dir=str(tmp_path / f"files{run.start_round}"))
        sink = WandbSink(options, lambda text: None)
        sink.begin(run)
        sink.picture("partition", run.path / "partition.png")
        for number in numbers:
            sink.row(row(number))
        sink.end("interrupted" if run is fresh else "finished", {})
    before, after = (finished_records(tmp_path / name) for name in ("files0", "files2"))
    ids = [{record.run.run_id for record in found if record.run.run_id} for found in (before, after)]
    assert ids == [{run_id(fresh)}] * 2
    rows = [entry for entry in history(after) if "cohort_before" in entry]
    assert [entry["round"] for entry in rows] == [entry["_step"] for entry in rows] == [1, 2, 3, 4]
    assert [entry["cohort_before"] for entry in rows] == [number / 3 for number in range(1, 5)]
    assert [entry.get("ft_accuracy") for entry in rows] == [1 / 3, None, None, None]
    assert rows[1]["mask distribution.values"] == [20, 180]
    assert any("partition.path" in entry for entry in history(after))


def test_an_online_run_that_was_resumed_gets_what_the_server_lacks(tmp_path, monkeypatch):
    class Server:
        offline, url, dir = False, "https://example.org/run", str(tmp_path)

        def __init__(self):
            self.step, self.steps, self.summary, self.settings = 0, [], {}, {}

        def init(self, **settings):
            self.settings = settings
            return self

        def define_metric(self, name, **how):
            pass

        def log(self, values, step=None):
            assert step == values["round"]
            self.steps.append(step)

        def finish(self, exit_code):
            pass

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with RunDirectory.open(tmp_path / "run", "", "abc") as directory:
        for number in (1, 2, 3):
            directory.row(row(number))
    for held, sent in ((1, [2, 3, 4, 5, 6]), (3, [4, 5, 6]), (5, [6]), (-1, [1, 2, 3, 4, 5, 6])):
        server = Server()
        server.step = held + 1  # W&B's next step
        monkeypatch.setattr(wandb, "init", server.init)
        notes: list[str] = []
        sink = WandbSink(Options(), notes.append)
        sink.begin(info(tmp_path / "run", start_round=3, rounds=6))
        if server.step:
            sink.picture("partition", tmp_path / "missing.png")
        for number in (4, 5, 6):
            sink.row(row(number))
        sink.end("finished", {})
        assert server.steps == sent
        assert (server.settings["resume"], server.settings["mode"]) == ("allow", "online")
        assert notes == ["W&B https://example.org/run"]


def test_disabled_writes_nothing(tmp_path):
    run = info(tmp_path / "run")
    with Sinks([WandbSink(Options(mode="disabled"), pytest.fail)]) as sinks:
        sinks.begin(run)
        sinks.row(row(2))
        sinks.end("finished", {"hours": 1})
    assert not list(run.path.glob("wandb/*run-*"))


def test_auto_goes_offline_where_the_server_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens at the discard port
    monkeypatch.setattr(wandb_sink, "PATIENCE", 1.0)
    notes: list[str] = []
    run = info(tmp_path / "run")
    sink = WandbSink(Options(), notes.append)
    sink.begin(run)
    sink.row(row(1))
    sink.end("finished", {})
    assert notes[0].startswith("W&B cannot be reached, logging offline: ")
    assert "\n" not in notes[0]
    assert notes[1].startswith("W&B offline; upload with: wandb sync ")
    assert [entry["round"] for entry in history(finished_records(run.path))] == [1]


def test_who_asks_for_online_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    def init(**settings):
        raise wandb.errors.CommError("no route\nto host")

    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(wandb, "init", init)
    with open_sinks({"name": "wandb", "mode": "online"}, info(tmp_path / "other"), quiet=True) as sinks:
        sinks.row(row(1))
        sinks.end("finished", {})
    log = (tmp_path / "other" / "run.log").read_text()
    assert "WandbSink failed and is left out, the run goes on: no route to host" in log
    assert "round 1/4" in log


def test_the_run_is_finished_even_if_its_summary_fails(tmp_path):
    class Broken:
        def __init__(self):
            self.summary, self.codes = self, []

        def update(self, fields):
            raise OSError("disk full")

        def finish(self, exit_code):
            self.codes.append(exit_code)

    sink = WandbSink(Options(), pytest.fail)
    sink._run = broken = Broken()
    with pytest.raises(OSError, match="disk full"):
        sink.end("finished", {})
    sink.end("failed", {})
    assert broken.codes == [0]


def test_mode_follows_the_login(monkeypatch, tmp_path):
    assert not logged_in()
    assert choose_mode("auto") == "offline"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert logged_in()
    assert choose_mode("auto") == "online"
    assert choose_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode("auto") == "disabled"
    assert choose_mode("online") == "online"
    monkeypatch.setenv("WANDB_MODE", "online")
    (tmp_path / "netrc").write_text(f"machine example.org login user password {KEY}\n")
    assert choose_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_BASE_URL", "https://example.org")
    assert choose_mode("auto") == "online"
    (tmp_path / "netrc").write_text("machine")
    assert not logged_in()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert logged_in()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "on"}, "logger.mode=on is unknown; choose one of auto, online, offline, disabled"),
        ({"mode": "online"}, "logger.mode=online but W&B is not logged in"),
        ({"project": None}, "logger.project=None must be text"),
        ({"group": 3}, "logger.group=3 must be text"),
        ({"tags": "one"}, "logger.tags=one must be a list of words"),
        ({"tags": [1]}, "logger.tags=[1] must be a list of words"),
        ({"projekt": "x"}, "logger.projekt is unknown; known are project, entity"),
    ],
)
def test_bad_options_are_one_line(change, message):
    with pytest.raises(FedpflError) as error:
        check_logger({"name": "wandb", **change})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(FedpflError, match="logger=wandb needs the package wandb; pip install wandb"):
        check_logger({"name": "wandb"})


def test_the_shipped_config_is_the_default():
    yaml = pytest.importorskip("yaml")
    folder = Path(__file__).parents[1] / "conf" / "logger"
    assert Options.of(yaml.safe_load((folder / "wandb.yaml").read_text())) == Options()
    check_logger(yaml.safe_load((folder / "none.yaml").read_text()))
