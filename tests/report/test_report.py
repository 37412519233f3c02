"""Tables and figures from synthetic run directories, against values computed by hand."""

import csv
import io
import itertools
import json
import resource
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from fedpfl.ground import answer
from fedpfl.ground.identity import identity
from fedpfl.record import digests
from fedpfl.report import figures, groups, runs
from fedpfl.report.__main__ import main
from fedpfl.report.load import read_run
from fedpfl.report.render import render
from fedpfl.report.tables import accuracy_table
from tests.conftest import keep_quick

PNG = b"\x89PNG\r\n\x1a\n"


def config(**changes: Any) -> dict[str, Any]:
    """Return a configuration; a text is the name of a choice, a pair has a partition's alpha too."""
    local = {"epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.7, "weight_decay": 0.0}
    values: dict[str, Any] = {"seed": 0, "rounds": 4, "clients": 100, "participation": 0.1}
    values |= {"local": local, "eval": {"every": 2, "finetune_epochs": 5}, "device": "cpu"}
    values |= {"dataset": {"name": "fmnist"}, "partition": {"name": "dirichlet", "alpha": 0.1}}
    values |= {"model": {"name": "cnn4"}, "method": {"name": "fedavg"}, "logger": {"name": "none"}}
    values |= {"engine": {"backend": "loop", "workers": 0, "precision": "fp32"}}
    for key, value in changes.items():
        if isinstance(value, str) and isinstance(values.get(key, {}), dict) and key != "data_dir":
            value = {"name": value}
        elif isinstance(value, tuple):
            value = dict(zip(("name", "alpha"), value, strict=True))
        values[key] = values[key] | value if isinstance(values.get(key), dict) else value
    return values


def amend(folder: Path, **fields: Any) -> Path:
    """Change a summary as if the run had written it."""
    path = folder / "summary.json"
    told = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(told | {"digest": digests.summary_digest(told)}))
    return folder


def write_run(
    folder: Path,
    accuracy: dict[int, float] | None = None,
    status: str = "finished",
    reached: int = 4,
    **changes: Any,
) -> Path:
    """Four rounds of ten clients; accuracy by round, pooled one more, fine-tuned two."""
    accuracy = {2: 80.0, 4: 70.0} if accuracy is None else accuracy
    folder.mkdir(parents=True)
    values = config(**changes)
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    name = f"{identity(values)}-seed{values['seed']}"
    told = {"identity": name, "status": status, "cohort": 10, "parameters": 1000}
    (folder / "summary.json").write_text(json.dumps(told))
    rows = []
    for number in range(1, reached + 1):
        row: dict[str, Any] = {"round": number, "seconds": [1.0, 9.0, 2.0, 2.0][(number - 1) % 4]}
        row |= {"cohort_before": 50.0 + number, "cohort_after": 60.0 + number}
        got = accuracy.get(number)
        more = {"accuracy": 0, "accuracy_pooled": 1, "accuracy_worst10": -20}
        more |= {"ft_accuracy": 2, "ft_accuracy_pooled": 3}
        row |= {key: got and got + value for key, value in more.items()}
        row |= {"accuracy_std": got and 5.0, "loss": got and 0.5}
        # Round 1 sends everything down; 10 clients of 1000 values.
        row |= {"values_down": 10_000 if number == 1 else 6_000, "values_up": 10_000}
        row |= {"bits_down": 32 * row["values_down"], "bits_up": 320_000}
        rows.append(row)
    with open(folder / "rounds.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "clients.csv").write_text(
        "client,train,test,label_0,accuracy,ft_accuracy\n0,30,10,40,70.0,72.0\n"
    )
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two seeds of FedOBP and one of FedAvg."""
    obp = {"name": "fedobp", "q": 0.99993, "norm": "global", "score": "obp"}
    write_run(tmp_path / "a" / "fedobp" / "k1" / "seed0", {2: 96.0, 4: 94.0}, method=obp)
    write_run(tmp_path / "a" / "fedobp" / "k1" / "seed1", {2: 91.0, 4: 96.0}, method=obp, seed=1)
    write_run(tmp_path / "a" / "fedavg" / "k2" / "seed0", {2: 80.0, 4: 87.0})
    return tmp_path


def add_columns(folder: Path, table: str = "rounds", **columns: Any) -> Path:
    """Put columns into a run's rounds or clients, as values or what makes them of the table."""
    frame = pd.read_csv(folder / f"{table}.csv").assign(**columns)
    frame.to_csv(folder / f"{table}.csv", index=False)
    return folder


