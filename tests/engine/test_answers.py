"""What hooks may not answer is told in the first round, in one line with the hook's name:
fedpfl/engine/training/hook_rules.py.
"""

import copy
import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from fedpfl.config import plugins
from fedpfl.engine import FineTuning, compare_masks, count_participants, make_initial_state
from fedpfl.engine.keys import Draws
from fedpfl.engine.training import hook_checks, hook_rules
from fedpfl.ground import tree
from fedpfl.ground.errors import MethodError
from fedpfl.methods import METHODS, FedAvg, FedPAC, Phase, Turn
from fedpfl.methods.shared.method import hook_names
from fedpfl.runner.faults import user_errors
from tests.command import TINY, run_command
from tests.conftest import (
    BACKENDS,
    CPU,
    LOCAL,
    evaluate,
    keep_quick,
    make_federation,
    next_round,
    record_rounds,
    tiny,
)

pytestmark = pytest.mark.usefixtures("forgotten_plugins")
COHORT = [0, 1, 2]
FEDERATION = make_federation((20, 7, 12), (5, 3, 1))
SHORT = replace(LOCAL, epochs=1)


@pytest.fixture
def forgotten_plugins():
    yield
    plugins.load_plugins([])


def play_everything(method, backend):
    """A round and evaluations: every hook is asked."""
    net = tiny()
    count_participants(method, 0, 3, 1.0, 1)
    state = make_initial_state(method, net, 3, CPU)
    state, _ = next_round(method, net, FEDERATION, state, COHORT, engine=backend, local=SHORT)
    compare_masks(method, state)
    for tuning in (None, FineTuning(SHORT, Draws(0, "finetune", 1))):
        evaluate(method, net, FEDERATION, state, backend, tuning=tuning)


def circle():
    tree = {}
    tree["tree"] = tree
    return tree


def survey(server, clients, uploads):
    return server, clients


def swapped_survey(server, uploads, clients):
    return server, clients


def swapped_step(net, params, batch, server, client):
    return params, 0


def head(params):
    return {"fc.bias": params["fc.bias"]}


