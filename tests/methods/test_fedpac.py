"""FedPAC (arXiv:2306.11867): mixtures of heads, statistics, prototypes, both phases, traffic."""

import dataclasses

import pytest
import torch

from fedpfl import models
from fedpfl.engine import make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.engine.training.shard import make_shard
from fedpfl.ground import tree
from fedpfl.methods import Batch, FedPAC
from fedpfl.methods.fedpac import minimal_shares, mixture_shares
from tests.conftest import (
    CLASSES,
    COHORTS,
    CPU,
    HEAD,
    assert_close,
    assert_same,
    participate,
    record_states,
    tiny,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def found_before(method, net, federation, state, client):
    shard = make_shard(federation, client, 32, Draws(0, "train", 1))
    return method.before_training(
        state.server, state.client(client), net.bind(state.server_buffers, training=True), shard
    )


# The mixture


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("count", "width"), [(1, 3), (2, 5), (5, 2), (10, 60), (40, 7)])
def test_the_least_shares_meet_the_optimality_conditions(seed, count, width):
    factor = draw(count, width, seed=seed)
    quadratic = factor @ factor.T + torch.diag(draw(count, seed=seed + 50).abs() * 0.1)
    shares = minimal_shares(quadratic)
    slope, value = quadratic @ shares, shares @ quadratic @ shares
    assert (shares >= 0).all()
    assert float(shares.sum()) == pytest.approx(1, abs=1e-12)
    assert (slope >= value * (1 - 1e-6)).all()  # nothing to gain anywhere
    assert_close(
        {"": slope[shares > 1e-9]}, {"": value.expand(int((shares > 1e-9).sum()))}, rtol=1e-6
    )
    others = [
        torch.full((count,), 1 / count, dtype=torch.float64),
        *torch.eye(count, dtype=torch.float64),
    ]
    for other in others:
        assert value <= other @ quadratic @ other * (1 + 1e-9)


def test_alone_a_client_keeps_its_head(net, federation):
    assert mixture_shares(
        draw(1, CLASSES, 12), torch.tensor([0.3], dtype=torch.float64)
    ).tolist() == [[1.0]]
    method = FedPAC()
    state = record_states(method, net, federation, COHORTS[:1])[-1]
    part = participate(method, net, federation, state, [2])
    _, kept = method.aggregate(
        state.server, part.client_states, None, part.uploads, torch.ones(1), None
    )
    assert_same(kept["head"], part.uploads["head"])


def test_identical_statistics_are_weighted_by_their_precision():
    variance = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    shares = mixture_shares(draw(1, CLASSES, 12).expand(3, -1, -1), variance)
    assert_close(
        {"": shares},
        {"": torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64).expand(3, 3) / 7},
        atol=1e-9,
    )


