"""`fedpfl check`: what is documented passes, and each broken promise is told of."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedpfl import check
from fedpfl.config import plugins
from fedpfl.config.choices import list_choices
from fedpfl.testing.trials import PROMISES_BY_KIND
from tests.command import format_override
from tests.conftest import ROOT, keep_quick, read_cases

HEAD = """
import torch
from torch.nn import functional as F
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, Phase
CALLS = []
class Mine(FedAvg):
"""


METHOD_FAULTS = r"""
== counts calls | clients_are_apart runs_repeat | something outlives a hook's call
    def finish(self, server, client, start, end):
        CALLS.append(1)
        return {name: leaf + 1e-3 * len(CALLS) for name, leaf in end.items()}, client
== keeps state on self | is_frozen | `self.last` was set
    def finish(self, server, client, start, end):
        object.__setattr__(self, "last", 1)
        return end, client
== draws at evaluation | draws_from_what_is_given | draws from the generators of the process, of torch
    def personal(self, server, client):
        return {name: leaf + 0.01 * torch.rand(leaf.shape) for name, leaf in server.items()}
== counts evaluations | runs_repeat | evaluated again: 
    def personal(self, server, client):
        CALLS.append(1)
        return {name: leaf + 1e-3 * len(CALLS) for name, leaf in server.items()}
== averages over padding | backends_agree ignores_padding | use batch.mean
    def loss(self, server, client, net, params, batch):
        return batch.losses(net(params, batch.x)).mean()
== predicts by the batch | backends_agree_in_evaluation | evaluated: loss up to 0.
    def predict(self, net, params, batch):
        return net(params, batch.x - batch.x.mean())
== trains with what is not sent | sees_what_was_sent | a step of client
    def init(self, params, parts):
        return {"w": params, "old": params}, {}
    def download(self, server, client):
        return server["w"]
    def loss(self, server, client, net, params, batch):
        return super().loss(server, client, net, params, batch) + server["old"]["fc.bias"].sum()
    def aggregate(self, server, clients, net, uploads, weight, generator):
        new, clients = super().aggregate(server, clients, net, uploads, weight, generator)
        return {"w": new, "old": server["w"]}, clients
== amplifies rounding | bf16_is_near | use engine.precision=fp32
    def personal(self, server, client):
        return {name: torch.sin(500 * leaf) for name, leaf in server.items()}
== mixes weights alone | statistics_are_mixed | before_turn returns mixed.conv.weight, and no statistics
    def init(self, params, parts):
        return params, {"model": params}
    def before_turn(self, server, clients, others, generator):
        first = others([0] * len(clients["number"]))
        return {"mixed": tree.map(lambda a, b: (a + b) / 2, clients["model"], first["model"])}
    def start(self, received, client):
        return client["mixed"]
    def finish(self, server, client, start, end):
        return end, {"model": end}
== asks for values | keeps_form | calls one_hot, which looks at the values of a tensor, but it is asked about many clients at once: write
    def loss(self, server, client, net, params, batch):
        return batch.loss(net(params, batch.x)) + F.one_hot(batch.y, 5).sum()
"""
"""Name | what is broken | what is said of it, and the hooks."""
DATA_HEAD = """
import numpy as np
from fedpfl.data.datasets import Raw
from fedpfl.data.partition import Partition

def made(count=300, classes=3):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 1, 6, 6)).astype(np.uint8), np.arange(count) % classes