WRONG_ANSWERS = """
init | params | Wrong.init returned a dict; it must return two things: the server's tree
init | (params, None) | returned None (is a `return` missing?)
init | (params, {'a': {'b': 1.0}}) | returned a float as entry a.b
init | (params, {'participated': torch.tensor(False)}) | returned a client state with 'participated', which
init | (params, {0: torch.zeros(())}) | returned an entry named 0, which is no string
init_clients | {'rate': torch.ones(clients)} | rate, which init's client state does not have
init_clients | torch.ones(clients) | returned a tensor torch.float32 [3]
buffers | {'main': 'server'} | returned 'server'; it must return a dict of 'aggregate' or 'local'
turns | [cohort] | returned a list with a list of 3 in it
turns | Turn(cohort) | returned a Turn; it must return a list of Turn
turns | [Turn([7])] | returned client 7 of 3
turns | [] | returned no turn in which clients train
turns | [Turn(cohort, survey=survey)] | no turn in which clients t
turns | [Turn([])] | returned a turn without clients
turns | [Turn(cohort, trains=False)] | nobody trains, and no survey
turns | [Turn([2, 0, 2])] | returned client 2 twice
turns | [Turn([1]), Turn([1])] | returned client 1 twice
turns | [Turn([0, 0], survey=survey), Turn([1])] | returned client 0 twice
turns | [Turn([0], survey=swapped_survey)] | survey takes (server, uploads, clients) where the contract has (server, clients, uploads)
before_turn | read_states([0])['number'] | returned a tensor torch.int64 [1]
before_turn | {'w': torch.ones(2)} | w as a tensor [2] for 3 clients
sample | torch.rand(2) | returned a tensor torch.float32 [2]
before_training | {'n': 3} | returned a int as entry n
prepare | None | returned None (is a `return` missing?)
download | list(server) | returned a list of 6; it must return a tree of tensors
start | (received, client) | returned a tuple of 2; it must return a tree of tensors
start | head(received) | returned a model without the network's conv.weight
start | {**received, **circle()} | returned a tree that contains itself
phases | Phase(epochs) | returned a Phase; it must return a list of Phase
phases | [epochs] | returned a list with a int in it
phases | [Phase(-1)] | returned a phase of -1 epochs
phases | [Phase(0.5)] | returned a phase of 0.5 epochs
phases | [Phase(1, batches=0)] | returned a phase of 0 batches
phases | [Phase(1, {'fc.bias': True})] | mask lacks the entry conv.weight
phases | [Phase(1, params)] | whose mask has a tensor torch.float32
phases | [Phase(1, {n: torch.ones(2) > 0 for n in params})] | whose mask has shape [2] for conv.weight, which is [4, 1, 3, 3]
phases | [Phase(1, sgd={'rate': 1.0})] | with sgd value rate, which
phases | [Phase(1, step=swapped_step)] | step takes (net, params, batch, server, client) where the contract has (server, client, net
loss | batch.losses(net(params, batch.x)) | float32 [20]; it must
loss | (batch.loss(net(params, batch.x)), {'n': 3}) | returned a int as entry n; it must return the loss, a 0-dimensional tensor
loss | (FedAvg.loss(self, server, client, net, params, batch).detach(), {}) | returned what has no gradient
after_training | None | returned None
updated_buffers | {'head': {}} | statistics of head, which `buffers` does not name
updated_buffers | {'main': {'mean': torch.ones(1)}} | returned main.mean, which is not bool
finish | params | returned a dict; it must return two things: the upload
finish | (params, client, start) | returned a tuple of 3
aggregate | tree.mean(uploads, weight) | returned a dict; it must return two
aggregate | (uploads, clients) | another form than init's, classifier.bias was torch.float32 [5] and is torch.float32 [3, 5]
aggregate | (server, {'n': weight.sum()}) | the clients' n as a tensor []
evaluated | None | returned None
before_evaluation | shard | returned a Shard
personal | head(server) | returned a model without the network's conv.weight
predict | net(params, batch.x).argmax(1) | torch.int64 [5] for 5 samples of 5 classes
predict | net(params, batch.x)[:, :4] | torch.float32 [5, 4] for 5 samples of 5 classes
finetuning | Phase(epochs) | returned a Phase; it must return a list
metrics | {'bias': server['fc.bias']} | returned a tensor torch.float32 [12] as bias
metrics | {'one': 1.0} | returned a float as entry one
masks | server | returned a tensor torch.float32 [4, 1, 3, 3] as a mask
"""
"""Hook | what it returns, given the arguments of the contract | what is said of it."""


WRONG_PHASES = """
loss | list(own_pair(batch, net, params)) | a list of 2; it must return the loss
loss | (*own_pair(batch, net, params), None) | a tuple of 3; it must return the loss
loss | (own_pair(batch, net, params)[0], {"n": torch.zeros(3)}) | beside the loss a tensor torch.float32 [3] as n for
loss | own_pair(batch, net, params)[0].detach() | what has no gradient
step | params | a dict; it must return two things: the new tree
step | (head(params), None) | classifier.bias was
after_gradient | None | None
"""
"""The function of a phase | what it returns | what is said of it."""


def own_pair(batch, net, params):
    return batch.loss(net(params, batch.x)), batch.y


def read_cases(table):
    """Return a case a line and engine; `make test` asks each on one of the engines."""
    cases = []
    for number, line in enumerate(table.strip().splitlines()):
        for place, backend in enumerate(BACKENDS):
            marks = [pytest.mark.full] if (number + place) % 2 else []
            cases.append(pytest.param(*line.split(" | "), backend, marks=marks))
    return cases


def make_function(arguments, expression):
    return eval(
        f"lambda {', '.join(arguments)}: {expression}", {**globals(), "Turn": Turn, "tree": tree}
    )


def make_wrong(**functions):
    return dataclass(frozen=True)(type("Wrong", (FedAvg,), functions))()


def test_every_hook_has_a_rule_and_a_wrong_answer():
    hooks = {line.partition(" | ")[0] for line in WRONG_ANSWERS.strip().splitlines()}
    assert set(hook_names()) == set(hook_rules.HOOK_RULES) == hooks


