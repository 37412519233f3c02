"""What hooks may not answer is told with the hook's name: by the first promise, and in any run where
numbers would be wrong in silence; and models that are not finite. What has as many rows as a client
has samples is `tree.Ragged`, whatever the client is padded to.
"""

import inspect
from dataclasses import dataclass, replace

import pytest
import torch

from fedpfl.config import plugins
from fedpfl.engine import (
    Engine,
    FineTuning,
    make_initial_state,
)
from fedpfl.engine.evaluate import non_finite_clients, scores_per_client
from fedpfl.engine.keys import Draws
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError, MethodError
from fedpfl.methods import METHODS, FedAvg, LocalOnly, Phase, Turn
from fedpfl.testing import toy
from fedpfl.testing.method_promises import keeps_form
from fedpfl.testing.promises import Unkept
from fedpfl.testing.toy import (
    AGREE,
    MethodTrial,
    require_close,
    tiny_federation,
)
from tests.command import TINY, read_summary, read_table, run_command
from tests.conftest import (
    CPU,
    LOCAL,
    assert_close,
    evaluate,
    make_federation,
    next_round,
    read_cases,
    record_rounds,
    tiny,
)

COHORT = [0, 1, 2]
FEDERATION = make_federation((20, 7, 12), (5, 3, 1))
SHORT = replace(LOCAL, epochs=1)


@pytest.fixture(autouse=True)
def forgotten_plugins():
    yield
    plugins.load_plugins([])


def play_everything(method, backend):
    """A round and evaluations: every hook is asked."""
    net = tiny()
    state = make_initial_state(method, net, 3, CPU)
    state, _ = next_round(method, net, FEDERATION, state, COHORT, engine=backend, local=SHORT)
    for tuning in (None, FineTuning(SHORT, Draws(0, "finetune", 1))):
        evaluate(method, net, FEDERATION, state, backend, tuning=tuning)


WRONG_ANSWERS = """
init | (params, {'participated': torch.tensor(False)}) | 'participated', which the engine lays over
turns | [Turn([1]), Turn([1])] | turns returned [Turn(
before_training | {'n': {'m': 3}} | Wrong.before_training returned a dict, {'n': {'m': 3}}; it must
prepare | None | returned None (is a `return` missing?); it must return dict[str, Tree] with
aggregate | ({}, clients) | returned a server state in another form than init's, classifier.bias was
predict | 3 | Wrong.predict returned a int, 3; it must return Tensor
"""
"""Hook | what it returns, given the arguments of the contract | what the first promise says."""


def make_hook(hook, expression):
    """Return a hook that answers so, given the arguments of the contract."""
    arguments = ", ".join(inspect.signature(getattr(FedAvg, hook)).parameters)
    return eval(f"lambda {arguments}: {expression}", {**globals(), "Turn": Turn, "tree": tree})


def make_wrong(base=FedAvg, **functions):
    return dataclass(frozen=True)(type("Wrong", (base,), functions))()


@pytest.mark.parametrize(("hook", "expression", "told"), read_cases(WRONG_ANSWERS, " | "))
def test_a_wrong_answer_is_told_by_the_first_promise_with_the_hook(hook, expression, told):
    trial = MethodTrial(make_wrong(**{hook: make_hook(hook, expression)}))
    with pytest.raises((MethodError, Unkept)) as error:
        keeps_form(trial, "loop")
    assert told in str(error.value)


SILENT = """
start | received["fc.bias"].add_(1) is None or received | Wrong changed its argument server.fc.bias in
loss | FedAvg.loss(self, server, client, net, params, batch).detach() | Wrong: the loss has no gradient
finish | (params, {}) | Wrong.finish or aggregate returned a client state in another form than init's, n was
"""
"""Hook | its answer | what any run says of it."""


@pytest.mark.parametrize(("hook", "expression", "told"), read_cases(SILENT, " | "))
def test_what_would_change_numbers_in_silence_is_told_in_any_run(hook, expression, told, backend):
    hooks = {
        "init": lambda self, params, parts: (params, {"n": torch.zeros(())}),
        hook: make_hook(hook, expression),
    }
    with pytest.raises(MethodError) as error:
        play_everything(make_wrong(**hooks), backend)
    assert str(error.value).startswith(told)


