"""A board of a tiny suite, and that a row that is run again is equal or is said not to be."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import yaml

from fedpfl import board, tune
from fedpfl.config import overrides, plugins
from fedpfl.methods import METHODS
from fedpfl.report.load import runs
from fedpfl.runner.search import SearchResult, search_results
from tests.command import format_override
from tests.conftest import ROOT, keep_quick, read_cases

sys.path.insert(0, str(ROOT / "scripts"))
import board as board_page

pytest.importorskip("optuna", reason="needs the extra tune")

WORDS = "clients=6 participation=0.5 rounds=2 validation=0.2 unseen=0.34 eval.every=1"
WORDS += " eval.finetune_epochs=1 eval.finetune_every=1 partition.samples_per_client=24"
WORDS += " local.epochs=1 model=mlp model.hidden=[8] checkpoint.keep=false system=simulated"
SKEWED, EVEN = ["dataset=digits", "partition.alpha=0.1"], ["dataset=digits", "partition=iid"]
SUITE = {"method": "all", "trials": 2, "seeds": 2, "settings": {"skewed": SKEWED, "even": EVEN}}
MADE_WITH = ("trials=1", "seeds=1", "rounds=1")
SUITE["words"] = [*WORDS.split(), "system.profile=uniform"]


def call(folder: Path, *words: str) -> int:
    place = format_override("hydra.sweep.dir", folder / "out")
    argv = ["fedpfl.board", *words, "suite=tiny", place]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(board, "SUITES", folder):
        return board.main()


def skip_search(options, words, **more):
    """Find without a search what `tests/runner/test_tune.py` has searched for; play final runs."""
    if "hydra/sweeper=optuna" in options:
        chosen = SearchResult(("local.lr=0.05",), 50.0, {"finished": 1, "given up": 0}, 1)
        return search_results.append(chosen)
    return tune.run_or_exit(options, words, **more)


def boarded(folder, methods, settings, play):
    suite = {**SUITE, "settings": {name: SUITE["settings"][name] for name in settings}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(suite))
    with mock.patch.object(board, "run_or_exit", play):
        status = call(folder, f"method={','.join(methods)}", *MADE_WITH)
    return folder, status, pd.read_csv(folder / "out" / "board.csv", dtype={"identity": str})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two methods and an upper line in one setting."""
    folder = tmp_path_factory.mktemp("board")
    return boarded(folder, ("centralized", "fedavg", "fedper"), ("skewed",), skip_search)


@pytest.mark.full
def test_of_what_was_searched_with_three_methods_in_two_settings_there_are_ranks(tmp_path):
    methods, settings = ("fedavg", "fedper", "local_only"), ("skewed", "even")
    folder, status, frame = boarded(tmp_path, methods, settings, tune.run_or_exit)
    assert status == 0
    assert sorted(frame["method"]) == sorted(2 * ["FedAvg", "FedPer", "Local-Only"])
    assert sorted({setting.partition(":")[0] for setting in frame["setting"]}) == ["even", "skewed"]
    assert frame["harmed_fedavg"].notna().sum() == frame["harmed_local_only"].notna().sum() == 4
    assert frame.groupby("method")["rank"].first().sum() == pytest.approx(6)
    assert (folder / "out" / "ranks.png").is_file()


def test_a_board_has_a_row_for_each_method_from_which_it_can_be_run_again(made):
    folder, status, frame = made
    assert status == 0
    assert sorted(frame["method"]) == ["Centralized (upper line)", "FedAvg", "FedPer"]
    upper = frame.set_index("method").loc["Centralized (upper line)"]
    assert "system" not in upper["command"]
    assert frame["group"].isna().tolist() == frame["method"].str.startswith("Central").tolist()
    assert frame["accuracy"].is_monotonic_decreasing, "the best of a setting first"
    finals = {run.identity: run for run in runs(*(folder / "out").glob("*/final"))}
    for row in frame.to_dict("records"):
        run = finals[row["identity"]]
        rows = run.rounds
        best = rows.loc[rows["val_accuracy"].idxmax()]
        for key in ("accuracy", "ft_accuracy", "unseen_accuracy"):
            assert row[key] == pytest.approx(best[key], nan_ok=True)
        if "system" in row["command"]:
            assert row["sim_seconds"] == pytest.approx(rows["sim_seconds"].mean())
        assert row["data"] == run.summary["data"]
        assert f"torch {run.environment['torch']}" in row["versions"]
        assert row["command"].startswith("python -m fedpfl.train -m method=")
        words = shlex.split(row["command"])[4:]
        cfg = overrides.compose_single_run(words)
        assert cfg.hydra.sweep.subdir.split("/")[-2] == row["identity"]
    harmed = frame.set_index("method")["harmed_fedavg"].notna().to_dict()
    assert harmed == {"Centralized (upper line)": True, "FedAvg": False, "FedPer": True}
    page = (folder / "out" / "board.html").read_text()
    assert all(text in page for text in (*frame["identity"], *frame["data"]))
    assert "No ranks: " in (folder / "out" / "board.md").read_text()
    text = board_page.make_table(frame)
    assert "FedPer" in text
    assert text in board_page.replace_table(board_page.PAGE.read_text(), text)


