"""FedSA-LoRA, FFA-LoRA, FedALT and SDFLoRA: what moves, what travels, and their limits."""

import dataclasses

import pytest
import torch

from fedpfl.engine import Local, make_initial_state
from fedpfl.ground import tree
from fedpfl.methods import FedALT, FedAvg, FedSALoRA, FFALoRA, LocalOnly, SDFLoRA
from fedpfl.methods.sdflora import compress_pair, stack_pairs
from fedpfl.models import ADAPTERS, Net
from tests.conftest import (
    CPU,
    LOCAL,
    PLAIN,
    Tiny,
    assert_close,
    assert_same,
    client_row,
    differing,
    find_eval_job,
    make_federation,
    participate,
    record_rounds,
    record_states,
    tiny,
    with_client_states,
)

COHORTS = [[0, 1, 2], [0, 2]]
PAIR = ("lora_A", "lora_B")
HEAD = 12 * 5 + 5
A, B = 2 * (9 + 36), 2 * (4 + 12)  # entries, of rank 2 in conv and fc


@pytest.fixture(scope="module")
def three():
    return make_federation((40, 33, 65), (10, 8, 16))


def of(params, *endings):
    return {name: value for name, value in params.items() if name.endswith(endings)}


def products(params, scale=1.0):
    """What is added to the weights."""
    return {
        name: scale * params[name[:-1] + "B"].flatten(1) @ params[name].flatten(1)
        if params[name].dim() == 4
        else scale * params[name[:-1] + "B"][0] @ params[name][0]
        for name in of(params, "lora_A")
    }


