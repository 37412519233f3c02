"""pFedFDA (arXiv:2411.00329): discriminant analysis, the search for beta, statistics, traffic."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedpfl import models
from fedpfl.engine import make_backend
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground.traffic import count_traffic
from fedpfl.methods import Data, PFedFDA, Shard
from fedpfl.methods.pfedfda import Features
from fedpfl.methods.shared.gaussian import (
    class_frequencies,
    class_means,
    lda_head,
    pack_symmetric,
    unpack_symmetric,
)
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    HEAD,
    LOOP,
    assert_close,
    assert_same,
    participate,
    record_states,
    tiny,
)
from tests.methods.reference.pfedfda import objective

UNIFORM = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spread(seed=0, width=12):
    """A symmetric positive definite matrix."""
    factor = draw(width, width, seed=seed)
    return factor @ factor.T / width + 0.1 * torch.eye(width, dtype=torch.float64)


def problem(samples=60, seed=0):
    """Features of unlike classes, and global statistics."""
    mean, cov = draw(CLASSES, 12, seed=seed), spread(seed)
    y = torch.arange(samples) % 3
    z = draw(CLASSES, 12, seed=seed + 1)[y] + 0.7 * draw(samples, 12, seed=seed + 2)
    return z, y, UNIFORM, mean, cov


def logits(z, head):
    return z @ head[0].T + head[1]


def test_with_a_spherical_covariance_the_nearest_mean_wins():
    mean, z = draw(CLASSES, 12), draw(200, 12, seed=1)
    head = lda_head(mean, 3 * torch.eye(12, dtype=torch.float64), UNIFORM, 1e-4)
    assert logits(z, head).argmax(1).tolist() == torch.cdist(z, mean).argmin(1).tolist()
    assert len(logits(z, head).argmax(1).unique()) == CLASSES


def test_lda_is_bayes_rule_for_gaussians():
    mean, cov, z = draw(CLASSES, 12), spread(), draw(50, 12, seed=1)
    prior = torch.tensor([0.5, 0.2, 0.1, 0.15, 0.05], dtype=torch.float64)
    shrunk = (1 - 1e-4) * cov + 1e-4 * cov.trace() / 12 * torch.eye(12, dtype=torch.float64)
    likelihood = [torch.distributions.MultivariateNormal(m, shrunk).log_prob(z) for m in mean]
    posterior = (torch.stack(likelihood, 1) + prior.log()).softmax(1)
    assert_close(
        {"": logits(z, lda_head(mean, cov, prior, 1e-4)).softmax(1)}, {"": posterior}, atol=1e-10
    )


def test_a_common_shift_of_means_and_features_moves_logits_by_a_constant():
    mean, cov, z, shift = draw(CLASSES, 12), spread(), draw(50, 12, seed=1), draw(12, seed=5)
    before = logits(z, lda_head(mean, cov, UNIFORM, 1e-4))
    after = logits(z + shift, lda_head(mean + shift, cov, UNIFORM, 1e-4))
    assert not torch.allclose(before, after)
    assert_close({"": after - after[:, :1]}, {"": before - before[:, :1]}, atol=1e-9)


class Forced(PFedFDA):
    def _search_beta(self, samples, shared, beta):
        return torch.full((2,), self.eps, dtype=torch.float64).round() + type(self).value


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_beta_of_one_is_local_and_of_zero_global(value):
    z, y, prior, mean, cov = problem()
    method = type("Fixed", (Forced,), {"value": value})()
    server = {"mean": mean, "cov": pack_symmetric(cov)}
    got = method._fit_statistics(Features(z, y, prior), server, torch.zeros(2), 1)
    own = class_means(z, y, mean, 1)
    scatter = sum(torch.outer(r, r) for r in z - own[y])
    local = scatter / (len(z) - 1) + torch.eye(12, dtype=torch.float64) + 1e-4
    wanted = (own, local) if value else (mean, cov)
    assert_close({"": got[0], "cov": got[1]}, {"": wanted[0], "cov": wanted[1]}, atol=1e-12)
    for c in range(3):
        assert_close({"": own[c]}, {"": z[y == c].mean(0)}, atol=1e-12)
    assert torch.equal(own[3:], mean[3:])


@pytest.mark.parametrize(("seed", "single"), [(0, False), (1, False), (2, True), (3, True)])
def test_beta_is_better_than_a_half_and_than_its_neighbours(seed, single):
    z, y, prior, mean, cov = problem(seed=seed)
    beta = PFedFDA(single_beta=single)._search_beta(
        Features(z, y, prior), (mean, cov), torch.zeros(2, dtype=torch.float64)
    )
    value = objective(z, y, prior, mean, cov, 2)
    least = value(beta)
    assert ((beta >= 0) & (beta <= 1)).all()
    assert not single or beta[0] == beta[1]
    assert least < value(torch.full((2,), 0.5, dtype=torch.float64))
    steps = (
        [(0.02, 0.02), (-0.02, -0.02)]
        if single
        else [(0.02, 0.0), (-0.02, 0.0), (0.0, 0.02), (0.0, -0.02)]
    )
    for step in steps:
        near = (beta + torch.tensor(step, dtype=torch.float64)).clamp(0, 1)
        assert value(near) >= least - 1e-6 * least.abs()


def test_without_a_class_of_enough_samples_beta_is_zero():
    z, _, prior, mean, cov = problem(samples=4)
    found = PFedFDA(folds=3)._search_beta(
        Features(z, torch.tensor([0, 0, 1, 2]), prior), (mean, cov), torch.full((2,), 0.7)
    )
    assert found.tolist() == [0, 0]


def test_where_the_search_fails_the_last_beta_stays():
    z, y, prior, mean, cov = problem()
    last = torch.tensor([0.2, 0.9], dtype=torch.float64)
    assert (
        PFedFDA()._search_beta(Features(z, y, prior), (mean, -cov), last).tolist() == last.tolist()
    )
    assert (
        PFedFDA()._search_beta(Features(z * math.nan, y, prior), (mean, cov), last).tolist()
        == last.tolist()
    )


def test_classes_of_few_samples_use_the_global_mean_at_judging(net, federation):
    """At most as many samples as folds."""
    z = draw(7, 12)
    means = class_means(z, torch.tensor([0, 0, 0, 1, 1, 2, 3]), draw(CLASSES, 12, seed=1), 3)
    assert torch.equal(means[1:], draw(CLASSES, 12, seed=1)[1:])
    assert_close({"": means[0]}, {"": z[:3].mean(0)}, atol=1e-12)


class Local(PFedFDA):
    """Takes statistics of the client alone."""

    def _search_beta(self, samples, shared, beta):
        return torch.ones_like(beta)


def test_training_takes_a_mean_from_a_single_sample(net):
    """Unlike judging (the official code's training tests for no number): class 3 has one, class 4
    none.
    """
    method = Local()
    server, client = method.init(net.params, net.parts)
    z, y = draw(8, 12).float(), torch.tensor([0, 0, 0, 1, 1, 1, 1, 3])
    client |= {"prior": class_frequencies(y, CLASSES, method.eps)}
    found = method.after_training(server, client, None, net.params, None, {"z": z, "y": y})["mean"]
    wanted = torch.stack(
        [z[:3].mean(0), z[3:7].mean(0), server["mean"][2], z[7], server["mean"][4]]
    )
    assert_close({"": found}, {"": wanted}, atol=1e-6)


@pytest.mark.parametrize("folds", [2, 3])
def test_judging_takes_a_mean_from_more_samples_than_folds_alone(folds, net):
    """Class 0 has as many samples as there are folds and class 1 one more: only the latter's mean
    is the client's.
    """
    method = Local(folds=folds)
    server, client = method.init(net.params, net.parts)
    y = torch.tensor([0] * folds + [1] * (folds + 1))
    data = Data(torch.rand(len(y), 1, 8, 8, generator=torch.Generator().manual_seed(0)), y)
    bound = net.bind({"main": {}})
    head = method.before_evaluation(server, client, bound, Shard(lambda: data, 32, None))["head"]
    with torch.no_grad():
        z = bound.features({**server["body"], **server["head"]}, data.x)[1].double()
    mean = server["mean"].double()
    mean[1] = z[folds:].mean(0)
    centred = z - mean[y]
    cov = centred.T @ centred / (len(y) - 1) + torch.eye(12, dtype=torch.float64) + 1e-4
    weight, bias = lda_head(mean, cov, class_frequencies(y, CLASSES, method.eps), method.eps)
    assert_close(head, {HEAD[0]: weight.float(), HEAD[1]: bias.float()}, atol=1e-4)
    other = mean.clone()
    other[0] = z[:folds].mean(0)
    assert (
        lda_head(other, cov, class_frequencies(y, CLASSES, method.eps), method.eps)[0] - weight
    ).abs().max() > 1e-2


def test_a_covariance_without_regularisation_is_made_positive_definite():
    z, y, prior, mean, cov = problem(samples=6)  # fewer samples than features: singular
    got = PFedFDA(cov_reg=0.0)._fit_statistics(
        Features(z, y, prior), {"mean": mean, "cov": pack_symmetric(cov)}, torch.zeros(2), 1
    )
    assert torch.linalg.eigvalsh(got[1]).min() > 0


def test_packing_keeps_a_symmetric_matrix():
    cov = spread()
    assert pack_symmetric(cov).shape == (78,)
    assert torch.equal(unpack_symmetric(pack_symmetric(cov)), cov)


class Spy(PFedFDA):
    """Uploads the trained tree as it was before and after."""

    def finish(self, server, client, start, end):
        return {"start": start, "end": end}, {"beta": client["beta"]}


def test_training_leaves_the_head_alone(backend, net, federation):
    state = record_states(PFedFDA(), net, federation, COHORTS[:1], engine=backend)[-1]
    part = participate(Spy(), net, federation, state, COHORTS[1], engine=backend)
    for name in HEAD:
        assert torch.equal(part.uploads["start"][name], part.uploads["end"][name])
    assert not torch.equal(part.uploads["start"]["fc.weight"], part.uploads["end"]["fc.weight"])
    assert not torch.equal(
        part.uploads["start"][HEAD[1]][0], part.uploads["start"][HEAD[1]][1]
    )  # own priors


def test_without_a_step_the_server_stays(backend, net, federation):
    """Client 9 has one sample, which makes no batch."""
    before, after = record_states(PFedFDA(), net, federation, [[9]], engine=backend)
    assert_close(after.server, before.server, rtol=1e-6)


def test_statistics_are_averaged_and_stay_positive_definite(backend, net, federation):
    method = PFedFDA()
    states = record_states(method, net, federation, engine=backend)
    sizes = federation.train_sizes[COHORTS[2]].float()
    part = participate(method, net, federation, states[2], COHORTS[2], engine=backend)
    for name in ("mean", "cov"):
        mean = torch.einsum("k,k...->...", sizes / sizes.sum(), part.uploads[name])
        assert_close({"": states[3].server[name]}, {"": mean}, atol=1e-6)
    for state in states:
        cov = unpack_symmetric(state.server["cov"])
        assert torch.equal(cov, cov.T)
        assert torch.linalg.eigvalsh(cov.double()).min() > 0
    assert not torch.equal(states[0].server["mean"], states[1].server["mean"])


def test_as_published_statistics_never_move(backend, net, federation):
    first, *_, last = record_states(
        PFedFDA(variant="as_published"), net, federation, COHORTS[:2], engine=backend
    )
    assert_same(last.server["mean"], first.server["mean"])
    assert (first.server["mean"] >= 0).all()
    assert (first.server["mean"] < 1).all()


def test_body_statistics_and_nothing_else_travel():
    net = models.build_network("cnn4", (3, 32, 32), 10, 0)
    method = PFedFDA()
    server, client = method.init(net.params, net.parts)
    assert int(count_traffic(method.download(server, client)).values) == 873_408 + 5_120 + 131_328


def test_every_client_is_judged_by_a_head_of_its_own(net, federation):
    method = PFedFDA()
    state = record_states(method, net, federation, COHORTS[:1])[-1]
    heads = []
    for client in (1, 4):  # never sampled
        shard = make_shard(federation, client, 32, Draws(0, "adapt", 1))
        own = state.client(client)
        own |= method.before_evaluation(state.server, own, net.bind({"main": {}}), shard)
        heads.append(method.personal(state.server, own))
    assert not torch.equal(heads[0]["classifier.weight"], heads[1]["classifier.weight"])
    assert_same(heads[0]["fc.weight"], state.server["body"]["fc.weight"])
    tally = make_backend(LOOP, net, CPU).evaluate(EvalCall(method, federation, state, [1, 4]))
    for k, client in enumerate((1, 4)):
        x = federation.normalize(federation.x[federation.test[client]])
        own = net.bind({"main": {}})(heads[k], x)
        loss = F.cross_entropy(own, federation.y[federation.test[client]], reduction="sum")
        assert_close({"": tally.loss[k]}, {"": loss}, atol=1e-4)


def test_features_are_judged_in_evaluation_mode(federation):
    net, method = tiny(norm=True), PFedFDA()
    state = record_states(method, net, federation)[-1]
    shard, client = make_shard(federation, 4, 32, Draws(0, "adapt", 1)), state.client(4)
    training, judging = (net.bind(state.server_buffers, training=t) for t in (True, False))
    assert_same(
        method.before_evaluation(state.server, client, training, shard),
        method.before_evaluation(state.server, client, judging, shard),
    )
    assert_same(training.buffers, state.server_buffers)
