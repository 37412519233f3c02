"""Filters of runs, alone and in every command that takes them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from fedpfl.ground.errors import FedpflError
from fedpfl.report import runs
from fedpfl.report.__main__ import COMMANDS, main
from fedpfl.report.filters import apply_filters, is_filter
from tests.conftest import read_cases
from tests.report.test_listing import HOUR, age
from tests.report.test_report import write_run

CONFIGS: list[dict[str, Any]] = [
    {
        "method": {"name": "fedavg"},
        "local": {"lr": 0.1, "betas": [0.9, 0.999]},
        "clients": 5,
        "note": None,
    },
    {
        "method": {"name": "fedobp", "q": 0.98},
        "local": {"lr": 0.01, "optimizer": "adam"},
        "clients": 5,
    },
    {"method": {"name": "lg_fedavg"}, "local": {"lr": 0.01}, "clients": 10, "deep": True},
]
NAMED = [{"method": name} for name in ("FedAvg", "FedOBP", "LG-FedAvg")]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ("", "012"),
        *(
            ("method=fedobp", "1"),
            ("method=FedOBP", "1"),
            ("method=LG-FedAvg", "2"),
            ("method.name=fedavg", "0"),
        ),
        *(
            ("method=fedobp,fedavg", "01"),
            ("method=fedobp method=fedavg", "01"),
            ("clients=5 local.lr=0.01", "1"),
        ),
        *(
            ("local.lr=0.10", "0"),
            ("local.lr=1e-2", "12"),
            ("clients=10.0", "2"),
            ("method.q=.98", "1"),
        ),
        *(
            ("local.optimizer=sgd", "02"),
            ("local.betas=[0.9,0.999]", "012"),
            ("deep=true", "2"),
            ("note=null", "0"),
        ),
    ],
)
def test_what_is_let_through(filters: str, kept: str) -> None:
    found = apply_filters(CONFIGS, filters.split(), NAMED)
    assert "".join(str(place) for place, own in enumerate(found) if own) == kept


@pytest.mark.parametrize(
    ("filters", "message"),
    read_cases(
        """
        methd=fedobp => methd: no run here has such a key; did you mean method?
        lr=0.1 => lr: no run here has such a key; did you mean local.lr?
        local.lr.x=1 => local.lr.x: no run here has such a key; did you mean local.lr?
        local=1 => local is a group; name a key of it: local.lr, local.betas
        method=fedopb => method=fedopb: no such run here; there are: fedavg, fedobp, lg_fedavg; did you mean fedobp?
        method=fedavg,ditto => method=ditto: no such run here; there are: fedavg, fedobp, lg_fedavg
        local.lr=0.2 => local.lr=0.2: no such run here; there are: 0.01, 0.1
        method= => method=: no such run here; there are: fedavg, fedobp, lg_fedavg
        clients=10 method=fedobp => no run here is all of clients=10 method=fedobp
        """
    ),
)
def test_what_no_run_is(filters: str, message: str) -> None:
    with pytest.raises(FedpflError) as refused:
        apply_filters(CONFIGS, filters.split(), NAMED)
    assert str(refused.value) == message


def test_nothing_is_nothing() -> None:
    assert apply_filters([], ["method=fedavg"], []) == []


@pytest.mark.parametrize(
    ("word", "filters"),
    [
        ("method=a", True),
        ("local.lr=0.1", True),
        ("./method=a", False),
        ("out/method=a", False),
        ("outputs", False),
    ],
)
def test_filters_and_paths(word: str, filters: bool) -> None:
    assert is_filter(word) == filters


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two experiments; the directory of a killed run and two that nobody can read."""
    write_run(tmp_path / "one" / "fedavg" / "k" / "seed0")
    write_run(tmp_path / "one" / "fedper" / "k" / "seed0", {4: 90.0}, method="fedper")
    digits: dict[str, Any] = {"dataset": {"name": "digits"}, "method": {"name": "fedper"}}
    write_run(tmp_path / "two" / "fedper" / "k" / "seed0", **digits)
    write_run(tmp_path / "two" / "fedper" / "k" / "seed1", {2: 1.0}, "running", 2, seed=1, **digits)
    (write_run(tmp_path / "broken" / "a") / "config.yaml").unlink()
    path = write_run(tmp_path / "broken" / "b", seed=5) / "summary.json"
    path.write_text(path.read_text()[:40])
    for folder in (*tmp_path.glob("*/*/k/*"), *(tmp_path / "broken").iterdir()):
        age(folder, HOUR)
    return tmp_path