def test_what_travels(three):
    """Nothing goes down that a client has, and of FedALT nothing before there is anybody else."""
    sent = {
        "fedsa": (FedSALoRA(), [(A, A), (A, A)]),
        "fedsa-averaged": (FedSALoRA("averaged"), [(A + HEAD, A + HEAD)] * 2),
        "ffa": (FFALoRA(), [(B + HEAD, B + HEAD)] * 2),
        "ffa-frozen": (FFALoRA("frozen"), [(B, B)] * 2),
        "fedalt": (FedALT(), [(0, A + B), (A + B, A + B)]),
        "sdflora": (SDFLoRA(0.5), [((A + B) // 2, (A + B) // 2)] * 2),
    }
    for name, (method, wanted) in sent.items():
        outcomes = record_rounds(method, tiny(pairs=method.pairs), three, [[0, 1], [0, 1]])[1]
        found = [
            (outcome.traffic.values_down / 2, outcome.traffic.values_up / 2) for outcome in outcomes
        ]
        assert found == wanted, name
        assert [outcome.traffic.bits_down for outcome in outcomes] == [
            2 * 32 * down for down, _ in wanted
        ], name


def test_the_first_step_moves_b_alone(backend, three):
    """Its gradient is zero in A while B is zero."""
    net = tiny(pairs=1)
    start = make_initial_state(FedSALoRA(), net, 3, CPU)
    part = participate(FedSALoRA(), net, three, start, [0, 1], engine=backend, local=PLAIN)
    assert_same(part.uploads, tree.repeat(of(net.params, "lora_A"), 2))
    assert all(
        leaf[0].any() and differing(leaf[0], leaf[1])
        for leaf in of(part.client_states["own"], "lora_B").values()
    )


# FFA-LoRA


def test_the_average_of_adapted_weights_is_exact_where_a_is_fixed_alone(three):
    net, weight = tiny(pairs=1), torch.tensor([40, 33, 65]) / 138
    for method, exact in ((FFALoRA(), True), (FedAvg(), False)):
        first = make_initial_state(method, net, 3, CPU)
        uploads = participate(method, net, three, first, [0, 1, 2]).uploads
        after = find_eval_job(
            method, net, three, record_states(method, net, three, [[0, 1, 2]])[-1], 0
        ).params
        sent = [products({**net.params, **client_row(uploads, client)}) for client in range(3)]
        wanted = {
            name: sum(share * own[name] for share, own in zip(weight, sent, strict=True))
            for name in sent[0]
        }
        found = products(after)
        near = all(
            torch.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-7) for name in wanted
        )
        assert near == exact


@pytest.mark.parametrize("head", ["averaged", "frozen"])
def test_what_is_fixed_never_moves(head, backend, three):
    net, method = tiny(pairs=1), FFALoRA(head)
    local = dataclasses.replace(LOCAL, weight_decay=0.1)
    last = find_eval_job(
        method,
        net,
        three,
        record_states(method, net, three, COHORTS, engine=backend, local=local)[-1],
        1,
    ).params
    fixed = ("lora_A", "classifier.weight", "classifier.bias")[: 3 if head == "frozen" else 1]
    assert_same(of(last, *fixed), of(net.params, *fixed))
    assert all(differing(last[name], net.params[name]) for name in last if not name.endswith(fixed))


def test_alpha_and_the_step_size_are_exchangeable(three):
    """Twice alpha with a quarter of the step has the same products, the head being frozen."""

    def played(alpha, lr):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            module = Tiny()
        ADAPTERS["lora"](module, "classifier", 1, rank=2, alpha=alpha, layers=("conv", "linear"))
        net, local = (
            Net(module, sample=(1, 8, 8)),
            Local(epochs=2, batch_size=32, lr=lr, momentum=0.7),
        )
        last = record_states(FFALoRA("frozen"), net, three, COHORTS, local=local)[-1]
        return products({**last.server["model"], **last.server["fixed"]}, alpha)

    assert_close(played(4.0, 0.05), played(8.0, 0.0125), atol=1e-6, rtol=1e-4)


# FedALT


def forced(place):
    """A softmax that takes one of two."""

    def softmax(votes, axis):
        one, other = (
            torch.ones_like(votes.narrow(axis, 0, 1)),
            torch.zeros_like(votes.narrow(axis, 0, 1)),
        )
        return torch.cat([one, other] if place == 0 else [other, one], axis)

    return softmax


def rest(method, state, client):
    """The rest-of-world pair of a client, under the names of an own one."""
    laid = method.before_turn(state.server, state.client([client]), state.others(), None)
    return {name[:-1]: leaf[0] for name, leaf in laid["rest"].items()}


def test_a_mixer_that_takes_the_own_pair_is_local_only_bit_for_bit(backend, three, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "softmax", forced(0))
    two, one = tiny(pairs=2), tiny(pairs=1)
    one.params = {name: two.params[name] for name in one.params}
    ours = record_states(FedALT(), two, three, COHORTS, engine=backend)[-1]
    theirs = record_states(LocalOnly(), one, three, COHORTS, engine=backend)[-1]
    for client in range(3):
        own = client_row(theirs.clients["model"], client)
        assert_same({name: client_row(ours.clients["model"], client)[name] for name in own}, own)


def test_a_mixer_that_takes_the_others_leaves_the_own_pair_and_answers_as_they_do(
    three, monkeypatch
):
    net, method = tiny(pairs=2), FedALT()
    state = record_states(method, net, three, [[0, 1, 2]])[-1]
    monkeypatch.setattr(torch.Tensor, "softmax", forced(1))
    local = dataclasses.replace(LOCAL, weight_decay=0.0)
    part = participate(method, net, three, state, [1], local=local)
    assert_same(client_row(part.uploads, 0), of(client_row(state.clients["model"], 1), *PAIR))
    single, x = tiny(pairs=1), torch.randn(4, 1, 8, 8)
    mixture, others = find_eval_job(method, net, three, state, 1).params, rest(method, state, 1)
    alone = single.bind({})({**mixture, **others}, x)
    assert_close({"": net.bind({})(mixture, x)}, {"": alone}, atol=1e-6)


def test_the_rest_of_the_world_are_the_others_last_uploads():
    net, method = tiny(pairs=2).with_facts(clients=2), FedALT()
    two = make_federation((40, 33), (10, 8))
    states = record_states(method, net, two, [[0, 1], [1]])
    for client in (0, 1):
        assert not any(leaf.any() for leaf in rest(method, states[0], client).values())
        for state in states[1:]:
            assert_same(
                rest(method, state, client),
                of(client_row(state.clients["model"], 1 - client), *PAIR),
            )
    alone = make_federation((40,), (10,))
    states, outcomes = record_rounds(method, net.with_facts(clients=1), alone, [[0]] * 2)
    assert not any(leaf.any() for leaf in rest(method, states[-1], 0).values())
    assert [outcome.traffic.values_down for outcome in outcomes] == [0, 0]


def test_the_rest_of_the_world_is_the_mean_of_the_others_alone(three):
    net, method = tiny(pairs=2), FedALT()
    state = record_states(method, net, three, [[0, 2], [2, 1]])[-1]
    models = [of(client_row(state.clients["model"], client), *PAIR) for client in range(3)]
    wanted = tree.map(lambda one, other: (one + other) / 2, models[0], models[2])
    assert_close(rest(method, state, 1), wanted, atol=1e-7)
    mine = tree.map(lambda leaf: leaf + 1, state.client(1)["model"])
    state.rows.put_([1], {"client": {"model": tree.map(lambda leaf: leaf[None], mine)}})
    assert_close(rest(method, state, 1), wanted, atol=1e-7)
    assert differing(
        rest(method, state, 0), tree.map(lambda one, other: (one + other) / 2, models[1], models[2])
    )
    equal = with_client_states(state, {"model": tree.repeat(mine, 3)})
    assert_close(rest(method, equal, 1), of(mine, *PAIR), atol=0, rtol=1e-6)


def test_identical_clients_have_one_pair_for_both():
    """Then any mixer leaves plain LoRA."""
    one = make_federation((40,), (10,))
    same = dataclasses.replace(one, train=one.train * 3, test=one.test * 3)
    net, method, x = tiny(pairs=2).with_facts(clients=3), FedALT(), torch.randn(4, 1, 8, 8)
    single = tiny(pairs=1)
    for state in record_states(method, net, same, [[0, 1, 2]] * 2, local=PLAIN)[1:]:
        own = client_row(state.clients["model"], 0)
        assert_close(rest(method, state, 0), of(own, *PAIR), atol=1e-6)
        mixture = find_eval_job(method, net, same, state, 0).params
        assert_close({"": net.bind({})(mixture, x)}, {"": single.bind({})(own, x)}, atol=1e-5)


def test_who_draws_an_a_of_its_own_keeps_it(three):
    """One draw for each client, at its first participation; a mean of such is shorter than each."""
    net, method = tiny(pairs=2), FedALT("own")
    local = Local(epochs=1, batch_size=512, lr=1e-30)
    first, again = (
        of(s.clients["model"], "lora_A")
        for s in record_states(method, net, three, COHORTS, local=local)[1:]
    )
    assert_same(first, again)
    drawn = [client_row(first, client) for client in range(3)]
    for one, other in ((0, 1), (1, 2), (2, 0)):
        assert len(differing(drawn[one], drawn[other])) == 2
    for name, leaf in drawn[0].items():
        assert leaf.abs().max() <= (9 if "conv" in name else 36) ** -0.5
        assert leaf.abs().max() > 0.5 * (9 if "conv" in name else 36) ** -0.5


# SDFLoRA


def test_a_stack_is_compressed_to_the_nearest_of_its_rank():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 2, 2, 9, generator=g), torch.randn(3, 2, 7, 2, generator=g)
    weight = torch.tensor([0.5, 0.2, 0.3])
    whole = (weight.view(-1, 1, 1, 1) * (b @ a)).sum(0)
    for rank in (2, 6):
        low, up = compress_pair(*stack_pairs(a, b, weight), rank)
        assert (low.shape, up.shape) == ((2, rank, 9), (2, 7, rank))
        u, s, v = torch.linalg.svd(whole, full_matrices=False)
        nearest = (u[..., :rank] * s[:, None, :rank]) @ v[:, :rank]
        assert_close({"": up @ low}, {"": nearest}, atol=1e-5)
        assert_close({"": low @ low.mT}, {"": torch.eye(rank).expand(2, rank, rank)}, atol=1e-5)
    assert_close({"": up @ low}, {"": whole}, atol=1e-5)  # rank 6 holds all
    images = a[:, 0].reshape(3, 2, 1, 3, 3), b[:, 0].reshape(3, 7, 2, 1, 1)
    assert_close(
        {"": torch.cat(compress_pair(*stack_pairs(*images, weight), 6)[:1])},
        {"": low[:1]},
        atol=1e-5,
    )
    low, up = compress_pair(*stack_pairs(a, 0 * b, weight), 2)  # of what nobody has trained
    assert not up.any()
    assert (low.square().sum(-1) > 0.9).all()  # and B has a gradient still


def test_only_its_module_of_a_client_leaves_it(three):
    """The private one is zero of who was never sampled, the shared one is everybody's."""
    net, method = tiny(pairs=1), SDFLoRA(0.5)
    state = record_states(method, net, three, [[0, 2]])[-1]
    models = [find_eval_job(method, net, three, state, client).params for client in range(3)]
    for model in models:
        assert_same(model["fc.lora_A"][:, :1], models[0]["fc.lora_A"][:, :1])
        assert_same(model["conv.lora_B"][:, :1], models[0]["conv.lora_B"][:, :1])
    assert models[1]["fc.lora_B"][..., 0].any()
    assert not models[1]["fc.lora_B"][..., 1].any()
    assert differing(models[0]["fc.lora_B"][..., 1], models[2]["fc.lora_B"][..., 1])
