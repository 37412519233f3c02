"""Published numbers beside the report's table, and in what runs depart from the published set-up."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from fedpfl.papers.fedobp.tables import published_beside, published_number
from fedpfl.report import groups, runs
from fedpfl.report.load import read_run
from fedpfl.report.render import render
from fedpfl.report.table import Table
from fedpfl.report.tables import accuracy_table
from tests.report import test_report
from tests.report.test_report import row_of, write_run

root = test_report.root


def table_of(folder: Path) -> Table:
    return accuracy_table(runs(folder), beside=partial(published_beside, everywhere=True))


def test_published_value_and_difference(root: Path) -> None:
    table = table_of(root)
    row = row_of(table, "FedOBP")
    assert (row["published"], row["published_seed_std"]) == (96.89, 0.03)
    assert row["difference"] == pytest.approx(95.0 - 96.89)
    assert row["difference_pooled"] == pytest.approx(96.0 - 96.89)
    assert row_of(table, "FedAvg")["published"] == 87.29
    assert table.notes[0].startswith(
        "Set-up that differs from the published one: rounds 4 (published 400)"
    )
    assert "authors' logs pooled" in " ".join(table.prose("markdown"))


def test_published_values_match_by_method_data_set_and_setting(tmp_path: Path) -> None:
    known = [{"dataset": "organamnist", "method": "fedper"}, {"partition": ("published", 0.1)}]
    known += [{"method": "local_only"}, {"method": "lg_fedavg"}]
    unknown = [{"method": "ditto"}, {"partition": {"alpha": 0.3}}, {"partition": ("iid", 0.1)}]
    unknown += [{"dataset": "digits"}]
    for number, changes in enumerate(known + unknown):
        (group,) = groups([read_run(write_run(tmp_path / str(number), **changes))])
        found = published_number(group.runs[0])
        assert (found is not None) == (changes in known), changes
        assert found is None or found.source.endswith("Table IV")


def test_departures_from_the_published_setup_are_told_briefly(tmp_path: Path) -> None:
    write_run(tmp_path / "0", rounds=400)
    for number in range(1, 7):
        method = {"name": "fedobp", "q": number / 10, "norm": "layer"}
        write_run(tmp_path / str(number), rounds=400, method=method, local={"momentum": 0.0})
    note = table_of(tmp_path).notes[0]
    assert note.startswith(
        "Set-up that differs from the published one: q 0.1, 0.2, 0.3 and 3 more (published 0.99993) for"
    )
    rows = "FedOBP (q=0.1), FedOBP (q=0.2), FedOBP (q=0.3) and 3 more."
    assert f"norm layer (published global) for {rows}" in note


def test_no_published_columns_where_nothing_is_published(tmp_path: Path) -> None:
    write_run(tmp_path / "run", dataset="digits")
    table = table_of(tmp_path)
    assert "published" not in render(table, "markdown").lower()
    assert not table.notes


def test_published_values_stand_beside_the_papers_set_up_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "same", rounds=400)
    write_run(tmp_path / "other", rounds=400, clients=10, method="fedper")
    table = accuracy_table(runs(tmp_path), beside=published_beside)
    assert row_of(table, "FedAvg (clients=100)")["published"] == 87.29
    assert math.isnan(row_of(table, "FedPer (clients=10)")["difference"])
    assert "Set-up that differs" not in " ".join(table.notes)
    table = accuracy_table(runs(tmp_path, where=["clients=10"]), beside=published_beside)
    assert "ublished" not in render(table)
