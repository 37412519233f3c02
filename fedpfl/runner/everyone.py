"""All clients of the partition in its order, newcomers among them."""

from __future__ import annotations

import math

import torch

from fedpfl.config.messages import describe_choice
from fedpfl.config.run import Run
from fedpfl.data import Federation
from fedpfl.ground import tree
from fedpfl.ground.records import Record
from fedpfl.ground.survival import estimate_survival
from fedpfl.ground.tasks import CLASSIFICATION, SURVIVAL
from fedpfl.record.rundir import PartitionRecord


def locate_clients(run: Run) -> list[tuple[Federation, int]]:
    """Return each client's federation and its index there, in the order of the partition."""
    clients = {}
    for federation in list_federations(run):
        for index in range(federation.clients):
            clients[federation.partition_number(index)] = (federation, index)
    return [clients[number] for number in sorted(clients)]


def list_client_names(run: Run) -> tuple[str, ...]:
    """Return clients' names in the order of the partition; () where clients are numbers alone."""
    clients = locate_clients(run)
    return tuple(
        federation.client_names[index] for federation, index in clients if federation.client_names
    )


def list_federations(run: Run) -> list[Federation]:
    """Return the federations of members and of newcomers."""
    return [run.federation, run.newcomers] if run.newcomers else [run.federation]


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
        federations = list_federations(run)
        numbers = [f.partition_number(index) for f in federations for index in range(f.clients)]
        order = torch.tensor(numbers).argsort()
        label_counts = torch.cat([f.label_counts() for f in federations])[order]
        # Exact counts would give samples away that the run promises to hide.
        self.label_counts = label_counts[:, :0] if run.sample_account else label_counts
        self.sample_counts = torch.cat([f.sample_counts() for f in federations])[order]
        self.client_names = list_client_names(run)

    def make_partition_record(self) -> PartitionRecord:
        """Return the samples of each client."""
        run = self._run
        federation = run.federation
        indices = {}
        for split in ("train", "test", "validation"):
            parts = [(getattr(own, split), client) for own, client in self._clients]
            indices[split] = [part[client].numpy() for part, client in parts if part]
        # Sizes stand in where labels are no classes.
        has_classes = federation.task is CLASSIFICATION and self.label_counts.shape[1]
        partition_text = describe_choice(run.config["partition"])
        title = f"{federation.name}, {run.settings.clients} clients, {partition_text}"
        return PartitionRecord(
            **indices,
            label_counts=self.label_counts.numpy(),
            title=f"{title}: {run.heterogeneity}",
            unseen=run.newcomers.partition_numbers if run.newcomers else (),
            samples_digest=run.samples_digest,
            client_names=self.client_names,
            class_names=federation.class_names,
            sizes=() if has_classes else tuple(self.sample_counts.tolist()),
            survival=self._trace_survival() if federation.task is SURVIVAL else (),
        )

    def _trace_survival(self) -> list[list[float]]:
        """Return Kaplan-Meier's curve of each client's samples, as the page draws it."""
        rows: list[list[float]] = []
        for number, (federation, client) in enumerate(self._clients):
            splits = [federation.train, federation.validation, federation.test]
            own = torch.cat([split[client] for split in splits if split])
            times, shares = estimate_survival(federation.y.cpu()[own.cpu()])
            rows.append([number, 0.0, 1.0])
            rows += [[number, *step] for step in zip(times.tolist(), shares.tolist(), strict=True)]
        return rows

    def make_rows(self, columns: dict[str, dict[int, float]]) -> list[Record]:
        """Return the rows of clients.csv.

        Args:
            columns: measured values by column and the client's number.
        """
        run = self._run
        rows = []
        label_counts = self.label_counts.tolist()
        for number, (federation, client) in enumerate(self._clients):
            is_newcomer = federation is run.newcomers
            row: Record = {"client": number, **_name_cell(federation, client)}
            if run.newcomers:
                row["unseen"] = int(is_newcomer)
            if run.adversary:
                row["attacker"] = int(not is_newcomer and client in run.adversary.attackers)
            if run.kinds:
                net = run.net.nets[run.kinds[number]]
                row |= {"kind": net.name, "parameters": tree.size(net.params)}
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

    def make_matrix_rows(self, accuracy: list[list[float]]) -> list[Record]:
        """Return the rows of common.csv.

        Args:
            accuracy: of each participating client's model on each one's samples.
        """
        federation = self._run.federation
        numbers = [federation.partition_number(client) for client in range(len(accuracy))]
        rows = []
        for client, values in enumerate(accuracy):
            row: Record = {"client": numbers[client], **_name_cell(federation, client)}
            for number, value in zip(numbers, values, strict=True):
                row[f"on_{number}"] = _blank_nan(value)
            rows.append(row)
        return rows


def _name_cell(federation: Federation, client: int) -> dict[str, str]:
    """Return the cell of a client's name; {} where clients are numbers alone."""
    return {"name": federation.client_names[client]} if federation.client_names else {}


def _blank_nan(value: float | None) -> float | None:
    """Return None for nan: an empty cell."""
    return None if value is None or math.isnan(value) else value
