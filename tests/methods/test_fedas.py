"""FedAS (CVPR 2024): bodies count by traces of Fisher information, or by samples."""

import pytest
import torch

from fedpfl.methods import FedAS
from tests.conftest import assert_close


@pytest.mark.parametrize(
    ("fisher", "shares"),
    [
        ([1.0, 3.0], [0.25, 0.75]),
        ([5.0, 5.0], [0.5, 0.5]),
        ([0.0, 0.0], [0.9, 0.1]),
        ([float("inf"), 1.0], [0.9, 0.1]),
        ([float("nan"), 1.0], [0.9, 0.1]),
    ],
)
def test_bodies_count_by_fisher_and_without_one_by_samples(fisher, shares):
    uploads = {"body": {"w": torch.eye(2)}, "fisher": torch.tensor(fisher)}
    server, _ = FedAS().aggregate({}, {}, None, uploads, torch.tensor([0.9, 0.1]), None)
    assert_close(server["w"], torch.tensor(shares))