def dealt(order, clients):
    parts = np.array_split(order, clients)
    cuts = [len(part) // 4 for part in parts]
    return [[part[cut:] for part, cut in zip(parts, cuts)], [part[:cut] for part, cut in zip(parts, cuts)]]

def split(train, test):
    return Partition(tuple(train), tuple(test))

def shuffled(y, seed):
    return np.random.default_rng(seed).permutation(len(y))

def share(train, clients):
    train[-1] = np.append(train[-1], train[0][: 3 * (clients > 1)])

KEPT, CALLS = made(), []
"""
READER, DEAL = "def mine(source) -> Raw:", "def mine(y, clients, seed):"
READER_FAULTS = r"""
labels out of range | x, y = made(); return Raw(x, y - 1)
has_the_form | number the classes from 0
counts its calls | x, y = made(); CALLS.append(1); x[0] = len(CALLS); return Raw(x, y)
repeats | read again: x differs
tests on what it trains on | x, y = made(); return Raw(np.concatenate([x, x]), np.concatenate([y, y]), test_from=300)
tests_on_other_samples | 300 of 300 test samples are training samples too
a class in the test part alone | x, y = made(); y[y == 2] = 1; y[250:] = 2; return Raw(x, y, test_from=200)
has_all_classes | 1 of 3 classes have none: [2]
"""
DEAL_FAULTS = r"""
tests on what another trains on | train, test = dealt(np.arange(len(y)), clients); return split(train, train[::-1])
has_the_form | is for training and for testing or validation too
out of range | return split(*dealt(np.arange(len(y)) + 1, clients))
has_the_form | client 9 has sample 10000, and the data set has 10000
fails for many | return split(*dealt(shuffled(y, seed), clients)) if clients < 40 else {}[clients]
has_the_form | partitions raised KeyError: 40 (
ignores the seed | return split(*dealt(shuffled(y, 0), clients))
follows_the_seed | 10 clients hold the same for the seeds (0, 1, 2)
deals unseeded | return split(*dealt(shuffled(y, None), clients))
repeats | 10 clients get other samples when they are dealt to again
shares samples | train, test = dealt(shuffled(y, seed), clients); share(train, clients); return split(train, test)
shares_nothing | with 10 clients, samples are dealt 3 times more to another client
"""


@dataclass(frozen=True)
class Fault:
    """A plugin's choice of a kind, which promises it breaks, and what is said of them."""

    kind: str
    plugin: str
    broken: set[str]
    says: str


def read_method_faults() -> dict[str, Fault]:
    found = {}
    for part in METHOD_FAULTS.split("\n== ")[1:]:
        line, _, hooks = part.partition("\n")
        name, broken, says = line.split(" | ")
        plugin = HEAD + hooks.strip("\n") + '\n\nMETHODS = {"mine": Mine}\n'
        found[name] = Fault("method", plugin, {*broken.split()}, says)
    return found


def read_data_faults(kind: str, head: str, text: str) -> dict[str, Fault]:
    """Read two lines a fault: its name and code, then what it breaks and what is said of it."""
    rows, found = iter(read_cases(text, " | ")), {}
    for (name, body), (broken, says) in zip(rows, rows, strict=True):
        plugin = format_plugin(**{f"{kind.upper()}S": (head, body)})
        found[name] = Fault(kind, plugin, {*broken.split()}, says)
    return found


def format_plugin(**functions: tuple[str, str]) -> str:
    """Return a file of functions of a head and a body, by the dictionary that has them."""
    text = DATA_HEAD
    for registry, (head, body) in functions.items():
        name = registry.lower()
        text += f"\n{head.replace('mine', name)}\n    {body}\n{registry} = {{'mine': {name}}}\n"
    return text


FAULTS = {
    **read_method_faults(),
    **read_data_faults("dataset", READER, READER_FAULTS),
    **read_data_faults("partition", DEAL, DEAL_FAULTS),
}


@pytest.fixture(autouse=True)
def forgotten():
    """What files added."""
    yield
    plugins.load_plugins([])


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]):
    """Run the command: exit status, and what it prints."""

    def run(*words: object) -> tuple[int, list[str]]:
        status = check.main([*map(str, words)])
        said = capsys.readouterr()
        return status, (said.out + said.err).splitlines()

    return run


def limit(monkeypatch, kind: str, names: Collection[str] = ()) -> None:
    """Have choices of a kind tried on these promises alone, and on its first."""
    first, *others = PROMISES_BY_KIND[kind]
    promises = [first, *(own for own in others if own.check.__name__ in names)]
    monkeypatch.setitem(PROMISES_BY_KIND, kind, promises)


def words(*names: str, kind: str = "method") -> set[str]:
    return {promise.title for promise in PROMISES_BY_KIND[kind] if promise.check.__name__ in names}


