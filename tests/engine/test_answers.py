"""What hooks may not answer is told in the first round, in one line with the hook's name:
fedpfl/engine/training/hook_checks.py.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from fedpfl.config import plugins
from fedpfl.engine import (
    FineTuning,
    RoundSetup,
    compare_masks,
    count_participants,
    make_backend,
    make_initial_state,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import Draws
from fedpfl.engine.training import hook_checks as answers
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.methods import METHODS, FedAvg, FedPAC, Phase, Turn
from fedpfl.methods.shared.method import hook_names
from fedpfl.runner.faults import user_errors
from tests.command import TINY, run_command
from tests.conftest import BACKENDS, CPU, LOCAL, as_engine, make_federation, record_rounds, tiny

COHORT = [0, 1, 2]
FEDERATION = make_federation((20, 7, 12), (5, 3, 1))
SHORT = replace(LOCAL, epochs=1)


def whole(method, backend):
    """A round and evaluations: every hook is asked."""
    net = tiny()
    count_participants(method, 0, 3, 1.0, 1)
    state = make_initial_state(method, net, 3, CPU)
    runner = make_backend(as_engine(backend), net, CPU)
    state, _ = play_round(RoundSetup(runner, method, FEDERATION, SHORT, 0), state, COHORT)
    compare_masks(method, state)
    for tuning in (None, FineTuning(SHORT, Draws(0, "finetune", 1))):
        runner.evaluate(EvalCall(method, FEDERATION, state, COHORT, tuning))


def own_phase(**functions):
    return {"phases": lambda self, server, client, params, epochs: [Phase(epochs, **functions)]}


def circle():
    tree = {}
    tree["tree"] = tree
    return tree


def _survey(server, clients, uploads):
    return server, clients


def head(params):
    return {"fc.bias": params["fc.bias"]}


WRONG = {
    "init": [
        (
            lambda self, params, parts: params,
            "Wrong.init returned a dict; it must return two things: the server's tree",
        ),
        (lambda self, params, parts: (params, None), "returned None (is a `return` missing?)"),
        (lambda self, params, parts: (params, {"a": {"b": 1.0}}), "returned a float as entry a.b"),
        (
            lambda self, params, parts: (params, {"participated": torch.tensor(False)}),
            "returned a client state with 'participated', which the engine lays over it",
        ),
        (
            lambda self, params, parts: (params, {0: torch.zeros(())}),
            "returned an entry named 0, which is no string",
        ),
    ],
    "init_clients": [
        (
            lambda self, clients, generator: {"rate": torch.ones(clients)},
            "rate, which init's client state does not have",
        ),
        (
            lambda self, clients, generator: torch.ones(clients),
            "returned a tensor torch.float32 [3]",
        ),
    ],
    "buffers": [
        (
            lambda self: {"main": "server"},
            "returned 'server'; it must return a dict of 'aggregate' or 'local'",
        )
    ],
    "turns": [
        (
            lambda self, played, cohort, clients, generator: [cohort],
            "returned a list with a list of 3 in it",
        ),
        (
            lambda self, played, cohort, clients, generator: Turn(cohort),
            "returned a Turn; it must return a list of Turn",
        ),
        (lambda self, played, cohort, clients, generator: [Turn([7])], "returned client 7 of 3"),
        (
            lambda self, played, cohort, clients, generator: None,
            "returned None (is a `return` missing?)",
        ),
        (
            lambda self, played, cohort, clients, generator: [],
            "returned no turn in which clients train",
        ),
        (
            lambda self, played, cohort, clients, generator: [Turn(cohort, survey=_survey)],
            "no turn in which clients t",
        ),
        (
            lambda self, played, cohort, clients, generator: [Turn([])],
            "returned a turn without clients",
        ),
        (
            lambda self, played, cohort, clients, generator: [Turn(cohort, trains=False)],
            "nobody trains, and no survey",
        ),
        (
            lambda self, played, cohort, clients, generator: [Turn([2, 0, 2])],
            "returned client 2 twice",
        ),
        (
            lambda self, played, cohort, clients, generator: [Turn([1]), Turn([1])],
            "returned client 1 twice",
        ),
        (lambda self, *given: [Turn([0, 0], survey=_survey), Turn([1])], "returned client 0 twice"),
        (
            lambda self, played, cohort, clients, generator: [
                Turn([0], survey=lambda server, uploads, clients: (server, clients))
            ],
            (
                "a turn whose survey takes (server, uploads, clients) where the contract has"
                " (server, clients, uploads)"
            ),
        ),
    ],
    "before_turn": [
        (
            lambda self, server, clients, others, generator: others([0])["number"],
            "returned a tensor torch.int64 [1]",
        ),
        (
            lambda self, server, clients, others, generator: {"w": torch.ones(2)},
            "w as a tensor [2] for 3 clients",
        ),
    ],
    "sample": [
        (lambda self, server, generator: torch.rand(2), "returned a tensor torch.float32 [2]")
    ],
    "before_training": [
        (lambda self, server, client, net, shard: {"n": 3}, "returned a int as entry n")
    ],
    "prepare": [(lambda self, server, client: None, "returned None (is a `return` missing?)")],
    "download": [
        (
            lambda self, server, client: list(server),
            "returned a list of 6; it must return a tree of tensors",
        )
    ],
    "start": [
        (
            lambda self, received, client: (received, client),
            "returned a tuple of 2; it must return a tree of tensors",
        ),
        (
            lambda self, received, client: head(received),
            "returned a model without the network's conv.weight",
        ),
        (
            lambda self, received, client: {**received, **circle()},
            "returned a tree that contains itself",
        ),
    ],
    "phases": [
        (
            lambda self, server, client, params, epochs: Phase(epochs),
            "returned a Phase; it must return a list of Phase",
        ),
        (lambda self, server, client, params, epochs: [epochs], "returned a list with a int in it"),
        (lambda self, server, client, params, epochs: [Phase(-1)], "returned a phase of -1 epochs"),
        (
            lambda self, server, client, params, epochs: [Phase(0.5)],
            "returned a phase of 0.5 epochs",
        ),
        (
            lambda self, server, client, params, epochs: [Phase(1, batches=0)],
            "returned a phase of 0 batches",
        ),
        (
            lambda self, server, client, params, epochs: [Phase(1, {"fc.bias": True})],
            "mask lacks the entry conv.weight",
        ),
        (
            lambda self, server, client, params, epochs: [Phase(1, params)],
            "whose mask has a tensor torch.float32",
        ),
        (
            lambda self, server, client, params, epochs: [
                Phase(1, {n: torch.ones(2) > 0 for n in params})
            ],
            "whose mask has shape [2] for conv.weight, which is [4, 1, 3, 3]",
        ),
        (
            lambda self, server, client, params, epochs: [Phase(1, sgd={"rate": 1.0})],
            "with sgd value rate, which",
        ),
        (
            lambda self, server, client, params, epochs: [
                Phase(1, step=lambda net, params, batch, server, client: 0)
            ],
            (
                "a phase whose step takes (net, params, batch, server, client) where the contract"
                " has (server, client, net"
            ),
        ),
    ],
    "loss": [
        (
            lambda self, server, client, net, params, batch: batch.losses(net(params, batch.x)),
            "float32 [20]; it must",
        ),
        (
            lambda self, server, client, net, params, batch: (
                batch.loss(net(params, batch.x)),
                {"n": 3},
            ),
            "returned a int as entry n; it must return the loss, a 0-dimensional tensor",
        ),
        (lambda self, server, client, net, params, batch: None, "returned None"),
        (
            lambda self, *given: FedAvg.loss(self, *given).detach(),
            "returned what has no gradient (is it detached",
        ),
    ],
    "after_training": [
        (lambda self, server, client, net, params, shard, kept: None, "returned None")
    ],
    "updated_buffers": [
        (
            lambda self, server, client: {"head": {}},
            "statistics of head, which `buffers` does not name",
        ),
        (
            lambda self, server, client: {"main": {"mean": torch.ones(1)}},
            "returned main.mean, which is not bool",
        ),
    ],
    "finish": [
        (
            lambda self, server, client, start, end: end,
            "returned a dict; it must return two things: the upload",
        ),
        (lambda self, server, client, start, end: (end, client, start), "returned a tuple of 3"),
        (lambda self, server, client, start, end: None, "returned None"),
    ],
    "aggregate": [
        (
            lambda self, server, clients, net, uploads, weight, generator: tree.mean(
                uploads, weight
            ),
            "returned a dict; it must return two",
        ),
        (
            lambda self, server, clients, net, uploads, weight, generator: (uploads, clients),
            (
                "another form than init's, classifier.bias was torch.float32 [5] and is"
                " torch.float32 [3, 5]"
            ),
        ),
        (
            lambda self, server, clients, net, uploads, weight, generator: (
                server,
                {"n": weight.sum()},
            ),
            "the clients' n as a tensor []",
        ),
    ],
    "evaluated": [(lambda self, server, client, params: None, "returned None")],
    "before_evaluation": [(lambda self, server, client, net, shard: shard, "returned a Shard")],
    "personal": [
        (
            lambda self, server, client: head(server),
            "returned a model without the network's conv.weight",
        )
    ],
    "predict": [
        (
            lambda self, net, params, batch: net(params, batch.x).argmax(1),
            "torch.int64 [5] for 5 samples of 5 classes",
        ),
        (
            lambda self, net, params, batch: net(params, batch.x)[:, :4],
            "torch.float32 [5, 4] for 5 samples of 5 classes",
        ),
    ],
    "finetuning": [
        (
            lambda self, params, parts, epochs: Phase(epochs),
            "returned a Phase; it must return a list",
        )
    ],
    "metrics": [
        (
            lambda self, server, client: {"bias": server["fc.bias"]},
            "returned a tensor torch.float32 [12] as bias",
        ),
        (lambda self, server, client: {"one": 1.0}, "returned a float as entry one"),
    ],
    "masks": [
        (
            lambda self, server, client: server,
            "returned a tensor torch.float32 [4, 1, 3, 3] as a mask",
        )
    ],
}


def test_every_hook_has_a_rule_and_a_wrong_answer():
    assert set(hook_names()) == set(answers.HOOK_RULES) == set(WRONG)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("hook", "wrong", "told"),
    [
        pytest.param(hook, *case, id=f"{hook}-{k}")
        for hook, cases in WRONG.items()
        for k, case in enumerate(cases)
    ],
)
def test_a_wrong_answer_is_told_with_the_hook(hook, wrong, told, backend):
    Wrong = dataclass(frozen=True)(type("Wrong", (FedAvg,), {hook: wrong, "__annotations__": {}}))
    with pytest.raises(MethodError, match=rf"^Wrong\.{hook} returned ") as error:
        whole(Wrong(), backend)
    assert told in str(error.value).replace("[32]", "[20]")  # the batched backend pads
    assert "it must return" in str(error.value)


def _pair(self, server, client, net, params, batch):
    return batch.loss(net(params, batch.x)), batch.y


def _forgets(self, *given):
    return None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("phase", "function", "told"),
    [
        (
            {"loss": "_own"},
            lambda self, *given: list(_pair(self, *given)),
            "a list of 2; it must return the loss",
        ),
        (
            {"step": "_own"},
            lambda self, server, client, net, params, *given: params,
            "a dict; it must return two things: the new tree",
        ),
        (
            {"step": "_own"},
            lambda self, server, client, net, params, *given: (head(params), None),
            "classifier.bias was",
        ),
        ({"after_gradient": "_own"}, _forgets, "None"),
        (
            {"loss": "_own"},
            lambda self, *given: (*_pair(self, *given), None),
            "a tuple of 3; it must return the loss",
        ),
        (
            {"loss": "_own"},
            lambda self, *given: (FedAvg.loss(self, *given), {"n": torch.zeros(3)}),
            "beside the loss a tensor torch.float32 [3] as n for ",
        ),
        (
            {"loss": "_own"},
            lambda self, *given: FedAvg.loss(self, *given).detach(),
            "what has no gradient",
        ),
        ({}, lambda self, *given: (FedAvg.loss(self, *given).detach(), {}), "what has no gradient"),
    ],
    ids=[
        *("list", "step", "step-form", "after_gradient", "loss", "kept", "detached"),
        "kept-detached",
    ],
)
def test_what_a_phases_functions_answer_is_looked_at_too(phase, function, told, backend):
    def phases(self, server, client, params, epochs):
        own = {
            name: getattr(self, value) if value == "_own" else value
            for name, value in phase.items()
        }
        return [Phase(epochs, **own)]

    name = "loss" if not phase else "_own"
    Wrong = dataclass(frozen=True)(
        type("Wrong", (FedAvg,), {"phases": phases, name: function, "__annotations__": {}})
    )
    with pytest.raises(MethodError, match=r"^Wrong\.\S+ (\(Phase\.\w+\) )?returned ") as error:
        whole(Wrong(), backend)
    assert told in str(error.value)


@dataclass(frozen=True)
class Branching(FedAvg):
    by: str = "if"

    def init(self, params, parts):
        return params, {"n": torch.zeros(3)}

    def finish(self, server, client, start, end):
        n = client["n"]
        if self.by == "if" and n.sum() > 1:
            n = n + 1
        n = {
            "int": lambda: n * int(n.sum()),
            "mask": lambda: n + n[n > 0].sum(),
            "list": lambda: n + n.tolist()[0],
        }.get(self.by, lambda: n)()
        return end, {"n": n}


@pytest.mark.parametrize("by", ["if", "int", "mask", "list"])
def test_looking_at_values_in_a_vectorised_hook_is_told_with_what_to_do(by):
    whole(Branching(by), "loop")
    with pytest.raises(
        MethodError,
        match=r"^Branching\.finish looks at the values of a tensor .* torch\.where, .*py:\d+\)$",
    ):
        whole(Branching(by), "batched")


def test_a_dictionary_that_a_hook_adds_to_is_an_argument_changed():
    @dataclass(frozen=True)
    class Adding(FedAvg):
        def start(self, received, client):
            client["seen"] = torch.ones(())
            return received

    for backend in BACKENDS:
        with pytest.raises(
            MethodError, match=r"^Adding\.start changed its argument client\.seen in place"
        ):
            whole(Adding(), backend)


def test_asking_changes_neither_what_a_method_is_nor_what_it_answers():
    method = FedPAC(lam=0.3)
    same = answers.with_hook_checks(method)
    assert type(same) is FedPAC
    assert same == method
    assert hash(same) == hash(method)
    assert vars(method).keys() == {"lam", *vars(method)} - set(hook_names())
    assert copy.copy(method).aggregate.__func__ is FedPAC.aggregate


def test_later_rounds_ask_the_method_itself_but_for_who_trains(monkeypatch):
    """Turns may be others in every round, and looking at them costs nothing."""

    @dataclass(frozen=True)
    class Plain(FedAvg):
        pass

    asked = []
    original = answers.CheckedHook.__call__
    monkeypatch.setattr(
        answers.CheckedHook,
        "__call__",
        lambda self, *a: asked.append(self.name) or original(self, *a),
    )
    net, method = tiny(), Plain()
    state, runner = (
        make_initial_state(method, net, 3, CPU),
        make_backend(as_engine("loop"), net, CPU),
    )
    for number in range(3):
        asked.clear()
        state, _ = play_round(RoundSetup(runner, method, FEDERATION, SHORT, 0), state, COHORT)
        runner.evaluate(EvalCall(method, FEDERATION, state, COHORT))
        assert number == 0 or asked == ["Plain.turns"]
    assert len(asked) == 1


def test_on_the_command_line_it_is_one_line(tmp_path: Path):
    text = """
        from fedpfl.methods import FedAvg
        class Mine(FedAvg):
            def finish(self, server, client, start, end):
                return end
        METHODS = {"mine": Mine}
    """
    (tmp_path / "mine.py").write_text(text.replace("\n        ", "\n"))
    try:
        result = run_command("plugins=[mine.py]", "method=mine", *TINY, cwd=tmp_path)
    finally:
        plugins.load_plugins([])
    assert result.code == 1
    assert result.complaints == [
        "fedpfl: method=mine: Mine.finish returned a dict; it must return two things: the upload, a"
        " tree, and the client's state, a dict in the form of init's (docs/design.md#a-method)"
    ]
    assert "mine" not in METHODS


def test_looking_at_values_in_a_later_round_is_told_too(tmp_path: Path):
    """Where nothing is looked at any more, by where it failed."""
    (tmp_path / "mine.py").write_text("""
