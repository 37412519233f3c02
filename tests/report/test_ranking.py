"""Ranks over data sets: Demšar's example (JMLR 7, 2006, Table 6), loops, corrections by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedpfl.report import ranking
from fedpfl.report.__main__ import main
from fedpfl.report.load import runs
from fedpfl.report.power import count_needed_pairs
from fedpfl.report.ranking import (
    correct_by_holm,
    drop_gaps,
    find_groups,
    rank_methods,
    rank_tables,
)
from tests.report.test_report import PNG, write_run

DEMSAR = pd.DataFrame(
    {
        "C4.5": [763, 599, 954, 628, 882, 936, 661, 583, 775, 1000, 940, 619, 972, 957],
        "C4.5+m": [768, 591, 971, 661, 888, 931, 668, 583, 838, 1000, 962, 666, 981, 978],
        # Voting, the last but one, is 975 in both of the last columns, and ranked as if the third
        # were lower there.
        "C4.5+cf": [771, 590, 968, 654, 886, 916, 609, 563, 866, 1000, 965, 614, 975, 946],
        "C4.5+m+cf": [798, 569, 967, 657, 898, 931, 685, 625, 875, 1000, 962, 669, 974.9, 970],
    }
)
NAMES = ("fedavg", "fedper", "fedobp", "local_only")


def sweep(root: Path, values: dict[str, list[float | None]], **changes: Any) -> Path:
    """A run of each method for each of its values, on data sets `set0`, `set1`, ...; None: no run."""
    for method, accuracies in values.items():
        for place, value in enumerate(accuracies):
            if value is not None:
                folder = root / method / f"set{place}" / f"seed{changes.get('seed', 0)}"
                write_run(folder, {4: value}, method=method, dataset=f"set{place}", **changes)
    return root


def test_demsars_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its table has no p of two methods, and scipy would take a second for each."""
    monkeypatch.setattr(ranking, "paired_test", lambda changes, test: math.nan)
    found = rank_methods(DEMSAR)
    means = found.ranks.mean()
    assert [*means.index] == ["C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5"]
    assert [round(mean, 3) for mean in means] == [1.964, 2.000, 2.893, 3.143]
    # The paper leaves ties uncorrected: three pairs and one quadruple of the 14 rows of four.
    assert found.statistic * (1 - (3 * 6 + 60) / (14 * 4 * 15)) == pytest.approx(9.28, abs=0.005)
    assert found.p < 0.05
    # Its Table 2, of the first two: twice equal, twice worse.
    (pair,) = (row for row in found.pairs.itertuples() if {row.a, row.b} == {"C4.5", "C4.5+m"})
    assert (pair.a, pair.a_better, pair.b_better) == ("C4.5+m", 10, 2)


def test_equal_differences_are_equal_ranks_whatever_rounding_makes_of_them() -> None:
    base = [65.8, 62.6, 63.3, 62.4, 61.6, 61.8, 64.4, 61.3, 60.8]
    gains = [1, 0, -2, -1, 3, -3, -2, 0, 1]
    # In tenths: 65.9 - 65.8 and 60.9 - 60.8 are not one number
    better = [x + y / 10 for x, y in zip(base, gains, strict=True)]
    frame = pd.DataFrame({"a": base, "b": better, "c": base})
    told = {frozenset((row.a, row.b)): row for row in rank_methods(frame).pairs.itertuples()}
    pair = told[frozenset("ab")]
    assert {(pair.a, pair.a_better), (pair.b, pair.b_better)} == {("a", 4), ("b", 3)}
    assert pair.p == pytest.approx(78 / 128)  # of all signs
    assert (told[frozenset("ac")].a_better, told[frozenset("ac")].b_better) == (0, 0)


def test_holm_by_hand() -> None:
    for values, corrected in (
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.4], [0.8, 0.8]),
        ([math.nan, 0.02, 0.01], [math.nan, 0.04, 0.03]),  # the pair that was not tested counts
    ):
        assert [*correct_by_holm(pd.Series(values))] == pytest.approx(corrected, nan_ok=True)


BARS = {
    "": [(0, 3)],
    "ad": [(0, 2), (1, 3)],
    "ab ac ad": [(0, 0), (1, 3)],
    "ac ad bd": [(0, 1), (1, 2), (2, 3)],
}


def test_bars_join_what_is_not_told_apart() -> None:
    found = rank_methods(pd.DataFrame([[4.0, 3, 2, 1]] * 3, columns=[*"abcd"]))
    assert find_groups(found) == [(0, 3)], "three blocks allow no test"
    for differ, bars in BARS.items():
        pairs = [row.a + row.b for row in found.pairs.itertuples()]
        values = [0.049 if pair in differ.split() else 0.05 for pair in pairs]
        assert find_groups(found._replace(pairs=found.pairs.assign(p=0.01, p_holm=values))) == bars


