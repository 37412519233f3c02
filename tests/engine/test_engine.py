"""The engine: random draws, outcomes, evaluation, precision, errors, CUDA; measures beside the
accuracy against scikit-learn; a run in bf16 says which precision is faster here.
"""

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from sklearn import metrics as sk

import fedpfl
from fedpfl import data
from fedpfl.config import plugins
from fedpfl.data.datasets import Samples
from fedpfl.data.partition import Partition
from fedpfl.engine import (
    Engine,
    RoundSetup,
    draw_cohorts,
    make_backend,
    make_initial_state,
    measures,
    play_round,
)
from fedpfl.engine.backends.backend import reproducible_arithmetic
from fedpfl.engine.backends.selection import find_device, require_supported
from fedpfl.engine.calls import Counts, EvalCall
from fedpfl.engine.evaluate import (
    pooled_accuracy,
    scores_per_client,
    summarize_scores,
)
from fedpfl.engine.measures import BINS, MEASURES, SUMMED_MEASURES, compute_measures
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import MULTILABEL, REGRESSION
from fedpfl.methods import METHODS, FedAvg
from fedpfl.report.load import runs
from fedpfl.report.tables import accuracy_table
from fedpfl.testing.toy import require_close
from tests.command import TINY
from tests.conftest import (
    BACKENDS,
    CLASSES,
    COHORTS,
    CPU,
    LOCAL,
    Tiny,
    as_engine,
    assert_close,
    evaluate,
    every_method,
    flatten,
    make_federation,
    record_rounds,
    record_states,
    state_trees,
    tiny,
)

EVERYONE = list(range(10))


def test_cohorts_come_from_one_stream_of_random_sample():
    sizes = {(100, 0.29): 29, (10, 0.05): 1, (7, 0.5): 3, (5, 1.0): 5}
    assert {case: len(next(draw_cohorts(0, *case, 1))) for case in sizes} == sizes
    random.seed(7)
    expected = [sorted(random.sample(range(50), 5)) for _ in range(20)]
    assert list(draw_cohorts(7, 50, 0.1, 20)) == expected
    assert list(draw_cohorts(7, 50, 0.1, 12)) == expected[:12]
    assert list(draw_cohorts(8, 50, 0.1, 20)) != expected
    stream = draw_cohorts(7, 50, 0.1, 2**63)  # drawn as they come
    assert [next(stream) for _ in range(20)] == expected


