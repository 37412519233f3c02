"""What devices of some width would take: counted by hand, and as the FedSPU paper's networks give it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import fmean

import pandas as pd
import pytest
import torch
from torch import nn

from fedpfl.methods import METHODS
from fedpfl.models import MODELS, Net
from fedpfl.papers import costs
from fedpfl.report.load import begun
from fedpfl.report.run import Run
from fedpfl.runner.cost import devices
from tests.report.test_report import write_run

# Values that travel of FedSPU's three networks (AAAI 2025, section 4 and public code), at widths 0.2 to 1.
ENTRIES = {
    "fedspu_emnist": (12_418, 25_062, 37_994, 51_214, 64_722),
    "fedspu_cifar10": (5_228, 20_542, 45_942, 81_428, 134_902),
    "fedspu_speech": (3_685, 8_135, 13_385, 19_435, 26_285),
}
DATA = {"fedspu_emnist": ((1, 28, 28), 62), "fedspu_cifar10": ((3, 32, 32), 10), "fedspu_speech": ((1, 32, 32), 35)}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_the_papers_networks(name: str) -> None:
    net = Net(MODELS[name](*DATA[name]))
    rows = devices(METHODS["fedspu"](), net, DATA[name][0])
    assert [row["width"] for row in rows] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert tuple(row["entries"] for row in rows) == ENTRIES[name]


def test_values_and_operations_by_hand() -> None:
    """EMNIST's network: images of 28 and, once pooled, 14 pixels a side; 20 channels, of which 0.2 are 4."""
    net = Net(MODELS["fedspu_emnist"](*DATA["fedspu_emnist"]))
    narrow, *_, whole = devices(METHODS["fedspu"](), net, (1, 28, 28))
    # Each stage makes its values twice, in convolution and normalisation; 62 classes.
    assert whole["values"] == 2 * 20 * 784 + 2 * 20 * 196 + 62
    assert narrow["values"] == 2 * 4 * 784 + 2 * 4 * 196 + 62
    passes = 2 * 784 * (20 * 9 + 20) + 2 * 196 * (20 * 20 * 9 + 20) + 2 * 980 * 62
    assert whole["operations"] == passes
    assert narrow["operations"] == 2 * 784 * (4 * 9 + 4) + 2 * 196 * (4 * 4 * 9 + 4) + 2 * 4 * 49 * 62


def test_strides_paddings_and_hidden_layers_by_hand() -> None:
    speech = devices(METHODS["fjord"](), Net(MODELS["fedspu_speech"](*DATA["fedspu_speech"])), (1, 32, 32))
    assert speech[-1]["values"] == 2 * 50 * 18 * 18 + 2 * 50 * 6 * 6 + 35
    cifar = devices(METHODS["fjord"](), Net(MODELS["fedspu_cifar10"](*DATA["fedspu_cifar10"])), (3, 32, 32))
    # 0.2 of 6, 16, 120 and 84 neurons, rounded down: 1, 3, 24 and 16.
    stages = 2 * 1024 * (1 * 27 + 1) + 2 * 256 * (3 * 9 + 3)
    assert cifar[0]["operations"] == stages + 2 * (3 * 64 * 24 + 24 * 16 + 16 * 10)


def test_looking_up_costs_no_operations() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(30, 4)
            self.classifier = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.classifier(self.embedding(x).mean(-2))

    class Tokens(tuple):
        kind = "token ids"

    half, whole = devices(METHODS["heterofl"](widths=(0.5,)), Net(Words()), Tokens((7,)))
    assert half == {"width": 0.5, "entries": 30 * 2 + 2 * 3 + 3, "values": 7 * 2 + 3, "operations": 2 * 2 * 3}
    assert whole == {"width": 1.0, "entries": 30 * 4 + 4 * 3 + 3, "values": 7 * 4 + 3, "operations": 2 * 4 * 3}


def test_counting_leaves_the_network_alone() -> None:
    net = Net(MODELS["fedspu_emnist"](*DATA["fedspu_emnist"]))
    net.module.train()
    before = {name: value.clone() for name, value in net.module.state_dict().items()}
    devices(METHODS["fedspu"](), net, (1, 28, 28))
    assert net.module.training
    assert not any(module._forward_hooks for module in net.module.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.module.state_dict().items())


