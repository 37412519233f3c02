"""What `fedpfl check` asks of a data set, for the tests that make its files."""

from pathlib import Path
from typing import Any

from fedpfl.testing.dataset_promises import DATASET_PROMISES, DatasetTrial, describe_reading_error
from fedpfl.testing.promises import Judge, audit


def assert_promises(name: str, folder: Path, *noted: str, **options: Any) -> None:
    """All is kept but what is noted, by the names of the functions that try it."""
    trial = DatasetTrial(name, folder, options)
    verdicts = audit(trial, DATASET_PROMISES, quick=True, judge=Judge(describe_reading_error))
    faults = {
        verdict.promise.check.__name__: verdict.faults for verdict in verdicts if verdict.faults
    }
    assert faults.keys() == {*noted}, faults
