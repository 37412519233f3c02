"""Flower's partitioners: who holds what is as the library itself has it, row for row."""

import inspect
from pathlib import Path

import numpy as np
import pytest

from fedpfl.data.partition import SCHEMES
from fedpfl.testing.partition_promises import make_samples
from tests.command import run_command
from tests.conftest import read_cases
from tests.data.promises import one_line

library = pytest.importorskip("flwr_datasets.partitioner")
datasets = pytest.importorskip("datasets")
flower = SCHEMES["flower"]

SAMPLES = make_samples(600)
Y, GROUPS = SAMPLES.y.numpy(), SAMPLES.groups.numpy()
SHARES = (1 + np.arange(20).reshape(10, 2) % 7).tolist()
CASES = """
DirichletPartitioner | {"alpha": 0.5, "min_partition_size": 3}
InnerDirichletPartitioner | {"partition_sizes": [100] * 5, "alpha": 0.5}
DistributionPartitioner | {"distribution_array": SHARES, "num_unique_labels_per_partition": 2, "preassigned_num_samples_per_label": 2}
NaturalIdPartitioner | {}
GroupedNaturalIdPartitioner | {"group_size": 1, "sort_unique_ids": True}
"""
"""Partitioner, perhaps with which case of it | arguments."""


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize(("case", "values"), read_cases(CASES, " | "))
def test_each_client_has_the_librarys_rows(case, values):
    seed = 7
    name, arguments = case.split()[0], eval(values)
    clients = 10 if name == "DistributionPartitioner" else 5  # a multiple of the classes
    made = {key: np.array(value) if "array" in key else value for key, value in arguments.items()}
    parameters = inspect.signature(getattr(library, name)).parameters
    supplied = {
        "num_partitions": clients,
        "seed": seed,
        "partition_by": "writer" if "Natural" in name else "label",
    }
    made |= {key: value for key, value in supplied.items() if key in parameters}
    reference = getattr(library, name)(**made)
    rows = {"label": Y.tolist(), "writer": GROUPS.tolist(), "row": list(range(len(Y)))}
    reference.dataset = datasets.Dataset.from_dict(rows)

    y, groups = Y.copy(), GROUPS.copy()
    options = {"groups": groups, "group_names": SAMPLES.group_names, "test_fraction": 0.2}
    parts = flower(y, clients, seed, partitioner=name, arguments=arguments, **options)
    for client, (train, test) in enumerate(zip(parts.train, parts.test, strict=True)):
        expected = sorted(reference.load_partition(client)["row"])
        assert sorted([*train.tolist(), *test.tolist()]) == expected
        assert len(test) == int(0.2 * len(expected))
    is_natural = name == "NaturalIdPartitioner"
    assert parts.client_names == (SAMPLES.group_names if is_natural else ())
    assert np.array_equal(y, Y)
    assert np.array_equal(groups, GROUPS)


FAULTS = """
argument | DirichletPartitioner | {"alhpa": 1} | 5 | refuses partition.arguments for 5 clients: TypeError:
value | DirichletPartitioner | {"alpha": -1} | 5 | DirichletPartitioner refuses partition.arguments for 5 clients: ValueError: Alpha values
no groups | NaturalIdPartitioner | {} | 5 | NaturalIdPartitioner refuses
"""
"""Name | partitioner | arguments | clients | what is said."""


@pytest.mark.parametrize(
    ("fault", "name", "arguments", "clients", "text"), read_cases(FAULTS, " | ")
)
def test_what_is_wrong_is_one_line(fault, name, arguments, clients, text):
    groups = None if fault == "no groups" else GROUPS
    values = {"groups": groups, "partitioner": name, "arguments": eval(arguments)}
    assert text in one_line(lambda: flower(Y, int(clients), 0, **values))


def test_a_run_by_a_partitioner(tmp_path: Path):
    wrong = run_command("partition=flower", "partition.arguments.alhpa=0.5", cwd=tmp_path)
    assert "did you mean partition.arguments.alpha?" in wrong.err
