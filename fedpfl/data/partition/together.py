"""Deal units, such as patients, so that the samples of one are never apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedpfl.data.datasets import Samples
from fedpfl.data.partition.common import Indices, Partition, indices_by_class
from fedpfl.ground.errors import FedpflError


def deal_units(deal: Callable[[Samples], Partition], samples: Samples) -> Partition:
    """Deal units by a scheme for samples: the first sample of each stands for all.

    Args:
        deal: Deals samples.
        samples: The data set, with `units`.

    Raises:
        FedpflError: A unit is in two groups, or in the training and the test part.
    """
    # ---- Step 1: units in the order of their first samples.
    assert samples.units is not None
    _, firsts, unit_by_sample = np.unique(samples.units, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    rows_by_unit = indices_by_class(np.argsort(order)[unit_by_sample])
    standing = torch.from_numpy(firsts[order])

    # ---- Step 2: no unit is of two groups, or of both original parts.
    test_from = samples.test_from
    if test_from is not None:
        is_test = torch.arange(len(samples.y)) >= test_from
        _require_one(is_test, rows_by_unit, "the training and the test part")
        test_from = int((standing < test_from).sum())
    if samples.groups is not None:
        _require_one(samples.groups, rows_by_unit, "two groups")

    # ---- Step 3: deal units, and take all samples of each.
    split = deal(replace(samples.take_rows(standing), units=None, test_from=test_from))

    def take_rows(clients: Sequence[Indices]) -> tuple[Indices, ...]:
        nothing = np.empty(0, np.int64)
        return tuple(
            np.concatenate([nothing, *(rows_by_unit[unit] for unit in units)]) for units in clients
        )

    return replace(
        split,
        train=take_rows(split.train),
        test=take_rows(split.test),
        validation=take_rows(split.validation),
    )


def _require_one(values: torch.Tensor, rows_by_unit: Sequence[Indices], described: str) -> None:
    """Raise FedpflError where samples of one unit differ in a value."""
    for rows in rows_by_unit:
        if (values[rows] != values[rows[0]]).any():
            raise FedpflError(
                f"partition.together: samples {rows[0]} and {rows[-1]} are of one unit, and in "
                f"{described}; leave partition.together out, or fix the data"
            )
