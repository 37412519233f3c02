"""Privacy of clients and of single samples: the limit without noise bit for bit, clipping and steps
by plain loops, the noise's variance, accounts, an audit, and what is refused.
"""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad

from fedpfl.engine import (
    FineTuning,
    Local,
    RoundSetup,
    SamplingRehearsal,
    make_backend,
    make_initial_state,
    make_privacy_state,
    play_round,
    untrained_upload,
)
from fedpfl.engine.keys import draw_cohorts, draw_secret_cohorts
from fedpfl.engine.training.client_training import working_copy
from fedpfl.engine.training.protected import sum_clipped_gradients
from fedpfl.engine.training.shard import gather_data
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.methods import METHODS, SEES, Batch, Turn
from fedpfl.privacy import (
    Account,
    Privacy,
    SampleAccount,
    SamplePrivacy,
    SampleProtection,
    Secret,
    Steps,
    clip_uploads,
    draw_noise,
)
from fedpfl.privacy.samples import compute_epsilon
from fedpfl.testing.toy import CPU, EVERYONE, LOCAL, TRAIN, as_engine, tiny, tiny_federation
from tests.conftest import (
    BACKENDS,
    assert_close,
    assert_same,
    keep_only,
    keep_quick,
    participate,
    read_cases,
)
from tests.data.promises import one_line
from tests.privacy.conftest import reckon_by_few_orders

COHORT = [0, 1, 2, 4]


def account(cohort=4, clients=6, **given):
    return Account(Privacy(**given), clients, cohort, rounds=10)


def one_round(method, federation, own, backend="loop", seed=0, state=None, cohort=COHORT):
    state = state or make_initial_state(method, tiny(), len(EVERYONE), CPU)
    if own and not state.privacy:
        state = dataclasses.replace(state, privacy=make_privacy_state(own, CPU))
    runner, secret = make_backend(as_engine(backend), tiny(), CPU), Secret.of_seed(seed)
    setup = RoundSetup(runner, method, federation, LOCAL, seed, account=own, secret=secret)
    return play_round(setup, state, cohort)


LIMITS = """
fedadam => loop
fedper => batched
ditto => loop
scaffold => batched
"""


@pytest.mark.parametrize(("name", "backend"), keep_quick(read_cases(LIMITS), 2))
def test_no_noise_and_no_bound_is_the_run_without_at_equal_weights(name, backend):
    whole = tiny_federation()
    even = tuple(whole.train[client][:7] for client in (0, 1, 2, 1, 4, 1))
    federation = dataclasses.replace(whole, train=even)
    assert {len(federation.train[client]) for client in COHORT} == {7}
    method = METHODS[name]()
    plain, _ = one_round(method, federation, None, backend)
    for own in (account(noise=0.0, clip=None), account(noise=0.0, clip=1e3)):
        state, outcome = one_round(method, federation, own, backend)
        assert_same([state.server, state.clients], [plain.server, plain.clients])
        assert outcome.metrics["clipped_share"] == 0 < outcome.metrics["update_norm"]


@pytest.mark.parametrize("name", ["fedavg", "fedper", "apfl", "scaffold"])
def test_clipping_is_that_of_a_plain_loop(name):
    method, clip = METHODS[name](), 0.7 if name == "scaffold" else 0.15
    before = make_initial_state(method, tiny(), 6, CPU)
    part = participate(method, tiny(), tiny_federation(), before, COHORT)
    known = untrained_upload(
        method, before.server, before.rows.initial["client"], before.buffers(0)
    )
    want, norms = [], []
    for row in range(len(COHORT)):
        upload, length = tree.take(part.uploads, row), 0.0
        for own, old in zip(tree.leaves(upload), tree.leaves(known), strict=True):
            length += float(((own - old).double() ** 2).sum())
        norms.append(math.sqrt(length))
        share = min(1.0, clip / norms[-1])
        cut = lambda own, old, share=share: old + share * (own - old)  # noqa: E731
        want.append(tree.map(cut, upload, known))
    assert 0 < sum(norm > clip for norm in norms) < len(norms)
    uploads, bound = clip_uploads(part.uploads, known, torch.tensor(clip))
    assert_close(uploads, tree.stack(want), atol=1e-6)
    assert_close(bound.norms, torch.tensor(norms).double(), rtol=1e-6)
    for row, norm in enumerate(norms):  # a short one is as it was
        if norm <= clip:
            assert_same(tree.take(uploads, row), tree.take(part.uploads, row))
    state, outcome = one_round(method, tiny_federation(), account(noise=0.0, clip=clip))
    assert outcome.metrics["clipped_share"] == sum(norm > clip for norm in norms) / 4
    assert outcome.metrics["update_norm"] == pytest.approx(sum(norms) / 4)
    if name == "fedavg":
        assert_close(state.server, tree.map(lambda leaf: leaf.mean(0), tree.stack(want)), atol=1e-6)


