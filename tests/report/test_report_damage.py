"""No wrong number in silence: mixed settings, damaged and hostile run directories."""

import itertools
import json
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpfl.report.__main__ import main
from tests.conftest import keep_quick, read_cases
from tests.report.test_report import add_columns, amend, config, read_csv, read_output, write_run
from tests.runner.test_resume import start_child, wait_for_child

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
    assert max(map(len, out.partition("Test accuracy")[2].splitlines())) <= 120, "prose is wrapped"
    assert "FedAvg (lr=0.1, optimizer=adam, partition.seed=7) " in out
    out = " ".join(out.split())
    near, far = "(FMNIST, Dir(0.1))", "(FMNIST, Dir(0.5))"
    assert f" Unless a row says otherwise: clients=100 {near}, clients=10 {far}, lr=0.01, " in out
    assert f"optimizer=sgd, partition.seed not set, rounds=4 {near}, rounds=8 {far}." in out
    assert "Unless a row says otherwise: clients=100 (" in read_output(capsys, "ls", tmp_path)[0]
    chosen = ("method=fedavg", "partition.alpha=0.5")
    assert "Unless" not in read_output(capsys, "tables", tmp_path, *chosen)[0]
    # Where they run, or how fast, is no world.
    engine = {"backend": "batched", "workers": 3}
    write_run(tmp_path / "gpu", method="ditto", engine=engine, device="cuda")
    words = ("tables", tmp_path, "partition.alpha=0.1", "local.lr=0.01")
    assert "Unless" not in read_output(capsys, *words)[0]


def test_a_quantile_is_named_where_there_is_another(tmp_path, capsys):
    obp = {"name": "fedobp", "score": "obp", "norm": "global"}
    write_run(tmp_path / "a", method=obp | {"q": 0.98})
    write_run(tmp_path / "b")
    assert [row["method"] for row in table(capsys, tmp_path)] == ["FedAvg", "FedOBP"]
    write_run(tmp_path / "c", method=obp | {"q": 0.9}, dataset="digits")
    for words, labels in (
        ((), ["FedOBP (q=0.9)", "FedAvg", "FedOBP (q=0.98)"]),
        (("dataset=fmnist",), ["FedAvg", "FedOBP"]),
    ):
        assert [row["method"] for row in table(capsys, tmp_path, *words)] == labels


def test_rounds_that_were_not_played_are_told(tmp_path, capsys):
    write_run(tmp_path / "a", {4: 70.0}, rounds=400, partition="published")
    (row,) = table(capsys, tmp_path)
    assert (row["round"], row["status"]) == ("4", "finished 4/400")
    text = text_of(read_output(capsys, "paper", "fedobp/table4", tmp_path)[0])
    assert "70.00°" in text
    assert "not all planned rounds: the last evaluation that there is (finished 4/400)" in text


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


def test_seeds_that_draw_their_splits_are_one_group(tmp_path, capsys):
    for seed in range(3):
        split = {"data": f"{seed}" * 4}
        amend(write_run(tmp_path / str(seed), {4: 60.0 + 10 * seed}, seed=seed), **split)
    (row,) = table(capsys, tmp_path)
    assert (row["accuracy"], row["seed_list"]) == ("70.0", "0 1 2")
    for seed, read in enumerate(("aa11", "aa11", "bb22")):
        amend(tmp_path / str(seed), read=read)
    assert [row["seed_list"] for row in table(capsys, tmp_path)] == ["0 1", "2"]


# Traffic


def test_traffic_is_divided_by_those_that_took_part(tmp_path, capsys):
    run = write_run(tmp_path / "a")
    old = write_run(tmp_path / "b", method="fedper")
    add_columns(run, participants=[10, 6, 3, 1])
    found = {row["method"]: float(row["values_down"]) for row in table(capsys, tmp_path)}
    assert found == {"FedAvg": 28_000 / 20, "FedPer": 28_000 / 40}
    listed = json.loads(read_output(capsys, "ls", tmp_path, "--format", "json")[0])
    # One client in the last round, and ten
    assert [row["bits"] for row in listed] == [512_000.0, 51_200.0]
    compared = read_output(capsys, "compare", run, old, "--format", "csv")[0]
    (down,) = (row for row in read_csv(compared) if row["what"] == "values_down")
    assert (down["a"], down["b"]) == ("1400.0", "700.0")
    assert main(["html", str(tmp_path)]) == 0
    assert ">1.4k<" in next((tmp_path / "report").glob("*.html")).read_text()


