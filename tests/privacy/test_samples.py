"""Privacy of single samples: steps by a plain loop of one sample at a time, limits, the noise's
variance, epsilons against Opacus, and what is refused.
"""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from fedpfl.engine import (
    Local,
    RoundSetup,
    SamplingRehearsal,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.training.client_training import working_copy
from fedpfl.engine.training.shard import gather_data
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, Turn
from fedpfl.privacy import SampleAccount, SamplePrivacy, SampleProtection, Secret, Steps
from fedpfl.privacy.samples import compute_epsilon
from fedpfl.testing.toy import CPU, EVERYONE, TRAIN, as_engine, tiny, tiny_federation
from tests.conftest import BACKENDS, assert_close, assert_same, keep_only, keep_quick

dp = pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")

LOCAL = Local(epochs=2, batch_size=8, lr=0.5)
SECRET = Secret.of_seed(3)


def protect(noise=0.0, clip=math.inf, secret=SECRET):
    return SampleProtection(clip, [noise] * len(EVERYONE), secret)


def train(protection, engine="loop", method="fedavg", local=LOCAL, clients=EVERYONE, rounds=1):
    """Return the state after some rounds in which samples are protected."""
    method = METHODS[method]() if isinstance(method, str) else method
    state = make_initial_state(method, tiny(), len(EVERYONE), CPU)
    backend = make_backend(as_engine(engine), tiny(), CPU)
    setup = RoundSetup(backend, method, tiny_federation(), local, 0, protection=protection)
    for _ in range(rounds):
        state, _ = play_round(setup, state, clients)
    return state


def plain_client(client, noise, clip, one_at_a_time=True):
    """Return FedAvg's model of one client by DP-SGD as its paper has it (Abadi et al., 2016)."""
    net, federation = tiny(), tiny_federation()
    data = gather_data(federation, federation.train[client])
    params = tree.map(working_copy, net.params)
    samples, batch = len(data.y), LOCAL.batch_size
    rate, steps = min(1, batch / samples), samples // batch + (samples % batch > 1)

    def loss(values, x, y):
        return F.cross_entropy(functional_call(net.module, values, (x[None],)), y[None])

    number = 0
    for epoch in range(LOCAL.epochs):
        secret = SECRET.bind_to(("train", 1, client, "main", epoch))
        numbers = secret.draw_uniform(steps * samples, "samples")
        for chosen in torch.from_numpy(numbers).view(steps, samples) < rate:
            rows = chosen.nonzero()[:, 0]
            if one_at_a_time:
                gradients = [grad(loss)(params, data.x[i], data.y[i]) for i in rows]
                sums = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
                for own in gradients:
                    length = math.sqrt(sum(float(leaf.square().sum()) for leaf in own.values()))
                    for name in sums:
                        sums[name] += own[name] * min(1.0, clip / length)
            else:
                stacked = vmap(grad(loss), (None, 0, 0))(params, data.rows(rows).x, data.y[rows])
                sums = {name: leaf.sum(0) for name, leaf in stacked.items()}
            for i, name in enumerate(params):
                if noise:
                    secret = SECRET.bind_to((client, "train", 1, "main 0", number, i))
                    drawn = secret.draw_normal(params[name].numel(), "noise")
                    noised = torch.from_numpy(noise * clip * drawn).float()
                    sums[name] += noised.view(params[name].shape)
                params[name].add_(sums[name] / min(batch, samples), alpha=-LOCAL.lr)
            number += 1
    return params


@pytest.mark.parametrize("engine", BACKENDS)
def test_steps_are_those_of_a_plain_loop_of_one_sample_at_a_time(engine):
    noise, clip = 1.5, 0.3
    for client in (0, 1):
        state = train(protect(noise, clip), engine, clients=[client])
        assert_close(state.server, plain_client(client, noise, clip), atol=1e-5)


def test_without_noise_and_bound_it_is_poisson_sgd_bit_for_bit():
    for client in (0, 4):
        found = train(protect(), clients=[client]).server
        assert_same(found, plain_client(client, 0.0, math.inf, one_at_a_time=False))
        assert_same(found, train(protect(clip=1e6), clients=[client]).server)


@pytest.mark.parametrize("method", keep_quick(["fedselect", "ditto", "fedrep"]))
def test_backends_agree_on_phases_masks_and_private_models(method):
    loop, batched = (train(protect(1.0, 0.3), engine, method, rounds=2) for engine in BACKENDS)
    assert_close([loop.server, loop.clients], [batched.server, batched.clients], atol=1e-5)


TAKES_MEANS = ("fedprox", "pfedsd", "subflot", "fedrep", "moon", "feddyn", "fedspu")
"""Methods of each kind whose losses are means over single samples."""


@pytest.mark.parametrize("name", keep_only(METHODS, TAKES_MEANS[-3:]))
def test_a_minibatch_of_everybody_without_noise_is_a_plain_full_step(name):
    """So are the losses of all methods that say that they are means over single samples."""
    if METHODS[name].mixes_samples or name in ("fedadam", "fedyogi"):
        return  # these two divide by tiny steps
    local = dataclasses.replace(LOCAL, batch_size=128)
    try:
        hidden = train(protect(), method=name, local=local, rounds=2)
    except (FedpflError, TypeError):  # it looks at samples elsewhere, or has to be set
        assert name not in TAKES_MEANS
        return
    plain = train(None, method=name, local=local, rounds=2)
    assert_close(hidden.server, plain.server, atol=1e-5)


def test_the_noise_has_its_variance_and_is_everybodys_own():
    """The difference that it makes to one step is noise * clip * lr / expected, by entry."""
    local = dataclasses.replace(LOCAL, epochs=None, steps=1)
    drawn = []
    for client, seed in [(0, 0), (0, 1), (4, 0)]:
        moved = [
            train(protect(noise, 0.2, Secret.of_seed(seed)), local=local, clients=[client]).server
            for noise in (0.0, 2.0)
        ]
        drawn.append(tree.ravel(tree.map(torch.sub, *moved)).double())
    rows = torch.stack(drawn) / (2.0 * 0.2 * LOCAL.lr / 8)
    entries = rows.numel()
    assert abs(float(rows.mean())) < 4 / math.sqrt(entries)
    assert abs(float(rows.var()) - 1) < 4 * math.sqrt(2 / entries)
    correlation = torch.corrcoef(rows) - torch.eye(3)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(rows.shape[1])


def test_minibatches_are_secret():
    steps, key = Steps(0.2, 500), ("train", 1, 0, "main", 0)
    drawn, other = (
        protect(secret=Secret.of_seed(seed)).draw_minibatches(40, steps, key) for seed in (3, 4)
    )
    assert not all(map(torch.equal, drawn, other))
    ended = dataclasses.replace(protect(), secret=None)
    with pytest.raises(FedpflError, match="the run has ended"):
        ended.draw_minibatches(40, steps, key)


# ---- The account

OPACUS = {
    (0.1, 1.0, 200, 1e-3): 8.1842,
    (0.02, 0.8, 300, 1e-4): 3.7058,
    (0.5, 2.0, 100, 1e-2): 10.0787,
    (1.0, 5.0, 20, 1e-2): 2.3824,
    (0.25, 0.6, 40, 1e-5): 31.7543,
}
"""Epsilon by rate, noise, steps and delta, of opacus 1.6.0:
`accountant = RDPAccountant(); accountant.history = [(noise, rate, steps)];
accountant.get_epsilon(delta)`.
"""


@pytest.mark.parametrize("case", OPACUS)
def test_epsilon_is_that_of_opacus_by_fewer_orders(case):
    rate, noise, steps, delta = case
    epsilon = compute_epsilon((Steps(rate, steps),), noise, delta)
    assert 0.9999 < epsilon / OPACUS[case] < 1.02


def account(**settings):
    """Return the account of three clients, the last of which takes part in one round of three."""
    return SampleAccount(
        privacy=SamplePrivacy(**settings),
        sizes=(40, 20, 80),
        training=tuple((Steps(8 / size, 2 * size // 8),) for size in (40, 20, 80)),
        tuning=tuple((Steps(8 / size, size // 8),) for size in (40, 20, 80)),
        cohorts=((0, 1), (0, 1, 2), (0, 1)),
        tuned_rounds=(3,),
    )


def test_each_client_spends_by_its_own_rate_steps_and_rounds():
    given = account(noise=1.0)
    assert given.common_delta == pytest.approx(80**-1.1)
    assert given.count_steps(0, 2) == (Steps(0.2, 20),)
    assert given.count_steps(2, 3) == (Steps(0.1, 20 + 10),)  # one round and the fine-tuning
    assert given.client_epsilon(2, 1) == 0
    grown = [given.epsilon(rounds) for rounds in (1, 2, 3)]
    assert grown == sorted(grown)
    assert grown[-1] == max(given.client_epsilon(client, 3) for client in range(3))

    calibrated = account(epsilon=2.0)
    epsilons = [calibrated.client_epsilon(client, 3) for client in range(3)]
    assert all(1.98 < epsilon <= 2.0 for epsilon in epsilons)
    assert calibrated.client_noises[2] < calibrated.client_noises[0] < calibrated.client_noises[1]
    assert account(noise=0.0).epsilon(3) is None
    with pytest.raises(FedpflError, match="protects nobody"):
        account(noise=0.1).check()


# ---- What is refused

REFUSED = {
    "fedas": "looks at samples outside its training steps",
    "fedproto": "nobody has said that its loss is a mean over single samples",
    "fedcp": "means of features of a minibatch",
    "scaffold": "looks at gradients",
    "pfedme": "makes its own steps",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_leave_without_noise_is_refused(name):
    with pytest.raises(FedpflError, match=REFUSED[name]):
        SamplingRehearsal(METHODS[name](), tiny(), tiny_federation(), 1.0).plan_training(LOCAL)


def test_plans_have_the_steps_of_all_phases():
    rehearsal = SamplingRehearsal(METHODS["fedrep"](), tiny(), tiny_federation(), 1.0)
    planned = rehearsal.plan_training(dataclasses.replace(LOCAL, epochs=3))
    per_epoch = [size // 8 + (size % 8 > 1) for size in TRAIN]
    assert [sum(steps.number for steps in own) for own in planned] == [3 * n for n in per_epoch]
    assert planned[0][0].rate == 8 / 40
    tuned = rehearsal.plan_tuning(dataclasses.replace(LOCAL, epochs=1), "head")
    assert [sum(steps.number for steps in own) for own in tuned] == per_epoch


def test_turns_that_train_a_client_twice_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Twice(METHODS["fedavg"]):
        def turns(self, played, cohort, clients, generator):
            return [Turn(cohort, lambda server, clients, uploads: (server, clients)), Turn(cohort)]

    with pytest.raises(FedpflError, match="one training of each client"):
        train(protect(1.0, 1.0), method=Twice())
