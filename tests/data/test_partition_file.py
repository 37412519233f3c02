"""Partitions as files: every form is read back, and whatever does not fit is one line."""

import json

import numpy as np
import pytest
import torch

from fedpfl.config.plan import check_config
from fedpfl.config.run import build_run
from fedpfl.data import partition
from fedpfl.data.datasets import Samples
from fedpfl.data.partition import Partition
from tests.command import TINY, compose_once, format_override, play_run, read_table
from tests.conftest import read_cases
from tests.data.promises import one_line

Y = np.arange(40) % 4
TRAIN, TEST, HELD = ([3, 9, 1], [0, 5], [22]), ([2], [], [30, 31]), ([8], [4], [])


def flat(parts, file, **more):
    """The arrays that docs/run_directory.md says a run writes."""
    arrays = {}
    for name in ("train", "test", "validation"):
        own = [np.array(index, np.int64) for index in getattr(parts, name)]
        if own:
            arrays[f"{name}_indices"] = np.concatenate(own)
            arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, own)], dtype=np.int64)
    np.savez_compressed(file, **arrays, **more)


OWN = Samples(
    "small", torch.zeros(40, 1, 8, 8, dtype=torch.uint8), torch.from_numpy(Y), 4, (0.5,), (0.5,)
)


def read(path, clients=3, seed=0, **options):
    return partition.deal_samples(partition.file, OWN, clients, seed, path=path, **options)


def listed(parts: Partition):
    return [
        [own.tolist() for own in split] for split in (parts.train, parts.test, parts.validation)
    ]


def refusal(*about, **options) -> str:
    return one_line(lambda: read(*about, **options))


@pytest.fixture
def write(tmp_path):
    def to(held, name="parts.json"):
        (tmp_path / name).write_text(held if isinstance(held, str) else json.dumps(held))
        return tmp_path / name

    return to


@pytest.mark.parametrize("held", [HELD, ()])
def test_arrays_are_read_back(tmp_path, held):
    flat(Partition(TRAIN, TEST, validation=held), tmp_path / "p.npz", label_counts=np.zeros((3, 4)))
    assert listed(read(tmp_path / "p.npz")) == [[*TRAIN], [*TEST], [*held]]


CLIENTS = [{"train": train, "test": test} for train, test in zip(TRAIN, TEST, strict=True)]
HOLDING_OUT = [*zip(CLIENTS, HELD, strict=True)]
FL_BENCH = {"separation": {"train": [0, 1, 2], "val": [0, 1, 2], "test": [0, 1, 2], "total": 3}}
"""Of its partition.pkl as JSON."""


@pytest.mark.parametrize(
    ("held", "validation"),
    [
        (CLIENTS, []),
        # In order of the numbers
        ({"10": CLIENTS[2], "2": CLIENTS[1], "1": CLIENTS[0]}, []),
        # In order of the file
        ({"zoe": CLIENTS[0], "adam": CLIENTS[1], "10": CLIENTS[2]}, []),
        (FL_BENCH | {"data_indices": [{**own, "val": []} for own in CLIENTS]}, []),
        ({"data_indices": [own | {"val": val} for own, val in HOLDING_OUT]}, [*HELD]),
    ],
)
def test_json_with_test_splits_is_read_back(write, held, validation):
    assert listed(read(write(held))) == [[*TRAIN], [*TEST], validation]


@pytest.mark.parametrize("numbered", [False, True])
def test_samples_alone_are_split_by_the_seed(write, numbered):
    """A partitioner's `partition_id_to_indices` of Flower, or a list of lists."""
    owned = [[*range(20)], [*range(20, 32)], [33, 39, 35, 38]]
    path = write({str(k): own for k, own in enumerate(owned)} if numbered else owned)
    parts = read(path, test_fraction=0.5)
    assert [len(own) for own in parts.test] == [10, 6, 2]
    assert [sorted([*a, *b]) for a, b in zip(parts.train, parts.test, strict=True)] == [
        sorted(own) for own in owned
    ]
    assert listed(read(path, test_fraction=0.5)) == listed(parts)
    assert listed(read(path, test_fraction=0.5, seed=1)) != listed(parts)
    assert [len(own) for own in read(path, test_fraction=0).test] == [0, 0, 0]


def test_a_runs_partition_gives_another_run_the_same_clients(tmp_path):
    """Its validation samples too; the seed may be another."""
    play_run(tmp_path / "first", *TINY, "method=fedavg", "validation=0.2")
    keys = [key for key in TINY if not key.startswith("partition.")]
    path = format_override("partition.path", tmp_path / "first/partition.npz")
    own = ("method=fedavg", "partition=file", path, "partition.seed=7")
    play_run(tmp_path / "again", *keys, *own)
    first, again = (read_table(tmp_path / name / "rounds.csv") for name in ("first", "again"))
    assert first == again
    cfg = compose_once(*keys, "partition=file", path, "validation=0.1")
    told = "validation must be 0, as the partition holds samples out itself, got 0.1; set validatio"
    assert one_line(lambda: build_run(check_config(cfg))).startswith(told)


WRONG = """
"nonsense" | cannot be read as a partition (JSONDecodeError
{"0": {"x": 20, "y": {"1": 20}}} | client 0 has neither a list of samples nor train, test and val
[{"train": [1], "test": 2}] | the samples of client 0 are no list of whole numbers
[[1], [2]] | clients must be 2, as PATH deals to so many, got 3
[{"train": [k], "test": [], "val": [20]} for k in (1, 20, 3)] | sample 20 of PATH is for training and for testing or validation too
"""
"""What is in the file | what is said. The second is FL-bench's statistics.
"""


@pytest.mark.parametrize(("held", "message"), read_cases(WRONG, " | "))
def test_what_is_no_partition_or_does_not_fit_is_one_line(write, held, message):
    path = write(eval(held))
    assert message.replace("PATH", str(path)) in refusal(path, test_fraction=0)


def test_other_files_are_not_opened(write):
    told = refusal(write("x", "partition.txt"))
    assert told.startswith("partition.path must end in .npz, .json, .pkl, got ")
    assert refusal("absent.npz") == "partition.path: there is no file absent.npz; check the path"


@pytest.mark.parametrize("offsets", [[1, 7, 14, 31], [0, 14, 7, 31], [0.0, 7.0, 14.0, 31.0]])
def test_arrays_that_do_not_add_up_are_one_line(tmp_path, offsets):
    flat(partition.iid(Y, 3, 0), tmp_path / "whole.npz")
    with np.load(tmp_path / "whole.npz") as arrays:
        np.savez(tmp_path / "p.npz", **{**arrays, "train_offsets": offsets})
    assert "p.npz cannot be read as a partition (" in refusal(tmp_path / "p.npz")