@pytest.mark.parametrize(("hook", "expression", "told", "backend"), read_cases(WRONG_ANSWERS))
def test_a_wrong_answer_is_told_with_the_hook(hook, expression, told, backend):
    function = make_function(inspect.signature(getattr(FedAvg, hook)).parameters, expression)
    with pytest.raises(MethodError, match=rf"^Wrong\.{hook} returned ") as error:
        play_everything(make_wrong(**{hook: function}), backend)
    assert told in str(error.value).replace("[32]", "[20]")  # the batched backend pads
    assert "it must return" in str(error.value)


@pytest.mark.parametrize(("role", "expression", "told", "backend"), read_cases(WRONG_PHASES))
def test_what_a_phases_functions_answer_is_looked_at_too(role, expression, told, backend):
    arguments = ["self", "server", "client", "net", "params", "batch"]
    if role == "after_gradient":
        arguments = ["self", "*given"]
    wrong = make_wrong(
        _own=make_function(arguments, expression),
        phases=lambda self, server, client, params, epochs: [Phase(epochs, **{role: self._own})],
    )
    with pytest.raises(MethodError, match=r"^Wrong\.\S+ (\(Phase\.\w+\) )?returned ") as error:
        play_everything(wrong, backend)
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
    play_everything(Branching(by), "loop")
    with pytest.raises(
        MethodError,
        match=r"^Branching\.finish looks at the values of a tensor .* torch\.where, .*py:\d+\)$",
    ):
        play_everything(Branching(by), "batched")


CHANGES = """
start | client.update(seen=torch.ones(())) or received | client.seen
start | received["fc.bias"].add_(1) is None or received | received.fc.bias
personal | server["fc.bias"].zero_() is None or server | server.fc.bias
"""
"""Hook | what it changes | the argument that is told."""


@pytest.mark.parametrize(("hook", "expression", "argument", "backend"), read_cases(CHANGES))
def test_an_argument_that_is_changed_is_told_with_the_hook(hook, expression, argument, backend):
    function = make_function(inspect.signature(getattr(FedAvg, hook)).parameters, expression)
    told = rf"^Wrong\.{hook} changed its argument {argument} in place"
    with pytest.raises(MethodError, match=told):
        play_everything(make_wrong(**{hook: function}), backend)


def test_asking_changes_neither_what_a_method_is_nor_what_it_answers():
    method = FedPAC(lam=0.3)
    same = hook_checks.with_hook_checks(method)
    assert type(same) is FedPAC
    assert same == method
    assert hash(same) == hash(method)
    assert vars(method).keys() == {"lam", *vars(method)} - set(hook_names())
    assert copy.copy(method).aggregate.__func__ is FedPAC.aggregate


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
    result = run_command("plugins=[mine.py]", "method=mine", "engine=batched", *TINY, cwd=tmp_path)
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
        play_everything(Frozen(), backend)


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


@pytest.mark.parametrize(
    ("hook", "first", "error"),
    [
        *(("turns", 0, "SystemExit"), ("start", 1, "StopIteration"), ("loss", 0, "StopIteration")),
        *(("loss", 1, "SystemExit"), ("aggregate", 1, "StopIteration")),
    ],
)
@pytest.mark.parametrize("backend", keep_quick(BACKENDS))
def test_a_hook_ends_no_program_and_no_loop(hook, first, error, tmp_path, backend):
    """Whatever Python has for that, in the first round and later."""
    (tmp_path / "mine.py").write_text(LEAVING.format(hook=hook, first=first, error=error))
    told = rf"^method=leaving: Leaving\.{hook} raised {error}: 0 \({tmp_path}/mine\.py:10\);"
    plugins.load_plugins([str(tmp_path / "mine.py")])
    cfg, values = (
        OmegaConf.create({"method": {"name": "leaving"}}),
        {"engine": backend, "local": SHORT},
    )
    with pytest.raises(MethodError, match=told), user_errors(cfg, tmp_path):
        record_rounds(METHODS["leaving"](), tiny(), FEDERATION, [COHORT] * 2, **values)