import torch
from fedpfl.methods import FedAvg
PLAYED = [0]
class Mine(FedAvg):
    def init(self, params, parts):
        return params, {"n": torch.zeros(())}
    def turns(self, played, cohort, clients, generator):
        PLAYED[0] = played
        return super().turns(played, cohort, clients, generator)
    def finish(self, server, client, start, end):
        return end, {"n": client["n"] + 1 if PLAYED[0] == 0 or client["n"] > 5 else client["n"]}
METHODS = {"mine": Mine}
""")
    try:
        result = run_command(
            "plugins=[mine.py]", "method=mine", "engine=batched", *TINY, cwd=tmp_path
        )
    finally:
        plugins.load_plugins([])
    assert result.code == 1
    (line,) = result.complaints
    assert line.startswith("fedpfl: method=mine: Mine.finish looks at the values of a tensor (")
    assert line.endswith(f"({tmp_path / 'mine.py'}:12)")


def test_predictions_without_a_gradient_are_told_where_they_are_trained(backend):
    @dataclass(frozen=True)
    class Frozen(FedAvg):
        def loss(self, server, client, net, params, batch):
            return batch.loss(net(params, batch.x))

        def predict(self, net, params, batch):
            return net(params, batch.x).detach()

    with pytest.raises(MethodError, match=r"^Frozen\.predict returned what has no gradient"):
        whole(Frozen(), backend)


LEAVING = """
from fedpfl.methods import FedAvg
PLAYED = [0]
class Leaving(FedAvg):
    def turns(self, played, *given):
        PLAYED[0] = played
        return super().turns(played, *given)
    def {hook}(self, *given):
        if PLAYED[0] == {first}:
            raise {error}(0)
        return super().{hook}(*given)
METHODS = {{"leaving": Leaving}}
"""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("error", ["SystemExit", "StopIteration"])
@pytest.mark.parametrize(
    ("hook", "first"), [("turns", 0), ("start", 1), ("loss", 0), ("loss", 1), ("aggregate", 1)]
)
def test_a_hook_ends_no_program_and_no_loop(hook, first, error, backend, tmp_path):
    """Whatever Python has for that, in the first round and later."""
    (tmp_path / "mine.py").write_text(LEAVING.format(hook=hook, first=first, error=error))
    told = rf"^method=leaving: Leaving\.{hook} raised {error}: 0 \({tmp_path}/mine\.py:10\);"
    try:
        plugins.load_plugins([str(tmp_path / "mine.py")])
        cfg = OmegaConf.create({"method": {"name": "leaving"}})
        with pytest.raises(MethodError, match=told), user_errors(cfg, tmp_path):
            record_rounds(
                METHODS["leaving"](), tiny(), FEDERATION, [COHORT] * 2, engine=backend, local=SHORT
            )
    finally:
        plugins.load_plugins([])
