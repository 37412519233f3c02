"""What `fedpfl check` asks of a data set, and refusals, for the tests that make its files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedpfl.config.plan import check_config
from fedpfl.config.run import Run, build_run
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
