"""Filters of runs, alone and in every command that takes them."""

import json
from pathlib import Path
from typing import Any

from fedpfl.report.filters import apply_filters, is_filter
from tests.conftest import read_cases
from tests.data.promises import one_line
from tests.report.test_listing import HOUR, age
from tests.report.test_report import read_output, read_refusal, write_run

CONFIGS: list[dict[str, Any]] = [
    {"method": {"name": "fedavg"}, "local": {"lr": 0.1, "betas": [0.9, 0.999]}, "note": None},
    {"method": {"name": "fedobp", "q": 0.98}, "local": {"lr": 0.01, "optimizer": "adam"}},
    {"method": {"name": "lg_fedavg"}, "local": {"lr": 0.01}, "deep": True},
]
for values, clients in zip(CONFIGS, (5, 5, 10), strict=True):
    values["clients"] = clients
NAMED = [{"method": name} for name in ("FedAvg", "FedOBP", "LG-FedAvg")]


KEPT = """
method=fedobp => 1
method=FedOBP => 1
method=LG-FedAvg => 2
method=fedobp,fedavg => 01
method=fedobp method=fedavg => 01
clients=5 local.lr=0.01 => 1
local.lr=0.10 => 0
local.lr=1e-2 => 12
local.optimizer=sgd => 02
local.betas=[0.9,0.999] => 012
deep=true => 2
note=null => 0
"""


def test_what_is_let_through() -> None:
    for filters, kept in [("", "012"), *read_cases(KEPT)]:
        found = apply_filters(CONFIGS, filters.split(), NAMED)
        assert "".join(str(place) for place, own in enumerate(found) if own) == kept, filters


REFUSED = """
methd=fedobp => methd: no run here has such a key; did you mean method?
local.lr.x=1 => local.lr.x: no run here has such a key; did you mean local.lr?
method=fedopb => method=fedopb: no such run here; there are: fedavg, fedobp, lg_fedavg; did you mean fedobp?
local.lr=0.2 => local.lr=0.2: no such run here; there are: 0.01, 0.1; did you mean 0.1?
method= => method=: no such run here; there are: fedavg, fedobp, lg_fedavg
clients=10 method=fedobp => no run here is all of clients=10 method=fedobp
"""


def test_what_no_run_is() -> None:
    for filters, message in read_cases(REFUSED):
        words = filters.split()
        assert one_line(lambda words=words: apply_filters(CONFIGS, words, NAMED)) == message
    assert apply_filters([], ["method=fedavg"], []) == []


def test_filters_and_paths() -> None:
    assert is_filter("method=a")
    assert is_filter("local.lr=0.1")
    assert not any(map(is_filter, ("./method=a", "out/method=a", "outputs")))


def test_one_dead_run_has_one_state_everywhere(tmp_path: Path, capsys: Any) -> None:
    """Of a killed run, and of directories that are half written, wherever they are told of."""
    write_run(tmp_path / "whole", method="fedper")
    killed = write_run(tmp_path / "killed", {2: 1.0}, "running", 2, seed=1, method="fedper")
    (write_run(tmp_path / "a") / "config.yaml").unlink()
    path = write_run(tmp_path / "b", seed=5) / "summary.json"
    path.write_text(path.read_text()[:40])
    for folder in tmp_path.iterdir():
        age(folder, HOUR)
    rows = json.loads(read_output(capsys, "ls", tmp_path, "--format", "json")[0])
    statuses = {row["path"]: row["status"] for row in rows}
    assert statuses.pop(str(killed)) == "interrupted"
    assert sorted(statuses.values()) == ["broken", "broken", "finished"]
    out, err = read_output(capsys, "tables", tmp_path, "method=fedper")
    assert "1 finished, 1 interrupted left out" in out
    for name, reason in (
        ("a", "no config.yaml; the run never"),
        ("b", "summary.json cannot be read: JSONDecodeError"),
    ):
        assert f"skipped {tmp_path / name}: broken: {reason}" in err
    out, err = read_output(capsys, "clean", tmp_path, "--status", "interrupted,broken", code=2)
    assert "interrupted 2/4  " in out
    assert f"left {tmp_path / 'b'}, broken: nothing says that fedpfl wrote it" in err
    message = "no such run here; there are: fedper; did you mean fedper?"
    assert read_refusal(capsys, "clean", tmp_path, "method=fedpre") == f"method=fedpre: {message}"