def test_a_bound_follows_the_quantile():
    """C exp(-rate (b - quantile)), b the share of short updates, with noise on their count."""
    method = METHODS["fedavg"]()
    own = account(noise=0.0, clip=0.15, quantile=0.9, rate=0.5, count_noise=1e-9)
    state, outcome = one_round(method, tiny_federation(), own)
    short = 1 - outcome.metrics["clipped_share"]
    assert 0 < short < 1
    assert float(state.privacy["clip"]) == pytest.approx(0.15 * math.exp(-0.5 * (short - 0.9)))
    assert outcome.metrics["clip"] == pytest.approx(0.15)
    _, after = one_round(method, tiny_federation(), own, state=state)
    assert after.metrics["clip"] == pytest.approx(0.15 * math.exp(-0.5 * (short - 0.9)))
    loud = dataclasses.replace(own, privacy=dataclasses.replace(own.privacy, count_noise=3.0))
    played = [one_round(method, tiny_federation(), loud, seed=seed)[0] for seed in range(4)]
    assert len({float(state.privacy["clip"]) for state in played}) == 4


def assert_normal(rows):
    """Rows of standard normal numbers that know nothing of each other, within 4.5 standard errors."""
    n = rows.numel()
    assert abs(float(rows.mean())) < 4 / math.sqrt(n)
    assert abs(float(rows.var()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float(rows.pow(4).mean()) - 3) < 4 * math.sqrt(96 / n)
    correlation = torch.corrcoef(rows) - torch.eye(len(rows))
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(rows.shape[1])


def test_the_mean_gets_gaussian_noise_of_the_right_variance():
    """It is noise * clip / cohort for each entry, and another by each seed and in each round."""
    method, drawn = METHODS["fedavg"](), []
    for seed in range(3):
        state = None
        for _ in range(2):
            quiet, loud = (
                one_round(method, tiny_federation(), own, seed=seed, state=copy.deepcopy(state))[0]
                for own in (account(noise=noise, clip=0.15) for noise in (0.0, 2.0))
            )
            drawn.append(tree.ravel(tree.map(torch.sub, loud.server, quiet.server)).double())
            state = loud
    assert_normal(torch.stack(drawn) / (2.0 * 0.15 / 4))


def test_of_poissons_cohorts_the_sum_is_divided_by_what_is_expected():
    method, before = METHODS["fedavg"](), make_initial_state(METHODS["fedavg"](), tiny(), 6, CPU)
    expected_two = account(cohort=2, noise=0.0, clip=None, sampling="poisson")
    state, _ = one_round(method, tiny_federation(), expected_two)
    fixed, _ = one_round(method, tiny_federation(), account(noise=0.0, clip=None))
    moved, known = (tree.ravel(own.server) - tree.ravel(before.server) for own in (state, fixed))
    assert_close(moved, 2 * known, atol=1e-6)


def test_a_round_without_anybody_gets_the_noise_alone():
    """Its deviation is noise * clip / expected cohort; no client's row moves, and a moving bound
    does.
    """
    method, before = METHODS["fedper"](), make_initial_state(METHODS["fedper"](), tiny(), 6, CPU)
    own = account(cohort=2, noise=2.0, clip=0.3, sampling="poisson", quantile=0.5, count_noise=1.0)
    before = dataclasses.replace(before, privacy=make_privacy_state(own, CPU))
    clients = before.clients
    state, outcome = one_round(method, tiny_federation(), own, seed=1, state=before, cohort=[])
    moved = tree.ravel(tree.map(torch.sub, state.server, before.server))
    assert float(moved.std()) == pytest.approx(2.0 * 0.3 / 2, rel=4 / math.sqrt(2 * len(moved)))
    assert (state.round, outcome.cohort, len(outcome.loss)) == (1, [], 0)
    assert {"clipped_share", "update_norm", "clip"} <= outcome.metrics.keys()
    assert_same(state.clients, clients)
    spread = float(Secret.of_seed(1).draw_normal(1, "count", 1)[0])
    assert float(state.privacy["clip"]) == pytest.approx(0.3 * math.exp(-0.2 * spread / 2))


def test_cohorts_are_of_the_rate_that_is_accounted_for():
    """Poisson's are nobody as often as they should be, and fixed ones take each client as often."""
    secret = Secret.of_seed(0)
    poisson = (20, 0.1, 2000, True)
    for drawn in (draw_secret_cohorts(secret, *poisson), draw_cohorts(0, *poisson)):
        sizes = torch.tensor([len(own) for own in drawn]).double()
        assert abs(float(sizes.mean()) - 2) < 4 * math.sqrt(1.8 / 2000)
        empty, share = 0.9**20, float((sizes == 0).double().mean())
        assert abs(share - empty) < 4 * math.sqrt(empty * (1 - empty) / 2000)
    drawn = list(draw_secret_cohorts(secret, 20, 0.25, 2000))
    assert all(len(own) == 5 and own == sorted({*own}) for own in drawn)
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=20).double()
    assert float((counts - 500).abs().max()) < 4.5 * math.sqrt(2000 * 0.25 * 0.75)
    assert drawn[:5] != list(draw_secret_cohorts(Secret.of_seed(1), 20, 0.25, 5))


