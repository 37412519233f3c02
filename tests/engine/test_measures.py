"""Measures beside the accuracy, against scikit-learn and by hand; models on everybody's samples;
both backends.
"""

import math
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sk

import fedpfl
from fedpfl.engine import make_backend, measures
from fedpfl.engine.calls import Counts, EvalCall
from fedpfl.engine.evaluate import cross_client_accuracy
from fedpfl.engine.measures import BINS, MEASURES
from fedpfl.engine.training.shard import gather_data
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, Batch
from fedpfl.report import load
from tests.command import TINY
from tests.conftest import COHORTS, CPU, as_engine, assert_close, find_eval_job, record_states

NAMES = tuple(MEASURES)
needed = pytest.mark.usefixtures("library")


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("lightning_utilities", reason="needs the extra metrics")
    return measures.import_torchmetrics()


def by_sklearn(logits, y):
    shares = logits.double().softmax(1).numpy()
    y, guess = y.numpy(), logits.argmax(1).numpy()
    held = np.unique(y)
    auroc = [math.nan]
    if len(held) > 1:
        auroc = [sk.roc_auc_score(y == one, shares[:, one]) for one in held]
    sure, edges = shares.max(1), np.linspace(0, 1, BINS + 1)
    place = np.clip(np.digitize(sure, edges) - 1, 0, BINS - 1)
    gaps = [
        abs((y == guess)[place == b].mean() - sure[place == b].mean()) * (place == b).mean()
        for b in {*place}
    ]
    return {
        "f1": sk.f1_score(y, guess, average="macro"),
        "balanced": np.mean([(guess[y == one] == one).mean() for one in held]),
        "auroc": np.mean(auroc),
        "ece": sum(gaps),
    }


def test_what_everybody_is_judged_by_on_everybodys_samples():
    """Two models on three clients, of whom one has no test samples; a model that is not finite has
    no accuracy.
    """
    correct, total = torch.tensor([[1, 0, 3], [2, 0, 0]]), torch.tensor([[2, 0, 6]] * 2)
    matrix, whole = cross_client_accuracy(Counts(correct, torch.zeros(2, 3), total))
    assert torch.equal(matrix.nan_to_num(-1), torch.tensor([[50.0, -1, 50], [100, -1, 0]]).double())
    assert whole.tolist() == [50, 25]
    _, whole = cross_client_accuracy(
        Counts(correct, torch.tensor([[0, 0, 0], [0, 0, math.nan]]), total)
    )
    assert whole.nan_to_num(-1).tolist() == [50, -1]


@needed
@pytest.mark.parametrize("name", ["fedper", "apfl"])
def test_backends_agree_with_scikit_learn_and_nothing_else_changes(name, federation, net):
    """They are scikit-learn's, also of clients of one class, or none of those that are predicted.
    What is asked for besides leaves the tallies bit for bit; the matrix's diagonal is what clients
    are judged by.
    """
    method, everyone, told = METHODS[name](), list(range(federation.clients)), {}
    for engine in ("loop", "batched"):
        runner = make_backend(as_engine(engine), net, CPU)
        state = record_states(method, net, federation, COHORTS[:1], engine=engine)[-1]
        call = EvalCall(method, federation, state, everyone)
        whole, two = (federation.merge_clients(count) for count in (10, 2))
        plain = runner.evaluate_splits(call)["test"]
        asked = runner.evaluate_splits(replace(call, measures=NAMES, common_federation=whole))
        assert all(map(torch.equal, asked["test"][:3], plain[:3]))
        assert torch.equal(asked["common"].correct.diagonal(), plain.correct)
        halves = runner.evaluate_splits(replace(call, common_federation=two))["common"]
        assert torch.equal(halves.correct.sum(1), asked["common"].correct.sum(1))
        told[engine] = asked
        for client in everyone:
            own = federation.test[client]
            job = find_eval_job(method, net, federation, state, client)
            data = gather_data(federation, own)
            batch = Batch(data.x, data.y)
            logits = method.predict(net.bind(job.buffers), job.params, batch).detach()
            known = {name: float(values[client]) for name, values in asked["test"].measures.items()}
            wanted = by_sklearn(logits, data.y) if len(own) else dict.fromkeys(NAMES, math.nan)
            assert known == pytest.approx(wanted, abs=1e-5, nan_ok=True)
    assert_close(told["loop"]["common"].correct, told["batched"]["common"].correct)


SMALL = (*TINY, "validation=0.25")


@needed
def test_a_run_writes_what_it_is_asked_for(tmp_path):
    """Of FedAvg every model is the server's, so all columns of the matrix are alike; FedPer has
    none at the server.
    """
    asked = ("eval.common=true", "metrics=[ece,f1]", "unseen=0.25", "method=fedavg")
    tuned = ("eval.finetune_epochs=1", "eval.finetune_every=2")
    run = fedpfl.run(*SMALL, *asked, *tuned, directory=tmp_path / "a", progress=False)
    last = run.rounds.iloc[-1]
    for name in ("common_accuracy", "server_accuracy"):
        assert last[name] == pytest.approx(last["accuracy_pooled"])
    frame = pd.read_csv(tmp_path / "a" / "common.csv", index_col="client")
    ours = run.clients[run.clients["unseen"] == 0]
    assert [*frame.index] == [*ours["client"]]
    assert [*frame.columns] == [f"on_{number}" for number in frame.index]
    assert (frame.nunique() == 1).all()
    assert frame.to_numpy().diagonal() == pytest.approx(ours["accuracy"].to_numpy())
    for split in ("", "ft_", "val_", "val_ft_"):
        assert last[f"{split}f1"] == pytest.approx(ours[f"{split}f1"].mean())
        assert last[f"{split}ece"] == pytest.approx(ours[f"{split}ece"].mean())
    assert last["unseen_f1"] == pytest.approx(run.clients[run.clients["unseen"] == 1]["f1"].mean())
    plain = fedpfl.run(*SMALL, "method=fedper", directory=tmp_path / "b", progress=False)
    other = fedpfl.run(*SMALL, "method=fedper", asked[0], directory=tmp_path / "c", progress=False)
    assert other.rounds["server_accuracy"].isna().all()
    assert other.rounds["common_accuracy"].between(0, 100).all()
    assert not (tmp_path / "b" / "common.csv").exists()
    same = [name for name in plain.rounds if "seconds" not in name]
    pd.testing.assert_frame_equal(other.rounds[same], plain.rounds[same])
    assert {*other.rounds} - {*plain.rounds} == {"common_accuracy", "server_accuracy"}
    (tmp_path / "a" / "common.csv").unlink()
    with pytest.raises(FedpflError, match=r"common\.csv is not as the run wrote it"):
        load.read_run(tmp_path / "a").cross_accuracy  # noqa: B018


def test_without_torchmetrics_there_is_one_line(tmp_path, monkeypatch):
    measures.import_torchmetrics.cache_clear()
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)
    with pytest.raises(
        FedpflError, match=r"^metrics needs torchmetrics, .*pip install 'fedpfl\[metrics\]'$"
    ):
        fedpfl.run(*SMALL, "metrics=[f1]", directory=tmp_path / "run", progress=False)
    measures.import_torchmetrics.cache_clear()
    with pytest.raises(FedpflError, match="metrics"):
        fedpfl.run(*SMALL, "metrics=[f2]", directory=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
