"""Phases in which some clients have nothing that moves, statistics that hold still, clipped
gradients.
"""

import dataclasses
from dataclasses import dataclass

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
    differing,
    participate,
    record_rounds,
    take_part,
    tiny,
)

EVERYONE = list(range(10))


@dataclass(frozen=True)
class Sitting(FedAvg):
    """After its first phase one more, in which some clients move nothing."""

    who_moves: str = "odd"

    def init(self, params, parts):
        return params, {"seen": torch.zeros(())}

    def phases(self, server, client, params, epochs):
        first = Phase(1, after_gradient=self._observe)
        if self.who_moves == "nobody":
            return [first]
        moves = (client["number"] % 2 == 1) | (self.who_moves == "everyone")
        mask = tree.map(lambda leaf: torch.ones_like(leaf, dtype=torch.bool) & moves, params)
        return [first, Phase(1, mask, "other", after_gradient=self._observe)]

    def _observe(self, server, client, params, grads, batch, loss, kept):
        return {**client, "seen": client["seen"] + loss}


def test_a_phase_in_which_nothing_moves_leaves_no_trace(backend, federation):
    """Neither in losses and statistics of batch normalisation, nor in what is seen at gradients."""
    some, everyone, nobody = (
        take_part(Sitting(who), tiny(norm=True), federation, backend)
        for who in ("odd", "everyone", "nobody")
    )
    same = assert_same if backend == "loop" else assert_close
    for client in EVERYONE:
        for part in ("uploads", "client_states", "buffers", "loss", "after"):
            own, like = getattr(some, part), getattr(everyone if client % 2 else nobody, part)
            same(tree.take(own, client), tree.take(like, client))
    assert differing(everyone.client_states, nobody.client_states)


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
