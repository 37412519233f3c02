"""What sub-models of each width come to, by hand and as the FedSPU paper's networks give it."""

from __future__ import annotations

from pathlib import Path

from fedpfl.methods import METHODS
from fedpfl.models import MODELS, Net
from fedpfl.papers.fedspu.tables import memory_by_width
from fedpfl.report.load import read_started_run
from fedpfl.runner.cost import count_submodel_costs
from tests.report.test_report import amend, write_run


def test_entries_of_a_papers_network_and_values_by_hand() -> None:
    """FedSPU's network for EMNIST (AAAI 2025, section 4 and public code), at widths 0.2 to 1; that
    the paper's others have as many as travel is for tests/methods/test_submodels.py to say.
    """
    shape = (1, 28, 28)
    rows = count_submodel_costs(METHODS["fedspu"](), Net(MODELS["fedspu_emnist"](shape, 62)), shape)
    entries = {row["width"]: row["entries"] for row in rows}
    assert entries == {0.2: 12_418, 0.4: 25_062, 0.6: 37_994, 0.8: 51_214, 1.0: 64_722}
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