def test_without_any_error_heads_are_shared_alike():
    shares = mixture_shares(
        torch.zeros(4, CLASSES, 12, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    )
    assert_close({"": shares}, {"": torch.full((4, 4), 0.25, dtype=torch.float64)})


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_diverged_statistics_raise_nothing_here(value):
    """Whoever plays the round says which client diverged."""
    means, variance = draw(3, CLASSES, 12), draw(3, seed=1).abs()
    for leaf in (means, variance):
        broken = leaf.clone()
        broken.view(-1)[-1] = value
        shares = (
            mixture_shares(broken, variance) if leaf is means else mixture_shares(means, broken)
        )
        assert_close({"": shares.sum(1)}, {"": torch.ones(3, dtype=torch.float64)}, atol=1e-12)


def test_clients_of_other_classes_are_left_out_and_small_shares_dropped():
    means = torch.zeros(3, CLASSES, 12, dtype=torch.float64)
    means[2, 0] = 100.0  # far from the others
    shares = mixture_shares(means, torch.full((3,), 0.1, dtype=torch.float64))
    assert shares[0].tolist() == [0.5, 0.5, 0.0]
    assert shares[2].tolist() == [0.0, 0.0, 1.0]
    assert_close({"": shares.sum(1)}, {"": torch.ones(3, dtype=torch.float64)}, atol=1e-12)


def test_the_quadratic_is_the_sum_of_traces():
    """D_jk = sum over classes of the trace of (H_i - H_j)(H_i - H_k)^T."""
    means, variance = draw(4, CLASSES, 12), draw(4, seed=1).abs()
    by_class = torch.zeros(4, 4, dtype=torch.float64)
    for j in range(4):
        for k in range(4):
            for c in range(CLASSES):
                by_class[j, k] += torch.outer(
                    means[1, c] - means[j, c], means[1, c] - means[k, c]
                ).trace()
    apart = (means[1] - means).flatten(1)
    assert_close({"": apart @ apart.T}, {"": by_class}, rtol=1e-5)
    shares = minimal_shares(by_class + torch.diag(variance))
    shares = torch.where(shares < 1e-3, 0, shares)
    assert_close({"": mixture_shares(means, variance)[1]}, {"": shares / shares.sum()}, atol=1e-7)


# Statistics


def test_statistics_are_those_of_loops_over_samples(federation):
    for norm in (False, True):
        net, method = tiny(norm), FedPAC()
        state = record_states(method, net, federation, COHORTS[:1])[-1]
        found = found_before(method, net, federation, state, 0)
        model = method.personal(state.server, state.client(0))
        index = federation.train[0]
        with torch.no_grad():
            _, z = net.bind(state.server_buffers).features(
                model, federation.normalize(federation.x[index])
            )
        z, y, variance = z.double(), federation.y[index], 0.0
        for c in range(CLASSES):
            own = z[y == c]
            share = len(own) / len(y)
            mean = own.mean(0) if len(own) else torch.zeros(12, dtype=torch.float64)
            assert_close({"": found["own"][c]}, {"": mean.float()}, atol=1e-6)
            assert_close({"": found["H"][c]}, {"": (share * mean).float()}, atol=1e-6)
            if len(own):
                variance += share * float(own.square().sum(1).mean()) - share**2 * float(
                    mean.square().sum()
                )
        assert float(found["v"]) == pytest.approx(variance / len(y), rel=1e-4)
        assert found["v"] >= 0


def test_collecting_statistics_moves_no_batch_normalisation(federation):
    net, method = tiny(norm=True), FedPAC()
    state = record_states(method, net, federation, COHORTS[:1])[-1]
    bound = net.bind(state.server_buffers, training=True)
    method.before_training(
        state.server, state.client(0), bound, make_shard(federation, 0, 32, None)
    )
    assert_same(bound.buffers, state.server_buffers)


def test_prototypes_are_weighted_by_class_counts(backend, net, federation):
    method = FedPAC()
    states = record_states(method, net, federation, COHORTS[:2], engine=backend)
    part = participate(method, net, federation, states[1], COHORTS[1], engine=backend)
    counts = part.uploads["counts"]
    for k, client in enumerate(COHORTS[1]):
        wanted = torch.bincount(federation.y[federation.train[client]], minlength=CLASSES)
        assert counts[k].tolist() == wanted.tolist()
    prototypes = states[2].server["prototypes"]
    for c in range(CLASSES):
        total = sum(counts[k, c] * part.uploads["mean"][k, c] for k in range(5))
        assert_close(
            {"": prototypes["mean"][c]}, {"": total / counts[:, c].sum().clamp(min=1)}, atol=1e-6
        )
    assert prototypes["seen"].tolist() == (counts.sum(0) > 0).tolist()


def test_a_class_that_nobody_has_loses_its_prototype_or_keeps_it(net, federation):
    y = federation.y.clone()
    for client in (1, 8):
        y[federation.train[client]] = 0
    federation = dataclasses.replace(federation, y=y)
    for keep in (False, True):
        method = FedPAC(keep_prototypes=keep)
        first, second = record_states(method, net, federation, [COHORTS[0], [1, 8]])[1:]
        assert first.server["prototypes"]["seen"].all()
        assert second.server["prototypes"]["seen"].tolist() == [True] + [keep] * 4
        if keep:
            old, new = (state.server["prototypes"]["mean"] for state in (first, second))
            assert torch.equal(old[1:], new[1:])
            assert not torch.equal(old[0], new[0])


# Training


def test_the_first_round_aligns_nothing_and_later_ones_do(backend, net, federation):
    own, without = (
        record_states(FedPAC(lam=lam, combine=False), net, federation, engine=backend)
        for lam in (1.0, 0.0)
    )
    assert_close(own[1].server["body"], without[1].server["body"], atol=1e-7)
    assert (
        own[2].server["body"]["fc.weight"] - without[2].server["body"]["fc.weight"]
    ).abs().max() > 1e-4


@dataclasses.dataclass(frozen=True)
class HeadPhase(FedPAC):
    def phases(self, server, client, params, epochs):
        return super().phases(server, client, params, epochs)[:1]


def test_each_phase_moves_its_part_alone(backend, net, federation):
    state = record_states(FedPAC(), net, federation, COHORTS[:1], engine=backend)[-1]
    first, both = (
        participate(m, net, federation, state, COHORTS[1], engine=backend).uploads
        for m in (HeadPhase(), FedPAC())
    )
    for name, value in state.server["body"].items():
        for client in range(5):
            assert torch.equal(first["body"][name][client], value)
        assert (both["body"][name] != value).flatten(1).any(1).all()
    assert_same(first["head"], both["head"])
    assert (
        first["head"]["classifier.bias"] != state.clients["head"]["classifier.bias"][COHORTS[1]]
    ).any()


def test_the_head_has_a_pace_of_its_own(net, federation):
    state = make_initial_state(FedPAC(), net, 10, CPU)
    fast, slow = (
        participate(HeadPhase(head_lr=lr), net, federation, state, [8]).uploads["head"]
        for lr in (0.1, 0.01)
    )  # one batch of two samples: one step
    for name in HEAD:
        ratio = (fast[name][0] - net.params[name]).norm() / (
            slow[name][0] - net.params[name]
        ).norm()
        assert float(ratio) == pytest.approx(10, rel=1e-3)


def test_missing_prototypes_are_the_clients_own(net, federation):
    """With no other class seen than 0, a client without class 0 is pulled to its own means."""
    method = FedPAC()
    state = make_initial_state(method, net, 10, CPU)
    client = state.client(0) | found_before(method, net, federation, state, 0)
    seen = torch.tensor([True] + [False] * 4)
    far = {"mean": torch.full_like(state.server["prototypes"]["mean"], 9.0), "seen": seen}
    x, y = (
        federation.normalize(federation.x[federation.train[0]]),
        federation.y[federation.train[0]],
    )
    for c in y.unique():
        batch = Batch(x[y == c], y[y == c])
        params, bound = method._begin(state.server, client), net.bind({"main": {}}, training=True)
        loss = method.loss({**state.server, "prototypes": far}, client, bound, params, batch)
        logits, z = bound.features(params, batch.x)
        target = far["mean"][0] if c == 0 else client["own"][c]
        wanted = torch.nn.functional.cross_entropy(logits, batch.y) + (z - target).square().mean()
        assert_close({"": loss}, {"": wanted}, atol=1e-6)


# The rest


def test_what_travels():
    net = models.build_network("cnn4", (3, 32, 32), 10, 0)
    assert tree.size(FedPAC().init(net.params, net.parts)[0]["body"]) == 873_408