def gapless(accuracies: dict[str, dict[str, float]]) -> tuple[pd.DataFrame, list[str]]:
    return drop_gaps(pd.DataFrame(accuracies).T)


def test_what_has_the_most_gaps_goes_first() -> None:
    full = {"a": 1.0, "b": 2.0, "c": 3.0}
    kept, told = gapless({"x": full | {"d": 4.0}, "y": full, "z": full, "w": {"a": 1.0}})
    assert kept.to_dict("index") == {"x": full, "y": full, "z": full}
    assert told == [
        "Left out, as runs are missing: methods: d.",
        "Left out, as runs are missing: blocks: w.",
    ]


def test_seeds_are_averaged_first(tmp_path: Path) -> None:
    sweep(tmp_path, {"fedavg": [50, 50], "fedper": [60, 40], "local_only": [55, 58]})
    sweep(tmp_path, {"fedper": [80, 60]}, seed=1)
    tables, result = rank_tables(runs(tmp_path))
    # FedAvg is fine-tuned two points better.
    first = result.accuracy.loc["set0, Dir(0.1)"].to_dict()
    assert first == {"FedPer": 70, "Local-Only": 55, "FedAvg+FT": 52}
    assert result.ranks.mean().to_dict() == {"Local-Only": 1.5, "FedPer": 2, "FedAvg+FT": 2.5}
    assert "FedAvg is judged after fine-tuning." in tables[0].caption


CONDITIONS: dict[str, dict[str, Any]] = {
    "": {"attack": {"name": "none"}, "defence": {"name": "mean"}, "shift": {"rotation": 0.0}},
    ", lie 20 %": {"attack": {"name": "lie", "share": 0.2, "clients": None}},
    ", lie 20 %, median": {"attack": {"name": "lie", "share": 0.2}, "defence": {"name": "median"}},
    ", rotation=360.0, at=[2]": {"shift": {"rotation": 360.0, "noise": 0.0, "at": [2]}},
}


def test_settings_that_differ_by_attack_defence_or_shift_are_blocks(tmp_path: Path) -> None:
    for place, changes in enumerate(CONDITIONS.values()):
        values: dict[str, list[float | None]] = {"fedavg": [50], "fedper": [60], "local_only": [55]}
        sweep(tmp_path / str(place), values, **changes)
    found = rank_tables(runs(tmp_path))[1].ranks
    assert {*found.index} == {f"set0, Dir(0.1){conditions}" for conditions in CONDITIONS}
    assert {*found} == {"FedAvg+FT", "FedPer", "Local-Only"}, "no label says it again"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {}
    for k, name in enumerate(NAMES):
        values[name] = [60.0 + 5 * k + 0.1 * place * (k + 1) for place in range(7)]
    root = sweep(tmp_path / "outputs", values | {"centralized": [99.0] * 7})
    later = {"fedobp": [69.0] * 7, "local_only": [75.0] * 7}
    gaps = np.mean([np.subtract(values[name], 0) for name in ("local_only", "fedobp")], axis=1)
    deviation = np.std([gaps[0] - gaps[1], 6.0], ddof=1)
    gap = (gaps[0] - gaps[1] + 6) / 2
    sweep(root, later, seed=1)
    # A seed that one of them has alone, at its mean over the rest.
    sweep(root, {"fedobp": np.add(values["fedobp"], 69.0) / 2}, seed=2)
    assert main(["ranks", str(root), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    lines, out = [line.split() for line in out.splitlines()], " ".join(out.split())
    assert ["group", "1", "1", "1", "1"] in lines
    assert ["average", "rank", "1.0", "2.0", "3.0", "4.0"] in lines
    needed = count_needed_pairs(gap / deviation)
    parted = f"differ by {gap:.3g} with a deviation of {deviation:.3g}: {needed} seeds would part"
    assert f"Local-Only and FedOBP, the first two, {parted} them (80% power)." in out
    assert "Centralized" not in out
    # chi-square 12 * 7 / (4 * 5) * (2.25 + 0.25 + 0.25 + 2.25)
    test = "chi-square 21.00 with 3 degrees of freedom, p <0.001."
    assert f"Friedman's test, corrected for ties: {test}" in out
    assert ["FedOBP", "FedPer", "7", "0", "0.016", "0.094"] in lines  # 6 pairs, all at 2 / 2^7
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"ranks.png", "ranks.pdf"}
    assert (tmp_path / "out/ranks.png").read_bytes().startswith(PNG)
