"""With --json a command prints one object, as the schema has it, and nothing else on stdout."""

import json
import logging
import math
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpfl import check, train
from fedpfl.ground import answer
from fedpfl.report import __main__ as report
from tests.command import TINY, call_main, read_summary
from tests.conftest import ROOT, read_cases

SCHEMA = json.loads((ROOT / "fedpfl/ground/answer.schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": float | int}
MAINS = {"train": train.main, "check": check.main, "report": report.main}


def find_faults(value: Any, schema: dict[str, Any], place: str = "answer") -> list[str]:
    """What of a value is not as the keywords of JSON Schema that the file uses have it."""
    faults = []
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        faults.append(f"{place} is no {schema['type']}: {value!r}")
    if "enum" in schema and value not in schema["enum"]:
        faults.append(f"{place} is {value!r}")
    if isinstance(value, list):
        for number, part in enumerate(value):
            faults += find_faults(part, schema.get("items", {}), f"{place}[{number}]")
    if isinstance(value, dict):
        parts = schema.get("properties", {})
        faults += [f"{place}.{key} lacks" for key in schema.get("required", ()) if key not in value]
        for key, part in value.items():
            if key in parts:
                faults += find_faults(part, parts[key], f"{place}.{key}")
            elif not schema.get("additionalProperties", True):
                faults.append(f"{place}.{key} is in no schema")
    return faults


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """The answer of a command line, which keeps to the schema."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *words: str) -> dict[str, Any]:
        handlers = logging.getLogger().handlers[:]
        try:
            result = call_main(partial(answer.run_command, MAINS[name]), *words, "--json")
        finally:
            logging.captureWarnings(False)
            logging.getLogger().handlers[:] = handlers
        told = json.loads(result.out.splitlines()[-1])
        assert find_faults(told, SCHEMA) == []
        assert told["status"] == result.code
        assert ("error" in told) == (result.code != 0)
        return told

    return run


REFUSED = """
train local.lrr=1 => local.lrr is not a key here; did you mean local.lr?
train --dry-run dataset=nothing => dataset must be one of
report ls nowhere => no such directory: nowhere
report tables --bogus => --bogus is no option
check nothing => nothing is no file
"""


def test_mistakes_are_answered_as_json(ask):
    for line, message in read_cases(REFUSED):
        told = ask(*shlex.split(line))
        assert told["status"] == told["error"]["status"] == 2
        assert message in told["error"]["message"]
        assert {*told} == {"fedpfl", "status", "error"}


def test_runs_and_their_tables_are_answered_as_json(ask, tmp_path: Path):
    dry = ask("train", "--dry-run", *TINY, "method=fedper")["runs"]
    (played,) = ask("train", *TINY, "method=fedper")["runs"]
    assert [run["identity"] for run in dry] == [played["identity"].partition("-")[0]]
    assert dry[0]["last"]["values_up"] > 0
    summary = read_summary(Path(played["path"]))
    assert {**played, "digest": summary["digest"]} == {"path": played["path"], **summary}
    assert ask("train", *TINY, "method=fedper")["runs"] == [played]  # finished before

    (listed,) = ask("report", "ls")["runs"]
    (row,) = ask("report", "tables")["tables"][0]["rows"]
    last = summary["last"]["accuracy"]
    assert listed["accuracy"] == row["accuracy"] == last  # every digit
    assert row["accuracy_seed_std"] is None
    for seed in (1, 2):
        for method in ("fedavg", "local_only"):
            ask("train", *TINY, f"method={method}", f"seed={seed}")
    claims = ask("report", "claim", "fedavg > local_only")["tables"][0]
    assert "needs 1 more seed" in claims["rows"][0]["verdict"]
    assert claims["commands"]
    written = ask("report", "tables", "--out", "here", "--format", "csv")
    assert written["files"] == ["here/accuracy.csv"]


def test_promises_are_answered_as_json(ask, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from fedpfl.data.partition import Partition\n"
        "def mine(y, clients, seed):\n"
        "    return Partition(*[tuple([client] for client in range(clients))] * 2)\n"
        'PARTITIONS = {"mine": mine}\n'
    )
    told = ask("check", "mine.py", "--quick")
    (subject,) = told["subjects"]
    assert (told["status"], subject["subject"]) == (1, "partition=mine")
    (promise,) = subject["promises"]
    assert promise["verdict"] == "WRONG"
    assert "no array of whole numbers" in promise["faults"][0]


def test_numbers_that_json_lacks_are_null():
    values = {"1": math.nan, "x": (np.float32(0.5), np.int64(3), math.inf), "p": Path("a")}
    assert answer.make_plain(values) == {"1": None, "x": [0.5, 3, None], "p": "a"}


def test_a_process_prints_its_answer_alone(tmp_path: Path):
    """Child processes print among what is for people."""
    script = (
        "import subprocess, sys\nfrom fedpfl.ground import answer\n"
        "def main():\n    subprocess.run(['echo', 'child'])\n    print('text')\n    return 3\n"
        "answer.run_command(main)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--json"], cwd=ROOT, capture_output=True, text=True
    )
    told = json.loads(done.stdout)
    assert told["error"]["status"] == told["status"] == done.returncode == 3
    assert done.stderr.split() == ["child", "text"]