def test_an_update_that_is_not_finite_counts_as_none():
    """Else one client could make the model infinite, which no noise hides."""
    uploads = {"w": torch.tensor([[math.nan, 1.0], [math.inf, 0.0], [0.3, 0.4]])}
    sent, bound = clip_uploads(uploads, {"w": torch.ones(2)}, torch.tensor(10.0))
    assert_same(sent, {"w": torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.3, 0.4]])})
    assert bound.clipped.tolist() == [True, True, False]


def test_secrets_are_apart_by_key_context_and_purpose():
    secret = Secret.of_seed(3)
    drawn = [secret.draw_normal(1000, "noise", *at) for at in ((1, 0), (1, 1), (2, 0))]
    for other in (secret.bind_to("a"), secret.bind_to("b"), Secret.of_seed(4)):
        drawn.append(other.draw_normal(1000, "noise", 1, 0))
    assert_normal(torch.tensor(np.array(drawn)))
    assert (drawn[0] == Secret.of_seed(3).draw_normal(1000, "noise", 1, 0)).all()
    twins = draw_noise({"one": torch.zeros(9), "other": torch.zeros(9)}, 1.0, secret, 1)
    assert not torch.equal(twins["one"], twins["other"])
    assert repr(secret) == "Secret()"


# The account

dp = pytest.importorskip("dp_accounting", reason="needs the extra [privacy]")


def test_epsilon_is_that_of_published_tables():
    """Abadi et al. 2016 (arXiv:1607.00133, section 3.2): q = 0.01, sigma = 4, delta = 1e-5, 10,000
    steps are about 1.26 by the moments accountant; TensorFlow Privacy's tutorial: 60,000 samples,
    batches of 250, noise 1.3, 15 epochs, delta = 1e-5 are 1.18 (old conversion) and less by
    today's, never more.
    """
    given = {"delta": 1e-5, "sampling": "poisson"}
    old = account(clients=10_000, cohort=100, noise=4.0, **given)
    assert 1.0 < old.epsilon(10_000) <= 1.27
    tutorial = account(clients=60_000, cohort=250, noise=1.3, **given)
    assert 0.85 < tutorial.epsilon(3600) <= 1.19


