"""Code of plugins that would change numbers in silence is refused before the first round."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from fedpfl.config import plugins
from fedpfl.config.twins import import_twin
from fedpfl.engine import FallbackBackend, make_backend, make_initial_state
from fedpfl.runner.method_trial import try_plugin_method
from tests.command import TINY, format_override, run_command
from tests.conftest import CPU, read_cases
from tests.data.promises import build

PLUGIN = """
import functools
import random
from dataclasses import dataclass, field
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from fedpfl.data.datasets import Raw
from fedpfl.data.partition import Partition
from fedpfl.ground import tree
from fedpfl.methods import METHODS as HOUSE_METHODS
from fedpfl.methods import FedAvg

HISTORY, CALLS, FIRST = [], [], {}
ENTROPY = np.random.default_rng()

class ModuleList(FedAvg):
    def aggregate(self, server, clients, net, uploads, weight, generator):
        HISTORY.append(tree.mean(uploads, weight))
        return tree.map(lambda *leaves: sum(leaves), *HISTORY), clients

class Attribute(FedAvg):
    def finish(self, server, client, start, params):
        count = getattr(self, "_count", 0)
        object.__setattr__(self, "_count", count + 1)
        return tree.map(lambda leaf: leaf * 0.9**count, params), client

@dataclass(frozen=True)
class DictField(FedAvg):
    memory: dict = field(default_factory=dict)
    def finish(self, server, client, start, params):
        self.memory["last"] = params
        return params, client
    def personal(self, server, client):
        return self.memory.get("last", server)

class BetweenHooks(FedAvg):
    def start(self, received, client):
        CALLS[:] = [tree.map(lambda leaf: leaf + 0.01 * client["number"], received)]
        return CALLS[0]
    def finish(self, server, client, start, params):
        return tree.map(lambda new, old: 2 * new - old, params, CALLS[0]), client

class FirstModel(FedAvg):
    def finish(self, server, client, start, params):
        anchor = FIRST.setdefault("model", start)
        return tree.map(lambda new, old: 0.9 * new + 0.1 * old, params, anchor), client

class DrawnAtImport(FedAvg):
    factor = ENTROPY.normal()
    def finish(self, server, client, start, params):
        return tree.map(lambda leaf: leaf * self.factor, params), client

class SeededAtImport(FedAvg):
    factor = np.random.normal() + random.random() + float(torch.rand(1))
    finish = DrawnAtImport.finish

class InPlace(FedAvg):
    def finish(self, server, client, start, params):
        for leaf in params.values():
            leaf.mul_(0.99)
        return params, client

class PlainMean(FedAvg):
    def loss(self, server, client, net, params, batch):
        return F.cross_entropy(net(params, batch.x), batch.y)

class Mixup(FedAvg):
    def loss(self, server, client, net, params, batch):
        order = torch.randperm(len(batch.x))
        return batch.loss(net(params, 0.7 * batch.x + 0.3 * batch.x[order]))

class Centred(FedAvg):
    def predict(self, net, params, batch):
        logits = net(params, batch.x)
        return logits if batch.y is not None else logits - logits.mean(0)

class Right(FedAvg):
    # draws of the process are seeded, and a memory of what is always the same is none
    @functools.lru_cache
    def _scale(self, count):
        return 1 / count
    def finish(self, server, client, start, params):
        scale = self._scale(1000) * torch.randn(())
        return tree.map(lambda leaf: leaf + scale, params), client

class Personal(HOUSE_METHODS['fedper']):
    pass

def unseeded(y, clients, seed, samples_per_client=0):
    parts = np.array_split(np.random.default_rng().permutation(len(y)), clients)
    return Partition(train=tuple(part[3:] for part in parts), test=tuple(p[:3] for p in parts))

def noise(source):
    numbers = np.random.default_rng()
    return Raw(numbers.normal(size=(400, 4)).astype("float32"), numbers.integers(0, 3, 400))

def seeded_noise(source):
    return Raw(np.random.rand(400, 4).astype("float32"), np.arange(400) % 3)

def named(source):
    y = np.random.default_rng(0).integers(0, 3, 400)
    classes = list(set(np.array(["cat", "dog", "cow"])[y]))
    labels = np.array([classes.index(name) for name in np.array(["cat", "dog", "cow"])[y]])
    return Raw(np.random.rand(400, 4).astype("float32"), labels)

def hashed(y, clients, seed, samples_per_client=0):
    names = [f"sample {index}" for index in range(len(y))]
    order = np.argsort([hash(name) for name in names], kind="stable")
    parts = np.array_split(order, clients)
    return Partition(train=tuple(part[3:] for part in parts), test=tuple(p[:3] for p in parts))

class Branches(nn.Module):
    # numbers hash alike everywhere, and to look into a set is no matter of its order
    names = {1, 2, 3}
    kinds = {"even", "odd"}
    def __init__(self, shape, classes, hidden: list[int] = (8,)):
        super().__init__()
        assert "even" in self.kinds and isinstance(vars(self).keys() - {1}, set)
        size = int(np.prod(shape))
        self.branches = nn.ModuleDict({f"{n}": nn.Linear(size, 8) for n in self.names})
        self.classifier = nn.Linear(8, classes)
    def shift(self, x):
        return x
    def forward(self, x):
        x = self.shift(x.flatten(1))
        return self.classifier(torch.relu(sum(branch(x) for branch in self.branches.values())))

class SetOrder(Branches):
    names = {"left", "middle", "right"}

class FirstBatch(Branches):
    def shift(self, x):
        return x - FIRST.setdefault("mean", x.mean().detach())

