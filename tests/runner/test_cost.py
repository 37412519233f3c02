"""What sub-models of each width come to, by hand and as the FedSPU paper's networks give it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedpfl.methods import METHODS
from fedpfl.models import MODELS, Net
from fedpfl.papers.fedspu.tables import memory_by_width
from fedpfl.report.load import read_started_run
from fedpfl.report.run import Run
from fedpfl.runner.cost import count_submodel_costs
from tests.report.test_report import write_run

# Values that travel of FedSPU's three networks (AAAI 2025, section 4 and public code), at widths
# 0.2 to 1.
ENTRIES = {
    "fedspu_emnist": (12_418, 25_062, 37_994, 51_214, 64_722),
    "fedspu_cifar10": (5_228, 20_542, 45_942, 81_428, 134_902),
    "fedspu_speech": (3_685, 8_135, 13_385, 19_435, 26_285),
}
DATA = {
    "fedspu_emnist": ((1, 28, 28), 62),
    "fedspu_cifar10": ((3, 32, 32), 10),
    "fedspu_speech": ((1, 32, 32), 35),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_the_papers_networks(name: str) -> None:
    net = Net(MODELS[name](*DATA[name]))
    rows = count_submodel_costs(METHODS["fedspu"](), net, DATA[name][0])
    assert [row["width"] for row in rows] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert tuple(row["entries"] for row in rows) == ENTRIES[name]


def test_values_by_hand() -> None:
    """Of EMNIST's network: images of 28, then 14 pixels a side; 20 channels, 0.2 are 4."""
    net = Net(MODELS["fedspu_emnist"](*DATA["fedspu_emnist"]))
    narrow, *_, whole = count_submodel_costs(METHODS["fedspu"](), net, (1, 28, 28))
    # Each stage makes its values twice, in convolution and normalisation; 62 classes.
    assert whole["values"] == 2 * 20 * 784 + 2 * 20 * 196 + 62
    assert narrow["values"] == 2 * 4 * 784 + 2 * 4 * 196 + 62


DEVICES = [
    {"width": 0.5, "entries": 100, "values": 30},
    {"width": 1.0, "entries": 400, "values": 50},
]


def modelled(path: Path) -> Run:
    """A run of FedSPU's in batches of 8 that tells what its widths come to."""
    write_run(
        path, {4: 50.0}, method={"name": "fedspu"}, local={"epochs": 2, "batch_size": 8, "lr": 0.01}
    )
    told = json.loads((path / "summary.json").read_text()) | {"devices": DEVICES}
    (path / "summary.json").write_text(json.dumps(told))
    return read_started_run(path)


def test_memory_by_hand(tmp_path: Path) -> None:
    """Parameters, gradients, and what layers make of 8 samples, at 4 bytes."""
    found = memory_by_width(modelled(tmp_path / "a"))
    full, most, least, cut = (found[name].tolist() for name in found)
    assert full == [4 * (400 + 400 + 8 * 50)] * 2
    assert most == [4 * (400 + 100 + 8 * 50), full[1]]
    assert least == [4 * (400 + 100 + 8 * 30), full[1]]
    assert cut == [4 * (100 + 100 + 8 * 30), full[1]]
