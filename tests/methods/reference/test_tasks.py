"""Methods on labels that are no classes, against the same plain loops with another loss; and what
is counted of their predictions, against scikit-learn.
"""

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as sk
from torch import Tensor, nn

from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.evaluate import scores_per_client, summarize_scores
from fedpfl.engine.measures import compute_measures
from fedpfl.ground.tasks import MULTILABEL, REGRESSION, TASKS, Task
from fedpfl.methods import METHODS, Batch
from fedpfl.models import Net
from tests.conftest import (
    BACKENDS,
    CPU,
    HEAD,
    Tiny,
    as_engine,
    assert_close,
    make_federation,
    record_rounds,
)
from tests.methods.reference import plain
from tests.methods.reference.conftest import SEED, describe_setting

LABELS = 3
LOOPS = {
    "fedavg": ({}, plain.fedavg),
    "fedper": ({}, lambda s: plain.fedper(s, HEAD)),
    "ditto": ({"lam": 0.3}, lambda s: plain.ditto(s, 0.3, 2)),
    "fedobp": ({"q": 0.9}, lambda s: plain.fedobp(s, 0.9)),
}


def binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(outputs)
    return -(y * p.log() + ~y * (1 - p).log()).mean()


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs[:, 0] - y) ** 2).mean()


LOSSES = {"multilabel": binary_cross_entropy, "regression": squared_error}


@pytest.fixture(scope="module", params=LOSSES)
def task(request) -> Task:
    return TASKS[request.param]


@pytest.fixture(scope="module")
def federation(task):
    """The small federation; labels follow from its classes, so that clients differ."""
    whole = make_federation()
    rng = torch.Generator().manual_seed(1)
    if task is MULTILABEL:
        rates = torch.rand(whole.classes, LABELS, generator=rng)
        y = torch.rand(len(whole.y), LABELS, generator=rng) < rates[whole.y]
    else:
        y = whole.y / 2 + 0.3 * torch.randn(len(whole.y), generator=rng)
    return dataclasses.replace(whole, y=y, classes=LABELS if task is MULTILABEL else 1)


@pytest.fixture(scope="module")
def net(federation):
    torch.manual_seed(1)
    module = Tiny()
    module.classifier = nn.Linear(12, federation.classes)
    return Net(module, sample=(1, 8, 8), rounds=3)


@pytest.fixture(scope="module")
def setting(net, federation, task):
    loss = LOSSES[task.name]
    return dataclasses.replace(describe_setting(net, federation), loss=loss)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LOOPS)
def test_rounds_and_scores_are_those_of_plain_loops(name, backend, setting, net, federation, task):
    values, loops = LOOPS[name]
    method, expected = METHODS[name](**values), loops(setting)
    states, _ = record_rounds(method, net, federation, engine=backend, seed=SEED)
    if name != "ditto":  # whose server state is a model among others
        shared = {key: states[-1].server[key] for key in expected.shared[-1] if key not in HEAD}
        wanted = {key: expected.shared[-1][key] for key in shared}
        assert_close(shared, wanted, atol=1e-6, rtol=1e-5)

    # Everybody's personal model after the last round, judged by scikit-learn.
    call = EvalCall(
        method, federation, states[-1], list(range(federation.clients)), measures=task.measures
    )
    counts = make_backend(as_engine(backend), net, CPU).evaluate(call)
    told = scores_per_client(counts, task)
    answers = []
    for client, weights in enumerate(expected.personal[-1]):
        model = plain.load(setting, weights).eval()
        with torch.no_grad():
            outputs, y = model(setting.clients[client].test_x), setting.clients[client].test_y
        answers.append((outputs, y))
        wanted = judge(outputs, y, task)
        for column, value in wanted.items():
            assert told[column][client] == pytest.approx(value, rel=1e-4, nan_ok=True), column
    check_means(summarize_scores(counts, task), told, answers, task)


