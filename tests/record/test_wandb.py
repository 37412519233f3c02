"""W&B without a network: the offline file is read back and must hold what the run directory holds."""

from __future__ import annotations

import csv
import json
import math
import struct
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fedpfl import dashboard
from fedpfl.record import wandb_logger
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.mirror import service_run_id, summarize_rows
from fedpfl.record.picture import draw_partition
from fedpfl.record.rundir import RunDirectory
from fedpfl.record.wandb_logger import WandbLogger, WandbOptions, choose_mode
from tests.command import TINY, run_command
from tests.record.test_record import done
from tests.record.test_record import info as describe_run

wandb = pytest.importorskip("wandb")

KEY = "0123456789abcdef" * 3


def without_login(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """No key, and W&B's own files in `folder`."""
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "MODE", "BASE_URL", "DIR"):
        patch.delenv(f"WANDB_{name}", raising=False)
    patch.setenv("NETRC", str(folder / "netrc"))
    for name in ("config", "cache", "data"):
        patch.setenv(f"WANDB_{name.upper()}_DIR", str(folder / f"wandb-{name}"))


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    without_login(monkeypatch, tmp_path)


CONFIG = {"seed": 1, "method": {"name": "fedobp", "q": 0.9998}, "partition": {"alpha": 0.1}}
CONFIG |= {"eval": {"every": 2}}


def info(path: Path, **changes) -> RunInfo:
    path.mkdir(exist_ok=True)
    values = {"group": "table3", "tags": ("digits", "dirichlet"), "config": CONFIG, "rounds": 4}
    return describe_run(path, **{**values, "lines": (), **changes})


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


def write_rows(path: Path, *numbers: int) -> None:
    """Put rounds into rounds.csv."""
    with RunDirectory.open(path, "", "abc") as directory:
        for number in numbers:
            directory.row(row(number))


def records(file: Path) -> list:
    """Records of a `.wandb` file: blocks of 32 KiB; chunks of crc, length, kind; protobuf."""
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
    return {
        entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries
    }


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return file


def finished_records(folder: Path) -> list:
    """The records of the only offline run, the last of which may come after `finish`."""
    until = time.monotonic() + 60
    while not records_of(found := records(only_file(folder)), "exit") and time.monotonic() < until:
        time.sleep(0.05)
    return found


def records_of(found: list, kind: str) -> list:
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def history(found: list) -> list[dict]:
    return [items(entry.item) for entry in records_of(found, "history")]


def summary_of(found: list) -> dict:
    summary: dict = {}
    for entry in records_of(found, "summary"):
        summary |= items(entry.update)
    return summary


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> list[Path]:
    """The directories, by path, of a tiny sweep of FedOBP with W&B offline."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        without_login(patch, folder)
        words = ("method=fedobp", "eval.finetune_epochs=1", "validation=0.2", "unseen=0.25")
        words += ("logger=wandb", "logger.mode=offline", "quantile.q=0.9,0.99")
        assert run_command("--multirun", *TINY, *words, cwd=folder).code == 0
    return sorted(path.parent for path in folder.glob("outputs/*/*/*/*/rounds.csv"))


def test_a_run_that_is_resumed_where_no_server_can_be_reached_is_complete(tmp_path, monkeypatch):
    """A kill takes what wandb had in memory: the resumed run's file holds it too."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens at the discard port
    monkeypatch.setattr(wandb_logger, "TIMEOUT_SECONDS", 1.0)
    notes: list[str] = []
    fresh, resumed = info(tmp_path / "run"), info(tmp_path / "run", start_round=2)
    with RunDirectory.open(fresh.path, "", "abc") as directory:
        draw_partition(np.eye(2), fresh.path / "partition.png", "two clients")
        directory.row({**row(1), "ft_accuracy": 1 / 3})
        directory.row(row(2))
        directory.row(row(3))  # behind the checkpoint
    mirror = WandbLogger(WandbOptions(dir=str(tmp_path)), notes.append)
    mirror.on_begin(resumed)
    for number in (3, 4):
        mirror.on_round(done(row(number)))
    mirror.on_end("finished", {})
    assert notes[0].startswith("W&B cannot be reached, logging offline: ")
    assert "\n" not in notes[0]
    assert notes[1].startswith("W&B offline; upload with: wandb sync ")
    found = finished_records(tmp_path)
    assert {own.run_id for own in records_of(found, "run")} == {service_run_id(fresh)}
    rows = [entry for entry in history(found) if "cohort_before" in entry]
    assert [entry["round"] for entry in rows] == [entry["_step"] for entry in rows] == [1, 2, 3, 4]
    assert [entry["cohort_before"] for entry in rows] == [number / 3 for number in range(1, 5)]
    assert [entry.get("ft_accuracy") for entry in rows] == [1 / 3, None, None, None]
    assert rows[1]["mask distribution.values"] == [20, 180]
    assert any("partition.path" in entry for entry in history(found))


