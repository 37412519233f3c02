"""Early stopping of single clients: the loss that decides, who is drawn, when a run ends, what is
sent.
"""

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch

from fedpfl.engine import (
    RoundSetup,
    Stopping,
    make_backend,
    make_initial_state,
    pick_cohort,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.methods import FedAvg, LocalOnly, Turn
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    LOOP,
    as_engine,
    assert_close,
    hold_out_quarter,
    record_states,
    tiny,
)

EVERYONE = list(range(10))
PLAIN = dataclasses.replace(LOCAL, momentum=0.0, weight_decay=0.0)


def stopped(state) -> list[int]:
    return state.stopping["stopped"].nonzero().flatten().tolist()


def test_the_held_out_loss_is_that_of_validation_samples_where_there_are_any(backend, federation):
    """Of test samples it is for the contract to say, of training for FedSPU's plain loops."""
    net, method, federation = tiny(norm=True), LocalOnly(), hold_out_quarter(federation)
    stopping = Stopping(early=True, lam=0.0)
    states = record_states(method, net, federation, COHORTS[:1], engine=backend, stopping=stopping)
    call = EvalCall(method, federation, states[1], COHORTS[0])
    counts = make_backend(as_engine(backend), net, CPU).evaluate_splits(call)["validation"]
    assert_close(states[1].stopping["last"][COHORTS[0]], counts.loss / counts.total.clamp(min=1))


def test_a_constant_loss_never_stops(backend, net, federation):
    """Of models that do not move, one client a round: the mean of one upload is that upload to the
    last bit.
    """
    planned = [[0], [9], [0], [6], [0], [6]]
    local, stopping = dataclasses.replace(PLAIN, lr=1e-30), Stopping(early=True, lam=0.0)
    states = record_states(
        FedAvg(), net, federation, planned, engine=backend, local=local, stopping=stopping
    )
    assert len(states) == 7
    assert stopped(states[-1]) == []
    assert (states[-1].stopping["last"] < 10).nonzero().flatten().tolist() == [0, 6, 9]


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


@dataclass(frozen=True)
class Surveyor(FedAvg):
    """Asks everybody in every round, also those who have stopped."""

    def turns(self, played, cohort, clients, generator):
        return [
            Turn(list(range(clients)), survey=lambda server, clients, uploads: (server, clients)),
            Turn(cohort),
        ]


def test_a_survey_is_no_participation_that_could_stop_a_client(net, federation):
    state = make_initial_state(Surveyor(), net, 10, CPU, stopping=True)
    state.stopping["last"].fill_(-1.0)
    setup = RoundSetup(make_backend(LOOP, net, CPU), Surveyor(), federation, LOCAL, 0)
    stopping = dataclasses.replace(setup, stopping=Stopping(early=True))
    planned = [0, 2]
    _, plain = play_round(setup, copy.deepcopy(state), planned)
    state, outcome = play_round(stopping, state, planned)
    assert stopped(state) == planned
    assert outcome.traffic == plain.traffic._replace(bits_up=plain.traffic.bits_up + 2)


@pytest.mark.parametrize("lam", [-0.1, 1.5, float("nan")])
def test_the_share_of_training_is_a_share(lam):
    with pytest.raises(ValueError, match="lam must be between 0 and 1"):
        Stopping(early=True, lam=lam)