def test_epsilon_of_everybody_at_once_is_that_of_the_gaussian_mechanism():
    """Balle and Wang 2018, Theorem 8: delta = Phi(1/(2s) - e s) - exp(e) Phi(-1/(2s) - e s), exact.
    PLD finds it, RDP is above; fixed cohorts of everybody have twice the sensitivity.
    """

    def delta(e, s):
        phi = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
        return phi(1 / (2 * s) - e * s) - math.exp(e) * phi(-1 / (2 * s) - e * s)

    given = {"clients": 10, "cohort": 10, "delta": 1e-5, "noise": 2.0}
    exact = account(**given, sampling="poisson", accounting="pld").epsilon(1)
    assert delta(exact, 2.0) == pytest.approx(1e-5, rel=0.05)
    rdp = account(**given, sampling="poisson").epsilon(1)
    assert exact < rdp < 1.25 * exact
    twice = account(**{**given, "noise": 4.0}).epsilon(1)
    assert exact < twice < 1.25 * exact


@reckon_by_few_orders()
def test_noise_is_calibrated_and_more_rounds_cost_more():
    own = account(cohort=10, clients=10, epsilon=4.0)
    assert own.epsilon(10) == pytest.approx(4.0, abs=0.02)
    assert own.epsilon(10) <= 4.0
    sizes = (2, 20, 100, 10_000)
    deltas = [account(cohort=1, clients=clients, noise=1.0).delta for clients in sizes]
    assert deltas == pytest.approx([0.01, 0.01, 100**-1.1, 10_000**-1.1])
    spent = [own.epsilon(rounds) for rounds in (1, 5, 10, 20)]
    assert spent == sorted(spent)
    assert spent[-1] > 4.0
    assert account(noise=0.0).epsilon(3) is None
    with pytest.raises(FedpflError, match="out of reach in 10 rounds of 6 of 6 clients"):
        account(cohort=6, epsilon=0.5, quantile=0.5).epsilon(1)


@reckon_by_few_orders()
def test_a_count_costs_too():
    given = {"clients": 100, "cohort": 10, "noise": 4.0}
    still = account(**given).epsilon(10)
    moving = account(**given, quantile=0.5, count_noise=2.0).epsilon(10)
    hidden = account(**given, quantile=0.5, count_noise=1e3).epsilon(10)
    assert hidden == pytest.approx(still, rel=1e-3)
    assert moving > 1.05 * still


def test_an_attacker_stays_below_what_epsilon_allows():
    """Is a client there whose update is all of the bound in one direction, while nobody else moves?
    By the best test, a threshold on that direction, true positives are at most exp(epsilon) false
    ones + delta; without noise it knows.
    """
    runs, clip = 40_000, 1.0
    kind = {"sampling": "poisson", "accounting": "pld"}
    own = account(cohort=6, clients=6, noise=2.0, clip=clip, delta=1e-2, **kind)
    still, loud = ({"w": torch.zeros(6, 3)} for _ in range(2))
    loud["w"][0, 0] = 50.0

    def seen(uploads, seed, deviation):
        sent, _ = clip_uploads(uploads, {"w": torch.zeros(3)}, torch.tensor(clip))
        mean = tree.mean(sent, torch.full((6,), 1 / 6))["w"]
        draws = draw_noise({"w": mean.expand(runs, 3)}, deviation, Secret.of_seed(seed), 1)
        return (mean + draws["w"])[:, 0]

    def advantage(deviation):
        without, there = seen(still, 0, deviation), seen(loud, 1, deviation)
        shares = [
            [float((one > at).double().mean()) for one in (without, there)]
            for at in torch.linspace(-1, 1, 81)
        ]
        return math.log(max((right - 1e-2) / max(wrong, 1e-2) for wrong, right in shares))

    claimed, error = own.epsilon(1), 0.1  # of a logarithm of shares of 1 % in 40,000 runs
    assert 0.3 * claimed < advantage(own.noise * clip / 6) < claimed + error
    assert advantage(1e-9) > 3 * claimed


# Single samples: steps by a plain loop of one sample at a time


SAMPLED = Local(epochs=2, batch_size=8, lr=0.5)
SECRET = Secret.of_seed(3)


