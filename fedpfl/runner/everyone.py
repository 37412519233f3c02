"""All clients of the partition in its order, newcomers among them."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from fedpfl.config.messages import describe_choice
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.record.rundir import PartitionRecord


def locate_clients(run: Run) -> list[tuple[Federation, int]]:
    """Return each client's federation and its index there, in the order of the partition."""
    clients = [
        (federation, index)
        for federation in _list_federations(run)
        for index in range(federation.clients)
    ]

    def partition_number(client: tuple[Federation, int]) -> int:
        federation, index = client
        return federation.partition_number(index)

    return sorted(clients, key=partition_number)


def _list_federations(run: Run) -> list[Federation]:
    if run.newcomers:
        return [run.federation, run.newcomers]
    return [run.federation]


class ClientTable:
    """Make rows of measured values and sample counts of each client.

    Attributes:
        label_counts: samples by label, `[clients, classes]`, in the order of the partition; without
            a class where samples are hidden or at nodes.
        sample_counts: all samples, `[clients]`.
        client_names: in the order of the partition, empty where clients are numbers alone.
    """

    def __init__(self, run: Run):
        self._run = run
        self._clients = locate_clients(run)
        federations = _list_federations(run)
        numbers = [
            federation.partition_number(index)
            for federation in federations
            for index in range(federation.clients)
        ]
        counts = torch.cat([federation.label_counts() for federation in federations])
        order = torch.tensor(numbers).argsort()
        # Exact counts would give samples away that the run promises to hide.
        self.label_counts = counts[order, : 0 if run.sample_account else None]
        sizes = torch.cat([federation.sample_counts() for federation in federations])
        self.sample_counts = sizes[order]
        self.client_names = tuple(
            federation.client_names[client]
            for federation, client in self._clients
            if federation.client_names
        )

    @cached_property
    def partition_record(self) -> PartitionRecord:
        """Return the samples of each client."""
        # ---- Step 1: indices of each split, with newcomers.
        run = self._run
        indices = {
            split: [
                getattr(federation, split)[client].numpy()
                for federation, client in self._clients
                if getattr(federation, split)
            ]
            for split in ("train", "test", "validation")
        }

        # ---- Step 2: sizes where labels are no classes, and a title.
        federation = run.federation
        partition_text = describe_choice(run.config["partition"])
        sizes: tuple[int, ...] = ()
        if federation.task is not CLASSIFICATION or not self.label_counts.shape[1]:
            sizes = tuple(self.sample_counts.tolist())
        title = f"{federation.name}, {run.settings.clients} clients, {partition_text}"
        return PartitionRecord(
            **indices,
            label_counts=self.label_counts.numpy(),
            title=f"{title}: {federation.heterogeneity}",
            unseen=run.newcomers.partition_numbers if run.newcomers else (),
            samples_digest=run.samples_digest,
            client_names=self.client_names,
            class_names=federation.class_names,
            sizes=sizes,
        )

    def make_rows(self, columns: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
        """Return the rows of clients.csv.

        Args:
            columns: measured values by column and the client's number.
        """
        rows = []
        label_counts = self.label_counts.tolist()
        for number, (federation, client) in enumerate(self._clients):
            row: dict[str, Any] = {"client": number, **_name_cell(federation, client)}
            if self._run.newcomers:
                row["unseen"] = int(federation is self._run.newcomers)
            adversary = self._run.adversary
            if adversary:
                is_member = federation is self._run.federation
                row["attacker"] = int(is_member and client in adversary.attackers)
            row["train"] = int(federation.train_sizes[client])
            if federation.validation:
                row["validation"] = len(federation.validation[client])
            row["test"] = int(federation.test_sizes[client])
            for label, count in enumerate(label_counts[number]):
                row[f"label_{label}"] = count
            for name, values in columns.items():
                row[name] = _blank_nan(values.get(number))
            rows.append(row)
        return rows

    def make_matrix_rows(self, accuracy: list[list[float]]) -> list[dict[str, Any]]:
        """Return the rows of common.csv.

        Args:
            accuracy: of each participating client's model on each one's samples.
        """
        federation = self._run.federation
        numbers = [federation.partition_number(client) for client in range(len(accuracy))]
        columns = [f"on_{number}" for number in numbers]
        rows = []
        for client, values in enumerate(accuracy):
            cells = dict(zip(columns, map(_blank_nan, values), strict=True))
            rows.append({"client": numbers[client], **_name_cell(federation, client), **cells})
        return rows


def _name_cell(federation: Federation, client: int) -> dict[str, str]:
    """Return the cell of a client's name; {} where clients are numbers alone."""
    return {"name": federation.client_names[client]} if federation.client_names else {}


def _blank_nan(value: float | None) -> float | None:
    """Return None for nan: an empty cell."""
    return None if value is None or math.isnan(value) else value