def shown(capsys: pytest.CaptureFixture, *words: str | Path, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    return capsys.readouterr()


def test_every_command_takes_filters(root: Path, capsys: pytest.CaptureFixture) -> None:
    rows = csv.DictReader(
        io.StringIO(shown(capsys, "tables", "method=fedper", root, "--format", "csv")[0])
    )
    assert [(row["dataset"], row["method"]) for row in rows] == [
        ("Digits", "FedPer"),
        ("FMNIST", "FedPer"),
    ]
    words = ("ls", "--format", "json", root, "--sort", "path", "method=fedper", "dataset=digits")
    assert [Path(row["path"]).name for row in json.loads(shown(capsys, *words)[0])] == [
        "seed0",
        "seed1",
    ]
    shown(capsys, "html", root, "method=fedavg")
    assert [path.name for path in (root / "report").glob("*.html") if path.stem != "index"] == [
        "one.html"
    ]
    assert "FedPer" not in (root / "report" / "one.html").read_text()
    assert "\nFedAvg " in shown(capsys, "paper", "all_methods", root / "one")[0]
    assert (
        "\nFedAvg " not in shown(capsys, "paper", "all_methods", root / "one", "method=fedper")[0]
    )
    out = shown(capsys, "compare", root / "one", "seed=0")[0]
    assert "A  FedAvg" in out
    assert "B  FedPer" in out
    err = shown(capsys, "compare", root, "method=fedper", "dataset=digits", code=2)[1]
    assert (
        f"fedpfl: {root} holds one configuration alone, FedPer on Digits, Dir(0.1); name two paths"
        in err
    )
    err = shown(capsys, "compare", root, code=2)[1]
    assert (
        f"fedpfl: {root} holds 3 configurations, name two of them, or choose two by filters: FedPer"
        " on Digits" in err
    )
    assert "compare takes two paths" in shown(capsys, "compare", "one", "two", "three", code=2)[1]
    for command in ("tables", "figures", "html", "ls", "compare", "paper", "clean"):
        out, err = shown(capsys, command, root, "method=fedpre", code=2)
        assert out == ""
        assert err.endswith(
            "fedpfl: method=fedpre: no such run here; there are: fedavg, fedper; did you mean fedper?\n"
        )
    found = runs(root, where=["method=fedper"], warn=lambda _: None)
    assert [run.path.parts[-4] for run in found] == ["one", "two", "two"]


def test_clean_removes_only_what_is_let_through(root: Path, capsys: pytest.CaptureFixture) -> None:
    for method in ("fedavg", "fedper"):
        age(write_run(root / f"one/{method}/k/seed1", status="failed", seed=1, method=method), HOUR)
    shown(capsys, "clean", root / "one", "method=fedavg", "--yes")
    assert not (root / "one/fedavg/k/seed1").exists()
    assert (root / "one/fedper/k/seed1").exists()


def test_one_dead_run_has_one_state_everywhere(root: Path, capsys: pytest.CaptureFixture) -> None:
    """Of a killed run, and of directories that are half written, wherever they are told of."""
    listed = {
        row["path"]: row["status"]
        for row in json.loads(shown(capsys, "ls", root, "--format", "json")[0])
    }
    killed = root / "two" / "fedper" / "k" / "seed1"
    assert listed.pop(str(killed)) == "interrupted"
    assert sorted(listed.values()) == ["broken", "broken", "finished", "finished", "finished"]
    out, err = shown(capsys, "tables", root)
    assert "1 finished, 1 interrupted left out" in out
    shown(capsys, "html", root)
    assert ">interrupted</span>" in (root / "report" / "two.html").read_text()
    assert (
        shown(capsys, "compare", root / "two", root / "one/fedavg")[0].count(
            "1 interrupted left out"
        )
        == 2
    )
    for name, reason in (
        ("a", "no config.yaml; the run never"),
        ("b", "summary.json cannot be read: JSONDecodeError"),
    ):
        assert f"skipped {root / 'broken' / name}: broken: {reason}" in err
        assert (
            f"{root / 'broken' / name}: broken: {reason}"
            in (root / "report" / "index.html").read_text()
        )
    out, err = shown(capsys, "clean", root, "--status", "interrupted,broken", code=2)
    assert "interrupted 2/4  " in out
    assert f"left {root / 'broken' / 'b'}, broken: nothing says that fedpfl wrote it" in err


@pytest.mark.parametrize("command", [name for name in COMMANDS if name])
def test_help(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert f"Example: python -m fedpfl.report {command} " in text
    assert "partition.alpha=0.1" in text
    with pytest.raises(SystemExit):
        main(["--help"])
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {command} ")
    ]
    assert 20 < len(line) <= 80
