"""Rounds in simulated time: who of a cohort takes part, and how long it lasts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedpfl.engine.keys import generator
from fedpfl.engine.round import (
    Outcome,
    RoundSetup,
    RoundTraffic,
    TurnLoad,
    count_traffic,
    empty_outcome,
    make_dry_call,
    play_round,
)
from fedpfl.engine.state import State
from fedpfl.engine.training.local import Local
from fedpfl.ground import tree
from fedpfl.ground.records import Record
from fedpfl.system import Device, System

TENTHS = 10
"""In how many parts `local.steps` are cut where a client has no time for all of them."""


@dataclass(frozen=True)
class Clock:
    """Hold the simulated devices of a run's clients.

    Attributes:
        devices: By client.
        amounts: Of stragglers, by client, the epochs or steps that they train.
    """

    system: System
    devices: Sequence[Device]
    amounts: Mapping[int, int]


@dataclass(frozen=True)
class ClientLoad:
    """Hold the FLOPs and traffic of a client in a round.

    Attributes:
        flops: By the settings that it may train with.
        traffic: By field of RoundTraffic.
    """

    flops: Mapping[Local, float]
    traffic: Mapping[str, int]


@dataclass(frozen=True)
class CohortForecast:
    """Forecast the fate of a cohort.

    Attributes:
        local_by_client: Who takes part, and how it trains.
        late: Who was not done in time, and is left out or cut short.
        waits: Whether the server waits until the deadline in vain.
        lost_traffic: To and from those who do not take part.
    """

    local_by_client: dict[int, Local]
    late: set[int]
    waits: bool
    lost_traffic: RoundTraffic


MeasureLoads = Callable[[list[int], tuple[Local, ...]], list[ClientLoad]]
"""Measures the FLOPs of some clients by each of some settings, and their traffic."""


def play_timed_round(
    clock: Clock, size: int, setup: RoundSetup, state: State, cohort: list[int]
) -> tuple[State, Outcome, Record]:
    """Play the next round with those of a cohort that come through. Takes ownership of `state`.

    Args:
        clock: The clients' devices.
        size: After how many uploads the server ends the round.
        setup: Everything but the state and the cohort.
        state: The state after the last round.
        cohort: The clients that were drawn.

    Returns:
        State and outcome as by `play_round`, and the round's columns: sim_seconds, flops, dropped
        (how many drawn clients take no part) and late.
    """
    # ---- Step 1: who comes through? A dry run tells what each client would compute and move.
    measure_loads = _dry_run(setup, state)
    forecast = forecast_cohort(
        clock=clock,
        size=size,
        cohort=cohort,
        local=setup.local,
        seed=setup.seed,
        round_number=state.round + 1,
        measure_loads=measure_loads,
    )

    # ---- Step 2: they alone play the round.
    if forecast.local_by_client:
        participants = sorted(forecast.local_by_client)
        state, outcome = play_round(setup, state, participants, forecast.local_by_client)
    else:
        metrics = setup.backend.run_one(make_dry_call(setup, state, cohort[:1])).metrics
        state = replace(state, round=state.round + 1)
        outcome = empty_outcome(metrics)

    # ---- Step 3: each turn lasts as long as its slowest client.
    seconds = math.fsum(max(_turn_seconds(clock, load)) for load in outcome.turn_loads)
    if forecast.waits:
        seconds = max(seconds, clock.system.deadline or 0.0)
    columns = {
        "sim_seconds": seconds,
        "flops": math.fsum(float(load.flops[:, 0].sum()) for load in outcome.turn_loads),
        "dropped": len(cohort) - len(forecast.local_by_client),
        "late": len(forecast.late),
    }
    traffic = outcome.traffic.plus(forecast.lost_traffic)
    return state, replace(outcome, traffic=traffic), columns


def _dry_run(setup: RoundSetup, state: State) -> MeasureLoads:
    """Return a function that finds out what clients would compute and move."""
    wants_stopping_loss = setup.stopping is not None and bool(state.stopping)

    def measure_loads(clients: list[int], flop_settings: tuple[Local, ...]) -> list[ClientLoad]:
        call = make_dry_call(setup, state, clients, flop_settings)
        participation = setup.backend.run_one(call)
        traffic = tree.fetch(count_traffic(participation, state, wants_stopping_loss))
        loads = []
        for row, flops in enumerate(participation.flops.tolist()):
            counts = tree.map(int, tree.take(traffic, row))
            loads.append(ClientLoad(dict(zip(flop_settings, flops, strict=True)), counts))
        return loads

    return measure_loads


def forecast_cohort(
    clock: Clock,
    size: int,
    cohort: Sequence[int],
    local: Local,
    seed: int,
    round_number: int,
    measure_loads: MeasureLoads,
) -> CohortForecast:
    """Decide who takes part in a round before training.

    Downloads and FLOPs are known by then. Uploads count as large as they are before the first step,
    which is exact unless training decides on their size.

    Args:
        clock: The clients' devices.
        size: After how many uploads the server ends the round.
        cohort: The clients that were drawn.
        local: How a client trains that is no straggler.
        seed: Of the run.
        round_number: Of the round that is played next.
        measure_loads: Is not called if no client can be late, or none is available.
    """
    # ---- Step 1: available clients, and lost uploads
    available, lost = _draw_availability(clock, cohort, seed, round_number)
    remaining = [client for client in available if client not in lost]
    full_local = {
        client: local.with_amount(clock.amounts.get(client, local.amount)) for client in available
    }
    is_nobody_late = clock.system.deadline is None and not lost and len(remaining) <= size
    if is_nobody_late or not available:
        return CohortForecast(
            local_by_client={client: full_local[client] for client in remaining},
            late=set(),
            waits=False,
            lost_traffic=RoundTraffic(),
        )

    # ---- Step 2: how much does each finish before the deadline?
    settings = _partial_settings(local, clock.system.late == "partial")
    settings |= dict.fromkeys(full_local.values())
    loads = dict(zip(available, measure_loads(available, tuple(settings)), strict=True))
    local_by_client: dict[int, Local] = {}
    seconds_by_client: dict[int, float] = {}
    for client in remaining:
        feasible = _feasible_local(clock, client, loads[client], full_local[client])
        if feasible is not None:
            local_by_client[client], seconds_by_client[client] = feasible

    # ---- Step 3: the server takes the first `size` uploads.
    arrivals = sorted(local_by_client, key=lambda client: (seconds_by_client[client], client))
    participants = arrivals[:size]
    late = {client for client in remaining if local_by_client.get(client) != full_local[client]}
    return CohortForecast(
        local_by_client={client: local_by_client[client] for client in participants},
        late=late | set(arrivals[size:]),
        waits=len(local_by_client) < min(size, len(remaining)),
        lost_traffic=_lost_traffic(loads, participants, lost),
    )


def _draw_availability(
    clock: Clock, cohort: Sequence[int], seed: int, round_number: int
) -> tuple[list[int], set[int]]:
    """Return the available clients in order, and the clients of lost uploads."""
    available = []
    lost = set()
    for client in sorted(cohort):
        # Both draws in any case: dropping out more often changes no client's availability.
        draws = torch.rand(2, generator=generator(seed, "system", round_number, client))
        availability_draw, dropout_draw = draws.tolist()
        if availability_draw < clock.devices[client].availability:
            available.append(client)
            if dropout_draw < clock.system.dropout:
                lost.add(client)
    return available, lost


def _feasible_local(
    clock: Clock, client: int, load: ClientLoad, full_local: Local
) -> tuple[Local, float] | None:
    """Return the most training that a client finishes in time, and its seconds.

    None if it finishes nothing.
    """
    system = clock.system
    feasible = [local for local in load.flops if local.amount <= full_local.amount]
    for local in sorted(feasible, key=lambda local: -local.amount):
        bits_down = float(load.traffic["bits_down"])
        bits_up = float(load.traffic["bits_up"])
        seconds = clock.devices[client].seconds(load.flops[local], bits_down, bits_up)
        if system.deadline is None or seconds <= system.deadline:
            return local, seconds
        if system.late == "drop":
            return None
    return None


def _lost_traffic(
    loads: Mapping[int, ClientLoad], participants: list[int], lost: set[int]
) -> RoundTraffic:
    """Add up the traffic of clients that do not take part; lost ones sent nothing."""
    total = RoundTraffic()
    for client, load in loads.items():
        if client in participants:
            continue
        counts = dict(load.traffic)
        if client in lost:
            counts |= {"values_up": 0, "bits_up": 0}
        total = total.plus(RoundTraffic(**counts))
    return total


def _turn_seconds(clock: Clock, load: TurnLoad) -> list[float]:
    """Return the seconds of each client of a turn."""
    costs = torch.stack([load.flops[:, 0], load.traffic["bits_down"], load.traffic["bits_up"]], 1)
    seconds = []
    for client, (flops, bits_down, bits_up) in zip(load.clients, costs.tolist(), strict=True):
        seconds.append(clock.devices[client].seconds(flops, bits_down, bits_up))
    return seconds


def _partial_settings(local: Local, is_partial: bool) -> dict[Local, None]:
    """List shorter trainings for late clients: whole epochs, or tenths of the steps."""
    if not is_partial:
        return {}
    full_amount = local.amount
    amounts: Iterable[int] = range(1, full_amount + 1)
    if not local.epochs:
        amounts = {-(-full_amount * part // TENTHS) for part in range(1, TENTHS + 1)}
    return {local.with_amount(amount): None for amount in amounts}
