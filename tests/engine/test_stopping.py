"""Early stopping of single clients: the loss that decides, who is drawn, when a run ends, what is
sent.
"""

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from fedpfl.engine import (
    RoundSetup,
    Stopping,
    make_backend,
    make_initial_state,
    pick_cohort,
    play_round,
)
from fedpfl.engine.calls import EvalCall
from fedpfl.engine.keys import generator
from fedpfl.methods import Ditto, FedAvg, LocalOnly, Turn
from tests.conftest import (
    COHORTS,
    CPU,
    LOCAL,
    LOOP,
    Tiny,
    as_engine,
    assert_close,
    record_states,
    tiny,
)

EVERYONE = list(range(10))
PLAIN = dataclasses.replace(LOCAL, momentum=0.0, weight_decay=0.0)


def stopped(state) -> list[int]:
    return state.stopping["stopped"].nonzero().flatten().tolist()


def losses_by_hand(
    federation, state, client: int, norm: bool, held: torch.Tensor
) -> tuple[float, float]:
    """FedAvg's local training in plain PyTorch: the mean over all samples it passes on the way, and
    over the held-out samples for the trained model, which uses the statistics that training has
    left.
    """
    module = Tiny(norm)
    module.load_state_dict(state.server | state.server_buffers["main"])
    optimizer = torch.optim.SGD(
        module.parameters(), LOCAL.lr, momentum=LOCAL.momentum, weight_decay=LOCAL.weight_decay
    )

    def samples(index):
        return (federation.x[index].float() / 255 - 0.4) / 0.3, federation.y[index]

    x, y = samples(federation.train[client])
    seen = []
    for epoch in range(LOCAL.epochs):
        order = torch.randperm(
            len(y), generator=generator(0, "train", state.round + 1, client, "main", epoch)
        )
        for batch in order.split(LOCAL.batch_size):
            if len(batch) > 1:
                loss = F.cross_entropy(module(x[batch]), y[batch])
                seen += [loss.item()] * len(batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    x, y = samples(held)
    trained = F.cross_entropy(module.eval()(x), y).item() if len(y) else 0.0
    return sum(seen) / max(1, len(seen)), trained


@pytest.mark.parametrize(("norm", "split"), [(True, "test"), (False, "validation")])
def test_the_loss_is_that_of_training_and_of_held_out_samples(split, norm, backend, federation):
    """On the test split unless samples are held out for it. Clients 5 and 9 have one or no step or
    test sample.
    """
    if split == "validation":
        federation = dataclasses.replace(
            federation, validation=tuple(own[::3] for own in federation.train)
        )
    stopping = Stopping(early=True, lam=0.3)
    states = record_states(
        FedAvg(), tiny(norm), federation, COHORTS[:2], engine=backend, stopping=stopping
    )
    last = [torch.finfo(torch.float32).max] * 10
    gone = [False] * 10
    for t, cohort in enumerate(COHORTS[:2]):
        for client in cohort:
            held = getattr(federation, split)[client]
            train, trained = losses_by_hand(federation, states[t], client, norm, held)
            loss = 0.3 * train + 0.7 * trained if len(held) else train  # client 9 holds nothing out
            last[client], gone[client] = loss, loss > last[client]
        assert states[t + 1].stopping["last"].tolist() == pytest.approx(last, rel=1e-4, abs=1e-5)
        assert states[t + 1].stopping["stopped"].tolist() == gone


@pytest.mark.parametrize("method", [Ditto(lam=0.5), LocalOnly()], ids=["ditto", "local-only"])
def test_the_held_out_loss_is_that_of_the_model_by_which_the_client_is_evaluated(
    method, backend, federation
):
    net = tiny(norm=True)
    stopping = Stopping(early=True, lam=0.0)
    states = record_states(method, net, federation, COHORTS[:1], engine=backend, stopping=stopping)
    counts = make_backend(as_engine(backend), net, CPU).evaluate(
        EvalCall(method, federation, states[1], COHORTS[0])
    )
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
    """Also where those who were planned have not: the draw is among all who are left."""
    state = make_initial_state(FedAvg(), net, 10, CPU, stopping=True)
    for gone in ([0, 1], [0, 1, 2, 3, 4, 5], EVERYONE[:-1]):
        drawn = pick_cohort(out(state, *gone), [5, 6, 7], 1)
        assert len(drawn) == min(3, 10 - len(gone))
        assert drawn == sorted(set(drawn) - set(gone))
    assert pick_cohort(out(state, *EVERYONE), [5, 6, 7], 1) == []


def test_the_draw_among_those_left_depends_on_seed_and_round_alone(net):
    state = out(make_initial_state(FedAvg(), net, 10, CPU, stopping=True), 0, 1)
    draws = {tuple(pick_cohort(state, [5, 6, 7], seed)) for seed in range(20)}
    assert pick_cohort(state, [5, 6, 7], 1) == pick_cohort(state, [2, 3, 4], 1)
    assert len(draws) > 5
    assert all(len(set(draw)) == 3 and not {0, 1} & set(draw) for draw in draws)
    later = dataclasses.replace(state, round=7)
    assert any(
        pick_cohort(state, [5, 6, 7], s) != pick_cohort(later, [5, 6, 7], s) for s in range(5)
    )


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
    stopping, planned = Stopping(early=True), [0, 2]
    _, plain = play_round(
        RoundSetup(make_backend(LOOP, net, CPU), Surveyor(), federation, LOCAL, 0),
        copy.deepcopy(state),
        planned,
    )
    state, outcome = play_round(
        RoundSetup(
            make_backend(LOOP, net, CPU), Surveyor(), federation, LOCAL, 0, stopping=stopping
        ),
        state,
        planned,
    )
    assert stopped(state) == planned
    assert outcome.traffic == plain.traffic._replace(bits_up=plain.traffic.bits_up + 2)


@pytest.mark.parametrize("lam", [-0.1, 1.5, float("nan")])
def test_the_share_of_training_is_a_share(lam):
    with pytest.raises(ValueError, match="lam must be between 0 and 1"):
        Stopping(early=True, lam=lam)
