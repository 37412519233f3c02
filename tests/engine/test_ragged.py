"""What clients find out with as many rows as they have samples: `tree.Ragged`, and what is told
where it is not marked.

Both backends give the same, whatever a client is padded to; shapes that differ unmarked are one
line.
"""

import inspect
from dataclasses import dataclass, replace

import pytest
import torch

from fedpfl.engine import Engine, FineTuning, make_backend, make_initial_state
from fedpfl.engine.calls import EvalCall, TrainCall
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.methods import FedAvg, Phase
from fedpfl.testing.toy import (
    AGREE,
    COHORTS,
    EVERYONE,
    TEST,
    TRAIN,
    require_rounds_agree,
    tiny_federation,
)
from tests.conftest import (
    BACKENDS,
    CPU,
    LOCAL,
    assert_close,
    assert_same,
    evaluate,
    keep_quick,
    make_federation,
    read_cases,
    record_rounds,
    tiny,
)
from tests.engine.test_program import Capture, played

SHORT = replace(LOCAL, epochs=1)


def rows_of(shard):
    """A client's own samples."""
    return {"x": shard.data.x.flatten(1), "y": shard.data.y}


def mean(own):
    """Of the samples that are a client's own."""
    return (own.values["x"] * own.real[:, None]).sum(0) / own.real.sum()


@dataclass(frozen=True)
class Remembering(FedAvg):
    """Looks at all samples wherever a client may, and learns, brings back and predicts by what it
    has seen.
    """

    def init(self, params, parts):
        mean = torch.zeros(64)
        return {"net": params, "mean": mean}, {"mean": mean, "kept": torch.zeros(())}

    def before_training(self, server, client, net, shard):
        return {"seen": tree.Ragged(rows_of(shard)), "first": shard.data.x[0, 0, 0]}

    def start(self, received, client):
        return received["net"]

    def loss(self, server, client, net, params, batch):
        near = (batch.x.flatten(1) - mean(client["seen"])).square().mean(1)
        return batch.mean(near * batch.losses(net(params, batch.x))), {"y": batch.y}

    def after_training(self, server, client, net, params, shard, kept):
        return {"trained_on": tree.Ragged(kept.get("y", shard.data.y[:0]))}

    def finish(self, server, client, start, end):
        own = client["trained_on"]
        state = {"mean": mean(client["seen"]), "kept": (own.values * own.real).sum().float()}
        return {"net": end, "mean": mean(client["seen"])}, {**client, **state}

    def evaluated(self, server, client, params):
        return {"net": params}

    def before_evaluation(self, server, client, net, shard):
        return {"seen": tree.Ragged(rows_of(shard))}

    def personal(self, server, client):
        return {"net": server["net"], "seen": client["seen"]}

    def predict(self, net, params, batch):
        logits = net(params["net"], batch.x)
        if "seen" not in params:
            return logits
        own = params["seen"]
        near = (-torch.cdist(batch.x.flatten(1), own.values["x"])).exp() * own.real
        return logits + near @ (own.values["y"][:, None] == torch.arange(logits.shape[1])).float()

    def finetuning(self, params, parts, epochs):
        return [Phase(epochs, mask={"net": True, "seen": False})]


@pytest.mark.parametrize("width", [0, 1, 4])
def test_ragged_findings_are_on_the_batched_backend_what_they_are_one_by_one(width):
    method, net, federation = Remembering(), tiny(), tiny_federation()
    loop, batched = (
        record_rounds(method, net, federation, COHORTS, local=SHORT, engine=engine)
        for engine in (Engine("loop"), Engine("batched", width=width))
    )
    for t in range(len(COHORTS)):
        pairs = ((states[t + 1], outcomes[t]) for states, outcomes in (loop, batched))
        require_rounds_agree(f"round {t + 1}", *pairs, **AGREE)
    own, known = federation.train[2], loop[0][1].client(2)
    expected = federation.normalize(federation.x[own]).flatten(1).mean(0)
    assert_close(known["mean"], expected, atol=1e-6)
    order = Draws(0, "train", 1).order(2, "main", 0, len(own))
    assert len(own) % SHORT.batch_size == 1  # a lone sample at an epoch's end is left out
    assert known["kept"] == federation.y[own][order[:-1]].sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_whose_longest_client_differs_go_side_by_side(backend):
    """Fewer of the same images, so that the other run's padding is another."""
    method, net, other = Remembering(), tiny(), make_federation(TRAIN, TEST, seed=2)
    same = {name: getattr(tiny_federation(), name) for name in "xy"}
    other = replace(other, **same, train=tuple(own[:30] for own in other.train))
    runner = make_backend(Engine(backend), net, CPU)
    calls = []
    tuning = FineTuning(SHORT, Draws(0, "finetune", 1))
    for seed, federation in enumerate((tiny_federation(), other)):
        state = make_initial_state(method, net, len(TRAIN), CPU)
        draws = Draws(seed, "train", 1)
        calls.append(TrainCall(method, federation, state, COHORTS[1], SHORT, draws))
        calls.append(EvalCall(method, federation, state, EVERYONE, tuning))
    for together, call in zip(runner.run(calls), calls, strict=True):
        assert not isinstance(together, Exception), together
        assert_close(together, runner.run([call])[0], atol=2e-5, rtol=1e-4)


