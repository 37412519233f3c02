"""Survival: Cox's loss, concordance, Brier score and Kaplan-Meier's curve as lifelines has them, and a
run of three sites on both backends.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import fedpfl
from fedpfl.config.plan import check_config
from fedpfl.ground.survival import Horizon, estimate_survival, measure_survival, partial_losses
from tests.command import compose_once
from tests.conftest import read_cases
from tests.data.promises import one_line

# lifelines 0.30.3: CoxPHFitter(baseline_estimation_method="breslow") fitted on `make_patients`' first 40
# patients, its log likelihood, chances at 6 of the last 20, their concordance_index and Kaplan-Meier
# curve; Graf's Brier score by its chances and its KaplanMeierFitter of the censoring.
COEFFICIENTS = [0.7232563826280686, 0.03228296035614769]
LIKELIHOOD = -66.32895628406229
CHANCES = [0.5128233540117201, 0.6461917791769898, 0.786034018175047, 0.38919467873463354]
CONCORDANCE = 0.7904761904761904
BRIER = 0.18446319458510607
CURVE = {1: 0.95, 2: 0.85, 3: 0.79333333, 4: 0.68, 5: 0.62333333, 12: 0.4675, 16: 0.0}


def make_patients(count: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return patients with many events at one time, and some that were last seen."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 2)).round(3)
    time = np.ceil(8 * rng.exponential(np.exp(-0.8 * x[:, 0] + 0.3 * x[:, 1])))
    last = rng.integers(1, 20, count)
    event = (time <= last).astype(float)
    return torch.from_numpy(x), torch.from_numpy(np.stack([np.minimum(time, last), event], 1))


def test_numbers_are_those_of_lifelines():
    x, y = make_patients()
    risk = x @ torch.tensor(COEFFICIENTS, dtype=torch.float64)
    losses = partial_losses(risk[:40], y[:40], torch.ones(40))
    assert float(-losses.sum()) == pytest.approx(LIKELIHOOD, abs=1e-6)
    hazard = measure_survival(risk[:40], y[:40], Horizon(6.0))["hazard"]
    chances = (-hazard * risk[40:44].exp()).exp()
    assert chances.tolist() == pytest.approx(CHANCES, abs=1e-6)
    measures = measure_survival(risk[40:], y[40:], Horizon(6.0, hazard))
    concordance = measures["concordant"] / measures["comparable"]
    assert float(concordance) == pytest.approx(CONCORDANCE, abs=1e-6)
    assert float(measures["brier"]) == pytest.approx(BRIER, abs=1e-6)
    curve = dict(zip(*[values.tolist() for values in estimate_survival(y[40:])], strict=True))
    assert {time: curve[time] for time in CURVE} == pytest.approx(CURVE, abs=1e-6)


def test_the_loss_is_of_present_samples_and_bears_any_risk():
    x, y = make_patients(9)
    risk = (300 * x[:, 0]).float().requires_grad_()
    weight = torch.tensor([1.0] * 7 + [0.0] * 2)
    losses = partial_losses(risk, y.float(), weight)
    alone = partial_losses(risk[:7], y[:7].float(), weight[:7])
    torch.testing.assert_close(losses[:7], alone)
    (gradient,) = torch.autograd.grad((losses * weight).sum(), risk)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
    assert not losses[7:].any()
    assert gradient[:7].any()
    assert not gradient[7:].any()


def make_sites() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return three sites that differ in size, in the tests' chunks, and in their baseline."""
    sites = {}
    for number, (name, count) in enumerate({"aachen": 1200, "berlin": 90, "chur": 40}.items()):
        x, y = make_patients(count, number)
        y[:, 0] *= 1 + number
        sites[name] = x.float().numpy(), y.float().numpy()
    return sites


def test_a_run_is_judged_by_its_own_predictions_on_both_backends(tmp_path):
    words = ["task=survival", "method=fedper", "model=mlp", "model.hidden=[8]", "rounds=3"]
    words += ["participation=1.0", "local.batch_size=64", "local.lr=0.1", "eval.every=3"]
    runs = []
    for own in (["engine=loop"], ["engine=batched", "eval.horizon=9"]):
        about = {"data": make_sites(), "directory": tmp_path / own[0], "progress": False}
        runs.append(fedpfl.run(*words, *own, **about))
    run, batched = runs
    row = run.rounds.iloc[-1]
    assert row["concordance"] > 60
    for name in ("concordance", "concordance_pooled", "loss", "cohort_loss_after"):
        assert batched.rounds[name].iloc[-1] == pytest.approx(row[name], rel=1e-4)
    times = [run.samples(site, "train")[1][:, 0] for site in range(3)]
    check_clients(run, float(torch.cat(times).median()))
    check_clients(batched, 9.0)


def check_clients(run: fedpfl.Trained, horizon: float) -> None:
    """Compare each client's scores with those of its own predictions."""
    pairs, sizes = [], []
    for site, found in run.clients.reset_index(drop=True).iterrows():
        (x, y), (trained, labels) = run.samples(site), run.samples(site, "train")
        risk = run.predict(site, x)[:, 0]
        patients = [*zip(*y.T.tolist(), risk.tolist(), strict=True)]
        first = [
            (one, other)
            for (time, event, one), (later, came, other) in itertools.product(patients, patients)
            if event and (time < later or (time == later and not came))
        ]
        hits = sum((one > other) + (one == other) / 2 for one, other in first)
        assert found["concordance"] == pytest.approx(100 * hits / len(first), abs=1e-3)
        assert found["concordance_low"] < found["concordance"] < found["concordance_high"]
        pairs.append((hits, len(first)))
        own = run.predict(site, trained)[:, 0]
        hazard = measure_survival(own, labels, Horizon(horizon))["hazard"]
        brier = measure_survival(risk, y, Horizon(horizon, hazard))["brier"]
        assert found["brier"] == pytest.approx(float(brier), abs=1e-5)
        sizes.append((len(y), float(brier)))
    row = run.rounds.iloc[-1]
    pooled = 100 * sum(hits for hits, _ in pairs) / sum(count for _, count in pairs)
    assert row["concordance_pooled"] == pytest.approx(pooled, abs=1e-3)
    mean = sum(math.prod(size) for size in sizes) / sum(count for count, _ in sizes)
    assert row["brier_pooled"] == pytest.approx(mean, abs=1e-5)


REFUSED = """
method=fedavg task=survival privacy=sample privacy.noise=1 => privacy=sample clips gradients of single
method=fedavg task=regression eval.horizon=5 => eval.horizon is for task=survival
method=fedproto task=survival => method=fedproto is for task=classification
"""


@pytest.mark.parametrize(("words", "reason"), read_cases(REFUSED))
def test_what_needs_single_samples_is_refused(words, reason):
    assert reason in one_line(lambda: check_config(compose_once("partition=iid", *words.split())))
