"""No wrong number in silence: mixed settings, damaged and hostile run directories."""

import re
from pathlib import Path

import pytest
import yaml

from fedpfl.report.__main__ import main
from tests.report.test_report import (
    add_columns,
    amend,
    config,
    list_records,
    read_csv,
    read_output,
    write_run,
)

EVIL = "\x1b[2J\x1b]0;owned\x07\x00\nmean‮|$x_1^{$ <b>&"


def table(capsys: pytest.CaptureFixture, root: Path, *options: str) -> list[dict[str, str]]:
    return read_csv(read_output(capsys, "tables", root, "--format", "csv", *options)[0])


def text_of(out: str) -> str:
    return " ".join(out.split())


# Mixed settings


def test_what_labels_leave_unsaid_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Within a data set and partition by most of its rows, between them by each."""
    for number, method in enumerate(("fedavg", "fedper", "fedrep")):
        write_run(tmp_path / str(number), method=method, local={"optimizer": "sgd"})
    adam = {"local": {"optimizer": "adam", "lr": 0.1}, "partition": {"seed": 7}}
    write_run(tmp_path / "adam", **adam)
    for seed in (0, 1):
        far = {"partition": {"alpha": 0.5}, "clients": 10, "rounds": 8}
        write_run(tmp_path / f"far{seed}", seed=seed, **far)
    out = read_output(capsys, "tables", tmp_path)[0]
    assert "FedAvg (lr=0.1, optimizer=adam, partition.seed=7) " in out
    out = " ".join(out.split())
    near, far = "(FMNIST, Dir(0.1))", "(FMNIST, Dir(0.5))"
    assert f" Unless a row says otherwise: clients=100 {near}, clients=10 {far}, lr=0.01, " in out
    assert f"optimizer=sgd, partition.seed not set, rounds=4 {near}, rounds=8 {far}." in out


def test_runs_on_other_data_are_no_seeds_of_one_another(tmp_path, capsys):
    for seed, fingerprint in enumerate(("aa11", "aa11", "bb22")):
        amend(write_run(tmp_path / str(seed), {4: 60.0 + 10 * seed}, seed=seed), read=fingerprint)
    rows = table(capsys, tmp_path)
    told = [(row["method"], row["accuracy"], row["seed_list"]) for row in rows]
    assert told == [("FedAvg (data=aa11)", "65.0", "0 1"), ("FedAvg (data=bb22)", "80.0", "2")]
    write_run(tmp_path / "3", {4: 90.0}, seed=3)  # which did not record it
    assert [row["seeds"] for row in table(capsys, tmp_path)] == ["1", "2", "1"]
    (tmp_path / "2/summary.json").unlink()
    assert [row["seed_list"] for row in table(capsys, tmp_path)] == ["0 1 3"]


# Traffic


def test_traffic_is_divided_by_those_that_took_part(tmp_path, capsys):
    add_columns(write_run(tmp_path / "a"), participants=[10, 6, 3, 1])
    write_run(tmp_path / "b", method="fedper")
    found = {row["method"]: float(row["values_down"]) for row in table(capsys, tmp_path)}
    assert found == {"FedAvg": 28_000 / 20, "FedPer": 28_000 / 40}
    listed = list_records(tmp_path)
    # One client in the last round, and ten
    assert [row["bits"] for row in listed] == [512_000.0, 51_200.0]


# Text


def test_no_command_prints_what_a_terminal_obeys(tmp_path, capsys):
    root, runs = tmp_path, [tmp_path / f"run{number}\x1b[31m\nred" for number in (0, 1)]
    for run, name in zip(runs, (f"fedavg{EVIL}", "fedper"), strict=True):
        write_run(run)
        values = config(method=name, dataset=f"set{EVIL}", note=EVIL)
        (run / "config.yaml").write_text(yaml.safe_dump(values))
        amend(run, error=EVIL, environment={"cpu": EVIL})
    amend(write_run(root / "failed\x1b[31m", status="failed", seed=3), error=EVIL)
    (write_run(root / "broken\x1b[31m\n") / "summary.json").write_text("{")
    commands = [["compare", *runs], ["compare", root, root], ["clean", root]]
    commands += [["paper", "fedobp/table3", root], ["tables", root / "no\x1b[31mwhere"]]
    commands += [["tables", root, "--format", form] for form in ("markdown", "latex", "csv")]
    commands += [["ls", root, "--format", "csv"], ["tables", root], ["ls", root]]
    commands += [["compare", *runs, "--format", form] for form in ("csv", "markdown")]
    for words in commands:
        capsys.readouterr()
        main([*map(str, words)])
        out, err = capsys.readouterr()
        plain = r"\n\x20-\x7e\u00a0-\u024f\u0394\u2013-\u2022\u2026\u2500-\u257f"
        strange = {*re.findall(f"[^{plain}]", out + err)}
        assert not strange, (words, strange)


# Numbers that are not finite


def test_an_evaluation_without_an_accuracy_is_empty_with_a_note(tmp_path, capsys):
    """As the last one is here, where a model was not finite."""
    run = write_run(tmp_path / "a", {2: 80.0}, status="running", reached=3)
    rows = (run / "rounds.csv").read_text()
    (run / "rounds.csv").write_text(f"{rows}4,2.0\n")
    add_columns(run, eval_seconds=[None, 1.5, None, 1.5])
    amend(run, status="finished")
    (row,) = table(capsys, tmp_path)
    assert (row["accuracy"], row["round"]) == ("", "4")  # not the 80 of round 2
    note = "Empty, as a model was not finite, a client did not answer or none has test samples: "
    note += "FedAvg on FMNIST, Dir(0.1) (seed 0, round 4)."
    assert note in text_of(read_output(capsys, "tables", tmp_path)[0])
    (listed,) = list_records(tmp_path)
    assert (listed["accuracy"], listed["evaluated"]) == (None, 4)
    (best,) = table(capsys, tmp_path, "--select", "best-checkpoint")
    assert (best["accuracy"], best["round"]) == ("80.0", "2")