def test_evaluation_passes_all_samples_once_in_chunks(net, backend):
    large = make_federation((4, 5, 6), (600, 0, 257))
    state = make_initial_state(FedAvg(), net, 3, CPU)
    counts = evaluate(FedAvg(), net, large, state, Engine(backend), [2, 0, 1])
    module = Tiny()
    module.load_state_dict(net.params)
    for k, client in enumerate([2, 0, 1]):
        y = large.y[large.test[client]]
        with torch.no_grad():
            logits = module(large.normalize(large.x[large.test[client]]))
        assert counts.total[k] == len(y)
        assert counts.correct[k] == (logits.argmax(1) == y).sum()
        loss = float(F.cross_entropy(logits, y, reduction="sum"))
        assert float(counts.loss[k]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kept", [3, 1])
def test_predictions_are_among_the_classes_that_a_client_trains_on_where_it_is_said(
    kept, net, backend
):
    """The loss is over all classes, and who has no training samples is judged over all."""
    whole = make_federation()
    train = [own[whole.y[own] % 5 < kept + client % 2] for client, own in enumerate(whole.train)]
    train[0] = train[0][:0]
    samples = Samples("own", whole.x, whole.y, CLASSES, whole.mean, whole.std)
    split = Partition(*(tuple(own.numpy() for own in part) for part in (train, whole.test)))
    judged = data.build_federation(samples, split, only_local_classes=True)
    state = make_initial_state(FedAvg(), net, 10, CPU)
    over_all, over_own = (evaluate(FedAvg(), net, own, state, backend) for own in (whole, judged))
    assert_close(over_own.loss, over_all.loss)
    for client, own in enumerate(whole.test):
        classes = sorted(set(whole.y[train[client]].tolist())) or range(CLASSES)
        logits = net.bind({})(net.params, whole.normalize(whole.x[own])).tolist()
        guesses = [max(classes, key=row.__getitem__) for row in logits]
        assert int(over_own.correct[client]) == sum(map(int.__eq__, guesses, whole.y[own].tolist()))
    assert judged.merge_clients(3).excluded_classes is None  # everybody's samples
    two = make_initial_state(FedAvg(), net, 2, CPU)
    few = evaluate(FedAvg(), net, judged.select_clients([4, 2]), two, backend, [1, 0])
    assert few.correct.tolist() == over_own.correct[[2, 4]].tolist()


def test_accuracies_by_hand():
    """A measure's mean is over the clients of which it is defined."""
    measures = {"f1": torch.tensor([0.5, math.nan, 0.9, 0.7]), "ece": torch.full((4,), math.nan)}
    correct, total = torch.tensor([1, 3, 0, 2]), torch.tensor([2, 4, 0, 4])
    counts = Counts(correct, torch.tensor([2.0, 1.0, 0.0, 4.0]), total, measures)
    result = summarize_scores(counts)
    assert result["accuracy"] == pytest.approx((50 + 75 + 50) / 3)
    assert result["accuracy_pooled"] == pooled_accuracy(counts) == pytest.approx(60)
    variance = 2 * (25 / 3) ** 2 / 3 + (50 / 3) ** 2 / 3
    assert result["accuracy_std"] == pytest.approx(variance**0.5)
    assert result["accuracy_worst10"] == 50
    assert result["loss"] == pytest.approx(0.7)
    assert (result["f1"], result["ece"]) == (pytest.approx((50 + 90 + 70) / 3), None)
    each = scores_per_client(counts._replace(loss=torch.tensor([2.0, 1.0, 0.0, math.inf])))
    assert each["accuracy"] == pytest.approx([50, 75, math.nan, math.nan], nan_ok=True)
    assert each["f1"] == pytest.approx([50, math.nan, math.nan, math.nan], nan_ok=True)


def test_a_client_of_eleven_samples_has_an_interval_of_eleven():
    counts = Counts(torch.tensor([9, 270, 0]), torch.ones(3), torch.tensor([11, 330, 0]))
    each = scores_per_client(counts)
    for client, correct, samples in ((0, 9, 11), (1, 270, 330)):
        wanted = stats.binomtest(correct, samples).proportion_ci(method="wilson")
        ends = [each[f"accuracy_{end}"][client] for end in ("low", "high")]
        assert ends == pytest.approx([100 * wanted.low, 100 * wanted.high], rel=1e-12)
    assert math.isnan(each["accuracy_low"][2])
    assert "accuracy_low" not in summarize_scores(counts)


@pytest.mark.parametrize("task", [MULTILABEL, REGRESSION])
def test_other_scores_have_intervals_by_the_bootstrap(task):
    """Beside a bootstrap of scikit-learn's scores with draws of its own."""
    rng, count = np.random.default_rng(0), 60
    outputs = torch.from_numpy(rng.normal(size=(count, 2 if task is MULTILABEL else 1)).round(1))
    y = outputs[:, 0] + torch.from_numpy(rng.normal(size=count))
    if task is MULTILABEL:
        y = outputs + torch.from_numpy(rng.normal(size=(count, 2))) > 0.5

    def score(chosen):
        if task is MULTILABEL:
            return 100 * sk.roc_auc_score(y[chosen], outputs[chosen])
        return sk.root_mean_squared_error(y[chosen], outputs[chosen])

    resampled = [score(rng.integers(count, size=count)) for _ in range(500)]
    asked = compute_measures((*task.measures, "interval"), outputs.float(), y)
    none = compute_measures((*task.measures, "interval"), outputs[:0].float(), y[:0])
    counts = Counts(*torch.tensor([[0, 0], [1, 1], [count, 0]]), tree.stack([asked, none]))
    each = scores_per_client(counts, task)
    width = np.ptp(np.quantile(resampled, [0.025, 0.975]))
    for end, level in (("low", 0.025), ("high", 0.975)):
        own, missing = each[f"{task.score}_{end}"]
        assert own == pytest.approx(np.quantile(resampled, level), abs=width / 8)
        assert math.isnan(missing)
    assert each[task.score][0] == pytest.approx(score(np.arange(count)), abs=1e-4)
    assert f"{task.score}_low" not in summarize_scores(counts, task)


# Precision, settings and errors


@pytest.mark.parametrize(
    ("place", "chosen"), [("cpu", "loop"), pytest.param("cuda", "batched", marks=pytest.mark.cuda)]
)
def test_auto_is_what_is_fast_on_the_device(place, chosen, net):
    device = torch.device(place)
    found = [type(make_backend(Engine(name), net, device)) for name in ("auto", *BACKENDS)]
    assert found[0] is found[1 + BACKENDS.index(chosen)]
    assert found[1] is not found[2]


def test_devices_that_are_not_there_are_refused():
    assert find_device("cpu") == CPU
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("nonsense", "meta", "cuda:99"):
        with pytest.raises(FedpflError, match=f"{name}|got '{name}'"):
            find_device(name)
    with pytest.raises(FedpflError, match="tf32 needs a CUDA device"):
        require_supported(Engine(precision="tf32"), CPU)


# CUDA


@pytest.fixture
def exact_products():
    """No TF32, so that a GPU computes what the CPU does."""
    with reproducible_arithmetic(torch.device("cuda"), "fp32"):
        yield


@pytest.mark.cuda
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
@every_method(*BACKENDS)
def test_a_round_on_cuda_equals_the_cpus(name, values, backend, norm, federation, exact_products):
    """Each round from the CPU's state; 1e-4 after two epochs."""
    method, gpu, net = METHODS[name](**values), torch.device("cuda"), tiny(norm)
    there, (states, outcomes) = federation.to(gpu), record_rounds(method, net, federation)
    runner = make_backend(Engine(backend), net, gpu)
    for t, cohort in enumerate(COHORTS):
        known = copy.deepcopy(states[t])
        before = {part: tree.to(getattr(known, part), gpu) for part in ("server", "server_buffers")}
        state = replace(make_initial_state(method, net, 10, gpu), round=t, **before)
        rows = {"client": known.clients, "buffers": known.client_buffers}
        state.rows.put_(EVERYONE, {**rows, "facts": known.rows.take("facts", EVERYONE)})
        state, outcome = play_round(RoundSetup(runner, method, there, LOCAL, 0), state, cohort)
        after = state_trees(state)
        assert all(leaf.device.type == "cuda" for leaf in flatten(after).values())
        assert_close(tree.to(after, CPU), state_trees(states[t + 1]), atol=1e-4, rtol=1e-3)
        assert outcome.before.total.tolist() == outcomes[t].before.total.tolist()
        assert_close(outcome.after.loss, outcomes[t].after.loss, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
def test_bf16_evaluates_with_what_it_trains_with(norm, backend, place, federation):
    """Convolutions, linear layers and logits are bf16, on each backend and device."""
    net, seen, where = tiny(norm), set(), torch.device(place)
    for layer in (net.module.conv, net.module.fc, net.module.classifier):
        note = lambda module, _, output: seen.add((module.training, output.dtype))  # noqa: E731
        layer.register_forward_hook(note)
    runner = make_backend(Engine(backend, workers=1, precision="bf16"), net, where)
    there = federation.to(where)
    state = make_initial_state(FedAvg(), net, 10, where)
    state, _ = play_round(RoundSetup(runner, FedAvg(), there, LOCAL, 0), state, COHORTS[0])
    assert seen == {(False, torch.bfloat16), (True, torch.bfloat16)}
    assert {leaf.dtype for leaf in flatten(state.server).values()} == {torch.float32}


# Measures beside the accuracy


NAMES = (*MEASURES, *SUMMED_MEASURES)
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
        **counted_by_sklearn(guess, y, shares),
    }


def counted_by_sklearn(guess, y, shares):
    """Of class 1 of two, else the mean over classes; nan where a fraction is 0 / 0."""
    ones = [1] if shares.shape[1] == 2 else [*range(shares.shape[1])]
    how = {"average": None, "labels": ones, "zero_division": np.nan}
    rejected = [
        sk.recall_score(y == one, guess == one, pos_label=False, zero_division=np.nan)
        for one in ones
    ]
    mixed = [one for one in ones if 0 < (y == one).sum() < len(y)]
    areas = [sk.average_precision_score(y == one, shares[:, one]) for one in mixed]
    recall = mean_of_known(sk.recall_score(y, guess, **how))
    return {
        "precision": mean_of_known(sk.precision_score(y, guess, **how)),
        "recall": recall,
        "sensitivity": recall,
        "specificity": mean_of_known(rejected),
        "kappa": sk.cohen_kappa_score(y, guess),
        "auprc": mean_of_known(areas),
    }


def mean_of_known(values):
    known = [value for value in values if not math.isnan(value)]
    return np.mean(known) if known else math.nan


def measure(samples, names=NAMES):
    """Count clients of these outputs and labels."""
    told = [compute_measures(names, outputs, y) for outputs, y in samples]
    sizes = torch.tensor([len(y) for _, y in samples])
    return Counts(0 * sizes, sizes.float(), sizes, tree.stack(told))


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("classes", [2, 4])
def test_measures_of_clients_and_of_all_their_samples_are_scikit_learns(classes):
    """Clients: mixed, of one class alone, without class 1, nothing predicted as 1, all wrong, with
    one sample, without any.
    """
    rng = torch.Generator().manual_seed(classes)
    mixed, wrong = (torch.randint(classes, (40,), generator=rng) for _ in range(2))
    never = torch.randn(40, classes, generator=rng)
    never[:, 1] = -9
    samples = [
        (torch.randn(40, classes, generator=rng), mixed),
        (torch.randn(9, classes, generator=rng), torch.ones(9, dtype=torch.int64)),
        (torch.randn(9, classes, generator=rng), torch.zeros(9, dtype=torch.int64)),
        (never, mixed),
        (9 * F.one_hot((wrong + 1) % classes, classes) + never.clamp(-1), wrong),
        (5 * F.one_hot(torch.zeros(5, dtype=torch.int64), classes).float(), wrong[:5] * 0),
        (torch.randn(1, classes, generator=rng), wrong[:1]),
    ]
    counts = measure([*samples, (torch.randn(0, classes), wrong[:0])])
    told = scores_per_client(counts)
    for client, (logits, y) in enumerate(samples):
        wanted = {name: 100 * value for name, value in by_sklearn(logits, y).items()}
        own = {name: told[name][client] for name in NAMES}
        assert own == pytest.approx(wanted, abs=1e-4, nan_ok=True), client
    assert all(math.isnan(told[name][-1]) for name in NAMES)
    together = by_sklearn(*map(torch.cat, zip(*samples, strict=True)))
    row = summarize_scores(counts)
    for name in NAMES:
        assert row[name] == pytest.approx(mean_of_known(told[name]), abs=1e-4)
        pooled = row.get(f"{name}_pooled")
        known = name in SUMMED_MEASURES
        assert pooled == (pytest.approx(100 * together[name], abs=1e-9) if known else None)
    alone = summarize_scores(measure(samples[5:6]))
    assert (alone["kappa"], alone["kappa_pooled"], alone["auprc"]) == (None, None, None)


@needed
@pytest.mark.filterwarnings("ignore")
def test_measures_of_several_labels_are_means_over_labels():
    """Of the clients one lacks label 1, of another none is predicted, and one has no samples."""
    rng = torch.Generator().manual_seed(0)
    samples = [(torch.randn(30, 3, generator=rng), torch.rand(30, 3) < 0.4) for _ in range(3)]
    samples[1][1][:, 1] = False
    samples[2][0][:] = -samples[2][0].abs()
    names = ("auprc", *SUMMED_MEASURES, "auroc", "f1")
    counts = measure([*samples, (torch.randn(0, 3), torch.zeros(0, 3, dtype=torch.bool))], names)
    told, row = scores_per_client(counts, MULTILABEL), summarize_scores(counts, MULTILABEL)

    def over_labels(logits, y):
        found = []
        for label in range(3):
            shares = logits[:, label].double().sigmoid().numpy()
            shares = np.stack([1 - shares, shares], 1)
            guess = (logits[:, label] > 0).long().numpy()
            found.append(counted_by_sklearn(guess, y[:, label].long().numpy(), shares))
        return {name: 100 * mean_of_known([one[name] for one in found]) for name in found[0]}

    for client, (logits, y) in enumerate(samples):
        wanted = over_labels(logits, y)
        own = {name: told[name][client] for name in wanted}
        assert own == pytest.approx(wanted, abs=1e-4, nan_ok=True), client
    together = over_labels(*map(torch.cat, zip(*samples, strict=True)))
    for name in SUMMED_MEASURES:
        assert row[f"{name}_pooled"] == pytest.approx(together[name], abs=1e-9)
    assert math.isnan(told["kappa"][-1])


@needed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["fedper", "apfl"])
def test_what_is_asked_for_besides_is_alike_on_both_backends_and_changes_nothing(
    name, federation, net
):
    """The tallies stay bit for bit; the matrix's diagonal is what clients are judged by."""
    method, everyone, told = METHODS[name](), list(range(federation.clients)), []
    state = record_states(method, net, federation, COHORTS[:1])[-1]
    whole, two = (federation.merge_clients(count) for count in (10, 2))
    for engine in BACKENDS:
        runner = make_backend(as_engine(engine), net, CPU)
        call = EvalCall(method, federation, state, everyone)
        plain = runner.evaluate_splits(call)["test"]
        asked = runner.evaluate_splits(replace(call, measures=NAMES, common_federation=whole))
        assert all(map(torch.equal, asked["test"][:3], plain[:3]))
        assert torch.equal(asked["common"].correct.diagonal(), plain.correct)
        halves = runner.evaluate_splits(replace(call, common_federation=two))["common"]
        assert torch.equal(halves.correct.sum(1), asked["common"].correct.sum(1))
        told.append([scores_per_client(asked["test"]), asked["common"].correct])
    require_close("measures", *told, atol=1e-4, rtol=1e-5)