@pytest.mark.full
def test_the_page_of_the_docs_is_what_its_file_says():
    page = board_page.PAGE.read_text()
    made = board_page.replace_table(page, board_page.make_table(board_page.load_rows()))
    assert made == page, "run python scripts/board.py --write"
    rows = board_page.load_rows()
    kept = rows["group"].tolist()
    board.add_groups(rows)
    assert rows["group"].tolist() == kept
    assert rows.groupby("group").size().tolist() == [94, 9, 11, 2]


def rewritten(folder, row, **values):
    """Give a row of the board other values; return the file's text before."""
    path = folder / "out" / "board.csv"
    text = path.read_text()
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    for column, value in values.items():
        frame.loc[frame["identity"] == row["identity"], column] = value
    frame.to_csv(path, index=False)
    return text


def test_a_row_that_is_run_again_is_equal_and_each_changed_column_is_named(made, capsys):
    folder, _, frame = made
    row = frame[frame["method"] == "FedPer"].iloc[0]
    assert call(folder, "verify", row["identity"], *MADE_WITH) == 0
    assert "equal, every number of 1 runs" in capsys.readouterr().out

    def verify(**values):
        text = rewritten(folder, row, **values)
        with mock.patch.object(board, "run_or_exit"):  # its runs were made just now
            status = call(folder, "verify", row["identity"][:6], *MADE_WITH)
        (folder / "out" / "board.csv").write_text(text)
        return status, capsys.readouterr()

    left_out = ("identity", "command", "setting", "versions", "chosen", "rank", "group")
    columns = [column for column in frame.columns if column not in left_out]
    changes = {column: "0.125" if row[column] != 0.125 else "0.5" for column in columns}
    status, said = verify(**changes)
    assert status == 1
    assert all(f"{key} {value!r} there" in said.err for key, value in changes.items())
    status, said = verify(harmed_fedavg="", accuracy="", setting="skewed: another")
    assert status == 1
    assert "accuracy '' there" in said.err
    assert "setting 'skewed: another' there" in said.err
    elsewhere = row["versions"].replace("torch ", "torch 1")
    status, said = verify(versions=elsewhere, command=f"rm -rf / method=fedper {row['command']}")
    line = f"versions: {elsewhere!r} there, {row['versions']!r} here"
    assert (status, line in said.err) == (0, True)


def test_a_submitted_row_is_verified_from_its_folder_alone(made, capsys, tmp_path, monkeypatch):
    folder, _, frame = made
    row = frame[frame["method"] == "FedPer"].iloc[0]
    mine = tmp_path / "mine.py"
    mine.write_text((ROOT / "docs/mine.py").read_text())
    assert (
        call(folder, "submit", row["identity"], *MADE_WITH, format_override("plugins", [mine])) == 0
    )
    sent = Path(shutil.move(folder / "out" / "submit" / row["identity"], tmp_path))
    assert sorted(path.name for path in sent.iterdir()) == ["README.md", "board.csv", "mine.py"]
    assert sorted(pd.read_csv(sent / "board.csv")["method"]) == ["FedAvg", "FedPer"]

    # ---- The line of its page, where nothing else is.
    line = shlex.split(
        re.search("`python -m fedpfl.board (.*)`", (sent / "README.md").read_text())[1]
    )
    monkeypatch.chdir(sent)
    monkeypatch.setattr(sys, "argv", ["fedpfl.board", *line])
    monkeypatch.setattr(board, "SUITES", folder)
    mine.unlink()
    assert board.main() == 0
    assert "FedPer, skewed: Digits, Dir(0.1): equal" in capsys.readouterr().out
    # ---- A plugin's row can be verified too.
    plugins.load_plugins([])
    board.read_command_line(line[2:])
    assert "halfway" in METHODS


STRANGE = """
chosen | local.lr=0.5 | make [0-9a-f]+; give the words that the board was made with
chosen | plugins=[evil.py] | is no value of the search space of method=fedper
command | python -m fedpfl.train -m method=evil seed=1 | is of no setting and method of the suite
"""


@pytest.mark.parametrize(("column", "value", "told"), keep_quick(read_cases(STRANGE, " | ")))
def test_of_a_strangers_row_nothing_is_run_but_the_suites_own_words(
    column, value, told, made, capsys
):
    folder, _, frame = made
    row = frame[frame["method"] == "FedPer"].iloc[0]
    text = rewritten(folder, row, **{column: value})
    with mock.patch.object(board, "run_or_exit") as play:
        status = call(folder, "verify", row["identity"], *MADE_WITH)
    (folder / "out" / "board.csv").write_text(text)
    (line,) = capsys.readouterr().err.splitlines()
    assert (status, play.called) == (2, False)
    assert re.search(told, line)


@pytest.mark.parametrize("every", keep_quick([40, 1]))
def test_the_suite_composes_every_row_of_the_docs(every):
    command = board.read_command_line(["suite=small"])
    for row in board.read_rows(board_page.ROWS_FILE).to_dict("records")[::every]:
        assert board.compose_row(row, command)
