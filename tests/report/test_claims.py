"""Claims, power and intervals: against statsmodels' numbers, scipy, simulation and by hand."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedpfl.config.plan import check_config
from fedpfl.report.claims import judge_claims, parse_claim, power_table
from fedpfl.report.commands import find_words
from fedpfl.report.compare import paired_test
from fedpfl.report.load import runs
from fedpfl.report.power import (
    compute_power,
    count_needed_pairs,
    find_detectable_effect,
    hierarchical_interval,
    mean_of_worst_decile,
    student_interval,
    wilson_interval,
)
from fedpfl.report.ranking import correct_by_holm
from fedpfl.report.tables import accuracy_table
from tests.command import TINY, compose_once
from tests.conftest import keep_quick
from tests.data.promises import one_line
from tests.report.test_report import write_run


@pytest.mark.parametrize(
    ("pairs", "effect", "level", "power"),
    [
        (2, 0.5, 0.05, 0.06194861),
        (3, 0.8, 0.05, 0.13488540),
        (5, 1.5, 0.05, 0.71070267),
        (10, 0.3, 0.01, 0.03739132),
        (20, 0.8, 0.005, 0.65498606),
    ],
)
def test_power_is_that_of_statsmodels(pairs, effect, level, power):
    """Of `statsmodels.stats.power.TTestPower().power(effect, pairs, level)`, 0.14."""
    assert compute_power(effect, pairs, level) == pytest.approx(power, abs=2e-5)
    assert compute_power(-effect, pairs, level) == pytest.approx(power, abs=2e-5)


def test_differences_that_seeds_can_tell():
    """At a deviation of 2.5 points."""
    found = [2.5 * find_detectable_effect(seeds) for seeds in (3, 5, 10)]
    assert found == pytest.approx([8.16, 4.20, 2.49], abs=0.01)
    assert count_needed_pairs(2 / 2.5) == 15
    assert count_needed_pairs(-2 / 2.5) == 15
    assert count_needed_pairs(0.01) is None


def test_chance_alone_supports_a_table_in_five_of_a_hundred():
    """Of three rows with unequal spreads, over five seeds, corrected together."""
    generator = np.random.default_rng(0)
    tables = generator.normal(size=(2000, 3, 5)) * [[0.3], [1.0], [4.0]]
    p_values = [[paired_test(row.tolist(), "t") for row in table] for table in tables]
    assert np.mean(
        [correct_by_holm(pd.Series(own)).min() < 0.05 for own in p_values]
    ) == pytest.approx(0.05, abs=0.01)


@pytest.mark.parametrize(
    ("seeds", "clients", "between", "within"),
    keep_quick([(5, 50, 2.0, 5.0), (3, 100, 1.0, 10.0), (10, 20, 0.5, 10.0), (1, 100, 0.0, 10.0)]),
)
def test_the_interval_over_seeds_and_clients_covers(seeds, clients, between, within):
    generator, trials = np.random.default_rng(0), 300
    covered = 0
    for _ in range(trials):
        means = 5 + between * generator.normal(size=seeds)
        values = [mean + within * generator.normal(size=clients) for mean in means]
        low, high = hierarchical_interval(values)
        student = student_interval([own.mean() for own in values])
        assert seeds == 1 or high - low >= (student[1] - student[0]) * (1 - 1e-9)
        covered += low <= 5 <= high
    assert covered / trials >= 0.93


def test_intervals_of_other_statistics_and_of_nothing():
    generator = np.random.default_rng(0)
    values = [generator.normal(size=40) for _ in range(3)]
    low, high = hierarchical_interval(values, lambda rows: np.sort(rows, 1)[:, :4].mean(1))
    assert low < np.mean([np.sort(own)[:4].mean() for own in values]) < high < 0
    assert math.isnan(hierarchical_interval([np.ones(1)])[0])
    assert math.isnan(student_interval([1.0])[0])
    for correct, samples in ((0, 5), (9, 11), (11, 11), (300, 400)):
        wanted = stats.binomtest(correct, samples).proportion_ci(method="wilson")
        assert wilson_interval(correct, samples) == pytest.approx((wanted.low, wanted.high))


OBP = {"name": "fedobp", "q": 0.9}
FINAL = {
    "fedavg": [70.0, 72.0, 74.0],
    "fedper": [70.5, 73.5, 73.6],
    "fedobp": [73.0, 75.1, 76.9],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """FedOBP is about 3 points above FedAvg; FedPer's differences have both signs."""
    for name, finals in FINAL.items():
        method = OBP if name == "fedobp" else {"name": name}
        for seed, final in enumerate(finals):
            write_run(tmp_path / name / str(seed), {4: final}, seed=seed, method=method)
    return tmp_path


