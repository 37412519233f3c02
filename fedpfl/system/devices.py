"""Clients' devices: drawn from a profile, or read from a file."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedpfl.ground.casting import Checked
from fedpfl.ground.checks import describe_fault
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.ranges import (
    AtLeast,
    AtMost,
    Count,
    Positive,
    PositiveProportion,
    Proportion,
    ProportionBelowOne,
)

DEVICE_STREAM = 3  # numbers of the streams of random numbers
STRAGGLER_STREAM = 4


class Device(NamedTuple):
    """Hold a client's device.

    Attributes:
        speed: Operations per second.
        down: Bits per second to the client.
        up: Bits per second from the client.
        availability: The chance that the client is there when it is drawn.
    """

    speed: float
    down: float
    up: float
    availability: float = 1.0

    def seconds(self, operations: float, bits_down: float, bits_up: float) -> float:
        """Return the seconds of a participation: receive, compute, send."""
        # Bits over bits a second, operations over operations a second: all in seconds.
        return bits_down / self.down + operations / self.speed + bits_up / self.up


class Profile(NamedTuple):
    """Hold the distribution of devices.

    Attributes:
        device: The medians over clients.
        spread: The standard deviation of the logarithms of speed and of bandwidth.
    """

    device: Device
    spread: float


PROFILES = {
    # Medians in operations and bits a second: a phone sends more slowly than it receives.
    "uniform": Profile(
        Device(speed=1e9, down=1e7, up=1e7),
        spread=0.0,
    ),
    "edge": Profile(
        Device(speed=2e10, down=5e7, up=2e7, availability=0.99),
        spread=0.5,
    ),
    "phones": Profile(
        Device(speed=5e9, down=2e7, up=5e6, availability=0.9),
        spread=1.0,
    ),
}


@dataclass(frozen=True)
class System(Checked):
    """Describe clients' devices and the handling of slow ones; see conf/system/simulated.yaml."""

    profile: str = "phones"
    speed: Positive | None = None
    down: Positive | None = None
    up: Positive | None = None
    spread: Annotated[float, AtLeast(0), AtMost(5)] | None = None
    availability: PositiveProportion | None = None
    deadline: Positive | None = None
    late: Literal["drop", "partial"] = "drop"
    over: Annotated[float, AtLeast(1)] = 1.0
    dropout: ProportionBelowOne = 0.0
    stragglers: Proportion = 0.0
    least: Count = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        is_profile = self.profile in PROFILES or self.profile.endswith(".csv")
        profiles_text = f"one of {', '.join(PROFILES)}, or the name of a file that ends in .csv"
        self.check(is_profile, "profile", profiles_text)
        for name in ("speed", "down", "up", "spread", "availability"):
            is_allowed = getattr(self, name) is None or not self.file
            self.check(is_allowed, name, f"null beside system.profile={self.profile}, which has it")
        is_late_allowed = self.late == "drop" or self.deadline is not None
        self.check(is_late_allowed, "late", "drop where system.deadline is null")

    @property
    def file(self) -> bool:
        """Tell profiles that are files."""
        return self.profile not in PROFILES


def no_system() -> None:
    """Simulate nothing."""


SYSTEMS = {"none": no_system, "simulated": System}


def draw_devices(system: System, numbers: Sequence[int], seed: int, folder: Path) -> list[Device]:
    """Return the devices of clients; each depends on the seed and the client's number alone.

    Logarithms of speed and of bandwidth are normal and independent of each other; both directions
    share one draw.

    Args:
        system: The profile, and values in place of its medians and spread.
        numbers: The clients' numbers in the partition.
        seed: The run's seed.
        folder: Where a profile's file is looked for first.

    Raises:
        FedpflError: The file cannot be read, or has no row for a client.
    """
    if system.file:
        path = folder / system.profile
        if not path.exists():
            # Not among the data: where the command was given.
            path = Path(system.profile).expanduser()
        device_of = read_devices(path)
        if missing := sorted({*numbers} - {*device_of}):
            raise FedpflError(
                f"system.profile: {system.profile} has no row for client {missing[0]}; add it"
            )
        return [device_of[number] for number in numbers]

    # ---- The profile, with the user's values in place of the defaults.
    median, deviation = PROFILES[system.profile]
    for name in Device._fields:
        value = getattr(system, name)
        if value is not None:
            median = median._replace(**{name: value})
    if system.spread is not None:
        deviation = system.spread

    # ---- Each client draws from a generator for itself, so that no other decides its device.
    devices = []
    for number in numbers:
        rng = np.random.default_rng([seed, DEVICE_STREAM, number])
        # Two draws for any deviation: `spread` scales devices and does not deal them anew.
        speed_factor, bandwidth_factor = np.exp(deviation * rng.standard_normal(2)).tolist()
        device = median._replace(
            speed=median.speed * speed_factor,
            down=median.down * bandwidth_factor,
            up=median.up * bandwidth_factor,
        )
        devices.append(device)
    return devices


class _DeviceRow(BaseModel):
    """A row of a file of devices."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    client: int = Field(ge=0)
    speed: float = Field(gt=0)
    down: float = Field(gt=0)
    up: float = Field(gt=0)
    availability: float = Field(1.0, gt=0, le=1)


def read_devices(path: Path) -> dict[int, Device]:
    """Read a CSV file of devices, by client.

    Its columns are client, speed, down, up and perhaps availability. Raises FedpflError about the
    first row that is wrong.
    """
    devices: dict[int, Device] = {}
    try:
        # Spreadsheets put a byte order mark before the first column's name.
        with path.open(newline="", encoding="utf-8-sig") as file:
            for number, cells in enumerate(csv.DictReader(file), start=2):
                place = f"system.profile: {path}, line {number}"
                row = _DeviceRow.model_validate(cells).model_dump()
                client = row.pop("client")
                if client in devices:
                    raise FedpflError(f"{place}: client {client} is there twice")
                devices[client] = Device(**row)
    except ValidationError as error:
        raise FedpflError(f"{place}: {describe_fault(error)}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedpflError(f"system.profile: {path} cannot be read: {error_text(error)}") from None
    return devices


def draw_stragglers(system: System, clients: int, amount: int, seed: int) -> dict[int, int]:
    """Draw the clients that always train less, and their epochs, from `least` to below `amount`."""
    rng = np.random.default_rng([seed, STRAGGLER_STREAM])
    # A product like 28.999999999999996 counts as 29.
    count = int(round(system.stragglers * clients, 9))
    straggling_clients = sorted(rng.permutation(clients)[:count].tolist())
    return {client: int(rng.integers(system.least, amount)) for client in straggling_clients}
