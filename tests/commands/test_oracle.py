"""`fedpfl oracle`: a right port equals the class it is of; a planted fault is found at its hook.

The checkout is made here, in the form of PFLlib's modules.
"""

import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedpfl import oracle
from fedpfl.testing import require_equal_to_class
from fedpfl.testing.promises import Unkept
from tests.command import Result, call_main
from tests.conftest import keep_quick, read_cases

CHECKOUT = {
    "main.py": """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-algo", "--algorithm", type=str, default="FedAvg")
parser.add_argument("-mu", "--mu", type=float, default=0.0)
""",
    "utils/data_utils.py": """
def read_client_data(dataset, client, is_train=True, few_shot=0):
    raise FileNotFoundError("the port has its own samples")
""",
    "flcore/trainmodel/models.py": """
from torch import nn
class BaseHeadSplit(nn.Module):
    def forward(self, x):
        return self.head(self.base(x))
""",
    "flcore/clients/clientbase.py": """
import copy
import h5py, torch
from torch.utils.data import DataLoader
from utils.data_utils import read_client_data
class Client:
    def __init__(self, args, id, samples):
        self.args, self.id, self.samples = args, id, samples
        self.model = copy.deepcopy(args.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.local_learning_rate)
    def train(self):
        data = read_client_data("", self.id)
        start = [p.detach().clone() for p in self.model.parameters()]
        for _ in range(self.args.local_epochs):
            for x, y in DataLoader(data, self.args.batch_size, drop_last=True, shuffle=True):
                self.optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.model(x), y)
                for parameter, received in zip(self.model.parameters(), start):
                    loss = loss + self.args.mu / 2 * (parameter - received).square().sum()
                loss.backward()
                self.optimizer.step()
""",
    "flcore/servers/serverx.py": """
import copy, random
from flcore.clients.clientbase import Client
from utils.data_utils import read_client_data
class FedX(object):
    def __init__(self, args, times):
        self.args, self.global_model = args, copy.deepcopy(args.model)
        sizes = [len(read_client_data("", k)) for k in range(args.num_clients)]
        self.clients = [Client(args, k, size) for k, size in enumerate(sizes)]
    def select_clients(self):
        return random.sample(self.clients, 2)
    def train(self):
        for _ in range(self.args.global_rounds + 1):
            chosen = self.select_clients()
            for client in self.clients:
                for old, new in zip(client.model.parameters(), self.global_model.parameters()):
                    old.data = new.data.clone()
            self.evaluate()
            for client in chosen:
                client.train()
            total = sum(client.samples for client in chosen)
            models = [client.model.parameters() for client in chosen]
            for parameter, *uploads in zip(self.global_model.parameters(), *models):
                shares = [client.samples / total for client in chosen]
                parameter.data = sum(s * upload.data for s, upload in zip(shares, uploads))
        self.save_results()
""",
}
PORT = """
import torch
from fedpfl.ground import tree
from fedpfl.methods import Method, Phase

def scale(entries):
    return tree.map(lambda entry: 1.01 * entry, entries)

class Port(Method):
    mu = 0.5
    def loss(self, server, client, net, params, batch):
        loss = super().loss(server, client, net, params, batch)
        return loss + self.mu / 2 * tree.squared_distance(params, server)
    {fault}

METHODS = {{"port": Port}}
"""


def ask(arguments: list[str]) -> Result:
    return call_main(lambda: oracle.main(arguments))


@pytest.fixture(autouse=True)
def without_slow_imports(monkeypatch):
    """Which nothing here has a use for; torch's optimizers ask dynamo to leave them alone."""
    monkeypatch.setattr(oracle, "load_torchvision", lambda: None)
    dynamo = SimpleNamespace(disable=lambda one, *_, **__: one, graph_break=lambda: None)
    monkeypatch.setitem(sys.modules, "torch._dynamo", dynamo)
    monkeypatch.setattr(torch, "_dynamo", dynamo, raising=False)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("PFLlib")
    for name, text in CHECKOUT.items():
        path = folder / "system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def compare(folder: Path, checkout: Path, fault: str, *words: str) -> Result:
    (folder / "mine.py").write_text(PORT.format(fault=fault))
    arguments = [str(folder / "mine.py"), "--against", f"{checkout}:FedX", "--theirs", "mu=0.5"]
    # A fork, as a driver changes what it imports.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(ask, ([*arguments, "rounds=2", *words],))


FAULTS = """
mu = 0.5 => 0 => equal to
mu = 5.0 => 1 => round 1, client 0, loss of step 2:
def start(self, received, client): return scale(received) => 1 => round 1, client 0, download or start:
def finish(self, server, client, start, params): return scale(params), client => 1 => round 2, client 0, finish or aggregate
def aggregate(self, *all): server, kept = super().aggregate(*all); return scale(server), kept => 1 => round 2, client 0, finish or aggregate
def phases(self, *rest): return [Phase(2)] => 1 => round 1, client 0, phases (
"""
"""What is in the port => exit status => what is said."""


@pytest.mark.parametrize(("fault", "status", "text"), keep_quick(read_cases(FAULTS), 3))
def test_a_fault_of_a_port_is_found_at_its_hook(tmp_path, checkout, fault, status, text):
    result = compare(tmp_path, checkout, fault)
    assert text in result.out, result
    assert result.code == int(status)


def test_another_class_is_refused_in_one_line(tmp_path, checkout):
    result = compare(tmp_path, checkout, "pass", f"--against={checkout}:FedY")
    assert (result.code, len(result.complaints)) == (2, 1)
    assert "has a class FedY" in result.err


@pytest.mark.full
def test_pytest_can_ask():
    """It asks another process, which ends at the first word that is wrong."""
    with pytest.raises(Unkept, match="nothing is no file, and no method"):
        require_equal_to_class("nothing", "PFLlib:FedX")
