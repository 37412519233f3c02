"""pFedHN's rounds against a hypernetwork of torch's modules, autograd and torch.optim.SGD."""

import dataclasses
from functools import cache

import pytest

from fedpfl.ground import tree
from fedpfl.methods import PFedHN
from tests.conftest import HEAD, assert_close, client_row, record_rounds
from tests.methods.reference import pfedhn
from tests.methods.reference.conftest import SEED

SMALL = {"hidden": 10, "lr": 0.05}
CASES = {
    "parallel": PFedHN(**SMALL),
    "sequential": PFedHN(order="sequential", rows="all", depth=1, embedding_lr=0.2, **SMALL),
    "clipped": PFedHN(rows="all", clip=0.02, weight_decay=0.0, **SMALL),
    "pc": PFedHN(variant="pc", momentum=0.5, embedding=4, clip=0.0, weight_decay=0.1, **SMALL),
    "pc-sequential": PFedHN(variant="pc", order="sequential", **SMALL),
}


def network(method, net):
    """The reference's, with the method's initial values; and where the method has each of its
    parameters.
    """
    server, client = method.init(net.params, dataclasses.replace(net.parts, clients=10))
    like = tree.drop(net.params, client["head"])
    learned = server["learned"]
    made = pfedhn.HyperNetwork(10, learned["v"].shape[1], method.hidden, method.depth, like)
    made.load_state_dict(renamed(learned))
    return made


def renamed(learned):
    out = {
        f"out.{name.replace('.', '-')}": {"weight": weight, "bias": learned["bias"][name]}
        for name, weight in learned["weight"].items()
    }
    mlp = {f"mlp.{place}": own for place, own in learned["mlp"].items()}
    layers = {
        f"{name}.{part}": leaf for name, own in (mlp | out).items() for part, leaf in own.items()
    }
    return {"embedding.weight": learned["v"]} | {
        name: leaf.flatten() if name.endswith("bias") else leaf for name, leaf in layers.items()
    }


@pytest.fixture(scope="module")
def expected(setting, net):
    @cache
    def get(name):
        method = CASES[name]
        return pfedhn.pfedhn(
            setting,
            network(method, net),
            HEAD if method.variant == "pc" else (),
            method.lr,
            method.embedding_lr or method.lr,
            method.momentum,
            method.weight_decay,
            method.clip or 1e9,
            method.order == "sequential",
            method.rows == "all",
        )

    return get


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_equal_the_plain_loops(name, backend, expected, net, federation):
    method, want = CASES[name], expected(name)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        assert_close(renamed(state.server["learned"]), dict(want.phis[t]), atol=1e-6, rtol=1e-5)
        for client, model in enumerate(want.personal[t]):
            assert_close(
                method.personal(state.server, state.client(client)), model, atol=2e-6, rtol=1e-5
            )
            assert_close(
                client_row(state.clients["head"], client),
                {k: model[k] for k in state.clients["head"]},
                atol=2e-6,
            )
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


@pytest.mark.full
def test_the_cases_differ_and_learn(expected, net):
    start = {name: renamed(CASES[name].init(net.params, net.parts)[0]["learned"]) for name in CASES}
    for name in CASES:
        last = expected(name).phis[-1]
        moved = max(
            float((last[k] - start[name][k]).abs().max()) for k in last if k != "embedding.weight"
        )
        assert moved > 1e-4, name