def protect(noise=0.0, clip=math.inf):
    return SampleProtection(clip, [noise] * len(EVERYONE), SECRET)


def train(protection, engine="loop", method="fedavg", local=SAMPLED, clients=EVERYONE, rounds=1):
    """Return the state after some rounds in which samples are protected."""
    method = METHODS[method]() if isinstance(method, str) else method
    state = make_initial_state(method, tiny(), len(EVERYONE), CPU)
    backend = make_backend(as_engine(engine), tiny(), CPU)
    setup = RoundSetup(backend, method, tiny_federation(), local, 0, protection=protection)
    for _ in range(rounds):
        state, _ = play_round(setup, state, clients)
    return state


def plain_client(client, noise, clip):
    """Return FedAvg's model of one client by DP-SGD as its paper has it (Abadi et al., 2016)."""
    net, federation = tiny(), tiny_federation()
    data = gather_data(federation, federation.train[client])
    params = tree.map(working_copy, net.params)
    samples, batch = len(data.y), SAMPLED.batch_size
    rate, steps = min(1, batch / samples), samples // batch + (samples % batch > 1)

    def loss(values, x, y):
        return F.cross_entropy(functional_call(net.module, values, (x[None],)), y[None])

    number = 0
    for epoch in range(SAMPLED.epochs):
        secret = SECRET.bind_to(("train", 1, client, "main", epoch))
        numbers = secret.draw_uniform(steps * samples, "samples")
        for chosen in torch.from_numpy(numbers).view(steps, samples) < rate:
            rows = chosen.nonzero()[:, 0]
            sums = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
            for own in [grad(loss)(params, data.x[i], data.y[i]) for i in rows]:
                length = math.sqrt(sum(float(leaf.square().sum()) for leaf in own.values()))
                for name in sums:
                    sums[name] += own[name] * min(1.0, clip / length)
            for i, name in enumerate(params):
                secret = SECRET.bind_to((client, "train", 1, "main 0", number, i))
                drawn = secret.draw_normal(params[name].numel(), "noise")
                noised = torch.from_numpy(noise * clip * drawn).float()
                sums[name] += noised.view(params[name].shape)
                params[name].add_(sums[name] / min(batch, samples), alpha=-SAMPLED.lr)
            number += 1
    return params


@pytest.mark.parametrize("engine", BACKENDS)
def test_steps_are_those_of_a_plain_loop_of_one_sample_at_a_time(engine):
    noise, clip = 1.5, 0.3
    for client in (0, 1):
        state = train(protect(noise, clip), engine, clients=[client])
        assert_close(state.server, plain_client(client, noise, clip), atol=1e-5)


def test_entries_that_hold_still_do_not_count_for_a_samples_length():
    batch = Batch(x=torch.tensor([[3.0, 4.0], [0.5, 9.0]]), y=torch.zeros(2))
    (total,) = sum_clipped_gradients(
        lambda leaves, sample: (leaves[0] * sample.x).sum(),
        leaves=[torch.zeros(2)],
        masks=[torch.tensor([True, False])],
        batch=batch,
        clip=1.0,
    )
    assert total.tolist() == [1.5, 0.0]


@pytest.mark.parametrize("method", keep_quick(["fedselect", "ditto", "fedrep"]))
def test_backends_agree_on_phases_masks_and_private_models(method):
    loop, batched = (
        train(protect(1.0, 0.3), engine, method, clients=[0, 1], rounds=2) for engine in BACKENDS
    )
    assert_close([loop.server, loop.clients], [batched.server, batched.clients], atol=1e-5)


TAKES_MEANS = ("fedprox", "pfedsd", "subflot", "fedrep", "moon", "feddyn", "fedspu")
"""Methods of each kind whose losses are means over single samples."""


@pytest.mark.parametrize("name", keep_only(METHODS, TAKES_MEANS[-3:]))
def test_a_minibatch_of_everybody_without_noise_is_a_plain_full_step(name):
    """So are the losses of all methods that say that they are means over single samples."""
    if METHODS[name].mixes_samples or name in ("fedadam", "fedyogi"):
        return  # these two divide by tiny steps
    local = dataclasses.replace(SAMPLED, batch_size=128)
    try:
        hidden = train(protect(), method=name, local=local, rounds=2)
    except (FedpflError, TypeError):  # it looks at samples elsewhere, or has to be set
        assert name not in TAKES_MEANS
        return
    plain = train(None, method=name, local=local, rounds=2)
    assert_close(hidden.server, plain.server, atol=1e-5)


