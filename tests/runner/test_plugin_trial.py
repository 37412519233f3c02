"""Code of plugins that would change numbers in silence is refused before the first round."""

from functools import partial

import pytest
import torch

from fedpfl.check import find_subjects
from fedpfl.config import plugins
from fedpfl.engine import Engine, FallbackBackend, make_backend
from fedpfl.testing.elsewhere import OtherProcess
from fedpfl.testing.run_trial import try_plugins
from fedpfl.testing.trials import PROMISES_BY_KIND, make_trial
from tests.command import TINY, format_override, run_command
from tests.conftest import CPU, keep_quick
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
        for leaf in server.values():
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
    y = np.random.default_rng(0).integers(0, 6, 400)
    names = np.array(["cat", "dog", "cow", "hen", "pig", "ram"])
    classes = list(set(names[y]))
    labels = np.array([classes.index(name) for name in names[y]])
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
    names = {"left", "middle", "right", "above", "below", "behind"}

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

ELSEWHERE = "another process has other "
ALONE = "a client trains or answers otherwise beside others"
FAULTS = {
    **dict.fromkeys(("modulelist", "firstmodel"), f"{ELSEWHERE}evaluation.1"),
    "betweenhooks": f"{ELSEWHERE}evaluation.",  # threads decide in which round
    **dict.fromkeys(("attribute", "drawnatimport"), f"{ELSEWHERE}evaluation.1"),
    "dictfield": f"{ELSEWHERE}evaluation.0",
    "inplace": "InPlace changed its argument server.",
    **dict.fromkeys(("plainmean", "mixup", "centred"), ALONE),
    **dict.fromkeys(("setorder", "firstbatch", "importnoise"), f"{ELSEWHERE}values."),
    "noise": f"{ELSEWHERE}x",
    "named": f"{ELSEWHERE}y",
    **dict.fromkeys(("unseeded", "hashed"), f"{ELSEWHERE}split"),
}
"""By choice, the fault that is found in it; the file's other choices are right."""


@pytest.fixture
def plugin(tmp_path):
    """The word that names the file; its choices are forgotten afterwards."""
    (tmp_path / "mine.py").write_text(PLUGIN)
    yield format_override("plugins", [tmp_path / "mine.py"])
    plugins.load_plugins([])


def test_each_planted_fault_is_found_by_promises_of_runs_and_nothing_else(plugin, tmp_path):
    """One other process answers for all of them, in whatever order."""
    subjects = find_subjects(str(tmp_path / "mine.py"), ["clients=4", "shape=[1,8,8]"])
    other = OtherProcess([tmp_path / "mine.py"])
    trials = [make_trial(subject) for subject in subjects]
    found = {}
    for subject, trial in zip(subjects, trials, strict=True):
        other.attach(trial, subject)
    for subject, trial in zip(subjects, trials, strict=True):
        for promise in PROMISES_BY_KIND[subject.kind]:
            if promise.for_runs or promise.slow:
                try:
                    promise.check(trial)
                except Exception as error:
                    found.setdefault(subject.name, str(error))
    assert found.keys() == FAULTS.keys()
    assert all(FAULTS[name] in fault for name, fault in found.items()), found


REFUSED = [
    ("method=plainmean engine=batched", f"method=plainmean: {ALONE}"),
    ("dataset=noise partition=hashed", f"dataset=noise partition=hashed: {ELSEWHERE}samples; "),
]


@pytest.mark.parametrize(("words", "message"), keep_quick(REFUSED))
def test_a_run_refuses_wrong_plugins_in_one_line(words, message, plugin, tmp_path):
    result = run_command(plugin, *TINY, *words.split(), cwd=tmp_path)
    assert result.code == 2, result.err
    (line,) = result.complaints
    assert line.startswith(f"fedpfl: {message}")


def test_a_backend_that_chooses_takes_loop(plugin, tmp_path):
    plugins.load_plugins([tmp_path / "mine.py"])
    run = build(plugin, "method=plainmean", *TINY)
    backend = FallbackBackend(Engine("batched"), partial(make_backend, net=run.net, on=CPU))
    random_state = torch.get_rng_state()
    try_plugins(run, backend)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert backend.name == "loop"
