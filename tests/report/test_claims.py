"""Claims, power and intervals: against statsmodels' numbers, scipy, simulation and by hand."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fedpfl.config.plan import check_config
from fedpfl.ground.intervals import wilson_interval
from fedpfl.report.claims import judge_claims, parse_claim, power_table
from fedpfl.report.commands import find_words
from fedpfl.report.compare import paired_test
from fedpfl.report.fairness import fairness_table
from fedpfl.report.load import runs
from fedpfl.report.power import (
    SeedScore,
    compute_games_howell_p,
    compute_power,
    count_needed_pairs,
    find_detectable_effect,
    hierarchical_interval,
    mean_of_worst_decile,
    number_groups,
    student_interval,
)
from fedpfl.report.ranking import correct_by_holm
from fedpfl.report.tables import accuracy_table
from tests.command import TINY, compose_once
from tests.conftest import keep_quick
from tests.data.promises import one_line
from tests.report.test_report import read_output, write_run


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
    covered = of_these_seeds = 0
    for _ in range(trials):
        means = 5 + between * generator.normal(size=seeds)
        values = [mean + within * generator.normal(size=clients) for mean in means]
        low, high = hierarchical_interval(values)
        student = student_interval([own.mean() for own in values])
        assert seeds == 1 or high - low >= (student[1] - student[0]) * (1 - 1e-9)
        covered += low <= 5 <= high
        low, high = hierarchical_interval(values, draws_seeds=False)
        of_these_seeds += low <= means.mean() <= high
    assert covered / trials >= 0.93
    assert of_these_seeds / trials == pytest.approx(0.95, abs=0.025)


def test_groups_are_those_of_games_and_howell():
    """Of two scores the test is Welch's; of many seeds p is that of the range of normal numbers."""
    a, b = SeedScore(70.0, 1.5, 3), SeedScore(64.0, 4.0, 5)
    wanted = stats.ttest_ind_from_stats(*a, *b, equal_var=False).pvalue
    assert compute_games_howell_p(a, b, 2) == pytest.approx(wanted, rel=1e-6)
    ranges = np.ptp(np.random.default_rng(0).normal(size=(100_000, 6)), axis=1)
    many = [SeedScore(mean, 100.0, 10**4) for mean in (3.6, 0.0)]
    assert compute_games_howell_p(*many, 6) == pytest.approx((ranges > 3.6).mean(), abs=0.005)
    means = [90.0, 89.0, 80.0, 79.0, 60.0]
    assert number_groups([SeedScore(mean, 1.0, 5) for mean in means]) == [1, 1, 2, 2, 3]
    # No spread, or a single seed, tells nothing apart.
    for deviation, seeds in ((0.0, 3), (math.nan, 1)):
        assert number_groups([SeedScore(mean, deviation, seeds) for mean in means]) == 5 * [1]


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
        ("dataset=sites", "dataset.path=.", "partition=dirichlet", "clients=100"),
    ],
)
def test_the_words_of_a_run_make_its_configuration(words):
    plan = check_config(compose_once(*words))
    again = check_config(compose_once(*find_words(plan.config)))
    assert again.identity == plan.identity
    assert len(find_words(plan.config)) < 30


def write_clients(folder: Path, seed: int, own: np.ndarray, **changes: str) -> None:
    """A run of these clients, fine-tuned as they are."""
    write_run(folder, {4: float(own.mean())}, seed=seed, **changes)
    rows = [f"{number},30,10,40,{value},{value},9" for number, value in enumerate(own.tolist())]
    header = "client,train,test,label_0,accuracy,ft_accuracy,asr"
    (folder / "clients.csv").write_text("\n".join([header, *rows, ""]))


@pytest.mark.parametrize("interval", ["seed", "client", "both"])
def test_intervals_say_what_they_cover(tmp_path: Path, interval: str, capsys) -> None:
    generator = np.random.default_rng(0)
    fedavg = [generator.normal(70, 10, 20), generator.normal(72, 10, 20)]
    fedper = [own + generator.normal(3 + seed, 5, 20) for seed, own in enumerate(fedavg)]
    for seed in range(2):
        write_clients(tmp_path / f"a{seed}", seed, fedavg[seed])
        write_clients(tmp_path / f"p{seed}", seed, fedper[seed], method="fedper")
    gains = [own - other for own, other in zip(fedper, fedavg, strict=True)]
    options = {"draws_seeds": interval == "both"}

    def half(values, statistic=lambda rows: rows.mean(1)):
        if interval == "seed":
            low, high = student_interval([statistic(own[None])[0] for own in values])
        else:
            low, high = hierarchical_interval(values, statistic, **options)
        return pytest.approx((high - low) / 2)

    chosen = ["accuracy", "accuracy_worst10", "loss", "asr_worst10"]
    table = accuracy_table(runs(tmp_path), chosen=chosen, interval=interval)
    row = table.frame.iloc[1]
    assert row["accuracy_seed_ci95"] == half(fedper)
    if interval != "seed":  # the runs' rows have a worst tenth of their own
        assert row["accuracy_worst10_seed_ci95"] == half(fedper, mean_of_worst_decile)
        # The tenth with the highest attack success is no lowest tenth.
        assert row[["loss_seed_ci95", "asr_worst10_seed_ci95"]].isna().all()
    row = fairness_table(runs(tmp_path), interval).frame.iloc[1]
    assert row["gain_fedavg"] == pytest.approx(np.mean(gains))
    assert row["gain_fedavg_seed_ci95"] == half(gains)
    assert row["change_fedavg_seed_ci95"] == half(gains, mean_of_worst_decile)
    assert row["accuracy_worst10_seed_ci95"] == half(fedper, mean_of_worst_decile)
    words = ("tables", str(tmp_path), "--fairness", "--interval", interval, "--pm")
    out = " ".join(read_output(capsys, *words)[0].split())
    assert out.count(f"half-width of the 95 % confidence interval {OF_INTERVAL[interval]}") == 2
    assert f"{np.mean(fedper):.2f} [±" in out
    assert "standard deviation over seeds" not in out
    one_seed = " ".join(read_output(capsys, *words, "seed=0")[0].split())
    assert one_seed.count("In square brackets: half-width") == 2


OF_INTERVAL = {"seed": "(Student's t)", "client": "for the choice", "both": "(bootstrap over seeds"}
