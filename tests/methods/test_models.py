"""Methods whose clients train the network as it is, at the ends of their ranges."""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedpfl import models
from fedpfl.engine import FineTuning, Local, make_backend, make_initial_state
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import (
    APFL,
    FedALA,
    FedAvg,
    FedBN,
    FedOBP,
    FedRep,
    KNNPer,
    PerFedAvg,
    PFedHN,
    PFedMe,
    Scaffold,
)
from fedpfl.testing.toy import CPU, LOCAL, LOOP, differing, tiny
from tests.conftest import (
    COHORTS,
    HEAD,
    assert_close,
    assert_same,
    client_row,
    evaluate,
    find_eval_job,
    make_federation,
    participate,
    record_rounds,
    record_states,
)
from tests.methods.reference import masks
from tests.methods.reference.conftest import describe_setting

UNSEEN = 7  # until round 3


@pytest.mark.parametrize("score", ["gradient", "fisher", "fisher_batch"])
def test_scores_of_training_make_nothing_personal_before_it(score, backend, net, federation):
    method = FedOBP(q=0.5, score=score)
    state = record_states(method, net, federation, COHORTS[:2], engine=backend)[-1]
    assert_same(method.personal(state.server, state.client(UNSEEN)), state.server)


@pytest.mark.parametrize(("score", "size"), [("fisher", 1), ("fisher_batch", 300)])
def test_fisher_scores_are_those_of_a_loop_over_samples(score, size, backend, net):
    """Of clients beyond the chunks in which data passes (128 and 256)."""
    large = make_federation((300, 5, 130), (4, 300, 2))
    setting = describe_setting(net, large)
    state = record_states(FedOBP(q=0.9, score=score), net, large, [[0, 1, 2]], engine=backend)[-1]
    for client in range(3):
        expected = masks.fisher(setting, client_row(state.clients["model"], client), client, size)
        assert_close(client_row(state.clients["score"], client), expected, atol=1e-9, rtol=2e-4)


def test_apfl_alpha_stays_between_0_and_1_and_is_told_as_it_was(backend, net, federation):
    method = APFL(alpha_lr=50.0)
    states, outcomes = record_rounds(method, net, federation, COHORTS[:2], engine=backend)
    for state, outcome, cohort in zip(states, outcomes, COHORTS, strict=False):
        mean = float(state.clients["alpha"][cohort].mean())
        assert outcome.metrics == {"alpha": pytest.approx(mean)}
    alphas = torch.stack([state.clients["alpha"] for state in states])
    assert (alphas.min(), alphas.max()) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("losses", "threshold", "wanted"),
    [
        ([0.0, 0.0, 0.3, 0.12, 0.12], 0.1, 4),  # deviations 0 (too early), 0.15, 0.09
        ([0.0, 9.0, 0.0, 9.0, 0.0], 0.1, 5),  # never
        ([math.nan] * 5, 0.1, 1),
    ],
)
def test_fedala_settles_when_the_standard_deviation_of_the_last_losses_is_below_the_threshold(
    losses, threshold, wanted, net, federation
):
    """That of the last `window` losses themselves, over their number (arXiv:2212.01197 and its
    code). Of an epoch's two minibatches the last one counts.
    """
    given_losses, made = iter(losses), []

    class Told(FedALA):
        def _objective(self, server, client, net, batch):
            made.append(len(batch.y))
            last = len(made) == 2
            return lambda top: 0 * tree.ravel(top).sum() + (next(given_losses) if last else 100.0)

    state = record_states(FedALA(), net, federation, COHORTS[:1])[-1]
    method = Told(threshold=threshold, window=2, max_epochs=5)
    shard = make_shard(federation, 2, LOCAL.batch_size, Draws(0, "train", 9))
    method.before_training(state.server, state.client(2), net.bind({"main": {}}, True), shard)
    assert made == [32, 20]  # of 80 % of 65
    assert len(losses) - len(list(given_losses)) == wanted


@pytest.mark.parametrize(
    ("method", "sgd"),
    [
        (PFedMe(), {}),  # that of the private model
        (PerFedAvg("hf", inner_lr=0.1, outer_lr=0.05, delta=0.01), {"lr": 0.1, "momentum": 0.0}),
    ],
    ids=["pfedme", "per_fedavg"],
)
def test_fine_tuning_is_plain_descent(method, sgd, backend, net, federation):
    """Of the initial model, as FedAvg's is with these steps."""
    tuning = FineTuning(replace(LOCAL, batch_size=8), Draws(0, "finetune", 3))
    descent = tuning._replace(local=replace(tuning.local, **sgd))
    tuned, descended, untuned = (
        evaluate(own, net, federation, state, backend, tuning=steps)
        for own, steps in ((method, tuning), (FedAvg(), descent), (method, None))
        for state in [make_initial_state(own, net, 10, CPU)]
    )
    assert_same(tuned, descended)
    assert differing(tuned.loss, untuned.loss)


