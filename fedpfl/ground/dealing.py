"""Deal choices to clients: in turn, at random, by device, or by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from fedpfl.ground.errors import FedpflError, choices_text

Assign = Literal["cycle", "random", "device"] | dict[str | int, str]


def deal_choices(
    key: str,
    assign: Assign,
    labels: Sequence[str],
    names: Sequence[str],
    seed: int,
    speeds: Sequence[float],
    shares: Sequence[float] | None = None,
) -> list[int]:
    """Return the number of each client's choice, newcomers among them.

    Args:
        key: Of the configuration, for messages.
        assign: How they are dealt.
        labels: Of the choices.
        names: Of the clients.
        seed: Of assign=random.
        speeds: Of the clients' devices, for assign=device: the slowest have the first choice.
        shares: Of the clients with each choice, unless in turn; by default equal.

    Raises:
        FedpflError: There are no devices, or a client or choice is unknown.
    """
    count, clients = len(labels), len(names)
    if assign == "cycle":
        return [client % count for client in range(clients)]
    if isinstance(assign, dict):
        # Clients without names are numbers, which the command line gives as such.
        label_of = {str(name): label for name, label in assign.items()}
        if unknown := [name for name in label_of if name not in names]:
            raise FedpflError(f"{key}: a client must be {choices_text(names, unknown[0])}")
        wrong = [name for name in names if label_of.get(name) not in labels]
        if wrong:
            raise FedpflError(
                f"{key} must name one of {', '.join(labels)} for each client, and has"
                f" {label_of.get(wrong[0])} for {wrong[0]}"
            )
        return [labels.index(label_of[name]) for name in names]
    if assign == "device" and not speeds:
        raise FedpflError(f"{key}=device goes by clients' devices; use system=simulated")
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed))
    if assign == "device":
        order = torch.tensor(speeds, dtype=torch.float64).argsort(stable=True)
    ends = torch.tensor(shares or [1.0] * count, dtype=torch.float64).cumsum(0)
    ends = (clients * ends / ends[-1]).round()
    return torch.bucketize(order.argsort(), ends, right=True).tolist()
