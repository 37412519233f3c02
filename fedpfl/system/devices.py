"""Clients' devices: drawn from a profile, or read from a file."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np

from fedpfl.ground.casting import Checked
from fedpfl.ground.errors import FedpflError, choices_text, error_text
from fedpfl.ground.ranges import Above, AtLeast, AtMost, Below, Between

DEVICES, STRAGGLERS = 3, 4  # tell the streams of random numbers


class Device(NamedTuple):
    """Hold what a client has: operations a second, bits a second to it and from it, the chance that
    it is there.
    """

    speed: float
    down: float
    up: float
    availability: float = 1.0

    def seconds(self, operations: float, bits_down: float, bits_up: float) -> float:
        """Return how long a participation takes: it receives, then computes, then sends."""
        return bits_down / self.down + operations / self.speed + bits_up / self.up


class Profile(NamedTuple):
    """Hold medians over clients and the standard deviation of the logarithms of speed and of
    bandwidth.
    """

    device: Device
    spread: float


PROFILES = {
    "uniform": Profile(Device(1e9, 1e7, 1e7), 0.0),
    "edge": Profile(Device(2e10, 5e7, 2e7, 0.99), 0.5),
    "phones": Profile(Device(5e9, 2e7, 5e6, 0.9), 1.0),
}


@dataclass(frozen=True)
class System(Checked):
    """Say what devices clients have, and what becomes of slow ones; see conf/system/simulated.yaml."""

    profile: str = "phones"
    speed: Annotated[float, Above(0)] | None = None
    down: Annotated[float, Above(0)] | None = None
    up: Annotated[float, Above(0)] | None = None
    spread: Annotated[float, AtLeast(0), AtMost(5)] | None = None
    availability: Annotated[float, Above(0), AtMost(1)] | None = None
    deadline: Annotated[float, Above(0)] | None = None
    late: Literal["drop", "partial"] = "drop"
    over: Annotated[float, AtLeast(1)] = 1.0
    dropout: Annotated[float, AtLeast(0), Below(1)] = 0.0
    draw_stragglers: Annotated[float, Between(0, 1)] = 0.0
    least: Annotated[int, AtLeast(1)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        known = self.profile in PROFILES or self.profile.endswith(".csv")
        self.check(
            known,
            "profile",
            f"one of {', '.join(PROFILES)}, or the name of a file that ends in .csv",
        )
        for name in ("speed", "down", "up", "spread", "availability"):
            rule = getattr(self, name) is None or not self.file
            self.check(rule, name, f"null beside system.profile={self.profile}, which has it")
        self.check(
            self.late == "drop" or self.deadline is not None,
            "late",
            "drop where system.deadline is null",
        )

    @property
    def file(self) -> bool:
        """Return whether the profile is a file."""
        return self.profile not in PROFILES


def no_system() -> None:
    """Simulate nothing."""


SYSTEMS = {"none": no_system, "simulated": System}


def draw_devices(system: System, numbers: Sequence[int], seed: int, folder: Path) -> list[Device]:
    """Return the devices of the clients with these numbers in the partition; what others have
    changes nothing.

    Logarithms of speed and of bandwidth are normal, independent of each other; both ways share one
    draw.
    folder: where a file is looked for first. Raises FedpflError.
    """
    if system.file:
        place = folder / system.profile
        table = read_devices(place if place.exists() else Path(system.profile).expanduser())
        if missing := sorted({*numbers} - {*table}):
            raise FedpflError(
                f"system.profile: {system.profile} has no row for client {missing[0]}; add it"
            )
        return [table[number] for number in numbers]
    usual, spread = PROFILES[system.profile]
    own = {name: value for name in Device._fields if (value := getattr(system, name)) is not None}
    usual, spread = usual._replace(**own), spread if system.spread is None else system.spread
    found = []
    for number in numbers:
        one, two = np.exp(
            spread * np.random.default_rng([seed, DEVICES, number]).standard_normal(2)
        ).tolist()
        found.append(
            usual._replace(speed=usual.speed * one, down=usual.down * two, up=usual.up * two)
        )
    return found


def read_devices(path: Path) -> dict[int, Device]:
    """Read the devices of a CSV file with columns client, speed, down, up and perhaps availability,
    by client.

    Raises FedpflError, about the first row that is wrong.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            columns = rows.fieldnames or ()
            for name in ("client", *Device._fields[:3]):
                if name not in columns:
                    raise FedpflError(
                        f"system.profile: {path} lacks the column {name}; its first line names columns"
                    )
            for name in columns:
                if name not in ("client", *Device._fields):
                    known = choices_text(("client", *Device._fields), name)
                    raise FedpflError(f"system.profile: {path} has a column that must be {known}")
            found: dict[int, Device] = {}
            for row in rows:
                client, device = _row(row, f"system.profile: {path}, line {rows.line_num}")
                if client in found:
                    raise FedpflError(
                        f"system.profile: {path}, line {rows.line_num}: client {client} is there twice"
                    )
                found[client] = device
            return found
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedpflError(f"system.profile: {path} cannot be read: {error_text(error)}") from None


def _row(row: dict[str, str | None], place: str) -> tuple[int, Device]:
    if None in row or None in row.values():
        raise FedpflError(f"{place}: must have as many cells as the first line has")
    values = {}
    for name, text in row.items():
        try:
            value = float(text or "")
        except ValueError:
            value = math.nan
        whole = name == "client"
        top = 1 if name == "availability" else math.inf
        good = (
            value >= 0 and value.is_integer()
            if whole
            else 0 < value <= top and math.isfinite(value)
        )
        if not good:
            wanted = (
                "a whole number, 0 or more"
                if whole
                else "above 0" + (" and at most 1" if top == 1 else "")
            )
            raise FedpflError(f"{place}: {name} must be {wanted}, got {text!r}")
        values[name] = value
    return int(values.pop("client")), Device(**values)


def draw_stragglers(system: System, clients: int, amount: int, seed: int) -> dict[int, int]:
    """Draw who trains less than `amount` epochs, and how much: uniform from `least` to below it,
    for good.
    """
    rng = np.random.default_rng([seed, STRAGGLERS])
    chosen = rng.permutation(clients)[: int(round(system.stragglers * clients, 9))].tolist()
    return {client: int(rng.integers(system.least, amount)) for client in sorted(chosen)}