@pytest.mark.parametrize("drawn", [1, 2, 3, 5])
def test_the_slowest_of_a_cohort_is_a_mean_over_all_cohorts(drawn: int) -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    wanted = fmean(max(some) for some in itertools.combinations(values, drawn))
    assert costs.expected_maximum(values, drawn) == pytest.approx(wanted, rel=1e-12)


DEVICES = [
    {"width": 0.5, "entries": 100, "values": 30, "operations": 1000},
    {"width": 1.0, "entries": 400, "values": 50, "operations": 5000},
]


def modelled(path: Path, method: str = "fjord", samples: tuple[int, ...] = (10, 20, 10, 20), **changes: object) -> Run:
    """Four clients, two of each width, all of whom a round takes; two local epochs, batches of 8."""
    values = {"name": method, "widths": [0.5, 1.0], "assign": "blocks"} | changes
    local = {"epochs": 2, "batch_size": 8, "lr": 0.01}
    write_run(path, {4: 50.0}, method=values, clients=4, participation=1.0, local=local)
    change(path, participants=[4, 4, 4, 4])
    pd.DataFrame({"client": range(len(samples)), "train": samples, "accuracy": 50.0}).to_csv(
        path / "clients.csv", index=False
    )
    told = json.loads((path / "summary.json").read_text()) | {"devices": DEVICES, "cohort": 4}
    (path / "summary.json").write_text(json.dumps(told))
    return begun(path)


def change(path: Path, **columns: list[float]) -> None:
    pd.read_csv(path / "rounds.csv").assign(**columns).to_csv(path / "rounds.csv", index=False)


SLOW = costs.Device(speed=100.0, bandwidth=10.0)


def test_hours_of_cut_networks_by_hand(tmp_path: Path) -> None:
    run = modelled(tmp_path / "a")
    # The slowest, the last: 2 epochs of 20 samples, thrice 5000 operations; 400 values of 32 bits each way.
    training, transfer = 2 * 20 * 3 * 5000 / 100, 2 * 32 * 400 / 10
    assert costs.hours(run, SLOW, transfers=False) == pytest.approx(4 * training / 3600)
    assert costs.hours(run, SLOW) == pytest.approx(4 * (training + transfer) / 3600)


def test_hours_of_frozen_networks_by_hand(tmp_path: Path) -> None:
    run = modelled(tmp_path / "a", "fedspu", (10, 90, 10, 20))
    # Client 1 is of width 0.5: it passes forward and back through all, and forms half the neurons' gradients.
    assert costs.hours(run, SLOW, transfers=False) == pytest.approx(4 * 2 * 90 * (2 * 5000 + 1000) / 100 / 3600)


def test_hours_while_clients_stop(tmp_path: Path) -> None:
    run = modelled(tmp_path / "a")
    change(tmp_path / "a", participants=[4, 4, 1, 4])
    run = begun(tmp_path / "a")
    each = [2 * samples * 3 * work / 100 for samples, work in ((10, 1000), (20, 1000), (10, 5000), (20, 5000))]
    own = costs.hours(run, SLOW, transfers=False)
    assert own == pytest.approx((3 * max(each) + fmean(each)) / 3600)
    assert costs.hours(run, SLOW, transfers=False, until_few=True) == pytest.approx(2 * max(each) / 3600)


def test_what_a_run_does_not_tell_has_no_hours(tmp_path: Path) -> None:
    assert math.isnan(costs.hours(modelled(tmp_path / "random", assign="random")))
    assert math.isnan(costs.hours(modelled(tmp_path / "ordered", ordered=True)))
    assert math.isnan(costs.hours(modelled(tmp_path / "other", widths=[0.25, 1.0])))
    assert math.isnan(costs.hours(modelled(tmp_path / "few", samples=(10,))))
    run = modelled(tmp_path / "old")
    for devices_ in (None, 3, [], [{"width": 0.5}], [{"width": "a", "entries": []}]):
        run.summary["devices"] = devices_
        assert math.isnan(costs.hours(run))
        assert costs.memory(run).empty


def test_memory_by_hand(tmp_path: Path) -> None:
    """Parameters, gradients, and what layers make of 8 samples, at 4 bytes."""
    found = costs.memory(modelled(tmp_path / "a", "fedspu"))
    full, most, least, cut = (found[name].tolist() for name in found)
    assert full == [4 * (400 + 400 + 8 * 50)] * 2
    assert most == [4 * (400 + 100 + 8 * 50), full[1]]
    assert least == [4 * (400 + 100 + 8 * 30), full[1]]
    assert cut == [4 * (100 + 100 + 8 * 30), full[1]]