def read_output(capsys: Any, *words: str | Path, code: int = 0) -> tuple[str, str]:
    """Return what a command prints on both streams, whatever was printed before."""
    capsys.readouterr()
    assert main([*map(str, words)]) == code
    return capsys.readouterr()


def list_records(*words: str | Path) -> list[dict[str, Any]]:
    """Return the runs that `ls --json` answers with."""
    answer._facts.clear()
    assert main(["ls", *map(str, words)]) == 0
    return answer.make_plain(answer._facts["runs"])


def read_refusal(capsys: Any, *words: str | Path) -> str:
    """Return the one line by which a command is refused."""
    out, err = read_output(capsys, *words, code=2)
    assert (out, err.count("\n")) == ("", 1)
    return err.removeprefix("fedpfl: ").removesuffix("\n")


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def row_of(table: Any, method: str) -> dict[str, Any]:
    rows = table.frame[table.frame["method"] == method].to_dict("records")
    assert len(rows) == 1
    return rows[0]


def test_an_upper_line_is_said_and_never_the_best(root: Path) -> None:
    write_run(root / "a" / "centralized", {4: 99.0}, method="centralized")
    table = accuracy_table(runs(root), chosen=["accuracy"])
    assert {row[2].value: row[3].mark for row in table.rows} == {
        "FedAvg": "second",
        "FedOBP": "best",
        "Centralized (upper line)": "",
    }
    assert any(note.startswith("An upper line, neither ranked nor marked") for note in table.notes)


def test_labels_of_partitions_methods_and_data_sets(tmp_path: Path) -> None:
    obp = {"name": "fedobp", "q": 0.9}
    published = {"score": "obp_as_published", "ema": 0.3}
    for number, (group, values, label) in enumerate(
        [
            ("partition", {"name": "dirichlet", "alpha": 0.5, "min_samples": 10}, "Dir(0.5)"),
            ("partition", {"name": "published", "alpha": 0.1}, "Dir(0.1) published"),
            ("partition", {"name": "iid", "alpha": None}, "IID"),
            ("method", obp | {"score": "obp", "ema": 0.0}, "FedOBP (q=0.9)"),
            ("method", obp | published, "FedOBP (q=0.9, score=obp_as_published, ema=0.3)"),
            ("dataset", {"name": "organamnist", "mean": [118.7546]}, "OrganAMNIST as published"),
            ("dataset", {"name": "npz", "path": "somewhere/scans.npz", "mean": None}, "scans"),
        ]
    ):
        # The group is composed for every method; only the value in `method` counts.
        quantile = {"q": "paper", "table": {}}
        path = write_run(tmp_path / str(number), **{group: values}, quantile=quantile)
        assert getattr(read_run(path), group) == label


def test_best_checkpoint_only_when_asked_for(root: Path) -> None:
    row = row_of(accuracy_table(runs(root), "best-checkpoint"), "FedOBP")
    assert row["accuracy"] == 96.0  # of 96 (round 2) and 96 (round 4)
    assert row["accuracy_seed_std"] == 0.0
    assert row["round"] == "2–4"
    row = row_of(accuracy_table(runs(root), "best-checkpoint", every=4), "FedOBP")
    assert (row["accuracy"], row["round"]) == (95.0, "4")


def test_configurations_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    for norm, seed in itertools.product(("global", "layer"), (0, 1)):
        method = {"name": "fedobp", "q": 0.5, "norm": norm, "score": "obp"}
        write_run(tmp_path / f"{norm}{seed}", method=method, seed=seed)
    write_run(tmp_path / "lr", local={"lr": 0.1})
    write_run(tmp_path / "base")
    labels = {group.method: len(group.runs) for group in groups(runs(tmp_path))}
    held = write_run(tmp_path / "held", validation=0.1, method="fedper")
    two = {group.method for group in groups(runs(tmp_path / "base", held))}
    assert two == {"FedAvg", "FedPer (validation=0.1)"}, (
        "of two the one that lacks a key says nothing"
    )
    alike = {"FedAvg": 1, "FedAvg (lr=0.1)": 1, "FedOBP (norm=global)": 2, "FedOBP (norm=layer)": 2}
    assert labels == alike


