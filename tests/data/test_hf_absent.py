"""Without the libraries of an extra, one line says which extra to install."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fedpfl.data.datasets import load_samples
from fedpfl.data.partition import SCHEMES
from fedpfl.ground.errors import FedpflError


def test_the_extras_are_named_where_they_are_absent(tmp_path, monkeypatch):
    for name in ("datasets", "flwr_datasets", "flwr_datasets.partitioner"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FedpflError, match=r"pip install 'fedpfl\[hf\]'"):
        load_samples("hf", Path("unused"), path=tmp_path)
    with pytest.raises(FedpflError, match=r"pip install 'fedpfl\[flwr-datasets\]'"):
        SCHEMES["flower"](np.arange(4) % 2, 2, 0)