def test_an_online_run_that_was_resumed_gets_what_the_server_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    write_rows(tmp_path / "run", 1, 2, 3)
    for held, sent in ((1, [2, 3, 4, 5, 6]), (3, [4, 5, 6]), (5, [6]), (-1, [1, 2, 3, 4, 5, 6])):
        server = mock.Mock(offline=False, url="https://example.org/run", summary={})
        server.step = held + 1  # W&B's next one
        init = mock.Mock(return_value=server)
        monkeypatch.setattr(wandb, "init", init)
        notes: list[str] = []
        picture = tmp_path / "run" / "partition.png"  # sent already, unless the server has nothing
        picture.touch() if server.step else picture.unlink()
        mirror = WandbLogger(WandbOptions(), notes.append)
        mirror.on_begin(info(tmp_path / "run", start_round=3, rounds=6))
        for number in (4, 5, 6):
            mirror.on_round(done(row(number)))
        mirror.on_end("finished", {})
        rows = [(call.args[0]["round"], call.kwargs["step"]) for call in server.log.mock_calls]
        assert rows == [(number, number) for number in sent]
        assert (init.call_args.kwargs["resume"], init.call_args.kwargs["mode"]) == (
            "allow",
            "online",
        )
        assert notes == ["W&B https://example.org/run"]


def test_overview_by_hand():
    layers = {"personal/a": 3.0, "personal/b": 4.5, "personal_share": 0.5}
    judged = {"accuracy": 60.0, "accuracy_pooled": 61.0, "accuracy_worst10": 9.0}
    rows = ({"seconds": 4.0, **judged, **layers}, {"seconds": 1.0, "accuracy": None})
    rows += ({"seconds": 2.0, **judged, "ft_accuracy": 70.0},)
    rows[2].update(unseen_ft_accuracy=40.0, val_accuracy=50.0)
    for number, (down, up) in enumerate(((8e9, 0), (16e9, 8e9), (0, 16e9))):
        rows[number].update(round=number + 1, bits_down=down, bits_up=up)
    wanted = {f"last_{name}": value for name, value in judged.items()}
    wanted |= {"last_unseen_ft_accuracy": 40.0, "last_val_accuracy": 50.0}
    wanted |= {"last_ft_accuracy": 70.0, "best_accuracy": 60.0, "best_round": 1}
    wanted |= {"personal_entries": 7.5, "seconds_per_round": 2.0}
    wanted |= {"bits_down_per_client": 4e9, "bits_up_per_client": 4e9}
    assert summarize_rows(rows, 2) == wanted
    undefined = {"round": 1, "bits_down": 8, "bits_up": 8, "accuracy": math.nan}
    nan = pytest.approx(math.nan, nan_ok=True)
    assert summarize_rows([undefined], None) == {"last_accuracy": nan}
    assert summarize_rows([], 2) == {}


