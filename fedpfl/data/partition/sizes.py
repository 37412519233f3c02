"""Schemes in which clients differ in how much they have, or in which classes they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np

from fedpfl.data.partition.common import (
    Alpha,
    Indices,
    Partition,
    deal_by_proportions,
    deal_classes,
    list_classes,
    require_enough_samples,
    split_clients,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import AtLeast, AtMost, Count, ProportionBelowOne

Spread = Annotated[float, AtLeast(0), AtMost(100)]


def quantity(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    sizes: Literal["lognormal", "power"] = "lognormal",
    spread: Spread = 1.0,
    alpha: Alpha | None = None,
    min_samples: Count = 10,
    test_fraction: ProportionBelowOne = 0.25,
) -> Partition:
    """Give clients unequal numbers of samples, beside any skew of labels.

    Every sample is dealt. A client has `min_samples`, and of the rest a share by its weight:
    exp(spread z) with z ~ N(0, 1) (lognormal), or rank^-spread with ranks 1 to `clients` in random
    order (a power law). With alpha, a client draws class proportions p ~ Dir(alpha, ..., alpha) and
    takes its samples by them, restricted to the classes that are left; without, random ones.

    Raises:
        FedpflError: There are too few samples.
    """
    require_enough_samples(len(y), clients, "min_samples", min_samples)
    rng = np.random.default_rng(seed)
    if sizes == "lognormal":
        logarithms = spread * rng.standard_normal(clients)
    else:
        logarithms = -spread * np.log(rng.permutation(np.arange(1, clients + 1)))
    # The largest weight is 1: no spread overflows.
    weights = np.exp(logarithms - logarithms.max())
    counts = min_samples + apportion(weights, len(y) - clients * min_samples)
    if alpha is None:
        pieces = np.split(rng.permutation(len(y)), np.cumsum(counts)[:-1])
        return split_clients(pieces, test_fraction, rng)
    return split_clients(
        deal_by_proportions(y, counts.tolist(), alpha, rng),
        test_fraction,
        rng,
    )


def apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Return whole numbers in proportion to weights, which sum to `total` (largest remainders)."""
    exact = weights / weights.sum() * total
    counts = np.floor(exact).astype(np.int64)
    remainders = exact - counts
    # Stable: of equal remainders the first client's counts.
    largest = np.argsort(-remainders, kind="stable")[: total - counts.sum()]
    counts[largest] += 1
    return counts


def extended_dirichlet(
    y: np.ndarray,
    clients: int,
    seed: int,
    *,
    classes_per_client: Count = 2,
    alpha: Alpha = 1.0,
    min_samples: Count = 10,
    max_attempts: Count = 1000,
    test_fraction: ProportionBelowOne = 0.25,
) -> Partition:
    """Deal each client C classes, and cut each class by Dir(alpha) over its holders.

    ExDir(C, alpha) of Li and Lyu (Convergence Analysis of Sequential Federated Learning on
    Heterogeneous Data, NeurIPS 2023, appendix). Classes are dealt in turn, those dealt least often
    first and ties at random, so that each has a holder where clients x C reaches the classes.
    Proportions are drawn again until every client has `min_samples`.

    Raises:
        FedpflError: There are fewer classes than C, too few samples, or no split in
            `max_attempts` draws.
    """
    # ---- Step 1: each client's classes
    require_enough_samples(len(y), clients, "min_samples", min_samples)
    rng = np.random.default_rng(seed)
    pools = list_classes(y, classes_per_client)
    client_classes = deal_classes(len(pools), clients, classes_per_client, rng)

    # ---- Step 2: shares of these classes, until all clients have enough samples
    for attempt in range(1, max_attempts + 1):
        holdings = _cut_over_holders(pools, client_classes, alpha, rng)
        if min(map(len, holdings)) >= min_samples:
            return replace(split_clients(holdings, test_fraction, rng), attempts=attempt)
    raise FedpflError(
        f"partition=extended_dirichlet found no split in {max_attempts} attempts in which each of "
        f"clients={clients} has partition.min_samples={min_samples} samples; lower it, or raise "
        "partition.alpha or partition.classes_per_client"
    )


def _cut_over_holders(
    pools: Sequence[Indices],
    client_classes: Sequence[np.ndarray],
    alpha: float,
    rng: np.random.Generator,
) -> list[Indices]:
    """Cut each class by Dir(alpha) over its holders, if it has any."""
    pieces: list[list[Indices]] = [[] for _ in client_classes]
    for label, pool in enumerate(pools):
        holders = [client for client, labels in enumerate(client_classes) if label in labels]
        if not holders:
            continue
        proportions = rng.dirichlet(np.full(len(holders), alpha))
        cuts = (np.cumsum(proportions) * len(pool)).astype(int)[:-1]
        for client, piece in zip(holders, np.split(rng.permutation(pool), cuts), strict=True):
            pieces[client].append(piece)
    return [np.concatenate(parts) for parts in pieces]
