"""A board of a tiny suite: what stands in it, and that a row that is run again is equal or is said not to be."""

import sys
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
import yaml

from fedpfl import board
from fedpfl.config import overrides
from fedpfl.report.load import runs
from fedpfl.runner import tuning
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import board as board_page

pytest.importorskip("optuna", reason="needs the extra tune")

SUITE = {
    "method": "all",
    "trials": 2,
    "seeds": 2,
    "words": [
        *("clients=6", "participation=0.5", "rounds=2", "validation=0.2", "unseen=0.34", "eval.every=1"),
        *("eval.finetune_epochs=1", "eval.finetune_every=1", "partition.samples_per_client=24", "local.epochs=1"),
        *("model=mlp", "model.hidden=[8]", "checkpoint.keep=false", "system=simulated", "system.profile=uniform"),
    ],
    "settings": {"skewed": ["dataset=digits", "partition.alpha=0.1"], "even": ["dataset=digits", "partition=iid"]},
}


def call(folder: Path, *words: str) -> int:
    argv = ["fedpfl.board", *words, "suite=tiny", f"hydra.sweep.dir={folder / 'out'}"]
    with mock.patch.object(sys, "argv", argv), mock.patch.object(board, "SUITES", folder):
        return board.main()


def boarded(folder, methods, settings):
    suite = {**SUITE, "settings": {name: SUITE["settings"][name] for name in settings}}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(suite))
    with mock.patch.object(tuning, "draw"):  # which takes longer than the runs
        status = call(folder, f"method={','.join(methods)}", "trials=1", "seeds=1", "rounds=2")
    return folder, status, pd.read_csv(folder / "out" / "board.csv", dtype={"identity": str})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two methods in one setting."""
    return boarded(tmp_path_factory.mktemp("board"), ("fedavg", "fedper"), ("skewed",))


@pytest.mark.full
def test_with_three_methods_and_two_settings_there_are_ranks(tmp_path):
    folder, status, frame = boarded(tmp_path, ("fedavg", "fedper", "local_only"), ("skewed", "even"))
    assert status == 0
    assert sorted(frame["method"]) == sorted(2 * ["FedAvg", "FedPer", "Local-Only"])
    assert sorted({setting.partition(":")[0] for setting in frame["setting"]}) == ["even", "skewed"]
    assert frame["harmed_fedavg"].notna().sum() == frame["harmed_local_only"].notna().sum() == 4
    assert frame.groupby("method")["rank"].first().sum() == pytest.approx(6)
    assert (folder / "out" / "ranks.png").is_file()


def test_a_board_has_a_row_for_each_method_from_which_it_can_be_run_again(made):
    folder, status, frame = made
    assert status == 0
    assert sorted(frame["method"]) == ["FedAvg", "FedPer"]
    finals = {run.identity: run for run in runs(*(folder / "out").glob("*/final"))}
    for row in frame.to_dict("records"):
        run = finals[row["identity"]]
        rows = run.rounds
        best = rows.loc[rows["val_accuracy"].idxmax()]
        for key in ("accuracy", "ft_accuracy", "unseen_accuracy"):
            assert row[key] == pytest.approx(best[key], nan_ok=True)
        assert row["sim_seconds"] == pytest.approx(rows["sim_seconds"].mean())
        assert row["data"] == run.summary["data"]
        assert f"torch {run.environment['torch']}" in row["versions"]
        assert row["command"].startswith("python -m fedpfl.train -m method=")
        words, seeds = board._repeated(row["command"])
        assert (
            overrides.composed_once([*words, f"seed={seeds[0]}"]).hydra.sweep.subdir.split("/")[-2] == row["identity"]
        )
    assert frame.set_index("method")["harmed_fedavg"].notna().to_dict() == {"FedAvg": False, "FedPer": True}
    page = (folder / "out" / "board.html").read_text()
    shown = (folder / "out" / "board.md").read_text()
    for identity, data in zip(frame["identity"], frame["data"], strict=True):
        assert identity in page
        assert identity in shown
        assert data in page
    assert "No ranks: " in shown
    assert "fine-tuned: after further local epochs" in shown
    text = board_page.table(frame)
    assert "FedPer" in text
    assert "Without a row in skewed" in text
    assert text in board_page.filled(board_page.PAGE.read_text(), text)


def test_the_page_of_the_docs_is_what_its_file_says():
    page = board_page.PAGE.read_text()
    assert board_page.filled(page, board_page.table(board_page.rows())) == page, "run python scripts/board.py --write"


def test_a_row_that_is_run_again_is_equal_and_a_changed_number_is_named(made, capsys):
    folder, _, frame = made
    row = frame[frame["method"] == "FedPer"].iloc[0]
    assert call(folder, "verify", row["identity"]) == 0
    assert "equal, every number of 1 runs" in capsys.readouterr().out
    path = folder / "out" / "board.csv"
    text = path.read_text()
    path.write_text(text.replace(frame["digest"][frame["identity"] == row["identity"]].iloc[0], "0" * 16))
    assert call(folder, "verify", row["identity"][:6]) == 1
    assert "FedPer" in (told := capsys.readouterr().err)
    assert "not equal: digest 0000000000000000 there" in told
    path.write_text(text)


def test_a_setting_whose_data_are_absent_is_left_out_and_told_once(tmp_path, capsys):
    absent = {"gone": ["dataset=cifar10", "dataset.download=false"], "lost": ["dataset=npz", "dataset.path=lost.npz"]}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**SUITE, "settings": absent}))
    assert call(tmp_path, "method=fedavg,fedper,ditto") == 2
    gone, lost, last = capsys.readouterr().err.splitlines()
    assert gone.startswith("fedpfl: gone: left out: data set cifar10 is not in data_dir=")
    assert lost.startswith("fedpfl: lost: left out: dataset.path=lost.npz is not a file")
    assert "no method came to its end: gone: left out" in last
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("verify", "zzz"), "no rows begin with 'zzz'"),
        (("verify",), "no rows begin"),
        (("trials=0",), "fedpfl: trials must be a whole number"),
        (("roundz=3",), "fedpfl: roundz is not a key here"),
        (("data_dir=a", "data_dir=b", "trials=0"), "given twice, and the last one counts: data_dir=a, then data_dir=b"),
        (("verify", "zzz", "rounds=3"), "fedpfl: rounds=3: verify runs the words of the row itself"),
    ],
)
def test_mistakes_are_one_line(made, capsys, words, told):
    assert call(made[0], *words, *([] if "zzz" in words else ["method=fedavg"])) == 2
    assert told in capsys.readouterr().err
    assert call(made[0], "method=fedavg,fedpre") == 2
    assert "got 'fedpre'" in capsys.readouterr().err