def test_the_dashboard_names_only_what_runs_send(swept):
    """Columns of the history, the summary and the configuration of a real run."""
    found = finished_records(swept[0])
    (begun,) = records_of(found, "run")
    config, summary = items(begun.config.update), summary_of(found)
    columns = {key for entry in history(found) for key in entry}
    if json.loads((swept[0] / "summary.json").read_text())["environment"]["commit"] is None:
        summary["commit"] = "not from a checkout"
    panels = [panel for section in dashboard.SECTIONS.values() for panel in section]
    for kind, y, x in panels:
        if kind == "lines":
            assert {y, x} <= columns
        else:
            assert all(isinstance(summary[name], int | float) for name in (y, x))
    known = {"run:state", "run:group", "run:jobType", "tags:__ALL__"}
    known |= {f"summary:{key}" for key, value in summary.items() if not isinstance(value, dict)}
    known |= {f"config:{key}.value" for key in config}
    assert {*dashboard.PINNED_COLUMNS} <= known


def test_a_sweep_mirrors_its_run_directories(swept):
    assert len(swept) == 2
    marks = set()
    for path in swept:
        found = finished_records(path)
        (begun,) = records_of(found, "run")
        assert (begun.run_group, begun.job_type) == ("digits", "fedobp")
        assert [*begun.tags][:3] == ["digits", "dirichlet", "mlp"]
        assert begun.display_name == f"FedOBP-{path.parent.name}-seed42"
        config = items(begun.config.update)
        assert config["identity"] == path.parent.name

        with (path / "rounds.csv").open(newline="") as file:
            cells = [*csv.DictReader(file)]
        rows = [{key: float(cell) for key, cell in row.items() if cell} for row in cells]
        columns = [*cells[0]]
        entries = history(found)
        sent = [entry for entry in entries if "cohort_before" in entry]
        assert [entry["_step"] for entry in sent] == [row["round"] for row in rows]
        assert [{key: entry[key] for key in columns if key in entry} for entry in sent] == rows
        (picture,) = [entry["partition.path"] for entry in entries if "partition.path" in entry]
        stored = only_file(path).parent / "files" / picture
        assert stored.read_bytes() == (path / "partition.png").read_bytes()
        masks = [rows[-1][key] for key in columns if key.startswith("personal/")]
        assert sent[-1]["mask distribution.values"] == masks
        assert sent[-1]["mask distribution.bins"] == [*range(len(masks) + 1)]
        bits = [row["bits_down"] + row["bits_up"] for row in rows]
        assert [entry["traffic_gb"] for entry in sent] == [bits[0] / 8e9, sum(bits) / 8e9]
        metrics = {own.name or own.glob_name: own for own in records_of(found, "metric")}
        assert {metrics[key].step_metric for key in ("*", *columns) if key != "round"} == {"round"}
        assert metrics["accuracy"].summary.max
        assert [own.exit_code for own in records_of(found, "exit")] == [0]
        assert metrics["loss"].summary.min

        summary, on_disk = summary_of(found), json.loads((path / "summary.json").read_text())
        table = {f"last_{key}": rows[-1][key] for key in ("accuracy", "ft_accuracy")}
        table |= {"best_accuracy": on_disk["best"]["accuracy"], "traffic_gb": sum(bits) / 8e9}
        table |= {key: on_disk[key] for key in ("hours", "status", "identity", "parameters")}
        assert {key: summary[key] for key in table} == pytest.approx(table)
        marks.add((begun.run_id, config["identity"], summary["q"], summary["one_minus_q"]))
    assert [len({*values}) for values in zip(*marks, strict=True)] == [2] * 4
    assert {mark[2:] for mark in marks} == {(0.9, 0.1), (0.99, 0.01)}


def test_mode_follows_the_login(tmp_path):
    wandb.teardown()  # it reads its settings once a process
    assert choose_mode("auto") == "offline"
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert [choose_mode(mode) for mode in ("auto", "offline")] == ["online", "offline"]
    wandb.teardown()
