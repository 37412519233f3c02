"""FedAvg, fine-tuning, FedOBP's scores and masks."""

import pytest
import torch
import torch.nn.functional as F

from fedpfl.engine import FineTuning, make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import FedALA, FedAvg, FedOBP, FedPer, LGFedAvg
from fedpfl.methods.shared import importance
from tests.conftest import (
    BACKENDS,
    COHORTS,
    CPU,
    HEAD,
    LOCAL,
    Tiny,
    assert_close,
    assert_same,
    client_row,
    differing,
    evaluate,
    make_federation,
    record_states,
)

UNSEEN = 7  # until round 3


def personal(method, state, client):
    return method.personal(state.server, state.client(client))


def module_with(params) -> Tiny:
    module = Tiny()
    module.load_state_dict(params)
    return module.eval()


def images(federation, index):
    pixels = federation.x[index].float() / 255
    return (pixels - federation.mean[0]) / federation.std[0], federation.y[index]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    return request.param


def test_fine_tuning_the_old_global_model_gives_the_new_one(net, federation):
    """If the cohort is that client alone and the batch order is the round's."""
    states = record_states(FedAvg(), net, federation, [[1], [2]])
    for t, client in ((0, 1), (1, 2)):
        tuned, other = (
            evaluate(FedAvg(), net, federation, states[t], clients=[client], tuning=tuning)
            for purpose in ("train", "finetune")
            for tuning in [FineTuning(LOCAL, Draws(0, purpose, t + 1))]
        )
        new = evaluate(FedAvg(), net, federation, states[t + 1], clients=[client])
        assert_same(tuned, new)
        assert differing(other, new)


# FedOBP


def test_scope_tensor_has_the_same_share_of_every_tensor(net, federation):
    method = FedOBP(q=0.8, scope="tensor")
    state = record_states(method, net, federation)[-1]
    mask = method.prepare(state.server, state.client(0))["mask"]
    for leaf in mask.values():
        assert leaf.sum() == importance.personal_count(0.8, leaf.numel())


def test_classifier_only_shares_the_body_bit_for_bit(backend, net, federation):
    method = FedOBP(q=0.5, classifier_only=True)
    state = record_states(method, net, federation, engine=backend)[-1]
    assert set(state.clients["model"]) == set(HEAD)
    merged = personal(method, state, 0)
    own = [name for name in merged if not torch.equal(merged[name], state.server[name])]
    assert own == list(HEAD)
    mask = method.prepare(state.server, state.client(0))["mask"]
    assert tree.ravel(mask).sum() == importance.personal_count(0.5, 65)


def test_ema_over_three_rounds_by_hand(backend, net, federation):
    """S = I at the first participation, then (1 - a) I + a S; it stands still in rounds without the
    client.
    """
    method, cohorts = FedOBP(q=0.8, ema=0.3), [[0, 1, 2], [0, 1], [0, 2], [0, 1, 2]]
    states = record_states(method, net, federation, cohorts, engine=backend)
    average = {}
    for t, cohort in enumerate(cohorts):
        for i in cohort:
            own, shared = client_row(states[t].clients["model"], i), states[t].server
            now = {k: (own[k].double() - shared[k].double()) ** 2 for k in own}
            old = average.get(i, now)
            average[i] = {k: 0.7 * now[k] + 0.3 * old[k] for k in own}
        for i in average:
            kept = client_row(states[t + 1].clients["average"], i)
            assert_close(kept, tree.map(torch.Tensor.float, average[i]), atol=1e-12, rtol=1e-4)
    assert states[-1].client(range(10))["participated"].tolist() == [True] * 3 + [False] * 7
    # What the last round started from was chosen by the average, not by the score alone: but for
    # rounding next to the threshold.
    chosen = importance.mask_above_quantile(tree.map(torch.Tensor.float, average[0]), 0.8)
    own, off = (
        tree.ravel(each.prepare(states[-2].server, states[-2].client(0))["mask"])
        for each in (method, FedOBP(q=0.8))
    )
    assert (tree.ravel(chosen) != own).sum() <= 2 < (off != own).sum()


@pytest.mark.parametrize("score", ["obp", "obp_as_published"])
def test_a_client_that_never_trained_keeps_initial_values_where_the_model_moved_most(
    score, backend, net, federation
):
    method = FedOBP(q=0.9, score=score)
    state = record_states(method, net, federation, COHORTS[:2], engine=backend)[-1]
    merged, initial, shared = (
        tree.ravel(t) for t in (personal(method, state, UNSEEN), net.params, state.server)
    )
    fallen = merged != shared
    assert fallen.sum() == importance.personal_count(0.9, len(merged))
    assert torch.equal(merged[fallen], initial[fallen])
    moved = (initial - shared).square() if score == "obp" else ((initial - shared) * initial).abs()
    assert moved[fallen].min() > moved[~fallen].max()


@pytest.mark.parametrize("score", ["gradient", "fisher", "fisher_batch"])
def test_scores_of_training_make_nothing_personal_before_it(score, backend, net, federation):
    method = FedOBP(q=0.5, score=score)
    state = record_states(method, net, federation, COHORTS[:2], engine=backend)[-1]
    assert_same(personal(method, state, UNSEEN), state.server)


@pytest.fixture(scope="module")
def large():
    """Clients beyond the chunks in which data passes (128 and 256)."""
    return make_federation((300, 5, 130), (4, 300, 2))


def fisher_by_hand(federation, client, params, batch: bool):
    """One backward per sample (or one in all) of the plain module at theta_i, in evaluation mode."""
    module = module_with(params)
    x, y = images(federation, federation.train[client])
    groups = [(x, y)] if batch else [(x[i : i + 1], y[i : i + 1]) for i in range(len(y))]
    total = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for one_x, one_y in groups:
        module.zero_grad()
        F.cross_entropy(module(one_x), one_y).backward()
        for name, p in module.named_parameters():
            total[name] += p.grad**2 / len(groups)
    return total


@pytest.mark.parametrize("score", ["fisher", "fisher_batch"])
def test_fisher_scores_are_those_of_a_loop_over_samples(score, backend, net, large):
    state = record_states(FedOBP(q=0.9, score=score), net, large, [[0, 1, 2]], engine=backend)[-1]
    for client in range(3):
        model = client_row(state.clients["model"], client)
        expected = fisher_by_hand(large, client, model, score == "fisher_batch")
        assert_close(client_row(state.clients["score"], client), expected, atol=1e-9, rtol=2e-4)


# FedPer


@pytest.mark.parametrize("method", [FedPer(layers=4), FedALA(layers=4), LGFedAvg(layers=4)])
def test_more_layers_than_the_network_has_are_refused(method, net):
    told = r"^method\.layers must be at most 3, the network's layers, got 4$"
    with pytest.raises(FedpflError, match=told):
        make_initial_state(method, net, 10, CPU)
