"""FedCP's rounds against plain loops of torch's modules, with the method's own noise.

Tolerance 1e-5: kernels of distances by another formula, and features that batch normalisation
scales.
"""

from functools import cache

import pytest
import torch

from fedpfl.engine.keys import Draws
from fedpfl.methods import Batch, FedCP
from fedpfl.methods.fedcp import BANK
from tests.conftest import HEAD, LOCAL, assert_close, client_row, record_rounds
from tests.methods.reference.conftest import SEED, draw_randoms
from tests.methods.reference.fedcp import fedcp

CASES = {
    "noise": FedCP(),
    "weak": FedCP(lam=0.3),
    "off": FedCP(policy_noise="off"),
    "alone": FedCP(lam=0.0),
}
NAMES = {"0.weight": "weight", "0.bias": "bias", "1.weight": "scale", "1.bias": "shift"}
"""Of the policy network."""


def noise(t, i, epoch):
    """A pair of numbers for each feature, whose difference is logistic: all that a softmax of two
    sees of noise.
    """
    bank = torch.rand(2, BANK, 12, generator=Draws(SEED, "train", t).server(i))
    one, other = (BANK * draw_randoms(t, i, epoch, FedCP().randoms)).long().unbind(1)
    uniform = ((bank[0, one] + bank[1, other]) % 1).clamp(1e-6, 1 - 1e-6)
    return torch.stack([torch.log(uniform), torch.log(1 - uniform)], 1)


@pytest.fixture(scope="module")
def expected(normed, net, setting):
    @cache
    def get(name, norm):
        method = CASES[name]
        policy = method.init(net.params, net.parts)[0]["policy"]
        policy = {theirs: policy[own] for theirs, own in NAMES.items()}
        drawn = noise if method.policy_noise == "train" else None
        return fedcp(normed[1] if norm else setting, policy, method.lam, drawn)

    return get


@pytest.mark.parametrize(("name", "norm"), [*((name, False) for name in CASES), ("noise", True)])
def test_three_rounds_equal_the_plain_loops(
    name, norm, backend, expected, setting, normed, net, federation
):
    method, want, net = CASES[name], expected(name, norm), normed[0] if norm else net
    tolerance = {"atol": 2e-5 if norm else 1e-5, "rtol": 1e-4 if norm else 0.0}
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        buffers = state.server_buffers["main"]
        assert_close(
            state.server["body"], {k: want.shared[t][k] for k in state.server["body"]}, **tolerance
        )
        assert_close(
            buffers, {k: want.shared[t][k] for k in buffers} | counted(buffers), **tolerance
        )
        assert_close(
            state.server["policy"], {own: want.cpns[t][k] for k, own in NAMES.items()}, **tolerance
        )
        assert_close(state.server["head"], named(want.heads[t]), **tolerance)
        for client, head in enumerate(want.own[t]):
            assert_close(client_row(state.clients["head"], client), named(head), **tolerance)
            personal = method.personal(state.server, state.client(client))
            bound, batch = (
                net.bind(state.server_buffers),
                Batch(setting.clients[client].test_x, None),
            )
            assert_close(
                method.predict(bound, personal, batch), want.logits[t][client], atol=1e-4, rtol=1e-4
            )
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


def named(head):
    return dict(zip(HEAD, head.values(), strict=True))


def counted(buffers):
    """The number of batches, of which the server has the cohort's largest."""
    return {name: leaf for name, leaf in buffers.items() if not leaf.is_floating_point()}


@pytest.mark.full
def test_noise_and_alignment_matter(expected):
    last = {name: expected(name, False).logits[-1][2] for name in CASES}
    for one in CASES:
        for other in CASES:
            assert one == other or (last[one] - last[other]).abs().max() > 1e-3, (one, other)
    assert (
        LOCAL.epochs * 65 > 3 * LOCAL.batch_size
    )  # several steps, without which the alignment has no gradient
