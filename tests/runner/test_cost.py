"""What sub-models of each width come to, by hand and as the FedSPU paper's networks give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpfl.methods import METHODS
from fedpfl.models import MODELS, Net
from fedpfl.papers.fedspu.tables import memory_by_width
from fedpfl.report.load import read_started_run
from fedpfl.runner.cost import count_submodel_costs
from tests.report.test_report import amend, write_run

PAPERS = {
    "fedspu_emnist": ((1, 28, 28), 62, (12_418, 25_062, 37_994, 51_214, 64_722)),
    "fedspu_cifar10": ((3, 32, 32), 10, (5_228, 20_542, 45_942, 81_428, 134_902)),
    "fedspu_speech": ((1, 32, 32), 35, (3_685, 8_135, 13_385, 19_435, 26_285)),
}
"""Shape, classes, and values that travel of FedSPU's three networks (AAAI 2025, section 4 and public
code), at widths 0.2 to 1.
"""


@pytest.mark.parametrize("name", PAPERS)
def test_entries_of_the_papers_networks_and_values_by_hand(name: str) -> None:
    shape, classes, entries = PAPERS[name]
    rows = count_submodel_costs(METHODS["fedspu"](), Net(MODELS[name](shape, classes)), shape)
    assert [row["width"] for row in rows] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert tuple(row["entries"] for row in rows) == entries
    if name == "fedspu_emnist":
        # Each of two stages makes its values twice, in convolution and normalisation, of images of
        # 28 and 14 pixels a side; 20 channels, 0.2 are 4.
        assert rows[-1]["values"] == 2 * 20 * 784 + 2 * 20 * 196 + 62
        assert rows[0]["values"] == 2 * 4 * 784 + 2 * 4 * 196 + 62


DEVICES = [
    {"width": 0.5, "entries": 100, "values": 30},
    {"width": 1.0, "entries": 400, "values": 50},
]


def test_memory_by_hand(tmp_path: Path) -> None:
    """Parameters, gradients, and what layers make of 8 samples, at 4 bytes."""
    local = {"epochs": 2, "batch_size": 8, "lr": 0.01}
    run = write_run(tmp_path / "run", {4: 50.0}, method={"name": "fedspu"}, local=local)
    found = memory_by_width(read_started_run(amend(run, devices=DEVICES)))
    full, most, least, cut = (found[name].tolist() for name in found)
    assert full == [4 * (400 + 400 + 8 * 50)] * 2
    assert most == [4 * (400 + 100 + 8 * 50), full[1]]
    assert least == [4 * (400 + 100 + 8 * 30), full[1]]
    assert cut == [4 * (100 + 100 + 8 * 30), full[1]]