def test_a_copy_of_a_run_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", {2: 60.0}, status="running", reached=3)
    write_run(tmp_path / "b", {2: 60.0, 4: 65.0}, status="running")
    (run,) = runs(tmp_path)
    assert run.path.name == "b"
    told = f"skipped {tmp_path / 'a'}: same configuration and seed as {tmp_path / 'b'}\n"
    assert capsys.readouterr().err == told


def test_unfinished_runs_are_never_averaged_with_finished_ones(tmp_path: Path) -> None:
    write_run(tmp_path / "0", {4: 70.0})
    write_run(tmp_path / "1", {2: 10.0}, status="running", reached=3, seed=1)
    write_run(tmp_path / "2", {2: 1.0}, status="diverged", reached=2, seed=2)
    row = row_of(accuracy_table(runs(tmp_path)), "FedAvg")
    assert (row["accuracy"], row["seeds"]) == (70.0, 1)
    assert row["status"] == "1 finished, 1 running, 1 diverged left out"
    row = row_of(accuracy_table(runs(tmp_path / "1")), "FedAvg")
    assert (row["status"], row["round"], row["accuracy"]) == ("running 3/4", "2", 10.0)
    write_run(tmp_path / "3", {2: 20.0, 4: 90.0}, status="running", seed=3)
    row = row_of(accuracy_table(runs(tmp_path / "1", tmp_path / "3")), "FedAvg")
    assert (row["round"], row["accuracy"]) == ("2", 15.0), "as far as all seeds came"


def test_a_cell_is_empty_where_a_seed_lacks_the_value(tmp_path: Path) -> None:
    write_run(tmp_path / "0", {2: 60.0, 4: 70.0})
    path = write_run(tmp_path / "1", {2: 60.0, 4: 70.0}, seed=1) / "rounds.csv"
    # Not fine-tuned after the last round
    path.write_text(path.read_text().replace("72.0,73.0", ","))
    row = row_of(accuracy_table(runs(tmp_path)), "FedAvg")
    assert row["accuracy"] == 70.0
    assert row["ft_accuracy"] != row["ft_accuracy"]


def test_a_round_written_twice_counts_as_last_written(root: Path) -> None:
    path = root / "a/fedavg/k2/seed0/rounds.csv"
    last = path.read_text().splitlines()[-1]
    path.write_text(path.read_text() + last.replace("87.0", "88.0") + "\n")
    rounds = read_run(path.parent).rounds
    assert rounds["round"].tolist() == [1, 2, 3, 4]
    assert rounds["accuracy"].iloc[-1] == 88.0


def test_what_the_table_shows(root: Path) -> None:
    lines = render(accuracy_table(runs(root)), "markdown").splitlines()
    heads = "| data set | partition | method | before mean | before pooled | before worst 10% |"
    assert lines[0].startswith(heads)
    shown = " | ".join(f"<u>{value}.00</u>" for value in (87, 88, 67, 89, 90))
    assert lines[2].startswith(f"| FMNIST | Dir(0.1) | FedAvg | {shown} | 700 | 1k |")
    assert "| FedOBP | **95.00(1.41)** | **96.00(1.41)** |" in lines[3]
    assert "| 700 | 1k | 22.4k | 32k | 2 | 4 | 2 | finished |" in lines[3]


def test_chosen_columns_in_their_order(root: Path) -> None:
    chosen = ["ft_accuracy_pooled", "loss", "bits_up", "accuracy", "hours"]
    table = accuracy_table(runs(root), chosen=chosen)
    row = row_of(table, "FedOBP")
    with_spread = [name for key in chosen for name in (key, f"{key}_seed_std")]
    assert [*row] == ["dataset", "partition", "method", *with_spread, "seed_list"]
    assert [row[key] for key in chosen[:4]] == [98.0, 0.5, 32_000.0, 95.0]
    lines = render(table, "markdown").splitlines()
    assert lines[0].endswith("| method | fine-tuned pooled | before loss | bits up | before mean |")
    assert lines[3].endswith("| FedOBP | **98.00(1.41)** | 0.5 | 32k | **95.00(1.41)** |")


