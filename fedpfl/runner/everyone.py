"""All clients of the partition in its order, those who never take part among them."""

from __future__ import annotations

import math
from typing import Any

import torch

from fedpfl.config.messages import describe_choice
from fedpfl.config.plan import Run
from fedpfl.data import Federation
from fedpfl.record.rundir import RunDirectory


def locate_clients(run: Run) -> list[tuple[Federation, int]]:
    """Return where each client of the partition is, in its order: the federation and the number
    there.
    """
    everyone = [(one, client) for one in _federations(run) for client in range(one.clients)]
    return sorted(everyone, key=lambda place: place[0].number(place[1]))


def _federations(run: Run) -> list[Federation]:
    return [run.federation, *([run.unseen] if run.unseen else [])]


class ClientTable:
    """Know each client's place and samples.

    places: by the client's number in the partition, its federation and the number there. counts:
    samples by label, `[clients, classes]`.
    """

    def __init__(self, run: Run):
        federations = _federations(run)
        self.places = locate_clients(run)
        order = torch.tensor(
            [one.number(client) for one in federations for client in range(one.clients)]
        )
        self.counts = torch.cat([one.label_counts() for one in federations])[order.argsort()]
        self._run = run

    def write_partition(self, directory: RunDirectory) -> None:
        """Write who holds which samples, as indices and as a picture."""
        run = self._run
        train, test, validation = (
            [
                getattr(one, split)[client].numpy()
                for one, client in self.places
                if getattr(one, split)
            ]
            for split in ("train", "test", "validation")
        )
        how = describe_choice(run.config["partition"])
        title = f"{run.federation.name}, {run.settings.clients} clients, {how}"
        unseen = run.unseen.numbers if run.unseen else ()
        directory.write_partition(
            train, test, self.counts.numpy(), title, validation, unseen, run.origin.trained
        )

    def rows(self, measured: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
        """Return the rows of clients.csv. measured: values by column and client."""
        run, labels = self._run, self.counts.tolist()
        return [
            {
                "client": number,
                **({"unseen": int(federation is run.unseen)} if run.unseen else {}),
                "train": int(federation.train_sizes[client]),
                **(
                    {"validation": len(federation.validation[client])}
                    if federation.validation
                    else {}
                ),
                "test": int(federation.test_sizes[client]),
                **{f"label_{label}": count for label, count in enumerate(labels[number])},
                **{name: _known(values.get(number)) for name, values in measured.items()},
            }
            for number, (federation, client) in enumerate(self.places)
        ]

    def matrix(self, accuracy: list[list[float]]) -> list[dict[str, Any]]:
        """Return the rows of common.csv. accuracy: of those who take part, each one's model on each
        one's samples.
        """
        ours = [self._run.federation.number(client) for client in range(len(accuracy))]
        columns = [f"on_{number}" for number in ours]
        return [
            {"client": number, **dict(zip(columns, map(_known, own), strict=True))}
            for number, own in zip(ours, accuracy, strict=True)
        ]


def _known(value: float | None) -> float | None:
    """Return None for nan: an empty cell."""
    return None if value is None or math.isnan(value) else value
