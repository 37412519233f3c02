"""FedGen's rounds against plain loops of torch's modules and torch.optim.Adam, with the method's
own noise.
"""

from functools import cache

import pytest
import torch

from fedpfl.engine.keys import generator
from fedpfl.methods import FedGen
from tests.conftest import CLASSES, assert_close, record_rounds
from tests.methods.reference import fedgen
from tests.methods.reference.conftest import SEED, draw_randoms

SMALL = {"noise": 6, "hidden": 9, "steps": 4, "batch": 8, "lr": 0.02}
CASES = {
    "official": FedGen(**SMALL),
    "paper": FedGen(teacher="mean_logits", labels="frequency", alpha=3.0, decay=0.5, **SMALL),
    "own": FedGen(alpha=0.0, beta=1.0, eta=0.0, **SMALL),
    "other": FedGen(beta=0.0, alpha=2e-4, decay=0.3, weight_decay=0.1, **SMALL),
}


def renamed(made):
    """The method's generator by torch's names."""
    learned = {
        f"{layer}.{name}": leaf
        for layer, own in made["learned"].items()
        for name, leaf in own.items()
    }
    moved = {
        "norm.running_mean": made["moved"]["mean"],
        "norm.running_var": made["moved"]["variance"],
    }
    return learned | moved


@pytest.fixture(scope="module")
def expected(setting, net):
    @cache
    def get(name):
        method = CASES[name]
        made = fedgen.Generator(method.noise, method.hidden, CLASSES, 12)
        made.load_state_dict(
            renamed(method.init(net.params, net.parts)[0]["generator"]), strict=False
        )

        def random(t, i, epoch):
            return draw_randoms(t, i, epoch, 2 * method.noise + 1)

        def drawn(t, labels):
            numbers = torch.rand(
                method.steps,
                method.batch,
                1 + method.noise,
                generator=generator(SEED, "aggregate", t),
            )
            for own in numbers:
                yield torch.tensor(labels)[(len(labels) * own[:, 0]).long()], own[:, 1:]

        values = (
            *("alpha", "beta", "decay", "eta", "noise", "lr", "weight_decay", "teacher", "labels"),
        )
        return fedgen.fedgen(
            setting, made, random, drawn, **{value: getattr(method, value) for value in values}
        )

    return get


@pytest.mark.parametrize("name", CASES)
def test_three_rounds_equal_the_plain_loops(name, backend, expected, net, federation):
    """Adam divides small gradients by their size, which amplifies rounding: 1e-5 for the generator."""
    method, want = CASES[name], expected(name)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        made = {k: v for k, v in want.generators[t].items() if k != "norm.num_batches_tracked"}
        assert_close(renamed(state.server["generator"]), made, atol=2e-5, rtol=1e-4)
        assert_close(
            method.personal(state.server, state.client(0)), want.shared[t], atol=5e-6, rtol=0.0
        )
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]


@pytest.mark.full
def test_the_cases_differ(expected):
    last = {
        name: torch.cat([leaf.flatten() for leaf in expected(name).shared[-1].values()])
        for name in CASES
    }
    for one in CASES:
        for other in CASES:
            assert one == other or (last[one] - last[other]).abs().max() > 1e-5, (one, other)