@dataclass(frozen=True)
class Plain(Remembering):
    """Keeps nothing of its steps, so that they may be captured."""

    def loss(self, server, client, net, params, batch):
        return super().loss(server, client, net, params, batch)[0]


def test_captured_steps_are_not_taken_for_another_padding():
    cohorts = [[4, 0, 2, 3], [0, 2, 3, 5], [4, 0, 2, 3]]  # 65, 40 and 65 samples at most
    captured, eager = (
        played(Plain(), tiny_federation(), how, cohorts, local=SHORT) for how in (Capture(), None)
    )
    assert_same(captured, eager)


def make_method(hook, answer, base=FedAvg):
    """A method whose hook answers so, given the arguments of the contract."""
    arguments = ", ".join(inspect.signature(getattr(FedAvg, hook)).parameters)
    return type("Wrong", (base,), {hook: eval(f"lambda {arguments}: {answer}", globals())})()


FORMS = "answer all alike, and where their first axis differs by tree.Ragged(values)"
UNMARKED = """
before_training | {"own": {"x": shard.data.x}} | own.x is torch.float32 [40, 1, 8, 8] for client 0
after_training | {"y": shard.data.y} | y is torch.int64 [40] for client 0 and torch.int64 [33] for
before_evaluation | {"y": shard.data.y} | and torch.int64 [7] for client 1
before_training | {"own": tree.Ragged(square(shard))} | own is torch.float32 [0, 40] for client 0 and torch.float32 [0, 33] for client 2
after_training | {"y": shard.data.y[0].to(torch.int64 if len(shard.data.y) > 35 else torch.float32)} | y is
before_training | {"a": shard.data.y[0]} if len(shard.data.y) == 40 else {} | a is torch.int64 [] for client 0 and missing for client 2
"""
"""Hook | its answer | what is said."""


def square(shard):
    count = len(shard.data.y)
    return shard.data.x.flatten()[: count**2].view(-1, count)


def whole(method, backend):
    """A round, and an evaluation."""
    net, federation = tiny(), tiny_federation()
    values = {"local": SHORT, "engine": backend}
    states, _ = record_rounds(method, net, federation, COHORTS[:1], **values)
    evaluate(method, net, federation, states[-1], backend)


@pytest.mark.parametrize(("hook", "answer", "word"), read_cases(UNMARKED, " | "))
def test_other_shapes_are_the_same_line_on_both_backends(hook, answer, word):
    lines, method = [], make_method(hook, answer)
    for backend in (*map(Engine, BACKENDS), Engine("batched", width=1)):
        with pytest.raises(MethodError) as told:
            whole(method, backend)
        lines.append(str(told.value))
    assert lines[0] == lines[1]
    assert all(line.startswith(f"{hook} answers with other forms: ") for line in lines)
    assert word in lines[0]
    assert FORMS in lines[0]


WRONG = """
sample | {"n": tree.Ragged(torch.zeros(3))} | entry n.real
finish | (params, {**client, "own": client["seen"]}) | another form than init's, own was torch.float32 [3] and is missing
finish | ({"end": params, "own": client["seen"]}, {"own": client["own"]}) | an upload with a tree.Ragged in it
prepare | {**client, "own": tree.Ragged(torch.zeros(3))} | entry own.real
before_training | {"n": tree.Ragged(shard.data.y[0])} | n as tree.Ragged, whose leaves have no first axis of one length
"""
"""Hook | its answer, given the arguments of the contract | what is said."""


class Seeing(FedAvg):
    def init(self, params, parts):
        return params, {"own": torch.zeros(3)}

    def before_training(self, server, client, net, shard):
        return {"seen": tree.Ragged(shard.data.y)}


@pytest.mark.parametrize("backend", keep_quick(BACKENDS[::-1]))
@pytest.mark.parametrize(("hook", "answer", "word"), read_cases(WRONG, " | "))
def test_what_is_ragged_where_it_may_not_be_is_told(hook, answer, word, backend):
    with pytest.raises(MethodError) as told:
        whole(make_method(hook, answer, Seeing), backend)
    assert word in str(told.value)