def test_a_model_that_is_not_finite_has_no_accuracy(backend):
    net, method = tiny(), LocalOnly()
    state = make_initial_state(method, net, 3, CPU)
    broken = state.client([1])
    broken["model"]["classifier.bias"][0, 0] = torch.nan
    state.rows.put_([1], {"client": broken})
    counts = evaluate(method, net, FEDERATION, state, backend)
    assert non_finite_clients(counts) == [1]
    defined = [value == value for value in scores_per_client(counts)["accuracy"]]
    assert defined == [True, False, True]


def test_what_is_not_finite_is_found_at_the_server_and_in_statistics(backend):
    @dataclass(frozen=True)
    class Exploding(FedAvg):
        def aggregate(self, server, clients, net, uploads, weight, generator):
            return tree.map(lambda leaf: leaf.sum(0) * torch.inf, uploads), clients

    @dataclass(frozen=True)
    class Scaled(FedAvg):
        def start(self, received, client):
            return {**received, "conv.weight": received["conv.weight"] * 1e30}

        def finish(self, server, client, start, end):
            return server, client

    _, (outcome,) = record_rounds(Exploding(), tiny(), FEDERATION, [COHORT], engine=backend)
    assert outcome.finite.all()
    assert not outcome.state_is_finite
    _, (outcome,) = record_rounds(Scaled(), tiny(norm=True), FEDERATION, [COHORT], engine=backend)
    assert not outcome.finite.any()


def test_fine_tuning_that_diverges_leaves_its_columns_empty_and_says_so(tmp_path, monkeypatch):
    @dataclass(frozen=True)
    class Wild(FedAvg):
        def finetuning(self, params, parts, epochs):
            return [Phase(epochs, sgd={"lr": 1e30})]

    monkeypatch.setitem(METHODS, "fedavg", Wild)
    result = run_command(
        "method=fedavg", *TINY, "eval.finetune_epochs=1", "eval.finetune_every=1", cwd=tmp_path
    )
    assert result.code == 0
    assert "fine-tuning diverged at" in result.err
    (path,) = tmp_path.glob("outputs/digits/fedavg/*/seed42")
    rows = read_table(path / "rounds.csv")
    assert all(row["accuracy"] and not row["ft_accuracy"] and not row["ft_loss"] for row in rows)
    assert all(row["participants"] == "2" for row in rows)
    assert any(row["ft_accuracy"] in ("", "nan") for row in read_table(path / "clients.csv"))
    assert read_summary(path)["last"].get("ft_accuracy") is None
    assert "fine-tuning diverged" in (path / "run.log").read_text()


def test_a_public_method_that_is_no_hook_is_refused_and_a_private_one_is_not():
    with pytest.raises(FedpflError, match="strat is no hook of a method; did you mean start"):
        type("Mine", (FedAvg,), {"strat": lambda self: None})
    type("Mine", (FedAvg,), {"_strat": lambda self: None})


# What clients find out with as many rows as they have samples


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
        record_rounds(method, net, federation, toy.COHORTS, local=SHORT, engine=engine)
        for engine in (Engine("loop"), Engine("batched", width=width))
    )
    for t in range(len(toy.COHORTS)):
        pairs = ((states[t + 1], outcomes[t]) for states, outcomes in (loop, batched))
        require_close(f"round {t + 1}", *pairs, **AGREE)
    own, known = federation.train[2], loop[0][1].client(2)
    expected = federation.normalize(federation.x[own]).flatten(1).mean(0)
    assert_close(known["mean"], expected, atol=1e-6)
    order = Draws(0, "train", 1).order(2, "main", 0, len(own))
    assert len(own) % SHORT.batch_size == 1  # a lone sample at an epoch's end is left out
    assert known["kept"] == federation.y[own][order[:-1]].sum()


UNMARKED = """
before_training | {"own": {"x": shard.data.x}}
before_evaluation | {"y": shard.data.y}
before_training | {"own": tree.Ragged(square(shard))}
"""
"""Hook | its answer, of another form for another client."""


def square(shard):
    count = len(shard.data.y)
    return shard.data.x.flatten()[: count**2].view(-1, count)


@pytest.mark.parametrize(("hook", "answer"), read_cases(UNMARKED, " | "))
def test_other_shapes_are_told_where_they_would_be_padded(hook, answer):
    method = make_wrong(**{hook: make_hook(hook, answer)})
    play_everything(method, Engine("loop"))
    with pytest.raises(MethodError, match=f"^{hook} answers with other forms .*tree.Ragged"):
        play_everything(method, Engine("batched"))
