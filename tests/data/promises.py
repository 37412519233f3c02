"""What `fedpfl check` asks of a data set, and refusals, for the tests that make its files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpfl.config.plan import check_config
from fedpfl.config.run import Run, build_run
from fedpfl.data.datasets import Samples, load_samples
from fedpfl.ground.errors import FedpflError
from fedpfl.testing.dataset_promises import DATASET_PROMISES, DatasetTrial
from fedpfl.testing.promises import audit
from tests.command import compose_once


def assert_promises(name: str, folder: Path, *noted: str, **options: Any) -> None:
    """All is kept but what is noted, by the names of the functions that try it."""
    trial = DatasetTrial(name, folder, options)
    verdicts = audit(trial, DATASET_PROMISES, quick=True)
    faults = {
        verdict.promise.check.__name__: verdict.faults for verdict in verdicts if verdict.faults
    }
    assert faults.keys() == {*noted}, faults


def assert_read(
    name: str, folder: Path, x: Any, y: list[int], test_from: int | None = None, **expected: Any
) -> Samples:
    """Assert that these samples are read, and that all promises are kept but what is noted.

    Args:
        name: Of the data set.
        folder: Where its files are.
        x: The samples, or the first of them.
        y: The labels.
        test_from: The first test sample.
        expected: `groups`, the name of each sample's; `noted`; and the data set's options.
    """
    groups, noted = expected.pop("groups", None), expected.pop("noted", ())
    got = load_samples(name, folder, download=False, **expected)
    np.testing.assert_allclose(got.x[: len(x)], x, rtol=1e-6)
    assert (got.y.tolist(), got.test_from) == (y, test_from)
    if groups is not None:
        assert [got.group_names[place] for place in got.groups] == [*groups]
    assert_promises(name, folder, *noted, **expected)
    return got


def one_line(action: Callable[[], object]) -> str:
    """Return the FedpflError of what is done, which is a line without NumPy's types."""
    with pytest.raises(FedpflError) as error:
        action()
    assert str(error.value).isprintable()
    assert "np.int" not in str(error.value)
    assert "np.float" not in str(error.value)
    return str(error.value)


def build(*words: str) -> Run:
    """Build the run of these words, as far as its first round."""
    return build_run(check_config(compose_once(*words)))