def judge(root: Path, *texts: str, **options: float) -> list[dict]:
    table = judge_claims(runs(root), [parse_claim(text) for text in texts], **options)
    return table.frame.to_dict("records")


def test_a_claim_is_supported_or_not_or_needs_seeds(root: Path) -> None:
    first, second, third = judge(root, "fedobp > fedavg", "fedper > fedavg", "fedavg > fedobp")
    assert first["difference"] == pytest.approx(3.0)
    assert first["verdict"] == "supported"
    wanted = stats.ttest_rel(FINAL["fedobp"], FINAL["fedavg"])
    assert first["p"] == pytest.approx(3 * wanted.pvalue)
    low, high = wanted.confidence_interval()
    assert first["interval"] == f"{low:+.2f} to {high:+.2f}"
    effect = second["difference"] / second["deviation"]
    needed = count_needed_pairs(effect, 0.05 / 3)
    assert second["verdict"] == f"needs {needed - 3} more seeds"
    assert third["verdict"] == "not supported"
    assert judge(root, "fedobp > fedavg", by=2.9)[0]["verdict"].startswith("needs")
    assert judge(root, "fedobp > fedavg", by=3.1)[0]["verdict"] == "not supported"


def test_too_few_seeds_are_said(root: Path) -> None:
    write_run(root / "late", {4: 99.0}, seed=0, method={"name": "ditto"})
    (row,) = judge(root, "ditto > fedavg")
    assert (row["seeds"], row["verdict"]) == (1, "needs 2 more seeds to be tested")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedobp", "claim 'fedobp' is not two methods with > between"),
        ("fedavg > fedprox", "method=fedprox: no such run here"),
        ("fedobp > fedavg", "method=fedobp is 2 configurations on"),
    ],
)
def test_what_is_no_claim_is_one_line(text: str, message: str, root: Path) -> None:
    write_run(root / "other", {4: 99.0}, method={**OBP, "q": 0.5})
    assert message in one_line(lambda: judge(root, text))


def test_power_of_the_runs_at_hand(root: Path) -> None:
    (row,) = power_table(runs(root)).frame.to_dict("records")
    pairs = [("fedavg", "fedper"), ("fedavg", "fedobp"), ("fedper", "fedobp")]
    deviations = [np.std(np.subtract(FINAL[a], FINAL[b]), ddof=1) for a, b in pairs]
    assert row["deviation"] == pytest.approx(np.median(deviations))
    assert row["seeds_5"] == pytest.approx(row["deviation"] * find_detectable_effect(5))
    assert "two configurations" in one_line(lambda: power_table(runs(root, where=["seed=0"])))


@pytest.mark.parametrize(
    "words",
    [
        (*TINY, "method=ditto", "method.lam=0.5", "partition.alpha=0.3", "augment.crop=2"),
        ("method=fedspu", "model.hidden=[8,4]", "model=mlp", "eval.finetune_epochs=1"),
        ("experiment=fedobp/paper", "method=fedobp", "dataset=fmnist", "local.clip=1.5"),
    ],
)
def test_the_words_of_a_run_make_its_configuration(words):
    plan = check_config(compose_once(*words))
    again = check_config(compose_once(*find_words(plan.config)))
    assert again.identity == plan.identity
    assert len(find_words(plan.config)) < 30


def test_intervals_of_a_table_cover_clients_too(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    values = [generator.normal(70, 10, 20), generator.normal(72, 10, 20)]
    for seed, own in enumerate(values):
        folder = write_run(tmp_path / str(seed), {4: float(own.mean())}, seed=seed)
        rows = [f"{number},30,10,40,{value},{value}" for number, value in enumerate(own.tolist())]
        header = "client,train,test,label_0,accuracy,ft_accuracy"
        (folder / "clients.csv").write_text("\n".join([header, *rows, ""]))
    chosen = ["accuracy", "accuracy_worst10", "loss"]
    (row,) = accuracy_table(runs(tmp_path), chosen=chosen, interval="clients").frame.to_dict(
        "records"
    )
    low, high = hierarchical_interval(values)
    assert row["accuracy_seed_ci95"] == pytest.approx((high - low) / 2)
    low, high = hierarchical_interval(values, mean_of_worst_decile)
    assert row["accuracy_worst10_seed_ci95"] == pytest.approx((high - low) / 2)
    assert math.isnan(row["loss_seed_ci95"])