SMALL = (*TINY, "validation=0.25")
OWN_MEASURES = """
def sure(probabilities, predicted, labels):
    return probabilities.max(1).values.double().mean() - 0.5 if 0 in labels else float("nan")
def faulty(probabilities, predicted, labels):
    return 7.25
METRICS = {"sure": sure, "faulty": faulty}
"""


@pytest.fixture
def forgotten():
    """What a test's plugin added is forgotten afterwards."""
    yield
    plugins.load_plugins([])


@pytest.mark.usefixtures("forgotten")
def test_a_plugins_measures_are_columns_of_the_numbers_that_they_answer(tmp_path):
    (tmp_path / "own.py").write_text(OWN_MEASURES)
    words = (*SMALL, "method=fedper", f"plugins=['{tmp_path}/own.py']", "metrics=[sure,faulty]")
    words += ("eval.every=2", "unseen=0.25")
    run = fedpfl.run(*words, directory=tmp_path / "run", progress=False)
    last, ours = run.rounds.iloc[-1], run.clients[run.clients["unseen"] == 0]
    assert (ours["faulty"] == 7.25).all()
    assert last[["faulty", "val_faulty", "unseen_faulty"]].tolist() == [7.25] * 3
    assert ours["sure"].dropna().between(-0.4, 0.5).all()
    assert last["sure"] == pytest.approx(ours["sure"].mean())
    table = accuracy_table(runs(tmp_path / "run"), chosen=["accuracy", "faulty"])
    assert (table.frame["faulty"] == 7.25).all()
    with pytest.raises(FedpflError, match=r"^metrics must be some of: one of .*got 'sure'"):
        fedpfl.run(*SMALL, "metrics=[sure]", directory=tmp_path / "other", progress=False)


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
    other = fedpfl.run(*SMALL, "method=fedper", asked[0], directory=tmp_path / "b", progress=False)
    assert other.rounds["server_accuracy"].isna().all()
    assert other.rounds["common_accuracy"].between(0, 100).all()