def test_curves_of_any_metric_over_what_was_spent(root, monkeypatch):
    drawn: list[Any] = []

    def panels(shown: Any, path: Path, draw: Any) -> list[Path]:
        ax = Figure().subplots()
        for members in shown.values():
            draw(ax, members)
        drawn.append((path.name, ax.get_xlabel(), {one.get_label(): one for one in ax.get_lines()}))
        return []

    monkeypatch.setattr(figures, "draw_panels", panels)
    words = ["figures", str(root), "--kind", "curves", "--metric", "accuracy_worst10"]
    # 4 bytes of 36,000 and 68,000 values
    for over, axis, label, at in (
        ("round", "", "round", [2, 4]),
        ("both", "over_both_", "GB down and up, all clients", [0.000144, 0.000272]),
        ("hours", "over_hours_", "hours of training", [10 / 3600, 14 / 3600]),
    ):
        assert main([*words, "--over", over]) == 0
        name, shown_label, lines = drawn.pop()
        assert (name, shown_label) == (f"accuracy_worst10_{axis}fmnist_dir_0.1", label)
        assert lines["FedOBP"].get_xdata() == pytest.approx(at)
        assert lines["FedOBP"].get_ydata() == pytest.approx([73.5, 75.0])


def test_figures_are_written(root: Path, tmp_path: Path, real_figures: None) -> None:
    found = runs(root)
    written = figures.accuracy_figure(found, tmp_path / "out" / "accuracy_0.1")
    assert [path.name for path in written] == ["accuracy_0.1.png", "accuracy_0.1.pdf"]
    for path in written:
        data = path.read_bytes()
        assert len(data) > 5000
        assert data.startswith(PNG if path.suffix == ".png" else b"%PDF")
    again = figures.accuracy_figure(found, tmp_path / "again" / "accuracy_0.1")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in written]


def test_command_prints_the_table_and_writes_figures_and_every_format(root, capsys):
    assert main([str(root)]) == 0
    shown = capsys.readouterr()
    assert "FedOBP" in shown.out
    for suffix in ("png", "pdf"):
        assert (root / "figures" / f"accuracy_fmnist_dir_0.1.{suffix}").is_file()
    reference = root / "published.csv"
    reference.write_text("method,round,accuracy_before,accuracy_after\nfedavg,1,50,60\n")
    out = root / "out"
    words = ["tables", str(root), "--out", str(out), "--select", "best-checkpoint", "--every", "2"]
    assert main([*words, "--reference", str(reference)]) == 0
    names = itertools.product(("accuracy", "curves"), (".md", ".csv", ".tex"))
    assert {path.name for path in out.iterdir()} == {*map("".join, names)}


@pytest.mark.parametrize("command", keep_quick(["tables", "figures", "html", "ranks"], 2))
def test_what_cannot_be_written_is_one_line_and_nothing_is_half_written(
    tmp_path, command, capsys, real_figures
):
    for method, dataset in itertools.product(("fedavg", "fedper", "fedrep"), ("fmnist", "digits")):
        write_run(tmp_path / "runs" / method / dataset, method=method, dataset=dataset)
    (tmp_path / "file").touch()
    # A disk is as full for 100 bytes
    for out, limit in (("file/below", resource.RLIM_INFINITY), ("out", 100)):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            assert main([command, str(tmp_path / "runs"), "--out", str(tmp_path / out)]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"fedpfl: cannot write {tmp_path / out}/")
        assert line.endswith("or choose another with --out")
    assert not [*(tmp_path / "out").iterdir()]


def test_no_runs_is_one_line_and_exit_code_2(tmp_path, capsys):
    for command, (folder, message) in itertools.product(
        ("tables", "figures", "html", None),
        ((tmp_path, "no runs found below"), (tmp_path / "absent", "no such directory")),
    ):
        assert read_refusal(capsys, *filter(None, [command]), folder).startswith(message)
    assert [*tmp_path.iterdir()] == []


def test_where_clients_are_mostly_one_of_two_classes_a_note_says_how_far(root: Path) -> None:
    head = "client,train,test,label_0,label_1{},accuracy\n"
    for more, counts, share in (
        ("", ("9,1", "1,3"), "82.5%"),
        ("", ("5,5", "1,3"), None),
        (",label_2", ("9,1,0", "1,3,0"), None),
    ):
        rows = [f"{client},30,10,{pair},70\n" for client, pair in enumerate(counts)]
        for path in root.glob("a/*/*/*/clients.csv"):
            path.write_text("".join([head.format(more), *rows]))
        notes = [note for note in accuracy_table(runs(root)).notes if "larger one" in note]
        assert len(notes) == bool(share)
        assert all(f"larger one is {share} of its samples" in note for note in notes)