def unkept(lines: list[str]) -> set[str]:
    return {line[8:] for line in lines if line.startswith(("  WRONG ", "  note  "))}


@pytest.mark.full
def test_what_is_documented_keeps_everything(told):
    """In another process too, which is asked once for all."""
    words = ["method.share=0.3", "method.statistics=local", "dataset.count=500", "clients=7"]
    status, lines = told(ROOT / "docs/mine.py", *words)
    assert status == 0, lines
    expected = []
    for choice in ("method=halfway", "model=wide", "dataset=stripes", "partition=equal"):
        promises = PROMISES_BY_KIND[choice.partition("=")[0]]
        expected += [choice, *(f"  ok    {promise.title}" for promise in promises)]
        expected.append("  all is kept")
    assert lines == expected


NOTED = {
    *("follows_the_seed", "shares_nothing", "has_all_classes"),
    *("bf16_is_near", "statistics_are_mixed"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_promise_is_told(name: str, tmp_path: Path, told, monkeypatch):
    fault, file = FAULTS[name], tmp_path / "mine.py"
    limit(monkeypatch, fault.kind, fault.broken)
    file.write_text(fault.plugin)
    status, lines = told(file, "--quick")
    assert lines[0] == f"{fault.kind}=mine"
    assert unkept(lines) == words(*fault.broken, kind=fault.kind), lines
    assert any(fault.says in line for line in lines), lines
    assert status == (0 if fault.broken <= NOTED else 1)
    if status:
        assert lines[-1] == f"  {len(fault.broken - NOTED)} not kept"


def test_every_promise_is_broken_by_a_planted_fault():
    planted: dict[str, set[str]] = {}
    for fault in FAULTS.values():
        planted.setdefault(fault.kind, set()).update(fault.broken)
    for kind, names in planted.items():
        promises = {promise.check.__name__ for promise in PROMISES_BY_KIND[kind]}
        assert names == promises - {"repeats_elsewhere"}


BUILT_IN = {
    **{name: set() for name in list_choices("partition") if name not in ("sites", "hf")},
    "file": {"follows_the_seed", "shares_nothing"},
    "fixed_dirichlet": {"shares_nothing"},
}
"""What is noted of fedpfl's own partitions, but for those that come with a data set of yours."""


@pytest.mark.parametrize("name", keep_quick(BUILT_IN, 2))
def test_every_partition_of_fedpfl_keeps_its_promises(name: str, tmp_path: Path, told):
    values = []
    if name == "file":
        held = [[*range(1000 * client, 1000 * client + 900), 0] for client in range(1, 10)]
        splits = [{"train": samples, "test": [1]} for samples in held]
        (tmp_path / "parts.json").write_text(json.dumps(splits))
        values = ["clients=9", format_override("partition.path", tmp_path / "parts.json")]
    status, lines = told(f"partition={name}", "--quick", *values)
    assert status == 0, lines
    assert unkept(lines) == words(*BUILT_IN[name], kind="partition")


UNKNOWN = "no file, and no method, model, data set or partition; did you mean"
WITHOUT_VALUE = "method=halfway: method.share has no value; set it with method.share=..."
REFUSED = f"""
DOCS/mine.py shere=0.2 => method=halfway: shere is not a key here; did you mean
digit => digit is {UNKNOWN} digits?
broken.py => plugins: HERE/broken.py:1: NameError: name 'c' is not defined
required.py => {WITHOUT_VALUE}
"""
"""What is typed => the one line that answers."""


def test_what_cannot_be_tried_is_one_line(tmp_path: Path, told, monkeypatch):
    monkeypatch.chdir(tmp_path)
    docs = ROOT / "docs"
    (tmp_path / "broken.py").write_text("x = c")
    required = (docs / "mine.py").read_text().replace("] = 0.5", "]")
    (tmp_path / "required.py").write_text(required)
    for words, says in read_cases(REFUSED):
        status, lines = told(*words.replace("DOCS", str(docs)).split())
        assert (status, len(lines)) == (2, 1), words
        assert lines[0].startswith(f"fedpfl: {says.replace('HERE', str(tmp_path))}"), lines
