"""Samples as the clients of a run hold them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedpfl import data
from fedpfl.config.plan import Plan
from fedpfl.config.schema import Settings
from fedpfl.data import Federation, ShiftedClients, datasets, partition
from fedpfl.data.units import note_units_of
from fedpfl.ground.seeding import seeded_by_key

DEALING_KEYS = (
    "data_dir",
    "dataset",
    "task",
    "clients",
    "partition",
    "validation",
    "unseen",
    "unseen_groups",
    "augment",
    "shift",
    "eval",
)
"""Keys and groups that decide what clients hold, beside the seed."""
Share = Callable[[Hashable, Callable[[], Any]], Any]
"""`share(key, make)` returns what runs of one process may have in common."""


def share_nothing(key: Hashable, make: Callable[[], Any]) -> Any:
    """Share nothing with other runs."""
    return make()


@dataclass(frozen=True, eq=False)
class DealtData:
    """Samples as the clients hold them.

    Attributes:
        federation: the clients that take part.
        newcomers: those that never do, None without any.
        shifted: the federations of shifted worlds, None without a shift.
        splits: the samples of each client, for the fingerprint.
        samples_digest: of the data set.
        notes: lines for the user.
    """

    federation: Federation
    newcomers: Federation | None
    shifted: ShiftedClients | None
    splits: tuple[Any, ...]
    samples_digest: str
    notes: tuple[str, ...]


def deal_data(plan: Plan, share: Share) -> DealtData:
    """Read the samples and deal them to clients."""
    settings = plan.settings
    dataset_options = plan.dataset.options

    def load() -> tuple[datasets.Samples, Tensor, str]:
        # User readers may draw random numbers.
        with seeded_by_key("dataset"):
            samples = datasets.load_samples(data_dir=Path(settings.data_dir), **dataset_options)
        digest = data.fingerprint(samples)
        on_device = replace(samples, x=samples.x.to(plan.device))
        # Runs that share samples train together, for which their labels must be the same tensor.
        return on_device, samples.y.to(plan.device), digest

    # Not the seed: runs that differ by it share the samples and deal them differently.
    samples_key = ("samples", plan.device, settings.data_dir, repr(dataset_options))
    samples, labels, samples_digest = share(samples_key, load)

    # ---- Who holds which samples
    split, seed = _deal_samples(plan, samples)
    newcomer_numbers = _find_newcomers(settings, samples, split, seed)
    everyone = data.build_federation(
        samples,
        split,
        settings.validation,
        seed,
        plan.augment,
        newcomer_numbers,
        plan.eval.classes == "own",
    ).to(plan.device)
    everyone = replace(everyone, y=labels)
    # A private run tells nothing of its samples.
    unit_notes = [] if plan.privacy else note_units_of(everyone)
    federation, newcomers = everyone.split_newcomers(newcomer_numbers)
    shifted = _shift_clients(plan, everyone, newcomer_numbers, seed, share)
    splits: tuple[Any, ...] = (everyone.train, everyone.test, everyone.validation)
    if newcomers:
        splits += (newcomers.partition_numbers,)
    return DealtData(
        federation=federation,
        newcomers=newcomers,
        shifted=shifted,
        splits=splits,
        samples_digest=samples_digest,
        notes=(*split.notes, *unit_notes),
    )


def _deal_samples(plan: Plan, samples: datasets.Samples) -> tuple[partition.Partition, int]:
    """Deal samples to clients, and return the seed of the draw."""
    settings = plan.settings
    partition_options = dict(plan.partition.options)
    seed = partition_options.pop("seed", None)
    partition_options.pop("together", None)  # the samples know it
    if seed is None:
        seed = settings.seed
    # User partitions may draw random numbers.
    with seeded_by_key("partition", seed):
        split = partition.deal_samples(
            partition.SCHEMES[plan.partition.name],
            samples,
            settings.clients,
            seed,
            **partition_options,
        )
    return data.thin_classes(split, samples.y.numpy(), plan.shift, seed), seed


def _shift_clients(
    plan: Plan, everyone: Federation, newcomers: Collection[int], seed: int, share: Share
) -> ShiftedClients | None:
    """Make the federations of shifted worlds, None without a shift.

    Raises:
        FedpflError: for a shift that these samples cannot have.
    """
    data.require_fit_of_shift(plan.shift, everyone)
    if not plan.shift.is_laid_over:
        return None

    def lay_over() -> ShiftedClients:
        return ShiftedClients(everyone, newcomers, plan.shift, seed)

    # Runs that differ by method alone train together in lockstep where they share samples.
    deal = [str(plan.config[key]) for key in DEALING_KEYS]
    return share(("shift", plan.device, seed, *deal), lay_over)


def _find_newcomers(
    settings: Settings, samples: datasets.Samples, split: partition.Partition, seed: int
) -> list[int]:
    """Return the clients that never take part, ascending."""
    if settings.unseen_groups:
        return data.find_clients_of_groups(samples, split, settings.unseen_groups)
    return data.draw_newcomers(len(split.train), settings.newcomers, seed)
