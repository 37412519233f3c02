"""Phases in which some clients have nothing that moves, statistics that hold still, clipped
gradients.
"""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from fedpfl.engine.training.sgd import clip_gradients
from fedpfl.ground import tree
from fedpfl.methods import FedAvg, Phase
from fedpfl.models import Net
from tests.conftest import (
    HEAD,
    LOCAL,
    assert_close,
    assert_same,
    client_row,
    keep_quick,
    participate,
    record_rounds,
    record_states,
    take_part,
    tiny,
)

EVERYONE = list(range(10))


@dataclass(frozen=True)
class Sitting(FedAvg):
    """In the second of three phases nothing of a client of even number moves (or of `everyone`, or
    of `nobody`).
    """

    who: str = "even"
    element_wise: bool = False

    def init(self, params, parts):
        return params, {"seen": torch.zeros(())}

    def phases(self, server, client, params, epochs):
        odd = client["number"] % 2 == 1
        moves = {"even": odd, "everyone": odd & False, "nobody": odd | True}[self.who]
        parts = {
            name: torch.arange(leaf.numel()).view(leaf.shape) % 3 > 0
            for name, leaf in params.items()
        }
        mask = tree.map(
            lambda leaf: (leaf if self.element_wise else torch.ones_like(leaf)) & moves, parts
        )
        second = Phase(
            1, {**mask, "conv.bias": False}, "other", self._doubled, after_gradient=self._observe
        )
        return [
            Phase(1, after_gradient=self._observe),
            second,
            Phase(1, after_gradient=self._observe),
        ]

    def _doubled(self, server, client, net, params, batch):
        return 2 * self.loss(server, client, net, params, batch)

    def _observe(self, server, client, params, grads, batch, loss, kept):
        return {**client, "seen": client["seen"] + loss}


@dataclass(frozen=True)
class Shorter(Sitting):
    """The same without that phase."""

    def phases(self, server, client, params, epochs):
        return [Phase(2, after_gradient=self._observe)]


@pytest.mark.parametrize(("norm", "element_wise"), keep_quick([(True, False), (False, True)], 2))
def test_a_phase_in_which_nothing_moves_leaves_no_trace(backend, federation, norm, element_wise):
    """Neither in losses and statistics of batch normalisation, nor in what is seen at its
    gradients.
    """
    net = tiny(norm)
    some, all_, none, shorter = (
        take_part(m, net, federation, backend)
        for m in (
            *(Sitting(who, element_wise) for who in ("even", "everyone", "nobody")),
            Shorter(),
        )
    )
    same = assert_same if backend == "loop" else assert_close
    same(all_.uploads, shorter.uploads)
    for client in EVERYONE:
        sitting = client % 2 == 0
        for part in ("uploads", "client_states", "buffers", "loss", "after"):
            own, like = getattr(some, part), getattr(shorter if sitting else none, part)
            same(tree.take(own, client), tree.take(like, client))
    assert not torch.equal(some.uploads["fc.weight"][0], none.uploads["fc.weight"][0])
    assert not torch.equal(some.uploads["fc.weight"][1], shorter.uploads["fc.weight"][1])


@dataclass(frozen=True)
class Half(FedAvg):
    """Trains the body alone, and adds up the gradients that it is shown."""

    def init(self, params, parts):
        return params, {"gradient": tree.full_like(params, 0.0)}

    def phases(self, server, client, params, epochs):
        mask = {name: name not in HEAD for name in params}
        return [Phase(epochs, mask, after_gradient=self._add)]

    def _add(self, server, client, params, grads, batch, loss, kept):
        return {**client, "gradient": tree.map(torch.add, client["gradient"], grads)}


def test_gradients_of_what_does_not_move_are_zero(net, federation, backend):
    part = take_part(Half(), net, federation, backend, clients=[0, 2])
    for name, leaf in part.client_states["gradient"].items():
        assert bool((leaf == 0).all()) == (name in HEAD)


@dataclass(frozen=True)
class Careful(FedAvg):
    """A client moves the statistics of one channel alone, that of its own number (clients 0 to 3),
    or none.
    """

    policy: str = "local"

    def buffers(self):
        return {"main": self.policy}

    def updated_buffers(self, server, client):
        here = torch.arange(4) == client["number"]
        counter = torch.ones((), dtype=torch.bool)
        return {
            "main": {
                "norm.running_mean": here,
                "norm.running_var": here,
                "norm.num_batches_tracked": counter,
            }
        }


def test_statistics_that_are_not_updated_hold_still(backend, federation):
    net = tiny(norm=True)
    start, end = (
        record_states(Careful(), net, federation, [EVERYONE], engine=backend)[i] for i in (0, -1)
    )
    for name in ("norm.running_mean", "norm.running_var"):
        before, after = start.client_buffers["main"][name], end.client_buffers["main"][name]
        for client in EVERYONE:
            here = torch.arange(4) == client
            assert torch.equal(after[client][~here], before[client][~here])
            assert client > 3 or not torch.equal(after[client][here], before[client][here])


def test_statistics_at_the_server_are_averaged_over_those_who_updated_them(backend, federation):
    net, cohort, method = tiny(norm=True), [0, 1, 5], Careful("aggregate")
    states, (outcome,) = record_rounds(method, net, federation, [cohort], engine=backend)
    part = participate(method, net, federation, states[0], cohort, engine=backend)
    for name in ("norm.running_mean", "norm.running_var"):
        old, new = states[0].server_buffers["main"][name], states[1].server_buffers["main"][name]
        expected = old.clone()
        expected[0], expected[1] = (
            part.buffers["main"][name][0][0],
            part.buffers["main"][name][1][1],
        )
        assert_close(new, expected)
    assert int(states[1].server_buffers["main"]["norm.num_batches_tracked"]) > 0
    size = tree.size(net.params)
    assert outcome.traffic.values_up == 3 * size + 4  # two channels' mean and variance
    assert outcome.traffic.values_down == 3 * size + 4


def test_clipping_is_torchs(backend, net, federation):
    local = dataclasses.replace(LOCAL, clip=0.05, epochs=1, batch_size=512)
    part = take_part(FedAvg(), net, federation, backend, local=local)
    for client in (0, 4, 6):
        module, own = _module(net), federation.train[client]
        optimizer = torch.optim.SGD(
            module.parameters(), local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
        logits = module(federation.normalize(federation.x[own]))
        torch.nn.functional.cross_entropy(logits, federation.y[own]).backward()
        assert float(torch.nn.utils.clip_grad_norm_(module.parameters(), local.clip)) > local.clip
        optimizer.step()
        expected = {name: p.detach() for name, p in module.named_parameters()}
        assert_close(client_row(part.uploads, client), expected, atol=1e-6)


def _module(net: Net) -> torch.nn.Module:
    module = net.copy().module
    module.load_state_dict(net.params)
    return module.train()


def test_small_gradients_and_held_entries_are_not_clipped():
    grads, mask = [torch.tensor([3.0, 4.0]), torch.tensor([100.0])], [None, torch.tensor([False])]
    assert_close(clip_gradients(grads, mask, 10.0, False)[0], torch.tensor([3.0, 4.0]))
    assert_close(clip_gradients(grads, mask, 1.0, False)[0], torch.tensor([0.6, 0.8]))
    rows = clip_gradients([torch.tensor([[3.0, 4.0], [0.3, 0.4]])], [None], 1.0, True)
    assert_close(rows[0], torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