class ImportNoise(Branches):
    noise = ENTROPY.normal()
    def shift(self, x):
        return x + self.noise

MODELS = {c.__name__.lower(): c for c in (Branches, SetOrder, FirstBatch, ImportNoise)}
METHODS = {c.__name__.lower(): c for c in FedAvg.__subclasses__() if c.__module__ == __name__}
METHODS["personal"] = Personal
DATASETS = {"noise": noise, "seeded_noise": seeded_noise, "named": named}
PARTITIONS = {"unseeded": unseeded, "hashed": hashed}
"""
RESUMED = "a run that is resumed after its first round would have another"
PADDED = "a client trains or answers otherwise where shorter minibatches are padded; use batch.loss"
IMPORTED = "it is another network where its file is imported anew"
REFUSED = f"""
method=modulelist => method=modulelist: {RESUMED} evaluation.after; something outlives
method=attribute engine=batched => method=attribute: {RESUMED} evaluation.after
method=dictfield => method=dictfield: {RESUMED} evaluation.before
method=betweenhooks engine.workers=1 => method=betweenhooks: clients side by side give other uploads.
method=firstmodel => method=firstmodel: {RESUMED} evaluation.after
method=drawnatimport => method=drawnatimport: {RESUMED} evaluation.after
method=inplace engine=batched => method=inplace: InPlace.finish changed its argument params.
method=plainmean engine=batched => method=plainmean: engine=batched: {PADDED}
method=mixup engine=batched => method=mixup: engine=batched: {PADDED}
method=centred engine=batched => method=centred: engine=batched: {PADDED}
partition=unseeded => partition=unseeded deals otherwise when it is asked again; draw from np.random
partition=hashed => partition=hashed deals otherwise when it is asked again; draw from np.random
dataset=noise => dataset=noise gives other samples when it is read again; give its generators a fixed
dataset=named => dataset=named gives other samples when it is read again; give its generators a fixed
model=setorder => model=setorder: {IMPORTED}
model=firstbatch => model=firstbatch: {IMPORTED}
model=importnoise => model=importnoise: {IMPORTED}
"""


@pytest.fixture
def plugin(tmp_path):
    """The word that names the file; its choices are forgotten afterwards."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    yield format_override("plugins", [tmp_path / "mine.py"])
    plugins.load_plugins([])


@pytest.mark.parametrize(("words", "message"), read_cases(REFUSED))
def test_what_would_be_wrong_in_silence_is_refused(words, message, plugin, tmp_path):
    (line,) = run_command(plugin, *TINY, *words.split(), cwd=tmp_path).complaints
    assert line.startswith(f"fedpfl: {message}")


@pytest.mark.parametrize(
    "words",
    [
        "method=right engine=batched",
        "method=plainmean",
        "method=seededatimport",
        "method=personal",
        "dataset=seeded_noise",
        "model=branches",
    ],
)
def test_what_is_right_runs(words, plugin, tmp_path):
    result = run_command(plugin, *TINY, *words.split(), cwd=tmp_path)
    assert result.code == 0, result.err


@pytest.mark.parametrize(("method", "name"), [("plainmean", "loop"), ("right", "batched")])
def test_a_backend_that_chooses_is_left_loop_alone(method, name, plugin, tmp_path):
    plugins.load_plugins([tmp_path / "mine.py"])
    run = build(plugin, f"method={method}", *TINY)
    make = partial(make_backend, net=run.net, on=CPU)
    backend = FallbackBackend(replace(run.engine, backend="batched"), make)
    random_state = torch.get_rng_state()
    state = make_initial_state(run.method, run.net, run.federation.clients, run.device)
    try_plugin_method(run, backend, state)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert backend.engine.backend == name


BESIDE = """
import enum, pathlib
Colour = enum.Enum("Colour", "red blue")
VARYING = [{"cat", "dog"}, {("a", 1), ("b", 2)}, {*Colour}, {int, str}]
VARYING += [{pathlib.Path("a"), pathlib.Path("b")}]
NAMES = [[str(member)[:7] for member in members] for members in [*VARYING, {1, 2.5, (3, 4)}]]
CALLS = []
"""


def test_modules_beside_a_plugin_are_imported_anew_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "mine.py").write_text(
        "import beside\nclass Mine:\n    def __init__(self, shape, classes): pass\n"
        "    names, calls = beside.NAMES, beside.CALLS\nMODELS = {'mine': Mine}\n"
    )
    plugins.load_plugins([tmp_path / "mine.py"])
    before = sys.modules["beside"]
    before.CALLS.append(1)
    twin = import_twin("MODELS", "mine")
    assert twin.names == [names[::-1] for names in before.NAMES[:-1]] + before.NAMES[-1:]
    assert twin.calls == []
    assert sys.modules["beside"] is before
    del sys.modules["beside"]
    import_twin("MODELS", "mine")
    assert "beside" not in sys.modules
    plugins.load_plugins([])


ONCE = """
import torch
from fedpfl.methods import FedAvg

torch.library.define("mine::twice", "(Tensor x) -> Tensor")

class Mine(FedAvg):
    pass

METHODS = {"mine": Mine}
"""


def test_a_file_that_can_be_imported_once_is_taken_as_it_is(tmp_path):
    (tmp_path / "once.py").write_text(ONCE)
    word = format_override("plugins", [tmp_path / "once.py"])
    result = run_command(word, *TINY, "method=mine", cwd=tmp_path)
    plugins.load_plugins([])
    assert result.code == 0, result.err