def test_pfedhn_a_newcomer_has_the_mean_embedding(net):
    method = PFedHN(hidden=20)
    state = make_initial_state(method, net, 10, CPU)
    table = state.server["learned"]["v"]
    table[0] = table[1:].mean(0)  # which is that of all
    mean, own = (method.personal(state.server, state.client(i)) for i in (0, 3))
    newcomer = dataclasses.replace(state, members=state.rows).client(3)
    new = method.personal(state.server, newcomer)
    assert_close(new, mean, atol=1e-6)
    assert max(float((new[name] - leaf).abs().max()) for name, leaf in own.items()) > 1e-3


def test_scaffold_with_momentum_a_control_is_still_a_mean_gradient(net, federation):
    """Of one step: the gradient itself, whatever the momentum."""
    method, one = Scaffold(), Local(epochs=1, batch_size=512, lr=0.05)
    state = make_initial_state(method, net, 10, CPU)
    plain, heavy = (
        participate(method, net, federation, state, [2], local=replace(one, momentum=momentum))
        for momentum in (0.0, 0.9)
    )
    assert_same(plain.client_states["control"], heavy.client_states["control"])
    change = tree.take(plain.uploads["model"], 0)
    control = tree.take(plain.client_states["control"], 0)
    assert_close(control, tree.map(lambda dy: -dy / one.lr, change), atol=1e-5, rtol=1e-3)


BODY = ("conv.weight", "conv.bias", "fc.weight", "fc.bias")
TUNED = [
    (FedAvg(), "head", HEAD),
    (FedRep(), "all", HEAD),  # arXiv:2102.07078
    # Both models, and not the weight between them.
    (APFL(alpha_lr=1.0), "all", [f"{role}/{name}" for role in "wv" for name in (*BODY, *HEAD)]),
    # Neither what is laid by nor its weight
    (KNNPer(), "all", [f"model/{name}" for name in HEAD]),
]


@pytest.mark.parametrize(("base", "part", "names"), TUNED, ids=str)
def test_fine_tuning_moves_what_the_paper_says(base, part, names, net, federation):
    """Seen through a method whose predictions are asked for after fine-tuning."""
    seen = []

    class Watched(type(base)):
        def predict(self, net, params, batch):
            if not net.training:
                seen.append(tree.map(lambda leaf: leaf.detach().clone(), params))
            return super().predict(net, params, batch)

    method = Watched(**dataclasses.asdict(base))
    state = record_states(base, net, federation, COHORTS[:1])[-1]
    kept, job = tree.clone(state.server), find_eval_job(base, net, federation, state, 2)
    tuning = FineTuning(LOCAL, Draws(0, "finetune", 3), part)
    make_backend(LOOP, net, CPU).evaluate(EvalCall(method, federation, state, [2], tuning))
    moved = differing(seen[-1], job.params)
    assert {path.strip("/") for path in moved} == {*names}
    assert_same(state.server, kept)


def test_fedbn_goes_by_type_and_leaves_group_normalisation_shared():
    for norm, count in (("batch", 2 * 9), ("group", 0)):  # seven in paths and stem, two projections
        net = models.build_network("resnet8", (1, 28, 28), 10, 0, norm=norm)
        assert len(FedBN()._personal(net.parts)) == count
        assert net.parts.normalisation


def test_linear_probing_then_fine_tuning_is_two_trainings(backend, net, federation):
    """Of the head and then of everything, by two optimizers of torch (arXiv:2202.10054)."""
    client, own = 2, federation.train[2]
    module = tiny().module.to(memory_format=torch.channels_last)
    module.load_state_dict(dict(net.params))
    params, draws = dict(module.named_parameters()), Draws(0, "finetune", 1)
    values = {"lr": LOCAL.lr, "momentum": LOCAL.momentum, "weight_decay": LOCAL.weight_decay}
    for names, stream, epochs in ((HEAD, "main", 2), (params, "main 1", 1)):
        optimizer = torch.optim.SGD([params[name] for name in names], **values)
        for epoch in range(epochs):
            for rows in draws.order(client, stream, epoch, len(own)).split(LOCAL.batch_size):
                if len(rows) > 1:
                    optimizer.zero_grad()
                    x = federation.normalize(federation.x[own[rows]])
                    F.cross_entropy(module(x), federation.y[own[rows]]).backward()
                    optimizer.step()
    state = make_initial_state(FedAvg(), net, 10, CPU)
    tuning = FineTuning(LOCAL, draws, stages=(("head", 2), ("all", 1)))
    tuned = evaluate(FedAvg(), net, federation, state, backend, clients=[client], tuning=tuning)
    test = federation.test[client]
    logits = module(federation.normalize(federation.x[test]))
    wanted = F.cross_entropy(logits, federation.y[test], reduction="sum")
    assert_close(tuned.loss, wanted.detach()[None], atol=1e-4)