def judge(outputs: Tensor, y: Tensor, task: Task) -> dict[str, float]:
    """What scikit-learn says of one client, where it is defined."""
    if not len(y):
        return dict.fromkeys(("auroc", "f1") if task is MULTILABEL else ("rmse", "r2"), np.nan)
    if task is REGRESSION:
        labels, predicted = y.double(), outputs[:, 0].double()
        return {
            "rmse": sk.root_mean_squared_error(labels, predicted),
            "r2": sk.r2_score(labels, predicted) if len(y) > 1 else np.nan,
        }
    both = [label for label in range(LABELS) if len(y[:, label].unique()) == 2]
    seen = [label for label in range(LABELS) if (y | (outputs > 0))[:, label].any()]
    areas = [sk.roc_auc_score(y[:, label], outputs[:, label]) for label in both]
    f1 = [sk.f1_score(y[:, label], outputs[:, label] > 0) for label in seen]
    return {
        "auroc": 100 * np.mean(areas) if both else np.nan,
        "f1": 100 * np.mean(f1) if seen else np.nan,
    }


def check_means(
    row: dict[str, float | None],
    told: dict[str, list[float]],
    answers: list[tuple[Tensor, Tensor]],
    task: Task,
) -> None:
    """Check the statistics over clients."""
    each = np.array(told[task.score])
    each = each[~np.isnan(each)]
    worst = each.min() if task is MULTILABEL else each.max()  # a tenth of ten clients, or nine
    assert row[task.score] == pytest.approx(each.mean())
    assert row[f"{task.score}_std"] == pytest.approx(each.std())
    assert row[f"{task.score}_worst10"] == pytest.approx(worst)
    outputs, y = (torch.cat(parts) for parts in zip(*answers, strict=True))
    assert row["loss"] == pytest.approx(float(LOSSES[task.name](outputs, y)), rel=1e-4)
    assert "accuracy" not in {column.partition("_")[0] for column in row}
    if task is REGRESSION:
        labels, predicted = y.double(), outputs[:, 0].double()
        rmse = sk.root_mean_squared_error(labels, predicted)
        assert row["rmse_pooled"] == pytest.approx(rmse, rel=1e-5)
        assert row["r2_pooled"] == pytest.approx(sk.r2_score(labels, predicted), rel=1e-4)


def test_losses_are_torchs():
    rng = torch.Generator().manual_seed(0)
    outputs, many = torch.randn(9, 4, generator=rng), torch.rand(9, 4, generator=rng) < 0.5
    batch = Batch(outputs, many)
    wanted = F.binary_cross_entropy_with_logits(outputs, many.float())
    torch.testing.assert_close(batch.loss(outputs), wanted)
    padded = batch._replace(weight=torch.tensor([1.0] * 6 + [0.0] * 3))
    wanted = F.binary_cross_entropy_with_logits(outputs[:6], many[:6].float())
    torch.testing.assert_close(padded.loss(outputs), wanted)
    numbers = torch.randn(9, generator=rng)
    batch = Batch(outputs, numbers)
    torch.testing.assert_close(batch.loss(outputs[:, :1]), F.mse_loss(outputs[:, 0], numbers))


def test_ties_and_equal_labels():
    """A tie is half a pair; R2 of equal labels is undefined, be they as large as they may."""
    outputs = torch.tensor([[0.5, 1.0], [0.5, -1.0], [2.0, 1.0], [-1.0, -3.0]])
    y = torch.tensor([[True, True], [False, True], [True, True], [False, True]])
    got = compute_measures(("auroc", "f1"), outputs, y)
    assert float(got["auroc"]) == pytest.approx(sk.roc_auc_score(y[:, 0], outputs[:, 0]))
    f1 = sk.f1_score(y, outputs > 0, average="macro")
    assert float(got["f1"]) == pytest.approx(f1)
    assert compute_measures(("f1",), -outputs.abs(), ~y[:, 1:].expand(4, 2))["f1"].isnan()
    equal = torch.full((7,), 16777216.1 / 3)
    sums = compute_measures(REGRESSION.measures, torch.zeros(7, 1), equal)
    assert sums["label_spread"] == 0
