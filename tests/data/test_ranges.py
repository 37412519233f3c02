"""Options of data sets, partitions and networks out of range: one line with the key, before
anything is read.
"""

import pytest

from fedpfl.config.plan import check_config
from fedpfl.ground.errors import FedpflError
from tests.command import compose_once
from tests.conftest import keep_quick, read_cases

SIZE = "dataset.size=0 => dataset.size must be 1 or more, got 0"
LINES = f"""
partition=iid partition.samples_per_client=0 => partition.samples_per_client must be 1 or more, or null, got 0
dataset.classes=0 => dataset.classes must be between 1 and 65536, or null, got 0
dataset.std=[0] => dataset.std must be a positive number or null, got [0]
dataset=ag_news dataset.vocabulary=2 => dataset.vocabulary must be 3 or more, got 2
dataset=ag_news dataset.length=0 => dataset.length must be 1 or more, got 0
dataset=cifar10_c dataset.severity=6 => dataset.severity must be between 1 and 5, or null, got 6
model=text model.vocabulary=1 => model.vocabulary must be 2 or more, got 1
model=mlp model.hidden=[200,0] => model.hidden must be 1 or more, got [200, 0]
model=resnet18 model.norm=instance => model.norm must be one of batch, group, got 'instance'
model=resnet18 model.stem=3 => model.stem must be one of large, small, got 3
dataset=tiny_imagenet {SIZE}
augment.rotate=-1 => augment.rotate must be between 0 and 180, got -1
augment.crop=-2 => augment.crop must be 0 or more, got -2
augment.fill=white => augment.fill must be one of black, mean, got 'white'
"""


@pytest.mark.parametrize(("words", "message"), keep_quick(read_cases(LINES), 4))
def test_what_is_out_of_range_is_refused(words, message):
    with pytest.raises(FedpflError) as said:
        check_config(compose_once(*words.split()))
    assert str(said.value) == message