def test_without_its_secret_nobody_draws_a_minibatch():
    steps, key = Steps(0.2, 500), ("train", 1, 0, "main", 0)
    ended = dataclasses.replace(protect(), secret=None)
    assert "the run has ended" in one_line(lambda: ended.draw_minibatches(40, steps, key))


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


def sample_account(**settings):
    """Return the account of three clients, the last of which takes part in one round of three."""
    return SampleAccount(
        privacy=SamplePrivacy(**settings),
        sizes=(40, 20, 80),
        training=tuple((Steps(8 / size, 2 * size // 8),) for size in (40, 20, 80)),
        tuning=tuple((Steps(8 / size, size // 8),) for size in (40, 20, 80)),
        cohorts=((0, 1), (0, 1, 2), (0, 1)),
        tuned_rounds=(3,),
    )


@reckon_by_few_orders()
def test_each_client_spends_by_its_own_rate_steps_and_rounds():
    given = sample_account(noise=1.0)
    assert given.common_delta == pytest.approx(80**-1.1)
    assert given.count_steps(0, 2) == (Steps(0.2, 20),)
    assert given.count_steps(2, 3) == (Steps(0.1, 20 + 10),)  # one round and the fine-tuning
    assert given.client_epsilon(2, 1) == 0
    grown = [given.epsilon(rounds) for rounds in (1, 2, 3)]
    assert grown == sorted(grown)
    assert grown[-1] == max(given.client_epsilon(client, 3) for client in range(3))

    calibrated = sample_account(epsilon=2.0)
    epsilons = [calibrated.client_epsilon(client, 3) for client in range(3)]
    assert all(1.98 < epsilon <= 2.0 for epsilon in epsilons)
    assert calibrated.client_noises[2] < calibrated.client_noises[0] < calibrated.client_noises[1]
    assert sample_account(noise=0.0).epsilon(3) is None
    assert "protects nobody" in one_line(sample_account(noise=0.1).check)


REFUSED = {
    "fedas": "looks at samples outside its training steps",
    "fedproto": "nobody has said that its loss is a mean over single samples",
    "scaffold": "looks at gradients",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_leave_without_noise_is_refused(name):
    with pytest.raises(FedpflError, match=REFUSED[name]):
        SamplingRehearsal(METHODS[name](), tiny(), tiny_federation(), 1.0).plan_training(SAMPLED)


def test_plans_have_the_steps_of_all_phases():
    rehearsal = SamplingRehearsal(METHODS["fedrep"](), tiny(), tiny_federation(), 1.0)
    planned = rehearsal.plan_training(dataclasses.replace(SAMPLED, epochs=3))
    per_epoch = [size // 8 + (size % 8 > 1) for size in TRAIN]
    assert [sum(steps.number for steps in own) for own in planned] == [3 * n for n in per_epoch]
    assert planned[0][0].rate == 8 / 40
    once = dataclasses.replace(SAMPLED, epochs=1)
    tuned = rehearsal.plan_tuning(lambda draws: FineTuning(once, draws, "head"))
    assert [sum(steps.number for steps in own) for own in tuned] == per_epoch


@dataclasses.dataclass(frozen=True)
class Twice(METHODS["fedavg"]):
    """Trains each client in two turns."""

    server_sees = SEES[0]

    def turns(self, played, cohort, clients, generator):
        return [Turn(cohort, lambda server, clients, uploads: (server, clients)), Turn(cohort)]


def test_turns_that_no_account_is_kept_of_are_refused():
    told = one_line(lambda: one_round(Twice(), tiny_federation(), account(noise=1.0)))
    assert "keeps account of one turn of a round's cohort, and turns of Twice" in told
    told = one_line(lambda: train(protect(1.0, 1.0), method=Twice()))
    assert "one training of each client" in told
