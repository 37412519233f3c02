"""Rounds in simulated time: who of a cohort takes part, and how long it lasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedpfl.data.federation import Federation
from fedpfl.engine.backends.backend import Backend
from fedpfl.engine.calls import Participation, TrainCall
from fedpfl.engine.keys import Draws, generator
from fedpfl.engine.round import (
    Outcome,
    RoundTraffic,
    TurnLoad,
    count_traffic,
    empty_outcome,
    play_round,
)
from fedpfl.engine.state import State
from fedpfl.engine.stopping import Stopping
from fedpfl.engine.training.sgd import Local
from fedpfl.ground import tree
from fedpfl.methods import Method, Turn
from fedpfl.system import Device, System

TENTHS = 10
"""In how many parts `local.steps` are cut where a client has no time for all of them."""


@dataclass(frozen=True)
class Clock:
    """Hold what a run's clients have, by number: a device, and of stragglers the epochs or steps
    that they train.
    """

    system: System
    devices: Sequence[Device]
    amounts: Mapping[int, int]


class CohortForecast(NamedTuple):
    """Tell what becomes of a cohort.

    takes: who takes part, and by which values it trains. late: who was not done in time: left out,
    or cut short.
    waits: whether the server waits until the deadline, in vain. sent: to and from those who do not
    take part.
    """

    takes: dict[int, Local]
    late: set[int]
    waits: bool
    traffic: RoundTraffic


def play_timed_round(
    clock: Clock,
    size: int,
    backend: Backend,
    method: Method,
    federation: Federation,
    state: State,
    cohort: list[int],
    local: Local,
    seed: int,
    stopping: Stopping | None = None,
) -> tuple[State, Outcome, dict[str, Any]]:
    """Play the next round as `play`, with those of `cohort` that come through; `size` of them end
    it.

    Returns also the round's columns: sim_seconds, dropped (how many drawn clients take no part) and
    late.
    """
    number, stops = state.round + 1, stopping is not None and bool(state.stopping)
    draws = Draws(seed, "train", number)

    def dry(clients: list[int], counted: tuple[Local, ...]) -> Participation:
        """Take clients through all but the training."""
        turn = Turn(clients, trains=False)
        return backend.participate(
            TrainCall(method, federation, state, clients, local, draws, False, turn, None, counted)
        )

    def load(
        clients: list[int], counted: tuple[Local, ...]
    ) -> tuple[list[dict[Local, float]], dict[str, Tensor]]:
        part = dry(clients, counted)
        moved = tree.fetch(count_traffic(part, state, len(clients), stops))
        return [dict(zip(counted, row, strict=True)) for row in part.flops.tolist()], moved

    fates = forecast_cohort(clock, size, cohort, local, seed, number, load)
    if fates.takes:
        paces = {client: own for client, own in fates.takes.items() if own != local}
        about = backend, method, federation, state, sorted(fates.takes), local, seed, stopping
        state, outcome = play_round(*about, paces)
    else:
        state, outcome = replace(state, round=number), empty_outcome(dry(cohort[:1], ()).metrics)
    seconds = math.fsum(max(_seconds(clock, one), default=0.0) for one in outcome.turn_loads)
    if fates.waits:
        seconds = max(seconds, clock.system.deadline or 0.0)
    columns = {
        "sim_seconds": seconds,
        "dropped": len(cohort) - len(fates.takes),
        "late": len(fates.late),
    }
    return state, replace(outcome, traffic=outcome.traffic + fates.traffic), columns


def forecast_cohort(
    clock: Clock,
    size: int,
    cohort: Sequence[int],
    local: Local,
    seed: int,
    number: int,
    load: Callable[
        [list[int], tuple[Local, ...]], tuple[list[dict[Local, float]], dict[str, Tensor]]
    ],
) -> CohortForecast:
    """Decide who takes part in round `number`, before anybody trains.

    load: tells of clients the operations by each of some values, and what they move. Downloads and
    operations are known by then. Uploads count as large as they are before the first step, which is
    what they are but where training decides what is sent. Nothing is asked where nobody can be
    late.
    """
    system = clock.system
    luck = {
        client: torch.rand(2, generator=generator(seed, "system", number, client)).tolist()
        for client in cohort
    }
    there = [
        client for client in sorted(cohort) if luck[client][0] < clock.devices[client].availability
    ]
    lost = {client for client in there if luck[client][1] < system.dropout}
    left = [client for client in there if client not in lost]
    whole = {client: local.less(clock.amounts.get(client, local.amount)) for client in there}
    if system.deadline is None and not lost and len(left) <= size:
        return CohortForecast(
            {client: whole[client] for client in left}, set(), False, RoundTraffic()
        )

    counted = _cuts(local, system.late == "partial") | dict.fromkeys(whole.values())
    operations, moved = load(there, tuple(counted))
    ends: dict[int, tuple[float, int]] = {}
    takes: dict[int, Local] = {}
    for place, client in enumerate(there):
        down, up = (float(moved[name][place]) for name in ("bits_down", "bits_up"))
        fits = [own for own in counted if own.amount <= whole[client].amount]
        for own in sorted(fits, key=lambda own: -own.amount) if client not in lost else ():
            seconds = clock.devices[client].seconds(operations[place][own], down, up)
            if system.deadline is None or seconds <= system.deadline:
                takes[client], ends[client] = own, (seconds, client)
                break
            if system.late == "drop":
                break
    late = {client for client in left if takes.get(client) != whole[client]}
    waits = len(takes) < min(size, len(left))
    first = sorted(takes, key=ends.__getitem__)[:size]
    sent = RoundTraffic()
    for place, client in enumerate(there):
        if client not in first:
            told = {name: int(moved[name][place]) for name in RoundTraffic._fields}
            sent += RoundTraffic(
                **told | ({"values_up": 0, "bits_up": 0} if client in lost else {})
            )
    return CohortForecast(
        {client: takes[client] for client in first}, late | {*takes} - {*first}, waits, sent
    )


def _seconds(clock: Clock, load: TurnLoad) -> list[float]:
    """Return how long each client of a turn takes."""
    own = load.operations[:, 0], load.moved["bits_down"], load.moved["bits_up"]
    counts = zip(load.clients, *(each.tolist() for each in own), strict=True)
    return [clock.devices[client].seconds(*each) for client, *each in counts]


def _cuts(local: Local, partial: bool) -> dict[Local, None]:
    """Return the values by which a client that has less time might train: whole epochs, or tenths
    of the steps.
    """
    most = local.amount
    amounts = (
        range(1, most + 1)
        if local.epochs
        else {-(-most * part // TENTHS) for part in range(1, TENTHS + 1)}
    )
    return {local.less(amount): None for amount in (amounts if partial else ())}