# Hostile directories


def become(path: Path, make: Callable[[Path], Any]) -> None:
    """Put what something makes in the place of a file."""
    path.unlink()
    make(path)


# Twelve lines of aliases that are billions of values
BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
HOSTILE = r"""
an alias bomb | (run / "config.yaml").open("a").write(f"a0: &a0 [x, x]\n{BOMB}")
deep YAML | (run / "config.yaml").write_text("a: " + "[" * 5000 + "]" * 5000)
a huge number | (run / "summary.json").write_text('{"status": "finished", "cohort": 1e999}')
words for numbers | add_columns(run, accuracy="good")
a list for a method | write_config(run, method={"name": "fedavg", "ema": [1]})
a strange status | amend(run, status=["finished"])
"""
"""What it is, and how a run is made so."""


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(config() | changes))


def read_by_all(root: Path) -> None:
    """Give commands that read runs; what they print lies beside the runs."""
    with (
        (root / "out").open("w") as out,
        (root / "err").open("w") as err,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        for command in ("tables", "html", "ls"):
            print("==", main([command, str(root)]), command, file=err)


def test_a_broken_run_is_one_line_and_stops_nothing(tmp_path: Path) -> None:
    """In a child that is given up in time, for a pipe would be waited for."""
    write_run(tmp_path / "x" / "whole")
    cases = read_cases(HOSTILE, " | ")
    for seed, (name, damage) in enumerate(cases, 1):
        run = write_run(tmp_path / "x" / name.replace(" ", "_"), seed=seed)
        eval(damage, {**globals(), "run": run, "amend": amend, "os": os})
    assert wait_for_child(start_child(partial(read_by_all, tmp_path))) == 0
    out, err = ((tmp_path / name).read_text() for name in ("out", "err"))
    assert len(re.findall(r"^broken ", out, re.MULTILINE)) == len(cases)
    lines = [line for line in err.splitlines() if not line.startswith("wrote ")]
    ends = [line for line in lines if line.startswith("==")]
    assert ends == [f"== 0 {command}" for command in ("tables", "html", "ls")]
    skipped = [re.match(rf"skipped {tmp_path}/x/(\S+): .", line) for line in lines]
    told = sorted(match[1] for match in skipped if match)
    assert len(told) + len(ends) == len(lines)
    assert told == sorted(2 * [name.replace(" ", "_") for name, _ in cases])


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


STRANGE_NAMES = ("a$\\frac{$", "x" * 3000, "name\x00\x1b[31m")


@pytest.mark.parametrize(
    ("kind", "name"), keep_quick(itertools.product(("curves", "fairness"), STRANGE_NAMES))
)
def test_figures_take_any_name(kind: str, name: str, tmp_path: Path, real_figures: None) -> None:
    write_run(tmp_path / "a", method=name, dataset=name)
    write_run(tmp_path / "b", method={"name": name, "k": 1}, dataset=name)
    assert main(["figures", str(tmp_path), "--out", str(tmp_path / "out"), "--kind", kind]) == 0
    written = [*(tmp_path / "out").iterdir()]
    assert len(written) == 2
    assert all(3000 < path.stat().st_size < 400_000 for path in written)


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
    text = text_of(read_output(capsys, "paper", "fedobp/table4", tmp_path)[0])
    assert note in text
    assert "80.00" not in text
    (listed,) = json.loads(read_output(capsys, "ls", tmp_path, "--format", "json")[0])
    assert (listed["accuracy"], listed["evaluated"]) == (None, 4)
    assert main(["html", str(tmp_path)]) == 0
    page = next((tmp_path / "report").glob("*.html")).read_text()
    plain = re.sub(r"<script>.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    assert "nan" not in plain.lower()
    assert note.replace("'", "&#x27;") in page
    (best,) = table(capsys, tmp_path, "--select", "best-checkpoint")
    assert (best["accuracy"], best["round"]) == ("80.0", "2")
