"""Who is left out. Simulated time: operations and seconds by hand, who is dropped by a plain loop, and
no trace of who was. Early stopping: the loss that decides, who is drawn in place of others.
"""

import dataclasses
import math
from functools import partial

import pytest
import torch

from fedpfl.engine import (
    Clock,
    RoundSetup,
    Stopping,
    make_backend,
    make_initial_state,
    pick_cohort,
    play_round,
    play_timed_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import generator
from fedpfl.methods import METHODS, FedAvg, FedRep, FedSPU, FjORD, LocalOnly
from fedpfl.system import Device, System
from fedpfl.testing.toy import CLASSES
from tests.conftest import (
    BACKENDS,
    COHORTS,
    CPU,
    LOCAL,
    as_engine,
    assert_close,
    assert_same,
    hold_out_quarter,
    make_federation,
    record_states,
    state_trees,
    tiny,
)

FEDERATION = make_federation()
EVERYONE = list(range(FEDERATION.clients))
# Places x weights, times two
FORWARD = {"conv": 2 * 36 * 36, "fc": 2 * 36 * 12, "classifier": 2 * 12 * 5}
BITS = 32 * 549
EQUAL = [Device(1e6, 1e5, 1e4)] * FEDERATION.clients


def seen(client, local=LOCAL):
    """Samples that a client trains on in an epoch: a lone last one is left out."""
    count = len(FEDERATION.train[client])
    return count - (count % local.batch_size == 1)


def a_round(
    method, clock=None, cohort=COHORTS[0], size=5, engine="loop", local=LOCAL, paces=None, rounds=1
):
    """What `timed`, or without a clock `play`, gives of the last round."""
    backend, net = make_backend(as_engine(engine), tiny(), CPU), tiny()
    state = make_initial_state(method, net, FEDERATION.clients, CPU)
    for _ in range(rounds):
        setup, told = RoundSetup(backend, method, FEDERATION, local, 0), {}
        if clock:
            state, outcome, told = play_timed_round(clock, size, setup, state, cohort)
        else:
            state, outcome = play_round(setup, state, cohort, paces)
    return state, outcome, told


def test_frozen_layers_take_no_gradients():
    """FedRep's epochs on the head take the forward pass and the gradient of the head; those on the
    body the rest.
    """
    method = FedRep(head_epochs=2, body_epochs=1)
    clock = Clock(System(), EQUAL, {})
    *_, told = a_round(method, clock, [2])
    forward = sum(FORWARD.values())
    head = FORWARD["classifier"]
    body = FORWARD["conv"] + FORWARD["fc"]
    per_sample = 2 * (forward + head) + (forward + body + head + FORWARD["fc"])
    bits = 32 * (549 - 65)
    seconds = bits / 1e5 + bits / 1e4 + seen(2) * per_sample / 1e6
    assert told["sim_seconds"] == pytest.approx(seconds, rel=1e-12)
    assert told["flops"] == pytest.approx(seen(2) * per_sample, rel=1e-12)
    two = seen(2) * per_sample + seen(3) * per_sample
    assert a_round(method, clock, [2, 3])[2]["flops"] == pytest.approx(two, rel=1e-12)


def test_sub_models_take_the_operations_of_their_width():
    """As many as a dense network of the width; FedSPU's pass through what is frozen, and make
    gradients of a part.
    """

    def dense(width):
        """Return a forward pass's: 3 x 3 weights at 36 places, pooled to 9 places, and the head."""
        channels, hidden = (max(1, int(size * width + 1e-9)) for size in (4, 12))
        return 2 * (36 * 9 * channels + 9 * channels * hidden + hidden * CLASSES)

    for method, whole in ((FjORD(), False), (FedSPU(), True)):
        states = make_initial_state(method, tiny(), FEDERATION.clients, CPU)
        for client in (0, 4):
            width = float(states.client(client)["width"])
            outcome = a_round(method, None, [client], paces={})[1]
            spent = float(outcome.turn_loads[0].flops)
            used, moved = dense(1.0 if whole else width), dense(width)
            first = 2 * 36 * 36 if whole else 2 * 36 * 9 * max(1, int(4 * width + 1e-9))
            assert spent == pytest.approx(2 * seen(client) * (2 * used - first + moved), rel=1e-12)


def test_backends_count_the_same():
    devices = [Device(1e6 / (1 + client), 1e5, 1e4) for client in EVERYONE]
    clock = Clock(System(deadline=3.0, late="partial", over=1.4, dropout=0.2), devices, {2: 1})
    for method in (FedSPU(), METHODS["fedpurin"]()):
        one, other = (
            (told, outcome.cohort, outcome.traffic)
            for engine in BACKENDS
            for _, outcome, told in [a_round(method, clock, [*EVERYONE], 5, engine, rounds=2)]
        )
        assert one == other
        assert 0 < one[0]["late"] <= one[0]["dropped"]


def test_who_takes_part_by_a_plain_loop():
    torch.manual_seed(0)
    outcomes = set()
    for trial in range(15):
        draw = partial(torch.rand, 1, generator=generator("devices", trial))
        devices = [
            Device(*(10 ** (3 + 3 * float(draw())) for _ in range(3)), float(draw()) + 0.4)
            for _ in EVERYONE
        ]
        deadline = (None, 5.0, 40.0)[trial % 3]
        how = "partial" if deadline and trial % 5 < 2 else "drop"
        system = System(deadline=deadline, dropout=(0.0, 0.3)[trial % 2], late=how)
        amounts = {3: 1, 4: 1} if trial % 4 == 0 else {}
        cohort, size = COHORTS[trial % 3], (5, 3)[trial % 7 < 3]
        _, outcome, told = a_round(FedAvg(), Clock(system, devices, amounts), cohort, size)

        arrived, gone, late, up, down = [], 0, set(), 0, 0
        for client in cohort:
            one, two = torch.rand(2, generator=generator(0, "system", 1, client)).tolist()
            if one >= devices[client].availability:
                gone += 1
                continue
            down += 549
            if two < system.dropout:
                gone += 1
                continue
            up += 549
            epochs = full = amounts.get(client, 2)
            while epochs and _seconds(devices[client], client, epochs) > (deadline or math.inf):
                epochs = epochs - 1 if system.late == "partial" else 0
            if epochs < full:
                late.add(client)
            if epochs:
                arrived.append((_seconds(devices[client], client, epochs), client))
        missed = len(cohort) - gone - len(arrived)
        arrived.sort()
        late |= {client for _, client in arrived[size:]}
        kept = arrived[:size]
        lasts = max(
            [seconds for seconds, _ in kept]
            + ([deadline] if missed and len(arrived) < size else [0.0])
        )
        assert outcome.cohort == sorted(client for _, client in kept)
        assert (told["dropped"], told["late"]) == (len(cohort) - len(kept), len(late))
        assert told["sim_seconds"] == pytest.approx(lasts, rel=1e-9)
        assert (outcome.traffic.values_down, outcome.traffic.values_up) == (down, up)
        outcomes.add((bool(missed), len(arrived) > size, bool(gone), not kept))
    assert len(outcomes) > 6


def _seconds(device, client, epochs):
    whole = 3 * sum(FORWARD.values()) - FORWARD["conv"]
    return BITS / device.down + epochs * seen(client) * whole / device.speed + BITS / device.up


def test_late_clients_are_taken_with_what_they_have_done():
    """One that has time for half of its epochs trains as one that has half as many to train; so do
    stragglers.
    """
    deadline = _seconds(EQUAL[0], 2, 1.5)  # of 65 samples; of the others only 4 has more
    clock = Clock(System(deadline=deadline, late="partial"), EQUAL, {})
    state, outcome, told = a_round(FedAvg(), clock, [0, 2, 3])
    short = {2: dataclasses.replace(LOCAL, epochs=1)}
    assert_same(state_trees(state), state_trees(a_round(FedAvg(), None, [0, 2, 3], paces=short)[0]))
    assert (told["late"], told["dropped"], outcome.cohort) == (1, 0, [0, 2, 3])
    again = a_round(FedAvg(), Clock(System(), EQUAL, {2: 1}), [0, 2, 3])
    assert_same(state_trees(state), state_trees(again[0]))
    assert again[2]["late"] == 0
    # Where the late are dropped they do not train as little as a straggler instead.
    dropped = a_round(FedAvg(), Clock(System(deadline=deadline), EQUAL, {0: 1}), [0, 2, 3])
    assert dropped[1].cohort == [0, 3]
    without = a_round(FedAvg(), None, [0, 3], paces={0: short[2]})
    assert_same(state_trees(dropped[0]), state_trees(without[0]))


def test_clients_of_several_paces_keep_their_places():
    """They train in groups of one pace, here the first with the last."""
    cohort, short = [0, 2, 3, 4], dataclasses.replace(LOCAL, epochs=1)
    paces = {2: short, 3: short}
    together = a_round(FedAvg(), None, cohort, paces=paces)[1]
    for place, client in enumerate(cohort):
        alone = a_round(FedAvg(), None, [client], paces=paces)[1]
        assert_same(together.loss[place], alone.loss[0])
        assert_same(together.after.loss[place], alone.after.loss[0])


def test_a_round_that_nobody_ends_is_empty():
    system = System(profile="uniform", deadline=1e-3)
    state, outcome, told = a_round(METHODS["fedobp"](q=0.9), Clock(system, EQUAL, {}), COHORTS[0])
    fresh = make_initial_state(METHODS["fedobp"](q=0.9), tiny(), FEDERATION.clients, CPU)
    assert_same(state_trees(state), state_trees(fresh))
    assert (state.round, outcome.cohort, len(outcome.loss)) == (1, [], 0)
    assert told == {"sim_seconds": 1e-3, "flops": 0, "dropped": 5, "late": 5}
    assert {*outcome.metrics.values()} == {None}
    assert outcome.traffic.values_up == 5 * 549


# Early stopping of single clients


PLAIN = dataclasses.replace(LOCAL, momentum=0.0, weight_decay=0.0)


def test_the_held_out_loss_is_that_of_validation_samples_where_there_are_any(backend, federation):
    """Of test samples it is for the contract to say, of training for plain loops."""
    net, method, federation = tiny(norm=True), LocalOnly(), hold_out_quarter(federation)
    stopping = Stopping(early=True, lam=0.0)
    states = record_states(method, net, federation, COHORTS[:1], engine=backend, stopping=stopping)
    call = EvalCall(method, federation, states[1], COHORTS[0])
    counts = make_backend(as_engine(backend), net, CPU).evaluate_splits(call)["validation"]
    assert_close(states[1].stopping["last"][COHORTS[0]], counts.loss / counts.total.clamp(min=1))


def out(state, *clients: int):
    """A copy of the state in which these clients have stopped."""
    flags = torch.zeros(10, dtype=torch.bool)
    flags[list(clients)] = True
    return dataclasses.replace(state, stopping={**state.stopping, "stopped": flags})


def test_others_take_the_place_of_those_who_have_stopped(net):
    """Also where those who were planned have not: all who are left are drawn from, by seed and
    round alone.
    """
    state = make_initial_state(FedAvg(), net, 10, CPU, stopping=True)
    for gone in ([0, 1], [0, 1, 2, 3, 4, 5], EVERYONE[:-1], EVERYONE):
        drawn = pick_cohort(out(state, *gone), [5, 6, 7], 1)
        assert len(drawn) == min(3, 10 - len(gone))
        assert drawn == sorted(set(drawn) - set(gone))
    two_out = out(state, 0, 1)
    assert pick_cohort(two_out, [5, 6, 7], 1) == pick_cohort(two_out, [2, 3, 4], 1)
    rounds = (dataclasses.replace(two_out, round=number) for number in (0, 7))
    draws = [[pick_cohort(now, [5, 6, 7], seed) for seed in range(20)] for now in rounds]
    assert draws[0] != draws[1]
    assert len({*map(tuple, draws[0])}) > 5
