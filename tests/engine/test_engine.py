"""The engine: random draws, rounds, what toy methods answer through every hook, evaluation,
precision, errors, CUDA.
"""

import copy
import random
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from fedpfl import data
from fedpfl.data.datasets import Samples
from fedpfl.data.partition import Partition
from fedpfl.engine import (
    Engine,
    FineTuning,
    Local,
    RoundSetup,
    draw_cohorts,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.backends.backend import reproducible_arithmetic
from fedpfl.engine.backends.selection import find_device, require_supported
from fedpfl.engine.calls import Counts, EvalCall
from fedpfl.engine.evaluate import pooled_accuracy, scores_per_client, summarize_scores
from fedpfl.engine.keys import Draws, generator
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Masked
from fedpfl.methods import METHODS, FedAvg, Method, Phase
from tests.conftest import (
    BACKENDS,
    CLASSES,
    COHORTS,
    CPU,
    LOCAL,
    TEST,
    TRAIN,
    Tiny,
    assert_close,
    assert_same,
    client_row,
    differing,
    evaluate,
    every_method,
    flatten,
    make_federation,
    participate,
    record_rounds,
    record_states,
    state_trees,
    take_part,
    tiny,
)

EVERYONE = list(range(10))
GENTLE = Local(epochs=2, batch_size=32, lr=0.05)


def steps(samples: int, local: Local = LOCAL, epochs: int | None = None) -> int:
    """Batches of a client: full ones, and a last one of at least two."""
    return (epochs or local.epochs) * (
        samples // local.batch_size + (samples % local.batch_size > 1)
    )


def images(federation, client):
    index = federation.train[client]
    return (federation.x[index].float() / 255 - 0.4) / 0.3, federation.y[index]


# Draws


@pytest.mark.parametrize(
    ("clients", "participation", "size"),
    [(100, 0.1, 10), (100, 0.29, 29), (10, 0.05, 1), (7, 0.5, 3), (5, 1.0, 5), (1, 0.3, 1)],
)
def test_cohort_sizes(clients, participation, size):
    for cohort in draw_cohorts(0, clients, participation, 5):
        assert len(set(cohort)) == len(cohort) == size
        assert cohort == sorted(cohort)
        assert set(cohort) <= set(range(clients))


def test_cohorts_come_from_one_stream_of_random_sample():
    random.seed(7)
    expected = [sorted(random.sample(range(50), 5)) for _ in range(20)]
    assert list(draw_cohorts(7, 50, 0.1, 20)) == expected
    assert list(draw_cohorts(7, 50, 0.1, 12)) == expected[:12]
    assert list(draw_cohorts(8, 50, 0.1, 20)) != expected
    stream = draw_cohorts(7, 50, 0.1, 2**63)  # drawn as they come
    assert [next(stream) for _ in range(20)] == expected


# State


# Outcomes


def test_losses_are_means_over_a_clients_steps(net, federation, backend):
    """By hand for one epoch with a vanishing learning rate; clients 5 of three samples, 9 without a
    step.
    """
    local = Local(epochs=1, batch_size=512, lr=1e-20)
    cohort = [0, 5, 9]
    _, (outcome,) = record_rounds(FedAvg(), net, federation, [cohort], engine=backend, local=local)
    module = Tiny()
    module.load_state_dict(net.params)
    expected = [
        F.cross_entropy(module(x), y).item() for x, y in (images(federation, i) for i in (0, 5))
    ]
    assert outcome.loss.tolist() == pytest.approx([*expected, 0.0], abs=1e-5)


def test_evaluation_passes_all_samples_once_in_chunks(net, backend):
    large = make_federation((4, 5, 6), (600, 0, 257))
    state = make_initial_state(FedAvg(), net, 3, CPU)
    counts = evaluate(FedAvg(), net, large, state, Engine(backend), [2, 0, 1])
    module = Tiny()
    module.load_state_dict(net.params)
    for k, client in enumerate([2, 0, 1]):
        y = large.y[large.test[client]]
        with torch.no_grad():
            logits = module((large.x[large.test[client]].float() / 255 - 0.4) / 0.3)
        assert counts.total[k] == len(y)
        assert counts.correct[k] == (logits.argmax(1) == y).sum()
        loss = float(F.cross_entropy(logits, y, reduction="sum"))
        assert float(counts.loss[k]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kept", [3, 1])
def test_predictions_are_among_the_classes_that_a_client_trains_on_where_it_is_said(
    kept, net, backend
):
    """By a plain loop; the loss is over all classes, and who has no training samples is judged over
    all.
    """
    whole = make_federation()
    train = tuple(
        own[whole.y[own] % 5 < kept + client % 2] for client, own in enumerate(whole.train)
    )
    train = (train[0][:0], *train[1:])
    samples = Samples("own", whole.x, whole.y, CLASSES, whole.mean, whole.std)
    split = Partition(*(tuple(own.numpy() for own in part) for part in (train, whole.test)))
    plain, judged = (
        data.build_federation(samples, split, only_local_classes=own) for own in (False, True)
    )
    first, two = (make_initial_state(FedAvg(), net, clients, CPU) for clients in (10, 2))
    over_all, over_own = (evaluate(FedAvg(), net, own, first, backend) for own in (plain, judged))
    assert_close(over_own.loss, over_all.loss)
    wanted = []
    for client, own in enumerate(whole.test):
        classes = sorted(set(whole.y[train[client]].tolist())) or range(CLASSES)
        logits = net.bind({"main": net.buffers})(net.params, whole.normalize(whole.x[own])).tolist()
        hits = [max(classes, key=row.__getitem__) for row in logits]
        wanted.append(sum(hit == y for hit, y in zip(hits, whole.y[own].tolist(), strict=True)))
    assert over_own.correct.tolist() == wanted != over_all.correct.tolist()
    assert judged.merge_clients(3).excluded_classes is None  # everybody's samples
    few = evaluate(FedAvg(), net, judged.select_clients([4, 2]), two, backend, [1, 0])
    assert few.correct.tolist() == [wanted[2], wanted[4]]


def test_accuracies_by_hand():
    counts = Counts(
        torch.tensor([1, 3, 0, 2]), torch.tensor([2.0, 1.0, 0.0, 4.0]), torch.tensor([2, 4, 0, 4])
    )
    result = summarize_scores(counts)
    assert result["accuracy"] == pytest.approx((50 + 75 + 50) / 3)
    assert result["accuracy_pooled"] == pooled_accuracy(counts) == pytest.approx(60)
    assert result["accuracy_std"] == pytest.approx(
        (2 * (25 / 3) ** 2 / 3 + (50 / 3) ** 2 / 3) ** 0.5
    )
    assert result["accuracy_worst10"] == 50
    assert result["loss"] == pytest.approx(0.7)
    assert scores_per_client(counts)["accuracy"] == pytest.approx(
        [50, 75, float("nan"), 50], nan_ok=True
    )


def test_without_test_samples_there_is_no_accuracy():
    nothing = Counts(
        torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    )
    assert {*summarize_scores(nothing).values(), pooled_accuracy(nothing)} == {None}
    assert all(value != value for value in scores_per_client(nothing)["accuracy"])


# Toy methods: every hook, with results by hand


@dataclass(frozen=True)
class TwoPhases(Method):
    """Every client draws a mask; its entries move first, then the others, each phase with batches
    of its own.
    """

    def init(self, params, parts):
        return params, {"mask": tree.full_like(params, False), "end": params}

    def sample(self, server, generator):
        drawn = lambda leaf: torch.rand(leaf.shape, generator=generator) < 0.3  # noqa: E731
        return {"mask": tree.map(drawn, server)}

    def phases(self, server, client, params, epochs):
        others = tree.invert(client["mask"])
        return [Phase(1, client["mask"], "first"), Phase(2, others, "second")]

    def finish(self, server, client, start, end):
        return end, {"mask": client["mask"], "end": end}


def masked_by_hand(net, federation, start, mask, client, t):
    """SGD with momentum 0.7 and weight decay over two phases: an entry that does not move gathers
    no momentum.
    """
    module = Tiny()
    module.load_state_dict(start)
    speed = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    x, y = images(federation, client)
    others = {name: ~own for name, own in mask.items()}
    for stream, epoch, chosen in (("first", 0, mask), ("second", 0, others), ("second", 1, others)):
        drawn = generator(0, "train", t, client, stream, epoch)
        for batch in torch.randperm(len(y), generator=drawn).split(LOCAL.batch_size):
            if len(batch) < 2:
                continue
            module.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            for name, p in module.named_parameters():
                step = 0.7 * speed[name] + p.grad + 1e-4 * p.data
                speed[name][chosen[name]] = step[chosen[name]]
                p.data[chosen[name]] -= 0.05 * step[chosen[name]]
    return {name: p.detach() for name, p in module.named_parameters()}


def test_masked_phases_with_streams_of_their_own(net, federation, backend):
    states = record_states(TwoPhases(), net, federation, COHORTS[:2], engine=backend)
    for t, cohort in enumerate(COHORTS[:2], 1):
        for client in cohort:
            own = states[t].client(client)
            expected = masked_by_hand(net, federation, states[t - 1].server, own["mask"], client, t)
            assert_close(own["end"], expected, atol=1e-6, rtol=0)


def test_draws_are_the_clients_and_the_rounds_own(net, federation, backend):
    states = record_states(TwoPhases(), net, federation, [[0, 1], [0]], engine=backend)
    found = []
    for t, client in ((1, 0), (1, 1), (2, 0)):
        g = generator(0, "train", t, client, "draw")
        expected = {name: torch.rand(p.shape, generator=g) < 0.3 for name, p in net.params.items()}
        found.append(client_row(states[t].clients["mask"], client))
        assert_same(found[-1], expected)
    assert differing(found[0], found[1])
    assert differing(found[0], found[2])


@dataclass(frozen=True)
class Observer(Method):
    """Adds up what it is shown at every step."""

    frozen_head: bool = False

    def init(self, params, parts):
        zero = torch.zeros(())
        client = {**dict.fromkeys(("steps", "loss", "samples"), zero), "first": params}
        nothing = tree.full_like(params, 0.0)
        return params, {**client, "gradient": nothing, "moved": nothing}

    def phases(self, server, client, params, epochs):
        mask = {name: "classifier" not in name for name in params} if self.frozen_head else None
        return [Phase(epochs, mask, after_gradient=self._observe)]

    def _observe(self, server, client, params, grads, batch, loss, kept):
        begun = client["steps"] > 0
        return {
            **client,
            "steps": client["steps"] + 1,
            "loss": client["loss"] + loss,
            "samples": client["samples"] + batch.samples.sum(),
            "gradient": tree.map(torch.add, client["gradient"], grads),
            "first": tree.where(begun, client["first"], params),
        }

    def finish(self, server, client, start, end):
        return end, {**client, "moved": tree.map(torch.sub, end, start)}


def test_after_gradient_sees_every_step_before_it_is_made(net, federation, backend):
    state = make_initial_state(Observer(), net, 10, CPU)
    part = participate(Observer(), net, federation, state, EVERYONE, engine=backend, local=GENTLE)
    for client in EVERYONE:
        own, n = client_row(part.client_states, client), TRAIN[client]
        assert own["steps"] == steps(n)
        assert own["samples"] == 2 * (n - (n % 32 == 1))
        assert_close(own["moved"], tree.map(lambda g: -0.05 * g, own["gradient"]), atol=1e-6)
        assert_same(own["first"], net.params)
        assert float(own["loss"] / max(1, steps(n))) == pytest.approx(
            float(part.loss[client]), abs=1e-5
        )


def test_after_gradient_gets_zero_gradients_for_what_does_not_move(net, federation, backend):
    part = take_part(
        Observer(frozen_head=True), net, federation, backend, clients=[0, 2], local=GENTLE
    )
    for name, leaf in part.client_states["gradient"].items():
        assert bool((leaf == 0).all()) == ("classifier" in name)


@dataclass(frozen=True)
class Summarizer(Method):
    """Sums pixels, samples and (at the trained model) logits over a client's training data."""

    def init(self, params, parts):
        one = torch.zeros(())
        return params, {"mean": torch.zeros(1, 8, 8), "samples": one, "logits": torch.zeros(5)}

    def after_training(self, server, client, net, params, shard, kept):
        assert not net.training
        assert kept == {}
        batches = list(shard.data.chunks())
        assert all(batch.weight is None for batch in batches)
        n = sum(len(batch.y) for batch in batches)
        return {
            "mean": sum(batch.x.sum(0) for batch in batches) / n,
            "samples": torch.tensor(1.0 * n),
            "logits": sum(self.predict(net, params, batch).sum(0) for batch in batches),
        }


def test_after_training_sees_all_training_samples_and_the_trained_model(backend):
    """In evaluation mode, by the statistics as they are after training."""
    large, net = make_federation((300, 5, 1, 130), (2, 2, 2, 2)), tiny(norm=True)
    state = make_initial_state(Summarizer(), net, 4, CPU)
    part = participate(Summarizer(), net, large, state, [0, 1, 2, 3], engine=backend)
    for client in range(4):
        found, (x, y) = client_row(part.client_states, client), images(large, client)
        assert found["samples"] == len(y)
        assert_close(found["mean"], x.mean(0), atol=1e-5)
        module = Tiny(norm=True).eval()
        ends = client_row(part.uploads, client) | client_row(part.buffers["main"], client)
        module.load_state_dict(ends)
        assert_close(found["logits"], module(x).sum(0).detach(), atol=1e-3, rtol=1e-4)


@dataclass(frozen=True)
class Replying(Method):
    """Sends every client of the cohort a reply: how far its upload lies from the mean."""

    def init(self, params, parts):
        return params, {"gap": torch.zeros(())}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        server, clients = super().aggregate(server, clients, net, uploads, weight, generator)
        gaps = [(uploads[name] - server[name]).abs().flatten(1).sum(1) for name in server]
        return server, {"gap": clients["gap"] + torch.stack(gaps).sum(0)}


def test_aggregate_may_reply_to_each_client(net, federation, backend):
    before, after = record_states(Replying(), net, federation, COHORTS[:1], engine=backend)
    part = participate(Replying(), net, federation, before, COHORTS[0], engine=backend)
    for k, client in enumerate(COHORTS[0]):
        upload = client_row(part.uploads, k)
        gap = sum(float((upload[name] - after.server[name]).abs().sum()) for name in upload)
        assert float(after.clients["gap"][client]) == pytest.approx(gap, rel=1e-4)
    assert [float(after.clients["gap"][i]) for i in EVERYONE if i not in COHORTS[0]] == [0] * 5


@dataclass(frozen=True)
class OwnLosses(Method):
    """Minimises the norm of the parameters in one phase, and nothing that depends on them in the
    other.
    """

    def phases(self, server, client, params, epochs):
        return [Phase(1, loss=self._shrink), Phase(3)]

    def _shrink(self, server, client, net, params, batch):
        return sum(leaf.square().sum() / 2 for leaf in tree.leaves(params))

    def loss(self, server, client, net, params, batch):
        return sum((0.0 * leaf).sum() for leaf in tree.leaves(params))


def test_a_phase_may_have_a_loss_of_its_own(net, federation, backend):
    """Each step of the first phase shrinks everything by 1 - lr; the second moves nothing."""
    part = take_part(OwnLosses(), net, federation, backend, clients=[0, 4, 9], local=GENTLE)
    for k, client in enumerate([0, 4, 9]):
        factor = 0.95 ** steps(TRAIN[client], epochs=1)
        expected = {name: leaf * factor for name, leaf in net.params.items()}
        assert_close(client_row(part.uploads, k), expected, atol=1e-6)


@dataclass(frozen=True)
class Sparse(Method):
    """Uploads only the first tenth of every tensor; measures its cohort."""

    def finish(self, server, client, start, end):
        chosen = tree.map(
            lambda leaf: (torch.arange(leaf.numel()) * 10 < leaf.numel()).view(leaf.shape), end
        )
        return Masked(end, chosen), client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        return (
            tree.where(tree.take(uploads.mask, 0), tree.mean(uploads.values, weight), server),
            clients,
        )

    def metrics(self, server, client):
        return {"constant": torch.tensor(3.0), "size": torch.tensor(tree.size(server))}


def test_masked_uploads_are_averaged_counted_and_measured(net, federation, backend):
    states, (outcome,) = record_rounds(Sparse(), net, federation, COHORTS[:1], engine=backend)
    chosen = sum(-(-p.numel() // 10) for p in net.params.values())
    assert outcome.traffic.values_up == 5 * chosen
    assert outcome.traffic.bits_up == 5 * (32 * chosen + min(32 * chosen, 549))
    assert outcome.metrics == {"constant": 3.0, "size": 549.0}
    for name, leaf in states[-1].server.items():
        same = leaf.flatten() == net.params[name].flatten()
        assert same[-(-leaf.numel() // 10) :].all()
        assert not same[0]


@dataclass(frozen=True)
class Prepared(Method):
    """Counts its participations in `prepare`; what is prepared reaches every later hook."""

    def init(self, params, parts):
        return params, {"times": torch.zeros(())}

    def prepare(self, server, client):
        return {"times": client["times"] + 1, "scale": client["times"] * 0}

    def start(self, received, client):
        return tree.map(lambda leaf: leaf * client["scale"], received)

    def finish(self, server, client, start, params):
        return start, {"times": client["times"]}


def test_prepare_runs_once_per_participation(net, federation, backend):
    state = record_states(Prepared(), net, federation, engine=backend)[-1]
    counts = [sum(client in cohort for cohort in COHORTS) for client in EVERYONE]
    assert state.clients["times"].tolist() == counts
    assert all(not leaf.any() for leaf in state.server.values())


# Precision, settings and errors


def test_bf16_differs_from_fp32_and_keeps_states_in_fp32(net, federation, backend):
    half, full = (
        record_states(FedAvg(), net, federation, COHORTS[:1], engine=engine)[-1]
        for engine in (Engine(backend, precision="bf16"), backend)
    )
    assert differing(half.server, full.server)
    assert_close(half.server, full.server, atol=5e-3)
    assert {leaf.dtype for leaf in flatten(half).values()} == {torch.float32}


@pytest.mark.parametrize("field", ["workers", "width"])
def test_engine_settings_out_of_range_are_named(field):
    with pytest.raises(ValueError, match=f"{field} must be 0 or more, got -1"):
        Engine(**{field: -1})


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
    there, states = federation.to(gpu), record_states(method, net, federation)
    runner = make_backend(Engine(backend), net, gpu)
    for t, cohort in enumerate(COHORTS):
        before = {
            part: tree.to(copy.deepcopy(getattr(states[t], part)), gpu)
            for part in ("server", "server_buffers")
        }
        state = replace(make_initial_state(method, net, 10, gpu), round=t, **before)
        facts = states[t].rows.take("facts", EVERYONE)
        state.rows.put_(
            EVERYONE,
            {"client": states[t].clients, "buffers": states[t].client_buffers, "facts": facts},
        )
        state, outcome = play_round(RoundSetup(runner, method, there, LOCAL, 0), state, cohort)
        after = state_trees(state)
        assert all(leaf.device.type == "cuda" for leaf in flatten(after).values())
        assert_close(tree.to(after, CPU), state_trees(states[t + 1]), atol=1e-4, rtol=1e-3)
        assert outcome.before.total.tolist() == [TEST[i] for i in cohort]


@pytest.mark.cuda
@pytest.mark.parametrize("name", BACKENDS)
def test_evaluation_and_tuning_on_cuda_equal_the_cpus(name, net, federation, exact_products):
    gpu = torch.device("cuda")
    for tuning in (None, FineTuning(LOCAL, Draws(0, "finetune", 0))):
        first, state = (make_initial_state(FedAvg(), net, 10, device) for device in (CPU, gpu))
        here = evaluate(FedAvg(), net, federation, first, tuning=tuning)
        call = EvalCall(FedAvg(), federation.to(gpu), state, EVERYONE, tuning)
        there = make_backend(Engine(name), net, gpu).evaluate(call)
        assert there.correct.tolist() == here.correct.tolist()
        assert_close(there.loss.cpu(), here.loss, atol=1e-3, rtol=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_reduced_precision_on_cuda_is_near_fp32(name, precision, net, federation, exact_products):
    gpu = torch.device("cuda")
    full = record_states(FedAvg(), net, federation, COHORTS[:1])[-1]
    backend = make_backend(Engine(name, precision=precision), net, gpu)
    state, _ = play_round(
        RoundSetup(backend, FedAvg(), federation.to(gpu), LOCAL, 0),
        make_initial_state(FedAvg(), net, 10, gpu),
        COHORTS[0],
    )
    assert_close(tree.to(state.server, CPU), full.server, atol=5e-3)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch-norm"])
def test_bf16_evaluates_with_what_it_trains_with(norm, backend, place, federation):
    """Convolutions, linear layers and logits are bf16, on each backend and device."""
    net, seen, where = tiny(norm), set(), torch.device(place)
    for layer in (net.module.conv, net.module.fc, net.module.classifier):
        layer.register_forward_hook(
            lambda module, _, output: seen.add((module.training, output.dtype))
        )
    runner = make_backend(Engine(backend, workers=1, precision="bf16"), net, where)
    there = federation.to(where)
    play_round(
        RoundSetup(runner, FedAvg(), there, LOCAL, 0),
        make_initial_state(FedAvg(), net, 10, where),
        COHORTS[0],
    )
    assert seen == {(False, torch.bfloat16), (True, torch.bfloat16)}


def test_a_fine_tuned_copy_is_evaluated_with_the_statistics_that_its_tuning_left(backend):
    """Steps too short to move a parameter: the statistics alone tell it from the model as it was."""
    net, federation = tiny(norm=True), make_federation((64, 40), (30, 20))
    state = make_initial_state(FedAvg(), net, 2, CPU)
    still = FineTuning(Local(epochs=3, batch_size=32, lr=1e-30), Draws(0, "finetune", 0))
    plain, tuned = (
        evaluate(FedAvg(), net, federation, state, backend, tuning=own) for own in (None, still)
    )
    assert not torch.equal(plain.loss, tuned.loss)
