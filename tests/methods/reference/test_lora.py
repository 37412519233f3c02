"""Methods over low-rank adapters beside plain loops: ragged clients, momentum, weight decay, half
of them a round.
"""

import dataclasses
from functools import cache

import pytest

from fedpfl.engine.keys import Draws
from fedpfl.methods import FedALT, FedAvg, FedSALoRA, FFALoRA, SDFLoRA
from tests.conftest import assert_close, find_eval_job, record_rounds, tiny
from tests.methods.reference import lora
from tests.methods.reference.conftest import SEED

SCALE = 2.0  # alpha 4 of rank 2
HEAD = "classifier."


def own_b(name):
    return name.endswith("lora_B") or name.startswith(HEAD)


def drawn(t, i):
    """What FedALT draws for a client in a round, by the engine's generator."""
    server = {
        "drawn": {
            name: value for name, value in tiny(pairs=2).params.items() if name.endswith(".lora_A")
        }
    }
    return FedALT("own").sample(server, Draws(SEED, "train", t).server(i))["drawn"]


METHODS = {
    "fedavg": (FedAvg(), lambda s: lora.by_name(s, lambda name: False)),
    "fedsa": (FedSALoRA(), lambda s: lora.by_name(s, own_b)),
    "fedsa-averaged": (
        FedSALoRA("averaged"),
        lambda s: lora.by_name(s, lambda name: name.endswith("lora_B")),
    ),
    "ffa": (
        FFALoRA(),
        lambda s: lora.by_name(
            s, lambda name: False, lambda name: name.endswith("lora_B") or name.startswith(HEAD)
        ),
    ),
    "ffa-frozen": (
        FFALoRA("frozen"),
        lambda s: lora.by_name(s, lambda name: False, lambda k: k.endswith("lora_B")),
    ),
    "fedalt": (FedALT(), lora.fedalt),
    "fedalt-own": (FedALT("own"), lambda s: lora.fedalt(s, drawn)),
    "sdflora": (SDFLoRA(0.5), lambda s: lora.sdflora(s, 1, True, True)),
    "sdflora-averaged": (
        SDFLoRA(0.5, "averaged", "averaged"),
        lambda s: lora.sdflora(s, 1, False, False),
    ),
}


@pytest.fixture(scope="module")
def expected(setting):
    def play(name):
        method, loops = METHODS[name]
        net = tiny(pairs=method.pairs or 1)
        return loops(
            dataclasses.replace(setting, module=lora.Adapted({**net.frozen, **net.params}, SCALE))
        )

    return cache(play)


FRONT = ("fedsa", "ffa-frozen", "fedalt-own", "sdflora")


@pytest.mark.parametrize(
    "name",
    [name if name in FRONT else pytest.param(name, marks=pytest.mark.full) for name in METHODS],
)
def test_three_rounds_equal_the_plain_loops(name, backend, expected, federation):
    method, want = METHODS[name][0], expected(name)
    net = tiny(pairs=method.pairs or 1)
    states, outcomes = record_rounds(method, net, federation, engine=backend, seed=SEED)
    for t, (state, outcome) in enumerate(zip(states[1:], outcomes, strict=True)):
        for client, personal in enumerate(want.personal[t]):
            own = find_eval_job(method, net, federation, state, client).params
            assert_close(own, {key: personal[key] for key in own}, atol=2e-6, rtol=0.0)
        assert outcome.before.correct.tolist() == want.before[t]
        assert outcome.after.correct.tolist() == want.after[t]
