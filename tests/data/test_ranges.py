"""Options of data sets, partitions and networks out of range: one line with the key, before anything is read."""

import pytest

from fedpfl.config import plan
from fedpfl.config.overrides import composed
from fedpfl.ground.errors import FedpflError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("partition.alpha=-1", "partition.alpha must be above 0 and at most 1000000.0, got -1"),
        ("partition.alpha=1e7", "partition.alpha must be above 0 and at most 1000000.0, got 10000000.0"),
        ("partition.alpha=nan", "partition.alpha must be a finite number, got nan"),
        ("partition.alpha=true", "partition.alpha must be a number, got True"),
        ("partition.min_samples=0", "partition.min_samples must be 1 or more, got 0"),
        ("partition.test_fraction=1.0", "partition.test_fraction must be at least 0 and below 1, got 1.0"),
        ("partition=published partition.max_attempts=0", "partition.max_attempts must be 1 or more, got 0"),
        ("partition=shards partition.classes_per_client=0", "partition.classes_per_client must be 1 or more, got 0"),
        (
            "partition=iid partition.samples_per_client=0",
            "partition.samples_per_client must be 1 or more, or null, got 0",
        ),
        ("partition=fixed_dirichlet partition.test_samples=-1", "partition.test_samples must be 0 or more, got -1"),
        ("dataset=ag_news dataset.vocabulary=2", "dataset.vocabulary must be 3 or more, got 2"),
        ("dataset=ag_news dataset.length=0", "dataset.length must be 1 or more, got 0"),
        ("dataset=cifar10_c dataset.severity=6", "dataset.severity must be between 1 and 5, or null, got 6"),
        *(
            (f"dataset={name} dataset.size=0", "dataset.size must be 1 or more, got 0")
            for name in ("digit5", "mini_imagenet", "office_home", "pacs", "tiny_imagenet")
        ),
        ("model=text model.vocabulary=1", "model.vocabulary must be 2 or more, got 1"),
        ("model=lstm model.width=0", "model.width must be 1 or more, got 0"),
        ("model=mlp model.hidden=[200,0]", "model.hidden must be 1 or more, got [200, 0]"),
    ],
)
def test_what_is_out_of_range_is_refused(words, message):
    with pytest.raises(FedpflError) as said:
        plan.check(composed(words.split()))
    assert str(said.value) == message
